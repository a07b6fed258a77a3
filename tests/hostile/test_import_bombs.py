"""Bombs: what an import takes is bounded by the size of its source, measured in a child process."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from holdfast.boundary.budget import Budget
from tests.hostile import import_bombs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")

BUFFERS_BYTES = 96 << 20  # staging and encoding, whatever the source
ROOM_BYTES = 1 << 30  # of address space that a child may take: then it fails, and not the machine
BOMBS = {
    **{f"file: {name}": make for name, make in import_bombs.FILES.items()},
    **{f"folder: {name}": make for name, make in import_bombs.FOLDERS.items()},
}
ACCEPTED = {
    "file: lists as deep as can be",
    "file: expanded number, just small enough",
    "file: expanded row, just few enough",
    "file: many states of one shape",
    "file: a memo of 2^31",
    "file: a hundred thousand records",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What became of every bomb: one process imports torch, and forks for each."""
    folder = tmp_path_factory.mktemp("bombs")
    command = [sys.executable, "-W", "ignore", __file__, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout)


@pytest.mark.parametrize("name", BOMBS)
def test_bomb_takes_no_more_than_its_size_allows(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[name]
    budget = Budget(result["source_bytes"])
    assert result["error"] in (None, "InvalidRequestError", "CorruptDataError"), result
    assert (result["error"] is None) == (name in ACCEPTED), result
    assert result["grown_bytes"] <= budget.memory_bytes + BUFFERS_BYTES, result
    assert result["run_bytes"] <= (0 if result["error"] else budget.written_bytes + (1 << 20))
    assert result["left"] == []


def measure(name: str, folder: Path) -> None:
    """In a forked child: import a bomb, and write down what it took."""
    import holdfast as hf

    source, run = folder / "bomb", folder / "run"
    files = [source] if source.is_file() else list(source.iterdir())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES,) * 2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, error, message = peak_bytes(), None, ""
    try:
        hf.import_checkpoint(source, run, tables=["e.weight"], step=1)
        assert hf.verify(run).is_sound
    except Exception as raised:
        error, message = type(raised).__name__, str(raised)[:300]
    result = {
        "source_bytes": sum(path.stat().st_size for path in files),
        "grown_bytes": peak_bytes() - before,
        "error": error,
        "message": message,
        "run_bytes": sum(path.stat().st_size for path in run.rglob("*") if path.is_file()),
        "left": [str(path) for path in folder.iterdir() if path.name not in KEPT | {"run"}],
    }
    (folder / "result.json").write_text(json.dumps(result))


KEPT = {"bomb", "small.pt", "small"}


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(folder: Path) -> None:
    import shutil

    import torch

    import holdfast as hf

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import_bombs.save(folder / "small.pt")  # kernels, pools and imports beforehand
    hf.import_checkpoint(folder / "small.pt", folder / "small", tables=["e.weight"])
    hf.verify(folder / "small")
    found = {}
    for name, make in BOMBS.items():
        for act in (
            lambda make=make: make(folder / "bomb"),
            lambda name=name: measure(name, folder),
        ):
            child = os.fork()
            if child == 0:
                try:
                    act()
                finally:
                    sys.stderr.flush()
                    os._exit(0)
            os.waitpid(child, 0)
        found[name] = json.loads((folder / "result.json").read_text())
        (folder / "result.json").unlink()
        for path in (folder / "bomb", folder / "run"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
