"""Run a training program under a strategy and compare every row of every step with a live copy.

What a restored step must be: with ``full``, ``check-n-run`` and ``incrcp`` the live model at that
save, to the bit. With ``cpr-mfu`` a row is as it was at the save that took it last: as before or as
live; rows that are stale stay marked, so that none is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast as hf
from holdfast import events
from holdfast.kernels.rows import bitmap
from tests.loops.program import Program

HOT = "cpr-mfu"

Columns = dict[str, np.ndarray]  # of one table: "weight", then row state by name


@dataclass(slots=True)
class Lived:
    """What happened: the live tables at every save, what was told, and which rows were stale."""

    live: dict[int, dict[str, Columns]] = field(default_factory=dict)
    events: list[events.Event] = field(default_factory=list)
    pending: dict[str, np.ndarray] = field(default_factory=dict)
    """After the last save: rows that the tracker still has marked, by table."""

    def told(self) -> list[events.TrackingMethod]:
        """What was told of how rows are found."""
        return [event for event in self.events if isinstance(event, events.TrackingMethod)]


def copy_tables(model: nn.Module, optimizers: Iterable[Any]) -> dict[str, Columns]:
    """Every table with its row state, by a plain walk over the model."""
    found: dict[str, Columns] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if not isinstance(module.weight, nn.Parameter) or id(module.weight) in seen:
            continue
        seen.add(id(module.weight))
        columns = {"weight": module.weight.detach().clone().numpy()}
        for optimizer in optimizers:
            for name, value in optimizer.state.get(module.weight, {}).items():
                if torch.is_tensor(value) and value.ndim and len(value) == len(module.weight):
                    if value.layout == torch.sparse_coo:
                        columns[f"sparse:{name}"] = value.detach().to_dense().numpy().copy()
                    else:
                        columns[name] = value.detach().clone().numpy()
        found[f"{path}.weight" if path else "weight"] = columns
    return found


def stored_tables(run: hf.Run, step: int) -> dict[str, Columns]:
    """Every table of a step as a reader gets it."""
    found: dict[str, Columns] = {}
    beside = run.dense(step)["table_state"]
    for schema in run.tables(step):
        rows = run.read(step, schema.name)
        found[schema.name] = {"weight": rows.weight, **rows.state}
        for name, value in beside.get(schema.name, {}).items():
            if torch.is_tensor(value) and value.layout == torch.sparse_coo:
                found[schema.name][f"sparse:{name}"] = value.to_dense().numpy()
    return found


def live_through(
    program: Program,
    folder: Path,
    *,
    strategy: str,
    saves: int,
    steps_a_save: int = 3,
    lived: Lived | None = None,
    **settings: Any,
) -> Lived:
    """Train and save; the live tables are copied at every save. Resumes what the folder holds."""
    lived = Lived() if lived is None else lived
    with hf.Checkpointer(
        folder,
        model=program.model,
        optimizer=program.optimizers or None,
        strategy=strategy,
        codec="fp32",
        events=lived.events.append,
        **settings,
    ) as ck:
        begun = ck.resume() or 0
        for step in range(begun + 1, begun + saves * steps_a_save + 1):
            program.step(step)
            ck.step()
            if step % steps_a_save == 0:
                lived.live[step] = copy_tables(program.model, program.optimizers)
                ck.save().result()
        lived.pending = {
            name: bitmap.ids(words_W, 0, 64 * len(words_W))
            for name, words_W in ck._changed._cursor.peek().items()
        }
    return lived


def stale_rows(stored: Columns, live: Columns) -> np.ndarray:
    """Rows that differ in any bit of any column."""
    assert sorted(stored) == sorted(live), "other columns are stored than the optimizer has"
    rows = len(live["weight"])
    is_stale = np.zeros(rows, bool)
    for name, column in live.items():
        bits = column.reshape(rows, -1).view(np.uint32)
        is_stale |= (stored[name].reshape(rows, -1).view(np.uint32) != bits).any(1)
    return np.flatnonzero(is_stale)


def stale_by_step(folder: Path, lived: Lived) -> dict[int, dict[str, list[int]]]:
    """By step and table, the rows that would come back otherwise than they were."""
    run = hf.open(folder)
    found: dict[int, dict[str, list[int]]] = {}
    assert set(lived.live) == set(run.steps)
    for step, live in lived.live.items():
        stored = stored_tables(run, step)
        assert sorted(stored) == sorted(live)
        by_table = {name: stale_rows(stored[name], live[name]).tolist() for name in live}
        found[step] = {name: rows for name, rows in by_table.items() if rows}
    return {step: tables for step, tables in found.items() if tables}


def check_exact(folder: Path, lived: Lived) -> None:
    """Every row of every step is as it was."""
    stale = stale_by_step(folder, lived)
    shown = {
        step: {name: (len(rows), rows[:5]) for name, rows in tables.items()}
        for step, tables in stale.items()
    }
    assert not stale, f"stale rows by step and table (count, first): {shown}"


def check_hot(folder: Path, lived: Lived) -> None:
    """Every row of every step is as the save before had it, or as it was; none is forgotten."""
    run = hf.open(folder)
    before: dict[str, Columns] = {}
    for step, live in sorted(lived.live.items()):
        stored = stored_tables(run, step)
        is_base = run.info(step).kind == "base"
        for name, columns in live.items():
            stale = stale_rows(stored[name], columns)
            if is_base:
                assert not len(stale), (step, name, stale[:5])
            elif len(stale):
                # Sparse momentum goes along whole, as of this step: only rows can be older.
                kept = {key for key in columns if not key.startswith("sparse:")}
                now = {key: stored[name][key][stale] for key in kept}
                old = {key: before[name][key][stale] for key in kept}
                assert not len(stale_rows(now, old)), (step, name, "neither as before nor as live")
        before = stored
    last = max(lived.live)
    for name, columns in lived.live[last].items():
        stale = stale_rows(before[name], columns)
        forgotten = np.setdiff1d(stale, lived.pending[name])
        assert not len(forgotten), f"{name}: {len(forgotten)} stale rows are not marked"


def check(folder: Path, lived: Lived, *, strategy: str) -> None:
    """What the strategy promises, of every row of every step."""
    assert not [told for told in lived.told() if "tracking failed" in told.reason]
    if strategy == HOT:
        check_hot(folder, lived)
    else:
        check_exact(folder, lived)
