"""Some rows of a table: the newest version of each, by few round trips to the storage."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.checkpoint.restoring.read_rows import Holding, plan_sources, read_rows
from holdfast.storage import open_storage
from tests.unit.checkpoint.lives import LEFT, ROWS, Life


class Recording:
    """A storage that writes down its reads; with ``meets`` the first of them waits for another."""

    def __init__(self, url: str, *, meets: bool = False) -> None:
        self._inner = open_storage(url)
        self.reads: list[tuple[str, int, int]] = []
        self.have_met = threading.Event()
        self._meets = meets
        self._under_way = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _note(self, name: str, offset: int, length: int) -> None:
        with self._lock:
            self.reads.append((name, offset, length))
            self._under_way += 1
            if self._under_way > 1:
                self.have_met.set()
        if self._meets:
            self.have_met.wait(20)
        with self._lock:
            self._under_way -= 1

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        found: bytes = self._inner.get(name, offset=offset, length=length)
        self._note(name, offset, len(found))
        return found

    def get_into(self, name: str, buffer: Any, *, offset: int = 0) -> None:
        self._inner.get_into(name, buffer, offset=offset)
        self._note(name, offset, memoryview(buffer).nbytes)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """A base and forty increments of a few rows each, none of them extracted."""
    with Life(tmp_path) as life:
        life.save(is_base=True)
        for _ in range(40):
            life.save(life.rng.choice(ROWS[LEFT], 12, replace=False))
        yield life


def test_rows_of_many_increments_are_read_exactly(life: Life) -> None:
    run = life.run()
    for step in (run.steps[0], run.steps[7], run.steps[-1]):
        for count in (1, 2, 20, 74):
            ids = life.rng.choice(ROWS[LEFT], count, replace=False)
            found = run.read(step, LEFT, ids)
            assert found.weight.tobytes() == life.states[step][LEFT][ids].tobytes()


def test_requests_of_a_read_do_not_wait_for_each_other(life: Life) -> None:
    storage = Recording(life.storage.url, meets=True)
    run = hf.open(life.storage.url)
    step = run.steps[-1]
    ids = np.unique([int(life.changed[step][LEFT][0]) for step in run.steps[-8:]])
    schema = run.stored(step, LEFT)[0]
    columns = read_rows(storage, run.catalog, step, schema, ids)  # type: ignore[arg-type]
    assert columns[0].tobytes() == life.states[step][LEFT][ids].tobytes()
    assert storage.have_met.is_set()


def test_a_row_of_the_newest_increment_is_read_from_that_alone(life: Life) -> None:
    storage = Recording(life.storage.url)
    run = hf.open(life.storage.url)
    step = run.steps[-1]
    row = life.changed[step][LEFT][:1]
    read_rows(storage, run.catalog, step, run.stored(step, LEFT)[0], row)  # type: ignore[arg-type]
    newest = run.catalog.alive(step, LEFT)[-1]
    assert {name for name, _, _ in storage.reads} == {newest.extent.object}


def test_the_newest_version_wins_and_older_ones_are_not_read() -> None:
    new, old = SimpleNamespace(born=9), SimpleNamespace(born=3)
    is_open_N = np.ones(4, bool)
    sources = plan_sources(
        [
            Holding(new, np.array([1, 2]), np.array([0, 1])),  # type: ignore[arg-type]
            Holding(old, np.array([1, 2]), np.array([5, 6])),  # type: ignore[arg-type]
        ],
        is_open_N,
    )
    assert [source.entry for source in sources] == [new]
    assert is_open_N.tolist() == [True, False, False, True]


def test_a_row_twice_in_one_birth_is_damage() -> None:
    def holding(position: int) -> Holding:
        entry = SimpleNamespace(born=3, table="t", extent=SimpleNamespace(describe=lambda: "here"))
        return Holding(entry, np.array([1]), np.array([position]))  # type: ignore[arg-type]

    with pytest.raises(hf.CorruptDataError, match="stored twice"):
        plan_sources([holding(0), holding(4)], np.ones(2, bool))
