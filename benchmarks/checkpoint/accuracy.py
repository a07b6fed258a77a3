"""What restoring from few bits costs in AUC: the paper's figure 10, and the same for row state.

A small DLRM learns the click stream; at evenly spread steps it is saved with the codec and restored
from what was stored, through a real Checkpointer, as if it had failed there. Differences are paired
by seed: the run without any restore sees the same batches and starts from the same weights, so what
differs is the restores alone.

Not here: losses of single rows (kernels.py), bytes of whole checkpoints (reduction.py).

# S seeds
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.results import AT_MOST, Line, Plot, Ratio, Section, Sheet
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.format.codec import Codec, encode, parse_codec
from holdfast.checkpoint.planning.codecs import default_state_codec
from holdfast.checkpoint.strategy import Strategy
from holdfast.recsys import (
    CRITEO_KAGGLE_ROWS,
    DLRM,
    Batch,
    ClickStream,
    auc,
    scaled_rows,
    split_parameters,
)
from holdfast.storage import open_storage

WIDTH = 16
WEIGHT_BITS = (2, 3, 4, 8)
RESTORES = (1, 3, 20)
STATE_CODECS = ("fp32", "fp16", "bf16", "asym8", "log8", "asym4", "log4")
STATE_RESTORES = (3, 20)
SGD, ADAGRAD = "sgd", "adagrad"
# Check-N-Run section 6.2.1: the bits that its threshold of 0.01 % allows for so many restores
PAPER_BITS = {1: 2, 3: 3, 20: 4}
LOSS_MAX = 1e-4


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    table_rows: int
    batch: int
    steps: int
    heldout: int
    seeds: int
    is_small: bool = False


FULL = Size(table_rows=20_000, batch=1024, steps=420, heldout=100, seeds=4)
QUICK = Size(table_rows=300, batch=64, steps=12, heldout=4, seeds=1, is_small=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: which optimizer, how often it is restored, and from which codecs."""

    optimizer: str
    restores: int = 0
    codec: str = "fp32"
    state_codec: str | None = None


def settings(*, is_small: bool) -> list[Setting]:
    """Every run of a seed; the ones without restores are what the others are compared with."""
    bits = WEIGHT_BITS[:1] if is_small else WEIGHT_BITS
    state_codecs = STATE_CODECS[-1:] if is_small else STATE_CODECS
    restores = RESTORES[-2:-1] if is_small else RESTORES
    state_restores = STATE_RESTORES[:1] if is_small else STATE_RESTORES
    found = [
        Setting(SGD),
        *(Setting(SGD, n, weight_codec(b)) for b in bits for n in restores),
        Setting(ADAGRAD),
        *(
            Setting(ADAGRAD, n, weight_codec(4), codec)
            for codec in state_codecs
            for n in state_restores
        ),
        *([] if is_small else (s for n in PAPER_BITS for s in as_planned(n))),
    ]
    return list(dict.fromkeys(found))


def as_planned(restores: int) -> tuple[Setting, Setting]:
    """The weights that so many restores allow, with exact state and with the default one."""
    weights = weight_codec(PAPER_BITS[restores])
    state = default_state_codec(parse_codec(weights), is_non_negative=True).name
    return Setting(ADAGRAD, restores, weights, "fp32"), Setting(ADAGRAD, restores, weights, state)


def weight_codec(bits: int) -> str:
    """The codec that check-n-run uses at a width.

    >>> weight_codec(4), weight_codec(8)
    ('adaptive4', 'asym8')
    """
    return "asym8" if bits >= 8 else f"adaptive{bits}"


def restore_steps(steps: int, restores: int) -> list[int]:
    """After which steps a run fails, evenly spread and never at its end.

    >>> restore_steps(12, 3)
    [3, 6, 9]
    """
    return [steps * (index + 1) // (restores + 1) for index in range(restores)]


Scores = dict[Setting, float]


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Every setting for every seed; seeds in processes of their own, one a core."""
    size = QUICK if quick else FULL
    seeds = range(1, size.seeds + 1)
    if size.seeds == 1:
        scores = [measure_seed(size, seed) for seed in seeds]
    else:
        context = multiprocessing.get_context("spawn")
        workers = min(size.seeds, os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, context, initializer=_one_thread) as pool:
            scores = list(pool.map(measure_seed, [size] * size.seeds, seeds))
    weights = [s for s in settings(is_small=size.is_small) if s.optimizer == SGD and s.restores]
    states = [
        s
        for s in settings(is_small=size.is_small)
        if s.optimizer == ADAGRAD and s.codec == weight_codec(4) and s.restores in STATE_RESTORES
    ]
    unrestored = {
        kind: statistics.mean(seed[Setting(kind)] for seed in scores) for kind in (SGD, ADAGRAD)
    }
    return Section(
        name="accuracy",
        title="What restoring from few bits costs in accuracy",
        text=(
            f"A DLRM over 26 tables (rows of {WIDTH} floats) trained on "
            f"{size.steps * size.batch:,} samples of the click stream, whose best possible AUC is "
            f"about 0.82. Without a restore it reaches {unrestored[SGD]:.4f} with SGD and "
            f"{unrestored[ADAGRAD]:.4f} with Adagrad, on {size.heldout * size.batch:,} held-out "
            f"samples. {size.seeds} seeds; ± is the standard error of the mean difference. The "
            "paper trained on 4 billion samples and calls a loss below 0.01 % harmless; a run this "
            "short has far less training after its last restore to make up for it, and its noise "
            "is of the size of that threshold."
        ),
        ratios=tuple(_ratios(scores, quick=quick)),
        sheets=(
            _weight_grid(scores, weights),
            _state_grid(scores, states),
            *(() if quick else (_default_grid(scores),)),
        ),
        plots=tuple(_plots(scores, weights, states)),
    )


def _one_thread() -> None:
    torch.set_num_threads(1)


def measure_seed(size: Size, seed: int) -> Scores:
    """The held-out AUC of every setting on one seed's batches and first weights."""
    rows = scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=size.table_rows)
    stream = ClickStream(rows, batch_size=size.batch, seed=seed)
    batches = [stream[index] for index in range(size.steps)]
    heldout_stream = stream.heldout(size.heldout)
    heldout = [heldout_stream[index] for index in range(size.heldout)]
    return {
        setting: _train(setting, rows, batches, heldout, seed=seed)
        for setting in settings(is_small=size.is_small)
    }


def _train(
    setting: Setting,
    rows: Sequence[int],
    batches: Sequence[Batch],
    heldout: Sequence[Batch],
    *,
    seed: int,
) -> float:
    torch.manual_seed(seed)
    # Dense gradients: at these sizes torch steps them faster, and the values are the same.
    model = DLRM(
        rows, width=WIDTH, bottom=(13, 64, WIDTH), top=(64, 32, 1), interaction="cat", sparse=False
    )
    tables, dense = split_parameters(model)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(tables, lr=5.0)
        if setting.optimizer == SGD
        else torch.optim.Adagrad(tables, lr=0.05),
        torch.optim.Adam(dense, lr=1e-3),
    ]
    fails_after = set(restore_steps(len(batches), setting.restores))
    storage = open_storage(f"memory://holdfast-bench/accuracy-{os.getpid()}")
    with Checkpointer(
        storage,
        model=model,
        optimizer=optimizers,
        strategy=Strategy("bases", base="full", codec=setting.codec),
        state_codec=setting.state_codec,
        keep=1,
        threads=1,
        save_last=False,
    ) as ck:
        for batch in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
            ck.step()
            if ck.current_step in fails_after:
                ck.save().result()
                ck.restore(ck.current_step)
    for item in storage.list(""):
        storage.delete(item.name)
    return _evaluate(model, heldout)


def _evaluate(model: nn.Module, heldout: Sequence[Batch]) -> float:
    model.eval()
    with torch.no_grad():
        scores = np.concatenate([model(batch).numpy() for batch in heldout])
    labels = np.concatenate([batch.labels.numpy() for batch in heldout])
    # A run that diverged predicts nothing: it counts as no better than chance.
    return auc(labels, np.nan_to_num(scores, nan=0.0, posinf=1e30, neginf=-1e30))


@dataclass(frozen=True, slots=True)
class Loss:
    """How much AUC a setting loses against no restore, as a part of it: mean over the seeds."""

    mean: float
    error: float


def lost(scores: Sequence[Scores], setting: Setting) -> Loss:
    """The paired loss of a setting.

    >>> base, other = Setting("sgd"), Setting("sgd", 1, "adaptive2")
    >>> round(lost([{base: 0.8, other: 0.796}, {base: 0.5, other: 0.4975}], other).mean, 4)
    0.005
    """
    losses = [1 - seed[setting] / seed[Setting(setting.optimizer)] for seed in scores]
    error = statistics.stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else 0.0
    return Loss(statistics.mean(losses), error)


def _shown(loss: Loss) -> str:
    return f"{100 * loss.mean:.3f} % ± {100 * loss.error:.3f}"


def _ratios(scores: Sequence[Scores], *, quick: bool) -> Iterator[Ratio]:
    if quick:
        return
    for restores, bits in PAPER_BITS.items():
        setting = Setting(SGD, restores, weight_codec(bits))
        loss = lost(scores, setting)
        yield Ratio(
            name=f"AUC lost, {restores} restores from {bits} bits",
            ours=100 * max(0.0, loss.mean),
            peer=100.0,
            against="the AUC without a restore",
            unit="%",
            target=LOSS_MAX,
            sense=AT_MOST,
            note=f"{_shown(loss)}; the paper's bits for so many restores, and its threshold",
        )


def _weight_grid(scores: Sequence[Scores], found: Sequence[Setting]) -> Sheet:
    codecs = list(dict.fromkeys(setting.codec for setting in found))
    restores = sorted({setting.restores for setting in found})
    rows = tuple(
        (
            codec,
            f"{row_bytes(parse_codec(codec), WIDTH):.1f}",
            *(_shown(lost(scores, Setting(SGD, n, codec))) for n in restores),
        )
        for codec in codecs
    )
    columns = ("weights", "bytes a row", *(f"{n} restores" for n in restores))
    return Sheet("Weights: AUC lost against no restore (figure 10)", columns, rows)


def _state_grid(scores: Sequence[Scores], found: Sequence[Setting]) -> Sheet:
    codecs = list(dict.fromkeys(setting.state_codec or "" for setting in found))
    restores = sorted({setting.restores for setting in found})
    rows = tuple(
        (
            codec,
            f"{row_bytes(parse_codec(codec), WIDTH):.1f}",
            *(_shown(lost(scores, Setting(ADAGRAD, n, weight_codec(4), codec))) for n in restores),
        )
        for codec in codecs
    )
    columns = ("row state", "bytes a row", *(f"{n} restores" for n in restores))
    return Sheet(
        "Adagrad's row state, weights at 4 bits: AUC lost against no restore",
        columns,
        rows,
        note="The fp32 line is what the weights alone cost.",
    )


def _default_grid(scores: Sequence[Scores]) -> Sheet:
    rows = []
    for restores in PAPER_BITS:
        exact, default = as_planned(restores)
        sizes = [row_bytes(parse_codec(s.state_codec or ""), WIDTH) for s in (exact, default)]
        rows.append(
            (
                str(restores),
                exact.codec,
                _shown(lost(scores, exact)),
                f"{default.state_codec}",
                _shown(lost(scores, default)),
                f"{sizes[1]:.1f} instead of {sizes[0]:.1f}",
            )
        )
    columns = ("restores", "weights", "state in fp32", "default", "state in default", "bytes a row")
    return Sheet(
        "The default for Adagrad's row state, at the bits of the expected restores: AUC lost",
        columns,
        tuple(rows),
    )


def row_bytes(codec: Codec, width: int) -> float:
    """Bytes that a row of this width takes in a large section.

    >>> row_bytes(parse_codec("adaptive4"), 64)
    36.0
    """
    rows_ND = np.full((1024, width), 0.5, np.float32)
    rows_ND[:, 0] = 0.25
    return round(encode(codec, rows_ND).nbytes / len(rows_ND), 2)


def _plots(
    scores: Sequence[Scores], weights: Sequence[Setting], states: Sequence[Setting]
) -> Iterator[Plot]:
    yield Plot(
        name="accuracy-weights",
        title="AUC lost by restoring quantized weights (the paper's figure 10)",
        x_label="restores",
        y_label="AUC lost, %",
        lines=tuple(
            _line(codec, scores, [s for s in weights if s.codec == codec])
            for codec in dict.fromkeys(s.codec for s in weights)
        ),
        is_bars=True,
    )
    yield Plot(
        name="accuracy-state",
        title="AUC lost by the codec of Adagrad's state (weights at 4 bits)",
        x_label="restores",
        y_label="AUC lost, %",
        lines=tuple(
            _line(codec or "", scores, [s for s in states if s.state_codec == codec])
            for codec in dict.fromkeys(s.state_codec for s in states)
        ),
        is_bars=True,
    )


def _line(label: str, scores: Sequence[Scores], found: Sequence[Setting]) -> Line:
    losses = [lost(scores, setting) for setting in found]
    return Line(
        label,
        tuple(str(setting.restores) for setting in found),
        tuple(100 * loss.mean for loss in losses),
        tuple(100 * loss.error for loss in losses),
    )
