"""delete: it says what it takes, asks first, and leaves every other step readable."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import typer

import holdfast as hf
from holdfast.cli.main import run


@pytest.fixture
def url(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_steps_are_deleted_and_what_was_freed_is_said(call, url: Path) -> None:
    before = hf.open(url).bytes
    code, data, _ = call("delete", url, "--step", 10, "--step", 35, "--yes")
    assert code == 0 and data["deleted"] == [10, 35] and data["steps"] == [20, 30]
    opened = hf.open(url)
    assert opened.steps == (20, 30) and before - opened.bytes == data["freed_bytes"] > 0
    assert data["readers"] == [20, 30] and data["shared_bytes"] > 0
    assert hf.verify(url).is_sound


def test_nothing_is_deleted_without_a_yes(
    call, url: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data, _ = call("delete", url, "--step", 10)
    assert code == 1 and "--yes" in data["error"]["todo"]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[str] = []
    for answer in (False, True):
        monkeypatch.setattr(
            typer, "confirm", lambda q, err, answer=answer: asked.append(q) or answer
        )
        assert run(["delete", str(url), "--step", "10"]) == 0
        told = " ".join(capsys.readouterr().err.split())
        assert "delete step 10" in told and "3 later checkpoints read them" in told
        assert hf.open(url).steps == ((20, 30, 35) if answer else (10, 20, 30, 35))
    assert len(asked) == 2


def test_a_step_that_is_not_there_lists_those_that_are(call, url: Path) -> None:
    code, data, _ = call("delete", url, "--step", 7, "--yes")
    assert code == 1 and data["error"]["facts"]["steps"] == [10, 20, 30, 35]
