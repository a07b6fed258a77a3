"""What a checkpoint keeps of a reader: values only, checked when they come back.

Invariant: what ``pack_state`` makes, ``parse_resume`` takes; anything else that comes is either the
state of a loader alone, as older checkpoints have it, or refused.
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
    """Where to come back to."""

    epoch: int
    batches: int  # trained of the epoch
    has_begun: bool
    is_over: bool
    per_step: int | None  # see trained_count.py
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
    now: Mapping[str, Any],
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


def is_resumable(state: Any) -> bool:
    """Whether ``pack_state`` made it."""
    return isinstance(state, Mapping) and _FORMAT in state


def parse_resume(state: Mapping[str, Any], loader: Any) -> Resume:
    """Where a state leads: one of ours, or one that the loader itself gave.

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
