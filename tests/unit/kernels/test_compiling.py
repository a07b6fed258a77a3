"""Kernels are compiled once by many processes, kept where that is safe, and never lost."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.kernels import compiling

PROGRAM = """
import json
import numpy as np
from holdfast.kernels import compiling
from holdfast.kernels.rows import bitmap
compiling._QUIET_S = 0.0
words_W = bitmap.new(64)
reported = []
with compiling.reporting(reported.append):
    compiling.run_all([lambda: bitmap.mark(words_W, np.array([1, 3]), 64)])
found = compiling.compiled()
print(json.dumps({
    "kernels": found.kernels, "folder": None if found.folder is None else str(found.folder),
    "marked": int(words_W[0]), "reports": len(reported),
}))
"""


def start(**environment: object) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**kept, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, object], str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    said = json.loads(out)
    assert said["marked"] == 0b1010
    return said, err


def test_processes_of_a_host_compile_a_kernel_once(tmp_path: Path) -> None:
    said = [finish(each) for each in [start(NUMBA_CACHE_DIR=tmp_path) for _ in range(3)]]
    (compiled,) = [each for each in said if each[0]["kernels"]]
    assert compiled[0]["kernels"] == 1 and compiled[0]["reports"] >= 2
    assert "holdfast: compiling kernels, once per machine: 0 of 1 ..." in compiled[1]
    assert not list(tmp_path.rglob("*.lock"))


def test_a_damaged_file_is_compiled_anew(tmp_path: Path) -> None:
    assert finish(start(NUMBA_CACHE_DIR=tmp_path))[0]["kernels"] == 1
    kept = sorted(tmp_path.rglob("bitmap.*.nbc")) or sorted(tmp_path.rglob("*bitmap.mark-*.nbc"))
    assert kept
    for file in kept:
        file.write_bytes(file.read_bytes()[:100])
    assert finish(start(NUMBA_CACHE_DIR=tmp_path))[0]["kernels"] == 1


def test_a_folder_that_cannot_be_written_gives_way_to_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shared = tmp_path / "shared"
    (shared / "holdfast").mkdir(parents=True)
    (shared / "holdfast").chmod(0o777)  # another user could put code there
    said, _ = finish(start(
        NUMBA_CACHE_DIR=tmp_path / "file", XDG_CACHE_HOME=shared, HOME=tmp_path / "home"
    ))  # fmt: skip
    folder = Path(str(said["folder"]))
    assert folder.parent == tmp_path / "home" / ".cache" / "holdfast"
    assert not stat.S_IMODE(folder.parent.stat().st_mode) & 0o077
    assert not list((shared / "holdfast").iterdir())


def test_a_lock_that_is_never_released_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "_PATIENCE_S", 0.05)
    with (tmp_path / "kernel.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with compiling._locked(tmp_path, "kernel") as may_be_there:
            assert may_be_there


def test_every_source_of_a_kernel_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_KERNELS", tmp_path)
    (tmp_path / "a.py").write_text("1")
    before = compiling._sources.__wrapped__()
    (tmp_path / "b.py").write_text("2")
    assert compiling._sources.__wrapped__() != before


def test_a_numba_that_is_made_differently_still_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(dispatcher: object) -> None:
        raise AttributeError("_compiler")

    monkeypatch.setattr(compiling, "_Kept", unknown)
    assert compiling.kernel()(_twice)(21) == 42


def _twice(number: int) -> int:
    return 2 * number
