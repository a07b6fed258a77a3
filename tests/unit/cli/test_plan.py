"""``holdfast plan``: flags, files, pictures, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.main import run
from holdfast.recsys import measure

FLAGS = ["--rows", "4000000000", "--row-bytes", "256", "--mtbf-h", "28", "--servers", "16",
         "--jobs", "2000"]  # fmt: skip


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run(["plan", *arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_flags_give_a_table_and_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *FLAGS]) == 0
    out = capsys.readouterr().out
    for name in ("full", "check-n-run", "incrcp", "cpr-ssu", "ecrec", "Simulated"):
        assert name in out
    for answer in ("Keeping your training loop: ", "With embedding servers: "):
        assert answer in out
    assert "give --updates-per-s" in out


def test_a_narrow_terminal_cuts_nothing_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["plan", *FLAGS]) == 0
    narrow = capsys.readouterr().out
    assert "…" not in narrow and all(len(line) <= 80 for line in narrow.splitlines())
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["plan", *FLAGS]) == 0
    assert narrow.split() == capsys.readouterr().out.split()


def test_what_is_assumed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *FLAGS]) == 0
    numbers = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {words[0]: words[1:3] for words in numbers if len(words) > 3}
    assert shown["servers"] == ["16", "given"]
    assert shown["pls"] == ["0.1", "assumed"]
    assert plan(capsys, *FLAGS, "--jobs", "0")["given"] == [
        "mtbf_h", "row_bytes", "rows", "servers",
    ]  # fmt: skip


def test_simulation_agrees_with_the_closed_forms(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *FLAGS, "--jobs", "20000", "--job-h", "2000", "--pls", "0.002")
    strategies = {e["strategy"]: e for e in found["strategies"]}  # type: ignore[attr-defined]
    for name, seen in found["simulated"].items():  # type: ignore[attr-defined]
        assert seen["overhead"]["mean"] == pytest.approx(strategies[name]["total"], rel=0.05)
    assert found["simulated"]["cpr"]["pls"]["mean"] == pytest.approx(0.002, rel=0.05)  # type: ignore[index]


def test_file_gives_numbers_and_flags_win_over_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("rows: 1000000\nrow_bytes: 64\nmtbf_h: 10\nservers: 4\n")
    found = plan(capsys, str(file), "--servers", "8", "--jobs", "0")
    situation = found["situation"]
    assert situation["rows"] == 1_000_000 and situation["servers"] == 8  # type: ignore[index]
    assert found["simulated"] == {}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    path = tmp_path / f"plan.{suffix}"
    plan(capsys, *FLAGS, f"--{suffix}", str(path), "--jobs", "0")
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


def test_scaling_reaches_a_hundred_thousand_servers(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *FLAGS, "--jobs", "0")
    for points in found["scaling"].values():  # type: ignore[attr-defined]
        assert points[-1]["nodes"] == 100_000
        assert points[-1]["totals"]["full"] > points[0]["totals"]["full"]


@pytest.mark.parametrize(
    ("arguments", "words"), [
        ([], "rows"),
        (["--rows", "10"], "row_bytes"),
        (["--rows", "-5", "--row-bytes", "64", "--mtbf-h", "1"], "rows"),
        (["--rows", "5", "--row-bytes", "64", "--mtbf-h", "-1"], "mtbf_h"),
        (["--rows", "5", "--row-bytes", "64", "--mtbf-h", "1", "--servers", "0"], "servers"),
        (["--rows", "5", "--row-bytes", "64", "--mtbf-h", "1", "--r", "1.5"], "share"),
        (["nowhere.yaml"], "no such file"),
    ],
)  # fmt: skip
def test_nonsense_ends_as_one_message(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(["plan", *arguments]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [
        "- 1\n- 2\n", "rows: [1\n", "rows: ten\nrow_bytes: 4\nmtbf_h: 1\n",
        "rows: 1\nrow_bytes: 4\nmtbf_h: 1\ncolour: red\n",
        "rows: 2020-99-99\n", "rows: " + "[" * 5000, "rows: " + "9" * 5000,
    ],
)  # fmt: skip
def test_wrong_file_ends_as_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    assert run(["plan", str(file)]) == 1
    assert "holdfast:" in capsys.readouterr().err


def test_numbers_are_measured_and_given_ones_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "BLOCK_BYTES", 1 << 20)
    found = plan(capsys, "--measure", "--preset", "tiny", "--table-mb", "1", "--batch", "32",
                 "--steps", "8", "--folder", str(tmp_path), "--mtbf-h", "28", "--jobs", "0",
                 "--row-bytes", "99")  # fmt: skip
    situation: Any = found["situation"]
    assert situation["row_bytes"] == 99
    assert situation["rows"] == (1 << 20) // 16
    assert 0 < situation["changed_per_hour"] <= 1
    assert 0 < situation["changed_growth"] <= 1
    assert situation["updates_per_s"] > 0
    for name in ("copy_bytes_s", "write_bytes_s", "read_bytes_s"):
        assert situation[name] > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [(["--preset", "huge"], "known"), (["--folder", "nowhere"], "no such folder")],
)
def test_what_cannot_be_measured_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert run(["plan", "--measure", "--mtbf-h", "28", "--table-mb", "1", *flags]) == 1
    assert words in capsys.readouterr().err
