"""The campaign's own reader of runs: slow, plain, and written from docs/format.md alone.

The state at a step is what its segments say, written over each other in the order of their births.
No masks, no filters, no order of its own. Of the project only codecs are used, which have tests of
their own.

A row is in **doubt** where the stored bytes do not say one thing of it: no segment holds it, two of
one birth do, or one that may hold it cannot be read. Of such rows the oracle says nothing; a run
that has any is not sound.

# N rows of a segment, M rows of a table
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.checkpoint.format import codec as codecs
from holdfast.errors import HoldfastError
from holdfast.model.dtypes import array_dtype
from holdfast.model.names import plain_name
from tests.hostile.mutators.segment_bytes import DTYPES, ids_of, read_segment
from tests.hostile.mutators.stored_run import HEAD, TAIL, TAIL_MAGIC, hex_of, sum_of

ROWS_MAX = 1 << 16  # the campaign's tables are smaller; what claims more is in doubt as a whole
_IMPOSSIBLE = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError,
               RecursionError, struct.error, HoldfastError)  # fmt: skip


class NoRun(Exception):
    """The files are no run by the format."""


@dataclass(frozen=True, slots=True)
class Read:
    """A stored table at a step: its columns, and which rows are in doubt, and why one is."""

    columns: list[np.ndarray]
    doubt_M: np.ndarray
    why: str


@dataclass(frozen=True, slots=True)
class Schema:
    """A stored table as the catalog describes it."""

    name: str
    rows: int
    columns: tuple[tuple[str, int, str], ...]
    cut: tuple[str, int, int] | None


class Oracle:
    """A run as the format has it.

    Raises:
        NoRun: the newest catalog is none.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files
        self._footers: dict[str, dict[int, tuple[int, str]] | None] = {}
        self._segments: dict[tuple[Any, ...], Any] = {}
        try:
            self.body = _newest(files)
            self.checkpoints = {e[0]: e for e in map(_checkpoint, self.body["checkpoints"])}
            self._sizes = dict(map(tuple, self.body["objects"]))
            self._tables = [plain_name(name) for name in self.body["tables"]]
            self._schemas = [_schema(tables) for tables in self.body["schemas"]]
        except _IMPOSSIBLE as error:
            raise NoRun(repr(error)) from error

    @property
    def steps(self) -> list[int]:
        """The steps there are."""
        return list(self.checkpoints)

    def schemas(self, step: int) -> dict[str, Schema]:
        """The stored tables at a step."""
        found = self._schemas[self.checkpoints[step][4]]
        return {schema.name: schema for schema in found}

    def read(self, step: int, schema: Schema) -> Read:
        """A stored table at a step."""
        if not 0 <= schema.rows <= ROWS_MAX or sum(w for _, w, _ in schema.columns) > ROWS_MAX:
            return Read([], np.ones(1, bool), "too large")
        columns = [np.zeros((schema.rows, w), array_dtype(d)) for _, w, d in schema.columns]
        doubt_M = np.ones(schema.rows, bool)
        births_M = np.full(schema.rows, -1, object)
        why = "no segment holds it"
        for entry in sorted(self._alive(step, schema.name), key=lambda entry: entry[1]):
            found = self._segment(entry, schema)
            if isinstance(found, str):
                why = found
                last = min(entry[5], schema.rows - 1)
                doubt_M[max(0, entry[4]) : max(0, last + 1)] = True
                births_M[max(0, entry[4]) : max(0, last + 1)] = entry[1]
                continue
            ids_N, rows = found
            is_twice_N = births_M[ids_N] == entry[1]
            if is_twice_N.any():
                why = "two segments of one birth hold it"
            doubt_M[ids_N] = is_twice_N
            births_M[ids_N] = entry[1]
            for column, rows_ND in zip(columns, rows, strict=True):
                column[ids_N] = rows_ND
        return Read(columns, doubt_M, why if doubt_M.any() else "")

    def _alive(self, step: int, table: str) -> list[Any]:
        return [
            s
            for s in self.body["segments"]
            if self._tables[s[0]] == table and s[1] <= step and (s[2] is None or step < s[2])
        ]

    def _segment(self, entry: list[Any], schema: Schema) -> tuple[np.ndarray, list[Any]] | str:
        """A segment's ids and columns, or what is wrong with it."""
        key = (*entry[3:10], schema)
        if key not in self._segments:
            try:
                self._segments[key] = self._read_segment(entry, schema)
            except _IMPOSSIBLE as error:
                self._segments[key] = f"a segment cannot be read: {error!r}"[:200]
        found: tuple[np.ndarray, list[Any]] | str = self._segments[key]
        return found

    def _read_segment(self, entry: list[Any], schema: Schema) -> tuple[np.ndarray, list[Any]]:
        rows, first, last, place, offset, size, sum_ = entry[3:10]
        name = self.body["objects"][place][0]
        if place < 0 or self._footer(name).get(offset) != (size, sum_):
            raise ValueError("the object's footer says something else")
        data = self._files[name][offset : offset + size]
        if hex_of(data) != sum_:
            raise ValueError("checksum")
        segment = read_segment(data)
        if (segment.rows, segment.first, segment.last) != (rows, first, last):
            raise ValueError("the catalog says something else")
        found = [(c.width, DTYPES[c.type]) for c in segment.columns]
        if found != [(width, dtype) for _, width, dtype in schema.columns] or last >= schema.rows:
            raise ValueError("not of this table")
        columns = [
            codecs.decode(c.wire, c.section, rows=rows, width=c.width, dtype=DTYPES[c.type])
            for c in segment.columns
        ]
        return ids_of(segment), columns

    def _footer(self, name: str) -> dict[int, tuple[int, str]]:
        if name not in self._footers:
            self._footers[name] = None
            self._footers[name] = _footer(self._files[name], self._sizes[name])
        found = self._footers[name]
        if found is None:
            raise ValueError("footer")
        return found


def _newest(files: dict[str, bytes]) -> dict[str, Any]:
    named = [re.fullmatch(r"catalog/(0*([1-9]\d{7,}|\d{8}))\.json", name) for name in files]
    number, name = max((int(m[1]), m[0]) for m in named if m)
    line, text, rest = files[name].split(b"\n")
    magic, format_, sum_ = line.split(b" ")
    body = json.loads(text)
    is_sound = magic == b"holdfast-catalog" and sum_ == hex_of(text).encode() and not rest
    if not is_sound or str(body["format"]).encode() != format_ or body["number"] != number:
        raise ValueError("catalog")
    found: dict[str, Any] = body
    return found


def _checkpoint(entry: Any) -> list[Any]:
    if isinstance(entry, dict):
        return [entry["step"], 0, entry["kind"], entry["base"], entry["schema"]]
    found: list[Any] = entry
    return found


def _schema(tables: Any) -> list[Schema]:
    return [
        Schema(
            plain_name(name),
            rows,
            tuple((c[0], c[1], c[2] if len(c) > 2 else "float32") for c in columns),
            (plain_name(cut[0][0]), *cut[0][1:]) if cut else None,
        )
        for name, rows, columns, *cut in tables
    ]


def _footer(data: bytes, size: int) -> dict[int, tuple[int, str]]:
    footer_bytes, footer_sum, magic = TAIL.unpack(data[-TAIL.size :])
    at = len(data) - TAIL.size - footer_bytes
    text = data[at : -TAIL.size]
    if data[:16] != HEAD or magic != TAIL_MAGIC or len(data) != size or at < 16:
        raise ValueError("frame")
    footer = json.loads(text)
    if sum_of(text) != footer_sum or footer["format"] != 1:
        raise ValueError("footer")
    found, end = {}, 16
    for _, _, offset, length, sum_ in footer["segments"]:
        if offset != end or length < 0:
            raise ValueError("gap")
        found[offset] = (length, sum_)
        end += length
    if end != at:
        raise ValueError("gap")
    return found
