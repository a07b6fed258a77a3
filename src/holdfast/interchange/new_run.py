"""A foreign checkpoint as the first checkpoint of a new run: written, read back, or gone.

    tables (rows in files) + DenseState -> a save like any other -> read back

Invariants:
- Rows go part by part through the bounded staging buffer.
- The run appears with its catalog or not at all; after an error, of whatever kind, nothing that was
  written here is left, and nothing that another wrote is touched.
- Success means that readers can open what was written.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from holdfast import events
from holdfast.boundary.budget import Account
from holdfast.checkpoint import run as runs
from holdfast.checkpoint.planning.bases import plan_checkpoint
from holdfast.checkpoint.planning.codecs import plan_codec
from holdfast.checkpoint.planning.save_plan import RunRules, SavePlan
from holdfast.checkpoint.restoring import fetch
from holdfast.checkpoint.restoring import restore as restores
from holdfast.checkpoint.saving.commit import Alone
from holdfast.checkpoint.saving.save import begin_save
from holdfast.checkpoint.saving.snapshot import DenseState, take_rows
from holdfast.checkpoint.saving.staging import BUFFER_BYTES
from holdfast.checkpoint.saving.workbench import Workbench
from holdfast.checkpoint.selecting.selection import Selection
from holdfast.checkpoint.store import catalogs
from holdfast.checkpoint.store.writer import RunWriter
from holdfast.errors import HoldfastError, InvalidRequestError, UnavailableError
from holdfast.interchange.adopt import AdoptedTable
from holdfast.model.schema import TableSchema
from holdfast.model.shard import Shard
from holdfast.storage.base import ObjectWriter, Storage

_STAGING_BUFFERS = 8
_ROW_COPIES = 4  # of a row that is larger than a buffer: staged, encoded, on its way, read back


class _Rows:
    """Rows in files, as a snapshot copies them from a table that is held whole."""

    device = None

    def __init__(self, table: AdoptedTable) -> None:
        self._columns = table.columns
        self._schema = table.schema
        self.shard = Shard(table.schema.rows, table.schema.width)

    def schema(self) -> TableSchema:
        """The columns there are."""
        return self._schema

    def gather_range(self, start: int, stop: int, out: Sequence[np.ndarray]) -> None:
        """Copy the rows ``start`` to ``stop``, every column, into the caller's arrays."""
        for column, out_ND in zip(self._columns, out, strict=True):
            column.rows_into(start, stop, out_ND)


def take_cost(tables: Sequence[AdoptedTable], account: Account) -> None:
    """Take what writing tables costs out of an account.

    Raises:
        InvalidRequestError: it is more than the input's size allows.
    """
    for table in tables:
        schema = table.schema
        claim = f"table {schema.name[:80]!r}"
        account.take_written(schema.rows * schema.row_bytes, claim=claim)
        if schema.row_bytes > BUFFER_BYTES:
            account.take_memory(_ROW_COPIES * schema.row_bytes, claim=claim)


def write_run(
    storage: Storage,
    tables: Sequence[AdoptedTable],
    dense: DenseState,
    step: int,
    log: events.EventLog,
) -> int:
    """Store everything as the first checkpoint of a run, and read it back; its bytes.

    ``dense`` is empty afterwards: its memory is needed for reading it back.

    Raises:
        InvalidRequestError: there is a run already, or what was written cannot be read back.
        UnavailableError: storage failed.
    """
    catalog = catalogs.load_last(storage)
    if catalog is not None:
        raise InvalidRequestError(
            "there is a run already", url=storage.url, steps=len(catalog.steps),
            todo="give a new url",
        )  # fmt: skip
    noting = _Noting(storage)
    writer = RunWriter(cast(Storage, noting), None, log=log, clock=time.time)
    with _leaving_nothing(storage, writer, noting):
        size = _write(writer, tables, dense, step)
        dense.tensors.clear()
        _check_written(storage, tables, step)
    return size


def _write(writer: RunWriter, tables: Sequence[AdoptedTable], dense: DenseState, step: int) -> int:
    schemas = tuple(table.schema for table in tables)
    selections = [Selection(schema.rows) for schema in schemas]
    plan = SavePlan(
        step=step,
        choice=plan_checkpoint("full", None, must_be_base="imported from another program"),
        last_base=step,
        codecs=plan_codec("fp32", "fp32", expected_restores=0, restores=0),
        schemas=schemas,
        rules=RunRules(),
    )
    bytes_max = _STAGING_BUFFERS * BUFFER_BYTES
    with Workbench(bytes_max=bytes_max, threads=restores.default_threads()) as bench:
        committer = Alone(writer)
        taken = list(zip(schemas, selections, strict=True))
        save = begin_save(plan, taken, writer=writer, committer=committer, bench=bench)
        try:
            rows: Any = [_Rows(table) for table in tables]
            take_rows(rows, schemas, selections, bench=bench, out=save.copies.parts)
            save.complete(dense, stall_s=0.0)
            return save.handle.result().bytes
        except BaseException as error:
            save.abandon(error)  # returns when the background half has ended
            raise


def _check_written(storage: Storage, tables: Sequence[AdoptedTable], step: int) -> None:
    """Open the new run as every reader does: its catalog, its objects' frames, its dense state.

    Raises:
        InvalidRequestError: a reader would refuse it.
    """
    try:
        run = runs.open(storage)
        alive = restores.check_complete(run.catalog, step)
        extents = [segment.extent for segment in alive]
        fetch.check_objects(storage, run.catalog, extents)
        run.dense(step)
        is_same = run.tables(step) == tuple(table.schema for table in tables)
    except UnavailableError:
        raise
    except HoldfastError as error:
        raise _unreadable(str(error)[:200]) from error
    if not is_same:
        raise _unreadable("it has other tables")


def _unreadable(cause: str) -> InvalidRequestError:
    return InvalidRequestError("what was imported cannot be read back; it was removed", cause=cause)


class _Noting:
    """A storage that knows what was created through it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.created: list[str] = []

    def create(self, name: str) -> ObjectWriter:
        """Start a new object."""
        self.created.append(name)
        return self._storage.create(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


@contextlib.contextmanager
def _leaving_nothing(storage: Storage, writer: RunWriter, noting: _Noting) -> Iterator[None]:
    """After an error, remove what was written in the block."""
    absent = _absent_folders(storage)
    try:
        yield
    except BaseException:
        with contextlib.suppress(HoldfastError):  # storage fails: the first error says so
            written = catalogs.load_last(storage)
            if written is not None and written.writer == writer.token:
                storage.delete(catalogs.name_of(written.number))
        for name in noting.created:
            with contextlib.suppress(HoldfastError):
                storage.delete(name)
        if absent:
            with contextlib.suppress(HoldfastError):
                storage.clean()  # files that writers did not get to remove
        for folder in absent:
            with contextlib.suppress(OSError):
                folder.rmdir()  # unless somebody else has put something there
        raise


def _absent_folders(storage: Storage) -> list[Path]:
    """Folders of this machine that writing will create, innermost first."""
    if "://" in storage.url:
        return []
    root = Path(storage.url)
    inside = [root / name for name in (".tmp", "objects", "catalog")]
    return [folder for folder in (*inside, root, *root.parents) if not folder.exists()]
