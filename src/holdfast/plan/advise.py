"""The advice: what every strategy would cost in a situation, which one to take, and why.

Checkpoints are decoupled: training waits while rows are copied in memory, and writing goes on
behind it. So a strategy's save costs its copy, and its interval cannot be shorter than its writing.
Full recovery saves at sqrt(2 · copy · MTBF), partial recovery as rarely as the PLS allows.

Erasure-coded servers save nothing. Every update also changes its parity rows: their traffic and
memory bandwidth are counted as lost, none of it hidden, which is the worst case. While a server is
decoded training goes on, slower by ``DECODE_DROP`` (ECRM measured 6 to 12 %).

Invariants:
- Estimates are closed forms of the situation's numbers; simulate.py confirms those of recovery.
- The advice is the least overhead among what is possible and does not risk accuracy more than the
  situation's PLS allows; its reason says what decided. Between equals what risks nothing comes
  first, then what takes less memory.

Not here: the equations (overhead.py, pls.py), tables and pictures (report/).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.kernels.rows import priority
from holdfast.plan.overhead import Costs, Overhead, interval_full, overhead_full, overhead_part
from holdfast.plan.pls import expected_pls, interval_part, is_worth_it
from holdfast.plan.situation import SECONDS_AN_HOUR, Situation

FULL, PARTIAL, CODED = "everyone reloads", "only the lost reload", "decoded, nobody waits"
DECODE_DROP = 0.12
NO_RISK = "none"
EQUAL_DIGITS = 4  # overheads that agree to a hundredth of a per cent, as they are shown, are equal
SECOND_LAYER_H = 24.0  # of rare checkpoints behind the codes
KEPT_STEPS = 100  # checkpoints that incrcp keeps: any of them can be restored
# A delta of Check-N-Run holds what changed since its base, on average so many intervals ago: its
# rule took a base every 50 in the benchmark of the grid.
BASE_AGE = 25
_GRID_STORED = 1.06  # of increments, measured beside naive ones
_PARAMETER_BYTES = 4  # scale and offset of a quantized row
_COPY_MIN_H = 1e-9


@dataclass(frozen=True, slots=True)
class Estimate:
    """One strategy in one situation.

    ``training``: what it slows every step by. ``memory_bytes``: beyond the model. ``problem``: why
    it cannot be used; empty if it can.
    """

    strategy: str
    recovery: str
    interval_h: float
    overhead: Overhead
    training: float
    lost_work_h: float
    pls: float
    written_bytes_h: float
    capacity_bytes: float
    memory_bytes: float
    recovery_s: float
    risk: str
    costs: Costs
    problem: str = ""

    @property
    def total(self) -> float:
        """All of the overhead, as a share of training time."""
        return self.overhead.total + self.training


@dataclass(frozen=True, slots=True)
class Choice:
    """The strategy to take of some, and why; none where none is possible."""

    strategy: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Every strategy; the one to take, and the best of those that keep a training loop as it is
    (its process holds the tables) and of those that need embedding servers."""

    estimates: tuple[Estimate, ...]
    best: Choice
    own_loop: Choice
    on_servers: Choice


def advise(situation: Situation) -> Advice:
    """Compare all strategies."""
    estimates = (
        _full(situation),
        _check_n_run(situation),
        _incrcp(situation),
        *(_cpr(situation, by) for by in ("", "-mfu", "-ssu", "-scar")),
        *(_coded(situation, name) for name in ("ecrm", "ecrec")),
    )
    return Advice(
        estimates,
        choose_strategy(estimates),
        choose_strategy([e for e in estimates if e.recovery != CODED]),
        choose_strategy([e for e in estimates if e.recovery == CODED]),
    )


def choose_strategy(estimates: Sequence[Estimate]) -> Choice:
    """The one to take: least overhead, then no risk, then least memory."""
    refused = [f"{e.strategy} is out: {e.problem}" for e in estimates if e.problem]
    possible = [e for e in estimates if not e.problem]
    if not possible:
        return Choice(None, "; ".join(refused))

    def price(e: Estimate) -> tuple[float, bool, float]:
        return round(e.total, EQUAL_DIGITS), e.risk != NO_RISK, e.memory_bytes

    best, *others = sorted(possible, key=price)
    reason = f"{best.strategy} costs {best.total:.2%} of the training time"
    if others:
        reason += f", {others[0].strategy} {others[0].total:.2%}"
        if price(others[0])[0] == price(best)[0] and others[0].risk != best.risk == NO_RISK:
            reason += f" ({others[0].risk})"
    worst = max(others, key=lambda e: e.total, default=best)
    if worst is not best and worst is not others[0]:
        reason += f", {worst.strategy} {worst.total:.2%}"
    return Choice(best.strategy, "; ".join([reason, *refused]))


def _full(s: Situation) -> Estimate:
    return _reload_all(
        s, "full", saved=lambda hours: 1.0, changed=lambda hours: 0.0, row=1.0, kept=2.0,
        risk=NO_RISK,
    )  # fmt: skip


def _check_n_run(s: Situation) -> Estimate:
    def since_base(hours: float) -> float:
        return s.changed(BASE_AGE * hours)

    is_exact = s.bits >= 32
    row = 1.0 if is_exact else min(1.0, s.bits / 32 + _PARAMETER_BYTES / s.row_bytes)
    return _reload_all(
        s, "check-n-run", saved=since_base, changed=since_base, row=row, kept=2 * row,
        risk=NO_RISK if is_exact else f"rows at {s.bits} bits after each restore",
    )  # fmt: skip


def _incrcp(s: Situation) -> Estimate:
    estimate = _reload_all(
        s, "incrcp", saved=s.changed, changed=lambda hours: s.changed(KEPT_STEPS * hours), row=1.0,
        kept=1.0, risk=NO_RISK,
    )  # fmt: skip
    increments = _GRID_STORED * KEPT_STEPS * s.changed(estimate.interval_h)
    return dataclasses.replace(estimate, capacity_bytes=s.model_bytes * (1 + increments))


def _reload_all(
    s: Situation,
    name: str,
    *,
    saved: Callable[[float], float],
    changed: Callable[[float], float],
    row: float,
    kept: float,
    risk: str,
) -> Estimate:
    """Full recovery: the interval at which saving and training again cost least together.

    ``saved``: the share of rows a save copies, from its interval; ``changed``: what a reload reads
    beyond a base, as a share; ``row``: bytes of a stored row, as a share; ``kept``: of the model.
    """
    interval = _best_interval(s, saved)
    copied = saved(interval) * s.table_bytes + s.dense_bytes
    written = row * copied
    costs = Costs(
        save_h=s.copy_h(copied),
        load_h=s.read_h(row * (1 + changed(interval)) * s.model_bytes),
        reschedule_h=s.reschedule_h,
    )
    interval = max(interval, s.write_h(written))
    return Estimate(
        strategy=name,
        recovery=FULL,
        interval_h=interval,
        overhead=overhead_full(costs, interval_h=interval, mtbf_h=s.mtbf_h),
        training=0.0,
        lost_work_h=interval / 2,
        pls=0.0,
        written_bytes_h=written / interval,
        capacity_bytes=kept * s.model_bytes,
        memory_bytes=copied,
        recovery_s=SECONDS_AN_HOUR * (costs.load_h + s.reschedule_h),
        risk=risk,
        costs=costs,
    )


def _best_interval(s: Situation, saved: Callable[[float], float]) -> float:
    """sqrt(2 · O_save · T_fail), where what is saved depends on the interval itself."""
    interval = 1.0
    for _ in range(50):  # contracts: the share grows more slowly than the interval
        copied = saved(interval) * s.table_bytes + s.dense_bytes
        interval = interval_full(max(s.copy_h(copied), _COPY_MIN_H), mtbf_h=s.mtbf_h)
    return interval


def _cpr(s: Situation, by: str) -> Estimate:
    interval = interval_part(s.pls, mtbf_h=s.mtbf_h, servers=s.servers, lost=s.lost)
    copied = float(s.table_bytes)
    times = 1.0  # saves within an interval
    memory = {"": 0, "-mfu": priority.mfu_bytes(s.rows), "-ssu": priority.ssu_bytes(s.rows),
              "-scar": priority.scar_bytes(s.rows, s.row_bytes)}[by]  # fmt: skip
    if by:
        copied, times = s.r * copied, 1 / s.r
    copied += s.dense_bytes
    costs = Costs(
        save_h=s.copy_h(copied),
        load_h=s.read_h(s.model_bytes),
        reschedule_h=s.reschedule_h,
        load_part_h=s.read_h(s.model_bytes * s.lost / s.servers, servers=s.lost),
    )
    fastest = s.write_h(copied)
    every = max(interval / times, fastest)
    overhead = overhead_part(costs, interval_h=every, mtbf_h=s.mtbf_h)
    pls = expected_pls(every * times, mtbf_h=s.mtbf_h, servers=s.servers, lost=s.lost)
    full = _full(s)
    problem = ""
    if not is_worth_it(full.total, overhead.total):
        problem = f"saving often enough for a PLS of {s.pls:g} gains nothing over full recovery"
    elif memory > s.memory_headroom * s.model_bytes:
        problem = "its memory is more than there is room for"
    return Estimate(
        strategy=f"cpr{by}",
        recovery=PARTIAL,
        interval_h=every,
        overhead=overhead,
        training=0.0,
        lost_work_h=0.0,
        pls=pls,
        written_bytes_h=copied / every,
        capacity_bytes=2.0 * s.model_bytes,
        memory_bytes=memory + copied,
        recovery_s=SECONDS_AN_HOUR * (costs.partial_load_h + s.reschedule_h),
        risk=f"PLS {pls:.2g}" + (", hot rows kept" if by else ""),
        costs=costs,
        problem=problem,
    )


def _coded(s: Situation, name: str) -> Estimate:
    shard = s.model_bytes * s.lost / s.servers
    decode_h = s.network_h(s.coded * shard, servers=s.lost)
    traffic = s.parity * s.updates_per_s * s.row_bytes / s.servers
    training = traffic / s.network_bytes_s + 2 * traffic / s.copy_bytes_s
    memory = s.table_bytes * s.parity / s.coded
    if name == "ecrec":
        memory += s.dense_bytes  # networks are on two servers
    problem = ""
    if s.lost > s.parity:
        problem = f"a failure takes {s.lost} servers, its codes bear {s.parity}"
    elif s.servers < s.coded + s.parity:
        problem = f"stripes of {s.coded} + {s.parity} rows need more than {s.servers} servers"
    elif memory > s.memory_headroom * s.model_bytes:
        problem = f"parity takes {memory / s.model_bytes:.0%} of the model's memory"
    elif training >= 1:
        problem = "parity takes all of the network"
    return Estimate(
        strategy=name,
        recovery=CODED,
        interval_h=SECOND_LAYER_H,
        overhead=Overhead(
            save=s.copy_h(s.model_bytes) / SECOND_LAYER_H,
            load=DECODE_DROP * decode_h / s.mtbf_h,
            lost=0.0,
            reschedule=0.0,
        ),
        training=training,
        lost_work_h=0.0,
        pls=0.0,
        written_bytes_h=s.model_bytes / SECOND_LAYER_H,
        capacity_bytes=2.0 * s.model_bytes,
        memory_bytes=memory,
        recovery_s=SECONDS_AN_HOUR * decode_h,
        risk=NO_RISK if name == "ecrec" else "updates in flight may be lost",
        costs=Costs(s.copy_h(s.model_bytes), 0.0, 0.0),
        problem=problem,
    )
