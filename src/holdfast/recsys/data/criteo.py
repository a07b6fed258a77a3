"""Criteo's click logs: tab-separated lines of the Kaggle file and of the Terabyte day files.

A line is a label (0 or 1), 13 integers and 26 hexadecimal categories of up to eight digits, 40
fields in all; an empty integer or category is a missing value. Files may be gzipped. Whole blocks
of lines are parsed at once with array operations, no Python code runs per line.

Invariants:
- A position's offset is the byte behind a line, in the unpacked file; a gzipped file resumes by
  unpacking up to there.
- A bad line is never half used: it is refused with its file and number, or skipped and counted.

Not here: batches, row ids and state (reader.py, vocabulary.py).
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from holdfast.errors import CorruptDataError, InvalidRequestError, NotFoundError
from holdfast.recsys.data.hashing import UInt64s
from holdfast.recsys.data.reader import Block, FileReader, OnBad, Position, Shard
from holdfast.recsys.data.vocabulary import IdMap

# N lines, C bytes, F fields of a line

DENSE_FIELDS = 13
CATEGORY_FIELDS = 26
_FIELDS = 1 + DENSE_FIELDS + CATEGORY_FIELDS
_LINE_BYTES_MAX = 1 << 16
_INTEGER_DIGITS_MAX = 18  # fits 64 bits
_CATEGORY_DIGITS_MAX = 8

_TAB, _NEWLINE, _RETURN, _MINUS = 9, 10, 13, 45
_DIGIT = np.full(256, 255, dtype=np.uint8)
for _value, _character in enumerate(b"0123456789abcdef"):
    _DIGIT[_character] = _DIGIT[ord(chr(_character).upper())] = _value

UInt8s = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def criteo_reader(
    paths: Sequence[str | Path],
    *,
    batch_size: int,
    ids: IdMap,
    on_bad: OnBad = "raise",
    drop_last: bool = False,
) -> FileReader:
    """A reader over Criteo files, in the given order."""
    source = CriteoFiles(paths, on_bad=on_bad)
    return FileReader(source, batch_size=batch_size, ids=ids, drop_last=drop_last)


def day_files(folder: str | Path) -> list[Path]:
    """The Terabyte day files of a folder, ``day_0`` first, ``day_10`` after ``day_9``.

    Raises:
        NotFoundError: the folder has none.
    """
    found = [
        (int(match.group(1)), path)
        for path in Path(folder).glob("day_*")
        if (match := re.fullmatch(r"day_(\d+)(\.gz)?", path.name))
    ]
    if not found:
        raise NotFoundError("no day files", folder=str(folder), todo="expect day_0 or day_0.gz")
    days = [day for day, _ in found]
    if len(set(days)) < len(days):
        raise InvalidRequestError(
            "a day is there twice",
            folder=str(folder),
            days=sorted({day for day in days if days.count(day) > 1}),
            todo="keep either the plain or the gzipped file",
        )
    return [path for _, path in sorted(found)]


class CriteoFiles:
    """Parses the files from any position on."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        *,
        on_bad: OnBad = "raise",
        block_bytes: int = 1 << 20,
    ) -> None:
        if not paths or on_bad not in ("raise", "skip") or block_bytes < 1:
            raise InvalidRequestError(
                "a reader needs files and a rule for bad lines",
                files=len(paths),
                on_bad=on_bad,
                block_bytes=block_bytes,
                todo="pass one or more files and on_bad='raise' or 'skip'",
            )
        missing = [str(path) for path in paths if not Path(path).is_file()]
        if missing:
            raise NotFoundError("no such file", missing=missing)
        self._paths = tuple(Path(path) for path in paths)
        self._on_bad = on_bad
        self._block_bytes = block_bytes

    @property
    def files(self) -> tuple[str, ...]:
        """The files, in the order they are read."""
        return tuple(str(path) for path in self._paths)

    def blocks(self, start: Position, shard: Shard) -> Iterator[Block]:
        """The samples behind a position that are this shard's.

        Raises:
            InvalidRequestError: a bad line, unless bad lines are skipped. The good lines before
                it come first.
            CorruptDataError: a gzipped file is damaged.
        """
        for file in range(start.file, len(self._paths)):
            at = start if file == start.file else Position(file)
            line = at.row
            for offset, data in self._pieces(at):
                piece_lines = data.count(b"\n")
                yield from self._parse(data, Position(file, offset, line), shard)
                line += piece_lines

    def _pieces(self, at: Position) -> Iterator[tuple[int, bytes]]:
        """Whole lines from a position to the end of its file, with the offset of each piece."""
        path = self._paths[at.file]
        offset = at.offset
        rest = b""
        try:
            with _open(path) as lines:
                lines.seek(offset)
                while data := lines.read(self._block_bytes):
                    data = rest + data
                    cut = data.rfind(b"\n") + 1
                    whole, rest = data[:cut], data[cut:]
                    if len(rest) > _LINE_BYTES_MAX:
                        raise InvalidRequestError(
                            "a line is too long",
                            file=str(path),
                            offset=offset + cut,
                            line_bytes_max=_LINE_BYTES_MAX,
                            todo="check that the file is tab-separated text",
                        )
                    if whole:
                        yield offset, whole
                    offset += cut
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise CorruptDataError(
                "a gzipped file is damaged", file=str(path), todo="fetch it again"
            ) from error
        if rest:
            yield offset, rest + b"\n"

    def _parse(self, data: bytes, at: Position, shard: Shard) -> Iterator[Block]:
        parsed = _Lines(data, at.row, shard)
        bad = np.flatnonzero(~parsed.is_good)
        if not len(bad) or self._on_bad == "skip":
            yield parsed.block(at, len(parsed.is_good))
            return
        yield parsed.block(at, int(bad[0]))
        line = parsed.line(int(bad[0]))
        raise InvalidRequestError(
            f"bad line: {_why_bad(line)}",
            file=str(self._paths[at.file]),
            line=int(parsed.row[bad[0]]),
            todo="expect a label, 13 integers and 26 hexadecimal fields between tabs; "
            "or pass on_bad='skip'",
        )


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


class _Lines:
    """The lines of a piece that belong to a shard, parsed; bad ones are marked, not dropped."""

    def __init__(self, data: bytes, first_row: int, shard: Shard) -> None:
        self._data = data
        buffer_C = np.frombuffer(data, dtype=np.uint8)
        end_N = np.flatnonzero(buffer_C == _NEWLINE)
        start_N = np.concatenate([[0], end_N[:-1] + 1])
        row_N = first_row + np.arange(len(end_N))
        is_mine = (row_N // shard.group) % shard.count == shard.index
        self._start, self._end = start_N[is_mine], end_N[is_mine]
        self.row = row_N[is_mine] + 1  # behind the line, which is also its number from 1

        # a file from Windows ends its lines with two bytes
        last_N = self._end - (buffer_C[np.maximum(self._end - 1, 0)] == _RETURN)
        last_N = np.maximum(last_N, self._start)
        tab = np.flatnonzero(buffer_C == _TAB)
        first_tab_N = np.searchsorted(tab, self._start)
        self.is_good = np.searchsorted(tab, self._end) - first_tab_N == _FIELDS - 1
        whole = np.flatnonzero(self.is_good)
        self._label = np.zeros(len(self.row), dtype=np.float32)
        self._dense = np.zeros((len(self.row), DENSE_FIELDS), dtype=np.float64)
        self._codes = np.zeros((len(self.row), CATEGORY_FIELDS), dtype=np.uint64)
        if not len(whole):
            return
        tab_NF = tab[first_tab_N[whole, None] + np.arange(_FIELDS - 1)]
        start_NF = np.concatenate([self._start[whole, None], tab_NF + 1], axis=1)
        end_NF = np.concatenate([tab_NF, last_N[whole, None]], axis=1)
        dense, category = slice(1, 1 + DENSE_FIELDS), slice(1 + DENSE_FIELDS, None)
        label, label_ok = parse_label(buffer_C, start_NF[:, 0], end_NF[:, 0])
        values, dense_ok = parse_integers(buffer_C, start_NF[:, dense], end_NF[:, dense])
        codes, codes_ok = parse_categories(buffer_C, start_NF[:, category], end_NF[:, category])
        self._label[whole], self._dense[whole], self._codes[whole] = label, values, codes
        self.is_good[whole] = label_ok & dense_ok.all(axis=1) & codes_ok.all(axis=1)

    def line(self, index: int) -> bytes:
        return self._data[int(self._start[index]) : int(self._end[index])]

    def block(self, at: Position, stop: int) -> Block:
        """The good lines before ``stop`` as samples."""
        good = np.flatnonzero(self.is_good[:stop])
        bad_before = np.cumsum(~self.is_good[:stop], dtype=np.int64)
        return Block(
            labels_N=self._label[good],
            dense_ND=self._dense[good],
            codes_NT=self._codes[good],
            file=at.file,
            offset_N=at.offset + self._end[good] + 1,
            row_N=self.row[good],
            skipped_N=bad_before[good],
            skipped=int(bad_before[-1]) if stop else 0,
        )


def parse_label(
    buffer_C: UInt8s, start_N: Ints, end_N: Ints
) -> tuple[npt.NDArray[np.float32], Bools]:
    """Fields of one digit, 0 or 1."""
    digit = _DIGIT[buffer_C[np.minimum(start_N, len(buffer_C) - 1)]]
    is_good = (end_N - start_N == 1) & (digit < 2)
    return np.where(is_good, digit, 0).astype(np.float32), is_good


def parse_integers(buffer_C: UInt8s, start_NF: Ints, end_NF: Ints) -> tuple[Ints, Bools]:
    """Decimal fields, maybe negative; an empty field is 0. Also says which were well formed."""
    is_negative = (end_NF > start_NF) & (buffer_C[start_NF] == _MINUS)
    start_NF = start_NF + is_negative
    length_NF = end_NF - start_NF
    is_good = (length_NF <= _INTEGER_DIGITS_MAX) & ~(is_negative & (length_NF == 0))
    value_NF = np.zeros(start_NF.shape, dtype=np.int64)
    for place in range(min(int(length_NF.max(initial=0)), _INTEGER_DIGITS_MAX)):
        is_inside = place < length_NF
        digit = _DIGIT[buffer_C[np.where(is_inside, start_NF + place, 0)]]
        is_good &= ~is_inside | (digit < 10)
        value_NF = np.where(is_inside, value_NF * 10 + digit, value_NF)
    return np.where(is_negative, -value_NF, value_NF), is_good


def parse_categories(buffer_C: UInt8s, start_NF: Ints, end_NF: Ints) -> tuple[UInt64s, Bools]:
    """Codes of hexadecimal fields (value + 1; 0 if empty). Also says which were well formed."""
    length_NF = end_NF - start_NF
    is_good = length_NF <= _CATEGORY_DIGITS_MAX
    value_NF = np.zeros(start_NF.shape, dtype=np.uint64)
    for place in range(min(int(length_NF.max(initial=0)), _CATEGORY_DIGITS_MAX)):
        is_inside = place < length_NF
        digit = _DIGIT[buffer_C[np.where(is_inside, start_NF + place, 0)]]
        is_good &= ~is_inside | (digit < 16)
        value_NF = np.where(is_inside, value_NF * np.uint64(16) + digit, value_NF)
    return np.where(length_NF > 0, value_NF + np.uint64(1), np.uint64(0)), is_good


def _why_bad(line: bytes) -> str:
    """What is wrong with a line, for people; the slow path of one line."""
    fields = line.removesuffix(b"\r").split(b"\t")
    if len(fields) != _FIELDS:
        return f"{len(fields)} fields instead of {_FIELDS}"
    if fields[0] not in (b"0", b"1"):
        return f"field 1 is {_shown(fields[0])}, not a label 0 or 1"
    for number, field in enumerate(fields[1:], start=2):
        if number <= 1 + DENSE_FIELDS:
            if not re.fullmatch(rb"(-?[0-9]{1,18})?", field):
                return f"field {number} is {_shown(field)}, not an integer"
        elif not re.fullmatch(rb"[0-9a-fA-F]{0,8}", field):
            return f"field {number} is {_shown(field)}, not up to 8 hexadecimal digits"
    return "cannot be parsed"


def _shown(field: bytes) -> str:
    return repr(field[:20].decode("utf-8", "replace"))
