"""Follow an events file that another process appends to.

Invariant: every whole line is read once; the line a killed writer tore is left out, also when the
next writer's first line was appended to it.
"""

from __future__ import annotations

from pathlib import Path

from holdfast import events
from holdfast.errors import InvalidRequestError


class Follower:
    """Reads what is new in an events file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[events.Event]:
        """The events since the last call; none while the file does not exist."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.splitlines():
            try:
                found.append(events.from_json(_untorn(line.decode("utf-8", "replace"))))
            except InvalidRequestError:
                continue
        return found


def _untorn(line: str) -> str:
    """The last event of a line: what stands before it was torn by a kill.

    >>> _untorn('{"kind": "sa{"kind": "save_failed"}')
    '{"kind": "save_failed"}'
    """
    return line[max(0, line.rfind('{"kind"')) :]
