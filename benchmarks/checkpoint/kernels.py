"""Codec speed beside its yardsticks, and what each codec loses: the paper's figures 5, 6 and 7.

Speeds are ratios of things measured in turns in one run on one thread: the machine may be slow or
busy, the ratio stays. Bytes are those of the float32 rows.

Not here: whole checkpoints (overhead.py, peers.py), what a loss means for a model (accuracy.py).

# N rows, D floats of a row, M rows of a table
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.results import Line, Plot, Ratio, Section, Sheet
from benchmarks.timing import median_seconds
from holdfast.checkpoint.format.codec import Codec, decode, decode_into, encode, parse_codec

SEED = 20240610
BUFFER_BYTES = 8 << 20
FIGURE_5 = ("sym", "asym", "kmeans-block", "kmeans-cluster", "kmeans", "adaptive")
BINS = (5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60)
SHOWN_ROWS = "trained-like"
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class Loss:
    """Mean l2 loss of a codec on one kind of rows, and its bytes beside fp32's (figure 5)."""

    rows: str
    codec: str
    bits: int
    l2: float
    size: float


@dataclass(frozen=True, slots=True)
class Gain:
    """How much less than asym the adaptive search loses with these settings (figures 6 and 7)."""

    rows: str
    bits: int
    bins: int
    ratio: float
    gain: float


def trained_rows(count: int, width: int, *, seed: int = SEED) -> np.ndarray:
    """Rows as a trained table has them: each its own size and center, some values far out."""
    rng = np.random.default_rng(seed)
    size_N1 = np.exp(rng.normal(-3.0, 0.7, (count, 1))).astype(np.float32)
    rows_ND = rng.standard_normal((count, width), dtype=np.float32)
    rows_ND += rng.normal(0.0, 0.3, (count, 1)).astype(np.float32)
    rows_ND[rng.random((count, width), dtype=np.float32) < 0.01] *= np.float32(4)
    return rows_ND * size_N1


def sample_rows(count: int, width: int) -> dict[str, np.ndarray]:
    """Rows of three kinds to measure losses on."""
    rng = np.random.default_rng(SEED)
    return {
        "trained-like": trained_rows(count, width),
        "gaussian": rng.standard_normal((count, width)).astype(np.float32) * np.float32(0.1),
        "heavy-tailed": (rng.standard_t(3, (count, width)) * 0.1).astype(np.float32),
    }


class ChunkLoop:
    """Rows in chunks of 8 MB, as a writer meets them, with the jobs that are timed on them."""

    def __init__(self, name: str, width: int, total_bytes: int) -> None:
        self.codec = parse_codec(name)
        self.width = width
        self.rows_ND = trained_rows(total_bytes // (4 * width), width)
        if self.codec.kind == "log":
            np.square(self.rows_ND, out=self.rows_ND)
        self.copy_ND = np.zeros_like(self.rows_ND)
        rows = len(self.rows_ND)
        # Sorted ids with gaps, as a delta has them: four rows of five are written.
        rng = np.random.default_rng(SEED)
        self.table_MD = np.zeros((rows * 5 // 4, width), np.float32)
        self.ids_N = np.sort(rng.permutation(len(self.table_MD))[:rows])
        step = BUFFER_BYTES // (4 * width)
        self.chunks = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
        self.sections = [encode(self.codec, self.rows_ND[chunk]) for chunk in self.chunks]

    def copy(self) -> None:
        """The yardstick: the same rows, copied."""
        for chunk in self.chunks:
            np.copyto(self.copy_ND[chunk], self.rows_ND[chunk])

    def encode(self) -> None:
        """Every chunk into a section that is dropped, as after a write."""
        for chunk in self.chunks:
            encode(self.codec, self.rows_ND[chunk])

    def decode(self) -> None:
        """Every section into the table."""
        wire = self.codec.wire()
        for chunk, section in zip(self.chunks, self.sections, strict=True):
            ids_N = self.ids_N[chunk]
            decode_into(wire, section, self.table_MD, ids_N, rows=len(ids_N), width=self.width)


TARGETS: dict[str, tuple[float | None, float | None]] = {
    "asym4": (0.5, 0.4),
    "fp32": (None, None),
    "fp16": (None, None),
    "bf16": (None, None),
    "sym4": (None, None),
    "asym8": (None, None),
    "asym3": (None, None),
    "asym2": (None, None),
    "adaptive4": (None, None),
    "adaptive2": (None, None),
    "log8": (None, None),
    "log4": (None, None),
    "kmeans4": (None, None),
}


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Speeds, losses and the gain of the adaptive search."""
    found = losses(quick=quick)
    by_bins, by_ratio = search_gains(quick=quick)
    return Section(
        name="kernels",
        title="How fast rows become bytes, and what is lost",
        text=(
            "One thread, chunks of 8 MB as the writer meets them, GB of float32 rows per second; "
            "the yardstick is a copy of the same rows in the same chunks. Decoding scatters into a "
            "table through sorted ids with gaps. The adaptive search stands beside "
            "`torch.choose_qparams_optimized` with the same bins and ratio: all of our encoder "
            "(search, codes, packing) against PyTorch's search alone. Losses are the paper's mean "
            "l2 loss on rows of 64 floats, each with its own size and center and a few values far "
            "out, as trained tables have them; the table shows Gaussian and heavy-tailed rows too."
        ),
        ratios=tuple(speeds(quick=quick)),
        sheets=(_loss_sheet(found), _gain_sheet("bins", by_bins), _gain_sheet("ratio", by_ratio)),
        plots=(
            _loss_plot(found),
            _gain_plot("bins", "bins", 6, by_bins),
            _gain_plot("ratio", "part of the range that is searched", 7, by_ratio),
        ),
    )


def speeds(*, quick: bool = False) -> Iterator[Ratio]:
    """Encode and decode speeds beside a copy; the adaptive search beside PyTorch's."""
    for name, (encode_target, decode_target) in TARGETS.items():
        is_slow = name.startswith(("adaptive", "kmeans"))
        if quick and encode_target is None:
            continue
        for width in (64,) if quick else (64, 16):
            total_bytes = 1 << 20 if quick else (16 if is_slow else 64) << 20
            loop = ChunkLoop(name, width, total_bytes)
            repeats = 3 if is_slow or quick else 11
            spent = median_seconds([loop.copy, loop.encode, loop.decode], repeats=repeats)
            copy, ours_encode, ours_decode = (loop.rows_ND.nbytes / 1e9 / s for s in spent)
            for what, ours, target in (
                ("encode", ours_encode, encode_target),
                ("decode + scatter", ours_decode, decode_target),
            ):
                yield Ratio(
                    name=f"{name} {what}, {width} floats",
                    ours=ours,
                    peer=copy,
                    against="a memory copy",
                    unit="GB/s",
                    target=target,
                )
    for width in (64,) if quick else (64, 16):
        yield beside_torch(width, quick=quick)


def beside_torch(width: int, *, quick: bool) -> Ratio:
    """adaptive4 whole (search, codes, packing) beside ``torch.choose_qparams_optimized`` alone."""
    codec = parse_codec("adaptive4")
    rows_ND = trained_rows(((1 << 18) if quick else (4 << 20)) // (4 * width), width)
    few_ND = rows_ND[: 20 if quick else 400]
    few = [torch.from_numpy(row) for row in few_ND]

    def search() -> None:
        for row in few:
            torch.choose_qparams_optimized(row, width, codec.bins, codec.ratio, codec.bits)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours, peer = median_seconds([lambda: encode(codec, rows_ND), search], repeats=3)
    finally:
        torch.set_num_threads(threads)
    return Ratio(
        name=f"adaptive4 encode, {width} floats, {codec.bins} bins",
        ours=rows_ND.nbytes / 1e9 / ours,
        peer=few_ND.nbytes / 1e9 / peer,
        against="torch.choose_qparams_optimized",
        unit="GB/s",
        target=20.0,
    )


def mean_l2(codec: Codec, rows_ND: np.ndarray) -> tuple[float, float]:
    """The paper's mean l2 loss of the decoded rows, and the section's size beside fp32's."""
    count, width = rows_ND.shape
    section = encode(codec, rows_ND)
    found_ND = decode(codec.wire(), section, rows=count, width=width).astype(np.float64)
    loss = float(np.sqrt(np.square(found_ND - rows_ND).sum(axis=1)).mean())
    return loss, section.nbytes / rows_ND.nbytes


def losses(*, quick: bool = False) -> list[Loss]:
    """Figure 5: mean l2 loss of every approach at every bit width."""
    samples = sample_rows(256 if quick else 8192, 64)
    found: list[Loss] = []
    for bits in (2, 3, 4, 8):
        for kind in FIGURE_5:
            stem, dash, blocks = kind.partition("-")
            codec = parse_codec(f"{stem}{bits}{dash}{blocks}")
            for label, rows_ND in samples.items():
                loss, size = mean_l2(codec, rows_ND)
                found.append(Loss(label, codec.name, bits, loss, size))
    return found


def search_gains(*, quick: bool = False) -> tuple[list[Gain], list[Gain]]:
    """Figures 6 and 7: the gain over asym by bins (whole range), and by ratio (usual bins)."""
    samples = sample_rows(128 if quick else 4096, 64)
    by_bins: list[Gain] = []
    by_ratio: list[Gain] = []
    for label, rows_ND in samples.items():
        for bits in (2, 3, 4):
            usual = parse_codec(f"adaptive{bits}")
            plain, _ = mean_l2(parse_codec(f"asym{bits}"), rows_ND)

            def gain(bins: int, ratio: float) -> Gain:
                codec = dataclasses.replace(usual, bins=bins, ratio=ratio)  # noqa: B023
                loss, _ = mean_l2(codec, rows_ND)  # noqa: B023
                return Gain(label, bits, bins, ratio, 1 - loss / plain)  # noqa: B023

            by_bins += [gain(bins, 1.0) for bins in BINS]
            by_ratio += [gain(usual.bins, ratio) for ratio in RATIOS]
    return by_bins, by_ratio


def _loss_sheet(found: Sequence[Loss]) -> Sheet:
    kinds = list(dict.fromkeys(loss.rows for loss in found))
    by_codec: dict[str, dict[str, Loss]] = {}
    for loss in found:
        by_codec.setdefault(loss.codec, {})[loss.rows] = loss
    rows = tuple(
        (
            codec,
            f"{by_rows[kinds[0]].size:.3f}",
            *(f"{by_rows[kind].l2:.4g}" for kind in kinds),
        )
        for codec, by_rows in by_codec.items()
    )
    return Sheet("Mean l2 loss (figure 5)", ("codec", "part of fp32's bytes", *kinds), rows)


def _gain_sheet(what: str, gains: Sequence[Gain]) -> Sheet:
    values = sorted({getattr(gain, what) for gain in gains})
    by_line: dict[tuple[str, int], dict[float, float]] = {}
    for gain in gains:
        by_line.setdefault((gain.rows, gain.bits), {})[getattr(gain, what)] = gain.gain
    rows = tuple(
        (kind, str(bits), *(f"{by_value[value]:.1%}" for value in values))
        for (kind, bits), by_value in by_line.items()
    )
    return Sheet(
        f"Less loss than asym, by {what} (figure {6 if what == 'bins' else 7})",
        ("rows", "bits", *(f"{value:g}" for value in values)),
        rows,
    )


def _loss_plot(found: Sequence[Loss]) -> Plot:
    shown = [loss for loss in found if loss.rows == SHOWN_ROWS]
    lines = []
    for kind in FIGURE_5:
        mine = [loss for loss in shown if parse_codec(loss.codec).kind == kind]
        bits = tuple(str(loss.bits) for loss in mine)
        lines.append(Line(kind, bits, tuple(loss.l2 for loss in mine)))
    return Plot(
        name="kernels-loss",
        title="Mean l2 loss by codec and bits (the paper's figure 5)",
        x_label="bits",
        y_label="mean l2 loss",
        lines=tuple(lines),
        is_bars=True,
        has_log_y=True,
    )


def _gain_plot(what: str, x_label: str, figure: int, gains: Sequence[Gain]) -> Plot:
    lines = []
    for bits in sorted({gain.bits for gain in gains}):
        mine = [gain for gain in gains if gain.bits == bits and gain.rows == SHOWN_ROWS]
        x = tuple(float(getattr(gain, what)) for gain in mine)
        lines.append(Line(f"{bits} bits", x, tuple(100 * gain.gain for gain in mine)))
    return Plot(
        name=f"kernels-{what}",
        title=f"What the adaptive search gains over asym (the paper's figure {figure})",
        x_label=x_label,
        y_label="less l2 loss, %",
        lines=tuple(lines),
    )
