"""A small trained run, made once; commands called in this process unless a test needs another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.cli.main import run

SMALL = ["--preset", "tiny", "--rows", "2000", "--batch-size", "64", "--every", "10"]


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """The train command sets torch's threads; put them back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any, str]]:
    """Run a command with --json; its exit code, what it printed as data, and stderr."""

    def run_json(*arguments: object) -> tuple[int, Any, str]:
        capsys.readouterr()
        code = run([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return run_json


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 35 steps with checkpoints at 10, 20, 30 and 35; read-only."""
    url = tmp_path_factory.mktemp("trained") / "run"
    assert run(["train", "--url", str(url), "--steps", "35", *SMALL]) == 0
    return url


@pytest.fixture(scope="session")
def gridded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two grids: base 5 and increments to 40, base 45 and increments to 65."""
    url = tmp_path_factory.mktemp("gridded") / "run"
    grid = ["--strategy", "incrcp", "--base-policy", "consecutive", "--extract", "0.1"]
    options = ["train", "--url", str(url), *SMALL, "--every", "5"]
    assert run([*options, *grid, "--steps", "40"]) == 0
    assert run([*options, "--strategy", "full", "--steps", "45"]) == 0
    assert run([*options, *grid, "--steps", "65"]) == 0
    return url
