"""Write a checkpoint's weights as one safetensors file, table by table, never whole in memory.

The header is written first, since every size is known from the catalog; tables are then decoded
straight into the mapped file.

Invariants:
- The file appears whole or not at all: a temporary file beside it, fsync, rename.
- Only what was asked for is in it, under the names of ``state_dict()``; row state is named
  ``optimizer.<table>.<column>``.
- Rows stand in the order in which they were asked for; the file's metadata names them, tables apart
  by a semicolon.
- Only segments that can hold the rows are read, a piece of ``PIECE_BYTES`` at a time.

Not here: options (cli/commands/restore.py), decoding (checkpoint/restoring/restore.py).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.boundary.dense import part_of
from holdfast.checkpoint.restoring.restore import check_complete
from holdfast.checkpoint.run import Run
from holdfast.errors import CorruptDataError, InvalidRequestError, NotFoundError
from holdfast.interchange.wholeness import whole_file
from holdfast.model.dtypes import array_dtype
from holdfast.model.schema import DTYPE_BYTES, TableSchema
from holdfast.model.tensors import TORCH_DTYPES
from holdfast.storage.counting import CountingStorage

# safetensors' words for the types a dense state may hold
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


PIECE_BYTES = 16 << 20  # of rows, at a time, where not a whole table is read

Span = tuple[int | None, int | None]  # from a row on, before a row; None: the table's own end


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to export: which tables (None: all, and the dense weights), which rows, row state?"""

    tables: tuple[str, ...] | None = None
    rows: tuple[Span, ...] | None = None
    has_state: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    step: int
    tensors: int
    rows: int
    bytes: int
    read_bytes: int
    read_segments: int
    segments: int
    """Segments of the tables that a restore of them whole would read."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    bytes: int


def export(
    run: Run,
    step: int,
    out: Path,
    wanted: Wanted,
    *,
    on_table: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Write the weights of a step; replaces ``out`` if it exists.

    Raises:
        NotFoundError: no such step or table; lists those that exist.
        InvalidRequestError: the rows lie outside a table.
        CorruptDataError: the checkpoint is damaged; nothing is written.
        OSError: the file cannot be written.
    """
    counter = CountingStorage(run.storage)
    run = Run(counter, run.catalog)
    chosen = _choose_tables(run.tables(step), wanted.tables)
    check_complete(run.catalog, step)  # before a lying row count costs room
    bounds = {schema.name: row_bounds(wanted.rows, schema) for schema in chosen}
    dense: dict[str, torch.Tensor] = {}
    if wanted.tables is None:
        dense = part_of(run.dense(step), "model")
    entries = _plan_layout(chosen, bounds, dense, has_state=wanted.has_state)
    metadata = {"format": "pt", "holdfast.step": str(step), "holdfast.url": run.url}
    if wanted.rows is not None:
        metadata["holdfast.rows"] = ";".join(
            ",".join(f"{a}:{b}" for a, b in spans) for spans in bounds.values()
        )
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) != len(entries):
        raise CorruptDataError("two tensors of the checkpoint have one name", step=step)
    head = _header(entries, metadata)
    total = len(head) + sum(entry.bytes for entry in entries)
    with whole_file(out) as temporary:
        with temporary.open("wb") as file:
            file.write(head)
            file.truncate(total)
        for done, schema in enumerate(chosen):
            on_table(done, len(chosen))
            names = _names(schema, has_state=wanted.has_state)
            targets = [
                _map(temporary, len(head), by_name[name], array_dtype(column.dtype))
                for name, column in zip(names, schema.columns, strict=False)
            ]
            _fill(run, step, schema, bounds[schema.name], targets)
            for target in targets:
                target.flush()
        on_table(len(chosen), len(chosen))
        with temporary.open("r+b") as file:
            for name, tensor in dense.items():
                file.seek(len(head) + by_name[name].start)
                file.write(_raw(tensor))
            file.flush()
            os.fsync(file.fileno())
    stored = {part.name for table in bounds for part in run.stored(step, table)}
    alive = [s.extent for s in run.catalog.alive(step) if s.table in stored]
    read = [(extent.object, extent.offset, extent.bytes) for extent in alive]
    return Exported(
        out,
        step,
        len(entries),
        sum(_count(spans) for spans in bounds.values()),
        total,
        read_bytes=counter.read_bytes,
        read_segments=counter.touched(read, dict(run.catalog.objects)),
        segments=len(alive),
    )


def _count(spans: Sequence[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in spans)


def parse_rows(text: str) -> tuple[Span, ...]:
    """Rows as a user writes them: ``5``, ``A:B`` (from A on, before B), ``A:``, ``:B``; and lists.

    >>> parse_rows("10:20"), parse_rows("3,7,:5")
    (((10, 20),), ((3, 4), (7, 8), (None, 5)))

    Raises:
        InvalidRequestError: it is not one.
    """
    return tuple(_parse_span(part.strip(), text) for part in text.split(","))


def _parse_span(part: str, text: str) -> Span:
    first, colon, last = part.partition(":")
    numbers = [
        int(number) if number.isascii() and number.isdigit() and len(number) < 19 else None
        for number in (first.strip(), last.strip())
    ]
    is_read = [
        number is not None or (bool(colon) and not word.strip())
        for number, word in zip(numbers, (first, last), strict=True)
    ]
    if colon and all(is_read):
        return numbers[0], numbers[1]
    if not colon and numbers[0] is not None:
        return numbers[0], numbers[0] + 1
    raise InvalidRequestError(
        "not a range of rows",
        rows=text,
        todo="write 5 or A:B or A: or :B, or a list like 3,7,10:20",
    )


def row_bounds(rows: tuple[Span, ...] | None, schema: TableSchema) -> list[tuple[int, int]]:
    """The rows of one table: for each range the first row, and the row after the last.

    Raises:
        InvalidRequestError: a range is empty or lies outside the table.
    """
    if rows is None:
        return [(0, schema.rows)]
    bounds: list[tuple[int, int]] = []
    for first, last in rows:
        start = 0 if first is None else first
        stop = schema.rows if last is None else last
        if not 0 <= start < stop <= schema.rows:
            raise InvalidRequestError(
                "the rows lie outside the table, or there are none",
                rows=f"{start}:{stop}",
                table=schema.name,
                table_rows=schema.rows,
            )
        if bounds and bounds[-1][1] == start:  # neighbours are one range
            start = bounds.pop()[0]
        bounds.append((start, stop))
    return bounds


def _choose_tables(
    schemas: Sequence[TableSchema], names: tuple[str, ...] | None
) -> list[TableSchema]:
    if names is None:
        return list(schemas)
    known = {schema.name: schema for schema in schemas}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise NotFoundError("no such table", table=unknown[0], tables=list(known))
    return [known[name] for name in dict.fromkeys(names)]


def _names(schema: TableSchema, *, has_state: bool) -> list[str]:
    """The tensors of a table in the file, in the order of its columns."""
    state = [f"optimizer.{schema.name}.{column.name}" for column in schema.columns[1:]]
    return [schema.name, *(state if has_state else [])]


def _plan_layout(
    tables: Sequence[TableSchema],
    bounds: Mapping[str, Sequence[tuple[int, int]]],
    dense: Mapping[str, torch.Tensor],
    *,
    has_state: bool,
) -> list[_Entry]:
    """Every tensor's place in the file. Tables come first, and of them the largest numbers: rows
    stay aligned that way."""
    entries: list[_Entry] = []
    end = 0
    columns = [
        (name, column, _count(bounds[schema.name]))
        for schema in tables
        for name, column in zip(_names(schema, has_state=has_state), schema.columns, strict=False)
    ]
    for name, column, rows in sorted(columns, key=lambda each: -DTYPE_BYTES[each[1].dtype]):
        word = _DTYPES[TORCH_DTYPES[column.dtype]]
        entries.append(_Entry(name, word, (rows, column.width), end, column.row_bytes * rows))
        end += entries[-1].bytes
    for name, tensor in dense.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise InvalidRequestError(
                "a value of the model has no place in safetensors",
                name=name,
                type=type(tensor).__name__,
                todo="export with --format torch, or name the tables you want",
            )
        if tensor.dtype not in _DTYPES:
            raise InvalidRequestError(
                "a tensor's type has no place in safetensors", name=name, dtype=str(tensor.dtype)
            )
        size = tensor.numel() * tensor.element_size()
        entries.append(_Entry(name, _DTYPES[tensor.dtype], tuple(tensor.shape), end, size))
        end += size
    return entries


def _header(entries: Sequence[_Entry], metadata: Mapping[str, str]) -> bytes:
    """The length of the JSON that follows, and the JSON, padded so that the data is aligned."""
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    for entry in entries:
        described[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.start + entry.bytes],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _raw(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _map(path: Path, head_bytes: int, entry: _Entry, dtype: np.dtype[Any]) -> np.memmap:
    return np.memmap(path, dtype, mode="r+", offset=head_bytes + entry.start, shape=entry.shape)


def _fill(
    run: Run,
    step: int,
    schema: TableSchema,
    bounds: Sequence[tuple[int, int]],
    targets: Sequence[np.ndarray],
) -> None:
    if list(bounds) == [(0, schema.rows)]:
        run.restore_into(step, {schema.name: targets})
        return
    done = 0
    for ids_N in _pieces(bounds, max(1, PIECE_BYTES // schema.row_bytes)):
        columns = run.columns(step, schema.name, ids_N)
        for target_ND, column_ND in zip(targets, columns, strict=False):
            target_ND[done : done + len(ids_N)] = column_ND
        done += len(ids_N)


def _pieces(bounds: Sequence[tuple[int, int]], most: int) -> Iterator[np.ndarray]:
    """The rows of some ranges in their order, at most so many at a time.

    >>> [piece.tolist() for piece in _pieces([(5, 9), (0, 1)], 3)]
    [[5, 6, 7], [8, 0]]
    """
    waiting: list[np.ndarray] = []
    room = most
    for start, stop in bounds:
        while start < stop:
            end = min(stop, start + room)
            waiting.append(np.arange(start, end))
            room -= end - start
            start = end
            if room == 0:
                yield np.concatenate(waiting)
                waiting, room = [], most
    if waiting:
        yield np.concatenate(waiting)
