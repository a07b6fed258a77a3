"""Load a checkpoint into a live model: dense state, reader and extras, random state, rows.

Invariants:
- The model's structure is checked before anything of it is overwritten.
- After an error the model is partly overwritten; the checkpointer then refuses to save it.

Not here: reading and decoding rows (restore.py), which step to load (checkpointer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import fetch, restore
from holdfast.checkpoint.catalog import Catalog, CheckpointEntry
from holdfast.checkpoint.snapshot import load_rng_state
from holdfast.checkpoint.tracker import Marks
from holdfast.errors import CorruptDataError, HoldfastError, InvalidRequestError
from holdfast.kernels import bitmap
from holdfast.placement import Placement
from holdfast.storage.base import Storage
from holdfast.tables import ModelState


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded, how long its rows took, which rows differ from the base, and what the
    checkpoint knows of lost samples."""

    stats: restore.RestoreStats
    dense_bytes: int
    changed: Marks
    pls: Mapping[str, Any] | None


def load_checkpoint(
    storage: Storage,
    catalog: Catalog,
    entry: CheckpointEntry,
    state: ModelState,
    extras: Mapping[str, Any],
    *,
    wants_changed: bool,
) -> Loaded:
    """Bring a model to the state of a checkpoint.

    With ``wants_changed`` the answer says which rows differ from the base.

    Raises:
        InvalidRequestError: the checkpoint is of another model, reader or extras.
        CorruptDataError: names what is damaged.
    """
    fetch.check_objects(storage, catalog, [entry.dense])
    dense = fetch.read_dense(storage, entry.dense)
    try:
        stored_extras, rng = dense["extras"], dense["rng"]
        parts = {name: dense[name] for name in ("model", "optimizers", "row_state_shapes")}
    except (KeyError, TypeError) as error:
        raise CorruptDataError("dense state lacks a part", where=entry.dense.describe()) from error
    if set(extras) != set(stored_extras):
        raise InvalidRequestError(
            "the checkpoint was taken with another reader or other extras",
            checkpoint=sorted(stored_extras),
            given=sorted(extras),
            todo="pass the same reader= and extras=",
        )
    try:
        state.load_dense(parts, catalog.schema_of(entry))
    except HoldfastError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise CorruptDataError(
            "dense state does not fit the model", where=entry.dense.describe()
        ) from error
    for name, item in extras.items():
        item.load_state_dict(stored_extras[name])
    changed, stats = _load_rows(storage, catalog, entry, state, wants_changed=wants_changed)
    load_rng_state(rng)
    return Loaded(stats, entry.dense.bytes, changed, dense.get("pls"))


def _load_rows(
    storage: Storage,
    catalog: Catalog,
    entry: CheckpointEntry,
    state: ModelState,
    *,
    wants_changed: bool,
) -> tuple[Marks, restore.RestoreStats]:
    changed = {table.name: bitmap.new(table.rows) for table in state.tables}
    targets = {table.name: table.arrays() for table in state.tables}
    stats = restore.restore_rows(
        storage, catalog, entry.step, targets, changed=changed if wants_changed else None
    )
    for table in state.tables:
        table.load_arrays(targets[table.name])
    return changed, stats


def prepare_servers(
    storage: Storage,
    catalog: Catalog,
    entry: CheckpointEntry,
    state: ModelState,
    placement: Placement,
    servers: Sequence[int],
) -> Callable[[], restore.RestoreStats]:
    """What brings back the rows of some servers as of a checkpoint, and changes no others.

    Nothing is overwritten before the answer is called.

    Raises:
        InvalidRequestError: the rows of these servers are not stored apart.
    """
    if catalog.shards is not None and catalog.shards.placement != placement:
        raise InvalidRequestError(
            "the rows are stored apart by other servers",
            stored=catalog.shards.placement,
            given=placement,
            todo="save once with these servers, or restore the whole model",
        )
    state.check_parameters()
    state.check_schemas(catalog.schema_of(entry))
    restore.check_complete(catalog, entry.step, servers)

    def load() -> restore.RestoreStats:
        targets = {table.name: table.arrays() for table in state.tables}
        stats = restore.restore_rows(storage, catalog, entry.step, targets, servers=servers)
        for table in state.tables:
            table.load_arrays(targets[table.name])
        return stats

    return load
