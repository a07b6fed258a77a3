"""Tell a user how rows are found, and what it costs: as events, and as warnings where it is much.

Invariant: telling never stops training, also where warnings are made errors.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable

from holdfast import events
from holdfast.checkpoint.tracking.method import WHOLE
from holdfast.checkpoint.tracking.watch import UNSAVED, Notice
from holdfast.errors import HoldfastWarning


def tell_tracking(notices: Iterable[Notice], log: events.EventLog) -> None:
    """Emit an event for each notice; warn once for each reason that a user can act on."""
    warned: dict[tuple[str, str], list[str]] = {}
    told = list(notices)
    for notice in told:
        log.emit(
            events.TrackingMethod(
                table=notice.table,
                method=notice.method,
                reason=notice.reason,
                todo=notice.todo,
                is_escape=notice.is_escape,
            )
        )
        if notice.is_escape or (notice.method in (WHOLE, UNSAVED) and notice.todo):
            warned.setdefault((notice.reason, notice.todo), []).append(notice.table)
    for (reason, todo), tables in warned.items():
        shown = ", ".join(tables[:3]) + (f" and {len(tables) - 3} more" * (len(tables) > 3))
        if any(notice.reason == reason and notice.method == WHOLE for notice in told):
            reason += ", so each checkpoint stores all of its rows"
        # A filter may turn warnings into errors; training goes on all the same.
        with contextlib.suppress(HoldfastWarning):
            warnings.warn(f"{shown}: {reason}; {todo}", HoldfastWarning, stacklevel=2)
