"""What can go wrong, as the caller should act on it.

One class per different action of the caller; each also derives from the builtin a Python user
would catch. A message is a lowercase sentence, then the facts, then what to do; the facts stay
readable as ``error.facts``.
"""

from __future__ import annotations


class HoldfastError(Exception):
    """Base of everything Holdfast raises on purpose.

    >>> str(HoldfastError("segment too short", object="c000001/r0.hf", bytes=12, todo="run verify"))
    "segment too short. object='c000001/r0.hf' bytes=12; run verify"
    """

    def __init__(self, message: str, *, todo: str = "", **facts: object) -> None:
        self.facts = facts
        self.todo = todo
        shown = " ".join(f"{name}={value!r}" for name, value in facts.items())
        text = f"{message}. {shown}" if shown else message
        super().__init__(f"{text}; {todo}" if todo else text)


class HoldfastWarning(UserWarning):
    """Something works, and costs more than it has to: the message says what to change."""


class InvalidRequestError(HoldfastError, ValueError):
    """The call or the settings are wrong: fix them."""


class NotFoundError(HoldfastError, LookupError):
    """What was asked for does not exist: list what does."""


class ConflictError(HoldfastError):
    """Another writer owns the run: reload and retry, or stop."""


class UnavailableError(HoldfastError, OSError):
    """Storage did not answer or has no room: retry with backoff, or make room."""


class CorruptDataError(HoldfastError):
    """Stored bytes are damaged: use an older checkpoint, or rebuild."""


class DataLossError(HoldfastError):
    """Rows are gone for good: stop; the message names them."""
