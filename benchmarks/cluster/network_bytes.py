"""What training on a cluster takes of memory and network, strategies beside each other.

Invariants:
- What rows and parities take is what their tables say; what processes took is the kernel's; what
  was sent is counted by the servers.
- What had fewer turns is measured against no fault tolerance in the same turns.

Not here: time and CPU (overhead.py), how one training is measured (trainer.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cluster.trainer import CODED, NONE, Job, Runs, Trained, same_turns
from benchmarks.results import AT_MOST, Line, Plot, Ratio, Sheet
from holdfast.cluster.spec import ClusterSpec


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes on all servers together."""

    rows: int
    parities: int
    states: int
    """Optimizer state of rows that lie elsewhere, beside their parity: the price of gradients."""


def count_bytes(spec: ClusterSpec) -> Held:
    """What rows and parities take, networks and optimizer state among them."""
    return Held(
        rows=sum(4 * table.rows * table.width for table in spec.tables),
        parities=sum(
            4 * table.stripes * table.placement.parity * table.width for table in spec.tables
        ),
        states=sum(
            4
            * table.stripes
            * table.placement.parity
            * table.placement.data
            * (table.width - table.dim)
            for table in spec.tables
            if table.keeps_states
        ),
    )


def _bytes(runs: Sequence[Trained], what: Callable[[Trained], float | None]) -> float | None:
    """The median; None if it is not known of every run."""
    found = [value for run in runs if (value := what(run)) is not None]
    return statistics.median(found) if len(found) == len(runs) else None


def byte_ratios(jobs: Mapping[str, Job], runs: Runs) -> Iterator[Ratio]:
    """Parities beside rows, and network bytes beside those of no fault tolerance."""
    for strategy in CODED:
        held = count_bytes(jobs[strategy].spec)
        yield Ratio(
            name=f"memory for parities: {strategy}",
            ours=(held.parities + held.states) / 1e6,
            peer=held.rows / 1e6,
            against="rows, networks and their optimizer state",
            unit="MB",
            sense=AT_MOST,
            note="with the state of rows that gradients need" if held.states else "",
        )
    for strategy in CODED:
        mine = runs[jobs[strategy]]
        coded = _bytes(mine, lambda run: run.message_bytes)
        none = _bytes(same_turns(runs[jobs[NONE]], mine), lambda run: run.message_bytes)
        if coded and none:
            yield Ratio(
                name=f"network bytes of a batch: {strategy}",
                ours=coded / 1e6,
                peer=none / 1e6,
                against="none",
                unit="MB",
                sense=AT_MOST,
            )


def network_sheet(jobs: Mapping[str, Job], runs: Runs) -> Sheet:
    """What went over the network, by strategy."""
    rows = []
    for strategy, job in jobs.items():
        mine = runs[job]
        cells = [
            _bytes(mine, what)
            for what in (
                lambda run: run.worker_bytes,
                lambda run: run.server_bytes,
                lambda run: run.message_bytes,
            )
        ]
        rows.append((strategy, *("–" if c is None else f"{c / 1e6:.2f}" for c in cells)))
    return Sheet(
        "Network: MB of a batch",
        ("strategy", "workers and servers", "among servers", "in all"),
        tuple(rows),
        note=(
            "Arrays in messages, both ways, counted by the servers that they reach. Differences "
            "that wait for the flush before theirs add up: "
            "the slower flushes are, the fewer bytes they take. Gradients do not add up, but are "
            "narrower: without optimizer state."
        ),
    )


def memory_sheet(jobs: Mapping[str, Job], runs: Runs) -> Sheet:
    """What servers hold, by strategy, and what their processes took."""
    rows = []
    for strategy, job in jobs.items():
        held = count_bytes(job.spec)
        none = _bytes(same_turns(runs[jobs[NONE]], runs[job]), lambda run: run.memory_bytes)
        resident = _bytes(runs[job], lambda run: run.memory_bytes)
        is_known = resident is not None and none is not None
        rest = (resident or 0.0) - (none or 0.0) - held.parities
        rows.append(
            (
                strategy,
                f"{held.rows / 1e6:.1f}",
                f"{held.parities / 1e6:.1f}",
                f"{held.states / 1e6:.1f}",
                f"{(held.parities + held.states) / held.rows:.1%}",
                "–" if resident is None else f"{resident / 1e6:.0f}",
                f"{rest / 1e6:.0f}" if is_known and strategy != NONE else "–",
            )
        )
    return Sheet(
        "Memory: MB on all servers together",
        ("strategy", "rows", "parities", "states", "of rows", "processes", "queues and the rest"),
        tuple(rows),
        note=(
            "Rows and parities with their optimizer state, networks among them, as they are "
            "allocated. States: what servers with parities keep of rows elsewhere, to repeat their "
            "steps. Processes: the largest resident size, interpreters and libraries "
            "included. Queues and the rest: what a strategy's processes have beyond those of "
            "none and the parities: differences that wait, staged pushes, messages, and states as "
            "far as their rows were updated."
        ),
    )


def network_plot(jobs: Mapping[str, Job], runs: Runs) -> Plot:
    """Bytes of a batch, by strategy and by who sends them."""
    parts: tuple[tuple[str, Callable[[Trained], float | None]], ...] = (
        ("workers and servers", lambda run: run.worker_bytes),
        ("among servers", lambda run: run.server_bytes),
    )
    return Plot(
        name="cluster-network",
        title="Bytes of a batch",
        x_label="",
        y_label="MB",
        lines=tuple(
            Line(
                label,
                tuple(jobs),
                tuple((_bytes(runs[job], what) or 0.0) / 1e6 for job in jobs.values()),
            )
            for label, what in parts
        ),
        is_bars=True,
    )
