"""What a checkpoint keeps of a reader: plain values, checked when they are loaded.

Invariant: ``parse_resume`` takes what ``pack_state`` makes. Anything else is either the state of a
loader alone, as older checkpoints have it, or is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import InvalidRequestError

_FORMAT = "holdfast.reader"
_VERSION = 1
_COUNT_MAX = 1 << 56  # of epochs and batches


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a resumed reader goes on."""

    epoch: int
    batches: int  # trained of the epoch
    has_begun: bool
    is_over: bool
    per_step: int | None  # see TrainedCount.remembered
    start: Mapping[str, Any] | None  # generators when the epoch began
    loader: Any  # a stateful loader's own state
    own: Mapping[str, Any] | None  # the loader's generators behind the last trained batch
    now: Mapping[str, Any] | None  # global generators
    ahead: Sequence[Mapping[str, Any] | None]  # generators before each batch that was read ahead
    has_read_end: bool  # of the epoch behind those batches
    call: tuple[int, int] | None  # of ``epochs``: which is trained, from 1, and its first epoch
    raw: Mapping[str, Any] = field(repr=False)


def pack_state(
    *,
    epoch: int,
    batches: int,
    is_over: bool,
    per_step: int | None,
    start: Mapping[str, Any] | None,
    loader: Any,
    own: Mapping[str, Any] | None,
    now: Mapping[str, Any] | None,
    ahead: Sequence[Mapping[str, Any] | None],
    has_read_end: bool,
    call: tuple[int, int] | None,
) -> dict[str, Any]:
    """A reader's state."""
    return {
        _FORMAT: _VERSION,
        "epoch": epoch,
        "batches": batches,
        "is_over": is_over,
        "per_step": per_step,
        "start": start,
        "loader": loader,
        "own": own,
        "now": now,
        "ahead": list(ahead),
        "has_read_end": has_read_end,
        "call": None if call is None else list(call),
    }


_CURRENT, _OTHERS, _BESIDE = "holdfast.number", "holdfast.others", "holdfast.beside"


def join_states(
    states: Mapping[int, Mapping[str, Any]], current: int, beside: Sequence[int] = ()
) -> dict[str, Any]:
    """One state of several readers, by their numbers; that of the current one if there is one.

    ``beside``: other readers whose batches the last step trained, too.

    >>> split_states(join_states({0: {"a": 1}, 1: {"b": 2}}, 1, [0]))
    ({1: {'b': 2}, 0: {'a': 1}}, 1, (0,))
    """
    joined = dict(states[current])
    others = {str(number): dict(state) for number, state in states.items() if number != current}
    if not others and not current:
        return joined
    return {**joined, _CURRENT: current, _OTHERS: others, _BESIDE: list(beside)}


def split_states(
    state: Mapping[str, Any],
) -> tuple[dict[int, Mapping[str, Any]], int, tuple[int, ...]]:
    """The states of all readers, the number of the current one, and of those beside it.

    Raises:
        InvalidRequestError: not a reader's state.
    """
    try:
        current = int(state.get(_CURRENT, 0))
        others = {int(number): other for number, other in state.get(_OTHERS, {}).items()}
        if not all(isinstance(other, Mapping) for other in others.values()):
            raise ValueError("a state of no reader")
        beside = tuple(map(int, state.get(_BESIDE, ())))  # absent in older checkpoints
    except (TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as error:
        raise InvalidRequestError("not a reader's state") from error
    own = {key: value for key, value in state.items() if key not in (_CURRENT, _OTHERS, _BESIDE)}
    return {current: own, **others}, current, beside


def is_resumable(state: Any) -> bool:
    """Whether ``pack_state`` made it."""
    return isinstance(state, Mapping) and _FORMAT in state


def parse_resume(state: Mapping[str, Any], loader: Any) -> Resume:
    """Where a state leads: one of ``pack_state``, or one that the loader's own method returned.

    Raises:
        InvalidRequestError: neither.
    """
    if not is_resumable(state):
        epoch, batches = _place_in_epochs(state, loader)
        return Resume(
            epoch, batches, True, False, None, None, state, None, None, (), False, None, state
        )
    if type(state[_FORMAT]) is not int or state[_FORMAT] != _VERSION:
        raise InvalidRequestError(
            "the reader's state is of a newer version",
            version=state[_FORMAT],
            known=_VERSION,
            todo="update holdfast",
        )
    try:
        batches = _count(state["batches"])
        start = _named(state["start"])
        for part in ("rng", "own"):
            if start is not None and part in start and _named(start[part]) is None:
                raise ValueError(part)
        call = state.get("call")  # absent in older checkpoints
        number, first = (0, 0) if call is None else map(_count, call)
        return Resume(
            epoch=_count(state["epoch"]),
            batches=batches,
            has_begun=batches > 0,
            is_over=_flag(state["is_over"]),
            per_step=None if state["per_step"] is None else _count(state["per_step"]),
            start=start,
            loader=state["loader"],
            own=_named(state["own"]),
            now=_named(state["now"]),
            ahead=tuple(map(_named, state["ahead"])),
            has_read_end=_flag(state["has_read_end"]),
            call=None if call is None else (number, first),
            raw=state,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError("not a reader's state", keys=sorted(map(str, state))) from error


def epoch_of(state: Any) -> int:
    """The epoch that a state says, be it a loader's own; 0 where it says none.

    >>> epoch_of({"epoch": 3}), epoch_of({"epoch": "x"}), epoch_of(7)
    (3, 0, 0)
    """
    if isinstance(state, Mapping):
        with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
            return max(0, int(state.get("epoch", 0)))
    return 0


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _COUNT_MAX:
        raise ValueError("not a count")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("neither true nor false")
    return value


def _named(value: Any) -> Mapping[str, Any] | None:
    if value is None or (
        isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    ):
        return value
    raise ValueError("not values by name")


def _place_in_epochs(state: Mapping[str, Any], loader: Any) -> tuple[int, int]:
    """Epoch and batch, of a loader that counts batches over all epochs; else the first epoch."""
    batches = state.get("batches") if isinstance(state, Mapping) else None
    if isinstance(batches, int):
        with contextlib.suppress(TypeError, ZeroDivisionError, NotImplementedError):
            return divmod(batches, len(loader))
    return 0, 0
