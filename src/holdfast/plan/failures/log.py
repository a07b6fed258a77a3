"""A log of failures from a CSV file: hours between them, or the moments they happened at.

Invariant: what cannot be meant is refused with its line: other units, times out of order.

Not here: what is made of the hours (models.py, fitting.py).
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from holdfast.errors import InvalidRequestError, NotFoundError

# 114 years: what a column of hours cannot hold, and seconds since 1970 do.
_LOG_HOURS_MAX = 1e6


def read_log(path: str | Path, *, column: str | None = None) -> tuple[float, ...]:
    """The times between failures of a CSV log, in hours, in the order recorded.

    One value per line, after an optional header: hours from a start or a failure to the next
    failure, or ISO 8601 timestamps of failures (naive ones count as UTC), of which n give n - 1
    times. ``column`` names the one to read where there are several. Blank lines and lines that
    begin with '#' are skipped.

    Timestamps must rise: a log out of order is more likely several jobs one after another than one
    job shuffled, and sorting would mix them into times that are too short. Two equal timestamps
    are one failure of two nodes, to be kept as one line.

    Raises:
        NotFoundError: There is no such file.
        InvalidRequestError: The log is empty or holds anything else; the message names the line.
    """
    name, cells = _read_column(Path(path), column)
    if not cells:
        raise InvalidRequestError(
            "the failure log is empty", path=str(path), todo="give one line per failure"
        )
    if _hours(cells[0].text) is not None:
        return _read_hours(Path(path), name, cells)
    return _read_timestamps(Path(path), cells)


@dataclass(frozen=True, slots=True)
class _Cell:
    line: int
    text: str


def _read_column(path: Path, column: str | None) -> tuple[str, list[_Cell]]:
    """The header's name ('' without a header) and the cells of the column to read."""
    rows: list[tuple[int, list[str]]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines)
            for row in reader:
                texts = [text.strip() for text in row]
                if any(texts) and not texts[0].startswith("#"):
                    rows.append((reader.line_num, texts))
    except FileNotFoundError as error:
        raise NotFoundError(
            "there is no such failure log", path=str(path), todo="check the path"
        ) from error
    except (UnicodeDecodeError, csv.Error, IsADirectoryError) as error:
        raise InvalidRequestError(
            "the failure log is not a CSV text file", path=str(path), why=str(error),
            todo="write it as UTF-8 text, one failure per line",
        ) from error  # fmt: skip
    if not rows:
        return "", []
    names: list[str] = []
    if not any(_is_value(text) for text in rows[0][1]):
        names = rows.pop(0)[1]
    width = len(names or rows[0][1])
    at = 0
    if column is not None:
        if column not in names:
            raise InvalidRequestError(
                "the failure log has no such column", path=str(path), column=column,
                columns=names, todo="name one of its header",
            )  # fmt: skip
        at = names.index(column)
    elif width > 1:
        raise InvalidRequestError(
            "the failure log has several columns", path=str(path), columns=names or width,
            todo="name one with column=..., as its header does",
        )  # fmt: skip
    for line, texts in rows:
        if len(texts) != width:
            raise _bad_line(
                path, line, ",".join(texts), "a line has another number of columns than the first",
                "write numbers with a decimal point, and one failure per line",
            )  # fmt: skip
    return (names[at] if names else ""), [_Cell(line, texts[at]) for line, texts in rows]


def _is_value(text: str) -> bool:
    """Whether a cell is meant as a value; a mistyped one must not pass for a header."""
    return bool(text) and (text[0] in "0123456789+-." or _hours(text) is not None)


def _hours(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


# Headers that promise another unit: uptime_s, minutes, "gap (days)".
_OTHER_UNIT = re.compile(
    r"(?:^|[\W_])(ms|s|secs?|seconds?|m|mins?|minutes?|d|days?)[\])]?$", re.IGNORECASE
)


def _read_hours(path: Path, name: str, cells: list[_Cell]) -> tuple[float, ...]:
    if unit := _OTHER_UNIT.search(name):
        raise InvalidRequestError(
            "the failure log is not in hours", path=str(path), column=name, unit=unit[1],
            todo="convert it to hours",
        )  # fmt: skip
    times = []
    for cell in cells:
        hours = _hours(cell.text)
        if hours is None or not math.isfinite(hours):
            raise _bad_line(
                path, cell.line, cell.text, "a time between failures is not a number",
                "write hours, as in 12.5",
            )  # fmt: skip
        if hours <= 0:
            raise _bad_line(
                path, cell.line, cell.text, "a time between failures is not greater than zero",
                "write the hours that passed, finer if they were rounded to zero",
            )  # fmt: skip
        if hours > _LOG_HOURS_MAX:
            raise _bad_line(
                path, cell.line, cell.text, "a time between failures is longer than a century",
                "write hours, or moments as ISO timestamps (2026-01-31T12:00:00)",
            )  # fmt: skip
        times.append(hours)
    return tuple(times)


def _read_timestamps(path: Path, cells: list[_Cell]) -> tuple[float, ...]:
    times: list[float] = []
    last: datetime | None = None
    for cell in cells:
        try:
            moment = datetime.fromisoformat(cell.text)
        except ValueError as error:
            raise _bad_line(
                path, cell.line, cell.text, "neither a number of hours nor an ISO timestamp",
                "write hours (12.5) or timestamps (2026-01-31T12:00:00) on every line",
            ) from error  # fmt: skip
        if last is not None:
            if (moment.tzinfo is None) != (last.tzinfo is None):
                raise _bad_line(
                    path, cell.line, cell.text, "timestamps with and without a time zone",
                    "write all with one, or none",
                )  # fmt: skip
            gap_h = (moment - last) / timedelta(hours=1)
            if gap_h < 0:
                raise _bad_line(
                    path, cell.line, cell.text, "timestamps of failures do not rise",
                    "sort them if they are of one job; for several jobs write hours instead",
                )  # fmt: skip
            if gap_h == 0:
                raise _bad_line(
                    path, cell.line, cell.text, "two failures have the same timestamp",
                    "keep one line per failure, however many nodes it took",
                )  # fmt: skip
            times.append(gap_h)
        last = moment
    if not times:
        raise InvalidRequestError(
            "one timestamp gives no time between failures", path=str(path),
            todo="give at least two, or the hours from the start to the failure",
        )  # fmt: skip
    return tuple(times)


def _bad_line(path: Path, line: int, text: str, message: str, todo: str) -> InvalidRequestError:
    return InvalidRequestError(message, path=str(path), line=line, text=text, todo=todo)
