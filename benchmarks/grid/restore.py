"""Restore every checkpoint of several stores, in turns; and the same bytes, bare.

Everything is read from the page cache, for everybody: before a step is restored, untimed reads
fetch what it will read. Rows go straight into tables that exist.

The bare peer of a restore makes the same requests to the same files, with as many threads, and
copies as many rows to the same places, a rollup before what lies above it. It knows the ids and the
places of rows beforehand, opens every file once, and checks, masks and decodes nothing.

Not here: how the stores came to be (train.py), what is compared (every_step.py).

# N rows of a segment, M rows of a table, B bytes of a row
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.grid.train import turn
from benchmarks.timing import seconds_of
from holdfast.checkpoint.format.catalog import SegmentEntry
from holdfast.checkpoint.format.checksum import checksum_all
from holdfast.checkpoint.restoring import fetch, restore
from holdfast.checkpoint.run import Run
from holdfast.kernels.codecs import floats

Targets = Mapping[str, Sequence[np.ndarray]]
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Restored:
    """One restore: seconds, bytes and rows; ``changed`` is all but reading the base, and
    ``rollup`` that part of it which is the rollup's."""

    step: int
    whole_s: float
    base_s: float
    bytes: int
    changed_bytes: int
    changed_rows: int
    rollup_rows: int
    masked_rows: int
    segments: int
    objects: int

    @property
    def grid_rows(self) -> int:
        """Rows that were read above base and rollup."""
        return self.changed_rows - self.rollup_rows

    @property
    def changed_s(self) -> float:
        """Seconds for what changed since the base: planning and checking files count here."""
        return self.whole_s - self.base_s


class Reader:
    """Restores steps of one store into the same tables again and again."""

    def __init__(self, run: Run, targets: Targets) -> None:
        self.run = run
        self._targets = targets
        self._warm_base: int | None = None
        self._block = memoryview(bytearray(_BLOCK_BYTES))

    def layers(self, step: int) -> tuple[list[SegmentEntry], ...]:
        """The segments that a restore reads: of the base, of the rollup, and above them."""
        catalog = self.run.catalog
        entry = catalog.checkpoint(step)
        base, rollup = entry.base, catalog.rollup_of(entry)
        alive = catalog.alive(step)
        return (
            [s for s in alive if s.born <= base],
            [s for s in alive if base < s.born <= rollup],
            [s for s in alive if s.born > rollup],
        )

    def warm(self, step: int) -> None:
        """Fetch into the page cache what a restore of this step will read."""
        entry = self.run.catalog.checkpoint(step)
        segments = self.run.catalog.alive(step)
        if entry.base == self._warm_base:
            segments = [s for s in segments if s.born > entry.base]
        self._warm_base = entry.base
        for name in {s.extent.object for s in segments}:
            self._read_through(name)
        grid = self.run.catalog.grid_of(entry)
        if grid is not None and grid.deletion_vectors is not None:
            self._read_through(grid.deletion_vectors.object)

    def _read_through(self, name: str) -> None:
        with (Path(self.run.url) / name).open("rb", buffering=0) as file:
            while file.readinto(self._block):
                pass

    def restore(self, step: int) -> Restored:
        """Restore one step, timed."""
        run = self.run
        found: list[restore.RestoreStats] = []
        seconds = seconds_of(
            lambda: found.append(
                restore.restore_rows(run.storage, run.catalog, step, self._targets)
            )
        )
        stats = found[0]
        _, rollup, above = self.layers(step)
        changed = [*rollup, *above]
        return Restored(
            step=step,
            whole_s=seconds,
            base_s=stats.base_s,
            bytes=stats.bytes,
            changed_bytes=stats.delta_bytes,
            changed_rows=sum(s.rows for s in changed),
            rollup_rows=sum(s.rows for s in rollup),
            masked_rows=stats.masked_rows,
            segments=len(changed),
            objects=len({s.extent.object for s in changed}),
        )


def restore_all(
    runs: Mapping[str, Run],
    targets: Targets,
    steps: Sequence[int],
    *,
    checksums: Mapping[int, int],
    after: Callable[[int], None] = lambda step: None,
) -> dict[str, list[Restored]]:
    """Restore every step from every store, in turns; ``after`` is called behind each step.

    At the steps with a checksum every store must give back the very values that were trained.
    """
    readers = {name: Reader(run, targets) for name, run in runs.items()}
    found: dict[str, list[Restored]] = {name: [] for name in runs}
    for reader in readers.values():  # compiles, starts threads, fetches the tables' memory
        reader.warm(steps[0])
        reader.restore(steps[0])
    for index, step in enumerate(steps):
        for name in turn(list(runs), index):
            readers[name].warm(step)
            found[name].append(readers[name].restore(step))
            if step in checksums:
                values = checksum_all([c for columns in targets.values() for c in columns])
                assert values == checksums[step], f"{name} gives other values at step {step}"
        after(step)
    return found


@dataclass(frozen=True, slots=True)
class _Copy:
    """Rows of one segment: where they lie in a request's bytes, and where they go."""

    start: int
    rows_N: np.ndarray | slice
    rows: int
    table: np.ndarray


@dataclass(frozen=True, slots=True)
class _Request:
    """One read of one file, and the copies of what it brought."""

    object: str
    offset: int
    bytes: int
    copies: tuple[_Copy, ...]


class Bare:
    """The requests and copies of one restore and nothing else."""

    def __init__(
        self, run: Run, targets: Targets, step: int, segments: Sequence[SegmentEntry]
    ) -> None:
        entry = run.catalog.checkpoint(step)
        schemas = {schema.name: schema for schema in run.catalog.schema_of(entry)}
        tables = {name: columns[0].view(np.uint8) for name, columns in targets.items()}
        reader = fetch.SegmentReader(run.storage)
        self._root = Path(run.url)
        self._local = threading.local()
        self._requests: list[_Request] = []
        for group in itertools.chain.from_iterable(fetch.groups(segments)):
            start = group[0].extent.offset
            copies = []
            for one in group:
                segment = reader.read(one, schemas[one.table])
                at = one.extent.offset - start + segment.header.columns[0].offset
                is_contiguous = one.rows == one.last - one.first + 1
                ids = slice(one.first, one.last + 1) if is_contiguous else segment.ids()
                copies.append(_Copy(at, ids, one.rows, tables[one.table]))
            end = group[-1].extent.offset + group[-1].extent.bytes
            request = _Request(group[0].extent.object, start, end - start, tuple(copies))
            self._requests.append(request)

    @property
    def bytes(self) -> int:
        """What is read."""
        return sum(request.bytes for request in self._requests)

    def run(self, pool: ThreadPoolExecutor) -> None:
        """Read and copy once."""
        with contextlib.ExitStack() as stack:
            handles = {}
            for name in {request.object for request in self._requests}:
                handles[name] = os.open(self._root / name, os.O_RDONLY)
                stack.callback(os.close, handles[name])
            for task in [
                pool.submit(self._serve, request, handles[request.object])
                for request in self._requests
            ]:
                task.result()

    def _serve(self, request: _Request, handle: int) -> None:
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.nbytes < request.bytes:
            buffer = self._local.buffer = np.empty(request.bytes, np.uint8)
        view: memoryview = buffer[: request.bytes].data
        if os.preadv(handle, [view], request.offset) != request.bytes:
            raise OSError(f"{request.object} is too short")
        for copy in request.copies:
            size = copy.rows * copy.table.shape[1]
            rows_NB = buffer[copy.start : copy.start + size].reshape(copy.rows, -1)
            if isinstance(copy.rows_N, slice):
                copy.table[copy.rows_N] = rows_NB
            else:
                floats.scatter_bytes(rows_NB, copy.table, copy.rows_N)


@dataclass(frozen=True, slots=True)
class BareCost:
    """Seconds of a restore and of its bare peer, for all of it and for what changed."""

    step: int
    whole_s: float
    bare_whole_s: float
    changed_s: float
    bare_changed_s: float
    bytes: int
    changed_bytes: int


def compare_bare(run: Run, targets: Targets, step: int, *, repeats: int = 3) -> BareCost:
    """Restore a step and do the same bare, in turns; medians."""
    reader = Reader(run, targets)
    bares = [Bare(run, targets, step, layer) for layer in reader.layers(step)]
    ours: list[Restored] = []
    bare: list[tuple[float, float]] = []
    with ThreadPoolExecutor(restore.default_threads()) as pool:
        for _ in range(repeats + 1):
            ours.append(reader.restore(step))
            base_s, *changed_s = [seconds_of(lambda b=one: b.run(pool)) for one in bares]  # type: ignore[misc]
            bare.append((base_s, sum(changed_s)))
    return BareCost(
        step=step,
        whole_s=statistics.median(one.whole_s for one in ours[1:]),
        bare_whole_s=statistics.median(sum(pair) for pair in bare[1:]),
        changed_s=statistics.median(one.changed_s for one in ours[1:]),
        bare_changed_s=statistics.median(pair[1] for pair in bare[1:]),
        bytes=sum(one.bytes for one in bares),
        changed_bytes=sum(one.bytes for one in bares[1:]),
    )
