"""A very long run: how the catalog and its commits grow with the chunks that are alive.

A model of a few thousand rows is saved a thousand times over one base and its rollups, with R
chosen by itself and with R = 0. Every so often the newest catalog is weighed, its segments counted,
and the same catalog committed again into an empty folder, alone and several times: serializing,
writing and the fsync.

Not here: models of a real size (every_step.py).
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.grid.train import GRID, STRATEGIES, Size, Training, Watcher
from benchmarks.results import AT_MOST, Line, Plot, Ratio, Section, Sheet
from benchmarks.timing import seconds_of
from holdfast.checkpoint.format.catalog import Catalog
from holdfast.checkpoint.grid.decide import Extract
from holdfast.checkpoint.store import catalogs
from holdfast.storage import open_storage

RULES = {"R chosen by itself": Extract(), "R = 0": Extract(threshold=0.0)}
COMMITS = 5
PER_SEGMENT_MAX = 1.1


@dataclass(frozen=True, slots=True)
class Length:
    """How long the run is, and how often it is looked at."""

    training: Size
    every: int
    early: int


FULL = Length(
    Size(
        table_bytes=4096 * 64,
        checkpoints=1000,
        steps=1,
        batch=4,
        preset="small",
        is_whole=False,
        tables=4,
    ),
    every=50,
    early=100,
)
QUICK = Length(dataclasses.replace(FULL.training, checkpoints=8), every=2, early=2)


@dataclass(frozen=True, slots=True)
class Point:
    """The store after so many checkpoints."""

    checkpoints: int
    segments: int
    objects: int
    catalog_bytes: int
    commit_s: float
    load_s: float
    round_s: float


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """The same long run under both rules."""
    length = QUICK if quick else FULL
    found = {name: run_long(length, extract, folder) for name, extract in RULES.items()}
    rows = sum(table.rows for table in Training(length.training).tables)
    return Section(
        name="growth",
        title="A thousand checkpoints of one base",
        text=(
            f"A model of {rows:,} rows of 64 bytes in {length.training.tables} tables, saved "
            f"{length.training.checkpoints:,} times after a batch of {length.training.batch}; all "
            "checkpoints are kept, over one base and its rollups. A catalog is written whole with "
            "every commit, so its bytes and its time are to grow with the segments it names and no "
            "faster. A commit is timed alone, into a folder of its own: serializing, writing, "
            f"fsync; medians of {COMMITS}. A round is the mean since the line before."
        ),
        ratios=tuple(r for name, points in found.items() for r in _ratios(name, points, length)),
        sheets=tuple(_sheet(name, points) for name, points in found.items()),
        plots=_plots(found),
    )


def run_long(length: Length, extract: Extract, folder: Path) -> list[Point]:
    """Save again and again; a point every so often."""
    points: list[Point] = []
    strategy = dataclasses.replace(STRATEGIES[GRID], extract=extract)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-") as scratch:
        training = Training(length.training)
        watcher = Watcher(training, Path(scratch) / "run", strategy=strategy)
        with watcher.ck:
            for index in range(length.training.checkpoints):
                training.interval(index)
                watcher.ck.step()
                watcher.save(is_beside=False)
                if (index + 1) % length.every == 0:
                    since = watcher.ck.current_step - length.every
                    rounds = [r.seconds for r in watcher.tally.rounds if r.step > since]
                    points.append(_look(watcher, index + 1, rounds, scratch))
    return points


def _look(watcher: Watcher, checkpoints: int, rounds: Sequence[float], scratch: str) -> Point:
    storage = watcher.storage
    number = catalogs.numbers(storage)[-1]
    load_s = seconds_of(lambda: catalogs.load(storage, number))
    catalog = catalogs.load(storage, number)
    return Point(
        checkpoints=checkpoints,
        segments=len(catalog.segments),
        objects=len(catalog.objects),
        catalog_bytes=storage.size(catalogs.name_of(number)),
        commit_s=_commit_seconds(catalog, scratch),
        load_s=load_s,
        round_s=statistics.mean(rounds) if rounds else 0.0,
    )


def _commit_seconds(catalog: Catalog, scratch: str) -> float:
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        storage = open_storage(place)
        spent = []
        for number in range(1, COMMITS + 1):
            next_ = dataclasses.replace(catalog, number=number)
            spent.append(seconds_of(lambda to=next_: catalogs.commit(storage, to)))  # type: ignore[misc]
    return statistics.median(spent)


def _ratios(name: str, points: Sequence[Point], length: Length) -> list[Ratio]:
    early = next(point for point in points if point.checkpoints >= length.early)
    late = points[-1]
    parts = (
        ("catalog bytes a segment", "bytes", early.catalog_bytes, late.catalog_bytes, 1.0),
        ("commit time a segment", "us", early.commit_s, late.commit_s, 1e6),
    )
    return [
        Ratio(
            name=f"{what}, {name}, after {late.checkpoints} checkpoints",
            ours=scale * last / late.segments,
            peer=scale * first / early.segments,
            against=f"after {early.checkpoints}",
            unit=unit,
            target=PER_SEGMENT_MAX,
            sense=AT_MOST,
        )
        for what, unit, first, last, scale in parts
    ]


def _sheet(name: str, points: Sequence[Point]) -> Sheet:
    return Sheet(
        f"A long run, {name}",
        ("checkpoints", "segments", "objects", "catalog kB", "bytes a segment", "commit ms",
         "load ms", "round ms"),
        tuple(
            (
                str(point.checkpoints),
                str(point.segments),
                str(point.objects),
                f"{point.catalog_bytes / 1e3:.0f}",
                f"{point.catalog_bytes / point.segments:.0f}",
                f"{1e3 * point.commit_s:.1f}",
                f"{1e3 * point.load_s:.1f}",
                f"{1e3 * point.round_s:.1f}",
            )
            for point in points
        ),
    )  # fmt: skip


def _plots(found: dict[str, list[Point]]) -> tuple[Plot, ...]:
    shown = (
        ("segments", "Segments in the catalog", "segments", "segments", 1.0),
        ("catalog", "Size of the catalog", "megabytes", "catalog_bytes", 1e-6),
        ("commit", "Time of a commit", "milliseconds", "commit_s", 1e3),
    )
    return tuple(
        Plot(
            name=f"growth-{name}",
            title=title,
            x_label="checkpoints",
            y_label=unit,
            lines=tuple(
                Line(
                    rule,
                    tuple(point.checkpoints for point in points),
                    tuple(scale * getattr(point, field) for point in points),
                )
                for rule, points in found.items()
            ),
        )
        for name, title, unit, field, scale in shown
    )
