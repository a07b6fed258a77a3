"""``holdfast compare``: real clusters one after the other, the same kills, one report."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.cli.main import run
from holdfast.report.cluster.training import split_runs, summarize

SMALL = ["compare", "--preset", "tiny", "--rows", "1500", "--batch-size", "64", "--servers", "3"]
SMALL += ["--workers", "2", "--silence", "0"]


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any, str]:
    capsys.readouterr()
    code = run([*SMALL, *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_strategies_meet_the_same_kill_and_what_cannot_survive_it_is_lost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, data, err = call(
        capsys, "--strategies", "none,ecrec", "--kill", "1@0.5", "--steps", 40, "--audit",
        "--png", tmp_path / "c.png", "--events", tmp_path / "e.jsonl",
    )  # fmt: skip
    assert code == 0, data
    none, ecrec = data["runs"]
    assert [each["setup"]["strategy"] for each in data["runs"]] == ["none", "ecrec"]
    assert (none["is_lost"], ecrec["is_lost"]) == (True, False)
    assert "lost" in none["error"]
    assert none["against_base"]["time_overhead"] is None
    assert [failure["server"] for failure in ecrec["failures"]] == [1]
    against, base = ecrec["against_base"], data["base"]
    assert against["whole_s"] > 0
    assert (against["time_overhead"] is None) == (base["seconds"] == 0)  # all between two looks
    assert against["auc_difference"] == ecrec["auc"] - base["auc"]
    assert base["failures"] == []
    assert ecrec["layer"] is None
    assert ecrec["audit"]["wrong"] == 0
    assert sum(ecrec["load"]["updated_S"]) > 1000
    assert sum(ecrec["load"]["folded_S"]) > 0
    assert ecrec["setup"]["parity_bytes"] > 0 == base["setup"]["parity_bytes"]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    runs = split_runs(events.read_events(tmp_path / "e.jsonl"))
    assert len(runs) == 3
    assert json.loads(json.dumps(summarize(runs[-1]).to_dict())).items() <= ecrec.items()
    assert "[3 of 3] ecrec" in err


def test_without_kills_the_base_is_none_itself_and_load_is_that_of_an_undisturbed_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, data, _ = call(capsys, "--strategies", "none,ecrm", "--steps", 12)
    assert code == 0, data
    (ecrm,) = data["runs"]
    assert (data["base"]["setup"]["strategy"], ecrm["setup"]["strategy"]) == ("none", "ecrm")
    base, load = data["base"]["load"], ecrm["load"]
    # the same batches update the same rows; one parity each, unless differences added up
    assert sum(base["updated_S"]) == sum(load["updated_S"])
    assert base["folded_S"] == [0, 0, 0]
    assert 0 < sum(load["folded_S"]) < sum(load["updated_S"])  # networks are not coded
    assert load["both"]["most_over_least"] >= 1
    assert data["base"]["cpu_s"] > data["base"]["worker_cpu_s"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--strategies", "ecrec"], "nothing to be compared with"),
        (["--strategies", "none,magic"], "not one of a cluster"),
        (["--strategies", "ecrec,none,ecrec"], "named twice"),
        (["--strategies", ""], "nothing to be compared with"),
        (["--kill", "3@0.5"], "no such server"),
        (["--png", "c.txt"], "a .png or a .svg"),
        (["--parity", 0], "needs a parity row"),
        (["--rows", 5], "too few rows"),
        (["--strategies", "none,cpr", "--parity", 2], "none of these strategies uses"),
        (["--strategies", "none,ecrec", "--url", "x"], "none of these strategies uses"),
        (["--address", "auto", "--engine", "local"], "on this machine alone"),
    ],
)
def test_absurd_settings_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], options: list[object], said: str
) -> None:
    code, data, err = call(capsys, *options)
    assert code == 1
    assert said in data["error"]["message"]
    assert "starting" not in err


def test_a_picture_without_matplotlib_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    code, data, err = call(capsys, "--png", "c.png")
    assert code == 1
    assert "holdfast[plots]" in data["error"]["message"]
    assert "starting" not in err
