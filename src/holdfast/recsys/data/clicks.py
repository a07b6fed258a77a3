"""A synthetic click stream: endless Criteo-like batches, each a pure function of (seed, index).

Any batch can be made anywhere, at any time, in any process, without making the ones before it: the
position of a reader is one integer, and a resumed run sees exactly the samples it would have seen.
Row ids are skewed (skew.py) and spread over each table; labels come from a hidden teacher that a
model can learn: an effect for every row, a few products of two tables' rows, the dense features,
and noise. The best possible AUC is about 0.82.

Invariants:
- Bits come from Philox counters keyed by (seed, index); effects from integer hashes of the rank.
  Nothing depends on the process, the platform, or which batches were made before.
- Memory does not grow with the tables.
- Training, held-out and calibration batches are disjoint for every index.

Not here: prefetching in worker processes (loading/granted_loader.py), files (reader.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from holdfast.errors import InvalidRequestError
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.data.hashing import UInt64s, gaussian, key, keys, mix
from holdfast.recsys.data.skew import ROWS_MAX, Skew, draw_ranks, quantiles

# B samples, D dense features, T tables, P pairs of tables

DENSE_FEATURES = 13

# the fourth word of the Philox counter: three streams of batches that never meet
_TRAINING, _HELD_OUT, _CALIBRATION = 0, 1, 2
_CALIBRATION_SAMPLES = 8192

# share of the teacher's standard deviation by source; their squares sum to one
_ROWS_SHARE, _PAIRS_SHARE, _DENSE_SHARE = 0.8, 0.36, 0.48
# standard deviation of the log-odds: gives a best possible AUC near 0.82 at 25 % clicks
_LOG_ODDS_STD = 1.55
_CLICK_RATE = 0.25
# rank at which a row's effect has faded to 0.7: what is rarely seen can hardly be learnt
_FADE_RANK = 2048.0

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class ClickStream(Dataset[Batch]):
    """Batches by index: ``stream[i]`` depends on the settings, the seed and i alone.

    ``samples`` ends the stream (the last batch may be short); None goes on for ever.

    >>> stream = ClickStream([100, 50], batch_size=4, seed=1, samples=10)
    >>> len(stream), len(stream[2]), tuple(stream[0].ids.shape)
    (3, 2, (4, 2))
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        *,
        batch_size: int,
        seed: int = 0,
        skew: float | Skew = 1.05,
        samples: int | None = None,
    ) -> None:
        if not table_rows or min(table_rows) < 1 or max(table_rows) >= ROWS_MAX:
            raise InvalidRequestError(
                "a table's size is out of range",
                table_rows=list(table_rows),
                todo=f"give one or more tables of 1 to {ROWS_MAX - 1} rows",
            )
        if batch_size < 1 or (samples is not None and samples < 0):
            raise InvalidRequestError(
                "a stream's size is out of range", batch_size=batch_size, samples=samples
            )
        self.table_rows = tuple(int(rows) for rows in table_rows)
        self.batch_size = batch_size
        self.seed = seed
        self.skew = skew if isinstance(skew, Skew) else Skew(float(skew))
        self.samples = samples
        self._domain = _TRAINING
        self._philox_key = key(seed, 0)
        self._quantiles_TQ = np.stack([quantiles(rows, self.skew) for rows in self.table_rows])
        self._spread = _Spread(self.table_rows, seed)
        self._teacher = _Teacher(len(self.table_rows), seed)
        self._teacher.calibrate(*self._draw(0, _CALIBRATION, _CALIBRATION_SAMPLES)[:2])

    def __len__(self) -> int:
        if self.samples is None:
            raise TypeError("an endless click stream has no length; pass samples=")
        return -(-self.samples // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        size = self._size(index)
        dense, ranks, noise = self._draw(index, self._domain, size)
        labels = noise < self._teacher.probability(dense, ranks)
        return Batch(
            dense=torch.from_numpy(dense.astype(np.float32)),
            ids=torch.from_numpy(self._spread.ids(ranks)),
            labels=torch.from_numpy(labels.astype(np.float32)),
        )

    def probability(self, index: int) -> Floats:
        """The true click probability of each sample of a batch: what a perfect model predicts."""
        dense, ranks, _ = self._draw(index, self._domain, self._size(index))
        return self._teacher.probability(dense, ranks)

    def heldout(self, batches: int) -> ClickStream:
        """As many batches of the same world that training never sees, whatever its length."""
        other = object.__new__(ClickStream)
        other.__dict__.update(self.__dict__)
        other._domain = _HELD_OUT
        other.samples = batches * self.batch_size
        return other

    def _size(self, index: int) -> int:
        if index < 0:
            raise IndexError(f"batches count from 0, not {index}")
        if self.samples is None:
            return self.batch_size
        size = min(self.batch_size, self.samples - index * self.batch_size)
        if size <= 0:
            raise IndexError(f"the stream has {len(self)} batches, asked for {index}")
        return size

    def _draw(self, index: int, domain: int, size: int) -> tuple[Floats, Ints, Floats]:
        """The dense features, row ranks and label noise of a batch."""
        tables = len(self.table_rows)
        philox = np.random.Philox(
            key=np.array([self._philox_key, index], dtype=np.uint64),
            counter=np.array([0, 0, 0, domain], dtype=np.uint64),
        )
        bits = np.asarray(philox.random_raw(size * (tables + DENSE_FEATURES + 1)))
        bits = bits.reshape(size, -1)
        dense = gaussian(bits[:, tables : tables + DENSE_FEATURES])
        ranks = draw_ranks(bits[:, :tables], self._quantiles_TQ)
        noise = (bits[:, -1] >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return dense, ranks, noise


class _Spread:
    """Where a rank lies in its table: an affine bijection, so that hot rows lie far apart."""

    def __init__(self, table_rows: Sequence[int], seed: int) -> None:
        self._rows_T = np.array(table_rows, dtype=np.int64)
        factors, shifts = zip(
            *(_affine(rows, key(seed, 1, table)) for table, rows in enumerate(table_rows)),
            strict=True,
        )
        self._factor_T = np.array(factors, dtype=np.int64)
        self._shift_T = np.array(shifts, dtype=np.int64)

    def ids(self, rank_BT: Ints) -> Ints:
        return (rank_BT * self._factor_T + self._shift_T) % self._rows_T


def _affine(rows: int, bits: int) -> tuple[int, int]:
    """A factor coprime to the rows and a shift: rank * factor + shift (mod rows) is a bijection.

    The factor starts near the golden section of the rows: neighbours in rank end far apart.
    """
    factor = int(rows * 0.6180339887498949) + bits % max(1, rows // 64)
    while math.gcd(factor, rows) != 1:
        factor += 1
    return factor % rows if rows > 1 else 0, (bits >> 32) % rows


class _Teacher:
    """The hidden truth: log-odds of a click as a function of a sample's dense values and ranks."""

    def __init__(self, tables: int, seed: int) -> None:
        self._effect_keys_T = keys(tables, seed, 2)
        # every table counts, some three times as much as others
        self._weight_T = 0.5 + (keys(tables, seed, 3) >> np.uint64(11)) * 2.0**-53
        order = np.argsort(keys(tables, seed, 4), kind="stable")
        pairs = tables // 3
        self._left_P, self._right_P = order[:pairs], order[pairs : 2 * pairs]
        self._factor_keys_T = keys(tables, seed, 5)
        self._dense_weight_D = gaussian(keys(DENSE_FEATURES, seed, 6))
        self._parts: list[tuple[float, float]] = []  # mean and scale of each
        self._bias = 0.0

    def calibrate(self, dense_BD: Floats, rank_BT: Ints) -> None:
        """Fix the scale of every part and the bias on a sample, so that AUC and clicks are as set.

        The constants are rounded: a last bit that differs between platforms disappears.
        """
        self._parts = []
        shares = (_ROWS_SHARE, _PAIRS_SHARE, _DENSE_SHARE)
        for share, part in zip(shares, self._scores(dense_BD, rank_BT), strict=True):
            std = float(part.std())
            scale = _LOG_ODDS_STD * share / std if std > 1e-9 else 0.0
            self._parts.append((round(float(part.mean()), 6), round(scale, 6)))
        low, high = -10.0, 10.0
        for _ in range(30):
            self._bias = round((low + high) / 2, 6)
            rate = float(self.probability(dense_BD, rank_BT).mean())
            low, high = (self._bias, high) if rate < _CLICK_RATE else (low, self._bias)

    def probability(self, dense_BD: Floats, rank_BT: Ints) -> Floats:
        log_odds = np.full(len(dense_BD), self._bias)
        for part, (mean, scale) in zip(self._scores(dense_BD, rank_BT), self._parts, strict=True):
            log_odds += (part - mean) * scale
        return np.asarray(1.0 / (1.0 + np.exp(-log_odds)))

    def _scores(self, dense_BD: Floats, rank_BT: Ints) -> tuple[Floats, Floats, Floats]:
        fade_BT = 1.0 / np.sqrt(1.0 + rank_BT / _FADE_RANK)
        effect_BT = gaussian(_hash(rank_BT, self._effect_keys_T)) * fade_BT
        sides = [
            gaussian(_hash(rank_BT[:, side], self._factor_keys_T[side])) * fade_BT[:, side]
            for side in (self._left_P, self._right_P)
        ]
        rows_B = np.asarray((effect_BT * self._weight_T).sum(axis=1))
        pairs_B = np.asarray((sides[0] * sides[1]).sum(axis=1))
        dense_B = np.asarray((dense_BD * self._dense_weight_D).sum(axis=1))
        return rows_B, pairs_B, dense_B


def _hash(rank_BT: Ints, key_T: UInt64s) -> UInt64s:
    return mix(rank_BT.astype(np.uint64) ^ key_T)


class ClickReader:
    """Reads a stream in order and knows where it is: the reader's state is one position.

    >>> reader = ClickReader(ClickStream([10], batch_size=2, samples=6))
    >>> _ = next(reader)
    >>> reader.state_dict()
    {'batch': 1, 'batch_size': 2, 'seed': 0}
    """

    def __init__(self, stream: ClickStream, *, start: int = 0) -> None:
        self.stream = stream
        self._batch = start

    def __len__(self) -> int:
        return len(self.stream)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            batch = self.stream[self._batch]
        except IndexError:
            raise StopIteration from None
        self._batch += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The number of batches read, and what tells this stream from another."""
        return {
            "batch": self._batch,
            "batch_size": self.stream.batch_size,
            "seed": self.stream.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches a saved state counts.

        Raises:
            InvalidRequestError: the state is of another stream: samples would repeat or be missed.
        """
        mine = self.state_dict()
        if any(state.get(name) != mine[name] for name in ("batch_size", "seed")):
            raise InvalidRequestError(
                "the reader's state is of another stream",
                saved=dict(state),
                stream={name: mine[name] for name in ("batch_size", "seed")},
                todo="build the stream with the settings the run started with",
            )
        batch = state.get("batch")
        if not isinstance(batch, int) or batch < 0:
            raise InvalidRequestError("the reader's state has no position", saved=dict(state))
        self._batch = batch
