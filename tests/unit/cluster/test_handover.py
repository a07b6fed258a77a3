"""Shared memory: seen by both, left by nobody, and never opened unless it is what it should be."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.cluster.handover import BYTES_MAX, Handovers, Offer
from holdfast.errors import InvalidRequestError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes share no memory there")

CHILD = """
import sys, json, time
from holdfast.cluster.handover import Handovers, Offer
if sys.argv[1] == "give":
    handovers = Handovers()
    assert handovers.accept("asker", json.loads(sys.argv[2]))
    handovers.find("asker").rows(64, 2, 3)[:] = 7
    print("done", flush=True)
else:
    offer = Offer(8192)
    print(json.dumps(offer.to_json()), flush=True)
time.sleep(100)
"""


@contextmanager
def child(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", CHILD, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline()
        finally:
            process.send_signal(signal.SIGKILL)


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*holdfast*")}


def test_what_another_process_writes_is_seen_here() -> None:
    before = shared_files()
    offer = Offer(8192)
    with child("give", json.dumps(offer.to_json())) as (_, line):
        assert line.strip() == "done"
        offer.withdraw()
        rows_NW = offer.rows(64, 2, 3)
        assert rows_NW is not None and (rows_NW == 7).all()
    assert (rows_NW == 7).all()  # though the other was killed
    assert shared_files() == before


def test_memory_of_a_killed_process_cannot_be_opened_and_leaves_nothing() -> None:
    before = shared_files()
    with child("ask") as (process, line):
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not Handovers().accept("asker", json.loads(line))
    assert shared_files() == before


def test_a_new_offer_takes_the_place_of_the_last_and_none_gives_it_up() -> None:
    handovers, first, second = Handovers(), Offer(4096), Offer(8192)
    assert handovers.find("asker") is None
    assert handovers.accept("asker", first.to_json())
    assert handovers.accept("asker", second.to_json())
    found = handovers.find("asker")
    assert found is not None and found.size == 8192
    assert handovers.accept("other", first.to_json())
    assert not handovers.accept("asker", {})
    assert handovers.find("asker") is None and handovers.find("other") is not None
    handovers.clear()
    assert handovers.find("other") is None
    for offer in (first, second):
        offer.withdraw()


def test_withdrawn_memory_cannot_be_opened() -> None:
    offer = Offer(4096)
    told = offer.to_json()
    offer.withdraw()
    offer.withdraw()
    assert not Handovers().accept("asker", told)


def test_rows_that_do_not_fit_have_no_room() -> None:
    offer = Offer(4096)
    offer.withdraw()
    assert offer.rows(0, 1024, 1) is not None
    for at, rows in ((0, 1025), (64, 1024), (-64, 1), (4096, 1), (1, 1), (1 << 60, 1)):
        assert offer.rows(at, rows, 1) is None


@pytest.mark.parametrize(
    "lie",
    [
        {"label": "../../etc/passwd"},
        {"label": "holdfast-../x"},
        {"label": 7},
        {"label": None},
        {"pid": "self"},
        {"pid": -1},
        {"file": "1/../../../x"},
        {"file": True},
        {"bytes": 0},
        {"bytes": -4096},
        {"bytes": BYTES_MAX + 1},
        {"bytes": 8192},
        {"bytes": 4095},
    ],
    ids=str,
)
def test_hostile_offers_are_refused(lie: dict[str, Any]) -> None:
    offer = Offer(4096)
    handovers = Handovers()
    with pytest.raises(InvalidRequestError):
        handovers.accept("asker", {**offer.to_json(), **lie})
    assert handovers.find("asker") is None
    offer.withdraw()


def test_what_has_another_label_is_not_opened(tmp_path: Path) -> None:
    """Another file of this process, and memory whose label was not told."""
    offer = Offer(4096)
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as other:
        assert not Handovers().accept("asker", {**offer.to_json(), "file": other.fileno()})
    assert path.read_bytes() == b"x" * 4096
    told = {**offer.to_json(), "label": f"holdfast-{'0' * 32}"}
    assert not Handovers().accept("asker", told)
    offer.withdraw()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK])
def test_memory_that_could_become_shorter_is_refused(seals: int) -> None:
    label = f"holdfast-{'a' * 32}"
    file = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, 4096)
        if seals:
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
        told = {"pid": os.getpid(), "file": file, "label": label, "bytes": 4096}
        with pytest.raises(InvalidRequestError, match="as it should be"):
            Handovers().accept("asker", told)
    finally:
        os.close(file)


def test_memory_is_one_piece_for_both() -> None:
    offer, handovers = Offer(mmap.PAGESIZE), Handovers()
    assert handovers.accept("asker", offer.to_json())
    offer.withdraw()
    found = handovers.find("asker")
    assert found is not None
    ours_NW, theirs_NW = offer.rows(0, 4, 8), found.rows(0, 4, 8)
    assert ours_NW is not None and theirs_NW is not None
    theirs_NW[:] = np.arange(32).reshape(4, 8)
    np.testing.assert_array_equal(ours_NW, theirs_NW)
