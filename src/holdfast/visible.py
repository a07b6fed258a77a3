r"""Strings from outside, made safe to show: on a terminal, in a log, a picture, a label, in JSON.

A name in a catalog, a reason, a peer's message, a file's name: any of them may hold what a terminal
acts on (ESC), what turns the text around (a bidi override), what nobody sees (a zero-width space)
or what no encoding can write (half of a surrogate pair). Here each such character becomes the
escape that Python writes for it; everything printable stays as it is.

Invariants:
- What ``visible`` returns is printable, ``keep`` aside, and can be encoded as UTF-8.
- Doing it twice changes nothing.

Not here: markup of rich and of pictures, which is turned off where they are made.
"""

from __future__ import annotations

import math
import re
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")


def visible(text: str, *, most: int | None = None, keep: str = "") -> str:
    r"""A string whose every character can be seen; ``most`` characters of it, ``keep`` as it is.

    >>> visible("users"), visible("a\x1b[2J\u202eb\n\ud800"), visible("a\nb", keep="\n")
    ('users', 'a\\x1b[2J\\u202eb\\n\\ud800', 'a\nb')
    >>> visible("0123456789", most=5)
    '0123…'
    """
    if most is not None and len(text) > most:
        text = f"{text[: most - 1]}…"
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)
        if most is not None and len(text) > most:
            text = f"{text[: most - 1]}…"
    return text


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def as_json_value(value: Any) -> Any:
    r"""A value that every JSON parser takes: no number that is none, no half of a surrogate pair.

    Other strings stay as they are, so that a program gets the names themselves.

    >>> as_json_value({"loss": float("nan"), "table": ("a\ud800", "b\x1b")})
    {'loss': None, 'table': ['a\\ud800', 'b\x1b']}
    """
    match value:
        case str():
            return _SURROGATE.sub(lambda found: _escape(found[0]), value)
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {as_json_value(name): as_json_value(item) for name, item in value.items()}
        case list() | tuple():
            return [as_json_value(item) for item in value]
        case _:
            return value
