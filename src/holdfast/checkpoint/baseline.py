"""When to take a base: the policies of Check-N-Run, as pure functions that give their reason.

| policy | a delta holds the rows changed since | a base is taken |
|---|---|---|
| full | – | always |
| one-shot | the base | once |
| consecutive | the last checkpoint | once |
| intermittent | the base | when F_c <= I_c (section 4.1.1) |

Invariant: the first checkpoint of a run, and one whose tables have other columns than the base's,
is always a base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint.catalog import BASE, DELTA
from holdfast.errors import InvalidRequestError

SINCE_BASE, SINCE_LAST = "base", "last"
_SINCE = {
    "full": None,
    "one-shot": SINCE_BASE,
    "consecutive": SINCE_LAST,
    "intermittent": SINCE_BASE,
}
POLICIES = tuple(_SINCE)


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """What the next checkpoint is: a base, or a delta since the base or the last; and why."""

    kind: str
    since: str | None
    reason: str


def check_policy(policy: str) -> str:
    """The policy, if it is one.

    Raises:
        InvalidRequestError: lists the policies there are.
    """
    if policy not in POLICIES:
        raise InvalidRequestError("unknown base policy", policy=policy, known=list(POLICIES))
    return policy


def deltas_since(policy: str) -> str | None:
    """Since when a policy's deltas collect changed rows; None where there are no deltas."""
    return _SINCE[check_policy(policy)]


def plan_checkpoint(
    policy: str, delta_sizes: Sequence[float] | None, *, must_be_base: str | None = None
) -> CheckpointPlan:
    """What to save next.

    ``delta_sizes`` are the deltas since the base as fractions of the base's bytes (S_1 .. S_i in
    the paper); None where there is no base yet. ``must_be_base`` forces one, with its reason.

    >>> plan_checkpoint("intermittent", [0.25, 0.3]).kind
    'delta'
    >>> plan_checkpoint("intermittent", [0.25, 0.7, 0.9]).reason
    'F_c 2.85 <= I_c 3.60: a new base costs less than growing deltas'
    """
    if must_be_base is not None:
        return CheckpointPlan(BASE, None, must_be_base)
    if delta_sizes is None:
        return CheckpointPlan(BASE, None, "first checkpoint of the run")
    match policy:
        case "full":
            return CheckpointPlan(BASE, None, "policy full: every checkpoint is a base")
        case "one-shot":
            return CheckpointPlan(DELTA, SINCE_BASE, "policy one-shot: one base for the run")
        case "consecutive":
            return CheckpointPlan(DELTA, SINCE_LAST, "policy consecutive: changes since the last")
    future_with_base = 1.0 + sum(delta_sizes)  # F_c
    future_without = (len(delta_sizes) + 1) * delta_sizes[-1] if delta_sizes else 0.0  # I_c
    compared = f"F_c {future_with_base:.2f} {{}} I_c {future_without:.2f}"
    if future_with_base <= future_without:
        reason = compared.format("<=") + ": a new base costs less than growing deltas"
        return CheckpointPlan(BASE, None, reason)
    return CheckpointPlan(
        DELTA, SINCE_BASE, compared.format(">") + ": a delta costs less than a new base"
    )
