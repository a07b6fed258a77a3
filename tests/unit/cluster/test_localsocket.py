from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cluster import localsocket
from holdfast.cluster.localsocket import choose_socket, find_socket, remove_socket

HERE = "127.0.0.1:4711"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of sockets, for one test: below /tmp, since pytest's own paths are too long."""
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", dir="/tmp") as place:
        monkeypatch.setattr(localsocket, "_FOLDER", Path(place) / "own")
        yield Path(place) / "own"


def bind(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
        bound.listen()
    except OSError:
        bound.close()
        raise
    return bound


def test_a_listener_is_found_by_address_and_token_alone(folder: Path) -> None:
    path = choose_socket(HERE, "token")
    assert find_socket(HERE, "token") is None
    with bind(path):
        assert find_socket(HERE, "token") == path
        assert find_socket(HERE, "other") is None
        assert find_socket("127.0.0.1:4712", "token") is None
        assert "token" not in str(path)
        assert "4711" not in path.name
    remove_socket(path)
    assert find_socket(HERE, "token") is None
    assert list(folder.iterdir()) == []


def test_the_folder_is_this_users_alone(folder: Path) -> None:
    choose_socket(HERE, "token")
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_can_enter_is_not_used(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    path = choose_socket(HERE, "token")
    assert path.parent != folder
    assert path.parent.stat().st_mode & 0o777 == 0o700
    remove_socket(path)
    assert not path.parent.exists()
    with bind(folder / path.name):
        assert find_socket(HERE, "token") is None


def test_a_long_temporary_folder_does_not_make_a_path_too_long(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder.mkdir(mode=0o755)
    path = choose_socket(HERE, "token")
    assert path.parent != folder
    bind(path).close()
    remove_socket(path)


def test_a_link_is_not_the_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    path = choose_socket(HERE, "token")
    assert path.parent != folder
    remove_socket(path)
    assert find_socket(HERE, "token") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_not_used(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, -1)
    path = choose_socket(HERE, "token")
    assert path.parent != folder
    remove_socket(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_nobody_else_can_connect() -> None:
    script = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
    )
    own = Path(f"/tmp/holdfast-test-{os.getpid()}")
    own.mkdir(mode=0o700)
    try:
        with bind(own / "s"):
            done = subprocess.run(
                [sys.executable, "-c", script, str(own / "s")],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
    finally:
        remove_socket(own / "s")
    assert "PermissionError" in done.stderr


def test_sockets_that_dead_processes_left_are_removed_and_living_ones_stay(folder: Path) -> None:
    choose_socket(HERE, "token")
    long_ago = time.time() - 3600
    bind(folder / "dead").close()
    bind(folder / "new").close()  # perhaps it is bound, and does not listen yet
    with bind(folder / "alive"):
        for name in ("dead", "alive"):
            os.utime(folder / name, (long_ago, long_ago))
        choose_socket(HERE, "token")
        assert sorted(path.name for path in folder.iterdir()) == ["alive", "new"]


def test_the_socket_of_one_that_had_the_same_port_is_replaced() -> None:
    path = choose_socket(HERE, "token")
    bind(path).close()
    assert choose_socket(HERE, "token") == path
    bind(path).close()
