"""What can go wrong, as the caller should act on it.

One class per different action of the caller; each also derives from the builtin a Python user
would catch. A message is a lowercase sentence, then the facts, then what to do; the facts stay
readable as ``error.facts``.

Invariant: the text of an error is safe to show, whatever its message and its facts were made of.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from holdfast.visible import visible

# Of one fact, in the text; the whole of it stays in ``facts``.
_FACT_LENGTH_MAX = 1000


class HoldfastError(Exception):
    """Base of everything Holdfast raises on purpose.

    >>> str(HoldfastError("segment too short", object="c000001/r0.hf", bytes=12, todo="run verify"))
    "segment too short. object='c000001/r0.hf' bytes=12; run verify"
    """

    def __init__(self, message: str, *, todo: str = "", **facts: object) -> None:
        self.facts = facts
        self.todo = todo
        shown = " ".join(f"{name}={_shorten(repr(value))}" for name, value in facts.items())
        text = f"{message}. {shown}" if shown else message
        super().__init__(visible(f"{text}; {todo}" if todo else text))


def _shorten(fact: str) -> str:
    """The ends of a long fact: the beginning tells what it is, the end often why."""
    if len(fact) <= _FACT_LENGTH_MAX:
        return fact
    half = _FACT_LENGTH_MAX // 2
    return f"{fact[:half]} … {fact[-half:]}"


class HoldfastWarning(UserWarning):
    """Something works, and costs more than it has to: the message says what to change."""


class InvalidRequestError(HoldfastError, ValueError):
    """The call or the settings are wrong: fix them."""


def unknown_name(kind: str, given: object, known: Iterable[str]) -> InvalidRequestError:
    """The error for a name that is not among those that are known; suggests one that is close.

    >>> str(unknown_name("strategy", "incrp", ["full", "incrcp"]))
    "unknown strategy. given='incrp' known=['full', 'incrcp']; did you mean 'incrcp'?"
    """
    names = list(known)
    close = difflib.get_close_matches(str(given), names, n=1)
    todo = f"did you mean {close[0]!r}?" if close else ""
    return InvalidRequestError(f"unknown {kind}", todo=todo, given=given, known=names)


class NotFoundError(HoldfastError, LookupError):
    """What was asked for does not exist: list what does."""


class ConflictError(HoldfastError):
    """Another writer owns the run: reload and retry, or stop."""


class UnavailableError(HoldfastError, OSError):
    """Storage did not answer or has no room: retry with backoff, or make room."""


class CommitUnknownError(UnavailableError):
    """Storage did not answer a commit, which may have been carried out: the next save finds out.

    ``entry`` is what was to be committed.
    """

    def __init__(self, message: str, *, entry: object, todo: str = "", **facts: object) -> None:
        super().__init__(message, todo=todo, **facts)
        self.entry = entry


class SaveCancelledError(HoldfastError):
    """The save gave way to a newer one: nothing to do."""


class CorruptDataError(HoldfastError):
    """Stored bytes are damaged: use an older checkpoint, or rebuild."""


class DataLossError(HoldfastError):
    """Rows are gone for good: stop; the message names them."""
