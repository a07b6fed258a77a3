"""What training on a cluster costs while nothing fails: time, CPU, memory, network.

    strategies in turns, each on a cluster of its own -> medians -> beside no fault tolerance
    one worker on servers, and the same model with its own tables, in turns -> medians

Invariants:
- Strategies that are compared train the same batches from the same seed.
- Sides of a ratio are medians of runs in turns, there and back; what single turns gave is told
  beside it. What had fewer turns is measured against no fault tolerance in the same turns.

Not here: how one training is measured (trainer.py), memory and network (network_bytes.py),
failures (recovery.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.cluster.local import Local, train_local
from benchmarks.cluster.network_bytes import byte_ratios, memory_sheet, network_plot, network_sheet
from benchmarks.cluster.trainer import (
    CODED,
    COMPARED,
    ECREC,
    ECRM,
    GRADIENTS,
    NONE,
    STRATEGIES,
    SUMS,
    Job,
    Runs,
    Trained,
    same_turns,
    train_calm,
    train_job,
)
from benchmarks.results import AT_LEAST, AT_MOST, Line, Plot, Ratio, Section, Sheet
from holdfast.recsys.cluster_train import Workload
from holdfast.report import words

OVERHEAD_MAX = {ECRM: 1.05, ECREC: 1.18}  # ECRec section 5.2: 2.6 % and 18.2 %
LOCAL_MIN = 0.7
HEAVY = (*STRATEGIES, *COMPARED)
LIGHT = (*STRATEGIES, GRADIENTS)  # every training takes its time: float sums are told once


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is trained, how often: two models by all strategies, the heavy one by one worker."""

    heavy: Workload
    light: Workload | None
    servers: int
    workers: int
    batches: int
    alone_batches: int
    warm_batches: int
    turns: int
    few: int
    """Turns of what has no target, and of one worker alone."""
    fewest: int = 1
    """Turns of what is there to compare alone: float sums, and gradients sent to parity."""
    silence_s: float = 1.0


FULL = Size(
    heavy=Workload(preset="terabyte", rows=500_000, batch_size=2048),
    light=Workload(preset="small", rows=500_000, batch_size=2048),
    servers=5,
    workers=2,
    batches=100,
    alone_batches=60,
    warm_batches=60,
    turns=5,
    few=2,
)
QUICK = Size(
    heavy=Workload(preset="tiny", rows=2000, batch_size=64),
    light=None,
    servers=2,
    workers=1,
    batches=24,
    alone_batches=24,
    warm_batches=4,
    turns=1,
    few=1,
    silence_s=0.0,  # a busy machine is no failure here
)


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Train by every strategy in turns, and by one worker beside one process."""
    return _measure(QUICK if quick else FULL, folder)


def _measure(size: Size, folder: Path) -> Section:
    heavy = {name: _job(size, name, size.heavy) for name in HEAVY}
    light = {} if size.light is None else {name: _job(size, name, size.light) for name in LIGHT}
    alone = {
        name: Job(
            strategy=name,
            workload=size.heavy,
            servers=size.servers,
            workers=1,
            batches=size.alone_batches,
            silence_s=size.silence_s,
        )
        for name in (NONE, ECREC)
    }
    runs: dict[Job, list[Trained]] = {}
    local: list[Local] = []
    reasons: list[str] = []
    for turn in range(size.turns):
        # Equal jobs are one: at a quick size one worker is all there is.
        jobs = dict.fromkeys(heavy.values())
        if turn < size.few:
            jobs |= dict.fromkeys([*light.values(), *alone.values()])
            local.append(train_local(size.heavy, batches=size.alone_batches))
        # Machines become slower and faster: every other turn goes the other way round.
        for job in list(jobs)[:: -1 if turn % 2 else 1]:
            if job.strategy in COMPARED and turn >= size.fewest:
                continue
            trained, spoilt = train_calm(partial(train_job, job, folder))
            runs.setdefault(job, []).append(trained)
            reasons += spoilt
    return Section(
        name="cluster",
        title="What a cluster costs while nothing fails",
        text=_text(size),
        ratios=(
            *_overhead_ratios(heavy, runs),
            *_local_ratios(size, alone, runs, local),
            *byte_ratios(heavy, runs),
        ),
        sheets=(
            _strategies_sheet(f"DLRM {size.heavy.preset}: networks dominate", heavy, runs),
            *(
                [_strategies_sheet(f"DLRM {size.light.preset}: servers dominate", light, runs)]
                if size.light is not None
                else []
            ),
            _alone_sheet(size, alone, runs, local),
            network_sheet(heavy, runs),
            memory_sheet(heavy, runs),
        ),
        plots=(_overhead_plot(size, heavy, light, runs), network_plot(heavy, runs)),
        findings=describe_repeats(reasons),
    )


def _job(size: Size, strategy: str, workload: Workload) -> Job:
    return Job(
        strategy=strategy,
        workload=workload,
        servers=size.servers,
        workers=size.workers,
        batches=size.batches,
        warm_batches=size.warm_batches,
        silence_s=size.silence_s,
    )


def _text(size: Size) -> str:
    workload = size.heavy
    return (
        f"A DLRM of the preset {workload.preset} over 26 tables of {workload.rows:,} rows "
        f"together, Adagrad, batches of {workload.batch_size:,} samples of the click stream; "
        f"{words.counted(size.servers, 'server')}, {words.counted(size.workers, 'worker')} with "
        f"one thread each, stripes of {words.counted(size.servers - 1, 'row')} and 1 parity by "
        "XOR. `none` keeps nothing safe; `ecrm` codes the tables, without two-phase commit and "
        "with networks that are there once; `ecrec` has both. To compare, with nothing to reach: "
        f"`{SUMS}` is `ecrm` with the papers' code, a sum of floats. `{GRADIENTS}` sends such "
        "parities the gradients of every push in the place of differences: their servers repeat "
        "the optimizer's steps, for which they keep the state of all rows of their stripes, and a "
        "lost server cannot be recovered. (ECRM, section 4.3: 9.0 % more time with gradients, "
        "which workers send there and servers here, 2.6 % with differences.) "
        "Servers and workers share the cores of one machine: what "
        "servers do takes time from workers, which it would not on machines of their own, so CPU "
        "seconds are told too. A batch counts from the samples' making to the push that is done; "
        "the start of processes does not count, and neither do the first "
        f"{words.counted(size.warm_batches, 'batch', 'batches')}: servers touch memory for the "
        "first time then, which training that lasts does once."
    )


def describe_repeats(reasons: Sequence[str]) -> tuple[str, ...]:
    """What is to be said of trainings that were spoilt; nothing if none was.

    >>> describe_repeats([])
    ()
    """
    if not reasons:
        return ()
    spoilt = words.counted(len(reasons), "training")
    return (f"Spoilt and repeated: {spoilt} ({' / '.join(dict.fromkeys(reasons))}).",)


def median_of(runs: Sequence[Trained], what: Callable[[Trained], float]) -> float:
    """The median over runs."""
    return statistics.median(map(what, runs))


def pair_turns(
    ours: Sequence[Trained], peer: Sequence[Trained], what: Callable[[Trained], float]
) -> str:
    """What each turn would have said alone."""
    shown = [f"{what(one) / what(other):.3f}" for one, other in zip(ours, peer, strict=True)]
    return f"single turns: {', '.join(shown)}"


def _overhead_ratios(jobs: Mapping[str, Job], runs: Runs) -> Iterator[Ratio]:
    measures: tuple[tuple[str, Callable[[Trained], float], bool], ...] = (
        ("time of a batch", lambda run: run.batch_s, True),
        ("CPU of a batch, all processes", lambda run: run.cpu_s, False),
    )
    for name, what, is_judged in measures:
        for strategy in CODED:
            coded = runs[jobs[strategy]]
            none = same_turns(runs[jobs[NONE]], coded)
            yield Ratio(
                name=f"{name}: {strategy}",
                ours=1e3 * median_of(coded, what),
                peer=1e3 * median_of(none, what),
                against="none, the same cluster",
                unit="ms",
                target=OVERHEAD_MAX.get(strategy) if is_judged else None,
                sense=AT_MOST,
                note=pair_turns(coded, none, what),
            )


def _local_ratios(
    size: Size, jobs: Mapping[str, Job], runs: Runs, local: Sequence[Local]
) -> Iterator[Ratio]:
    batch = size.heavy.batch_size
    peer = batch / statistics.median(one.batch_s for one in local)
    for strategy, job in jobs.items():
        yield Ratio(
            name=f"throughput of one worker on servers: {strategy}",
            ours=median_of(runs[job][: len(local)], lambda run: run.samples_per_s),
            peer=peer,
            against="its own tables, one process",
            unit="samples/s",
            target=LOCAL_MIN if strategy == NONE else None,
            sense=AT_LEAST,
            note="the worker has one thread, the one process too; servers use what is left",
        )


def _strategies_sheet(title: str, jobs: Mapping[str, Job], runs: Runs) -> Sheet:
    rows = []
    for strategy, job in jobs.items():
        mine = runs[job]
        none = median_of(same_turns(runs[jobs[NONE]], mine), lambda run: run.batch_s)
        batch_s = median_of(mine, lambda run: run.batch_s)
        rows.append(
            (
                strategy,
                f"{1e3 * batch_s:.1f}",
                f"{batch_s / none:.3f}×",
                f"{1e3 * median_of(mine, lambda run: run.worker_cpu_s):.1f}",
                f"{1e3 * median_of(mine, lambda run: run.server_cpu_s):.1f}",
                f"{median_of(mine, lambda run: run.samples_per_s):,.0f}",
                f"{median_of(mine, lambda run: run.loss):.4f}",
            )
        )
    first = next(iter(jobs.values()))
    return Sheet(
        title,
        (
            "strategy",
            "ms a batch",
            "of none",
            "workers' CPU ms",
            "servers' CPU ms",
            "samples/s",
            "loss",
        ),
        tuple(rows),
        note=(
            f"Medians of {words.counted(len(runs[first]), 'turn')} of "
            f"{words.counted(first.batches, 'batch', 'batches')}{_fewer(jobs, runs)}. "
            f"{words.counted(first.workers, 'worker')} at a time: a batch is done every so many "
            "ms. Loss: mean of the last tenth."
        ),
    )


def _fewer(jobs: Mapping[str, Job], runs: Runs) -> str:
    """What is to be said of turns if those to compare had fewer than the others."""
    compared = [name for name in COMPARED if name in jobs]
    turns = len(runs[jobs[compared[0]]])
    if turns == len(runs[jobs[NONE]]):
        return ""
    return (
        f"; of {' and '.join(f'`{name}`' for name in compared)} {words.counted(turns, 'turn')}, "
        "beside none of the same"
    )


def _alone_sheet(size: Size, jobs: Mapping[str, Job], runs: Runs, local: Sequence[Local]) -> Sheet:
    batch = size.heavy.batch_size

    def line(
        name: str, batch_s: float, cpu_s: float, servers_s: float, loss: float
    ) -> tuple[str, ...]:
        return (
            name,
            f"{1e3 * batch_s:.1f}",
            f"{batch / batch_s:,.0f}",
            f"{1e3 * cpu_s:.1f}",
            f"{1e3 * servers_s:.1f}",
            f"{loss:.4f}",
        )

    rows = [
        line(
            "its own tables",
            statistics.median(one.batch_s for one in local),
            statistics.median(one.cpu_s for one in local),
            0.0,
            statistics.median(one.loss for one in local),
        )
    ]
    for strategy, job in jobs.items():
        mine = runs[job][: len(local)]
        rows.append(
            line(
                f"servers, {strategy}",
                median_of(mine, lambda run: run.batch_s),
                median_of(mine, lambda run: run.worker_cpu_s),
                median_of(mine, lambda run: run.server_cpu_s),
                median_of(mine, lambda run: run.loss),
            )
        )
    return Sheet(
        "One worker",
        ("tables", "ms a batch", "samples/s", "its CPU ms", "servers' CPU ms", "loss"),
        tuple(rows),
        note=(
            f"{words.counted(size.alone_batches, 'batch', 'batches')}, "
            f"{words.counted(len(local), 'turn')}. Tables of its own are trained by torch's "
            "sparse gradients and Adagrad; first values differ, so losses are alike, not equal."
        ),
    )


def _overhead_plot(
    size: Size, heavy: Mapping[str, Job], light: Mapping[str, Job], runs: Runs
) -> Plot:
    models = [(f"DLRM {size.heavy.preset}", heavy)]
    if size.light is not None:
        models.append((f"DLRM {size.light.preset}", light))
    lines = []
    for strategy in CODED:
        names: list[str] = []
        values: list[float] = []
        for name, jobs in models:
            if strategy not in jobs:
                continue
            mine = runs[jobs[strategy]]
            none = same_turns(runs[jobs[NONE]], mine)
            names += [f"{name}, {what}" for what in ("time", "CPU")]
            values += [
                100 * (median_of(mine, what) / median_of(none, what) - 1)
                for what in (lambda run: run.batch_s, lambda run: run.cpu_s)
            ]
        lines.append(Line(strategy, tuple(names), tuple(values)))
    return Plot(
        name="cluster-overhead",
        title="What being safe adds to a batch (the papers' figure 5)",
        x_label="",
        y_label="% more than none",
        lines=tuple(lines),
        is_bars=True,
    )
