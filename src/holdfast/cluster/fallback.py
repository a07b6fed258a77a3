"""Falling back: more servers are lost than parity makes up for, and there is a checkpoint.

    hold the second layer -> spares load their rows from the checkpoint -> new epoch -> take over
                          -> all parities are built anew

Partially: lost servers alone have rows of the past, everybody else keeps theirs (CPR). Fully:
every server begins anew, workers are stopped, and batches done since are given out again.

Invariants:
- Rows are loaded before anybody hears of the server that has them: nothing is ever decoded from
  stripes that mix times.
- With the new epoch all parities are void, everywhere at once.

Not here: the checkpoints (checkpoints.py), losses that can be decoded (coordinator.py).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast import events
from holdfast.cluster.crew import Crew
from holdfast.cluster.engine import Process
from holdfast.cluster.leases import Leases
from holdfast.cluster.members import GoneError, Members
from holdfast.cluster.message import Message
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.store import Loading
from holdfast.cluster.view import View
from holdfast.errors import DataLossError


@dataclass(frozen=True, slots=True)
class Restore:
    """A checkpoint to fall back to, and who does: lost servers alone, or everybody."""

    loading: Loading
    is_partial: bool
    applied: tuple[tuple[int, ...], ...]
    """For each server the last push of each worker that its rows contain."""
    batches: Mapping[str, Any] | None
    """What was done then, as ``Leases.state`` says it."""


class SecondLayer(Protocol):
    """Checkpoints of a cluster, as its coordinator sees them."""

    def hold(self) -> Restore | None:
        """Give up what is being saved, save nothing more; the last checkpoint, if there is one."""

    def release(self, *, is_restored: bool) -> None:
        """Save again; whether the cluster went back to the last checkpoint."""

    def lost(self, servers: Collection[int], batches: int, batches_total: int) -> float | None:
        """Some servers have rows of the past, the others those of now: the PLS it added."""

    def begin(self, leases: Leases) -> None:
        """Training begins."""

    def tick(self, leases: Leases) -> None:
        """Begin to save if it is time."""


class Fallback:
    """Brings a cluster back to its last checkpoint; used by the membership thread."""

    def __init__(
        self,
        spec: ClusterSpec,
        members: Members,
        crew: Crew,
        *,
        log: events.EventLog,
        on_loaded: Callable[[int], object],
        on_rewound: Callable[[], None],
    ) -> None:
        """``on_loaded`` hears of every server whose rows are of the past, ``on_rewound`` when all
        workers were stopped and training begins again."""
        self.second: SecondLayer | None = None
        self._spec, self._members, self._crew, self._log = spec, members, crew, log
        self._on_loaded, self._on_rewound = on_loaded, on_rewound
        self._rewinds = 0

    def restore(self) -> None:
        """Fall back to the last checkpoint: lost servers alone, or everybody.

        Raises:
            DataLossError: names the servers whose rows are gone.
        """
        second = self.second
        restore = None if second is None else second.hold()
        is_restored = False
        try:
            if restore is None:
                raise self._say_lost("restore the last checkpoint, or begin again")
            self._say_lost(f"going back to the checkpoint of step {restore.loading.step}")
            self.restore_from(restore)
            is_restored = True
        finally:
            if second is not None:
                second.release(is_restored=is_restored)

    def restore_from(self, restore: Restore) -> None:
        """Go back to this checkpoint, however many more are lost meanwhile."""
        self._restore_once(restore)
        while self._members.lost:
            self._restore_once(restore)

    def _restore_once(self, restore: Restore) -> None:
        started = time.monotonic()
        if not restore.is_partial:
            self._crew.retire_all()
        # Who lacks rows is lost too: what it has decoded so far is of another time than what it
        # would load. With everybody, all are.
        for server in (
            self._members.view.lacks_rows if restore.is_partial else tuple(self._members.members)
        ):
            if server not in self._members.lost:
                self._members.fence(self._members.members[server])
                self._members.lose(server, started)
        chosen, view = self._members.choose_spares()
        everybody = frozenset(self._members.members)
        view = dataclasses.replace(
            view,
            lacks_rows=frozenset(),
            lacks_parities=everybody if self._spec.parity_max else frozenset(),
        )
        self._members.renewals += 1
        for server in chosen:
            self._on_loaded(server)
        try:
            rows, size = self._load(view, chosen, restore)
            renewal = [self._members.renewals, sorted(chosen)]
            entering = Message("view", {"view": view.to_json(), "renewal": renewal})
            for server in self._members.members:
                if server not in chosen:
                    self._members.ask(server, entering)
        except GoneError as gone:
            self._members.gone(gone.server, chosen)
            return
        self._members.take_over(view, chosen)
        if not restore.is_partial:
            self._crew.rewind(restore.batches)  # first: whoever hears of it counts on it
        self._tell_restored(restore, chosen, rows, size, time.monotonic() - started)
        self._members.tell_to_recover(everybody)
        if not restore.is_partial:
            self._on_rewound()

    def _load(self, view: View, chosen: Mapping[int, Process], restore: Restore) -> tuple[int, int]:
        """Spares load the rows of lost servers; how many rows, and bytes."""
        for server, process in chosen.items():
            meta = {
                **self._members.meta(server, view),
                "loading": restore.loading.to_json(),
                "applied": list(restore.applied[server] if restore.is_partial else ()),
                "barred": self._crew.retired,
            }
            self._members.ask_process(server, process, Message("load", meta))
        rows = size = 0
        for server, process in chosen.items():
            found: Mapping[str, Any] = {"is_over": False}
            while not found["is_over"]:
                found = self._members.ask_process(server, process, Message("job")).meta
            if "error" in found:
                raise DataLossError(
                    "more servers are lost than their rows can be decoded without, and the last "
                    "checkpoint cannot be loaded",
                    servers=sorted(chosen),
                    step=restore.loading.step,
                    error=found["error"],
                )
            rows += int(found["rows"])
            size += int(found["bytes"])
        return rows, size

    def _say_lost(self, todo: str) -> DataLossError:
        lacking = tuple(sorted(self._members.lacking()))
        error = DataLossError(
            "more servers are lost than their rows can be decoded without",
            servers=list(lacking),
            parity=self._spec.parity,
            todo=todo,
        )
        self._log.emit(events.RowsLost(servers=lacking, error=str(error)))
        return error

    def _tell_restored(
        self, restore: Restore, servers: Collection[int], rows: int, size: int, seconds: float
    ) -> None:
        step, leases = restore.loading.step, self._crew.leases
        if not restore.is_partial:
            self._rewinds += 1
            self._log.emit(
                events.Restored(
                    step=step, rows=rows, bytes=size, seconds=seconds, restores=self._rewinds
                )
            )
            return
        pls = None
        if self.second is not None and leases is not None:
            pls = self.second.lost(servers, leases.done_up_to, leases.total)
        self._log.emit(
            events.Recovered(
                step=step if leases is None else leases.done_up_to,
                checkpoint_step=step,
                servers=tuple(sorted(servers)),
                rows=rows,
                bytes=size,
                seconds=seconds,
                pls=pls,
            )
        )
