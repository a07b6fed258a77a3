"""JSON that was stored: parsed strictly, since it may be damaged or made to deceive.

Everything here raises ``ValueError`` on what our own writers would never have written.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

COUNT_MAX = 1 << 56
_HEX = re.compile(r"[0-9a-f]{16}")


def parse(data: bytes | str) -> Any:
    """JSON without NaN, infinities and keys that appear twice."""
    return json.loads(data, parse_constant=_refuse, object_pairs_hook=_unique)


def count(value: object) -> int:
    """A whole number of zero or more.

    >>> count(7)
    7
    """
    if type(value) is not int or not 0 <= value < COUNT_MAX:
        raise ValueError(f"not a count: {value!r:.40}")
    return value


def text(value: object) -> str:
    """A string that can be written anywhere: not half of a surrogate pair.

    >>> text("users.weight")
    'users.weight'
    """
    if type(value) is not str:
        raise ValueError(f"not a text: {value!r:.40}")
    value.encode()  # UnicodeEncodeError is a ValueError
    return value


def number(value: object) -> float:
    """A finite number."""
    if type(value) not in (int, float):
        raise ValueError(f"not a number: {value!r:.40}")
    try:
        found = float(value)  # type: ignore[arg-type]
    except OverflowError as error:
        raise ValueError("not a finite number") from error
    if not math.isfinite(found):
        raise ValueError("not a finite number")
    return found


def checksum(value: object) -> int:
    """A checksum as ``checksum.as_hex`` writes it.

    >>> checksum("00000000000000ff")
    255
    """
    if not _HEX.fullmatch(text(value)):
        raise ValueError(f"not a checksum: {value!r:.40}")
    return int(text(value), 16)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found
