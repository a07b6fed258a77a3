"""The chunk grid beside full checkpoints, differentials and naive increments.

IncrCP's setting, scaled to one machine: one training run of DLRM with Criteo Kaggle's table sizes
is watched by all strategies at once; afterwards every checkpoint is restored from every store. What
a checkpoint costs training, what all of them take on disk, how long a restore takes, how many dead
rows it reads, and how near it comes to reading and copying the same bytes with nothing around.

Not here: what R, the filters and the bundles are worth (study.py), very long runs (growth.py).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.grid.restore import BareCost, Reader, Restored, compare_bare, restore_all
from benchmarks.grid.train import (
    DIFFERENTIAL,
    FULL,
    GRID,
    NAIVE,
    STRATEGIES,
    FullCost,
    Size,
    Tally,
    Training,
    Watched,
    save_fully,
    store_of,
    watch,
)
from benchmarks.results import AT_LEAST, AT_MOST, Line, Plot, Ratio, Section, Sheet
from holdfast.checkpoint.format.catalog import BASE, Catalog
from holdfast.checkpoint.grid.decide import choose_threshold
from holdfast.checkpoint.planning.bases import Measured, plan_checkpoint
from holdfast.checkpoint.run import Run
from holdfast.checkpoint.run import open as open_run
from holdfast.kernels.rows import bloom

FULL_SIZE = Size(table_bytes=3 << 29, checkpoints=150)
QUICK_SIZE = Size(table_bytes=1 << 18, checkpoints=6, steps=2, batch=64, preset="small")
FULL_SAVES = 3
BARE_STEPS = 6
COMPARED = 15  # checkpoints whose restored values are compared with those trained

RESTORE_MAX = 1.1  # of the differential's seconds
SPEED_MIN = 0.8  # of the ratio of bytes, beside naive increments
STORED_MAX = 0.34  # of the differential's bytes
STORED_NAIVE_MAX = 1.1
STALL_MAX = 1.05
BARE_MIN = 0.5


@dataclass(frozen=True, slots=True)
class Dead:
    """Dead rows among those one restore read, and how many R allows there."""

    step: int
    rows: int
    allowed: float
    share: float
    allowed_share: float


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that was measured."""

    watched: Watched
    full: FullCost
    full_restore_s: float
    restored: Mapping[str, Sequence[Restored]]
    bare: Sequence[BareCost]
    dead: Sequence[Dead]
    overwritten: Sequence[tuple[int, int]]
    resets: tuple[int | None, int | None]
    rows: int
    row_bytes: int
    update_rows: float


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Train once, restore everything."""
    size = QUICK_SIZE if quick else FULL_SIZE
    return describe(size, compare(size, folder))


def compare(size: Size, folder: Path) -> Found:
    """Train with every strategy watching, then restore every checkpoint of each."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-") as scratch:
        place = Path(scratch)
        training = Training(size)
        full, full_restore_s = _full(training, place)
        settings = {name: {"strategy": strategy} for name, strategy in STRATEGIES.items()}
        checks = max(1, size.checkpoints // COMPARED)
        watched = watch(training, settings, place, is_beside=True, check_every=checks)
        runs = {name: open_run(store_of(place, name)) for name in STRATEGIES}
        targets = training.targets()
        steps = runs[GRID].steps
        assert all(run.steps == steps for run in runs.values())
        bare: list[BareCost] = []
        overwritten: list[tuple[int, int]] = []
        chosen = set(spread(steps[1:], BARE_STEPS))

        def after(step: int) -> None:
            if step in chosen:
                bare.append(compare_bare(runs[GRID], targets, step))
                overwritten.append(count_overwritten(runs[GRID], step))

        restored = restore_all(runs, targets, steps, checksums=watched.checksums, after=after)
        naive = runs[NAIVE].catalog
        return Found(
            watched=watched,
            full=full,
            full_restore_s=full_restore_s,
            restored=restored,
            bare=bare,
            dead=count_dead(runs[GRID].catalog, naive, restored[GRID]),
            overwritten=overwritten,
            resets=(
                first_reset(runs[GRID].catalog),
                first_reset(runs[GRID].catalog, restored[GRID]),
            ),
            rows=training.rows,
            row_bytes=training.row_bytes,
            update_rows=statistics.mean(s.rows for s in watched.tallies[NAIVE].increments),
        )


def _full(training: Training, place: Path) -> tuple[FullCost, float]:
    """What full checkpoints cost; their store is gone afterwards."""
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        full = save_fully(training, Path(scratch), saves=FULL_SAVES)
        run = open_run(store_of(Path(scratch), FULL))
        reader = Reader(run, training.targets())
        reader.warm(run.steps[-1])
        spent = [reader.restore(run.steps[-1]).whole_s for _ in range(FULL_SAVES)]
    return full, statistics.median(spent)


def spread(items: Sequence[int], count: int) -> list[int]:
    """So many of the items, evenly spread, the last one among them.

    >>> spread([1, 2, 3, 4, 5, 6], 3)
    [2, 4, 6]
    """
    count = min(count, len(items))
    return [items[(index + 1) * len(items) // count - 1] for index in range(count)]


def count_dead(grid: Catalog, naive: Catalog, restored: Sequence[Restored]) -> list[Dead]:
    """How many of the rows read at each step were dead, and how many might have been.

    R is chosen for every table and increment from its bytes, which the naive store still has as
    they were written (without filters). For each increment of which anything is read, R of the rows
    of the largest increment of its table may be dead. Rows of a rollup are not counted, as those of
    a base are not (``count_overwritten``).
    """
    born: dict[tuple[str, int], tuple[int, int]] = {}
    for s in naive.segments:
        rows, size = born.get((s.table, s.born), (0, 0))
        own = s.extent.bytes + 4 * bloom.words_for(s.rows)
        born[s.table, s.born] = rows + s.rows, size + own
    below = {naive.rollup_of(entry) for entry in naive.checkpoints}
    threshold: dict[str, float] = {}
    largest: dict[str, int] = {}
    for (table, step), (rows, size) in born.items():
        if step not in below:
            threshold[table] = max(threshold.get(table, 0.0), choose_threshold(size))
            largest[table] = max(largest.get(table, 0), rows)
    found = []
    for one in restored:
        rollup = grid.rollup_of(grid.checkpoint(one.step))
        chunks = {(s.table, s.born) for s in grid.alive(one.step) if s.born > rollup}
        if not chunks:
            continue
        allowed = sum(threshold[table] * largest[table] for table, _ in chunks)
        rows = one.grid_rows
        found.append(
            Dead(one.step, one.masked_rows, allowed, one.masked_rows / rows, allowed / rows)
        )
    return found


def count_overwritten(run: Run, step: int) -> tuple[int, int]:
    """Of the rollup's rows that a restore of a step reads: how many a later chunk replaces, and all
    of them."""
    rollup = run.catalog.rollup_of(run.catalog.checkpoint(step))
    base = run.catalog.checkpoint(step).base
    counts = {s: dead for s, dead in run.dead_rows(step).items() if base < s.born <= rollup}
    return sum(counts.values()), sum(s.rows for s in counts)


def first_reset(catalog: Catalog, restored: Sequence[Restored] = ()) -> int | None:
    """The first step at which T_base < T_incre would have taken a new base; None: none.

    Without restores R_i is known from bytes alone; with them, from those of the two steps before.
    """
    base, *deltas = catalog.growth
    reads = catalog.restore_bytes()
    for index, item in enumerate(deltas):
        known = [one for one in restored if one.step < item.step][-2:]
        measured = Measured(
            base_bytes=base.row_bytes,
            delta_bytes=reads[item.step] - base.row_bytes,
            build_base_s=base.build_s,
            build_delta_s=min(delta.build_s for delta in deltas[: index + 1]),
            restore_base_s=known[-1].base_s if known else None,
            restores=[(one.changed_bytes, one.changed_s) for one in known],
        )
        if plan_checkpoint("recovery-time", [0.0], measured=measured).kind == BASE:
            return item.step
    return None


def mean(values: Iterable[float]) -> float:
    """Their mean; 0 of none."""
    known = list(values)
    return statistics.mean(known) if known else 0.0


# What is said of it.


def describe(size: Size, found: Found) -> Section:
    """The section."""
    interval = size.steps * size.batch
    differential = found.watched.tallies[DIFFERENTIAL]
    bases = sum(stats.kind == BASE for stats in differential.saves)
    by_bytes, by_seconds = (_shown_step(step) for step in found.resets)
    return Section(
        name="grid",
        title="The chunk grid: every step restorable",
        text=(
            f"DLRM ({size.preset}) with Criteo Kaggle's table sizes scaled to "
            f"{found.row_bytes / 1e9:.2f} GB of rows, plain SGD, {size.checkpoints} checkpoints, "
            f"one every {size.steps} steps of {size.batch} samples ({interval:,} samples change "
            f"{found.update_rows / found.rows:.2%} of the rows). One real training run is watched "
            "by all strategies at once; all store fp32 and keep every checkpoint. Differential "
            "checkpoints hold what changed since the base and take new bases by Check-N-Run's rule "
            f"({bases} in this run); naive increments and the grid hold what changed since the "
            "last checkpoint over one base, and gather it into rollups by the same rule "
            f"({_shown_rollups(found)}). IncrCP's rule T_base < T_incre would have taken a "
            f"new base {by_bytes} judging by bytes, and {by_seconds} judging by the restores "
            "measured here. Full checkpoints are all alike, so a few were taken and their bytes "
            f"multiplied. Then every checkpoint was restored from every store into tables that "
            "exist, from the page cache, strategies in turns; the values of "
            f"{len(found.watched.checksums)} of them were compared with those trained. "
            "Changed rows alone: the restore less reading the base "
            "(the paper leaves the base out); planning, checking files and masks are in it. A "
            "stall is measured while nothing else runs, in changing order. Times are means over "
            "checkpoints unless said otherwise."
        ),
        ratios=tuple(_ratios(found)),
        sheets=(_strategies(size, found), _extraction(size, found)),
        plots=tuple(_plots(found)),
    )


def _shown_rollups(found: Found) -> str:
    return " and ".join(
        f"{len(rollups)} of {sum(stats.bytes for stats in rollups) / 1e6:,.0f} MB in all"
        for rollups in (found.watched.tallies[name].rollups for name in (NAIVE, GRID))
    )


def _shown_step(step: int | None) -> str:
    return "nowhere" if step is None else f"at step {step}"


def _ratios(found: Found) -> Iterable[Ratio]:
    parts: tuple[tuple[str, Callable[[Restored], float], Callable[[Restored], int]], ...] = (
        ("whole restore", lambda one: one.whole_s, lambda one: one.bytes),
        ("restore of changed rows alone", lambda one: one.changed_s, lambda one: one.changed_bytes),
    )
    of = found.restored
    for what, seconds, _ in parts:
        yield Ratio(
            name=what,
            ours=1e3 * mean(map(seconds, of[GRID])),
            peer=1e3 * mean(map(seconds, of[DIFFERENTIAL])),
            against=DIFFERENTIAL,
            unit="ms",
            target=RESTORE_MAX if what == "whole restore" else None,
            sense=AT_MOST,
            note=""
            if what == "whole restore"
            else "of a differential less lies beyond the base: "
            "it takes more bases, and stores them",
        )
    differential = {one.step: one for one in of[DIFFERENTIAL]}
    yield Ratio(
        name="whole restore, were its changed rows read and copied bare",
        ours=1e3 * mean(differential[c.step].base_s + c.bare_changed_s for c in found.bare),
        peer=1e3 * mean(differential[c.step].whole_s for c in found.bare),
        against=DIFFERENTIAL,
        unit="ms",
        note="what one base allows: the differential's own time for a base, and the grid's changed "
        "rows read and copied with nothing around",
    )
    alike = same_base(found)
    if alike > 1:
        yield Ratio(
            name="restore of changed rows alone, over the same base",
            ours=1e3 * mean(one.changed_s for one in of[GRID][1:alike]),
            peer=1e3 * mean(one.changed_s for one in of[DIFFERENTIAL][1:alike]),
            against=f"{DIFFERENTIAL}, before its first new base",
            unit="ms",
            note=f"checkpoints 2 to {alike}: a strategy that takes more bases has less to read "
            "beyond them, and more to store",
        )
    for what, seconds, size in parts:
        yield Ratio(
            name=f"{what}: times faster than naive increments",
            ours=mean(map(seconds, of[NAIVE])) / mean(map(seconds, of[GRID])),
            peer=mean(map(size, of[NAIVE])) / mean(map(size, of[GRID])),
            against="times fewer bytes read than naive increments",
            unit="×",
            target=SPEED_MIN,
            sense=AT_LEAST,
        )
    tallies = found.watched.tallies
    for peer, target in ((DIFFERENTIAL, STORED_MAX), (NAIVE, STORED_NAIVE_MAX)):
        yield Ratio(
            name=f"stored in the end, beside {peer}",
            ours=tallies[GRID].kept[-1] / 1e6,
            peer=tallies[peer].kept[-1] / 1e6,
            against=peer,
            unit="MB",
            target=target,
            sense=AT_MOST,
        )
    yield Ratio(
        name="stall of an increment",
        ours=1e3 * statistics.median(stats.stall_s for stats in tallies[GRID].increments),
        peer=1e3 * statistics.median(stats.stall_s for stats in tallies[NAIVE].increments),
        against=NAIVE,
        unit="ms",
        target=STALL_MAX,
        sense=AT_MOST,
        note="medians; both save the same rows",
    )
    if tallies[GRID].rollups and tallies[NAIVE].rollups:
        yield Ratio(
            name="stall of a rollup",
            ours=1e3 * statistics.median(stats.stall_s for stats in tallies[GRID].rollups),
            peer=1e3 * statistics.median(stats.stall_s for stats in tallies[NAIVE].rollups),
            against=NAIVE,
            unit="ms",
            note="medians",
        )
    beside = [one.seconds for one in tallies[GRID].beside] or [0.0]
    yield Ratio(
        name="a round of extraction beside training",
        ours=statistics.median(beside),
        peer=statistics.median(found.watched.interval_s),
        against="the time between two checkpoints",
        unit="s",
        target=1.0,
        sense=AT_MOST,
        note="medians; below 1 extraction keeps up",
    )
    worst = max(found.dead, key=lambda dead: dead.rows / dead.allowed)
    yield Ratio(
        name="dead rows read, at the worst step",
        ours=worst.rows,
        peer=worst.allowed,
        against="what R allows",
        unit="rows",
        target=1.0,
        sense=AT_MOST,
        note=f"of the rows read beyond base and rollup {mean(d.share for d in found.dead):.2%} are "
        f"dead on average, {max(d.share for d in found.dead):.2%} at most; R allows "
        f"{mean(d.allowed_share for d in found.dead):.2%} on average",
    )
    if sum(rows for _, rows in found.overwritten):
        yield Ratio(
            name="rows of a rollup that chunks above it replace",
            ours=mean(dead for dead, _ in found.overwritten),
            peer=mean(rows for _, rows in found.overwritten),
            against="all rows of the rollup read",
            unit="rows",
            note=f"means of {len(found.overwritten)} steps; a rollup is read whole, as a base is",
        )
    bare = (
        ("whole restore", "whole_s", "bare_whole_s", "bytes"),
        ("restore of changed rows alone", "changed_s", "bare_changed_s", "changed_bytes"),
    )
    for what, ours, peer, count in bare:
        total = sum(getattr(cost, count) for cost in found.bare)
        yield Ratio(
            name=f"{what}, beside the bare",
            ours=total / sum(getattr(cost, ours) for cost in found.bare) / 1e9,
            peer=total / sum(getattr(cost, peer) for cost in found.bare) / 1e9,
            against="reading and copying the same bytes, bare",
            unit="GB/s",
            target=BARE_MIN,
            sense=AT_LEAST,
            note="the same requests and as many threads; nothing is opened twice, checked, masked "
            "or decoded, and every id is known beforehand",
        )


def same_base(found: Found) -> int:
    """How many checkpoints the differential strategy took before its second base."""
    kinds = [stats.kind for stats in found.watched.tallies[DIFFERENTIAL].saves]
    return kinds.index(BASE, 1) if BASE in kinds[1:] else len(kinds)


def _strategies(size: Size, found: Found) -> Sheet:
    full = found.full
    rows = [(
        FULL, str(size.checkpoints), "0", f"{full.bytes * size.checkpoints / 1e6:,.0f}",
        f"{full.bytes / 1e6:.1f}", f"{1e3 * full.stall_s:.1f}", f"{1e3 * full.durable_s:.0f}",
        f"{1e3 * found.full_restore_s:.0f}", "0", "0", "0", "0",
    )]  # fmt: skip
    for name in STRATEGIES:
        tally, many = found.watched.tallies[name], found.restored[name]
        rows.append((
            name,
            str(sum(stats.kind == BASE for stats in tally.saves)),
            str(len(tally.rollups)),
            f"{tally.kept[-1] / 1e6:,.0f}",
            f"{mean(stats.bytes for stats in tally.deltas) / 1e6:.1f}",
            f"{1e3 * statistics.median(stats.stall_s for stats in tally.increments):.1f}",
            f"{1e3 * statistics.median(stats.durable_s for stats in tally.increments):.0f}",
            f"{1e3 * mean(one.whole_s for one in many):.0f}",
            f"{1e3 * mean(one.changed_s for one in many):.1f}",
            f"{mean(one.changed_bytes for one in many) / 1e6:.1f}",
            f"{mean(one.segments for one in many):.0f}",
            f"{mean(one.objects for one in many):.0f}",
        ))  # fmt: skip
    return Sheet(
        "All four strategies",
        ("strategy", "bases", "rollups", "MB stored", "MB a delta", "stall ms", "durable ms",
         "restore ms", "changed rows ms", "MB of them read", "segments", "files"),
        tuple(rows),
        note="Stored: files of rows, networks, deletion vectors and the catalogs. A delta carries "
        "the networks too. Stall and durable are medians over deltas that are no rollups (full: "
        "over bases); segments and files are what a restore reads beyond the base.",
    )  # fmt: skip


def _extraction(size: Size, found: Found) -> Sheet:
    tally: Tally = found.watched.tallies[GRID]
    alone = [one.seconds for one in tally.alone] or [0.0]
    beside = [one.seconds for one in tally.beside] or [0.0]
    rounds = tally.rounds
    written = sum(one.written_bytes for one in rounds)
    rows = [
        ("seconds between two checkpoints", f"{statistics.median(found.watched.interval_s):.3f}"),
        ("seconds of a round alone: median, most", _median_most(alone)),
        ("seconds of a round beside training: median, most", _median_most(beside)),
        (
            "increments still waiting when the next checkpoint was due: most",
            str(max(tally.backlogs, default=0)),
        ),
        ("memory a round took beyond what the process held: most, MB", _shown_memory(tally)),
        ("chunks looked at", str(sum(one.chunks for one in rounds))),
        ("… passed over by range of ids", str(sum(one.by_range for one in rounds))),
        ("… by Bloom filter", str(sum(one.by_filter for one in rounds))),
        ("… by true ratio", str(sum(one.by_ratio for one in rounds))),
        ("… extracted", str(sum(one.extracted for one in rounds))),
        ("… closed whole", str(sum(one.closed for one in rounds))),
        ("chunks moved out of garbage", str(sum(one.moved for one in rounds))),
        ("MB written by extraction in all", f"{written / 1e6:.1f}"),
        ("MB of garbage in the end", f"{rounds[-1].garbage_bytes / 1e6:.1f}" if rounds else "0"),
    ]
    return Sheet("Extraction", ("what", "value"), tuple(rows))


def _median_most(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f}, {max(values):.3f}"


def _shown_memory(tally: Tally) -> str:
    return f"{max(tally.memory) / 1e6:.1f}" if tally.memory else "unknown"


def _plots(found: Found) -> Iterable[Plot]:
    names = tuple(STRATEGIES)
    count = len(found.restored[GRID])
    numbers = tuple(range(1, count + 1))
    yield Plot(
        name="grid-restore",
        title="Restoring each checkpoint: changed rows alone (the paper's figure 10)",
        x_label="checkpoint",
        y_label="milliseconds",
        lines=tuple(
            Line(name, numbers, tuple(1e3 * one.changed_s for one in found.restored[name]))
            for name in names
        ),
    )
    tallies = found.watched.tallies
    yield Plot(
        name="grid-stored",
        title="Stored after each checkpoint (the paper's figure 12)",
        x_label="checkpoint",
        y_label="gigabytes",
        lines=tuple(
            Line(name, numbers, tuple(size / 1e9 for size in tallies[name].kept)) for name in names
        ),
    )
    yield Plot(
        name="grid-stall",
        title="Training stands still at each checkpoint",
        x_label="checkpoint",
        y_label="milliseconds",
        lines=tuple(
            Line(
                name,
                tuple(at for at, stats in enumerate(tallies[name].saves, 1) if stats.kind != BASE),
                tuple(1e3 * stats.stall_s for stats in tallies[name].deltas),
            )
            for name in names
        ),
    )
