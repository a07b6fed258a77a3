"""The reader of a checkpointer: given when it is made, or named by the first ``epochs`` call.

    reader=DataLoader       -> followed wherever it is iterated (resumable_reader.py)
    reader=anything stateful -> its own state_dict, as it gives it
    epochs(loader, n)       -> any iterable, placed after a resume

Invariants:
- A state that was loaded before its loader is known waits for it, and is given once.
- Telling that a run may read on elsewhere never stops training.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from holdfast import events
from holdfast.errors import HoldfastWarning, InvalidRequestError
from holdfast.loading.reader_state import is_resumable
from holdfast.loading.resumable_reader import ResumableReader
from holdfast.loading.stateful import READER, check_stateful, is_stateful


class ReaderSlot:
    """Holds one reader; is itself what a checkpoint stores and loads."""

    def __init__(self, reader: Any, log: events.EventLog) -> None:
        """``reader``: None, a ResumableReader, a DataLoader, or anything with ``state_dict``.

        Raises:
            InvalidRequestError: it has no ``state_dict``; says how else it is placed.
        """
        self._log = log
        self._plain: Any = None
        self._resumable: ResumableReader | None = None
        self._late: Mapping[str, Any] | None = None  # loaded before its loader was named
        self._loaded_step: int | None = None
        self._warned: set[str] = set()
        if isinstance(reader, ResumableReader):
            self._resumable = reader
            reader.log = log
        elif isinstance(reader, DataLoader):
            self._resumable = ResumableReader(reader, log=log)
            self._resumable.intercept()
        elif reader is not None:
            if not is_stateful(reader) and hasattr(reader, "__iter__"):
                raise InvalidRequestError(
                    "reader has no state_dict()",
                    type=type(reader).__name__,
                    todo="leave reader= out and iterate ck.epochs(loader, n), which places any "
                    "iterable; or give it state_dict() and load_state_dict()",
                )
            check_stateful(READER, reader)
            self._plain = reader

    @property
    def is_used(self) -> bool:
        """Whether a checkpoint has something to store here."""
        return self._resumable is not None or self._plain is not None

    @property
    def epoch(self) -> int:
        """The epoch that is trained, from 0."""
        return 0 if self._resumable is None else self._resumable.epoch

    def epochs(
        self, loader: Iterable[Any], count: int, *, batches_per_step: int | None
    ) -> Iterator[Any]:
        """See ``Checkpointer.epochs``."""
        if count < 0:
            raise InvalidRequestError("a number of epochs is not negative", epochs=count)
        reader = self._resumable
        if reader is None or (reader.loader is not loader and reader is not loader):
            if reader is not None or self._plain not in (None, loader):
                raise InvalidRequestError(
                    "a checkpointer follows one loader",
                    following=type(self._plain or getattr(reader, "loader", None)).__name__,
                    given=type(loader).__name__,
                    todo="pass the same object to reader= and to every ck.epochs()",
                )
            reader = ResumableReader(loader, batches_per_step=batches_per_step, log=self._log)
            if self._late is not None:
                reader.load_state_dict(self._late)
            elif self._loaded_step:
                self._warn(
                    f"the checkpoint of step {self._loaded_step} does not say where its loader "
                    "stood: reading starts at epoch 0",
                    "name the loader from the first step on, by reader= or ck.epochs()",
                )
            self._resumable, self._plain, self._late = reader, None, None
        elif batches_per_step is not None:
            reader.set_batches_per_step(batches_per_step)
        return reader.epochs(count)

    def trained(self) -> None:
        """A step was trained."""
        if self._resumable is not None:
            self._resumable.trained()
        elif self._late is not None and self._plain is None:
            self._warn(
                "the checkpoint knows where its loader stood, and no loader was named since",
                "iterate ck.epochs(loader, n), or pass reader=loader",
            )

    def loaded(self, step: int) -> None:
        """A checkpoint was loaded, with a reader's state or without."""
        self._loaded_step = step

    def state_dict(self) -> dict[str, Any]:
        """Where training is."""
        if self._resumable is None:
            state: dict[str, Any] = self._plain.state_dict()
            return state
        state = self._resumable.state_dict()
        if self._resumable.is_guess:
            self._warn(
                "several batches were read before the first step: whether they went into it or "
                "were read ahead is known at the second, and this checkpoint was taken before",
                "pass batches_per_step= to ck.epochs()",
            )
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state; it waits where the loader is not known yet."""
        if self._resumable is not None:
            self._resumable.load_state_dict(state)
            return
        self._late = state
        if self._plain is not None:
            own = state["loader"] if is_resumable(state) else state
            if own is not None:
                self._plain.load_state_dict(own)

    def __getattr__(self, name: str) -> Any:
        # A checkpoint of another number of ranks asks whether the reader can take it.
        if name == "load_rank_states":
            held = self.__dict__.get("_resumable") or self.__dict__.get("_plain")
            if hasattr(held, name):
                return getattr(held, name)
        raise AttributeError(name)

    def close(self) -> None:
        """Let go of the loader: its workers should not live as long as a checkpointer."""
        if self._resumable is not None:
            self._resumable.release()
        self._plain = self._resumable = self._late = None

    def _warn(self, reason: str, todo: str) -> None:
        if reason in self._warned:
            return
        self._warned.add(reason)
        self._log.emit(events.ReaderNotice(reason=reason, todo=todo))
        # A filter may turn warnings into errors; training goes on all the same.
        with contextlib.suppress(HoldfastWarning):
            warnings.warn(f"{reason}; {todo}", HoldfastWarning, stacklevel=4)
