"""The data side of a checkpoint: a loader that reads up to the next checkpoint and no further.

A prefetching loader is ahead of the trainer: some batches are read but not trained on when the
checkpoint is taken. So the checkpointer *grants* batches (Check-N-Run section 3.4): at the start,
after resuming and after each checkpoint it says how many batches to read until the next one. When
the trainer has used them none is in flight, and the reader's state and the model's state belong to
the same sample.

    checkpointer --grant(n)--> GrantedLoader -> sampler (this process) -> workers -> batches
                 <-state_dict--

Invariants:
- The order of batches depends on the dataset, the seed and the epoch, never on the grants or on
  the number of workers.
- The state counts the batches handed out, so a save in mid-interval repeats and skips nothing.
- Global random state is left alone: how often a run is checkpointed does not change its training.

Not here: when to checkpoint (checkpoint/planning/bases.py, checkpoint/checkpointer.py); datasets
(recsys/).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from holdfast.errors import InvalidRequestError

# N positions in an epoch

_FEISTEL_ROUNDS = 6


def shuffled(
    positions_N: npt.NDArray[np.int64], *, size: int, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    """Where each position of an epoch lies in that epoch's random order of ``range(size)``.

    A bijection computed position by position (a Feistel network, walked until it lands below the
    size), so nothing as long as the dataset is ever in memory.

    >>> sorted(shuffled(np.arange(10), size=10, seed=1, epoch=0).tolist()) == list(range(10))
    True
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    round_keys = np.random.SeedSequence([seed, epoch]).generate_state(_FEISTEL_ROUNDS, np.uint64)
    places = positions_N.astype(np.uint64)
    outside = np.ones(len(places), dtype=np.bool_)
    while outside.any():
        left, right = places[outside] >> half, places[outside] & mask
        for round_key in round_keys:
            mixed = (right ^ round_key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        places[outside] = (left << half) | right
        outside = places >= np.uint64(size)
    return places.astype(np.int64)


@dataclass(frozen=True, slots=True)
class _Order:
    """Which samples each batch holds, for the batches of all epochs in one row."""

    samples: int | None  # None: an endless dataset
    batch_size: int | None  # None: the dataset's items are batches
    is_shuffled: bool
    seed: int

    @property
    def batches_per_epoch(self) -> int | None:
        return None if self.samples is None else -(-self.samples // (self.batch_size or 1))

    def indices(self, batch: int) -> list[int]:
        per_epoch, size = self.batches_per_epoch, self.batch_size or 1
        epoch, batch = (0, batch) if per_epoch is None else divmod(batch, per_epoch)
        stop = (batch + 1) * size
        if self.samples is not None:
            stop = min(stop, self.samples)
        positions = np.arange(batch * size, stop)
        if self.is_shuffled and self.samples is not None:
            positions = shuffled(positions, size=self.samples, seed=self.seed, epoch=epoch)
        return positions.tolist()


@dataclass(slots=True)
class _Cursor:
    """How far the loader is; shared with the sampler, so that a grant reaches it at once."""

    yielded: int
    sampled: int
    limit: int = sys.maxsize  # no batch from here on before the next grant
    end: int = sys.maxsize


class _GrantedSampler(Sampler[Any]):
    """Names the batches to read, up to the grant; torch runs it in the main process."""

    def __init__(self, cursor: _Cursor, order: _Order) -> None:
        self._cursor = cursor
        self._order = order

    def __iter__(self) -> Iterator[Any]:
        cursor = self._cursor
        while cursor.sampled < min(cursor.limit, cursor.end):
            indices = self._order.indices(cursor.sampled)
            cursor.sampled += 1
            yield indices[0] if self._order.batch_size is None else indices


class GrantedLoader:
    """A prefetching loader over a map-style dataset that never reads past the granted batches.

    Without ``batch_size`` an item of the dataset is a batch. ``batches`` is the number of batches
    in all, across epochs; without it an iteration is one epoch, and the next iteration the next
    epoch, in another order if ``shuffle``. Until the first grant reading is unlimited.

    Workers start with ``start_method`` (the platform's default if None) at the first batch and
    stay until ``close``, or until the loader is no longer used.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        batches: int | None = None,
        start: int = 0,
        num_workers: int = 0,
        prefetch: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        start_method: str | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise InvalidRequestError(
                "a granted loader needs a dataset with an index",
                dataset=type(dataset).__name__,
                todo="use torchdata's StatefulDataLoader for an iterable dataset",
            )
        if (
            min(start, seed, num_workers) < 0
            or min(prefetch, 1 if batch_size is None else batch_size) < 1
        ):
            raise InvalidRequestError(
                "a loader's setting is out of range",
                start=start,
                seed=seed,
                num_workers=num_workers,
                prefetch=prefetch,
                batch_size=batch_size,
            )
        samples = _length(dataset)
        if samples == 0 or (samples is None and shuffle):
            raise InvalidRequestError(
                "a dataset without an end cannot be shuffled, nor an empty one read",
                samples=samples,
                shuffle=shuffle,
            )
        self._order = _Order(samples, batch_size, shuffle, seed)
        self._cursor = _Cursor(yielded=start, sampled=start)
        self._batches = batches
        self._granted: int | None = None
        self._pass: Iterator[Any] | None = None
        self._queues: weakref.finalize[..., Any] | None = None
        sampler = _GrantedSampler(self._cursor, self._order)
        self._inner: DataLoader[Any] | None = DataLoader(
            dataset,
            batch_size=1 if batch_size else None,
            sampler=None if batch_size else sampler,
            batch_sampler=sampler if batch_size else None,
            num_workers=num_workers,
            prefetch_factor=prefetch if num_workers else None,
            persistent_workers=num_workers > 0,
            collate_fn=collate_fn,
            multiprocessing_context=start_method if num_workers else None,
            # its own generator: torch would draw from the global one at every pass, so a grant
            # more or less would change the training
            generator=torch.Generator().manual_seed(seed),
        )

    @property
    def in_flight(self) -> int:
        """Batches asked of the workers and not handed out yet; 0 when a grant is used up."""
        return self._cursor.sampled - self._cursor.yielded

    @property
    def position(self) -> int:
        """Batches handed out, over all epochs."""
        return self._cursor.yielded

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._cursor.yielded // (self._order.batches_per_epoch or sys.maxsize)

    def __len__(self) -> int:
        length = self._batches if self._batches is not None else self._order.batches_per_epoch
        if length is None:
            raise TypeError("an endless loader has no length; pass batches=")
        return length

    def grant(self, batches: int | None) -> None:
        """Allow so many batches from here on; None lifts the limit.

        A grant replaces the one before it. Batches already in flight stay in flight, also where
        the new grant ends before them: they are handed out under the next one.

        Raises:
            InvalidRequestError: less than one batch.
        """
        if batches is not None and batches < 1:
            raise InvalidRequestError("a grant is at least one batch", batches=batches)
        self._granted = batches
        self._cursor.limit = sys.maxsize if batches is None else self._cursor.yielded + batches

    def state_dict(self) -> dict[str, Any]:
        """The number of batches handed out, and what fixes their order."""
        return {
            "batches": self._cursor.yielded,
            "samples": self._order.samples,
            "batch_size": self._order.batch_size,
            "shuffle": self._order.is_shuffled,
            "seed": self._order.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batches a saved state counts; unlimited until the next grant.

        Raises:
            InvalidRequestError: the state is of another order: samples would repeat or be missed.
        """
        mine = self.state_dict()
        differing = sorted(n for n in mine if n != "batches" and state.get(n, ...) != mine[n])
        batches = state.get("batches")
        if differing or not isinstance(batches, int) or batches < 0:
            raise InvalidRequestError(
                "the loader's state is of another order of samples",
                differing=differing,
                saved=dict(state),
                now=mine,
                todo="build the loader with the settings the run started with",
            )
        self._drop_pass()
        self._cursor.yielded = self._cursor.sampled = batches
        self.grant(None)

    def __iter__(self) -> Iterator[Any]:
        if self._inner is None:
            raise InvalidRequestError("the loader is closed", todo="build a new one")
        per_epoch = self._order.batches_per_epoch
        if self._batches is not None:
            end = self._batches
        elif per_epoch is not None:
            end = (self._cursor.yielded // per_epoch + 1) * per_epoch
        else:
            end = sys.maxsize
        return _Batches(self, end)

    def close(self) -> None:
        """Stop the workers; the state stays readable."""
        self._drop_pass()
        inner, self._inner = self._inner, None
        # torch's iterator stops them when it goes, but an error that was raised through it keeps it
        stop = getattr(getattr(inner, "_iterator", None), "_shutdown_workers", None)
        if stop is not None:
            stop()
        if self._queues is not None:
            self._queues.detach()

    def _drop_pass(self) -> None:
        """Forget what is in flight; torch discards it when the next pass starts."""
        self._pass = None
        self._cursor.sampled = self._cursor.yielded

    def _keep_queues(self) -> None:
        """See to it that the workers hear when they shall end.

        Queues close when they become garbage. The garbage collector gets to them before it gets to
        torch's iterator, which then cannot tell its workers to end, and waits 5 s for each. So the
        queues are held from outside for as long as this loader lives.
        """
        queues = getattr(self._pass, "_index_queues", None)
        if queues and self._queues is None:
            self._queues = weakref.finalize(self, list, tuple(queues))
            self._queues.atexit = False

    def _next(self, end: int) -> Any:
        cursor = self._cursor
        while True:
            if cursor.yielded >= end:
                raise StopIteration
            if self._inner is None:
                raise InvalidRequestError("the loader is closed", todo="build a new one")
            if cursor.yielded >= cursor.limit:
                raise InvalidRequestError(
                    "the granted batches are used up",
                    granted=self._granted,
                    position=cursor.yielded,
                    todo="call ck.step() after every batch",
                )
            if self._pass is None:
                cursor.end = end
                self._pass = iter(self._inner)
                self._keep_queues()
            try:
                batch = next(self._pass)
            except StopIteration:
                # the sampler had met the old limit: the new grant needs a new pass
                self._pass = None
                continue
            except BaseException:
                self._drop_pass()
                raise
            cursor.yielded += 1
            return batch


class _Batches:
    """One iteration. Not a generator: one that has raised is finished, a loader is not."""

    def __init__(self, loader: GrantedLoader, end: int) -> None:
        self._loader = loader
        self._end = end

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._loader._next(self._end)


def _length(dataset: Dataset[Any]) -> int | None:
    """The dataset's length; None if it says that it has none."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
