"""Click logs as Parquet: the same columns as Criteo's lines, by name.

Integer columns or hexadecimal text for the categories, numbers for the dense features; a null is
a missing value. One row group at a time is in memory. Needs pyarrow, which is an extra.

Invariants:
- A position's offset is a row group, its row the rows passed in that group.
- A bad row is never half used: it is refused with its place, or skipped and counted.

Not here: batches, row ids and state (reader.py, vocabulary.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.errors import CorruptDataError, InvalidRequestError, NotFoundError
from holdfast.recsys.data.criteo import parse_categories
from holdfast.recsys.data.hashing import UInt64s
from holdfast.recsys.data.reader import Block, FileReader, OnBad, Position, Shard
from holdfast.recsys.data.vocabulary import IdMap

# N rows, D dense features, T categorical features

_ROWS_AT_ONCE = 8192

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns to read; the defaults are the usual names of Criteo's."""

    label: str = "label"
    dense: tuple[str, ...] = tuple(f"I{number}" for number in range(1, 14))
    categories: tuple[str, ...] = tuple(f"C{number}" for number in range(1, 27))


def parquet_reader(
    paths: Sequence[str | Path],
    *,
    batch_size: int,
    ids: IdMap,
    columns: Columns | None = None,
    on_bad: OnBad = "raise",
    drop_last: bool = False,
) -> FileReader:
    """A reader over Parquet files, in the given order.

    Raises:
        InvalidRequestError: pyarrow is not installed, or a column is missing.
    """
    source = ParquetFiles(paths, columns=columns or Columns(), on_bad=on_bad)
    return FileReader(source, batch_size=batch_size, ids=ids, drop_last=drop_last)


class ParquetFiles:
    """Parses the files from any position on; shards are row groups, whatever the group size."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        columns: Columns | None = None,
        on_bad: OnBad = "raise",
    ) -> None:
        _import_pyarrow()
        if not paths or on_bad not in ("raise", "skip"):
            raise InvalidRequestError(
                "a reader needs files and a rule for bad rows",
                files=len(paths),
                on_bad=on_bad,
                todo="pass one or more files and on_bad='raise' or 'skip'",
            )
        missing = [str(path) for path in paths if not Path(path).is_file()]
        if missing:
            raise NotFoundError("no such file", missing=missing)
        self._paths = tuple(Path(path) for path in paths)
        self._columns = columns or Columns()
        self._on_bad = on_bad
        for path in self._paths:
            self._open(path).close()

    @property
    def files(self) -> tuple[str, ...]:
        """The files, in the order they are read."""
        return tuple(str(path) for path in self._paths)

    def blocks(self, start: Position, shard: Shard) -> Iterator[Block]:
        """The samples behind a position that are this shard's.

        Raises:
            InvalidRequestError: a bad row, unless bad rows are skipped. The good rows before it
                come first.
            CorruptDataError: a file is damaged.
        """
        for file in range(start.file, len(self._paths)):
            at = start if file == start.file else Position(file)
            with self._open(self._paths[file]) as opened:
                for group in range(at.offset, opened.num_row_groups):
                    if (file + group) % shard.count == shard.index:
                        row = at.row if group == at.offset else 0
                        yield from self._row_group(opened, Position(file, group, row))

    def _open(self, path: Path) -> Any:
        arrow = _import_pyarrow()
        try:
            opened = arrow.parquet.ParquetFile(path)
        except (arrow.ArrowInvalid, OSError) as error:
            raise CorruptDataError("not a Parquet file", file=str(path)) from error
        wanted = [self._columns.label, *self._columns.dense, *self._columns.categories]
        missing = sorted(set(wanted) - set(opened.schema_arrow.names))
        if missing:
            opened.close()
            raise InvalidRequestError(
                "columns are missing", file=str(path), missing=missing, todo="pass columns="
            )
        return opened

    def _row_group(self, opened: Any, at: Position) -> Iterator[Block]:
        arrow = _import_pyarrow()
        wanted = [self._columns.label, *self._columns.dense, *self._columns.categories]
        row = 0
        batches = opened.iter_batches(
            batch_size=_ROWS_AT_ONCE, row_groups=[at.offset], columns=wanted
        )
        while True:
            try:
                batch = next(batches, None)
            except (arrow.ArrowInvalid, OSError) as error:
                raise CorruptDataError(
                    "a Parquet file is damaged",
                    file=str(self._paths[at.file]),
                    row_group=at.offset,
                    todo="fetch it again",
                ) from error
            if batch is None:
                return
            passed = min(max(at.row - row, 0), batch.num_rows)
            if passed < batch.num_rows:
                yield from self._block(
                    batch.slice(passed), Position(at.file, at.offset, row + passed)
                )
            row += batch.num_rows

    def _block(self, batch: Any, at: Position) -> Iterator[Block]:
        path = self._paths[at.file]
        label, is_good = _numbers(batch.column(self._columns.label), path, self._columns.label)
        is_good &= (label == 0) | (label == 1)
        dense_columns, code_columns = [], []
        for name in self._columns.dense:
            values, _ = _numbers(batch.column(name), path, name)
            dense_columns.append(values)
        for name in self._columns.categories:
            codes, is_fine = _codes(batch.column(name), path, name)
            is_good &= is_fine
            code_columns.append(codes)
        bad = np.flatnonzero(~is_good)
        is_refused = len(bad) > 0 and self._on_bad == "raise"
        stop = int(bad[0]) if is_refused else len(is_good)
        good = np.flatnonzero(is_good[:stop])
        bad_before = np.cumsum(~is_good[:stop], dtype=np.int64)
        yield Block(
            labels_N=label[good].astype(np.float32),
            dense_ND=np.stack(dense_columns, axis=1)[good],
            codes_NT=np.stack(code_columns, axis=1)[good],
            file=at.file,
            offset_N=np.full(len(good), at.offset, dtype=np.int64),
            row_N=at.row + good + 1,
            skipped_N=bad_before[good],
            skipped=int(bad_before[-1]) if stop else 0,
        )
        if is_refused:
            raise InvalidRequestError(
                "bad row",
                file=str(path),
                row_group=at.offset,
                row=at.row + stop + 1,
                todo="expect a label 0 or 1 and categories as integers from 0 or up to 8 "
                "hexadecimal digits; or pass on_bad='skip'",
            )


def _import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidRequestError(
            "reading Parquet needs pyarrow", todo="run: pip install holdfast[parquet]"
        ) from error
    return pyarrow


def _numbers(column: Any, path: Path, name: str) -> tuple[npt.NDArray[np.float64], Bools]:
    """A column as floats, 0 where missing; and where it was not missing."""
    types = _import_pyarrow().types
    kind = column.type
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise _wrong_type(path, name, kind, "a number")
    if types.is_boolean(kind):
        column = column.cast("int8")
    values = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.float64)
    is_there = column.is_valid().to_numpy(zero_copy_only=False) & ~np.isnan(values)
    return np.nan_to_num(values), is_there


def _codes(column: Any, path: Path, name: str) -> tuple[UInt64s, Bools]:
    """Codes of a categorical column (value + 1; 0 where missing), and which were well formed."""
    types = _import_pyarrow().types
    kind = column.type
    if types.is_integer(kind):
        values = column.fill_null(0).to_numpy(zero_copy_only=False)
        is_there = column.is_valid().to_numpy(zero_copy_only=False)
        codes = np.where(is_there, values.astype(np.uint64) + np.uint64(1), np.uint64(0))
        return codes, ~is_there | (values >= 0)
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise _wrong_type(path, name, kind, "an integer or text")
    text = column.cast("large_string").fill_null("")
    _, offsets, data = text.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[text.offset : text.offset + len(text) + 1]
    buffer = np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else None
    if buffer is None:
        buffer = np.zeros(1, dtype=np.uint8)
    return parse_categories(buffer, ends[:-1], ends[1:])


def _wrong_type(path: Path, name: str, kind: Any, expected: str) -> InvalidRequestError:
    return InvalidRequestError(
        "a column has the wrong type",
        file=str(path),
        column=name,
        type=str(kind),
        expected=expected,
    )
