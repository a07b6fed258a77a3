"""Load a checkpoint into a live model: dense state, reader and extras, random state, rows.

Invariants:
- The model's structure is checked before anything of it is overwritten.
- After an error the model is partly overwritten; the checkpointer then refuses to save it.
- What a checkpoint does not know (None: one imported from another program) stays as it is.

Not here: reading and decoding rows (restore.py), which step to load (checkpoint/checkpointer.py),
the rows of some servers alone (partial.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.boundary.dense import check_aliases, check_row_state, part_of, part_or_none
from holdfast.checkpoint.format.catalog import Catalog, CheckpointEntry
from holdfast.checkpoint.planning.transfer import TABLE, TENSOR, VALUE, Kind, Transfer, pair_names
from holdfast.checkpoint.restoring import fetch, restore
from holdfast.checkpoint.restoring.destination import Held, plan_destinations
from holdfast.checkpoint.tracking import Marks
from holdfast.errors import CorruptDataError, HoldfastError, InvalidRequestError
from holdfast.kernels.rows import bitmap
from holdfast.loading.generators import load_rng_state
from holdfast.loading.reader_state import is_resumable
from holdfast.loading.stateful import READER, like_held
from holdfast.model.load_part import kinds_of_model, load_part
from holdfast.model.model_state import ModelState
from holdfast.model.schema import TableSchema, cuts_of, whole_schema
from holdfast.storage.base import Storage

_OF_RANKS = "load_rank_states"  # what a reader has that takes the states of other numbers of ranks


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
    rank: int = 0,
    ranks: int = 1,
    late_reader: Any = None,
    transfer: Transfer | None = None,
) -> Loaded:
    """Bring a model to the state of a checkpoint; of many ranks each loads what it holds.

    ``transfer``: the model is another one, or only a part of it is loaded; where it says which
    part, reader, extras and random state stay as they are.

    With ``wants_changed`` the answer says which rows differ from the base. ``late_reader`` takes
    the state of a reader that is named later (``Checkpointer.epochs``).

    Raises:
        InvalidRequestError: the checkpoint is of another model, reader or extras.
        CorruptDataError: names what is damaged.
    """
    fetch.check_objects(storage, catalog, [entry.dense])
    dense = fetch.read_dense(storage, entry.dense)
    parts = {name: part_of(dense, name) for name in ("model", "row_state_shapes")}
    parts["optimizers"] = part_or_none(dense, "optimizers")
    for name in ("table_state", "parameters"):  # absent before dense state went by names
        parts[name] = dense.get(name) or {}
    check_aliases(dense, catalog.schema_of(entry))
    check_row_state(dense, catalog.schema_of(entry))
    transfer, pairing = transfer or Transfer(), None
    if not transfer.is_whole:
        pairing = pair_names(
            transfer,
            _kinds_stored(parts, catalog.schema_of(entry)),
            _kinds_of_model(state),
            is_part=ranks > 1,
        )
    own = _Own((), None)
    if transfer.only is None:
        own = _own_state(
            storage, catalog, entry, dense, extras, late_reader,
            rank=rank, ranks=ranks, is_strict=transfer.is_strict,
        )  # fmt: skip
    try:
        if pairing is None:
            state.load_dense(parts, catalog.schema_of(entry))
        else:
            load_part(state, parts, catalog.schema_of(entry), pairing.stored,
                      takes_options=transfer.only is None)  # fmt: skip
    except HoldfastError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise CorruptDataError(
            "dense state does not fit the model", where=entry.dense.describe()
        ) from error
    for load in own.loads:
        load()
    names = None if pairing is None else pairing.stored
    changed, stats = _load_rows(
        storage, catalog, entry, state, wants_changed=wants_changed, names=names
    )
    if own.rng is not None:
        load_rng_state(own.rng)
    if pairing is not None:
        stats = dataclasses.replace(stats, missing=pairing.missing, unexpected=pairing.unexpected)
    return Loaded(stats, entry.dense.bytes, changed, dense.get("pls"))


def _kinds_stored(dense: Mapping[str, Any], schemas: Sequence[TableSchema]) -> dict[str, Kind]:
    """Every name of a checkpoint that can be loaded."""
    found = {
        name: Kind(TENSOR, tuple(value.shape)) if isinstance(value, torch.Tensor) else Kind(VALUE)
        for name, value in dense["model"].items()
    }
    for name, cuts in cuts_of(schemas).items():
        whole = whole_schema(cuts)
        found[name] = Kind(TABLE, (whole.rows, whole.width), whole.columns[0].dtype)
    return found


def _kinds_of_model(state: ModelState) -> dict[str, Kind]:
    """Every name of a model that can be loaded into."""
    return {name: Kind(*kind) for name, kind in kinds_of_model(state).items()}


@dataclass(frozen=True, slots=True)
class _Own:
    """What a rank has of its own: how its reader and extras are loaded, its random state."""

    loads: tuple[Callable[[], object], ...]
    rng: Mapping[str, Any] | None


def _own_state(
    storage: Storage,
    catalog: Catalog,
    entry: CheckpointEntry,
    dense: Mapping[str, Any],
    extras: Mapping[str, Any],
    late_reader: Any,
    *,
    rank: int,
    ranks: int,
    is_strict: bool,
) -> _Own:
    """What one of ``ranks`` ranks takes over of a checkpoint of as many, or of others.

    As many: each rank its own. Others: extras as rank 0 had them; a reader all ranks' states, if
    it can take them; random state as far as there were ranks, the rest keep theirs.
    """
    fetch.check_objects(storage, catalog, entry.ranks)
    saved = max(1, len(entry.ranks))
    is_same = saved == ranks
    own: Mapping[str, Any] | None = dense if rank == 0 else None
    if entry.ranks and rank < saved:
        own = fetch.read_dense(storage, entry.ranks[rank])
    rng = None if own is None else part_or_none(own, "rng")
    stored = part_or_none(own if is_same and own is not None else dense, "extras")
    if stored is None:
        return _Own((), rng)
    if is_same and READER not in extras and is_resumable(stored.get(READER)):
        extras = {**extras, READER: late_reader}
    if not is_strict:
        stored = {name: held for name, held in stored.items() if name in extras}
        extras = {name: item for name, item in extras.items() if name in stored}
    missing = set(extras) ^ set(stored)
    if missing and (is_same or missing != {READER} or READER in extras):
        raise InvalidRequestError(
            "the checkpoint was taken with another reader or other extras",
            checkpoint=sorted(stored),
            given=sorted(extras),
            todo="pass the same reader= and extras=",
        )
    loads = [
        functools.partial(_load_extra, name, item, stored[name])
        for name, item in extras.items()
        if is_same or name != READER
    ]
    if READER in extras and not is_same:
        reader = extras[READER]
        if getattr(reader, _OF_RANKS, None) is None:
            raise InvalidRequestError(
                "the reader's state is of another number of ranks",
                saved=saved,
                ranks=ranks,
                todo="give the reader load_rank_states(states), which takes the states of all "
                "ranks that saved; or pass reader=None and place the reader yourself",
            )
        owns = [fetch.read_dense(storage, extent) for extent in entry.ranks] or [dense]
        states = [part_of(part_of(own, "extras"), READER) for own in owns]
        loads.append(functools.partial(_load_extra, READER, reader, states, method=_OF_RANKS))
    return _Own(tuple(loads), rng)


def _load_extra(name: str, item: Any, state: Any, *, method: str = "load_state_dict") -> None:
    """Give a reader or another extra its state back.

    Raises:
        CorruptDataError: it does not take it.
    """
    try:
        getattr(item, method)(like_held(item, state))
    except HoldfastError:
        raise
    except Exception as error:  # the user's own code, given what a file says
        raise CorruptDataError(
            "an extra does not take its stored state", name=name, error=repr(error)[:200]
        ) from error


def _load_rows(
    storage: Storage,
    catalog: Catalog,
    entry: CheckpointEntry,
    state: ModelState,
    *,
    wants_changed: bool,
    names: Mapping[str, str] | None,
) -> tuple[Marks, restore.RestoreStats]:
    """``names``: stored names by those of the tables here that are loaded; None: all, by theirs."""
    schemas = catalog.schema_of(entry)
    stored = cuts_of(schemas)
    changed = {table.name: bitmap.new(table.rows) for table in state.tables}
    # A table that the checkpoint has as dense state was loaded with that.
    named = {table.whole_name: table.whole_name for table in state.tables}
    named = {here: there for here, there in (names or named).items() if there in stored}
    tables = [table for table in state.tables if table.whole_name in named]
    arrays = {table.name: table.arrays() for table in tables}
    held = [
        Held(
            named[table.whole_name],
            table.shard,
            {
                column.name: array_MD
                for column, array_MD in zip(table.schema().columns, arrays[table.name], strict=True)
            },
            changed[table.name] if wants_changed else None,
        )
        for table in tables
    ]
    for one in held:
        lacking = [c.name for c in stored[one.table][0].columns if c.name not in one.arrays]
        if lacking and names is None:
            raise InvalidRequestError(
                "the checkpoint has row state that this table has no place for",
                table=one.table,
                columns=lacking,
                todo="pass the optimizer that the checkpoint was taken with",
            )
    destinations, joins = plan_destinations(held, schemas)
    stats = restore.restore_to(storage, catalog, entry.step, destinations)
    for join in joins:
        join.run()
    for table in tables:
        table.load_arrays(arrays[table.name])
    return changed, stats
