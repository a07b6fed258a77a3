"""Ranks that save together: what is each one's own, what they agree on, what they take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.storage import open_storage
from tests.ranks.held import TABLES, assemble, expected
from tests.ranks.pool import Pool


def test_reader_and_random_state_are_each_ranks_own(pool: Pool, tmp_path: Path) -> None:
    url = str(tmp_path)
    saved = pool.run("save_own", 2, url=url)
    assert [at for at, _ in saved] == [0, 100]
    assert saved[0][1] != saved[1][1]
    loaded = pool.run("load_own", 2, url=url, has_reader=True)
    assert [(at, drawn) for at, drawn, _ in loaded] == saved
    # Another number of ranks: a reader must say how it goes on, or not be there.
    for one in pool.run("load_own", 3, url=url, has_reader=True):
        assert "another number of ranks" in one[2]
    shared = pool.run("load_own", 3, url=url, has_reader=True, can_share=True)
    assert [at for at, _, _ in shared] == [100, 100, 100]
    alone = pool.run("load_own", 1, url=url, has_reader=False)
    assert alone[0][1:] == (saved[0][1], "")


def test_ranks_at_different_steps_save_nothing(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run("save_apart", 3, url=str(tmp_path)):
        assert "ranks save different steps" in told and "[1, 2, 3]" in told
    assert open_storage(str(tmp_path)).list("") == []


def test_row_state_that_only_some_ranks_have_makes_a_base_of_all(
    pool: Pool, tmp_path: Path
) -> None:
    url = str(tmp_path)
    kinds = pool.run("save_untrained", 2, url=url)
    assert kinds == [["base", "base", "delta"]] * 2
    run = hf.open(url)
    assert not run.read(2, "0.weight").state["exp_avg"][5:].any()
    assert run.read(2, "0.weight").state["exp_avg"][1].any()
    assert run.read(3, "0.weight").state["exp_avg"][6].any()


def test_a_run_goes_on_with_other_ranks(pool: Pool, tmp_path: Path) -> None:
    url = str(tmp_path)
    for ranks, layout, saves in (
        (3, "row", [2, 3]),
        (2, "row", [4, 5]),
        (4, "column", [6, 7]),
        (1, "replicated", [8]),
        (3, "table", [9]),
    ):
        done = pool.run("train", ranks, url=url, layout=layout, saves=saves)
        assert all(one["start"] == saves[0] - 1 for one in done) or saves[0] == 2
        if layout == "row" and ranks == 2:  # the same stored tables: deltas go on
            assert done[0]["kinds"] == ["delta", "delta"]
        found = assemble(one["held"] for one in done)
        for table, columns in expected(saves[-1]).items():
            for name, values in columns.items():
                assert np.array_equal(found[table][name], values), (ranks, table, name)
    assert hf.verify(url).is_sound


def test_a_run_of_ranks_is_read_like_any_other(pool: Pool, tmp_path: Path) -> None:
    url = str(tmp_path)
    pool.run("train", 3, url=url, layout="column", saves=[2, 4])
    run = hf.open(url)
    assert [(t.name, t.rows, t.width) for t in run.tables(4)] == [
        (name, *TABLES[name]) for name in sorted(TABLES)
    ]
    whole = expected(4)
    for name in TABLES:
        rows = run.read(4, name, [3, 1])
        assert np.array_equal(rows.weight, whole[name]["weight"][[3, 1]])
        assert np.array_equal(rows.state["sum"], whole[name]["sum"][[3, 1]])
    target = [np.zeros((61, 8), np.float32)]
    run.restore_into(2, {"users.weight": target})
    assert np.array_equal(target[0], expected(2)["users.weight"]["weight"])


@pytest.mark.parametrize("format_", ["torch", "dcp"])
@pytest.mark.parametrize("layout", ["row", "column"])
def test_what_ranks_saved_in_parts_leaves_whole_and_comes_back(
    pool: Pool, tmp_path: Path, layout: str, format_: str
) -> None:
    url, out, back = (str(tmp_path / name) for name in ("run", "out", "back"))
    pool.run("train", 3, url=url, layout=layout, saves=[2, 4])
    tables = [f"--table={name}" for name in TABLES]
    for words in (
        ["restore", url, "--step", "4", "--format", format_, "--out", out],
        ["import", out, back, *tables],
    ):
        command = [sys.executable, "-m", "holdfast.cli.main", *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    run = hf.open(back)
    for name, columns in expected(4).items():
        found = run.read(4, name)
        assert np.array_equal(found.weight, columns["weight"])
        assert np.array_equal(found.state["sum"], columns["sum"])


def test_row_wise_state_of_cuts_is_their_weighted_mean(pool: Pool, tmp_path: Path) -> None:
    url = str(tmp_path)
    settings = {"optimizer": "rowwise", "tracking": "hash"}
    saved = pool.run("train", 3, url=url, layout="column", saves=[2], **settings)
    sums, widths = [], []
    for one in saved:
        shard, columns = one["held"]["users_0.weight"]
        sums.append(columns["sum"].astype(np.float64))
        widths.append(len(shard.floats))
    mean = sum(w * s for w, s in zip(widths, sums, strict=True)) / sum(widths)
    alone = pool.run("load", 1, url=url, layout="replicated", steps=[2], **settings)
    _, columns = alone[0][0]["held"]["users_0.weight"]
    assert np.array_equal(columns["sum"], mean.astype(np.float32))
    again = pool.run("load", 3, url=url, layout="column", steps=[2], **settings)
    for before, after in zip(saved, again, strict=True):
        for name, (_, held) in before["held"].items():
            assert np.array_equal(held["sum"], after[0]["held"][name][1]["sum"])


def test_no_rank_takes_more_than_its_shard_and_a_buffer(pool: Pool, tmp_path: Path) -> None:
    buffer = 64 << 20  # staging of 16 MB, what is being encoded and stored, and what is read
    for found in pool.run("measure", 2, url=str(tmp_path), rows=400_000):
        assert found["shard"] > 1.5 * buffer
        assert found["save"] <= buffer, found
        assert found["restore"] <= buffer, found


def test_ranks_can_be_switched_off(pool: Pool, tmp_path: Path) -> None:
    assert pool.run("save_alone", 2, url=str(tmp_path)) == [(1,), ()]


def test_shards_that_make_up_no_table_are_refused(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="do not make up a table"):
        pool.run("save_hole", 2, url=str(tmp_path))
    assert open_storage(str(tmp_path)).list("") == []


@pytest.mark.parametrize("fails", [0, 1])
def test_a_rank_that_cannot_store_is_told_to_all_and_its_rows_come_later(
    pool: Pool, tmp_path: Path, fails: int
) -> None:
    url = str(tmp_path)
    done = pool.run("save_failing", 2, url=url, fails=fails)
    for told, _ in done:
        assert told[0] == told[2] == "" and "no room" in told[1], told
    check_last(url, [held for _, held in done])


@pytest.mark.parametrize("slow", [0, 1])
def test_a_save_that_gives_way_does_so_on_all_ranks(pool: Pool, tmp_path: Path, slow: int) -> None:
    url = str(tmp_path)
    done = pool.run("save_cancelled", 2, url=url, slow=slow)
    assert [told for told, _ in done] == [["SaveCancelledError"]] * 2
    check_last(url, [held for _, held in done])


def check_last(url: str, held: list[Any]) -> None:
    """Steps 1 and 3 are there and exact, and nothing else is stored."""
    run = hf.open(url)
    assert run.steps == (1, 3)
    assert run.catalog.checkpoint(3).kind == "delta"
    whole = assemble(held)
    for name in TABLES:
        rows = run.read(3, name)
        assert np.array_equal(rows.weight, whole[name]["weight"])
        assert np.array_equal(rows.weight, expected(3)[name]["weight"])
        assert np.array_equal(run.read(1, name).weight, expected(1)[name]["weight"])
    named = {name for name, _ in run.catalog.objects}
    assert {item.name for item in open_storage(url).list("objects/")} == named


@pytest.mark.parametrize("said_by", [[0], [0, 1, 2]])
def test_what_rank_0_says_of_a_step_is_stored(
    pool: Pool, tmp_path: Path, said_by: list[int]
) -> None:
    told = pool.run("save_annotated", 3, url=str(tmp_path), said_by=said_by)
    # The last save of each case has nonsense on the last rank: all ranks hear of it, none waits.
    assert "a metric is a name and a number" in told[2]
    assert all("cannot take part" in one and "[2]" in one for one in told[:2])
    assert hf.open(tmp_path).info(1).metrics == {"auc": 0.5}


def test_what_only_other_ranks_say_is_refused_on_all(pool: Pool, tmp_path: Path) -> None:
    told = pool.run("save_annotated", 3, url=str(tmp_path), said_by=[1])
    assert all("on other ranks than rank 0" in one for one in told)
    assert hf.open(tmp_path).info(1).metrics == {}


@pytest.mark.parametrize("callers", [[0], [0, 1]])
def test_rank_0_deletes_a_step_whoever_else_asks(
    pool: Pool, tmp_path: Path, callers: list[int]
) -> None:
    assert pool.run("delete", 2, url=str(tmp_path), callers=callers) == [(1, 3, 4)] * 2
    assert hf.verify(tmp_path).is_sound


def test_ranks_load_a_part_of_a_checkpoint_of_others(pool: Pool, tmp_path: Path) -> None:
    url = str(tmp_path)
    pool.run("train", 3, url=url, layout="row", saves=[2])
    for told in pool.run("load_part", 2, url=url, layout="row", by=[1]):
        assert "ranks do not all restore the same" in told[0] and told[3] == ""
    loaded = pool.run("load_part", 2, url=url, layout="row", by=[0, 1])
    assert [(told, kind) for told, _, _, kind in loaded] == [("", "base")] * 2
    before = assemble(one for _, one, _, _ in loaded)
    after = assemble(one for _, _, one, _ in loaded)
    for table, columns in expected(2).items():
        wanted = columns if table.startswith("users") else before[table]
        for name, values in wanted.items():
            assert np.array_equal(after[table][name], values), (table, name)
