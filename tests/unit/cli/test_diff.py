"""diff: the command tells what the library found, and refuses what is not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.cli.main import run


def test_the_command_says_what_differs(call, gridded: Path) -> None:
    code, data, _ = call("diff", gridded, 15, 30, "--top", 3)
    assert code == 0
    assert (data["a"], data["b"], data["is_swapped"]) == (15, 30, False)
    opened = hf.open(gridded)
    for table in data["tables"]:
        before, after = (opened.read(step, table["table"]) for step in (15, 30))
        differs = (before.weight != after.weight).any(axis=1)
        l2 = np.sqrt(((after.weight.astype(float) - before.weight) ** 2).sum(axis=1))
        assert table["changed"] == differs.sum()
        assert table["share"] == differs.mean()
        assert table["l2_max"] == pytest.approx(l2.max())
        states = (before.state["sum"] != after.state["sum"]).any(axis=1)
        assert table["state_changed"] == {"sum": states.sum()}
        assert [item["l2"] for item in table["top"]] == pytest.approx(
            np.sort(l2[differs])[::-1][:3]
        )
    assert data["changed"] == sum(table["changed"] for table in data["tables"]) > 0
    assert data["read_bytes"] > 0


def test_across_bases_every_row_is_compared(call, gridded: Path) -> None:
    _, data, _ = call("diff", gridded, 40, 50, "--table", "tables.2.weight")
    assert data["is_across_bases"]
    assert [table["table"] for table in data["tables"]] == ["tables.2.weight"]
    assert data["tables"][0]["rewritten"] == data["tables"][0]["rows"]
    assert 0 < data["tables"][0]["changed"] < data["tables"][0]["rows"]


def test_the_later_step_may_come_first_and_that_is_said(
    gridded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diff", str(gridded), "30", "15"]) == 0
    assert "the later step was given first: shown from 15 to 30" in capsys.readouterr().out


def test_a_step_and_itself_say_that_nothing_changed(
    call, gridded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, data, _ = call("diff", gridded, 30, 30)
    assert (data["changed"], data["read_bytes"]) == (0, 0)
    assert run(["diff", str(gridded), "30", "30"]) == 0
    assert "nothing changed from step 30 to step 30" in capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 140])
def test_the_tables_fit_the_terminal(
    gridded: Path,
    width: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(["diff", str(gridded), "15", "30"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert all(word in shown for word in ("rewritten", "mean L2", "tables.2.weight", "moved most"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([7, 30], "no checkpoint of this step"),
        ([30, 7], "no checkpoint of this step"),
        ([15, 30, "--table", "nope"], "no such table"),
    ],
)
def test_what_is_not_there_is_refused_with_what_exists(
    call, gridded: Path, arguments: list[object], said: str
) -> None:
    code, data, _ = call("diff", gridded, *arguments)
    assert (code, data["error"]["type"]) == (1, "NotFoundError")
    assert said in data["error"]["message"]
    assert data["error"]["facts"].get("steps") or data["error"]["facts"].get("tables")


@pytest.mark.parametrize("arguments", [[], ["3"], ["a", "b"], ["1", "2", "--top", "-1"]])
def test_a_question_written_wrongly_exits_with_2(call, gridded: Path, arguments) -> None:
    code, data, _ = call("diff", gridded, *arguments)
    assert (code, data["error"]["type"]) == (2, "UsageError")
