"""Import: a checkpoint of another program becomes the base of a new run.

    file or folder -> Source -> Adopted -> a save like any other (encode, store, commit)

Rows are stored as they are: training resumes from exactly the numbers of the file. Random state, a
reader and other extras are not in such files; ``resume`` leaves them as they are.

Invariants:
- Rows are read from mapped files part by part, through the bounded staging buffer.
- The run appears with its catalog or not at all; after an error no object of it is left.
- What is read is vouched for by whoever imports it: such files have no checksums that we could
  check. It can fail, never execute.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast import events
from holdfast.checkpoint import commit as catalogs
from holdfast.checkpoint import restore as restores
from holdfast.checkpoint import tree
from holdfast.checkpoint.alone import Alone
from holdfast.checkpoint.baseline import plan_checkpoint
from holdfast.checkpoint.order import make_order
from holdfast.checkpoint.retention import as_keep
from holdfast.checkpoint.save import Save
from holdfast.checkpoint.selection import Selection
from holdfast.checkpoint.snapshot import DenseState, take_rows
from holdfast.checkpoint.staging import BUFFER_BYTES
from holdfast.checkpoint.strategy import plan_codec
from holdfast.checkpoint.workbench import Workbench
from holdfast.checkpoint.writer import RunWriter
from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.interchange.adopt import (
    Adopted,
    AdoptedTable,
    Naming,
    adopt,
    name_by_model,
    name_by_patterns,
)
from holdfast.interchange.dcpfolder import read_dcp
from holdfast.interchange.source import Choice, Source, StoredTensor
from holdfast.interchange.torchfile import read_torch
from holdfast.modelstate import ModelState
from holdfast.pieces import Piece
from holdfast.schema import TableSchema
from holdfast.storage import as_storage
from holdfast.storage.base import Storage

_STAGING_BUFFERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSettings:
    """What an import may be told."""

    model: torch.nn.Module | None = None
    """Says which tensors are tables; it is not changed."""
    optimizer: Any = None
    """With a model: one optimizer, a list or a dict, as a Checkpointer takes it; not changed."""
    tables: Sequence[str] | None = None
    """Without a model: names of tables in the file's ``state_dict``; * is anything."""
    parameters: Sequence[str] | None = None
    """Without a model: names of the optimizers' parameters in their order, where the file does not
    say them and shapes do not tell them apart."""
    step: int | None = None
    """Of the base; None: what the file says, or 0."""
    choice: Choice = field(default_factory=Choice)
    events: events.EventLog | None = None
    storage_options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import made."""

    url: str
    source: str
    format: str
    step: int
    tables: int
    rows: int
    tensors: int
    """Dense ones of the model."""
    optimizers: int
    """0: the file holds none, or they were left out."""
    state_columns: int
    """Kinds of row state, of all tables."""
    bytes: int
    seconds: float


def import_checkpoint(
    source: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    settings: ImportSettings | None = None,
    **given: Any,
) -> Imported:
    """Make a file of ``torch.save``, or a folder of torch.distributed.checkpoint, a run's base.

    ``given`` are fields of ``ImportSettings`` and of ``Choice``. The file is trusted to hold what
    it should: it has no checksums that could tell; nothing in it is ever executed.

    Raises:
        NotFoundError: there is no such file, or it lacks a table.
        InvalidRequestError: it is of another kind, or it is not clear what is what; or there is a
            run at the url already.
        CorruptDataError: it is damaged.
    """
    chosen = _make_settings(settings, given)
    started = time.perf_counter()
    found = read_source(Path(source), chosen.choice)
    adopted = adopt(found, _name(found, chosen))
    step = chosen.step if chosen.step is not None else found.step or 0
    if step < 0:
        raise InvalidRequestError("a step is not negative", step=step)
    dense = _load_dense(adopted.dense)
    folder = _missing_folder(os.fspath(url))
    try:
        storage = as_storage(url, chosen.storage_options)
        size = _write(storage, adopted, dense, step, chosen.events or events.EventLog())
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return Imported(
        url=storage.url,
        source=found.path,
        format=found.format,
        step=step,
        tables=len(adopted.tables),
        rows=sum(table.schema.rows for table in adopted.tables),
        tensors=sum(isinstance(v, StoredTensor) for v in adopted.dense["model"].values()),
        optimizers=len(adopted.dense["optimizers"] or {}),
        state_columns=sum(len(table.columns) - 1 for table in adopted.tables),
        bytes=size,
        seconds=time.perf_counter() - started,
    )


def _make_settings(settings: ImportSettings | None, given: Mapping[str, Any]) -> ImportSettings:
    of_choice = {item.name for item in dataclasses.fields(Choice)}
    known = {item.name for item in dataclasses.fields(ImportSettings)} | of_choice
    unknown = sorted(set(given) - known)
    if unknown:
        raise InvalidRequestError("unknown setting", given=unknown, known=sorted(known))
    base = settings or ImportSettings()
    choice = {name: value for name, value in given.items() if name in of_choice}
    rest = {name: value for name, value in given.items() if name not in of_choice}
    if choice:
        rest["choice"] = dataclasses.replace(rest.get("choice", base.choice), **choice)
    made = dataclasses.replace(base, **rest)
    if made.model is not None and (made.tables is not None or made.parameters is not None):
        raise InvalidRequestError(
            "a model says itself which tensors are tables", todo="leave tables= and parameters= out"
        )
    if made.model is None and made.optimizer is not None:
        raise InvalidRequestError("an optimizer without its model", todo="pass model= too")
    return made


def read_source(path: Path, choice: Choice) -> Source:
    """What a file of ``torch.save`` or a folder of DCP holds.

    Raises:
        NotFoundError, InvalidRequestError, CorruptDataError: as their readers.
    """
    try:
        return read_dcp(path, choice) if path.is_dir() else read_torch(path, choice)
    except RecursionError as error:
        raise CorruptDataError("the file's structure has no end", path=str(path)) from error


def _name(source: Source, settings: ImportSettings) -> Naming:
    if settings.model is not None:
        return name_by_model(ModelState(settings.model, settings.optimizer))
    return name_by_patterns(source, settings.tables, settings.parameters)


def _load_dense(dense: Mapping[str, Any]) -> DenseState:
    """Dense state as a checkpoint has it; this is small and may be whole in memory."""
    structure, tensors = tree.flatten(_loaded(dense))
    return DenseState(structure, tensors)


def _loaded(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return value.whole()
    if isinstance(value, Mapping):
        return {key: _loaded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_loaded(item) for item in value]
    return value


class _Rows:
    """Rows in files, as a snapshot copies them from a table that is held whole."""

    device = None

    def __init__(self, table: AdoptedTable) -> None:
        self._columns = table.columns
        self._schema = table.schema
        self.piece = Piece(table.schema.rows, table.schema.width)

    def schema(self) -> TableSchema:
        """The columns there are."""
        return self._schema

    def gather_range(self, start: int, stop: int, out: Sequence[np.ndarray]) -> None:
        """Copy the rows ``start`` to ``stop``, every column, into the caller's arrays."""
        for column, out_ND in zip(self._columns, out, strict=True):
            column.rows_into(start, stop, out_ND)


def _write(
    storage: Storage, adopted: Adopted, dense: DenseState, step: int, log: events.EventLog
) -> int:
    """Store everything as the first checkpoint of a run; its bytes."""
    catalog = catalogs.load_last(storage)
    if catalog is not None:
        raise InvalidRequestError(
            "there is a run already", url=storage.url, steps=len(catalog.steps),
            todo="give a new url",
        )  # fmt: skip
    writer = RunWriter(storage, None, log=log, clock=time.time)
    schemas = tuple(table.schema for table in adopted.tables)
    selections = [Selection(schema.rows) for schema in schemas]
    order = make_order(
        plan_checkpoint("full", None, must_be_base="imported from another program"),
        base=step,
        rewind_to=None,
        schemas=schemas,
        codecs=plan_codec("fp32", "fp32", expected_restores=0, restores=0),
        selections=list(zip(schemas, selections, strict=True)),
        step=step,
        keep=as_keep(None),
        has_grid=False,
    )
    bytes_max = _STAGING_BUFFERS * BUFFER_BYTES
    with Workbench(bytes_max=bytes_max, threads=restores.default_threads()) as bench:
        save = Save(order, writer, committer=Alone(writer), bench=bench)
        try:
            rows: Any = [_Rows(table) for table in adopted.tables]
            take_rows(rows, schemas, selections, bench=bench, out=save.parts)
            save.finish_staging(dense, 0.0)
        except BaseException as error:
            save.abandon(error)
            raise
        return save.durable().bytes


def _missing_folder(url: str) -> Path | None:
    """The folder an import would create, to be removed after an error; None: it was there."""
    if "://" in url and not url.startswith("file://"):
        return None
    path = Path(url.removeprefix("file://"))
    return None if path.exists() else path
