"""A cluster as its driver sees it: servers that are kept complete, workers that train on them.

    with Cluster(spec) as cluster:
        outcome = cluster.train("my.module:train", batches=range(1000), workers=2)

Invariants:
- After the ``with`` block no process is left.
- A worker that dies is replaced while there are batches left; one that fails by itself again and
  again ends the run with its error.

Not here: membership (coordinator.py), what a worker does (worker.py).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from holdfast import events
from holdfast.cluster.audit import Audit, audit, drain, read_table
from holdfast.cluster.client import Client
from holdfast.cluster.coordinator import Coordinator, Settings
from holdfast.cluster.engine import Engine, LocalEngine, Start
from holdfast.cluster.leases import Leases
from holdfast.cluster.message import Message
from holdfast.cluster.spec import ClusterSpec
from holdfast.errors import HoldfastError, InvalidRequestError

_RESTARTS_MAX = 8
_TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of workers did."""

    batches: int
    seconds: float
    workers_lost: int


class Cluster:
    """Servers with rows, and workers when there is something to train."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        engine: Engine | None = None,
        settings: Settings | None = None,
        log: events.EventLog | None = None,
    ) -> None:
        self.spec = spec
        self.settings = settings or Settings()
        self.log = log or events.EventLog()
        self._engine = engine or LocalEngine()
        self._token = secrets.token_hex(16)
        self._workers = 0
        self._lost_workers: list[int] = []
        self._has_rewound = threading.Event()
        self._coordinator = Coordinator(
            self._engine,
            spec,
            token=self._token,
            settings=self.settings,
            log=self.log,
            on_worker_lost=self._lost_workers.append,
            on_rewound=self._has_rewound.set,
            count_workers=lambda: self._workers,
        )

    def start(self) -> None:
        """Start the servers."""
        try:
            self._coordinator.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop every process."""
        self._coordinator.close()
        self._engine.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def coordinator(self) -> Coordinator:
        """Who keeps the servers complete."""
        return self._coordinator

    def connect(self) -> Client:
        """Take part as a worker in this process."""
        worker = self._workers
        self._workers += 1
        return Client(
            self.spec,
            worker=worker,
            token=self._token,
            get_view=self._coordinator.get_view,
            two_phase=self.settings.two_phase,
        )

    def wait_whole(self, timeout_s: float = 600.0) -> None:
        """Wait until no server lacks rows or parities."""
        self._coordinator.wait_whole(timeout_s)

    def audit(self) -> Audit:
        """Recompute every stripe; nobody may push meanwhile."""
        return audit(self.spec, self._coordinator.ask)

    def read(self, table: str) -> np.ndarray:
        """All records of a table, in the order of their ids; nobody may push meanwhile."""
        drain(self.spec, self._coordinator.ask)
        return read_table(self.spec, table, self._coordinator.ask)

    def stats(self) -> list[Mapping[str, Any]]:
        """What each server counted."""
        return [
            self._coordinator.ask(server, Message("stats")).meta
            for server in range(self.spec.servers)
        ]

    # Workers.

    def train(
        self,
        entry: str,
        args: Mapping[str, Any] | None = None,
        *,
        batches: range,
        workers: int,
        ahead_max: int | None = None,
        is_synchronous: bool = False,
        on_begin: Callable[[Leases], None] | None = None,
        on_tick: Callable[[Leases], None] | None = None,
    ) -> Outcome:
        """Run a training function in worker processes until every batch is trained.

        ``entry`` is ``"module:function"``; it is called with a Session and ``args``. Workers run
        freely, at most ``ahead_max`` batches ahead of the slowest, or synchronously in rounds of
        one batch each. ``on_begin`` is called once, before any worker starts: it may hold batches
        back. ``on_tick`` is called about fifty times a second, once all workers have started.

        With a second layer checkpoints are taken meanwhile; where more is lost than parity makes up
        for and everybody goes back to the last one, workers are started again.

        Raises:
            HoldfastError: rows are lost for good, or workers keep failing.
        """
        if workers < 1:
            raise InvalidRequestError("at least one worker must train", workers=workers)
        if is_synchronous and not self.settings.two_phase:
            raise InvalidRequestError("synchronous training needs two-phase commit")
        leases = self._coordinator.leases = Leases(
            batches, ahead_max=ahead_max, round_batches=workers if is_synchronous else None
        )
        order = {"entry": entry, "args": dict(args or {}), "is_synchronous": is_synchronous}
        second = self._coordinator.second
        if second is not None:
            second.begin(leases)
        started = time.monotonic()
        self._lost_workers.clear()
        self._has_rewound.clear()
        if on_begin is not None:
            on_begin(leases)
        self._start_workers(order, workers)
        lost = 0
        # A server lost at the very end may still take batches back.
        while not (leases.is_over and self._coordinator.is_complete):
            self._coordinator.check()
            if self._has_rewound.is_set():  # all were stopped, and batches are to be trained again
                self._has_rewound.clear()
                self._lost_workers.clear()
                self._start_workers(order, workers)
            if self._lost_workers:
                lost += len(self._lost_workers)
                if lost > _RESTARTS_MAX + workers:
                    raise HoldfastError("workers keep failing", lost=lost,
                                        todo="look at their logs")  # fmt: skip
                again = len(self._lost_workers)
                self._lost_workers.clear()
                self._start_workers(order, again)
            if on_tick is not None:
                on_tick(leases)
            if second is not None:
                second.tick(leases)
            time.sleep(_TICK_S)
        self._coordinator.check()
        lost += len(self._lost_workers)  # at the very end, when nobody had to take their place
        return Outcome(leases.finished, time.monotonic() - started, lost)

    def _start_workers(self, order: Mapping[str, Any], count: int) -> None:
        starts = []
        numbers = []
        for _ in range(count):
            numbers.append(self._workers)
            spec = {
                "token": self._token,
                "coordinator": self._coordinator.address,
                "worker": self._workers,
                "cluster": self.spec.to_json(),
                "two_phase": self.settings.two_phase,
                **order,
            }
            starts.append(Start("worker", f"worker-{self._workers}", spec))
            self._workers += 1
        for process, worker in zip(self._engine.start_many(starts), numbers, strict=True):
            self._coordinator.join(process, worker)
