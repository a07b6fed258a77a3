"""Which rows of a model's tables changed since the last checkpoint.

Optimizers name most of them: a gradient says which rows a step moves
(checkpoint/tracking/optimizers/rules.py, checkpoint/tracking/optimizers/owned.py, watch.py), and
moments keep moving those that had one (checkpoint/tracking/optimizers/moments.py). torch counts
writes to tensors, so that everything else that writes to a table is noticed (versions.py). What was
noticed and cannot be named is compared with hashes of the rows as they were saved (hashes.py); what
torch does not count is found by checking a part of the rows at every save. method.py decides, one
table at a time; checkpoint/tracking/optimizers/evidence.py says when an optimizer that nobody knows
can be trusted. tracker.py joins them for all tables and hands out cursors.
"""

from holdfast.checkpoint.tracking.marks import Marks, SinceBase
from holdfast.checkpoint.tracking.tracker import AUTO, HASH, LOOKUP, Cursor, Tracker
from holdfast.checkpoint.tracking.watch import FULL_TURN_SAVES, Notice

__all__ = [
    "AUTO",
    "FULL_TURN_SAVES",
    "HASH",
    "LOOKUP",
    "Cursor",
    "Marks",
    "Notice",
    "SinceBase",
    "Tracker",
]
