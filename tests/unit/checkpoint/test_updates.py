"""Run.updates: what it yields leads to the promised step, also when chunks move under it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.checkpoint.saving import snapshot
from tests.unit.checkpoint.lives import LEFT, RIGHT, ROWS, Life

PURE = hf.Extract(threshold=0)
Update = tuple[str, np.ndarray, np.ndarray]


def grow(life: Life, steps: int) -> None:
    """Increments that kill rows of every chunk there is."""
    for _ in range(steps):
        left, right = (life.rng.random(ROWS[table]) < 0.5 for table in (LEFT, RIGHT))
        life.save(np.flatnonzero(left), np.flatnonzero(right))
        life.ck.wait()


def grown(life: Life) -> None:
    """A base and some increments."""
    life.save()
    grow(life, 6)


def take(updates: Iterator[Update], count: int) -> list[Update]:
    return [next(updates) for _ in range(count)]


def assert_leads(life: Life, since: int, updates: Iterable[Update], to: int) -> None:
    served = {table: rows.copy() for table, rows in life.states[since].items()}
    for table, ids, rows in updates:
        served[table][ids] = rows
    for table, expected in life.states[to].items():
        assert served[table].tobytes() == expected.tobytes(), table


def times(updates: Iterable[Update]) -> Counter[tuple[str, int]]:
    return Counter((table, row) for table, ids, _ in updates for row in ids.tolist())


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table's rows of one birth go into several segments, as those of large tables do."""
    monkeypatch.setattr(snapshot, "BUFFER_BYTES", 1000)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("since", [1, 4])
def test_updates_go_on_to_their_step_when_chunks_are_swapped_away_between_two_yields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, since: int, is_cut: bool
) -> None:
    if is_cut:
        cut_small(monkeypatch)
    told = partial = 0
    for before in range(1, 100, 4 if is_cut else 2):
        with Life(tmp_path / str(before), seed=before, extract=PURE) as life:
            grown(life)
            run = life.run()
            pinned = hf.open(life.storage.url, catalog=run.catalog.number)
            segments = [s for s in run.catalog.alive(7) if s.born > since]
            if before >= len(segments):
                break
            at, then = segments[before - 1], segments[before]
            partial += (at.table, at.born) == (then.table, then.born)
            moving, still = run.updates(since=since), pinned.updates(since=since)
            found = take(moving, before)
            take(still, before)
            grow(life, 2)
            found += moving
            assert_leads(life, since, found, 7)
            assert run.steps[-1] == 7
            # Chunks hold each row once: a row that comes twice was given again.
            assert max(times(found).values()) == 1
            try:
                list(still)
            except hf.NotFoundError:
                told += 1
    assert told > 1  # objects were really gone
    assert (partial > 0) == is_cut


def test_updates_survive_a_swap_after_every_yield(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch)
    with Life(tmp_path, seed=3, extract=PURE) as life:
        grown(life)
        run = life.run()
        found = []
        for update in run.updates(since=2):
            found.append(update)
            grow(life, 1)
        assert len(found) > 10
        assert_leads(life, 2, found, 7)
        assert max(times(found).values()) == 1
        mine = run.steps[-1]
        assert mine == 7
        run.reload()
        assert_leads(life, mine, run.updates(since=mine), run.steps[-1])


def test_updates_lead_to_the_last_step_there_is_when_theirs_was_dropped(tmp_path: Path) -> None:
    with Life(tmp_path, seed=4, extract=PURE, keep=hf.Keep(last=2)) as life:
        grown(life)
        run = life.run()
        updates = run.updates(since=6)
        found = take(updates, 1)
        grow(life, 3)
        assert 7 not in life.run().steps
        found += updates
        assert run.steps[-1] == 10
        assert_leads(life, 6, found, 10)


def test_updates_cross_a_base_that_replaced_everything(tmp_path: Path) -> None:
    with Life(tmp_path, seed=5, extract=PURE, keep=hf.Keep(last=1)) as life:
        grown(life)
        run = life.run()
        updates = run.updates(since=5)
        found = take(updates, 1)
        life.save([1, 2], [3], is_base=True)
        life.ck.wait()
        found += updates
        assert run.steps == (8,)
        assert_leads(life, 5, found, 8)


def test_updates_refuse_to_mix_two_timelines(tmp_path: Path) -> None:
    with Life(tmp_path, seed=6, extract=PURE) as life:
        grown(life)
        run = life.run()
        begun, unbegun = run.updates(since=2), life.run().updates(since=2)
        take(begun, 1)
        life.ck.restore(4, discard_later=True)
        grow(life, 4)
        assert life.run().steps[-1] == 8  # step 7 exists again, with other rows
        with pytest.raises(hf.InvalidRequestError, match="went back"):
            list(begun)
        assert_leads(life, 2, unbegun, 8)


def test_updates_of_a_pinned_catalog_say_what_is_gone(tmp_path: Path) -> None:
    with Life(tmp_path, seed=7, extract=PURE) as life:
        grown(life)
        pinned = hf.open(life.storage.url, catalog=life.run().catalog.number)
        number = pinned.catalog.number
        grow(life, 3)
        with pytest.raises(hf.NotFoundError):
            list(pinned.updates(since=1))
        assert pinned.catalog.number == number
