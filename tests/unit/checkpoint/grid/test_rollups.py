"""Rollups on a real run: all that changed since the base in one place, and no row is missed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast import events
from holdfast.checkpoint.diff import diff_steps
from holdfast.checkpoint.format.catalog import CheckpointEntry
from holdfast.checkpoint.planning import bases
from holdfast.checkpoint.restoring import restore
from holdfast.checkpoint.restoring.fetch import PartReader
from holdfast.checkpoint.verify import verify
from holdfast.storage import open_storage
from holdfast.storage.base import ObjectWriter, Storage
from tests.unit.checkpoint.lives import LEFT, RIGHT, ROWS, Life

PURE = hf.Extract(threshold=0)
EXTRACTS = pytest.mark.parametrize(
    "extract", [None, PURE, hf.Extract(), hf.Extract(0.3)], ids=["off", "R=0", "auto", "R=0.3"]
)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third delta is a rollup, also where it holds most of the rows."""
    monkeypatch.setattr(bases, "ROLLUP_PAYS_AT", 1e-9)
    monkeypatch.setattr(bases, "ROLLUP_SHARE_MAX", 2.0)


def draw(life: Life) -> tuple[list[int], list[int]]:
    return tuple(  # type: ignore[return-value]
        np.flatnonzero(life.rng.random(ROWS[table]) < part).tolist()
        for table, part in ((LEFT, 0.1), (RIGHT, 0.2))
    )


def grow(life: Life, steps: int, **how: Any) -> None:
    for _ in range(steps):
        life.save(*draw(life), **how)
    life.ck.wait()


def rollups(life: Life) -> list[CheckpointEntry]:
    return [e for e in life.ck._writer.catalog.checkpoints if e.reason.startswith("rollup")]


def held(life: Life, step: int) -> dict[str, list[int]]:
    """The rows a checkpoint stored."""
    parts = PartReader(life.storage)
    found: dict[str, list[int]] = {LEFT: [], RIGHT: []}
    for s in life.run().catalog.segments:
        if s.born == step:
            found[s.table] += parts.ids(s).tolist()
    return found


def changed_since(life: Life, base: int, step: int) -> dict[str, list[int]]:
    """The rows that were changed after a base up to a step."""
    return {
        table: sorted({
            row
            for at, rows in life.changed.items()
            if base < at <= step
            for row in rows[table].tolist()
        })
        for table in ROWS
    }  # fmt: skip


def assert_rollups_hold_all(life: Life) -> None:
    """Each rollup stores the rows changed since its base, each once, and no others."""
    assert rollups(life)
    for entry in rollups(life):
        assert held(life, entry.step) == changed_since(life, entry.base, entry.step), entry.step


@EXTRACTS
@pytest.mark.parametrize("base", ["consecutive", "recovery-time"])
def test_a_rollup_holds_all_that_changed_since_the_base_and_every_step_is_exact(
    tmp_path: Path, extract: hf.Extract | None, base: str
) -> None:
    with Life(tmp_path, extract=extract, base=base, rollups=True) as life:
        grow(life, 12)
        assert [entry.step for entry in rollups(life)] == [4, 7, 10]
        assert_rollups_hold_all(life)
        life.assert_exact()
        assert verify(str(tmp_path)).is_sound


def test_a_restore_reads_the_base_then_the_rollup_then_what_was_born_above_it(
    tmp_path: Path,
) -> None:
    with Life(tmp_path, extract=PURE, rollups=True) as life:
        grow(life, 9)
        catalog = life.run().catalog
        layers = restore.plan_layers(catalog, 9, list(ROWS), catalog.alive(9))
        assert [(layer.is_base, layer.is_masked) for layer in layers] == [
            (True, False), (False, False), (False, True)
        ]  # fmt: skip
        assert [{s.born for s in layer.segments} for layer in layers] == [{1}, {7}, {8, 9}]
        assert [(g.rollup, g.through, g.end) for g in catalog.grids] == [
            (1, 3, 4), (4, 6, 7), (7, 9, None)
        ]  # fmt: skip


def test_with_rollups_a_restore_reads_fewer_segments_and_not_more_rows(tmp_path: Path) -> None:
    read = {}
    for has_rollups in (False, True):
        with Life(tmp_path / str(has_rollups), extract=PURE, rollups=has_rollups) as life:
            grow(life, 18)
            stats = life.assert_exact()[18]
            run = life.run()
            read[has_rollups] = len(run.catalog.alive(18)), stats.rows - stats.masked_rows
    assert read[True][0] < read[False][0] / 2
    # What was changed again since the rollup is there twice; with R = 0 nothing else is.
    assert read[True][1] <= 1.2 * read[False][1]


def test_extraction_never_reads_or_moves_a_rollup(tmp_path: Path) -> None:
    with Life(tmp_path, extract=PURE, rollups=True) as life:
        grow(life, 7)
        at = {entry.step: entry.bytes for entry in rollups(life)}
        before = {s.extent for s in life.run().catalog.segments if s.born in at}
        life.events.clear()
        grow(life, 8)
        after = {s.extent for s in life.run().catalog.segments if s.born in at}
        assert after == before
        assert life.heard(events.Extracted) and not life.heard(events.ExtractionFailed)
        small = max(e.row_bytes for e in life.ck._writer.catalog.checkpoints[1:] if e.step not in
                    {f.step for f in rollups(life)})  # fmt: skip
        assert all(one.read_bytes <= 2 * 2 * small for one in life.heard(events.Extracted))


def test_a_grid_that_a_rollup_ended_is_worked_off_too(tmp_path: Path) -> None:
    with Life(tmp_path, extract=PURE, rollups=True) as life:
        with life.ck._extractor.stopped():
            for _ in range(9):
                life.save(*draw(life))
            assert [(g.rollup, g.through) for g in life.run().catalog.grids] == [
                (1, 1), (4, 4), (7, 7)
            ]  # fmt: skip
            life.assert_exact()
        life.ck.wait()
        assert [(g.rollup, g.through) for g in life.run().catalog.grids] == [(1, 3), (4, 6), (7, 9)]
        life.assert_exact()


@EXTRACTS
@pytest.mark.parametrize("tracking", ["lookup", "hash"])
@pytest.mark.parametrize("until", range(2, 8))
def test_a_rollup_after_a_restart_holds_what_changed_before_it(
    tmp_path: Path, extract: hf.Extract | None, tracking: str, until: int
) -> None:
    life = Life(tmp_path, extract=extract, rollups=True, tracking=tracking)
    grow(life, until)
    with life.continued(extract=extract, rollups=True, tracking=tracking) as life:
        grow(life, 4)
        assert_rollups_hold_all(life)
        life.assert_exact()


@EXTRACTS
@pytest.mark.parametrize("to", range(1, 11))
def test_a_rollup_after_going_back_holds_what_changed_until_there(
    tmp_path: Path, extract: hf.Extract | None, to: int
) -> None:
    with Life(tmp_path, extract=extract, rollups=True) as life:
        grow(life, 6)
        life.save(*draw(life), is_base=True)
        grow(life, 4)
        life.ck.restore(to, discard_later=True)
        grow(life, 5)
        assert life.ck.all_steps() == tuple(range(1, to + 6))
        assert_rollups_hold_all(life)
        life.assert_exact()
        assert verify(str(tmp_path)).is_sound


def test_a_run_that_had_no_rollups_gets_one_with_all_that_changed(tmp_path: Path) -> None:
    life = Life(tmp_path, extract=PURE)
    grow(life, 5)
    with life.continued(extract=None, base="consecutive", rollups=True) as life:
        grow(life, 3)
        assert [entry.step for entry in rollups(life)] == [6]
        with life.continued(extract=PURE) as life:
            grow(life, 3)
            assert [g.rollup for g in life.run().catalog.grids] == [1, 6]
            assert_rollups_hold_all(life)
            life.assert_exact()


class Weak:
    """A storage that fails once when it is told to: before an object, or after a commit."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.fails: str | None = None
        self.is_mute = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, name: str) -> ObjectWriter:
        if self.fails == "object":
            self.fails = None
            raise hf.UnavailableError("told to fail")
        return self._inner.create(name)

    def put_if_absent(self, name: str, data: bytes) -> None:
        self._inner.put_if_absent(name, data)
        if self.fails == "answer":
            self.fails, self.is_mute = None, True
            raise hf.UnavailableError("the answer was lost")

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if self.is_mute:
            self.is_mute = False
            raise hf.UnavailableError("cannot be read back")
        return self._inner.get(name, offset=offset, length=length)


@pytest.mark.parametrize("fails", ["object", "answer"])
@pytest.mark.parametrize("is_base", [False, True], ids=["delta", "base"])
@pytest.mark.parametrize("at", range(2, 6))
def test_what_a_failed_save_had_taken_is_in_the_next_rollup(
    tmp_path: Path, at: int, is_base: bool, fails: str
) -> None:
    weak = Weak(open_storage(str(tmp_path)))
    with Life(weak, extract=None, rollups=True) as life:  # type: ignore[arg-type]
        grow(life, at)
        lost = draw(life)
        life.change(LEFT, lost[0])
        life.change(RIGHT, lost[1])
        life.ck.step()
        life.expect_base(is_base=is_base)
        weak.fails = fails
        with pytest.raises(hf.UnavailableError):
            life.ck.save().result()
        state = {name: rows.copy() for name, rows in life.weights().items()}
        step = life.ck.current_step
        grow(life, 6)
        if fails == "answer":  # it was carried out
            life.states[step] = state
        every = [*rollups(life)]
        assert every[-1].step > step
        for entry in every:
            found = held(life, entry.step)
            for table, ids in zip((LEFT, RIGHT), lost, strict=True):
                true = set(changed_since(life, entry.base, entry.step)[table])
                if entry.base < step < entry.step:
                    true |= set(ids)
                # What was given back may come along once more, but nothing is missed.
                assert true <= set(found[table]) <= true | set(ids), (entry.step, table)
        life.assert_exact()


def test_a_rollup_that_fails_or_is_cancelled_comes_again_whole(tmp_path: Path) -> None:
    weak = Weak(open_storage(str(tmp_path)))
    with Life(weak, extract=PURE, rollups=True) as life:  # type: ignore[arg-type]
        grow(life, 3)
        lost = draw(life)
        life.change(LEFT, lost[0])
        life.change(RIGHT, lost[1])
        life.ck.step()
        life.expect_base(is_base=False)
        weak.fails = "object"
        with pytest.raises(hf.UnavailableError):
            life.ck.save().result()
        step = life.save(*draw(life))
        assert [entry.step for entry in rollups(life)] == [step]
        for table, ids in zip((LEFT, RIGHT), lost, strict=True):
            true = {*changed_since(life, 1, step)[table], *ids}
            assert held(life, step)[table] == sorted(true)
        life.assert_exact()


@EXTRACTS
def test_retention_lets_go_of_what_lies_below_a_rollup(
    tmp_path: Path, extract: hf.Extract | None
) -> None:
    with Life(tmp_path, extract=extract, rollups=True, keep=2) as life:
        for _ in range(14):
            life.save(*draw(life))
            life.ck.wait()
            life.assert_exact()
        catalog = life.run().catalog
        rollup = catalog.rollup_of(catalog.checkpoint(catalog.steps[0]))
        assert rollup > 1
        assert {s.born for s in catalog.segments if s.born < rollup} == {1}


def test_a_diff_across_a_rollup_counts_rows_that_changed_and_no_others(tmp_path: Path) -> None:
    with Life(tmp_path, extract=PURE, rollups=True) as life:
        grow(life, 9)
        for a, b in ((3, 4), (5, 8), (2, 9)):
            assert any(a < entry.step <= b for entry in rollups(life))
            found = {t.table: t.changed for t in diff_steps(life.run(), a, b).tables}
            for table in ROWS:
                differs = (life.states[a][table] != life.states[b][table]).any(axis=1)
                assert found[table] == differs.sum()


@EXTRACTS
def test_updates_across_a_rollup_lead_to_the_last_step(
    tmp_path: Path, extract: hf.Extract | None
) -> None:
    with Life(tmp_path, extract=extract, rollups=True) as life:
        grow(life, 9)
        for since in range(1, 10):
            served = {table: rows.copy() for table, rows in life.states[since].items()}
            given: dict[str, set[int]] = {LEFT: set(), RIGHT: set()}
            for table, ids, rows in life.run().updates(since=since):
                served[table][ids] = rows
                given[table] |= set(ids.tolist())
            for table, expected in life.states[9].items():
                assert served[table].tobytes() == expected.tobytes()
                # After a rollup it is what changed since the base, never more.
                least = changed_since(life, since if since >= 7 else 1, 9)[table]
                assert given[table] == set(least)


def test_with_servers_a_rollup_is_stored_by_server_and_one_comes_back_alone(tmp_path: Path) -> None:
    placement = hf.Placement(3)
    with Life(tmp_path, extract=PURE, rollups=True, servers=placement) as life:
        grow(life, 8)
        rollup = rollups(life)[-1].step
        parts = PartReader(life.storage)
        for s in life.run().catalog.segments:
            if s.born == rollup:
                assert len(set(placement.servers_of(parts.ids(s)).tolist())) == 1
        saved = life.states[8]
        life.change(LEFT, range(300))
        now = {name: rows.copy() for name, rows in life.weights().items()}
        life.ck.recover([1])
        for table, rows in life.weights().items():
            mine = placement.rows_of(1, ROWS[table])
            now[table][mine] = saved[table][mine]
            assert rows.tobytes() == now[table].tobytes()


@pytest.mark.parametrize(
    ("strategy", "has_rollups"),
    [
        (hf.Strategy("a", base="recovery-time", codec="fp32", extract=PURE), True),
        (hf.Strategy("b", base="recovery-time", codec="fp32"), False),
        (hf.Strategy("c", base="consecutive", codec="fp32", extract=PURE), False),
        (hf.Strategy("d", base="consecutive", codec="fp32", rollups=True), True),
        (hf.Strategy("e", base="recovery-time", codec=None, extract=PURE, rollups=False), False),
        (hf.Strategy("f", base="recovery-time", codec=None, extract=PURE,
                     priority=hf.Priority(by="mfu")), False),
        (hf.Strategy("g", base="intermittent", codec=None), False),
    ],
    ids=lambda value: value.name if isinstance(value, hf.Strategy) else None,
)  # fmt: skip
def test_rollups_are_taken_where_every_changed_row_is_saved_into_a_grid(
    strategy: hf.Strategy, has_rollups: bool
) -> None:
    assert strategy.has_rollups == has_rollups


@pytest.mark.parametrize(
    "more", [{"base": "intermittent"}, {"base": "full"}, {"priority": hf.Priority(by="ssu")}]
)
def test_rollups_that_would_miss_rows_or_gather_nothing_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(hf.InvalidRequestError, match="a rollup"):
        hf.Strategy("mine", codec="fp32", rollups=True, **{"base": "consecutive", **more})
