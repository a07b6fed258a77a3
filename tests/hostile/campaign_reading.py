"""Ways to read a mutated run, and to look at it: each returns the rows it saw.

They call what users call, or the functions right under a command. That one raises something that is
not ours, or sees other rows than the others, is for the judge to say (campaign_judge.py).

# N rows, D numbers of one column
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import holdfast as hf
from holdfast.checkpoint.diff import diff_steps
from holdfast.cli import grid as grids
from holdfast.cli.commands import inspect as inspecting
from holdfast.model.dtypes import array_dtype, for_users
from holdfast.model.schema import TableSchema
from holdfast.report import changes, inspection
from holdfast.report import grid as grid_report
from tests.hostile.campaign_poison import poisoned
from tests.hostile.campaign_runs import Prey
from tests.hostile.campaign_storage import MemoryStorage

ROWS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Seen:
    """Rows of one column of a table as an operation saw them; ``ids`` None: all of them."""

    step: int
    table: str
    column: str
    rows: np.ndarray
    ids: np.ndarray | None = None


@dataclass(slots=True)
class Target:
    """A mutated run, what it was made of, and a place for files."""

    prey: Prey
    storage: MemoryStorage
    out: Path
    rng: random.Random
    opened: hf.Run | None
    notes: list[str] = field(default_factory=list)
    """What an operation found wrong by itself."""

    @property
    def run(self) -> hf.Run:
        """The run; where it cannot be opened, only commands look at it."""
        assert self.opened is not None
        return self.opened

    def step(self) -> int:
        """Some step; most often the last."""
        return self.run.steps[-1] if self.rng.random() < 0.5 else self.rng.choice(self.run.steps)

    def table(self, step: int) -> TableSchema:
        """Some table of a step."""
        found = self.run.tables(step)
        if not found:
            raise hf.NotFoundError("no tables")
        return self.rng.choice(found)


Operation = Callable[[Target], list[Seen]]


def _read(step: int, schema: TableSchema, rows: hf.Rows, ids: np.ndarray | None) -> list[Seen]:
    names = [schema.columns[0].name, *rows.state]
    found = zip(names, [rows.weight, *rows.state.values()], strict=True)
    return [Seen(step, schema.name, name, rows_ND, ids) for name, rows_ND in found]


def read_all(target: Target) -> list[Seen]:
    """Every row of one table."""
    step = target.step()
    schema = target.table(step)
    return _read(step, schema, target.run.read(step, schema.name), None)


def read_rows(target: Target) -> list[Seen]:
    """Some rows of one table, in any order: a few, or most."""
    step = target.step()
    schema = target.table(step)
    count = min(schema.rows, ROWS_MAX)
    few = max(1, count // target.rng.choice((1, 5, 5, 20, 20)))
    ids = np.array([target.rng.randrange(max(1, count)) for _ in range(few)], np.int64)
    rows = target.run.read(step, schema.name, ids)
    if len(rows.weight) != len(ids) or any(len(v) != len(ids) for v in rows.state.values()):
        target.notes.append(f"asked for {len(ids)} rows, got {rows.weight.shape}")
        return []
    return _read(step, schema, rows, ids)


def restore_into(target: Target) -> list[Seen]:
    """All tables of a step into arrays of the caller's."""
    step = target.step()
    schemas = target.run.tables(step)
    if sum(s.rows * s.row_bytes for s in schemas) > 1 << 24:
        target.run.read(step, schemas[0].name)
        return []
    arrays = {
        s.name: [poisoned(np.empty((s.rows, c.width), array_dtype(c.dtype))) for c in s.columns]
        for s in schemas
    }
    target.run.restore_into(step, arrays)
    return [
        Seen(step, s.name, c.name, for_users(rows_ND))
        for s in schemas
        for c, rows_ND in zip(s.columns, arrays[s.name], strict=True)
    ]


def dense(target: Target) -> list[Seen]:
    """Dense state, and what ranks have of their own."""
    step = target.step()
    target.run.dense(step)
    target.run.ranks(step)
    return []


def updates(target: Target) -> list[Seen]:
    """What leads from an older step to the last, applied to the rows of the older one."""
    run, last = target.run, target.run.steps[-1]
    since = target.rng.choice(run.steps)
    tables = {
        part.name: (schema, part)
        for schema in run.tables(last)
        for part in run.stored(last, schema.name)
        if part.cut is None
    }
    copies: dict[str, np.ndarray] = {}
    for name, ids_N, rows_ND in run.updates(since):
        if name not in copies and name in tables:
            copies[name] = run.read(since, name).weight
        if name in copies:
            copies[name][ids_N] = rows_ND
    return [
        Seen(last, name, tables[name][1].columns[0].name, copies[name])
        for name in copies
    ]  # fmt: skip


def diff(target: Target) -> list[Seen]:
    """What changed between two steps; told, and compared with what both read as."""
    run = target.run
    a, b = target.rng.choice(run.steps), target.rng.choice(run.steps)
    found = diff_steps(run, a, b)
    if target.rng.random() < 0.1:
        seen = changes.Changes(run.url, found, 0, 0.0)
        json.dumps(seen.to_dict())
        _draw(changes.render(seen))
    shown = []
    for table in target.rng.sample(found.tables, min(2, len(found.tables))):
        old, new = (run.read(step, table.table).weight for step in (found.a, found.b))
        differs = (_bits(old) != _bits(new)).any(axis=1)
        if int(differs.sum()) != table.changed:
            target.notes.append(f"diff counts {table.changed} rows, {int(differs.sum())} differ")
        name = next(t for t in run.tables(found.b) if t.name == table.table).columns[0].name
        shown += [Seen(found.a, table.table, name, old), Seen(found.b, table.table, name, new)]
    return shown


def _bits(rows_ND: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows_ND).view(f"u{rows_ND.itemsize}")


def inspect(target: Target) -> list[Seen]:
    """``holdfast inspect``."""
    step = target.step()
    seen = inspecting.look(target.run, step, only=target.rng.random() < 0.3)
    json.dumps(seen.to_dict())
    if target.rng.random() < 0.15:
        _draw(inspection.render(seen, width=100, lines_max=30))
    return []


def grid(target: Target) -> list[Seen]:
    """``holdfast inspect --grid``."""
    step = target.rng.choice((None, target.step()))
    view = grids.look(target.run, step=step)
    json.dumps(view.to_dict())
    if target.rng.random() < 0.15:
        _draw(grid_report.render(view, width=100, by="bytes", lines_max=30))
    return []


def _draw(drawn: Any) -> None:
    out = io.StringIO()
    Console(file=out, highlight=False, width=100).print(drawn)
    if has_controls(out.getvalue()):
        raise AssertionError("control characters reach the terminal")


def has_controls(text: str) -> bool:
    """Whether a terminal would take something in a text as more than text."""
    return any((ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 for c in text)
