"""Tell that a scheduler changes learning rates and does not go along with the checkpoints.

torch's schedulers write ``initial_lr`` into the groups of their optimizer. A resumed run has the
rates as they were saved, but a scheduler that is made anew begins its schedule from the start.

Invariant: telling never stops training, also where warnings are made errors.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from holdfast import events
from holdfast.errors import HoldfastWarning
from holdfast.loading.generators import KeptGenerator

_NO_SCHEDULERS = (torch.amp.GradScaler, KeptGenerator)


def has_lost_scheduler(
    optimizers: Iterable[torch.optim.Optimizer], extras: Mapping[str, Any]
) -> bool:
    """Whether a scheduler is at work, and nothing that goes along can be, or hold, one."""
    is_scheduled = any("initial_lr" in group for one in optimizers for group in one.param_groups)
    return is_scheduled and all(isinstance(item, _NO_SCHEDULERS) for item in extras.values())


def tell_lost_scheduler(log: events.EventLog) -> None:
    """Emit a notice, and warn."""
    reason = (
        "a scheduler changes the learning rate and does not go along: a resumed run begins its "
        "schedule anew"
    )
    todo = "pass it: extras={'scheduler': scheduler}; or set its rate by ck.current_step"
    log.emit(events.ReaderNotice(reason=reason, todo=todo))
    # A filter may turn warnings into errors; training goes on all the same.
    with contextlib.suppress(HoldfastWarning):
        warnings.warn(f"{reason}; {todo}", HoldfastWarning, stacklevel=4)
