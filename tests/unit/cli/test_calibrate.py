"""``holdfast calibrate``: from emulated runs, or a file of them, to a target PLS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.main import run


def a_study(path: Path) -> Path:
    points = [
        {"strategy": name, "pls": x / 10, "loss": slope * x / 10}
        for name, slope in (("cpr", 0.02), ("cpr-ssu", 0.005))
        for x in range(1, 9)
    ]
    path.write_text(json.dumps({"points": points, "seed_noise": 0.001}))
    return path


@pytest.mark.parametrize(("strategy", "pls"), [("cpr", 0.05), ("cpr-ssu", 0.2)])
def test_runs_of_a_file_give_a_target(call, tmp_path: Path, strategy: str, pls: float) -> None:
    file = a_study(tmp_path / "study.json")
    code, data, _ = call("calibrate", file, "--loss", 0.001, "--strategy", strategy)
    assert code == 0
    assert data["pls"] == pytest.approx(pls)
    assert data["runs"] == 8


def test_runs_are_made_where_no_file_is_given(call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.research.emulation._HELD_OUT_SAMPLES", 2048)
    code, data, _ = call(
        "calibrate", "--loss", 0.5, "--runs", 3, "--seeds", 1, "--steps", 24, "--rows", 400,
        "--batch-size", 32, "--preset", "tiny", "--strategy", "cpr", "--workers", 1,
    )  # fmt: skip
    assert code == 0
    assert 0 < data["pls"] <= 1 and data["runs"] == 3


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"points": [1]}', '{"points": []}'])
def test_file_without_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "study.json"
    file.write_text(text)
    assert run(["calibrate", str(file), "--loss", "0.001"]) == 1
    assert "holdfast:" in capsys.readouterr().err


def test_nonsense_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = a_study(tmp_path / "study.json")
    for arguments in ([str(file), "--loss", "0"], ["nowhere.json", "--loss", "0.1"],
                      [str(file), "--loss", "0.1", "--strategy", "cpr-mfu"]):  # fmt: skip
        assert run(["calibrate", *arguments]) == 1
    assert run(["calibrate", str(file)]) == 2  # without --loss
