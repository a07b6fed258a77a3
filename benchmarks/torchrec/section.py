"""Beside torch.distributed.checkpoint on a TorchRec model that two ranks share.

Five questions: how long does training stand still, when is the checkpoint safe, how many bytes is
it, how long does loading it take, and how long if another number of ranks loads it. Everybody saves
the same model in turns, into folders of one disk. Times are the slowest rank's.

Not here: what ranks do (ranks.py), peers of one process (benchmarks/checkpoint/peers.py).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.peers import Spent
from benchmarks.results import TIMES_LESS, Line, Plot, Ratio, Section, Sheet

DCP, DCP_ASYNC, DCP_CACHED = "DCP save", "DCP async_save", "DCP async_save, cached staging"
FP32, DELTA, DELTA_4 = "holdfast full fp32", "holdfast delta fp32", "holdfast delta, 4 bits"
PHASES = ("stall_s", "encode_s", "store_s", "durable_s")
RANKS = 2
_CHECKOUT = Path(__file__).resolve().parents[2]  # where benchmarks can be imported from
TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: rows of the five tables, and how often."""

    rows: tuple[int, ...]
    rounds: int


FULL = Size(rows=(1_600_000, 1_200_000, 600_000, 600_000, 20_000), rounds=5)
QUICK = Size(rows=(1600, 1200, 600, 600, 20), rounds=1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Medians of one way to save; ``reshard_s``: loaded by one rank, where that was tried."""

    name: str
    spent: Spent
    is_of_its_step: bool
    reshard_s: float | None


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Save and load with two ranks, then load with one."""
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-") as scratch:
        saved = run_ranks("measure", size, Path(scratch), ranks=RANKS)
        loaded = run_ranks("reshard", size, Path(scratch), ranks=1)
    spent = saved["spent"]
    # DCP's three ways write the same bytes, and load them alike.
    alike = [one for name in (DCP, DCP_ASYNC, DCP_CACHED) for one in spent[name]]
    restore_s = statistics.median(one["restore_s"] for one in alike)
    for one in alike:
        one["restore_s"] = restore_s
    found = {
        name: Outcome(
            name,
            _median(many),
            saved["holds_its_step"][name],
            statistics.median(loaded["seconds"][name]) if name in loaded["seconds"] else None,
        )
        for name, many in spent.items()
    }
    return Section(
        name="torchrec",
        title="Beside torch.distributed.checkpoint on a sharded TorchRec model",
        text=(
            f"{saved['bytes'] / 1e9:.2f} GB of rows (64 floats and row-wise Adagrad) on {RANKS} "
            "ranks over gloo: one table divided by rows, one cut by columns, one on each rank, one "
            "on both. Everybody in turns, into folders of one disk; medians of "
            f"{size.rounds} rounds after a first that is not counted; the slowest rank counts. "
            "A delta has 26 % of the rows, which were trained. DCP writes the sharded state dicts "
            "of the model and of its optimizers and loads them in place; with cached staging its "
            "buffers are kept between saves. Before each save as much of the page cache is touched "
            "as a full checkpoint takes, since hosts take back what their guests free. Restores "
            "read from the page cache; that of a delta "
            "reads its base too. One rank loads what two have saved, with the columns cut as "
            "before."
        ),
        ratios=tuple(_ratios(found)),
        sheets=(_sheet(found), _phases_sheet(saved["phases"])),
        plots=(_plot(found),),
        findings=(*_stale(found), *_refusals(loaded["refused"])),
    )


def run_ranks(task: str, size: Size, scratch: Path, *, ranks: int) -> dict[str, Any]:
    """Start the ranks of a task, wait for them, and return what rank 0 found.

    Raises:
        RuntimeError: a rank failed; with what it said.
    """
    answer = scratch / f"{task}.json"
    order = {
        "task": task,
        "ranks": ranks,
        "rows": list(size.rows),
        "rounds": size.rounds,
        "folder": str(scratch),
        "meeting": str(scratch / f"{task}.meeting"),
        "answer": str(answer),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.torchrec.ranks",
             json.dumps({**order, "rank": rank})],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=_CHECKOUT,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(processes):
            _, said = process.communicate(timeout=TIMEOUT_S)
            if process.returncode:
                raise RuntimeError(f"rank {rank} of the task {task!r} failed:\n{said[-4000:]}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def _median(many: list[dict[str, Any]]) -> Spent:
    return Spent(**{
        field.name: statistics.median(one[field.name] for one in many)
        for field in dataclasses.fields(Spent)
    })  # fmt: skip


def _ratios(found: dict[str, Outcome]) -> list[Ratio]:
    rows: list[tuple[str, str, str, str]] = []
    for ours in (FP32, DELTA, DELTA_4):
        rows += [(ours, peer, "stopped_s", "training stopped") for peer in (DCP_ASYNC, DCP_CACHED)]
        rows += [(ours, DCP, "durable_s", "time to durable")]
        rows += [(ours, DCP_CACHED, "durable_s", "time to durable")]
        rows += [(ours, DCP, "bytes", "bytes")]
        rows += [(ours, DCP, "restore_s", "restore")]
        rows += [(ours, DCP, "reshard_s", "restore by one rank")]
    ratios = []
    for ours, peer, field, what in rows:
        is_bytes = field == "bytes"
        mine, other = _number(found[ours], field), _number(found[peer], field)
        ratios.append(
            Ratio(
                name=f"TorchRec, {what}: {ours}",
                ours=mine / 1e6 if is_bytes else mine,
                peer=other / 1e6 if is_bytes else other,
                against=peer,
                unit="MB" if is_bytes else "s",
                # fp32 stores what DCP stores: the same bytes are right, fewer are not expected.
                target=0.99 if is_bytes and ours == FP32 else 1.0,
                sense=TIMES_LESS,
            )
        )
    return ratios


def _number(outcome: Outcome, field: str) -> float:
    value = outcome.reshard_s if field == "reshard_s" else getattr(outcome.spent, field)
    assert value is not None
    return float(value)


def _sheet(found: dict[str, Outcome]) -> Sheet:
    return Sheet(
        "Saving and loading a sharded model",
        ("way", "stopped s", "durable s", "MB", "restore s", "by one rank s", "holds its step"),
        tuple(
            (
                outcome.name,
                f"{outcome.spent.stopped_s:.3f}",
                f"{outcome.spent.durable_s:.2f}",
                f"{outcome.spent.bytes / 1e6:.1f}",
                f"{outcome.spent.restore_s:.2f}",
                "–" if outcome.reshard_s is None else f"{outcome.reshard_s:.2f}",
                "yes" if outcome.is_of_its_step else "**no**",
            )
            for outcome in found.values()
        ),
        note="Holds its step: rows restored are those of the moment of the call although training "
        "changed them as soon as the call returned. What DCP's three ways write is loaded alike: "
        "the median of all their restores is shown.",
    )


def _phases_sheet(phases: dict[str, list[dict[str, float]]]) -> Sheet:
    return Sheet(
        "Where our time goes",
        ("way", "copied s", "checksums and codes s", "written and synced s", "durable s"),
        tuple(
            (name, *(f"{statistics.median(one[phase] for one in many):.3f}" for phase in PHASES))
            for name, many in phases.items()
        ),
        note="Of the slowest rank, each phase by itself; encoding overlaps with writing. DCP save "
        "writes tables as they are, while training stands still. What is copied first, so that "
        "training goes on, is read once more for checksums (DCP has none), and counts only when "
        "rank 0 has every rank's part and has committed them by files of their own, dense state "
        "and catalog: so a full checkpoint is durable later than DCP's where the disk is fast. A "
        "delta reads its base when it is restored.",
    )


def _stale(found: dict[str, Outcome]) -> list[str]:
    return [
        f"{outcome.name}: the checkpoint does not hold the values of its step."
        for outcome in found.values()
        if not outcome.is_of_its_step
    ]


def _refusals(refused: dict[str, str | None]) -> list[str]:
    found = []
    for name, said in refused.items():
        outcome = "is loaded" if said is None else f"is refused (`{said}`)"
        found.append(
            f"{name}: with the columns cut otherwise (one part instead of two, so that row-wise "
            f"Adagrad has one number a row instead of two) the checkpoint {outcome}."
        )
    return found


def _plot(found: dict[str, Outcome]) -> Plot:
    names = tuple(found)
    spent = [outcome.spent for outcome in found.values()]
    return Plot(
        name="torchrec-seconds",
        title="One checkpoint of the same sharded model",
        x_label="",
        y_label="seconds",
        lines=(
            Line("training stopped", names, tuple(one.stopped_s for one in spent)),
            Line("durable", names, tuple(one.durable_s or 0.0 for one in spent)),
            Line("restore", names, tuple(one.restore_s for one in spent)),
        ),
        is_bars=True,
    )
