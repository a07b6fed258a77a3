"""Values that no reader expects: numbers, texts and JSON of the wrong kind; and places for them."""

from __future__ import annotations

import copy
import random
from typing import Any

NUMBERS = (
    0, 1, 2, 3, 7, 8, 255, 256, 1 << 15, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40,
    (1 << 53) + 1, (1 << 55) - 1, 1 << 55, (1 << 56) - 1, 1 << 56, 1 << 57, 1 << 62, (1 << 63) - 1,
    1 << 63, (1 << 64) - 1, 1 << 70, -1, -2, -(1 << 31), -(1 << 63),
)  # fmt: skip
TEXTS = (
    "", " ", "[/red]", "[bold]x[/bold]", "[link=file:///etc/passwd]x[/link]", "[", "\\[/]",
    "\ud800", "\udfff\ud800", "a\x1b[31mb", "\x1b]0;title\x07", "\x9b31m", "\x00", "a\nb\rc",
    "\u202e", "\u2028", "é" * 40, "_orig_mod", "_orig_mod._orig_mod", "../../../etc/passwd",
    "/etc/passwd", "objects/../../x", "catalog/00000001.json", "..", ".", "a/b", "a\\b", "%s%n",
    "{0}", "$(id)",
    "<script>alert(1)</script>", "'\"`", "NaN", "-1", "1e999", "weight", "users.weight", "#0", "x",
    "fp32", "nothing", "model", "\U0001f9ff", "x" * 300,
)  # fmt: skip
ODD = (
    None, True, False, 0.0, 1.0, 1.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf"),
    10**400, "", "0", [], {}, [[]], [None], {"x": 1}, [1, 2, 3, 4], {"d": []},
)  # fmt: skip

Place = tuple[Any, Any]  # a container, and the key or index in it


def number(rng: random.Random, near: Any = 0, known: tuple[int, ...] = ()) -> int:
    """A hostile number: next to the true one, one of some that are known, or an extreme."""
    is_whole = type(near) is int
    if is_whole and rng.random() < 0.45:
        return int(near) + rng.choice((-2, -1, 1, 2, 8, -8, 16))
    if known and rng.random() < 0.5:
        return rng.choice(known)
    return rng.choice(NUMBERS)


def text(rng: random.Random) -> str:
    """A hostile text; one in a while is a megabyte long."""
    if rng.random() < 0.002:
        return "long" * (1 << 18)
    return rng.choice(TEXTS)


def value(rng: random.Random, old: Any) -> Any:
    """Something in the place of ``old``, most often of its own kind."""
    draw = rng.random()
    if draw < 0.2:
        return copy.deepcopy(rng.choice(ODD))
    if type(old) is int and draw < 0.9:
        return number(rng, old)
    if isinstance(old, float) and draw < 0.9:
        return rng.choice((0.0, -1.0, 1e300, -1e300, 5e-324, 1e9, float("inf"), float("nan")))
    if isinstance(old, str) and draw < 0.9:
        return text(rng)
    if isinstance(old, list) and old and draw < 0.7:
        return changed_list(rng, old)
    if draw < 0.85:
        return rng.choice((number(rng), text(rng), nested(rng)))
    return copy.deepcopy(rng.choice(ODD))


def changed_list(rng: random.Random, old: list[Any]) -> list[Any]:
    """A list with items gone, there twice, swapped, or added."""
    new = list(old)
    at, other = rng.randrange(len(new)), rng.randrange(len(new))
    match rng.randrange(7):
        case 0:
            del new[at]
        case 1:
            new.insert(other, copy.deepcopy(new[at]))
        case 2:
            new[at], new[other] = new[other], new[at]
        case 3:
            new.reverse()
        case 4:
            new.append(copy.deepcopy(rng.choice(ODD)))
        case 5:
            new[at] = copy.deepcopy(new[other])
        case _:
            del new[min(at, other) :]
    return new


def nested(rng: random.Random) -> Any:
    """A value inside of many lists."""
    made: Any = 1
    for _ in range(rng.choice((3, 50, 400))):
        made = [made]
    return made


def places(root: Any) -> list[Place]:
    """Every place in a JSON value."""
    found: list[Place] = []
    waiting = [root]
    while waiting:
        now = waiting.pop()
        items: Any = now.items() if isinstance(now, dict) else enumerate(now)
        for key, item in items:
            found.append((now, key))
            if isinstance(item, dict | list):
                waiting.append(item)
    return found


def change_any(rng: random.Random, root: Any) -> str:
    """Change one place of a JSON value; what was done."""
    found = places(root)
    if not found:
        return "nothing to change"
    within, key = rng.choice(found)
    old = within[key]
    if isinstance(within, dict) and rng.random() < 0.15:
        del within[key]
        if rng.random() < 0.5:
            within[text(rng)] = old
            return f"key {key!r} renamed"
        return f"key {key!r} gone"
    within[key] = value(rng, old)
    return f"[{key!r}] {str(old)[:40]!r} -> {str(within[key])[:40]!a}"
