"""How much nested values are when they are walked: a list that many lists name counts each time.

A pickle can name one value many times, and one inside of itself. Whoever walks such values walks a
tree: 30 lists that hold the one before twice are a billion lists. So before anybody walks them they
are measured here, every value once.

Invariant: what passed here is walked to its end, in as many steps as it was measured to have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.boundary.budget import DEPTH_MAX, Account
from holdfast.errors import CorruptDataError

_VALUE_BYTES = 64  # of memory that a value takes at least, wherever it is copied to


@dataclass(frozen=True, slots=True)
class Measure:
    """Values that a walk meets, bytes of their texts, and how deep they are nested."""

    values: int
    bytes: int
    depth: int


def measure(root: Any, *, what: str) -> Measure:
    """Measure nested lists, tuples, dicts and sets; all else counts as one value.

    >>> two = ["ab", "ab"]
    >>> measure([two, two, two], what="an example")
    Measure(values=10, bytes=12, depth=2)

    Raises:
        CorruptDataError: a value holds itself, or values are nested too deep.
    """
    done: dict[int, Measure] = {}
    path: list[tuple[Any, Iterator[Any]]] = []
    open_: set[int] = set()

    def check_depth(depth: int) -> None:
        if depth > DEPTH_MAX:
            raise CorruptDataError("values are nested too deep", what=what, most=DEPTH_MAX)

    def enter(value: Any) -> None:
        if id(value) in open_:
            raise CorruptDataError("a value holds itself", what=what)
        check_depth(len(path) + 1)
        open_.add(id(value))
        path.append((value, iter(_children(value))))

    if not _is_container(root):
        return _leaf(root)
    enter(root)
    while path:
        value, left = path[-1]
        for child in left:
            if _is_container(child) and id(child) not in done:
                enter(child)
                break
        else:
            path.pop()
            open_.remove(id(value))
            done[id(value)] = found = _sum(value, done)
            check_depth(found.depth)
    return done[id(root)]


def check_size(root: Any, account: Account, *, what: str) -> None:
    """Refuse nested values whose copy the input's size does not allow.

    Raises:
        CorruptDataError: a value holds itself, or values are nested too deep.
        InvalidRequestError: there are too many.
    """
    found = measure(root, what=what)
    account.budget.check_memory(
        found.values * _VALUE_BYTES + found.bytes,
        claim=f"{found.values} values of {what}, shared ones counted each time",
    )


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | set | frozenset)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (item for pair in value.items() for item in pair)
    items: Iterable[Any] = value
    return items


def _leaf(value: Any) -> Measure:
    return Measure(1, len(value) if isinstance(value, str | bytes) else 0, 0)


def _sum(value: Any, done: dict[int, Measure]) -> Measure:
    values, size, depth = 1, 0, 0
    for child in _children(value):
        found = done.get(id(child)) if _is_container(child) else None
        found = found or _leaf(child)
        values += found.values
        size += found.bytes
        depth = max(depth, found.depth)
    return Measure(values, size, depth + 1)
