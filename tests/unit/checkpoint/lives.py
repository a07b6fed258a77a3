"""A run of two small tables whose every version is written down: the oracle of the grid's tests.

Rows are changed by hand and declared (``ck.mark``), so that a test says exactly which rows an
increment holds. ``Life.versions`` knows every version there ever was on the current timeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

import holdfast as hf
from holdfast import events
from holdfast.checkpoint.format.catalog import Catalog, RestoreTiming, SegmentEntry
from holdfast.checkpoint.restoring.fetch import PartReader
from holdfast.checkpoint.restoring.restore import RestoreStats, restore_rows
from holdfast.storage import Storage, open_storage

LEFT, RIGHT = "left.weight", "right.weight"
ROWS = {LEFT: 300, RIGHT: 90}
WIDTH = {LEFT: 4, RIGHT: 3}

Version = tuple[str, int, int]  # table, row, born


class Pair(nn.Module):
    """Two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Embedding(ROWS[LEFT], WIDTH[LEFT], sparse=True)
        self.right = nn.Embedding(ROWS[RIGHT], WIDTH[RIGHT], sparse=True)


class Life:
    """A training that saves at every step, and remembers each."""

    def __init__(
        self,
        storage: Storage | Path | str,
        *,
        seed: int = 0,
        extract: hf.Extract | None = None,
        base: str = "recovery-time",
        codec: str = "fp32",
        rollups: bool = False,
        **settings: Any,
    ) -> None:
        self.storage = open_storage(str(storage)) if isinstance(storage, Path | str) else storage
        self.rng = np.random.default_rng(seed)
        self.model = Pair()
        self.events: list[events.Event] = []
        self.states: dict[int, dict[str, np.ndarray]] = {}
        self.changed: dict[int, dict[str, np.ndarray]] = {}
        self.ck = hf.Checkpointer(
            self.storage,
            model=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.1),
            strategy=hf.Strategy("mine", base=base, codec=codec, extract=extract, rollups=rollups),
            threads=1,
            events=self._hear,
            **settings,
        )

    def _hear(self, event: events.Event) -> None:
        self.events.append(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.ck.close()

    def continued(self, **settings: Any) -> Life:
        """The same run taken over by another process."""
        self.ck.close()
        other = Life(self.storage, **settings)
        other.states, other.changed = dict(self.states), dict(self.changed)
        other.rng = self.rng
        other.ck.resume()
        return other

    def heard(self, kind: type[events.Event]) -> list[Any]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def weights(self) -> dict[str, np.ndarray]:
        """The tables' own memory."""
        return {
            LEFT: self.model.left.weight.detach().numpy(),
            RIGHT: self.model.right.weight.detach().numpy(),
        }

    def change(self, table: str, ids: Iterable[int]) -> None:
        """Give some rows new values."""
        ids_N = np.unique(np.asarray(list(ids), np.int64))
        if len(ids_N):
            news = self.rng.normal(size=(len(ids_N), WIDTH[table])).astype(np.float32)
            with torch.no_grad():
                self.weights()[table][ids_N] = news
            self.ck.mark(table, ids_N)

    def save(
        self, left: Iterable[int] = (), right: Iterable[int] = (), *, is_base: bool = False
    ) -> int:
        """Change these rows and take a checkpoint; the step."""
        left, right = list(left), list(right)
        self.change(LEFT, left)
        self.change(RIGHT, right)
        self.ck.step()
        self.expect_base(is_base=is_base or not self.ck.all_steps())
        step = self.ck.save().result().step
        self.note(step, left, right)
        return step

    def expect_base(self, *, is_base: bool) -> None:
        """Make the recovery-time policy decide so: as if the last restore was slow, or fast."""
        slow = RestoreTiming(1, 1e-9, 1, 1e9 if is_base else 0.0)
        self.ck._writer.note(lambda now: dataclasses.replace(now, restore_timings=(slow,)))

    def note(self, step: int, left: Iterable[int], right: Iterable[int]) -> None:
        """What a committed step was; what came after it before is forgotten."""
        for known in [known for known in self.states if known >= step]:
            del self.states[known], self.changed[known]
        self.states[step] = {name: rows.copy() for name, rows in self.weights().items()}
        entry = self.ck._writer.catalog.checkpoint(step)
        is_base = entry.kind == "base"
        self.changed[step] = {
            name: np.arange(ROWS[name]) if is_base else np.unique(np.asarray(list(ids), np.int64))
            for name, ids in ((LEFT, left), (RIGHT, right))
        }

    # What must hold.

    def run(self) -> hf.Run:
        """The run as a reader sees it now."""
        return hf.open(self.storage.url)

    def restored(self, run: hf.Run, step: int) -> tuple[dict[str, np.ndarray], RestoreStats]:
        """Every row as of a step, and what that cost."""
        targets = {
            name: [np.full((rows, WIDTH[name]), np.nan, np.float32)] for name, rows in ROWS.items()
        }
        stats = restore_rows(run.storage, run.catalog, step, targets, threads=1)
        return {name: columns[0] for name, columns in targets.items()}, stats

    def assert_exact(self) -> dict[int, RestoreStats]:
        """Every kept step restores to the bit, whole and some rows; what each restore cost."""
        run = self.run()
        found = {}
        assert run.steps == self.ck.all_steps()
        for step in run.steps:
            rows, found[step] = self.restored(run, step)
            for table, expected in self.states[step].items():
                assert rows[table].tobytes() == expected.tobytes(), (step, table)
                some = self.rng.choice(ROWS[table], 9, replace=False)
                read = run.read(step, table, some)
                assert read.weight.tobytes() == expected[some].tobytes(), (step, table, some)
        return found

    def chunks(self, catalog: Catalog | None = None) -> list[SegmentEntry]:
        """The segments of all grids."""
        catalog = catalog or self.run().catalog
        bases = {entry.base for entry in catalog.checkpoints}
        return [s for s in catalog.segments if s.born not in bases]

    def stored(self) -> list[tuple[Version, int | None]]:
        """Every version that the grids' chunks hold, and when its chunk died."""
        reader = PartReader(self.storage)
        return [
            ((s.table, int(row), s.born), s.died)
            for s in self.chunks()
            for row in reader.ids(s).tolist()
        ]

    def needed(self) -> dict[Version, int | None]:
        """Every version since a base that a kept step needs, and when it died."""
        kept = self.run().steps
        base_of = {e.step: e.base for e in self.run().catalog.checkpoints}
        born: dict[tuple[str, int], int] = {}
        found: dict[Version, int | None] = {}
        bases = set(base_of.values())
        lives: list[tuple[Version, int | None]] = []
        for step in sorted(self.changed):
            for table, ids in self.changed[step].items():
                for row in ids.tolist():
                    before = born.get((table, row))
                    if before is not None:
                        lives.append(((table, row, before), step))
                    born[table, row] = step
        lives += [((table, row, at), None) for (table, row), at in born.items()]
        for version, died in lives:
            at = version[2]
            if at not in bases and any(at <= s and (died is None or s < died) for s in kept):
                found[version] = died
        return found
