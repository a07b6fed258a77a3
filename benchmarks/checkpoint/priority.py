"""Choosing the r·N rows to save first: SSU, MFU and SCAR beside a full sort (CPR, table 1).

A table of 50 million rows; lookups are skewed as training's are. What each way keeps in memory,
what a lookup costs, and how long the choice takes that a checkpoint waits for.

Not here: what the choice is worth in accuracy (research/emulation.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.results import AT_LEAST, AT_MOST, Ratio, Section, Sheet
from benchmarks.timing import median_seconds, seconds_of
from holdfast.kernels.rows import bitmap, priority

R = 0.125
WIDTH = 16
REPEATS = 3
_MEMORY = {"ssu": 0.0078, "mfu": 0.0625}  # of the table, table 1 of the paper


@dataclass(frozen=True, slots=True)
class Size:
    """Rows of the table, and lookups before a choice."""

    rows: int
    lookups: int


FULL = Size(50_000_000, 100_000_000)
QUICK = Size(20_000, 40_000)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to choose: bytes it keeps, seconds a lookup and a choice take."""

    name: str
    bytes: int
    lookup_s: float
    choice_s: float


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Count and choose."""
    size = QUICK if quick else FULL
    ways = {way.name: way for way in compare(size)}
    table_bytes = 4 * WIDTH * size.rows
    sort = ways["full sort"]
    ratios = [
        Ratio(
            name=f"memory of {name}",
            ours=ways[name].bytes / 1e6,
            peer=table_bytes / 1e6,
            against=f"the table, {4 * WIDTH} bytes a row",
            unit="MB",
            target=share,
            sense=AT_MOST,
        )
        for name, share in _MEMORY.items()
    ]
    ratios += [
        Ratio(
            name=f"choosing by {name}",
            ours=size.rows / ways[name].choice_s / 1e6,
            peer=size.rows / peer.choice_s / 1e6,
            against=against,
            unit="million rows/s",
            target=None if name == "scar" else 1.0,
            sense=AT_LEAST,
        )
        for name, peer, against in (
            ("ssu", ways["scar"], "scar"),
            ("mfu", ways["scar"], "scar"),
            ("ssu", sort, "sorting the counters"),
            ("mfu", sort, "sorting the counters"),
            ("scar", sort, "sorting the counters"),
        )
    ]
    return Section(
        name="priority",
        title="Choosing the hot rows",
        text=(
            f"A table of {size.rows:,} rows of {4 * WIDTH} bytes, {size.lookups:,} skewed lookups, "
            f"then the {R:g} · N rows to save: SSU lists what it has sampled (period 2), MFU takes "
            "the largest counters, SCAR measures every row's change since its save and takes the "
            "largest. The sort is NumPy's, of the counters. One thread; medians, in turns."
        ),
        ratios=tuple(ratios),
        sheets=(_sheet(ways, table_bytes),),
    )


def compare(size: Size) -> list[Way]:
    """Every way on the same lookups."""
    rng = np.random.default_rng(1)
    rows, k = size.rows, int(R * size.rows)
    counters_N = np.zeros(rows, np.uint32)
    words_W, state_S = bitmap.new(rows), priority.new_state(1)
    first_K = np.zeros(1, np.int64)  # compiles
    priority.count(counters_N, first_K)
    priority.sample(words_W, state_S, first_K, rows, k, 2)
    spent = {"mfu": 0.0, "ssu": 0.0}
    for start in range(0, size.lookups, 1 << 20):
        count = min(1 << 20, size.lookups - start)
        ids_K = (rng.random(count) ** 4 * rows).astype(np.int64)
        ids_K = ids_K * 7919 % rows  # hot rows lie anywhere
        spent["mfu"] += seconds_of(functools.partial(priority.count, counters_N, ids_K))
        sample = functools.partial(priority.sample, words_W, state_S, ids_K, rows, k, 2)
        spent["ssu"] += seconds_of(sample)
    saved_ND = np.zeros((rows, WIDTH), np.float32)
    now_ND = np.zeros((rows, WIDTH), np.float32)
    now_ND += counters_N[:, None]
    changes_N = np.empty(rows, np.float32)

    def scar() -> None:
        priority.changes(now_ND, saved_ND, changes_N)
        priority.top_set(changes_N, k)

    choices = median_seconds(
        [
            lambda: priority.listed(words_W, rows),
            lambda: priority.top(counters_N, k),
            scar,
            lambda: np.argsort(counters_N)[-k:],
        ],
        repeats=REPEATS,
    )
    return [
        Way("ssu", priority.ssu_bytes(rows), spent["ssu"] / size.lookups, choices[0]),
        Way("mfu", priority.mfu_bytes(rows), spent["mfu"] / size.lookups, choices[1]),
        Way("scar", priority.scar_bytes(rows, 4 * WIDTH), 0.0, choices[2]),
        Way("full sort", priority.mfu_bytes(rows), spent["mfu"] / size.lookups, choices[3]),
    ]


def _sheet(ways: dict[str, Way], table_bytes: int) -> Sheet:
    return Sheet(
        "What each way keeps and takes (table 1)",
        ("by", "memory MB", "of the table", "ns a lookup", "ms a choice"),
        tuple(
            (
                way.name,
                f"{way.bytes / 1e6:,.1f}",
                f"{way.bytes / table_bytes:.2%}",
                f"{1e9 * way.lookup_s:.1f}",
                f"{1e3 * way.choice_s:.1f}",
            )
            for way in ways.values()
        ),
    )
