"""What is done with every mutated run: verify, and some of these, chosen by chance."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.hostile import campaign_commands as commands
from tests.hostile import campaign_exports as exports
from tests.hostile import campaign_reading as reading
from tests.hostile.campaign_reading import Operation

OPERATIONS: dict[str, tuple[Operation, float]] = {
    "read all": (reading.read_all, 3),
    "read rows": (reading.read_rows, 4),
    "restore into": (reading.restore_into, 3),
    "dense": (reading.dense, 1),
    "updates": (reading.updates, 2),
    "diff": (reading.diff, 2),
    "inspect": (reading.inspect, 1),
    "grid": (reading.grid, 1),
    "safetensors": (exports.export_safetensors, 2),
    "torch": (exports.export_torch, 1.5),
    "dcp": (exports.export_dcp, 0.3),
    "resume": (exports.resume, 1.5),
    "train on": (exports.train_on, 0.8),
    "import": (exports.import_export, 0.15),
    "command": (commands.command, 0.3),
}


@contextlib.contextmanager
def room(out: Path) -> Iterator[None]:
    """An empty folder for an operation; afterwards it is empty again."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in out.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
