"""Bring one loader to a place: the beginning of an epoch, or behind one of its batches.

A loader with ``state_dict`` (torchdata's StatefulDataLoader, GrantedLoader) goes there by its own
state. Any other loader replays the epoch: its random generators are set as they were when the
epoch began, it is iterated anew, and the trained batches are read again and dropped. That is exact
for every loader that reads the same when its generators are the same, and costs as much as reading
those batches.

Invariant: except on the way to a place, nothing is drawn from a generator that the loader alone
would not draw.

Not here: which place (resumable_reader.py), how it is stored (reader_state.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from holdfast.errors import InvalidRequestError
from holdfast.loading.generators import (
    find_generators,
    load_rng_state,
    load_states,
    rng_state,
    states_of,
)
from holdfast.loading.reader_state import Resume
from holdfast.loading.stateful import is_stateful
from holdfast.loading.worker_generators import generators_in_state

_FINISHED = "_iterator_finished"  # torchdata's: a finished iterator draws seeds for two epochs
_REPORT_S = 2.0

Progress = Callable[[int, float], None]  # batches read again so far, seconds


class LoaderPlace:
    """One loader, and how to iterate it from a place."""

    def __init__(self, loader: Any, iterate: Callable[[], Iterator[Any]]) -> None:
        """``iterate`` starts a pass over the loader."""
        self.loader = loader
        self.iterate_itself = iterate
        self.is_stateful = is_stateful(loader)
        self.is_torch = isinstance(loader, DataLoader)
        self._at_end: Mapping[str, Any] | None = None  # generators of a loader placed at an end

    def length(self) -> int | None:
        """Batches of an epoch, where the loader says it."""
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

    def generators(self) -> dict[str, Any]:
        """Where all generators stand that reading may draw from."""
        return {"rng": rng_state(), "own": self.own_generators()}

    def own_generators(self) -> dict[str, Any]:
        """Where the generators stand that the loader and its parts own."""
        return states_of(find_generators(self.loader))

    def state(self) -> tuple[Any, Mapping[str, Any]]:
        """Where a stateful loader stands: its own state, and its generators."""
        return self.loader.state_dict(), self.own_generators()

    def iterate(self) -> Iterator[Any]:
        """Start a pass here."""
        with generators_in_state(self.loader):
            return self.iterate_itself()

    def begin_epoch(self) -> Iterator[Any]:
        """Start the next epoch."""
        own, self._at_end = self._at_end, None
        return self.iterate() if own is None else self._iterate_behind_end(own)

    def forget(self) -> None:
        """The loader will be placed anew."""
        self._at_end = None

    def go_between_epochs(
        self, resume: Resume, *, own: Mapping[str, Any], now: Mapping[str, Any]
    ) -> None:
        """Go to where no epoch is running: before the first one, or behind one that is over."""
        self._warm_workers(resume.epoch + resume.is_over)
        if resume.loader is not None:
            self._load(resume.loader, is_over=resume.is_over)
            self._at_end = own
        load_states(find_generators(self.loader), own)
        load_rng_state(now)

    def go_into_epoch(
        self, resume: Resume, *, now: Mapping[str, Any], on_progress: Progress
    ) -> Iterator[Any]:
        """Go behind a batch of an epoch; the pass that goes on from there.

        Raises:
            InvalidRequestError: the epoch has fewer batches than were trained.
        """
        generators = find_generators(self.loader)
        if resume.loader is not None:
            self._load(resume.loader, is_over=False)
            inner = self.iterate()
        else:
            start = resume.start or {}
            self._warm_workers(resume.epoch)
            load_states(generators, start.get("own", {}))
            if "rng" in start:
                load_rng_state(start["rng"])
            inner = self.iterate()
            _skip(inner, resume.batches, on_progress)
        if resume.own is not None:
            load_states(generators, resume.own)
        load_rng_state(now)
        return inner

    def _load(self, state: Any, *, is_over: bool) -> None:
        if is_over and isinstance(state, dict) and _FINISHED in state:
            state = {**state, _FINISHED: False}
        self.loader.load_state_dict(state)

    def _warm_workers(self, epoch: int) -> None:
        """Start persistent workers: only the first epoch of a process draws their seed."""
        is_persistent = getattr(self.loader, "persistent_workers", False)
        if is_persistent and epoch and getattr(self.loader, "_iterator", ...) is None:
            kept = self.generators()
            self.iterate()
            load_rng_state(kept["rng"])
            load_states(find_generators(self.loader), kept["own"])

    def _iterate_behind_end(self, own: Mapping[str, Any]) -> Iterator[Any]:
        """Start a pass of a loader whose state was taken at an end that it had not noticed."""
        rng = rng_state()
        inner = self.iterate()
        if self.is_torch:  # what it draws now it had drawn for the epoch that is over
            load_rng_state(rng)
        ends = object()
        first = next(inner, ends)
        if first is not ends:
            return chain(first, inner)
        load_rng_state(rng)
        load_states(find_generators(self.loader), own)
        return self.iterate()


def chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """One batch, then the rest."""
    yield first
    yield from rest


def _skip(inner: Iterator[Any], batches: int, on_progress: Progress) -> None:
    """Read batches and drop them."""
    started = reported = time.monotonic()
    for done in range(batches):
        try:
            next(inner)
        except StopIteration as error:
            raise InvalidRequestError(
                "the loader has fewer batches than were trained of this epoch",
                trained=batches,
                found=done,
                todo="resume with the data set and the batch size the run started with",
            ) from error
        if (time.monotonic() - reported) > _REPORT_S:
            reported = time.monotonic()
            on_progress(done + 1, reported - started)
    on_progress(batches, time.monotonic() - started)


def set_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a loader, its samplers and its data set, where they have one."""
    parts = [loader] + [
        getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset")
    ]
    parts.append(getattr(parts[2], "sampler", None))
    done: list[Any] = []
    for part in parts:
        call = getattr(part, "set_epoch", None)
        if callable(call) and not any(part is other for other in done):
            done.append(part)
            call(epoch)
