"""Import: a checkpoint of another program becomes the base of a new run.

    file or folder -> Source -> Adopted -> what it costs -> a save like any other (new_run.py)

Rows are stored as they are: training resumes from exactly the numbers of the file. Random state, a
reader and other extras are not in such files; ``resume`` leaves them as they are.

Invariants:
- What a source claims is checked, and its cost against the source's size, before anything is
  written. Nothing but errors of ours comes out, whatever the source holds.
- The run appears whole, or nothing is left of it.
- What is read is vouched for by whoever imports it: such files have no checksums that we could
  check. It can fail, never execute.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from holdfast import events
from holdfast.checkpoint.format.stored_json import COUNT_MAX
from holdfast.errors import HoldfastError, InvalidRequestError, UnavailableError
from holdfast.interchange.adopt import Naming, adopt, name_by_model, name_by_patterns
from holdfast.interchange.archive.tensors import StoredTensor
from holdfast.interchange.dcpfolder import read_dcp
from holdfast.interchange.dense import load_dense
from holdfast.interchange.new_run import take_cost, write_run
from holdfast.interchange.source import Choice, Source
from holdfast.interchange.torchfile import read_torch
from holdfast.model.model_state import ModelState
from holdfast.storage import as_storage


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
    trust: bool = False
    """Lift the limits on memory and on bytes written, which the size of the source sets."""
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

    ``given`` are fields of ``ImportSettings`` and of ``Choice``. The file is taken at its word: it
    has no checksums that could tell. Nothing in it is ever executed, and what it may cost is
    bounded by its size (boundary/budget.py) unless ``trust`` is given.

    Raises:
        NotFoundError: there is no such file, or it lacks a table.
        InvalidRequestError: it is of another kind, or it is not clear what is what; or it claims
            more than its size allows; or there is a run at the url already.
        CorruptDataError: it is damaged.
        UnavailableError: it cannot be read, or the run cannot be written.
    """
    chosen = _make_settings(settings, given)
    started = time.perf_counter()
    try:
        found = read_source(Path(source), chosen.choice, is_trusted=chosen.trust)
        adopted = adopt(found, _name(found, chosen))
        step = _choose_step(chosen.step, found)
        take_cost(adopted.tables, found.account)
        dense = load_dense(adopted.dense, found.account)
        storage = as_storage(url, chosen.storage_options)
        log = chosen.events or events.EventLog()
        size = write_run(storage, adopted.tables, dense, step, log)
    except HoldfastError:
        raise
    except (MemoryError, RuntimeError) as error:  # the last by torch, and for want of a thread
        raise UnavailableError(
            "there is too little memory to import this", source=str(source)[:480],
            cause=str(error)[:120],
        ) from error  # fmt: skip
    except OSError as error:
        raise UnavailableError(
            f"cannot import: {error.strerror or error}", source=str(source)[:480]
        ) from error
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


def _choose_step(given: int | None, source: Source) -> int:
    step = given if given is not None else source.step or 0
    if not 0 <= step < COUNT_MAX:
        raise InvalidRequestError(
            "no run can have a checkpoint of this step", step=step, most=COUNT_MAX - 1,
            todo="give another: step=, or --step",
        )  # fmt: skip
    return step


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


def read_source(path: Path, choice: Choice, *, is_trusted: bool = False) -> Source:
    """What a file of ``torch.save`` or a folder of DCP holds.

    Raises:
        NotFoundError, InvalidRequestError, CorruptDataError: as their readers.
    """
    read = read_dcp if path.is_dir() else read_torch
    return read(path, choice, is_trusted=is_trusted)


def _name(source: Source, settings: ImportSettings) -> Naming:
    if settings.model is not None:
        return name_by_model(ModelState(settings.model, settings.optimizer))
    return name_by_patterns(source, settings.tables, settings.parameters)
