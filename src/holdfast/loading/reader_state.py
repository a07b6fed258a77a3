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
    }


_CURRENT, _OTHERS = "holdfast.number", "holdfast.others"


def join_states(states: Mapping[int, Mapping[str, Any]], current: int) -> dict[str, Any]:
    """One state of several readers, by their numbers; that of the current one if there is one.

    >>> split_states(join_states({0: {"a": 1}, 1: {"b": 2}}, 1))
    ({1: {'b': 2}, 0: {'a': 1}}, 1)
    """
    joined = dict(states[current])
    others = {str(number): dict(state) for number, state in states.items() if number != current}
    return {**joined, _CURRENT: current, _OTHERS: others} if others or current else joined


def split_states(state: Mapping[str, Any]) -> tuple[dict[int, Mapping[str, Any]], int]:
    """The states of all readers, and the number of the current one.

    Raises:
        InvalidRequestError: not a reader's state.
    """
    try:
        current = int(state.get(_CURRENT, 0))
        others = {int(number): other for number, other in state.get(_OTHERS, {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError("not a reader's state") from error
    own = {key: value for key, value in state.items() if key not in (_CURRENT, _OTHERS)}
    return {current: own, **others}, current


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
        return Resume(epoch, batches, True, False, None, None, state, None, None, (), False, state)
    if state[_FORMAT] != _VERSION:
        raise InvalidRequestError(
            "the reader's state is of a newer version",
            version=state[_FORMAT],
            known=_VERSION,
            todo="update holdfast",
        )
    try:
        epoch, batches = int(state["epoch"]), int(state["batches"])
        per_step = None if state["per_step"] is None else int(state["per_step"])
        if min(epoch, batches, per_step or 0) < 0:
            raise ValueError
        return Resume(
            epoch=epoch,
            batches=batches,
            has_begun=batches > 0,
            is_over=bool(state["is_over"]),
            per_step=per_step,
            start=state["start"],
            loader=state["loader"],
            own=state["own"],
            now=state["now"],
            ahead=tuple(state["ahead"]),
            has_read_end=bool(state["has_read_end"]),
            raw=state,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError("not a reader's state", keys=sorted(map(str, state))) from error


def _place_in_epochs(state: Mapping[str, Any], loader: Any) -> tuple[int, int]:
    """Epoch and batch, of a loader that counts batches over all epochs; else the first epoch."""
    batches = state.get("batches") if isinstance(state, Mapping) else None
    if isinstance(batches, int):
        with contextlib.suppress(TypeError, ZeroDivisionError, NotImplementedError):
            return divmod(batches, len(loader))
    return 0, 0
