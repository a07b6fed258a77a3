"""What partial recovery costs in accuracy: CPR's figures 6, 7, 11 and 12 on the click stream.

Real training of small DLRMs whose servers fail; a job of 56 hours is scaled down to each. Losses
are paired: against the run without failures of the same seed.

Not here: how a run is emulated (research/emulation.py), the time it takes to choose rows
(priority.py).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.one_thread import one_thread
from benchmarks.results import AT_MOST, Line, Plot, Ratio, Section, Sheet
from holdfast.recsys.train import Recipe
from holdfast.report import words
from holdfast.research import studies
from holdfast.research.emulation import CPR, FULL, Job, Runner
from holdfast.research.studies import Mean, Study
from holdfast.research.update_size import Updates, correlate_updates

SSU, MFU = "cpr-ssu", "cpr-mfu"
PLS = 0.1
LOSS_MAX = 0.0002  # of AUC: the paper's largest with its hot rows saved first
CORRELATION_MIN = {"change": 0.95, "loss": 0.8}  # the paper has 0.983, and 0.8175 to 0.8764
BINS = 5  # of runs, in the picture of loss against PLS


@dataclass(frozen=True, slots=True)
class Size:
    """How much is trained: the jobs of figures 6, 7 and 12, seeds of 7, runs and seeds of 12."""

    updates: Job
    strategies: Job
    pls: Job
    seeds: int
    runs: int
    runs_seeds: int
    workers: int


def _job(steps: int, batch: int, optimizer: str = "sgd") -> Job:
    return Job(steps=steps, recipe=Recipe(rows=20_000, batch_size=batch, optimizer=optimizer))


def _tiny() -> Job:
    return Job(steps=24, recipe=Recipe(preset="tiny", rows=400, batch_size=32, optimizer="sgd"))


def full_size() -> Size:
    """What the document shows."""
    return Size(
        _job(4096, 128), _job(800, 1024, "adagrad"), _job(400, 512), 6, 30, 3, os.cpu_count() or 1
    )


def quick_size() -> Size:
    """Enough to see that everything works."""
    return Size(_tiny(), _tiny(), _tiny(), 1, 3, 1, 1)


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Watch rows change, compare strategies, and fit loss to PLS."""
    size = quick_size() if quick else full_size()
    with one_thread():
        return _measure(size, quick=quick)


def _measure(size: Size, *, quick: bool) -> Section:
    updates = correlate_updates(size.updates)
    compared = studies.study_strategies(
        Runner(job=size.strategies, workers=size.workers),
        seeds=size.seeds,
        strategies=[FULL, CPR, SSU] if quick else [FULL, CPR, MFU, SSU],
        pls=PLS,
    )
    fitted = studies.study_pls(
        Runner(job=size.pls, workers=size.workers),
        runs=size.runs,
        seeds=size.runs_seeds,
        strategies=[CPR] if quick else [CPR, SSU],
        figure=12,
    )
    return Section(
        name="emulation",
        title="What partial recovery costs in accuracy",
        text=(
            f"DLRMs over 26 tables of {size.pls.recipe.rows:,} rows together, trained on the "
            f"click stream; a job of {size.pls.hours:g} hours is scaled down to each training. "
            "Failures take the rows of some of 8 (or 16) servers, which come back as last saved. "
            "Losses of AUC are against the run of the same seed without failures; ± is the "
            "standard error of their mean. What "
            "the targets rest on is explained in [cpr.md](cpr.md)."
        ),
        ratios=(*_update_ratios(updates), *(() if quick else _loss_ratios(compared, fitted))),
        sheets=(_updates_sheet(updates), _strategies_sheet(compared), _fits_sheet(fitted)),
        plots=(_updates_plot(updates), _strategies_plot(compared), _pls_plot(fitted)),
    )


def _update_ratios(found: Updates) -> Iterator[Ratio]:
    last = found.last
    for name, value, target, note in (
        (
            "use of rows and their change (figure 6), correlation",
            last.moved,
            CORRELATION_MIN["change"],
            "distance from the first values. Rows of equal use are pulled unequally far, and hot "
            "rows settle; see cpr.md",
        ),
        (
            "use of rows and the sum of all their updates, correlation",
            last.pushed,
            None,
            "gradients of single uses, added up: grows with use by itself",
        ),
        (
            "change that the most used rows hold",
            last.caught,
            None,
            "of what the best choice of so many rows holds: what counters stand in for",
        ),
    ):
        if value is not None:
            yield Ratio(
                name=name,
                ours=value,
                peer=1.0,
                against="1, a perfect stand-in",
                unit="",
                target=target,
                note=note,
            )


def _loss_ratios(compared: Study, fitted: Study) -> Iterator[Ratio]:
    cpr, ssu = fitted.fits[CPR], fitted.fits[SSU]
    for name, fit in ((CPR, cpr), (SSU, ssu)):
        yield Ratio(
            name=f"PLS and AUC lost by {name}, correlation",
            ours=fit.pearson or 0.0,
            peer=1.0,
            against="1, a perfect line",
            unit="",
            target=CORRELATION_MIN["loss"] if name == CPR else None,
            note=f"{fit.runs} random scenarios",
        )
    yield Ratio(
        name="slope of cpr-ssu's loss over PLS",
        ours=ssu.slope,
        peer=cpr.slope,
        against="cpr's slope",
        unit="AUC",
        target=1.0,
        sense=AT_MOST,
        note=f"± {ssu.slope_error or 0.0:.4f} and ± {cpr.slope_error or 0.0:.4f}",
    )
    for line in compared.lines:
        if line.loss is not None and line.strategy in (MFU, SSU):
            yield Ratio(
                name=f"AUC lost by {line.strategy} at a PLS of {PLS:g}",
                ours=max(0.0, line.loss.mean),
                peer=1.0,
                against="an AUC of 1",
                unit="AUC",
                target=LOSS_MAX,
                sense=AT_MOST,
                note=f"{_shown(line.loss)} over {compared.seeds} seeds; the AUC without failures "
                f"varies by {compared.noise or 0.0:.5f} from seed to seed",
            )


def _shown(mean: Mean | None) -> str:
    return "" if mean is None else f"{mean.mean:.5f} ± {mean.error:.5f}"


def _trained(study: Study | Updates) -> str:
    recipe = study.job.recipe
    return f"{study.job.steps:,} steps of {recipe.batch_size:,} samples, {recipe.optimizer}."


def _correlation(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _updates_sheet(found: Updates) -> Sheet:
    return Sheet(
        "How often rows are used and how much they change (figure 6): correlations",
        ("after steps", "moved", "in each table", "walked", "pushed", "caught"),
        tuple(
            (
                f"{moment.step:,}",
                *map(_correlation, (moment.moved, moment.within, moment.walked, moment.pushed)),
                f"{moment.caught:.0%}",
            )
            for moment in found.moments
        ),
        note=(
            f"{_trained(found)} moved: distance (L2) from the first values, over all rows of the "
            "large tables together; in each table: the mean of the tables' own. walked: the "
            "changes of all steps added up. pushed: the gradients of all uses added up. caught: "
            "how far the most used eighth of the rows moved, of what the best choice did."
        ),
    )


def _strategies_sheet(found: Study) -> Sheet:
    return Sheet(
        f"Strategies at a PLS of {PLS:g} (figure 7)",
        ("strategy", "overhead", "PLS", "AUC lost"),
        tuple(
            (
                line.strategy,
                f"{line.overhead_total.mean:.2%}",
                "" if line.pls is None else f"{line.pls.mean:.3f}",
                _shown(line.loss),
            )
            for line in found.lines
        ),
        note=(
            f"{_trained(found)} {words.counted(found.seeds, 'seed')}; AUC without failures "
            f"{found.auc or 0.0:.4f}, "
            f"its standard deviation over the seeds {found.noise or 0.0:.5f}."
        ),
    )


def _fits_sheet(found: Study) -> Sheet:
    return Sheet(
        "AUC lost against the portion of lost samples (figures 11 and 12)",
        ("strategy", "runs", "correlation", "AUC lost a PLS of 1"),
        tuple(
            (
                name,
                str(fit.runs),
                _correlation(fit.pearson),
                f"{fit.slope:.4f} ± {fit.slope_error or 0.0:.4f}",
            )
            for name, fit in found.fits.items()
        ),
        note=f"{_trained(found)} 1 to 32 failures, each of 6 to 50 % of the servers.",
    )


def _updates_plot(found: Updates) -> Plot:
    measures: dict[str, list[float | None]] = {
        "moved": [moment.moved for moment in found.moments],
        "walked": [moment.walked for moment in found.moments],
        "pushed": [moment.pushed for moment in found.moments],
        "caught": [moment.caught for moment in found.moments],
    }
    steps = tuple(f"{moment.step:,}" for moment in found.moments)
    return Plot(
        name="emulation-updates",
        title="Use of rows and their change (the paper's figure 6)",
        x_label="steps",
        y_label="correlation; caught: share",
        lines=tuple(
            Line(label, steps, tuple(value or 0.0 for value in values))
            for label, values in measures.items()
        ),
        is_bars=True,
    )


def _strategies_plot(found: Study) -> Plot:
    lines = [(line.strategy, line.loss) for line in found.lines if line.loss is not None]
    return Plot(
        name="emulation-strategies",
        title=f"AUC lost at a PLS of {PLS:g} (the paper's figure 7)",
        x_label="",
        y_label="AUC lost",
        lines=(
            Line(
                "AUC lost",
                tuple(name for name, _ in lines),
                tuple(loss.mean for _, loss in lines),
                tuple(loss.error for _, loss in lines),
            ),
            Line(
                "seed noise", tuple(name for name, _ in lines), (found.noise or 0.0,) * len(lines)
            ),
        ),
        is_bars=True,
    )


def _pls_plot(found: Study) -> Plot:
    """Runs in groups of equal number, by their PLS: the same groups for every strategy."""
    first = next(iter(found.fits))
    all_pls = sorted(point.pls for point in found.points if point.strategy == first)
    edges = np.quantile(all_pls, np.linspace(0, 1, BINS + 1)[1:-1])
    names = [f"{low:.2f} to {high:.2f}" for low, high in _ranges(all_pls, edges)]
    lines = []
    for strategy in found.fits:
        points = [point for point in found.points if point.strategy == strategy]
        groups: dict[int, list[float]] = {}
        for point in points:
            groups.setdefault(int(np.searchsorted(edges, point.pls)), []).append(point.loss)
        means = {index: Mean.of(losses) for index, losses in sorted(groups.items())}
        lines.append(
            Line(
                strategy,
                tuple(names[index] for index in means),
                tuple(mean.mean for mean in means.values()),
                tuple(mean.error for mean in means.values()),
            )
        )
    return Plot(
        name="emulation-pls",
        title="AUC lost against the portion of lost samples (the paper's figures 11 and 12)",
        x_label="portion of lost samples (PLS), runs in equal groups",
        y_label="AUC lost",
        lines=tuple(lines),
        is_bars=True,
    )


def _ranges(all_pls: list[float], edges: np.ndarray) -> Iterator[tuple[float, float]]:
    ends = [all_pls[0], *edges.tolist(), all_pls[-1]]
    yield from itertools.pairwise(ends)
