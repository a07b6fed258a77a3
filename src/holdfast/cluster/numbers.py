"""Numbers and texts of a message's meta: taken only as our own side would have written them.

JSON says nothing of what a value is for: a negative number counts from the end, a text that looks
like a number becomes one, true is 1. Nothing of that is taken here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.errors import HoldfastError, InvalidRequestError

WORKERS_MAX = 256  # that a cluster sees in its life, replaced ones included
PUSHES_MAX = 1 << 48  # of a worker: they are counted up by one
# What reading a message that is not as it should be can raise.
_MALFORMED = (
    KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
_FOUND_MAX = 200


@contextmanager
def refusing_malformed(kind: str) -> Iterator[None]:
    """Handle a message in the block; what a malformed one makes Python raise becomes our error."""
    try:
        yield
    except HoldfastError:
        raise
    except _MALFORMED as error:
        raise InvalidRequestError(
            "malformed message", kind=kind, found=repr(error)[:_FOUND_MAX]
        ) from error


def whole(value: Any, *, most: int = (1 << 62)) -> int:
    """A number of a message, if it is one from 0 on.

    Raises:
        InvalidRequestError: it is not.
    """
    if type(value) is not int or not 0 <= value <= most:
        raise InvalidRequestError("not a number that a message can have", found=repr(value)[:40])
    return value


def number_of(value: Any) -> int:
    """The number of a push, or -1 for the one before the first; raises likewise."""
    return -1 if type(value) is int and value == -1 else whole(value, most=PUSHES_MAX)


def worker_of(value: Any) -> int:
    """The number of a worker; raises likewise."""
    return whole(value, most=WORKERS_MAX - 1)


def text(value: Any) -> str:
    """A text of a message; raises likewise."""
    if type(value) is not str:
        raise InvalidRequestError("not a text that a message can have", found=repr(value)[:40])
    return value
