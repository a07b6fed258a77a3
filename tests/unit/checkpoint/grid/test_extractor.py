"""When rounds run: after commits, one at a time, never during a snapshot or a restore."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import events
from holdfast.checkpoint.grid.extract import Round
from holdfast.checkpoint.grid.extractor import Extractor
from holdfast.checkpoint.grid.round_plan import ChunkPlan, RoundPlanner
from holdfast.storage import open_storage
from holdfast.storage.base import Storage
from tests.unit.checkpoint.lives import LEFT, Life

PURE = hf.Extract(threshold=0)


def test_snapshot_finds_extraction_standing_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks touched while a snapshot is taken: at most the one that was under way."""
    touched: list[float] = []
    inner = RoundPlanner.chunk_plans

    def slow(self: RoundPlanner) -> Iterator[ChunkPlan | None]:
        for plan in inner(self):
            touched.append(time.perf_counter())
            time.sleep(0.003)
            yield plan

    with Life(tmp_path, extract=PURE) as life:
        life.save()
        with life.ck._extractor.stopped():
            for index in range(12):
                life.save(range(index, 300, 7))
        life.ck.wait()
        monkeypatch.setattr(RoundPlanner, "chunk_plans", slow)
        life.save(range(0, 300, 5))  # a round over a dozen chunks begins
        while len(touched) < 2:
            time.sleep(0.001)
        with life.ck._extractor.paused():
            time.sleep(0.02)  # what was under way is over now
            count = len(touched)
            time.sleep(0.05)
            assert len(touched) == count
            assert life.ck._extractor._thread is not None
        life.ck.wait()
        assert len(touched) > count + 3
        assert life.heard(events.Extracted)[-1].wait_s >= 0.05
        life.assert_exact()


def test_save_pauses_extraction_while_rows_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    from holdfast.checkpoint import saver

    inner = saver.take_rows

    def watched(*args: object, **named: object) -> None:
        seen.append(life.ck._extractor._may_move.is_set())
        inner(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(saver, "take_rows", watched)
    with Life(tmp_path, extract=PURE) as life:
        for _ in range(3):
            life.save(range(0, 50, 3))
        assert life.ck._extractor._may_move.is_set()
    assert seen == [False] * 3


def test_snapshot_that_fails_lets_extraction_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.checkpoint import saver

    with Life(tmp_path, extract=PURE) as life:
        life.save()
        life.save(range(0, 50, 3))

        def fail(*args: object, **named: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(saver, "take_rows", fail)
        life.change(LEFT, [3])
        life.ck.step()
        with pytest.raises(KeyboardInterrupt):
            life.ck.save()
        monkeypatch.undo()
        assert life.ck._extractor._may_move.is_set()
        life.ck.save().result()
        life.note(life.ck.current_step, [3], [])
        life.ck.wait()
        assert life.run().catalog.grids[0].through == life.ck.current_step
        life.assert_exact()


def test_restore_gives_a_round_up_and_it_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, may_go = threading.Event(), threading.Event()
    inner = RoundPlanner.chunk_plans

    def held(self: RoundPlanner) -> Iterator[ChunkPlan | None]:
        for plan in inner(self):
            reached.set()
            assert may_go.wait(30)
            yield plan

    with Life(tmp_path, extract=PURE) as life:
        life.save()
        with life.ck._extractor.stopped():
            for index in range(4):
                life.save(range(index, 300, 7))
        life.ck.wait()
        monkeypatch.setattr(RoundPlanner, "chunk_plans", held)
        life.save(range(0, 300, 5))
        assert reached.wait(30)
        through = life.run().catalog.grids[0].through
        threading.Timer(0.05, may_go.set).start()
        life.ck.restore(3)
        assert life.weights()[LEFT].tobytes() == life.states[3][LEFT].tobytes()
        life.ck.wait()
        assert life.run().catalog.grids[0].through == life.ck.all_steps()[-1] > through
        assert not life.heard(events.ExtractionFailed)
        life.assert_exact()


class HeldDeletes:
    """A storage where a round's deletions wait until they are let go."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.may_delete = threading.Event()
        self.is_reached = threading.Event()
        self.has_given_up = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def url(self) -> str:
        return self._inner.url

    def delete(self, name: str) -> None:
        if threading.current_thread().name == "holdfast-extract":
            self.is_reached.set()
            self.has_given_up |= not self.may_delete.wait(10)
        self._inner.delete(name)


def test_save_returns_while_a_round_commits(tmp_path: Path) -> None:
    storage = HeldDeletes(open_storage(str(tmp_path)))
    with Life(storage, extract=PURE, base="consecutive") as life:  # type: ignore[arg-type]
        life.save()
        storage.may_delete.set()
        life.save(range(0, 200, 2))
        life.ck.wait()
        storage.may_delete.clear()
        storage.is_reached.clear()
        life.save(range(100))
        assert storage.is_reached.wait(30)  # the round has committed, and is deleting
        life.change(LEFT, [1])
        life.ck.step()
        save = life.ck.save()
        assert not storage.has_given_up, "the training loop stood still for a background commit"
        storage.may_delete.set()
        life.note(save.result().step, [1], [])
        life.ck.wait()
        life.assert_exact()


def test_without_rules_nothing_runs(tmp_path: Path) -> None:
    with Life(tmp_path, extract=None) as life:
        life.save()
        life.save(range(9))
        life.ck.wait()
        assert life.ck._extractor._thread is None
        assert not life.heard(events.Extracted)
        assert life.run().catalog.grids == ()


def test_rounds_never_overlap_however_often_they_are_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = threading.Semaphore(1)
    inner = Round.run

    def alone(self: Round) -> object:
        assert running.acquire(blocking=False)
        try:
            return inner(self)
        finally:
            running.release()

    monkeypatch.setattr(Round, "run", alone)
    with Life(tmp_path, extract=PURE) as life:
        life.save()
        for index in range(8):
            life.save(range(index, 300, 4))
            wakers = [threading.Thread(target=life.ck._extractor.wake) for _ in range(4)]
            for waker in wakers:
                waker.start()
            for waker in wakers:
                waker.join()
        life.ck.wait()
        assert not life.heard(events.ExtractionFailed)
        assert life.run().catalog.grids[0].through == life.ck.all_steps()[-1]
        life.assert_exact()


def test_one_round_takes_all_increments_that_wait(tmp_path: Path) -> None:
    with Life(tmp_path, extract=PURE) as life:
        life.save()
        with life.ck._extractor.stopped():
            for index in range(5):
                life.save(range(index, 300, 4))
        life.ck.wait()
        (round_,) = life.heard(events.Extracted)
        assert round_.step == life.ck.all_steps()[-1]
        life.assert_exact()


def test_close_waits_for_the_grid_to_be_worked_off(tmp_path: Path) -> None:
    life = Life(tmp_path, extract=PURE)
    life.save()
    for index in range(5):
        life.save(range(index, 300, 4))
    life.ck.close()
    assert life.run().catalog.grids[0].through == life.ck.all_steps()[-1]
    assert isinstance(life.ck._extractor, Extractor) and life.ck._extractor._thread is None
