"""Reads batches from files, in order, and knows where it is.

    source (criteo.py, parquet.py) -> blocks of parsed samples -> batches

A source parses; the reader cuts blocks into batches (across blocks and files), maps categories to
row ids and dense values to log(1 + max(x, 0)), and keeps the position behind the last sample it
gave out. It is an ``IterableDataset``: use it as it is, or in torchdata's ``StatefulDataLoader``
with ``batch_size=None`` and any number of workers, each of which reads its share.

Invariants:
- The state counts the samples given out, not those parsed ahead; resuming neither repeats nor
  skips one.
- Memory is bounded by a block, never by a file.

Not here: parsing, and prefetching (torchdata, or loading/granted_loader.py for map-style datasets).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from holdfast.errors import InvalidRequestError
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.data.hashing import UInt64s
from holdfast.recsys.data.vocabulary import IdMap

# N samples, D dense features, T categorical features

OnBad = Literal["raise", "skip"]


@dataclass(frozen=True, slots=True)
class Position:
    """Behind a sample: the file, the source's own offset in it, and the rows passed there."""

    file: int = 0
    offset: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True)
class Shard:
    """One reader's share: of every ``count`` groups of ``group`` rows, the one at ``index``."""

    index: int = 0
    count: int = 1
    group: int = 1


@dataclass(frozen=True, slots=True)
class Block:
    """Parsed samples of one file, where each ends, and how many bad ones came before it."""

    labels_N: npt.NDArray[np.float32]
    dense_ND: npt.NDArray[np.float64]  # as in the file; 0 where missing
    codes_NT: UInt64s  # 0 where missing, value + 1 otherwise
    file: int
    offset_N: npt.NDArray[np.int64]
    row_N: npt.NDArray[np.int64]
    skipped_N: npt.NDArray[np.int64]  # bad rows of this block before each sample
    skipped: int = 0  # bad rows of this block in all


class Source(Protocol):
    """Files that can be parsed from any position on."""

    @property
    def files(self) -> tuple[str, ...]: ...

    def blocks(self, start: Position, shard: Shard) -> Iterator[Block]: ...


class FileReader(IterableDataset[Batch]):
    """Batches from a source, with a position that can be saved.

    Iterating goes on from the position and stops at the end of the files; the next iteration
    starts over (``epoch`` counts). The last batch of an epoch may be short unless ``drop_last``.
    """

    def __init__(
        self, source: Source, *, batch_size: int, ids: IdMap, drop_last: bool = False
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise InvalidRequestError("a batch has at least one sample", batch_size=batch_size)
        self._source = source
        self._batch_size = batch_size
        self._ids = ids
        self._drop_last = drop_last
        self._position = Position()
        self._saved_shard: Shard | None = None
        self.epoch = 0
        self.skipped = 0  # bad rows passed so far, over all epochs

    def __iter__(self) -> Iterator[Batch]:
        shard = self._shard()
        if self._saved_shard not in (None, shard):
            raise InvalidRequestError(
                "the reader's state is of another share of the samples",
                saved=self._saved_shard,
                now=shard,
                todo="resume with as many workers and the batch size it was saved with",
            )
        self._saved_shard = shard
        parts: list[Batch] = []
        missing = self._batch_size
        skipped, end = self.skipped, self._position
        for block in self._source.blocks(self._position, shard):
            start, samples = 0, len(block.labels_N)
            while start < samples:
                stop = min(start + missing, samples)
                parts.append(self._encode(block, start, stop))
                missing -= stop - start
                if not missing:
                    self._position = _behind(block, stop - 1)
                    self.skipped = skipped + int(block.skipped_N[stop - 1])
                    yield _join(parts)
                    parts, missing = [], self._batch_size
                start = stop
            if samples:
                end = _behind(block, samples - 1)
            skipped += block.skipped
        if parts and not self._drop_last:
            self._position, self.skipped = end, skipped
            yield _join(parts)
        self._position, self.skipped = Position(), skipped
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Behind the last sample given out: file, offset in it (bytes; row group), row."""
        shard = self._saved_shard or self._shard()
        return {
            "file": self._position.file,
            "offset": self._position.offset,
            "row": self._position.row,
            "epoch": self.epoch,
            "skipped": self.skipped,
            "shard": [shard.index, shard.count, shard.group],
            "files": len(self._source.files),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the last sample a saved state counts.

        Raises:
            InvalidRequestError: the state is of other files, or not a reader's state.
        """
        try:
            values = [int(state[n]) for n in ("file", "offset", "row", "epoch", "skipped")]
            shard = Shard(*(int(part) for part in state["shard"]))
            files = int(state["files"])
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError("not a reader's state", saved=dict(state)) from error
        if files != len(self._source.files) or min(values) < 0 or values[0] >= files:
            raise InvalidRequestError(
                "the reader's state is of other files",
                saved=dict(state),
                files=len(self._source.files),
                todo="resume with the files the run started with, in the same order",
            )
        self._position = Position(*values[:3])
        self.epoch, self.skipped = values[3:]
        self._saved_shard = shard

    def _shard(self) -> Shard:
        worker = get_worker_info()
        # groups as long as a batch: a worker's batches stay whole lines of the file
        if worker is None:
            return Shard(0, 1, self._batch_size)
        return Shard(worker.id, worker.num_workers, self._batch_size)

    def _encode(self, block: Block, start: int, stop: int) -> Batch:
        dense = np.log1p(np.maximum(block.dense_ND[start:stop], 0)).astype(np.float32)
        return Batch(
            dense=torch.from_numpy(dense),
            ids=torch.from_numpy(self._ids.ids(block.codes_NT[start:stop])),
            labels=torch.from_numpy(block.labels_N[start:stop].copy()),
        )


def read_codes(source: Source) -> Iterator[UInt64s]:
    """Every sample's codes, block by block: what a vocabulary is built from."""
    for block in source.blocks(Position(), Shard()):
        yield block.codes_NT


def _behind(block: Block, sample: int) -> Position:
    return Position(block.file, int(block.offset_N[sample]), int(block.row_N[sample]))


def _join(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    return Batch(
        dense=torch.cat([part.dense for part in parts]),
        ids=torch.cat([part.ids for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
    )
