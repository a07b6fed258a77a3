"""Rounds of extraction on a real run: every step stays exact, whatever is moved."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import events
from holdfast.checkpoint.format.segment import Segment
from holdfast.checkpoint.grid.decide import GARBAGE_MAX
from holdfast.checkpoint.restoring.fetch import PartReader, read_deletion_vectors
from holdfast.checkpoint.saving import snapshot
from holdfast.storage import open_storage
from holdfast.storage.base import ObjectWriter, Storage
from tests.unit.checkpoint.lives import LEFT, RIGHT, ROWS, Life

PURE = hf.Extract(threshold=0)


def skewed(life: Life, table: str, count: int) -> list[int]:
    """Ids as training draws them: some rows again and again, most seldom."""
    draws = life.rng.random(count) ** 3 * ROWS[table]
    return sorted(set(draws.astype(int).tolist()))


def grow(life: Life, steps: int, *, waits: bool = True, size: int = 25) -> None:
    """A base if there is none, then so many increments."""
    if not life.ck.all_steps():
        life.save()
    for index in range(steps):
        # The right table pauses now and then; some increments are empty.
        right = skewed(life, RIGHT, size // 3) if index % 3 else []
        left = skewed(life, LEFT, size) if index % 7 != 4 else []
        life.save(left, right)
        if waits:
            life.ck.wait()
    life.ck.wait()


def assert_pure(life: Life) -> None:
    """The grid holds exactly the versions kept steps need, each in the cell of its own death."""
    stored = life.stored()
    assert max(Counter(version for version, _ in stored).values(), default=1) == 1
    needed = life.needed()
    assert {version for version, _ in stored} == set(needed)
    kept = life.run().steps
    for version, died in stored:
        truth = needed[version]
        for step in kept:
            is_alive = truth is None or step < truth
            assert (died is None or step < died) == is_alive or step < version[2], version


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("waits", [True, False], ids=["in step", "lagging"])
def test_with_threshold_zero_cells_are_pure_and_no_dead_row_is_read(
    tmp_path: Path, seed: int, waits: bool
) -> None:
    with Life(tmp_path, seed=seed, extract=PURE) as life:
        for _ in range(3):
            grow(life, 4, waits=waits)
            assert_pure(life)
            assert all(stats.masked_rows == 0 for stats in life.assert_exact().values())
        assert life.run().catalog.grids[0].deletion_vectors is None
        assert any(s.died is not None for s in life.chunks())
        assert not life.heard(events.ExtractionFailed)


@pytest.mark.parametrize("threshold", [0, 0.02, 0.1, 0.5, 1, None])
@pytest.mark.parametrize("waits", [True, False], ids=["in step", "lagging"])
def test_every_step_is_exact_at_any_threshold(
    tmp_path: Path, threshold: float | None, waits: bool
) -> None:
    with Life(tmp_path, seed=5, extract=hf.Extract(threshold=threshold)) as life:
        masked = 0
        for _ in range(2):
            grow(life, 8, waits=waits, size=60)
            stats = life.assert_exact()
            masked += sum(item.masked_rows for item in stats.values())
            life.ck.restore(life.ck.all_steps()[-1])
            for table, rows in life.weights().items():
                assert rows.tobytes() == life.states[life.ck.all_steps()[-1]][table].tobytes()
        if threshold is None or threshold >= 0.5:
            assert masked > 0, "nothing was left in place: masking is not tested"
        assert hf.verify(life.storage).is_sound
        assert not life.heard(events.ExtractionFailed)


@pytest.mark.parametrize("threshold", [0.05, 0.3, 1.0])
def test_restore_reads_no_more_dead_rows_than_the_threshold_allows(
    tmp_path: Path, threshold: float
) -> None:
    with Life(tmp_path, seed=11, extract=hf.Extract(threshold=threshold)) as life:
        grow(life, 14, size=60)
        run = life.run()
        for step in run.steps:
            dead = {}
            for entry, count in run.dead_rows(step).items():
                if entry.born > 1:  # not the base
                    key = (entry.table, entry.born)
                    dead[key] = dead.get(key, 0) + count
            for (table, born), count in dead.items():
                sizes = [len(life.changed[at][table]) for at in life.changed if at >= born]
                assert count <= threshold * max(sizes), (step, table, born)


SWITCHES = ("by_range", "by_filter", "by_ratio", "bundles")


@pytest.mark.parametrize(
    "off", [c for n in range(5) for c in itertools.combinations(SWITCHES, n)], ids="-".join
)
def test_stages_switched_off_change_the_layout_and_not_the_rows(
    tmp_path: Path, off: Sequence[str]
) -> None:
    # Without memory for ids: where those are known, filters are not asked.
    rules = hf.Extract(threshold=0.2, memory_bytes=0, **dict.fromkeys(off, False))
    with Life(tmp_path, seed=7, extract=rules) as life:
        grow(life, 9, size=40)
        life.save([1, 5, 298], range(0, 90, 3))
        life.save([0, 3, 7, 9])
        life.save([150, 270])
        life.ck.wait()
        life.assert_exact()
        rounds = life.heard(events.Extracted)
        passed = {stage: sum(getattr(r, stage) for r in rounds) for stage in SWITCHES[:3]}
        assert passed["by_range"] == 0 or "by_range" not in off
        assert passed["by_filter"] == 0 or "by_filter" not in off
        if not off:
            assert passed["by_range"] and passed["by_filter"], passed
        if off == ("by_filter",):
            assert passed["by_ratio"], passed
        bundles = [name for name, _ in life.run().catalog.objects if "/rows-" not in name]
        chunks_in = Counter(s.extent.object for s in life.chunks())
        if "bundles" in off:
            assert all(chunks_in[name] <= 1 for name in bundles if "/kills-" not in name)
        else:
            assert any(chunks_in[name] > 1 for name in bundles)


@pytest.mark.parametrize("memory_bytes", [0, 3_000, 64 << 20])
def test_memory_changes_what_is_read_and_not_what_is_kept(
    tmp_path: Path, memory_bytes: int
) -> None:
    rules = hf.Extract(threshold=0.2, memory_bytes=memory_bytes)
    with Life(tmp_path, seed=3, extract=rules) as life:
        grow(life, 12, size=40)
        life.assert_exact()
        rounds = life.heard(events.Extracted)
        by_filter = sum(round_.by_filter for round_ in rounds)
        assert bool(by_filter) == (memory_bytes < 64 << 20)  # all ids were in memory, or not


def test_chunk_that_died_at_once_is_closed_without_moving_a_byte(tmp_path: Path) -> None:
    with Life(tmp_path, extract=PURE) as life:
        life.save()
        life.save(range(0, 40, 2), range(5))
        life.ck.wait()
        before = {(s.table, s.born): s.extent for s in life.chunks()}
        life.save(range(0, 40, 2), range(5))
        life.ck.wait()
        (_, round_) = life.heard(events.Extracted)
        assert (round_.closed, round_.extracted, round_.rows) == (2, 0, 0)
        assert (round_.read_bytes, round_.written_bytes) == (0, 0)
        for s in life.chunks():
            if s.born == 2:
                assert (s.died, s.extent) == (3, before[s.table, s.born])
        life.assert_exact()


def test_chunk_out_of_an_updates_range_is_never_opened(tmp_path: Path) -> None:
    with Life(tmp_path, extract=PURE) as life:
        life.save()
        life.save(range(0, 40, 2))
        life.save(range(100, 140, 2))
        life.ck.wait()
        life.save([250, 252])
        life.ck.wait()
        round_ = life.heard(events.Extracted)[-1]
        assert (round_.chunks, round_.by_range) == (2, 2)


@pytest.mark.parametrize("threshold", [0, 0.1])
def test_garbage_stays_below_its_limit_and_what_one_round_adds(
    tmp_path: Path, threshold: float
) -> None:
    with Life(tmp_path, seed=3, extract=hf.Extract(threshold=threshold)) as life:
        life.save()
        for _ in range(25):
            life.save(skewed(life, LEFT, 120), skewed(life, RIGHT, 40))
            before = life.ck._writer.catalog
            life.ck.wait()
            catalog = life.run().catalog
            living = Counter[str]()
            for s in catalog.segments:
                living[s.extent.object] += s.extent.bytes
            total = sum(size for _, size in catalog.objects)
            # head, tail and footer are part of an object, not garbage
            count = Counter(s.extent.object for s in catalog.segments)
            garbage = sum(
                size - living[name] - 65 - 80 * count[name]
                for name, size in catalog.objects
                if name in living
            )
            replaced = {s.extent for s in before.segments} - {s.extent for s in catalog.segments}
            last = sum(extent.bytes + 80 for extent in replaced)
            assert garbage <= GARBAGE_MAX * total + last
        assert sum(r.moved for r in life.heard(events.Extracted)) > 0


def test_rows_that_never_die_are_never_copied(tmp_path: Path) -> None:
    with Life(tmp_path, extract=PURE) as life:
        life.save()
        for index in range(15):
            life.save([20 * index, 20 * index + 3], [6 * index, 6 * index + 2])
            life.ck.wait()
        rounds = life.heard(events.Extracted)
        assert sum(r.moved + r.extracted for r in rounds) == 0
        assert sum(r.written_bytes for r in rounds) == 0


def decoded_versions(life: Life) -> dict[tuple[str, int, int], bytes]:
    """The bits of every version that any segment holds."""
    found: dict[tuple[str, int, int], bytes] = {}
    for s in life.run().catalog.segments:
        data = life.storage.get(s.extent.object, offset=s.extent.offset, length=s.extent.bytes)
        segment = Segment(memoryview(data), where=s.extent.describe())
        for row, value in zip(segment.ids().tolist(), segment.decode(0), strict=True):
            key = (s.table, row, s.born)
            assert found.setdefault(key, value.tobytes()) == value.tobytes(), key
    return found


CODECS = ["fp16", "asym4", "asym8", "adaptive2", "kmeans2", "kmeans4-block", "kmeans3-cluster"]


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_move_as_codes_and_decode_to_the_very_bits(tmp_path: Path, codec: str) -> None:
    rules = hf.Extract(threshold=0.1)
    with Life(tmp_path, seed=2, extract=rules, codec=codec) as life:
        life.save()
        seen: dict[tuple[str, int, int], bytes] = {}
        for _ in range(7):
            life.change(LEFT, [7])
            life.weights()[LEFT][7] = [np.nan, np.inf, -1e30, 0]  # what no lossy codec can hold
            with life.ck._extractor.stopped():
                life.save([*skewed(life, LEFT, 70), 7], skewed(life, RIGHT, 30))
                for key, bits in decoded_versions(life).items():
                    assert seen.setdefault(key, bits) == bits, key
            life.ck.wait()
            for key, bits in decoded_versions(life).items():
                assert seen[key] == bits, key
        assert sum(r.extracted for r in life.heard(events.Extracted)) > 3
        run = life.run()
        for step in run.steps:  # lossy rows restore to what was stored for them
            rows, _ = life.restored(run, step)
            for table, values in rows.items():
                newest = {}
                for at in sorted(at for at in life.changed if at <= step):
                    newest.update(dict.fromkeys(life.changed[at][table].tolist(), at))
                for row, at in newest.items():
                    assert values[row].tobytes() == seen[table, row, at], (step, table, row)


# Retention


@pytest.mark.parametrize("keep", [1, 2, hf.Keep(every=3), hf.Keep(last=2, every=4)], ids=repr)
@pytest.mark.parametrize("waits", [True, False], ids=["in step", "lagging"])
def test_dropping_steps_frees_exactly_the_versions_no_kept_step_needs(
    tmp_path: Path, keep: Any, waits: bool
) -> None:
    with Life(tmp_path, seed=4, extract=PURE, keep=keep) as life:
        for _ in range(3):
            grow(life, 5, waits=waits)
            life.assert_exact()
            # A death that a step saw which is gone by now may lie between two kept ones.
            stored = {version for version, _ in life.stored()}
            assert stored == set(life.needed())
            assert len(life.stored()) == len(stored)


def test_a_step_in_the_middle_lets_go_of_what_it_alone_needed(tmp_path: Path) -> None:
    with Life(tmp_path, extract=PURE) as life:
        life.save()
        for _ in range(3):
            life.save(range(0, 20, 2))
            life.ck.wait()
        assert {(s.born, s.died) for s in life.chunks()} == {(2, 3), (3, 4), (4, None)}
        life.ck._writer.update(lambda now: now.keeping(frozenset({1, 2, 4})))
        assert {(s.born, s.died) for s in life.chunks()} == {(2, 3), (4, None)}
        names = {item.name for item in life.storage.list("objects/")}
        assert names == {name for name, _ in life.run().catalog.objects}
        life.assert_exact()


# Bases, processes, going back


def test_a_new_base_starts_a_new_grid_and_the_old_one_is_finished(tmp_path: Path) -> None:
    with Life(tmp_path, seed=6, extract=PURE) as life:
        grow(life, 4)
        with life.ck._extractor.stopped():  # two increments wait when the base comes
            life.save(skewed(life, LEFT, 60))
            life.save(skewed(life, LEFT, 60), skewed(life, RIGHT, 9))
            base = life.save(range(7), is_base=True)
            life.save(skewed(life, LEFT, 60))
            old, new = life.run().catalog.grids
            assert (old.through, old.end, new.through) == (5, base, base)
            life.assert_exact()
        life.ck.wait()
        old, new = life.run().catalog.grids
        assert (old.rollup, old.through, old.end) == (1, 7, base)
        assert (new.rollup, new.through, new.end) == (base, base + 1, None)
        assert_pure(life)
        grow(life, 3)
        life.assert_exact()
        assert_pure(life)


def test_a_base_committed_while_a_round_works_ends_its_chunks(tmp_path: Path) -> None:
    gate = Gate(open_storage(str(tmp_path)))
    with Life(gate, seed=6, extract=hf.Extract(threshold=0.3)) as life:
        grow(life, 3, size=60)
        gate.hold("/extracted-", "/live-")
        life.save(range(0, 300, 2), range(0, 90, 2))
        assert gate.is_reached.wait(30)
        life.save(range(7), is_base=True)
        life.save(range(9))
        gate.let_go()
        life.ck.wait()
        assert not life.heard(events.ExtractionFailed)
        life.assert_exact()
        grids = life.run().catalog.grids
        assert [(g.through, g.end) for g in grids] == [(5, 6), (7, None)]


@pytest.mark.parametrize("first", [None, PURE], ids=["increments only", "a grid"])
def test_another_process_works_off_what_was_left_waiting(
    tmp_path: Path, first: hf.Extract | None
) -> None:
    life = Life(tmp_path, seed=8, extract=first)
    grow(life, 3)
    life.ck._extractor._rules = None  # this process ends before it gets to the last ones
    grow(life, 3)
    life = life.continued(extract=PURE)
    with life:
        life.ck.wait()
        life.save([1, 2, 3])
        life.ck.wait()
        assert life.run().catalog.grids[0].through == life.ck.all_steps()[-1]
        life.assert_exact()
        assert_pure(life)


def test_strategies_may_take_turns_over_one_grid(tmp_path: Path) -> None:
    life = Life(tmp_path, seed=9, extract=hf.Extract(threshold=0.2))
    grow(life, 4, size=50)
    for base, rules in (
        ("one-shot", None),
        ("consecutive", hf.Extract(threshold=0.2)),
        ("consecutive", None),
        ("consecutive", PURE),
    ):
        life = life.continued(base=base, extract=rules)
        with life:
            for _ in range(3):
                life.save(skewed(life, LEFT, 50), skewed(life, RIGHT, 10))
                life.ck.wait()
                life.assert_exact()


@pytest.mark.parametrize("threshold", [0, 0.3, 1])
@pytest.mark.parametrize("seed", range(4))
def test_going_back_brings_extracted_rows_to_life_again(
    tmp_path: Path, threshold: float, seed: int
) -> None:
    with Life(tmp_path, seed=seed, extract=hf.Extract(threshold=threshold)) as life:
        grow(life, 6, size=50)
        for _ in range(4):
            to = int(life.rng.choice(life.ck.all_steps()))
            life.ck.restore(to, discard_later=True)
            for table, rows in life.weights().items():
                assert rows.tobytes() == life.states[to][table].tobytes(), (to, table)
            for _ in range(int(life.rng.integers(1, 4))):
                life.save(skewed(life, LEFT, 40), skewed(life, RIGHT, 9))
                life.ck.wait()
            life.assert_exact()
        assert hf.verify(life.storage).is_sound


def test_going_back_twice_forgets_deaths_between_the_two(tmp_path: Path) -> None:
    with Life(tmp_path, extract=hf.Extract(threshold=1)) as life:
        life.save()
        life.save(range(100))
        for ids in ([0, 1], [2, 3], range(4, 100)):
            life.save(ids)
            life.ck.wait()
        (cell,) = [s for s in life.chunks() if s.born == 2]
        assert cell.died == 5  # one cell, whose rows died at steps 3, 4 and 5
        life.ck.restore(4, discard_later=True)
        life.save([200])
        life.ck.wait()
        life.assert_exact()
        life.ck.restore(2, discard_later=True)
        for row in (201, 202, 203):
            life.save([row])
            life.ck.wait()
        life.assert_exact()


@pytest.mark.parametrize("threshold", [0, 0.2, None])
def test_increments_of_many_parts_are_extracted_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threshold: float | None
) -> None:
    monkeypatch.setattr(snapshot, "BUFFER_BYTES", 1000)
    with Life(tmp_path, seed=1, extract=hf.Extract(threshold=threshold)) as life:
        life.save()
        for _ in range(6):
            last = life.save(life.rng.choice(300, 180, replace=False), skewed(life, RIGHT, 60))
        life.ck.wait()
        assert sum(s.born == last and s.table == LEFT for s in life.chunks()) > 1
        life.assert_exact()


def test_model_without_tables_is_saved_and_restored(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizer, strategy="incrcp") as ck:
        expected = {}
        for step in (1, 2, 3):
            with torch.no_grad():
                model.weight.fill_(step)
            ck.step()
            expected[ck.save().result().step] = model.weight.detach().clone()
        ck.wait()
        for step, weight in expected.items():
            ck.restore(step)
            assert torch.equal(model.weight, weight)


# Accidents


class Gate:
    """A storage that makes an object wait before it is created."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._words: tuple[str, ...] = ()
        self._is_open = threading.Event()
        self.is_reached = threading.Event()
        self._is_open.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def url(self) -> str:
        return self._inner.url

    def hold(self, *words: str) -> None:
        """Objects with such a word in their name wait from now on."""
        self._words = words
        self.is_reached.clear()
        self._is_open.clear()

    def let_go(self) -> None:
        self._words = ()
        self._is_open.set()

    def create(self, name: str) -> ObjectWriter:
        if any(word in name for word in self._words):
            self.is_reached.set()
            assert self._is_open.wait(60)
        return self._inner.create(name)


class Refusing:
    """A storage that refuses objects of one kind for as long as it is told to."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.word: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, name: str) -> ObjectWriter:
        if self.word is not None and self.word in name:
            raise hf.UnavailableError("told to refuse", object=name)
        return self._inner.create(name)


@pytest.mark.parametrize("kind", ["live", "extracted", "kills"])
def test_failed_round_is_told_saves_go_on_and_the_next_one_repairs(
    tmp_path: Path, kind: str
) -> None:
    storage = Refusing(open_storage(str(tmp_path)))
    with Life(storage, seed=12, extract=hf.Extract(threshold=0.2)) as life:  # type: ignore[arg-type]
        grow(life, 4, size=60)
        through = life.run().catalog.grids[0].through
        storage.word = f"/{kind}-"
        for _ in range(3):
            life.save(skewed(life, LEFT, 90), skewed(life, RIGHT, 40))
            life.ck.wait()
            life.assert_exact()
        failed = life.heard(events.ExtractionFailed)
        assert failed and all("told to refuse" in event.error for event in failed)
        if kind != "kills":  # not every round has rows to leave where they are
            assert len(failed) == 3
            assert life.run().catalog.grids[0].through == through
        storage.word = None
        life.save([5])
        life.ck.wait()
        assert life.run().catalog.grids[0].through == life.ck.all_steps()[-1]
        life.assert_exact()
        named = {name for name, _ in life.run().catalog.objects}
        assert {item.name for item in life.storage.list("objects/")} == named


class TornClose:
    """A storage where closing one object of a kind fails, once."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.word: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def url(self) -> str:
        return self._inner.url

    def create(self, name: str) -> ObjectWriter:
        writer = self._inner.create(name)
        if self.word is not None and self.word in name:
            self.word = None

            def fail() -> None:
                writer.abort()
                raise hf.UnavailableError("told to fail at the end")

            writer.close = fail  # type: ignore[method-assign]
        return writer


@pytest.mark.parametrize("kind", ["live", "extracted", "kills"])
def test_bundle_that_cannot_be_finished_leaves_no_other_behind(tmp_path: Path, kind: str) -> None:
    storage = TornClose(open_storage(str(tmp_path)))
    with Life(storage, seed=12, extract=hf.Extract(threshold=0.2)) as life:  # type: ignore[arg-type]
        grow(life, 4, size=60)
        storage.word = f"/{kind}-"
        life.save(skewed(life, LEFT, 90), skewed(life, RIGHT, 40))
        life.ck.wait()
        assert len(life.heard(events.ExtractionFailed)) == 1
        named = {name for name, _ in life.run().catalog.objects}
        assert {item.name for item in life.storage.list("objects/")} == named
        life.save([5])
        life.ck.wait()
        life.assert_exact()


def test_reader_of_an_older_catalog_moves_on_when_chunks_are_swapped_away(tmp_path: Path) -> None:
    with Life(tmp_path, seed=13, extract=PURE) as life:
        grow(life, 6, size=60)
        run = life.run()
        number = run.catalog.number
        pinned = hf.open(life.storage.url, catalog=number)
        states = dict(life.states)
        steps = run.steps
        grow(life, 4, size=60)
        told = 0
        for step in steps:
            found = run.read(step, LEFT, range(60)).weight
            assert found.tobytes() == states[step][LEFT][:60].tobytes()
            try:
                pinned.read(step, LEFT, range(60))
            except hf.NotFoundError:
                told += 1
        assert told > 0 and run.catalog.number > number  # chunks were moved under the readers


# Deletion vectors as stored


def test_kills_name_only_versions_that_really_died(tmp_path: Path) -> None:
    with Life(tmp_path, seed=14, extract=hf.Extract(threshold=1)) as life:
        grow(life, 10, size=60)
        catalog = life.run().catalog
        (grid,) = catalog.grids
        kills = read_deletion_vectors(life.storage, grid)
        assert kills
        needed = life.needed()
        reader = PartReader(life.storage)
        held = {(s.table, s.born, row) for s in life.chunks() for row in reader.ids(s).tolist()}
        true = 0
        for (table, born), vector in kills.items():
            for row, died in zip(vector.ids_N.tolist(), vector.deaths_N.tolist(), strict=True):
                assert row in life.changed[died][table]
                if (table, born, row) in held:
                    assert needed[table, row, born] == died
                    true += 1
        assert true
