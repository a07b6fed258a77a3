"""Public training libraries, killed twice and started again, end with the bits of a calm run.

Each client is a short program as a user of the library would write it. It runs its library's own
``fit()``; ``hf.attach`` is the only thing that is ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Client:
    """A program; where it is killed first (with that step's last save durable), and then."""

    script: str
    first: int
    saved: int  # the last save before the first kill
    then: int  # steps of the second process


CLIENTS = [
    # Killed behind an epoch's end: that epoch's evaluation, rate and patience are in the save.
    Client("torch_rechub_ctr.py", first=18, saved=16, then=27),
    Client("torch_rechub_match.py", first=32, saved=30, then=13),
    Client("deepctr_torch_deepfm.py", first=43, saved=40, then=28),
    Client("fuxictr_rank.py", first=34, saved=32, then=29),
    Client("recbole_bpr.py", first=23, saved=20, then=17),
]


def run(client: Client, folder: Path, *given: str) -> tuple[int, str]:
    """Run a client to its end or its death: return code and what it printed."""
    folder.mkdir(exist_ok=True)
    arguments = [str(HERE / client.script), str(folder / "run"), str(folder / "end.pt"), *given]
    done = subprocess.run(
        [sys.executable, str(HERE / "run_client.py"), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def ended(folder: Path) -> dict[str, Any]:
    """How a client's last process left its model and optimizer."""
    found: dict[str, Any] = torch.load(folder / "end.pt", weights_only=True)
    return found


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Equal to the last bit, however deep."""
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}[{index}]")
    else:
        assert one == other, path


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.script.removesuffix(".py"))
def test_client_killed_twice_ends_with_the_bits_of_a_calm_run(
    tmp_path: Path, client: Client
) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    code, told = run(client, calm)
    assert code == 0, told
    steps = ended(calm)["end"]
    assert ended(calm)["trained"] == steps > client.first + client.then

    code, told = run(client, killed, str(client.first), "wait")
    assert code == -signal.SIGKILL, told
    assert hf.open(killed / "run").steps[-1] == client.saved
    code, told = run(client, killed, str(client.then))
    assert code == -signal.SIGKILL, told
    code, told = run(client, killed)
    assert code == 0, told

    found = ended(killed)
    assert found["resumed"] > client.saved
    assert found["resumed"] + found["trained"] == found["end"] == steps
    assert_same(found["model"], ended(calm)["model"])
    assert_same(found["optimizer"], ended(calm)["optimizer"])
    assert hf.open(killed / "run").steps[-1] == steps
