"""Codec speed beside its yardsticks, and what each codec loses: the paper's figures 5, 6 and 7.

Speeds are ratios of things measured in turns in one run on one thread: the machine may be slow or
busy, the ratio stays. Bytes are those of the float32 rows. Run as ``python bench/kernels.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from holdfast.checkpoint.codec import Codec, decode, decode_into, encode, parse_codec

SEED = 20240610
CHUNK_BYTES = 8 << 20
FIGURE_5 = ("sym", "asym", "kmeans-block", "kmeans-cluster", "kmeans", "adaptive")
BINS = (5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60)
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A speed of ours, that of a peer in the same run, and the ratio we want at least."""

    name: str
    ours_gb_s: float
    peer: str
    peer_gb_s: float
    target: float | None

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer."""
        return self.ours_gb_s / self.peer_gb_s


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


def median_seconds(jobs: Sequence[Callable[[], object]], *, repeats: int) -> list[float]:
    """The median time of each job, run in turns so that all meet the same machine."""
    for job in jobs:
        job()
    seconds: list[list[float]] = [[] for _ in jobs]
    for _ in range(repeats):
        for job, spent in zip(jobs, seconds, strict=True):
            start = time.perf_counter()
            job()
            spent.append(time.perf_counter() - start)
    return [statistics.median(spent) for spent in seconds]


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
        step = CHUNK_BYTES // (4 * width)
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


def measure(*, quick: bool = False) -> list[Ratio]:
    """Encode and decode speeds beside a copy; the adaptive search beside PyTorch's."""
    found: list[Ratio] = []
    for name, (encode_target, decode_target) in TARGETS.items():
        is_slow = name.startswith(("adaptive", "kmeans"))
        if quick and encode_target is None:
            continue
        for width in (64, 16):
            loop = ChunkLoop(name, width, (16 if is_slow or quick else 64) << 20)
            repeats = 3 if is_slow else 5 if quick else 11
            spent = median_seconds([loop.copy, loop.encode, loop.decode], repeats=repeats)
            copy, ours_encode, ours_decode = (loop.rows_ND.nbytes / 1e9 / s for s in spent)
            label = f"{name} {{}} D={width}"
            found.append(Ratio(label.format("encode"), ours_encode, "copy", copy, encode_target))
            found.append(
                Ratio(label.format("decode+scatter"), ours_decode, "copy", copy, decode_target)
            )
    return found + [beside_torch(width, quick=quick) for width in (64, 16)]


def beside_torch(width: int, *, quick: bool) -> Ratio:
    """adaptive4 whole (search, codes, packing) beside ``torch.choose_qparams_optimized`` alone."""
    codec = parse_codec("adaptive4")
    rows_ND = trained_rows((4 << 20) // (4 * width), width)
    few_ND = rows_ND[: 100 if quick else 400]
    few = [torch.from_numpy(row) for row in few_ND]

    def search() -> None:
        for row in few:
            torch.choose_qparams_optimized(row, width, codec.bins, codec.ratio, codec.bits)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ours, peer = median_seconds([lambda: encode(codec, rows_ND), search], repeats=3)
    torch.set_num_threads(threads)
    return Ratio(
        f"adaptive4 encode D={width}",
        rows_ND.nbytes / 1e9 / ours,
        "torch.choose_qparams_optimized",
        few_ND.nbytes / 1e9 / peer,
        20.0,
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
    samples = sample_rows(1024 if quick else 8192, 64)
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
    samples = sample_rows(512 if quick else 4096, 64)
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


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer codecs, rows and repetitions")
    quick = parser.parse_args().quick
    console = Console()
    speeds = Table("what", "GB/s", "beside", "its GB/s", "ratio", "target", title="speed")
    for r in measure(quick=quick):
        target = "" if r.target is None else f"{r.target:g}"
        ours, peer, ratio = f"{r.ours_gb_s:.3g}", f"{r.peer_gb_s:.3g}", f"{r.ratio:.3g}"
        speeds.add_row(r.name, ours, r.peer, peer, ratio, target)
    console.print(speeds)
    lost = Table("rows", "codec", "mean l2", "size of fp32", title="loss (figure 5)")
    for loss in losses(quick=quick):
        lost.add_row(loss.rows, loss.codec, f"{loss.l2:.4g}", f"{loss.size:.3f}")
    console.print(lost)
    for title, gains in zip(("bins", "ratio"), search_gains(quick=quick), strict=True):
        table = Table("rows", "bits", "bins", "ratio", "less loss", title=f"search by {title}")
        for gain in gains:
            table.add_row(
                gain.rows, str(gain.bits), str(gain.bins), f"{gain.ratio:g}", f"{gain.gain:.2%}"
            )
        console.print(table)


if __name__ == "__main__":
    main()
