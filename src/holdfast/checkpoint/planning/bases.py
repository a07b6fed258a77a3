"""When to take a base: the policies of Check-N-Run and IncrCP, as pure functions with reasons.

| policy | a delta holds the rows changed since | a base is taken |
|---|---|---|
| full | – | always |
| one-shot | the base | once |
| consecutive | the last checkpoint | once |
| intermittent | the base | when F_c <= I_c (Check-N-Run, section 4.1.1) |
| recovery-time | the last checkpoint | when T_base < T_incre (IncrCP, section 4.5) |

Where deltas hold what changed since the last checkpoint, one of them may be a rollup instead: it
holds what changed since the base, so that a restore reads it in place of all increments before it.

Invariants:
- The first checkpoint of a run, and one whose tables have other columns than the base's, is always
  a base. So is one in which most rows changed, where the policy decides when bases are taken.
- Rollups take at most ``1 / ROLLUP_PAYS_AT`` times the bytes of the increments between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint.format.catalog import BASE, DELTA, Catalog
from holdfast.errors import InvalidRequestError

SINCE_BASE, SINCE_LAST = "base", "last"
_SINCE = {
    "full": None,
    "one-shot": SINCE_BASE,
    "consecutive": SINCE_LAST,
    "intermittent": SINCE_BASE,
    "recovery-time": SINCE_LAST,
}
POLICIES = tuple(_SINCE)
BASE_WINS_BY = 1.1
ROLLUP_PAYS_AT = 0.6  # bytes of increments since the last rollup, over those the next would take
ROLLUP_REPLACES_MIN = 2  # increments
BASE_FROM_SHARE = (
    0.75  # of the rows changed: a base costs little more than a delta, and restores alone
)
ROLLUP_SHARE_MAX = BASE_FROM_SHARE  # of the rows in a rollup: from here on it is a base instead
_ADAPTIVE = ("intermittent", "recovery-time")  # the others say themselves how many bases there are


@dataclass(frozen=True, slots=True)
class BaseChoice:
    """Base, or delta since the base or the last checkpoint; and why.

    A rollup is a delta since the base where the others are since the last.
    """

    kind: str
    since: str | None
    reason: str
    is_rollup: bool = False


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


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of times, in seconds; bytes are those of rows.

    ``build_base_s`` and ``build_delta_s`` are C_base and C_incre of IncrCP, from snapshot to
    commit; zero where none was measured. ``restore_base_s`` is R_base, None where nothing was
    restored. ``restores`` are (bytes since the base, seconds for them) of the last restores, newest
    last. ``delta_bytes`` is what a restore would read beyond the base.
    """

    base_bytes: int
    delta_bytes: int
    build_base_s: float
    build_delta_s: float
    restore_base_s: float | None = None
    restores: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a rollup would gather: the bytes of each increment since the last rollup or base, and
    what all rows changed since the base would take together."""

    increments: Sequence[int]
    rollup_bytes: float
    share: float = 0.0
    """Of all rows, by bytes, those that a rollup would hold."""


def gather(history: Catalog, changed_bytes: int, table_bytes: int) -> Gathered | None:
    """What a run could gather into a rollup now; None without a base.

    ``changed_bytes`` is the size of the rows changed since the base, as the model holds them, and
    ``table_bytes`` that of all rows; how much smaller they are stored is known from the base.
    """
    if history.last is None or not history.growth:
        return None
    rollup = history.rollup_of(history.last)
    stored = history.growth[0].row_bytes / max(1, table_bytes)
    increments = [item.row_bytes for item in history.growth[1:] if item.step > rollup]
    return Gathered(increments, changed_bytes * stored, changed_bytes / max(1, table_bytes))


def restore_sizes(history: Catalog) -> tuple[int, int]:
    """Bytes of rows that a restore of the last step reads: of its base, and of what came since.

    Goes through all segments: not for a stall.
    """
    last = history.last
    alive = [] if last is None else history.alive(last.step)
    base_bytes = sum(s.extent.bytes for s in alive if last is not None and s.born <= last.base)
    return base_bytes, sum(s.extent.bytes for s in alive) - base_bytes


def measure(history: Catalog, sizes: tuple[int, int] | None = None) -> Measured | None:
    """What a run knows of times since its last base; None without a base."""
    if history.last is None or not history.growth:
        return None
    base, *deltas = history.growth
    base_bytes, delta_bytes = restore_sizes(history) if sizes is None else sizes
    return Measured(
        base_bytes=base_bytes,
        delta_bytes=delta_bytes,
        build_base_s=base.build_s,
        # The least of them: whatever else the machine did only makes a time longer.
        build_delta_s=min((item.build_s for item in deltas), default=0.0),
        restore_base_s=history.restore_timings[-1].base_s if history.restore_timings else None,
        restores=[(r.delta_bytes, r.delta_s) for r in history.restore_timings],
    )


def estimate_restore(measured: Measured) -> tuple[float, str]:
    """R_i: how long reading what changed since the base will take, and from what that is known.

    A line through the last two restores, as the paper has it; with one restore or two of the same
    size, in proportion to bytes; with none, at the speed at which the base was written.

    >>> estimate_restore(Measured(100, 30, 5.0, 0.1, restores=[(10, 1.0), (20, 1.5)]))
    (2.0, 'the last two restores')
    """
    known = [(size, seconds) for size, seconds in measured.restores if size > 0][-2:]
    if len(known) == 2 and known[0][0] != known[1][0]:
        (x0, y0), (x1, y1) = known
        slope = (y1 - y0) / (x1 - x0)
        if slope > 0:  # noise can make a larger restore look faster
            return max(0.0, y1 + slope * (measured.delta_bytes - x1)), "the last two restores"
    if known:
        size, seconds = known[-1]
        return seconds / size * measured.delta_bytes, "the last restore"
    speed = max(1, measured.base_bytes) / max(1e-9, measured.build_base_s)
    return measured.delta_bytes / speed, "bytes, at the speed the base was written"


def _plan_by_recovery(measured: Measured | None) -> BaseChoice:
    """T_base = C_base + R_base against T_incre = C_incre + R_base + R_i.

    Where times are short, noise is larger than what they differ by. So an increment is never taken
    to be slower to build than a base, which writes more, and a base must win by a tenth.
    """
    if measured is None or measured.build_base_s == 0:
        return BaseChoice(DELTA, SINCE_LAST, "an increment: no base was timed yet")
    delta_s, source = estimate_restore(measured)
    build_s = measured.build_base_s
    base_s = build_s if measured.restore_base_s is None else measured.restore_base_s
    with_base = build_s + base_s
    without = min(measured.build_delta_s, build_s) + base_s + delta_s
    compared = f"T_base {with_base:.3g} s {{}} T_incre {without:.3g} s (R_i from {source})"
    if with_base * BASE_WINS_BY < without:
        return BaseChoice(BASE, None, compared.format("<"))
    return BaseChoice(DELTA, SINCE_LAST, compared.format("not a tenth below"))


def plan_rollup(increment: BaseChoice, gathered: Gathered) -> BaseChoice:
    """A rollup in the place of an increment, once those since the last one took as many bytes.

    >>> increment = BaseChoice(DELTA, SINCE_LAST, "an increment")
    >>> plan_rollup(increment, Gathered([10, 10, 10], 51.0)).reason
    'an increment'
    >>> plan_rollup(increment, Gathered([10, 10, 10], 40.0)).reason
    'rollup: 3 increments since the last took 0.75 times the bytes of all that changed'
    """
    count, spent = len(gathered.increments), sum(gathered.increments)
    if count < ROLLUP_REPLACES_MIN or not 0 < ROLLUP_PAYS_AT * gathered.rollup_bytes <= spent:
        return increment
    times = spent / gathered.rollup_bytes
    reason = f"rollup: {count} increments since the last took {times:.2f} times the bytes of all "
    return BaseChoice(DELTA, SINCE_BASE, reason + "that changed", is_rollup=True)


def _base_of_most(share: float, *, instead_of: str) -> BaseChoice:
    percent = f"{share:.0%}".replace("%", " %")
    reason = f"{percent} of the rows changed: a base costs little more than a {instead_of}"
    return BaseChoice(BASE, None, reason)


def plan_checkpoint(
    policy: str,
    delta_sizes: Sequence[float] | None,
    *,
    must_be_base: str | None = None,
    measured: Measured | None = None,
    gathered: Gathered | None = None,
    changed_share: float = 0.0,
) -> BaseChoice:
    """What to save next.

    ``delta_sizes`` are the deltas since the base as fractions of the base's bytes (S_1 .. S_i in
    Check-N-Run); None where there is no base yet. ``must_be_base`` forces one, with its reason.
    ``measured`` is what IncrCP's policy compares, ``gathered`` what a rollup would save; None: no
    rollups. ``changed_share``: of all rows, by bytes, those that a delta would hold.

    >>> plan_checkpoint("intermittent", [0.25, 0.3]).kind
    'delta'
    >>> plan_checkpoint("intermittent", [], changed_share=0.9).reason
    '90 % of the rows changed: a base costs little more than a delta'
    >>> plan_checkpoint("intermittent", [0.25, 0.7, 0.9]).reason
    "until the next base: 2.85 bases' worth of bytes with a new base, 3.60 with growing deltas"
    >>> plan_checkpoint("recovery-time", [0.4, 0.4], gathered=Gathered([40, 40], 80, 0.8)).reason
    '80 % of the rows changed: a base costs little more than a rollup'
    """
    if must_be_base is not None:
        return BaseChoice(BASE, None, must_be_base)
    if delta_sizes is None:
        return BaseChoice(BASE, None, "first checkpoint of the run")
    if policy in _ADAPTIVE and changed_share >= BASE_FROM_SHARE:
        return _base_of_most(changed_share, instead_of="delta")
    match policy:
        case "full":
            return BaseChoice(BASE, None, "policy full: every checkpoint is a base")
        case "one-shot":
            return BaseChoice(DELTA, SINCE_BASE, "policy one-shot: one base for the run")
        case "consecutive" | "recovery-time":
            plan = (
                _plan_by_recovery(measured)
                if policy == "recovery-time"
                else BaseChoice(DELTA, SINCE_LAST, "policy consecutive: changes since the last")
            )
            if gathered is None or plan.kind == BASE:
                return plan
            plan = plan_rollup(plan, gathered)
            if plan.is_rollup and policy in _ADAPTIVE and gathered.share >= ROLLUP_SHARE_MAX:
                return _base_of_most(gathered.share, instead_of="rollup")
            return plan
    future_with_base = 1.0 + sum(delta_sizes)  # F_c, Check-N-Run section 4.1.1
    future_without = (len(delta_sizes) + 1) * delta_sizes[-1] if delta_sizes else 0.0  # I_c
    reason = (
        f"until the next base: {future_with_base:.2f} bases' worth of bytes with a new base, "
        f"{future_without:.2f} with growing deltas"
    )
    if future_with_base <= future_without:
        return BaseChoice(BASE, None, reason)
    return BaseChoice(DELTA, SINCE_BASE, reason)
