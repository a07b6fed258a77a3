"""The ranks that train one model and save it together: who they are, and what they tell each other
while training stands still. The one module that knows torch.distributed.

Messages are numbers and bytes in CPU tensors over a gloo group of our own, whatever training itself
uses; nothing is pickled. They are exchanged on the training thread alone, all ranks in the same
order; what background threads tell each other goes through a store (mailbox.py).

Invariants:
- A rank that is lost or silent ends an exchange with an error, never with an endless wait.
- Rank 0 coordinates: it alone decides and commits.

Not here: what is agreed on (agreement.py), the commit (rank_commit.py).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from holdfast.checkpoint.ranks.mailbox import Mailbox
from holdfast.errors import HoldfastError, InvalidRequestError, UnavailableError

T = TypeVar("T")
_FAREWELL_S_MAX = 30.0
_FAREWELL_POLL_S = 0.01
_TIMES_WAITED = 3  # gloo waits for its timeout at more than one place while it connects
_CONNECT_S = 10.0


def end_within(act: Callable[[], T], *, seconds: float) -> T:
    """What ``act`` returns, if it ends in time; else it is left behind in a thread.

    gloo was seen to wait for minutes, whatever its timeout, where a peer was lost while both
    connected.

    >>> end_within(lambda: 3, seconds=60)
    3

    Raises:
        TimeoutError: it did not.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    # A daemon, unlike those of a pool: a process must not wait for it in the end.
    threading.Thread(target=run, name="holdfast-connect", daemon=True).start()
    try:
        return outcome.result(seconds)
    except FutureTimeoutError:
        raise TimeoutError(f"no connection within {seconds:g} s") from None


class Ranks:
    """One rank's view of all of them."""

    def __init__(self, group: Any, *, timeout_s: float) -> None:
        """Collective: all ranks of the group make theirs together."""
        self.timeout_s = timeout_s
        members = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.size = len(members)
        # Held on to: rank 0 may serve it to all.
        self._store: Any = dist.distributed_c10d._get_default_store()
        store: Any = self._store
        with contextlib.suppress(AttributeError, RuntimeError):  # not every kind of store can
            # A connection of its own: a training collective must not wait for our polls.
            store = store.clone()
        store = dist.distributed_c10d.PrefixStore(_new_name(members), store)
        self.mailbox = Mailbox(store)
        # Not by new_group(): that counts groups, and ranks outside of this one count others.
        timeout = datetime.timedelta(seconds=timeout_s)
        make: Any = dist.ProcessGroupGloo
        self._gloo: Any = self._attempt(
            lambda: end_within(
                lambda: make(store, self.rank, self.size, timeout),
                seconds=_TIMES_WAITED * timeout_s + _CONNECT_S,
            )
        )

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides and commits."""
        return self.rank == 0

    def _attempt(self, talk: Callable[[], T]) -> T:
        try:
            return talk()
        except HoldfastError:
            raise
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise UnavailableError(
                "the ranks lost each other: one has died, or does not take part",
                rank=self.rank,
                ranks=self.size,
                timeout_s=self.timeout_s,
                error=str(error).splitlines()[0][:200] if str(error) else repr(error),
                todo="call save(), resume() and restore() on every rank, at the same step; "
                "restart the ranks that are gone",
            ) from error

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every rank, by rank; all give as many."""
        own = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._attempt(lambda: self._gloo.allgather([found], [own]).wait())
        return [one.tolist() for one in found]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, by rank."""
        sizes = [size for (size,) in self.gather_numbers([len(data)])]
        own = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        own[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._attempt(lambda: self._gloo.allgather([found], [own]).wait())
        return [one.numpy()[:size].tobytes() for one, size in zip(found, sizes, strict=True)]

    def broadcast(self, data: bytes | None) -> bytes:
        """What the coordinator says (the others pass None)."""
        size = torch.tensor([0 if data is None else len(data)], dtype=torch.int64, device="cpu")
        self._attempt(lambda: self._gloo.broadcast(size, 0).wait())
        body = torch.zeros(int(size.item()), dtype=torch.uint8, device="cpu")
        if data is not None:
            body[:] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        self._attempt(lambda: self._gloo.broadcast(body, 0).wait())
        return body.numpy().tobytes()

    def farewell(self, *, is_orderly: bool) -> None:
        """Leave; rank 0, which may serve the store, stays a while until the others have left."""
        with contextlib.suppress(UnavailableError):  # then they are gone already
            if not self.is_coordinator:
                self.mailbox.put(f"bye/{self.rank}", b"")
                return
            ends_at = time.monotonic() + min(self.timeout_s, _FAREWELL_S_MAX)
            left = set(range(1, self.size))
            while is_orderly and left and time.monotonic() < ends_at:
                left = {rank for rank in left if not self.mailbox.has(f"bye/{rank}")}
                time.sleep(_FAREWELL_POLL_S)

    def check_all(self, error: BaseException | None, doing: str) -> None:
        """All ranks tell whether they could; every one raises if one could not.

        Raises:
            HoldfastError: this rank's own error, or one that names the ranks that failed.
        """
        oks = [ok for (ok,) in self.gather_numbers([int(error is None)])]
        if error is not None:
            raise error
        failed = [rank for rank, ok in enumerate(oks) if not ok]
        if failed:
            raise UnavailableError(f"other ranks could not {doing}", ranks=failed)


_made: Counter[tuple[int, ...]] = Counter()


def _new_name(members: list[int]) -> str:
    """A name that these ranks have not met under before, the same on all of them."""
    key = tuple(members)
    _made[key] += 1
    short = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    # torchrun may keep the store when it starts all ranks again.
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"holdfast/{short}/{life}/{_made[key]}"


def find_ranks(wanted: Any, *, timeout_s: float) -> Ranks | None:
    """The ranks to save with: ``wanted`` None: all, where there are several; False: none; or a
    process group.

    Raises:
        InvalidRequestError: there are several processes, and they do not know each other.
    """
    if wanted is False:
        return None
    is_ready = dist.is_available() and dist.is_initialized()
    if wanted is None or wanted is True:
        if not is_ready:
            if wanted is True or int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise InvalidRequestError(
                    "there are several ranks, and torch.distributed is not initialised",
                    todo="call torch.distributed.init_process_group() before making the "
                    "Checkpointer, or pass ranks=False and give each process a url of its own",
                )
            return None
        wanted = dist.group.WORLD
    if dist.get_world_size(wanted) == 1:
        return None
    return Ranks(wanted, timeout_s=timeout_s)
