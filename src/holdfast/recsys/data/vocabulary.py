"""From category values to row ids: by hashing, or through a vocabulary with a frequency threshold.

Readers hand over *codes*: 0 for a missing value, v + 1 for the value v. Both maps here turn codes
of T features into row ids of T tables.

Invariants:
- The same code of the same feature always gets the same id, on every machine.
- A vocabulary keeps id 0 for everything that was rare or never seen.
- A vocabulary file is plain arrays: loading one can fail, never execute.

Not here: finding the values in files (criteo.py, parquet.py).
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from holdfast.errors import CorruptDataError, InvalidRequestError, NotFoundError
from holdfast.recsys.data.hashing import UInt64s, keys, mix

# N samples, T features and their tables

_FORMAT = 1
_MERGE_CODES = 1 << 20  # codes of one feature to gather before counting them


class IdMap(Protocol):
    """What a reader needs to make row ids."""

    @property
    def table_rows(self) -> tuple[int, ...]: ...

    def ids(self, codes_NT: UInt64s) -> npt.NDArray[np.int64]: ...


class HashedIds:
    """Row id = mix(code xor key of the feature) mod rows; see hashing.py for mix and key.

    Needs no pass over the data. Different values may share a row, the more the smaller the table.

    >>> HashedIds([10, 1]).ids(np.array([[0, 5], [7, 5]], dtype=np.uint64))[:, 1].tolist()
    [0, 0]
    """

    def __init__(self, table_rows: Sequence[int]) -> None:
        if not table_rows or min(table_rows) < 1:
            raise InvalidRequestError(
                "every table needs at least one row", table_rows=list(table_rows)
            )
        self._rows_T = np.array(table_rows, dtype=np.uint64)
        self._keys_T = keys(len(table_rows), 7)

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of every table."""
        return tuple(self._rows_T.tolist())

    def ids(self, codes_NT: UInt64s) -> npt.NDArray[np.int64]:
        """The row ids of every sample's codes."""
        _check_features(codes_NT, len(self._rows_T))
        return (mix(codes_NT ^ self._keys_T) % self._rows_T).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The codes of every feature that were seen often enough, sorted; the i-th has row id i + 1."""

    codes: tuple[UInt64s, ...]
    count_min: int

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of every table: the kept codes and the one row for all others."""
        return tuple(len(kept) + 1 for kept in self.codes)

    def ids(self, codes_NT: UInt64s) -> npt.NDArray[np.int64]:
        """The row ids of every sample's codes; 0 where a code was rare or never seen."""
        _check_features(codes_NT, len(self.codes))
        ids_NT = np.zeros(codes_NT.shape, dtype=np.int64)
        for feature, kept in enumerate(self.codes):
            if len(kept):
                column = codes_NT[:, feature]
                place = np.minimum(np.searchsorted(kept, column), len(kept) - 1)
                ids_NT[:, feature] = np.where(kept[place] == column, place + 1, 0)
        return ids_NT

    def save(self, path: str | Path) -> None:
        """Write the vocabulary; whoever reads the path sees the old file or the whole new one."""
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        with partial.open("wb") as out:
            np.savez(
                out,
                format=np.array([_FORMAT, self.count_min], dtype=np.int64),
                lengths=np.array([len(kept) for kept in self.codes], dtype=np.int64),
                codes=np.concatenate([*self.codes, np.zeros(0, dtype=np.uint64)]),
            )
            out.flush()
            os.fsync(out.fileno())
        partial.replace(target)

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """The vocabulary that ``save`` wrote.

        Raises:
            NotFoundError: there is no such file.
            CorruptDataError: it is not a vocabulary, or damaged.
        """
        try:
            # opened here: numpy forgets to close what it cannot read
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
                form, lengths, codes = stored["format"], stored["lengths"], stored["codes"]
        except FileNotFoundError as error:
            raise NotFoundError("no such vocabulary", path=str(path)) from error
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
            raise CorruptDataError("not a vocabulary", path=str(path)) from error
        is_sound = (
            (form.dtype, lengths.dtype, codes.dtype) == (np.int64, np.int64, np.uint64)
            and form.shape == (2,)
            and form[0] == _FORMAT
            and lengths.ndim == codes.ndim == 1
            and not (lengths < 0).any()
            and int(lengths.sum()) == len(codes)
        )
        kept = tuple(np.split(codes, np.cumsum(lengths)[:-1])) if is_sound else ()
        if not is_sound or any((part[1:] <= part[:-1]).any() for part in kept):
            raise CorruptDataError("damaged vocabulary", path=str(path), todo="build it again")
        return cls(kept, int(form[1]))


def build_vocabulary(codes: Iterable[UInt64s], *, count_min: int = 1) -> Vocabulary:
    """One pass over codes [N, T]: keeps those seen at least ``count_min`` times.

    Memory grows with the distinct values, not with the samples.

    >>> samples = np.array([[5], [5], [9]], dtype=np.uint64)
    >>> build_vocabulary([samples], count_min=2).ids(samples).tolist()
    [[1], [1], [0]]
    """
    if count_min < 1:
        raise InvalidRequestError("a value is seen at least once", count_min=count_min)
    counts: list[_Counts] = []
    for codes_NT in codes:
        counts = counts or [_Counts() for _ in range(codes_NT.shape[1])]
        _check_features(codes_NT, len(counts))
        for feature, counted in enumerate(counts):
            counted.add(codes_NT[:, feature])
    if not counts:
        raise InvalidRequestError("no samples to build a vocabulary from")
    return Vocabulary(tuple(counted.at_least(count_min) for counted in counts), count_min)


class _Counts:
    """How often each code of one feature was seen."""

    def __init__(self) -> None:
        self._codes = np.zeros(0, dtype=np.uint64)
        self._counts = np.zeros(0, dtype=np.int64)
        self._waiting: list[UInt64s] = []
        self._waiting_codes = 0

    def add(self, codes_N: UInt64s) -> None:
        self._waiting.append(codes_N.copy())
        self._waiting_codes += len(codes_N)
        # at least as many as are known, or merging would be quadratic
        if self._waiting_codes >= max(_MERGE_CODES, len(self._codes)):
            self._merge()

    def _merge(self) -> None:
        if not self._waiting:
            return
        fresh, fresh_counts = np.unique(np.concatenate(self._waiting), return_counts=True)
        both, place = np.unique(np.concatenate([self._codes, fresh]), return_inverse=True)
        weights = np.concatenate([self._counts, fresh_counts])
        self._counts = np.zeros(len(both), dtype=np.int64)
        np.add.at(self._counts, place.reshape(-1), weights)
        self._codes, self._waiting, self._waiting_codes = both, [], 0

    def at_least(self, count_min: int) -> UInt64s:
        self._merge()
        return self._codes[self._counts >= count_min]


def _check_features(codes_NT: UInt64s, features: int) -> None:
    if codes_NT.ndim != 2 or codes_NT.shape[1] != features:
        raise InvalidRequestError(
            "the samples have another number of features",
            expected=features,
            found=codes_NT.shape[1:],
            todo="pass as many tables as the files have categorical columns",
        )
