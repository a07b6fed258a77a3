"""What the parts of the grid are worth: the threshold R, the three filters, the bundles.

The sensitivity and ablation of IncrCP (figures 13 to 15): a smaller model of the same proportions
and the same batches, one training run watched by a checkpointer for every setting. Networks are
left out of training (train.py): the same rows change, at a fraction of the time.

Not here: the grid beside other strategies at full size (every_step.py).
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.grid.every_step import mean
from benchmarks.grid.restore import Restored, restore_all
from benchmarks.grid.train import (
    DIFFERENTIAL,
    GRID,
    NAIVE,
    STRATEGIES,
    Size,
    Tally,
    Training,
    store_of,
    watch,
)
from benchmarks.results import Line, Plot, Section, Sheet
from holdfast.checkpoint.grid.decide import Extract
from holdfast.checkpoint.run import open as open_run
from holdfast.recsys.models.presets import ModelKind

THRESHOLDS = (0.0, 0.01, 0.02, 0.04, 0.08, 0.16)
AUTO = "auto"
# Without memory for ids, as in the paper: a filter that is asked saves reading them.
FILTERS: Mapping[str, Extract] = {
    "none": Extract(by_range=False, by_filter=False, by_ratio=False, memory_bytes=0),
    "range": Extract(by_filter=False, by_ratio=False, memory_bytes=0),
    "range + Bloom": Extract(by_ratio=False, memory_bytes=0),
    "all three": Extract(memory_bytes=0),
    "ids in memory": Extract(),
}
BUNDLES: Mapping[str, Extract] = {
    "off": Extract(threshold=0.0, bundles=False),
    "on": Extract(threshold=0.0),
}
ROLLUPS = {"off": False, "on": True}  # R chosen by itself
MODELS: tuple[ModelKind, ...] = ("deepfm", "pnn")

STUDY = Size(table_bytes=256 << 20, checkpoints=50, is_whole=False)
OTHERS = Size(table_bytes=64 << 20, checkpoints=100, is_whole=False)
QUICK = Size(table_bytes=1 << 17, checkpoints=4, steps=2, batch=64, preset="small", is_whole=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One setting: what it did while training, and its restores."""

    tally: Tally
    restored: Sequence[Restored]
    chunks: int

    @property
    def construction_s(self) -> float:
        """Seconds from snapshot to commit and for the round after it, a checkpoint on average."""
        return self.extraction_s + mean(stats.durable_s for stats in self.tally.deltas)

    @property
    def extraction_s(self) -> float:
        """Seconds of a round, on average."""
        return mean(one.seconds for one in self.tally.rounds)

    @property
    def restore_s(self) -> float:
        """Seconds for what changed since the base, on average."""
        return mean(one.changed_s for one in self.restored)


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Every setting of the study, then the other models."""
    size = QUICK if quick else STUDY
    others = QUICK if quick else OTHERS
    rules: dict[str, Extract] = {f"R = {r:g}": Extract(threshold=r) for r in THRESHOLDS}
    rules[AUTO] = Extract()
    rules |= {f"filters {name}": extract for name, extract in FILTERS.items()}
    rules |= {f"bundles {name}": extract for name, extract in BUNDLES.items()}
    found = run_settings(size, rules, folder, with_rollups="rollups on")
    found["rollups off"] = found[AUTO]
    models = {
        kind: run_strategies(dataclasses.replace(others, kind=kind), folder) for kind in MODELS
    }
    return Section(
        name="gridstudy",
        title="What the parts of the grid are worth",
        text=(
            f"{size.checkpoints} checkpoints of DLRM with Criteo Kaggle's tables scaled to "
            f"{size.table_bytes / 1e6:.0f} MB, one every {size.steps} batches of {size.batch}; "
            "every second one is restored from every store, in turns, from the page cache. The "
            "rows of the batches are looked up and stepped without the network between. Rollups "
            "are off where nothing else is said, as the paper has none. Restore "
            "is of changed rows alone; construction is from snapshot to commit and the round of "
            "extraction after it. Means over checkpoints."
        ),
        sheets=(
            _table("The threshold R (the paper's figure 13)", "R", found, _names("R = ")),
            _table("The three filters (figure 14a)", "filters", found, _names("filters ")),
            _table("Concatenation into bundles, R = 0 (figure 14b)", "bundles", found,
                   _names("bundles ")),
            _table("Rollups, R chosen by itself", "rollups", found, _names("rollups ")),
            _models(others, models),
        ),
        plots=tuple(_plots(found)),
    )  # fmt: skip


def _names(prefix: str) -> dict[str, str]:
    """Names of settings by what a table calls them."""
    shown = {
        "R = ": [*(f"{r:g}" for r in THRESHOLDS), AUTO],
        "filters ": list(FILTERS),
        "bundles ": list(BUNDLES),
        "rollups ": list(ROLLUPS),
    }[prefix]
    return {name: name if name == AUTO else f"{prefix}{name}" for name in shown}


def run_settings(
    size: Size, rules: Mapping[str, Extract], folder: Path, *, with_rollups: str | None = None
) -> dict[str, Outcome]:
    """One training run under every rule; rules that are the same by two names run once.

    The strategy as it is, with rollups, runs under the name ``with_rollups``.
    """
    first: dict[Extract, str] = {}
    for name, extract in rules.items():
        first.setdefault(extract, name)
    settings: dict[str, dict[str, Any]] = {
        name: {"strategy": dataclasses.replace(STRATEGIES[GRID], extract=extract, rollups=False)}
        for extract, name in first.items()
    }
    if with_rollups is not None:
        settings[with_rollups] = {"strategy": STRATEGIES[GRID]}
    found = _run(size, settings, folder, every=2)
    same = {name: found[first[extract]] for name, extract in rules.items()}
    return same if with_rollups is None else {**same, with_rollups: found[with_rollups]}


def run_strategies(size: Size, folder: Path) -> dict[str, Outcome]:
    """One training run under every strategy."""
    settings = {name: {"strategy": strategy} for name, strategy in STRATEGIES.items()}
    return _run(size, settings, folder, every=2)


def _run(
    size: Size, settings: Mapping[str, Mapping[str, Any]], folder: Path, *, every: int
) -> dict[str, Outcome]:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-") as scratch:
        place = Path(scratch)
        training = Training(size)
        watched = watch(training, settings, place)
        runs = {name: open_run(store_of(place, name)) for name in settings}
        steps = next(iter(runs.values())).steps[::-1][::every][::-1]  # the last one among them
        restored = restore_all(runs, training.targets(), steps, checksums=watched.checksums)
        return {
            name: Outcome(watched.tallies[name], restored[name], len(run.catalog.segments))
            for name, run in runs.items()
        }


def _table(title: str, first: str, found: Mapping[str, Outcome], names: Mapping[str, str]) -> Sheet:
    rows = []
    for shown, name in names.items():
        one = found[name]
        rounds, restored = one.tally.rounds, one.restored
        rows.append((
            shown,
            f"{1e3 * one.restore_s:.2f}",
            f"{1e3 * one.construction_s:.1f}",
            f"{1e3 * one.extraction_s:.1f}",
            f"{mean(r.written_bytes for r in rounds) / 1e6:.2f}",
            f"{mean(r.read_bytes for r in rounds) / 1e6:.2f}",
            f"{mean(r.changed_bytes for r in restored) / 1e6:.2f}",
            f"{_share(restored):.2%}",
            f"{mean(r.objects for r in restored):.1f}",
            f"{mean(r.segments for r in restored):.0f}",
            str(one.chunks),
            f"{one.tally.kept[-1] / 1e6:.1f}",
        ))  # fmt: skip
    return Sheet(
        title,
        (first, "restore ms", "construction ms", "of it extraction ms", "MB it wrote",
         "MB it read", "MB a restore read", "dead rows in it", "files", "chunks", "chunks in all",
         "MB stored"),
        tuple(rows),
    )  # fmt: skip


def _share(restored: Sequence[Restored]) -> float:
    return sum(r.masked_rows for r in restored) / max(1, sum(r.changed_rows for r in restored))


def _models(size: Size, models: Mapping[ModelKind, Mapping[str, Outcome]]) -> Sheet:
    rows = []
    for kind, found in models.items():
        grid = found[GRID]
        for peer in (DIFFERENTIAL, NAIVE):
            other = found[peer]
            whole = mean(r.whole_s for r in grid.restored) / mean(r.whole_s for r in other.restored)
            stalls = [
                statistics.median(stats.stall_s for stats in one.tally.increments)
                for one in (grid, other)
            ]
            rows.append((
                kind,
                peer,
                f"{grid.tally.kept[-1] / 1e6:.1f}",
                f"{grid.tally.kept[-1] / other.tally.kept[-1]:.2f}×",
                f"{whole:.2f}×",
                f"{grid.restore_s / other.restore_s:.2f}×",
                f"{_read(grid) / _read(other):.2f}×",
                f"{stalls[0] / stalls[1]:.2f}×",
            ))  # fmt: skip
    return Sheet(
        f"DeepFM and PNN, {size.checkpoints} checkpoints (figure 15)",
        ("model", "the grid beside", "MB stored", "stored", "whole restore", "changed rows alone",
         "bytes of them", "stall"),
        tuple(rows),
        note=f"Tables of {size.table_bytes / 1e6:.0f} MB (DeepFM has a second table of one float "
        "a row for each). Quotients: the grid's number over the other's.",
    )  # fmt: skip


def _read(one: Outcome) -> float:
    return mean(r.changed_bytes for r in one.restored)


def _plots(found: Mapping[str, Outcome]) -> Iterable[Plot]:
    by_r = [found[f"R = {r:g}"] for r in THRESHOLDS]
    yield Plot(
        name="gridstudy-threshold",
        title="The threshold R: restore against construction (figure 13)",
        x_label="R",
        y_label="milliseconds",
        lines=(
            Line("restore", THRESHOLDS, tuple(1e3 * one.restore_s for one in by_r)),
            Line("construction", THRESHOLDS, tuple(1e3 * one.construction_s for one in by_r)),
            Line("of it extraction", THRESHOLDS, tuple(1e3 * one.extraction_s for one in by_r)),
        ),
    )
    for what, names, title, peer in (
        ("filters", tuple(FILTERS), "The three filters (figure 14a)", "filters none"),
        ("bundles", tuple(BUNDLES), "Bundles, R = 0 (figure 14b)", "bundles off"),
    ):
        ours = [found[f"{what} {name}"] for name in names]
        base = found[peer]
        yield Plot(
            name=f"gridstudy-{what}",
            title=title,
            x_label=what,
            y_label=f"part of '{peer}'",
            lines=(
                Line("restore", names, tuple(o.restore_s / base.restore_s for o in ours)),
                Line(
                    "construction",
                    names,
                    tuple(o.construction_s / base.construction_s for o in ours),
                ),
                Line("bytes read", names, tuple(_read(o) / _read(base) for o in ours)),
            ),
            is_bars=True,
        )
