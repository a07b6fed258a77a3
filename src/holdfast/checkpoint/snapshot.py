"""The snapshot: the only stall. Copies the selected rows and the dense state at one step.

    selections -> staged parts (buffers of the staging pool) -> a queue the writer empties

Invariants:
- When ``take_dense`` and ``take_rows`` return, nothing that will be stored shares memory with the
  model.
- Parts enter the queue in the order of tables and rows, so equal snapshots give equal objects.

Not here: which rows (selection.py), what happens to the parts (writer.py).

# N rows, D floats of one column
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint import tree
from holdfast.checkpoint.selection import RowPart, Selection
from holdfast.checkpoint.staging import BUFFER_BYTES, Buffer
from holdfast.checkpoint.workbench import Workbench
from holdfast.dtypes import array_dtype
from holdfast.loading.generators import rng_state
from holdfast.modelstate import ModelState
from holdfast.pieces import Piece
from holdfast.schema import DTYPE_BYTES, TableSchema
from holdfast.tables import Table


@dataclass(frozen=True, slots=True)
class StagedPart:
    """Copied rows of one table, every column, in a staging buffer."""

    schema: TableSchema
    piece: Piece
    part: RowPart
    columns: tuple[np.ndarray, ...]

    def ids(self) -> np.ndarray:
        """The global ids of its rows, ascending."""
        return self.piece.global_ids(self.part.ids())


@dataclass(frozen=True, slots=True)
class DenseState:
    """Copied dense state: a structure and tensors of its own (see tree.py)."""

    structure: Any
    tensors: dict[str, torch.Tensor]

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class Staging:
    """A part being copied, and the buffer it is copied into."""

    buffer: Buffer
    copy: Future[StagedPart]


_NUMPY_KNOWS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)

PartQueue = queue.SimpleQueue[Staging | None]


def take_dense(
    state: ModelState,
    extras: Mapping[str, Any],
    *,
    pls: Mapping[str, Any] | None = None,
    is_follower: bool = False,
) -> DenseState:
    """Copy everything that is not a row: dense state, RNG state, reader and other extras, and what
    is known of lost samples. A follower leaves out what is the same on every rank."""
    collected = {
        **({} if pls is None else {"pls": dict(pls)}),
        **({} if is_follower else state.dense()),
        **state.tables_dense(),
        "rng": rng_state(),
        "extras": {name: item.state_dict() for name, item in extras.items()},
    }
    structure, tensors = tree.flatten(collected)
    return DenseState(structure, {name: _own(tensor) for name, tensor in tensors.items()})


def _own(tensor: torch.Tensor) -> torch.Tensor:
    # A plain memory copy: torch's own would wake its thread pool for each of these small tensors.
    if tensor.device.type == "cpu" and tensor.dtype in _NUMPY_KNOWS:
        return torch.from_numpy(tensor.numpy().copy())
    return tensor.clone()


def take_rows(
    tables: Sequence[Table],
    schemas: Sequence[TableSchema],
    selections: Sequence[Selection],
    *,
    bench: Workbench,
    out: PartQueue,
) -> None:
    """Copy the selected rows, part by part, and hand each to the writer as soon as it is copied.

    Returns when all are copied. Waits for the writer only where the pool is too small for the
    whole selection.
    """
    copies: deque[Future[StagedPart]] = deque()
    for table, schema, selection in zip(tables, schemas, selections, strict=True):
        rows_max = max(1, BUFFER_BYTES // schema.row_bytes)
        present = {column.name for column in table.schema().columns}
        for part in selection.parts(rows_max):
            buffer = bench.pool.acquire(part.rows * schema.row_bytes)
            copy = bench.copiers.submit(_copy, table, schema, present, part, buffer)
            out.put(Staging(buffer, copy))
            copies.append(copy)
            while copies[0].done() and len(copies) > 1:
                copies.popleft().result()  # a finished copy must not keep its buffer alive
    for copy in copies:
        copy.result()


def _copy(
    table: Table, schema: TableSchema, present: set[str], part: RowPart, buffer: Buffer
) -> StagedPart:
    columns = _arrays_in(buffer, schema, part.rows)
    existing = []
    for column, rows_ND in zip(schema.columns, columns, strict=True):
        if column.name in present:
            existing.append(rows_ND)
        else:
            rows_ND[:] = 0  # row state that other ranks have already: these were never trained
    if part.ids_N is None:
        table.gather_range(part.start, part.stop, existing)
    else:
        table.gather(part.ids_N, existing)
    return StagedPart(schema, table.piece, part, columns)


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
