"""What a process prints goes to a file, whose end is shown when the process has died.

Not here: where such files are (engine.py, rayengine.py).
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

_TAIL_BYTES = 2000


def print_to(log: Path) -> None:
    """Whatever this process prints goes to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
            with suppress(OSError, ValueError):
                stream.flush()
            os.dup2(file.fileno(), fd)


def read_tail(log: Path | None) -> str:
    """The end of what was printed; nothing where there is no such file on this machine."""
    if log is None:
        return ""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
