"""The order of a save: what the background half is to do, fixed before anything is copied.

    plan + selections -> SaveOrder -> Save (save.py) -> commit

Invariant: an order is plain values and never changes; what becomes of it is the save's.

Not here: base or delta (planner.py), carrying it out (save.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint.baseline import SINCE_BASE, CheckpointPlan
from holdfast.checkpoint.catalog import BASE
from holdfast.checkpoint.enter import Entering
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.selection import Selection
from holdfast.checkpoint.strategy import CodecPlan
from holdfast.placement import Placement
from holdfast.schema import TableSchema


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Everything the background half needs to know of a save.

    ``entering`` is of all tables, also of those that only other ranks hold; ``rows`` and
    ``staged_bytes`` are what this process saves.
    """

    step: int
    kind: str
    base: int
    reason: str
    codecs: CodecPlan
    rows: int
    staged_bytes: int
    entering: Entering


def make_order(
    plan: CheckpointPlan,
    *,
    base: int,
    rewind_to: int | None,
    schemas: tuple[TableSchema, ...],
    codecs: CodecPlan,
    selections: Sequence[tuple[TableSchema, Selection]],
    step: int,
    keep: Keep,
    has_grid: bool,
    placement: Placement | None = None,
) -> SaveOrder:
    """What the background half is to do; ``base`` is the step of the run's last base.

    >>> from holdfast.checkpoint.baseline import plan_checkpoint
    >>> from holdfast.checkpoint.strategy import plan_codec
    >>> from holdfast.schema import Column
    >>> table = TableSchema("users", 5, (Column("weight", 8),))
    >>> codecs = plan_codec("fp32", None, expected_restores=0, restores=0)
    >>> order = make_order(
    ...     plan_checkpoint("full", None), base=0, rewind_to=None, schemas=(table,), codecs=codecs,
    ...     selections=[(table, Selection(5))], step=7, keep=Keep(), has_grid=False)
    >>> order.kind, order.base, order.rows, order.staged_bytes
    ('base', 7, 5, 160)
    """
    counts = [(selection.rows, schema.row_bytes) for schema, selection in selections]
    return SaveOrder(
        step=step,
        kind=plan.kind,
        base=step if plan.kind == BASE else base,
        reason=plan.reason,
        codecs=codecs,
        rows=sum(rows for rows, _ in counts),
        staged_bytes=sum(rows * row_bytes for rows, row_bytes in counts),
        entering=Entering(
            schemas=schemas,
            keep=keep,
            replaces_since=base if plan.since == SINCE_BASE else None,
            rewind_to=rewind_to,
            is_floor=plan.is_floor,
            has_grid=has_grid,
            placement=placement,
        ),
    )
