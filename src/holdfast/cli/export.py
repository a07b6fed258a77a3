"""Write a checkpoint's weights as one safetensors file, table by table, never whole in memory.

The header is written first, since every size is known from the catalog; tables are then decoded
straight into the mapped file.

Invariants:
- The file appears whole or not at all: a temporary file beside it, fsync, rename.
- Only what was asked for is in it, under the names of ``state_dict()``; row state is named
  ``optimizer.<table>.<column>``.

Not here: options (restore.py), decoding (checkpoint/restore.py).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from holdfast.checkpoint import restore
from holdfast.checkpoint.run import Run
from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.tables import TableSchema

# safetensors' words for the types a dense state may hold
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to export: which tables (None: all, and the dense weights), which rows, row state?"""

    tables: tuple[str, ...] | None = None
    rows: slice | None = None
    has_state: bool = False


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    step: int
    tensors: int
    rows: int
    bytes: int


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
    chosen = _choose_tables(run.tables(step), wanted.tables)
    bounds = {schema.name: row_bounds(wanted.rows, schema) for schema in chosen}
    dense: dict[str, torch.Tensor] = {} if wanted.tables is not None else run.dense(step)["model"]
    entries = _plan_layout(chosen, bounds, dense, has_state=wanted.has_state)
    metadata = {"format": "pt", "holdfast.step": str(step), "holdfast.url": run.url}
    if wanted.rows is not None:
        metadata["holdfast.rows"] = ",".join(f"{a}:{b}" for a, b in bounds.values())
    head = _header(entries, metadata)
    total = len(head) + sum(entry.bytes for entry in entries)
    with _whole_or_nothing(out) as temporary:
        with temporary.open("wb") as file:
            file.write(head)
            file.truncate(total)
        by_name = {entry.name: entry for entry in entries}
        for done, schema in enumerate(chosen):
            on_table(done, len(chosen))
            names = _names(schema, has_state=wanted.has_state)
            targets = [_map(temporary, len(head), by_name[name]) for name in names]
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
    rows = sum(stop - start for start, stop in bounds.values())
    return Exported(out, step, len(entries), rows, total)


def parse_rows(text: str) -> slice:
    """A range of rows as a user writes it: ``A:B``, ``A:`` or ``:B``, from A on, before B.

    >>> parse_rows("10:20"), parse_rows(":5")
    (slice(10, 20, None), slice(None, 5, None))

    Raises:
        InvalidRequestError: it is not one.
    """
    first, colon, last = text.partition(":")
    parts = [part.strip() for part in (first, last)]
    if colon and all(not part or (part.isascii() and part.isdigit()) for part in parts):
        return slice(*(int(part) if part else None for part in parts))
    raise InvalidRequestError("not a range of rows", rows=text, todo="write A:B, A: or :B")


def row_bounds(rows: slice | None, schema: TableSchema) -> tuple[int, int]:
    """The first row and the row after the last.

    Raises:
        InvalidRequestError: the range is empty or lies outside the table.
    """
    if rows is None:
        return 0, schema.rows
    start = 0 if rows.start is None else int(rows.start)
    stop = schema.rows if rows.stop is None else int(rows.stop)
    if not 0 <= start < stop <= schema.rows:
        raise InvalidRequestError(
            "the rows lie outside the table, or there are none",
            rows=f"{start}:{stop}",
            table=schema.name,
            table_rows=schema.rows,
        )
    return start, stop


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
    bounds: Mapping[str, tuple[int, int]],
    dense: Mapping[str, torch.Tensor],
    *,
    has_state: bool,
) -> list[_Entry]:
    """Every tensor's place in the file. Tables come first: fp32 stays aligned that way."""
    entries: list[_Entry] = []
    end = 0
    for schema in tables:
        start_row, stop_row = bounds[schema.name]
        names = _names(schema, has_state=has_state)
        for name, column in zip(names, schema.columns, strict=False):
            shape = (stop_row - start_row, column.width)
            entries.append(_Entry(name, "F32", shape, end, 4 * shape[0] * shape[1]))
            end += entries[-1].bytes
    for name, tensor in dense.items():
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


def _map(path: Path, head_bytes: int, entry: _Entry) -> np.memmap:
    return np.memmap(
        path, np.float32, mode="r+", offset=head_bytes + entry.start, shape=entry.shape
    )


def _fill(
    run: Run,
    step: int,
    schema: TableSchema,
    bounds: tuple[int, int],
    targets: Sequence[np.ndarray],
) -> None:
    if bounds == (0, schema.rows):
        restore.restore_rows(run.storage, run.catalog, step, {schema.name: targets})
        return
    rows = run.read(step, schema.name, slice(*bounds))
    columns = [rows.weight, *(rows.state[column.name] for column in schema.columns[1:])]
    for target_ND, column_ND in zip(targets, columns, strict=False):
        target_ND[...] = column_ND


@contextmanager
def _whole_or_nothing(out: Path) -> Iterator[Path]:
    temporary = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        yield temporary
        temporary.replace(out)
        folder = os.open(out.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    finally:
        temporary.unlink(missing_ok=True)
