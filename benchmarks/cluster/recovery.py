"""What a lost server costs: until all train again, meanwhile, and until nothing is missing.

    kills under training, shards without it beside bare XOR, checkpoints instead -> one section

Not here: each of them (kills.py, shard.py, checkpoints.py), what a cluster
costs while nothing fails (overhead.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from benchmarks.cluster.checkpoints import Interval, Saved, plan_intervals, save_and_restore
from benchmarks.cluster.kills import Struck, kill_servers
from benchmarks.cluster.shard import Regained, regain_shards, rows_for
from benchmarks.cluster.trainer import ECREC, NONE, Job
from benchmarks.results import AT_LEAST, AT_MOST, TIMES_LESS, Line, Plot, Ratio, Section, Sheet
from holdfast.recsys.cluster_train import Workload
from holdfast.report import words

STEP_MAX_S = 2.0
KEPT_MIN = 0.87  # ECRec section 5.3: within 7 to 13 % of before
BARE_MIN = 0.3
LOCKS = (10, 1)
LOCKS_MAX = 1.25  # ECRec section 5.3: 24.8 % on its smallest model

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is killed, how often."""

    job: Job
    kills: int
    calm_s: float
    shard_job: Job
    shard_bytes: int
    shard_turns: int
    shard_kills: int
    saves: int


_TINY = Job(
    strategy=ECREC,
    workload=Workload(preset="tiny", rows=4000, batch_size=64),
    servers=2,
    workers=1,
    silence_s=0.0,  # a busy machine is no failure here
)
FULL = Size(
    job=Job(
        strategy=ECREC,
        workload=Workload(preset="kaggle", rows=8_000_000, batch_size=2048),
    ),
    kills=5,
    calm_s=8.0,
    shard_job=Job(strategy=ECREC, workload=Workload(preset="terabyte")),
    shard_bytes=1_000_000_000,
    shard_turns=2,
    shard_kills=2,
    saves=3,
)
QUICK = Size(
    job=_TINY,
    kills=1,
    calm_s=0.5,
    shard_job=replace(_TINY, workload=Workload(preset="terabyte"), servers=3),
    shard_bytes=10_000_000,
    shard_turns=1,
    shard_kills=1,
    saves=1,
)


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Kill servers under training and without, and go back to checkpoints instead."""
    return _measure(QUICK if quick else FULL, folder)


def _measure(size: Size, folder: Path) -> Section:
    kills = kill_servers(size.job, folder, kills=size.kills, calm_s=size.calm_s)
    struck = kills.struck
    rows = rows_for(size.shard_job, size.shard_bytes)
    shard_job = replace(size.shard_job, workload=replace(size.shard_job.workload, rows=rows))
    regained = regain_shards(
        shard_job, folder, locks=LOCKS, turns=size.shard_turns, kills=size.shard_kills
    )
    saved = save_and_restore(replace(size.job, strategy=NONE), folder, times=size.saves)
    intervals = plan_intervals(saved)
    return Section(
        name="clusterrecovery",
        title="What a lost server costs",
        text=_text(size, rows),
        ratios=(
            *_kill_ratios(struck),
            *_shard_ratios(size, regained),
            *_checkpoint_ratios(struck, intervals),
        ),
        sheets=(
            _kills_sheet(struck),
            _shard_sheet(regained),
            _figure_sheet(struck, saved, intervals),
        ),
        plots=(_kept_plot(struck), _figure_plot(struck, intervals)),
        findings=(
            *describe_strays("under training", kills.strays),
            *describe_strays("without training", [s for one in regained for s in one.strays]),
            *describe_strays("with checkpoints", saved.strays),
        ),
    )


def describe_strays(where: str, strays: Sequence[str]) -> tuple[str, ...]:
    """What is to be said where more was lost than was killed; nothing if there was not.

    >>> describe_strays("under training", [])
    ()
    """
    if not strays:
        return ()
    how = "; ".join(dict.fromkeys(strays))
    return (f"Numbers {where} are spoilt: processes were lost that nobody killed ({how}).",)


def _text(size: Size, shard_rows: int) -> str:
    job, shard = size.job, size.shard_job
    return (
        f"Under training: a DLRM of the preset {job.workload.preset} over {job.workload.rows:,} "
        f"rows, batches of {job.workload.batch_size:,}, {words.counted(job.servers, 'server')}, "
        f"{words.counted(job.workers, 'worker')}, stripes of "
        f"{words.counted(job.servers - 1, 'row')} and 1 parity, ecrec. "
        f"{words.counted(size.kills, 'server')} killed by SIGKILL, one after the "
        "other, each when nothing was missing and a spare was warm, its memory touched. Servers "
        "and workers share the cores of one machine; the next spare is started when all is whole, "
        "and what its start takes from training is in no window. Without training: the preset "
        f"{shard.workload.preset}, {shard_rows:,} rows on "
        f"{words.counted(shard.servers, 'server')}, beside bare: "
        f"{words.counted(shard.servers - 1, 'array')} of a shard's size XORed into one by "
        "the same kernel, one thread, in memory that is touched already."
    )


def median_of(found: Sequence[T], what: Callable[[T], float]) -> float:
    """The median of something of each."""
    return statistics.median(map(what, found))


def pool_rates(struck: Sequence[Struck]) -> tuple[float, float]:
    """Batches a second of all windows together: during recoveries, and before the kills."""
    during = sum(one.during.batches for one in struck) / sum(o.during.seconds for o in struck)
    before = sum(one.before.batches for one in struck) / sum(o.before.seconds for o in struck)
    return during, before


def _kill_ratios(struck: Sequence[Struck]) -> Iterator[Ratio]:
    steps = [one.begun_s for one in struck]
    yield Ratio(
        name="kill to a new step by every worker",
        ours=statistics.median(steps),
        peer=STEP_MAX_S,
        against="2 seconds",
        unit="s",
        target=1.0,
        sense=AT_MOST,
        note=f"a step that was begun after the kill; at worst {max(steps):.2f} s",
    )
    during, before = pool_rates(struck)
    kept = ", ".join(f"{one.kept:.2f}" for one in struck)
    yield Ratio(
        name="throughput from the kill until whole",
        ours=during,
        peer=before,
        against="before the kill",
        unit="batches/s",
        target=KEPT_MIN,
        sense=AT_LEAST,
        note=f"windows of all kills together; one by one: {kept}",
    )


def _of_locks(regained: Sequence[Regained], locks: int) -> list[Regained]:
    return [one for one in regained if one.locks == locks]


def _shard_ratios(size: Size, regained: Sequence[Regained]) -> Iterator[Ratio]:
    many, few = (_of_locks(regained, locks) for locks in LOCKS)
    shard = regained[0].shard_bytes
    yield Ratio(
        name="recovery of a whole shard, rows and parities",
        ours=shard / 1e9 / median_of(many, lambda one: one.whole_s),
        peer=shard / 1e9 / median_of(many, lambda one: one.bare_s),
        against=f"{size.shard_job.servers - 1} shards XORed bare in memory",
        unit="GB/s",
        target=BARE_MIN,
        sense=AT_LEAST,
        note=f"a shard of {shard / 1e9:.2f} GB, {LOCKS[0]} locks, nobody trains",
    )
    yield Ratio(
        name=f"recovery with {LOCKS[0]} locks",
        ours=median_of(many, lambda one: one.whole_s),
        peer=median_of(few, lambda one: one.whole_s),
        against="1 lock",
        unit="s",
        target=LOCKS_MAX,
        sense=AT_MOST,
    )


def _checkpoint_ratios(struck: Sequence[Struck], intervals: Sequence[Interval]) -> Iterator[Ratio]:
    lost_s = median_of(struck, lambda one: one.lost_s)
    for each in intervals:
        yield Ratio(
            name=f"training time lost to a failure, as at {each.model}",
            ours=lost_s,
            peer=each.average_s,
            against=f"full checkpoints every {each.minutes} minutes, scaled",
            unit="s",
            sense=TIMES_LESS,
        )


def _kills_sheet(struck: Sequence[Struck]) -> Sheet:
    return Sheet(
        "Kills under training: seconds from the kill, batches a second",
        (
            "server",
            "replaced",
            "any step",
            "new step",
            "rows",
            "whole",
            "before",
            "during",
            "of before",
            "time lost, s",
        ),
        tuple(
            (
                str(one.server),
                *(
                    f"{value:.2f}"
                    for value in (
                        one.replaced_s,
                        one.stepped_s,
                        one.begun_s,
                        one.rows_s,
                        one.whole_s,
                        one.before.rate,
                        one.during.rate,
                    )
                ),
                f"{one.kept:.0%}",
                f"{one.lost_s:.2f}",
            )
            for one in struck
        ),
        note=(
            "Any step: every worker has finished one, perhaps one that was under way. New step: "
            "one that it began after the kill. Before: since the last recovery and the start of "
            "the next spare. During: from the kill until whole. Time lost: what the batches of "
            "that time would have taken less before, and at least the time until replaced."
        ),
    )


def _shard_sheet(regained: Sequence[Regained]) -> Sheet:
    return Sheet(
        "A shard without training: seconds",
        ("locks", "shard, MB", "rows", "whole", "from the kill", "bare", "bare, new memory"),
        tuple(
            (
                str(one.locks),
                f"{one.shard_bytes / 1e6:,.0f}",
                *(
                    f"{value:.3f}"
                    for value in (one.rows_s, one.whole_s, one.killed_s, one.bare_s, one.fresh_s)
                ),
            )
            for one in regained
        ),
        note=(
            "Rows, whole: since another process took the place. Bare was timed right before each "
            "kill; into new memory it pays for the pages too, as a replacement does."
        ),
    )


def _figure_sheet(struck: Sequence[Struck], saved: Saved, intervals: Sequence[Interval]) -> Sheet:
    def line(name: str, *values: float | None) -> tuple[str, ...]:
        return (name, *("–" if value is None else f"{value:.2f}" for value in values))

    lost_s = [one.lost_s for one in struck]
    rows = [
        line("ecrec", None, min(lost_s), statistics.median(lost_s), max(lost_s)),
        *(
            line(
                f"every {each.minutes} min, as at {each.model}",
                each.seconds,
                each.best_s,
                each.average_s,
                each.worst_s,
            )
            for each in intervals
        ),
    ]
    return Sheet(
        "Seconds of training lost to one failure (ECRec's figure 12, scaled)",
        ("way", "interval", "best", "average", "worst"),
        tuple(rows),
        note=(
            f"A full checkpoint of the same tables ({saved.bytes / 1e6:,.0f} MB in fp32) takes "
            f"{saved.save_s:.2f} s until durable, going back to it {saved.restore_s:.2f} s "
            f"({saved.killed_s:.2f} s from the kill): medians of {saved.times}, nobody training, "
            "spares warm, no process started. Scaled: an interval is as many saves long as in the "
            "paper, where checkpoints every 30 and 60 minutes add 65 and 31 % to training on the "
            "largest model, and 7.2 and 7 times less on the smallest. Checkpoints cost restore "
            "and the work since the last one: none of it (best), half an interval (average), all "
            "(worst). For ecrec it is the least, median and most of the kills above."
        ),
    )


def _kept_plot(struck: Sequence[Struck]) -> Plot:
    names = tuple(f"kill {at + 1}" for at in range(len(struck)))
    return Plot(
        name="clusterrecovery-throughput",
        title="Throughput before a kill and until all is whole (the papers' figure 10)",
        x_label="",
        y_label="batches a second",
        lines=(
            Line("before", names, tuple(one.before.rate for one in struck)),
            Line("during", names, tuple(one.during.rate for one in struck)),
        ),
        is_bars=True,
    )


def _figure_plot(struck: Sequence[Struck], intervals: Sequence[Interval]) -> Plot:
    models = tuple(dict.fromkeys(each.model for each in intervals))
    lost_s = median_of(struck, lambda one: one.lost_s)
    whole_s = median_of(struck, lambda one: one.whole_s)
    minutes = tuple(dict.fromkeys(each.minutes for each in intervals))
    by_both = {(each.model, each.minutes): each for each in intervals}
    return Plot(
        name="clusterrecovery-checkpoints",
        title="Seconds lost to one failure, scaled (the papers' figure 12)",
        x_label="as at",
        y_label="seconds",
        lines=(
            Line("ecrec: time lost", models, (lost_s,) * len(models)),
            Line("ecrec: until whole", models, (whole_s,) * len(models)),
            *(
                Line(
                    f"checkpoints every {each} min: average",
                    models,
                    tuple(by_both[model, each].average_s for model in models),
                )
                for each in minutes
            ),
        ),
        is_bars=True,
    )
