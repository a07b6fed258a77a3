"""The snapshot: the only stall. Copies the selected rows and the dense state at one step.

    selections -> staged parts (buffers of the staging pool) -> a queue the writer empties

Of tables and networks on a GPU the snapshot makes a copy there, and returns. A thread brings that
copy to the host while training goes on; whoever asks for a part waits for it. The copies take as
much memory of the device as is selected, and at most half of what is free there. Where that is too
little for the selection the snapshot goes part by part, and training waits until parts have left.

Invariants:
- When ``take_dense`` and ``take_rows`` return, nothing that will be stored shares memory with the
  model.
- Parts enter the queue in the order of tables and rows, tables in host memory first, so equal
  snapshots give equal objects.

Not here: which rows (checkpoint/selecting/selection.py), what happens to the parts
(checkpoint/store/writer.py).

# N rows, D floats of one column
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from holdfast.checkpoint.format import tree
from holdfast.checkpoint.saving.device_staging import DeviceRoom, DeviceStaging
from holdfast.checkpoint.saving.staging import BUFFER_BYTES, Buffer, StagingPool
from holdfast.checkpoint.saving.workbench import Workbench
from holdfast.checkpoint.selecting.selection import RowPart, Selection
from holdfast.loading.generators import rng_state
from holdfast.model import devices
from holdfast.model.dtypes import array_dtype
from holdfast.model.model_state import ModelState
from holdfast.model.schema import DTYPE_BYTES, TableSchema
from holdfast.model.shard import Shard
from holdfast.model.tables import Table
from holdfast.model.tensors import as_tensor


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Copied rows of one table, every column, in a staging buffer."""

    schema: TableSchema
    shard: Shard
    part: RowPart
    columns: tuple[np.ndarray, ...]
    buffer: Buffer

    def ids(self) -> np.ndarray:
        """The global ids of its rows, ascending."""
        return self.shard.global_ids(self.part.ids())


@dataclass(frozen=True, slots=True)
class DenseState:
    """Copied dense state: a structure and tensors of its own (see checkpoint/format/tree.py)."""

    structure: Any
    copied: dict[str, torch.Tensor]
    arriving: tuple[Future[dict[str, torch.Tensor]], ...] = ()
    """Copies of what is on a device."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, in host memory; waits for those that are still to arrive."""
        found = dict(self.copied)
        for arriving in self.arriving:
            found |= arriving.result()
        return found

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


_T = TypeVar("_T")

_NUMPY_KNOWS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)

PartQueue = queue.SimpleQueue[Future[StagedPart] | None]
"""Parts that are being copied. One that fails has given its buffer back."""


def take_dense(
    state: ModelState,
    extras: Mapping[str, Any],
    *,
    bench: Workbench,
    pls: Mapping[str, Any] | None = None,
    is_follower: bool = False,
) -> DenseState:
    """Begin a snapshot: copy everything that is not a row, which is dense state, RNG state, reader
    and other extras, and what is known of lost samples. A follower leaves out what is the same on
    every rank."""
    bench.measure()
    collected = {
        **({} if pls is None else {"pls": dict(pls)}),
        **({} if is_follower else state.dense()),
        **state.tables_dense(),
        "rng": rng_state(),
        "extras": {name: item.state_dict() for name, item in extras.items()},
    }
    structure, tensors = tree.flatten(collected)
    here = {name: tensor for name, tensor in tensors.items() if devices.is_on_host(tensor)}
    away = {name: tensor for name, tensor in tensors.items() if name not in here}
    copied = {name: _own(tensor) for name, tensor in here.items()}
    arriving = [_take_together(batch, bench) for batch in _batches(away)]
    return DenseState(structure, copied, tuple(arriving))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    # A plain memory copy: torch's own would wake its thread pool for each of these small tensors.
    if tensor.dtype in _NUMPY_KNOWS:
        return torch.from_numpy(tensor.numpy().copy())
    return tensor.clone()


def _batches(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors of one type and device together, up to a buffer's size, so that a network of many
    small ones is copied by few operations."""
    groups: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind = (tensor.device, tensor.dtype)
        group = groups.setdefault(kind, {})
        if group and sum(held.nbytes for held in group.values()) + tensor.nbytes > BUFFER_BYTES:
            yield groups.pop(kind)
            group = groups.setdefault(kind, {})
        group[name] = tensor
    yield from groups.values()


def _take_together(
    tensors: Mapping[str, torch.Tensor], bench: Workbench
) -> Future[dict[str, torch.Tensor]]:
    """Copy tensors of one type and device there; a thread brings the copy to the host."""
    values = list(tensors.values())
    device = devices.device_of(values[0])
    assert device is not None
    size = sum(tensor.nbytes for tensor in values)
    copy = DeviceStaging(bench.room(device), size, lambda: [devices.join(values)])
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return _fetch(bench, copy, lambda: _bring_together(copy, shapes))


def _bring_together(copy: DeviceStaging, shapes: Mapping[str, torch.Size]) -> dict[str, Any]:
    flat = copy.bring_one()
    parts = torch.split(flat, [shape.numel() for shape in shapes.values()])
    return {
        name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def _fetch(bench: Workbench, copy: DeviceStaging, bring: Callable[[], _T]) -> Future[_T]:
    """Have a copy brought to the host, while training goes on."""

    def run() -> _T:
        with copy:
            return bring()

    try:
        return bench.fetcher.submit(run)
    except BaseException:
        copy.give_back()
        raise


def take_rows(
    tables: Sequence[Table],
    schemas: Sequence[TableSchema],
    selections: Sequence[Selection],
    *,
    bench: Workbench,
    out: PartQueue,
) -> None:
    """Copy the selected rows, part by part, and hand each to the writer as soon as it is copied.

    Returns when all are copied; those of a device, when the device was told to. Waits for the
    writer only where the pool, or the room on the device, is too small for the whole selection.
    """
    copies: deque[Future[StagedPart]] = deque()
    away: list[tuple[Table, TableSchema, Selection, DeviceRoom]] = []
    for table, schema, selection in zip(tables, schemas, selections, strict=True):
        device = table.device
        if device is not None:
            away.append((table, schema, selection, bench.room(device)))
            continue
        present = _present(table)
        for part in selection.parts(_rows_max(schema)):
            buffer = bench.pool.acquire(part.rows * schema.row_bytes)
            copy = bench.copiers.submit(_copy, table, schema, present, part, buffer, bench.pool)
            out.put(copy)
            copies.append(copy)
            while copies[0].done() and len(copies) > 1:
                copies.popleft().result()  # a finished copy must not keep its buffer alive
    # After all others: the fetcher acquires buffers later, and must not find them taken by parts
    # that are stored after its own.
    for table, schema, selection, room in away:
        for part in selection.parts(_rows_max(schema)):
            out.put(_take_on_device(table, schema, part, room, bench))
    for copy in copies:
        copy.result()


def _rows_max(schema: TableSchema) -> int:
    return max(1, BUFFER_BYTES // schema.row_bytes)


def _present(table: Table) -> set[str]:
    return {column.name for column in table.schema().columns}


def _copy(
    table: Table,
    schema: TableSchema,
    present: set[str],
    part: RowPart,
    buffer: Buffer,
    pool: StagingPool,
) -> StagedPart:
    try:
        columns = _arrays_in(buffer, schema, part.rows)
        existing = _existing(schema, present, columns)
        if part.ids_N is None:
            table.gather_range(part.start, part.stop, existing)
        else:
            table.gather(part.ids_N, existing)
    except BaseException:
        pool.release(buffer)
        raise
    return StagedPart(schema, table.shard, part, columns, buffer)


def _take_on_device(
    table: Table, schema: TableSchema, part: RowPart, room: DeviceRoom, bench: Workbench
) -> Future[StagedPart]:
    """Copy rows where they are; a thread brings the copy to the host."""
    rows = range(part.start, part.stop) if part.ids_N is None else part.ids_N
    size = part.rows * schema.row_bytes
    copy = DeviceStaging(room, size, lambda: table.copy_on_device(rows))
    present, shard = _present(table), table.shard

    def bring() -> StagedPart:
        buffer = bench.pool.acquire(size, room.host_buffer)
        try:
            columns = _arrays_in(buffer, schema, part.rows)
            copy.bring([as_tensor(rows_ND) for rows_ND in _existing(schema, present, columns)])
        except BaseException:
            bench.pool.release(buffer)
            raise
        return StagedPart(schema, shard, part, columns, buffer)

    return _fetch(bench, copy, bring)


def _existing(
    schema: TableSchema, present: set[str], columns: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The columns that are there to be copied; of the others rows are zero."""
    existing = []
    for column, rows_ND in zip(schema.columns, columns, strict=True):
        if column.name in present:
            existing.append(rows_ND)
        else:
            rows_ND[:] = 0  # row state that other ranks have already: these were never trained
    return existing


def _arrays_in(buffer: Buffer, schema: TableSchema, rows: int) -> tuple[np.ndarray, ...]:
    """Room for so many rows of every column, in schema order, each aligned for its numbers."""
    found: dict[str, np.ndarray] = {}
    start = 0
    # The largest numbers first: then all are aligned, without gaps.
    for column in sorted(schema.columns, key=lambda column: -DTYPE_BYTES[column.dtype]):
        size = rows * column.row_bytes
        flat = buffer[start : start + size].view(array_dtype(column.dtype))
        found[column.name] = flat.reshape(rows, column.width)
        start += size
    return tuple(found[column.name] for column in schema.columns)
