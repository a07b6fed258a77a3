"""How many bytes checkpoints take: written per interval, and kept, beside full fp32 checkpoints.

One training run of twelve intervals, watched by several checkpointers at once, one for each
setting; so every setting stores exactly the same rows. Bytes are counted in the store, catalogs
included; nothing here depends on time. Shows figures 8, 9 and 11 of Check-N-Run.

Not here: how long saving takes (overhead.py, peers.py), what bits cost in accuracy (accuracy.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import TIMES_LESS, Line, Plot, Ratio, Section, Sheet
from benchmarks.workload import Workload, make_workload, share, touched_ids
from holdfast.checkpoint.checkpointer import Checkpointer
from holdfast.checkpoint.format.catalog import SegmentEntry
from holdfast.checkpoint.format.codec import Codec
from holdfast.checkpoint.format.segment import header_bytes, parse_header
from holdfast.checkpoint.store import catalogs
from holdfast.checkpoint.strategy import Strategy
from holdfast.storage import Storage, open_storage

RESTORES = (1, 3, 20, 21)
# Check-N-Run section 6.3: reduction of average bandwidth and of maximum capacity
PAPER = {1: (17.0, 8.0), 21: (6.0, 2.5)}
POLICIES = ("one-shot", "intermittent", "consecutive", "full")
POLICY_RESTORES = 20
STAGING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    model_bytes: int
    intervals: int


FULL = Size(model_bytes=1 << 30, intervals=12)
QUICK = Size(model_bytes=1 << 20, intervals=3)


@dataclass(slots=True)
class Tally:
    """What one checkpointer wrote and kept, checkpoint by checkpoint."""

    kinds: list[str] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    @property
    def average(self) -> float:
        """Bytes written per checkpoint."""
        return sum(self.written) / len(self.written)

    @property
    def capacity(self) -> int:
        """The most bytes the store held after a commit."""
        return max(self.kept)


@dataclass(frozen=True, slots=True)
class RowCost:
    """Bytes a stored row spends, averaged over the segments of one checkpoint."""

    codec: str
    ids: float
    parameters: float
    codes: float
    framing: float


@dataclass(frozen=True, slots=True)
class Found:
    """The tallies of one optimizer's run."""

    tallies: Mapping[str, Tally]
    costs: tuple[tuple[str, RowCost, RowCost], ...]
    full_bytes: int
    row_bytes: int
    shares: tuple[float, ...]


def measure(*, quick: bool, folder: Path = Path()) -> Section:
    """Twelve intervals with SGD and with Adagrad."""
    size = QUICK if quick else FULL
    sgd = watch(size, has_row_state=False)
    adagrad = watch(size, has_row_state=True)
    runs = (("SGD", sgd), ("Adagrad", adagrad))
    model_gb = sgd.row_bytes / 1e9
    return Section(
        name="reduction",
        title="How much less is written and kept",
        text=(
            f"{size.intervals} checkpoints of a model of {model_gb:.2f} GB (26 tables, rows of 64 "
            "floats; with Adagrad half of it is row state), the last only is kept. An interval "
            f"touches {sgd.shares[0]:.0%} of the rows. The peer is a full fp32 checkpoint of all "
            "rows and row state every interval. Bits follow from the expected restores (1: 2 bits, "
            "3: 3, 20: 4, more: 8). The paper's targets are for its own models, whose row state is "
            "small; SGD is the nearer case. Adagrad doubles the fp32 row, and its state keeps more "
            "bits than 2-bit weights do, so its reduction differs. Every checkpoint also carries "
            f"the networks in fp32, {(sgd.full_bytes - sgd.row_bytes) / 1e6:.1f} MB that no codec "
            "shrinks; base and delta each have their own."
        ),
        ratios=tuple(ratio for name, run in runs for ratio in _ratios(name, run)),
        sheets=tuple(_sheets(runs)),
        plots=tuple(plot for name, run in runs[:1] for plot in _plots(name, run)),
    )


def watch(size: Size, *, has_row_state: bool) -> Found:
    """Train through the intervals with a checkpointer for every setting attached at once."""
    work = make_workload(size.model_bytes, has_row_state=has_row_state)
    intervals = touched_ids([table.rows for table in work.tables], intervals=size.intervals)
    full_bytes = _full_bytes(work)
    settings: dict[str, dict[str, Any]] = {
        f"{restores} restores": {"expected_restores": restores} for restores in RESTORES
    }
    for policy in POLICIES:
        strategy = Strategy(policy, base=policy, codec=None)
        settings[policy] = {"strategy": strategy, "expected_restores": POLICY_RESTORES}
    # The same settings by two names: measured once.
    del settings["intermittent"]
    tallies = {name: Tally() for name in settings}
    with contextlib.ExitStack() as stack:
        watched = []
        for name, given in settings.items():
            storage = stack.enter_context(_memory(name.replace(" ", "-")))
            ck = Checkpointer(
                storage, model=work.model, optimizer=work.optimizer, keep=1,
                staging_bytes_max=STAGING_BYTES, **given,
            )  # fmt: skip
            watched.append((tallies[name], storage, stack.enter_context(ck)))
        for index, ids in enumerate(intervals):
            work.train(ids, seed=index)
            for tally, storage, ck in watched:
                _save(tally, storage, ck)
        costs = tuple(
            (name, *_row_costs(storage))
            for name, (_, storage, _) in zip(settings, watched, strict=True)
            if name.endswith("restores")
        )
    tallies["intermittent"] = tallies[f"{POLICY_RESTORES} restores"]
    shares = tuple(share(ids, work.rows) for ids in intervals)
    return Found(tallies, costs, full_bytes, work.row_bytes, shares)


@contextlib.contextmanager
def _memory(name: str) -> Iterator[Storage]:
    """A store in memory that is gone afterwards: bytes are counted here, not disks timed."""
    storage = open_storage(f"memory://holdfast-bench/{name}")
    _clear(storage)
    try:
        yield storage
    finally:
        _clear(storage)


def _clear(storage: Storage) -> None:
    for name in _sizes(storage):
        storage.delete(name)


def _sizes(storage: Storage) -> dict[str, int]:
    return {item.name: item.bytes for item in storage.list("")}


def _full_bytes(work: Workload) -> int:
    """The bytes of a full fp32 checkpoint; every one has as many, so one is enough."""
    with (
        _memory("fp32") as storage,
        Checkpointer(
            storage, model=work.model, optimizer=work.optimizer, strategy="full",
            staging_bytes_max=STAGING_BYTES,
        ) as ck,
    ):  # fmt: skip
        ck.step()
        ck.save().result()
        return sum(_sizes(storage).values())


def _save(tally: Tally, storage: Storage, ck: Checkpointer) -> None:
    before = _sizes(storage)
    ck.step()
    stats = ck.save().result()
    after = _sizes(storage)
    tally.kinds.append(stats.kind)
    tally.written.append(sum(size for name, size in after.items() if name not in before))
    tally.kept.append(sum(after.values()))


def _row_costs(storage: Storage) -> tuple[RowCost, RowCost]:
    """What a row costs in the base and in the last delta of a store."""
    catalog = catalogs.load_last(storage)
    assert catalog is not None and catalog.last is not None
    segments = catalog.alive(catalog.last.step)
    oldest = min(segment.born for segment in segments)
    newest = max(segment.born for segment in segments)
    return (
        _row_cost(storage, [s for s in segments if s.born == oldest]),
        _row_cost(storage, [s for s in segments if s.born == newest]),
    )


def _row_cost(storage: Storage, segments: list[SegmentEntry]) -> RowCost:
    rows = ids = parameters = codes = total = 0
    names: list[str] = []
    for segment in segments:
        extent = segment.extent
        head = storage.get(
            extent.object, offset=extent.offset, length=min(extent.bytes, header_bytes(255))
        )
        header = parse_header(memoryview(head), total_bytes=extent.bytes, where=extent.describe())
        rows += header.rows
        ids += header.ids.bytes
        total += extent.bytes
        names = [Codec.from_wire(column.wire).name for column in header.columns]
        for column in header.columns:
            own = parameter_bytes(Codec.from_wire(column.wire)) * header.rows
            parameters += own
            codes += column.bytes - own
    framing = total - ids - parameters - codes
    return RowCost(" + ".join(names), ids / rows, parameters / rows, codes / rows, framing / rows)


def parameter_bytes(codec: Codec) -> int:
    """Bytes of a row's own parameters: scale and offset, or lowest and highest exponent.

    >>> parameter_bytes(Codec("adaptive", 4)), parameter_bytes(Codec("fp16", 16))
    (4, 0)
    """
    return {"asym": 4, "adaptive": 4, "log": 4, "sym": 2}.get(codec.kind, 0)


def _ratios(name: str, run: Found) -> Iterator[Ratio]:
    for restores in RESTORES:
        tally = run.tallies[f"{restores} restores"]
        targets = PAPER.get(restores, (None, None))
        shown = f"up to {restores}" if restores <= POLICY_RESTORES else f"over {restores - 1}"
        values = ((tally.average, "written on average"), (float(tally.capacity), "kept at most"))
        for (ours, what), target in zip(values, targets, strict=True):
            yield Ratio(
                name=f"{what}, {shown} restores, {name}",
                ours=ours / 1e6,
                peer=run.full_bytes / 1e6,
                against="full fp32 checkpoints",
                unit="MB",
                target=target,
                sense=TIMES_LESS,
            )


def _sheets(runs: tuple[tuple[str, Found], ...]) -> Iterator[Sheet]:
    policies = []
    for name, run in runs:
        for policy in POLICIES:
            tally = run.tallies[policy]
            bases = tally.kinds.count("base")
            average, capacity = tally.average, tally.capacity
            policies.append((
                name, policy, str(bases), f"{average / 1e6:.1f}", f"{capacity / 1e6:.1f}",
                f"{run.full_bytes / average:.1f}×", f"{run.full_bytes / capacity:.1f}×",
            ))  # fmt: skip
    yield Sheet(
        "When to take a base: the policies at 4 bits",
        ("optimizer", "policy", "bases", "MB written", "MB kept", "less written", "less kept"),
        tuple(policies),
    )
    costs = []
    for name, run in runs:
        for setting, *both in run.costs:
            for kind, cost in zip(("base", "delta"), both, strict=True):
                parts = (cost.ids, cost.parameters, cost.codes, cost.framing)
                shown = (f"{part:.2f}" for part in (*parts, sum(parts)))
                costs.append((name, setting, kind, cost.codec, *shown))
    yield Sheet(
        "Where a row's bytes go",
        ("optimizer", "setting", "in a", "codecs", "ids", "scales", "codes", "framing", "all"),
        tuple(costs),
        note="Bytes per row; fp32 takes 256 with SGD and 512 with Adagrad. Where the last "
        "checkpoint is a base, both lines are of it.",
    )


def _plots(name: str, run: Found) -> Iterator[Plot]:
    count = len(run.tallies["full"].written)
    intervals = tuple(range(1, count + 1))
    # As in the paper: against the size of a base with the same codec, so that bits cancel out.
    unit = run.tallies["full"].written[0]
    for figure, title, pick in (
        (8, "Written per checkpoint", "written"),
        (9, "Kept after each checkpoint", "kept"),
    ):
        lines = tuple(
            Line(policy, intervals, tuple(b / unit for b in getattr(run.tallies[policy], pick)))
            for policy in POLICIES
        )
        yield Plot(
            name=f"reduction-{pick}",
            title=f"{title} ({name}, 4 bits; the paper's figure {figure})",
            x_label="checkpoint",
            y_label="part of a base",
            lines=lines,
        )
