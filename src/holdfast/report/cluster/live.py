"""A cluster while it trains: which server is what process, what it lacks, how fast it goes.

    events, one by one -> Live -> a few lines, drawn again and again

Invariant: it follows from events alone, so that it can be drawn by any process that reads them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from holdfast import events
from holdfast.report import words
from holdfast.report.layout import make_grid

_SPARKS = "▁▂▃▄▅▆▇█"
_KEPT = 40
_LONG_S = 2.0


@dataclass(slots=True)
class ServerNow:
    """One server as it is now."""

    pid: int
    state: str = "serving"
    left: int = 0


class Live:
    """What is known of a cluster so far; a sink for events, from any thread."""

    def __init__(self, *, batches: int, rows_of: Mapping[int, int], is_coded: bool = True) -> None:
        self.batches = 0
        self.servers: dict[int, ServerNow] = {}
        self.spares: set[int] = set()
        self.workers: dict[int, int] = {}
        self._total = batches
        self._rows_of = rows_of
        self._is_coded = is_coded
        self._rates: deque[float] = deque(maxlen=_KEPT)
        self._loss: float | None = None
        self._lock = threading.Lock()

    def __call__(self, event: events.Event) -> None:
        """Take notice of an event."""
        with self._lock:
            self._notice(event)

    def _notice(self, event: events.Event) -> None:
        match event:
            case events.ServerStarted() if event.server < 0:
                self.spares.add(event.pid)
            case events.ServerStarted():
                self.servers[event.server] = ServerNow(event.pid)
            case events.ServerLost() if event.server < 0:
                self.spares.discard(event.pid)
            case events.ServerLost():
                self.servers[event.server] = ServerNow(event.pid, "lost")
            case events.ServerReplaced():
                self.spares.discard(event.pid)
                left = self._rows_of.get(event.server, 0)
                self.servers[event.server] = ServerNow(event.pid, "recovering", left)
            case events.RangeRecovered() if event.server in self.servers:
                self.servers[event.server].left = event.left
            case events.ServerRecovered() if event.server in self.servers:
                self._recovered(self.servers[event.server], event.what)
            case events.Restored():  # servers have their rows; all workers were stopped
                self.workers.clear()
                self._loaded(self.servers)
            case events.Recovered():
                self._loaded(event.servers)
            case events.WorkerStarted():
                self.workers[event.worker] = event.pid
            case events.WorkerLost():
                self.workers.pop(event.worker, None)
            case events.ClusterProgress():
                self.batches, self._total = event.batches, event.batches_total
                self._rates.append(event.samples_per_s)
                self._loss = event.loss if event.loss is not None else self._loss

    def _loaded(self, servers: Iterable[int]) -> None:
        for server in servers:
            if server in self.servers and self.servers[server].state == "recovering":
                self.servers[server].left = 0
                self.servers[server].state = "re-encoding" if self._is_coded else "serving"

    def _recovered(self, server: ServerNow, what: str) -> None:
        if what == "rows":
            server.left = 0
            server.state = "re-encoding" if server.state == "recovering" else "serving"
        else:
            server.state = "recovering" if server.left else "serving"

    def render(self) -> RenderableType:
        """The cluster now."""
        with self._lock:
            return self._render()

    def _render(self) -> RenderableType:
        table = make_grid()
        for server, now in sorted(self.servers.items()):
            table.add_row(f"server {server}", f"pid {now.pid}", self._state(server, now))
        for worker, pid in sorted(self.workers.items()):
            table.add_row(f"worker {worker}", f"pid {pid}", Text("training", style="green"))
        if self.spares:
            waiting = ", ".join(str(pid) for pid in sorted(self.spares))
            table.add_row("spare", f"pid {waiting}", Text("waiting", style="dim"))
        bar = make_grid()
        bar.add_row(
            "batches",
            ProgressBar(total=max(1, self._total), completed=self.batches, width=40),
            f"{self.batches}/{self._total}",
            "" if self._loss is None else f"loss {self._loss:.3f}",
        )
        return Group(bar, self._speed(), table)

    def _state(self, server: int, now: ServerNow) -> Text:
        if now.state == "lost":
            return Text("lost", style="bold red")
        if now.state == "recovering":
            total = self._rows_of.get(server, 0)
            done = words.share(total - now.left, total) if total else "–"
            return Text(f"serving, {done} of its rows recovered", style="yellow")
        if now.state == "re-encoding":
            return Text("serving, all rows recovered; parities are re-encoded", style="yellow")
        return Text("serving", style="green")

    def _speed(self) -> Text:
        if not self._rates:
            return Text("starting ...", style="dim")
        return Text.assemble(
            f"{words.count(round(self._rates[-1]))} samples/s  ", (spark(self._rates), "cyan")
        )


def spark(values: deque[float] | list[float]) -> str:
    """A line of bars, the largest value the tallest.

    >>> spark([0.0, 1.0, 2.0])
    '▁▅█'
    """
    most = max(values, default=0.0)
    if most <= 0:
        return _SPARKS[0] * len(values)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[min(top, int(value / most * top + 0.5))] for value in values)


def line(event: events.Event) -> str | None:
    """An event in one plain line, where there is no terminal; None for what is only progress."""
    match event:
        case events.ServerLost() if event.server >= 0:
            how = event.how.partition("\n")[0]
            return f"server {event.server} (pid {event.pid}) {how}"
        case events.ServerReplaced():
            return (
                f"server {event.server} is pid {event.pid} now, "
                f"{words.duration(event.seconds)} after the loss was seen"
            )
        case events.ServerRecovered():
            return (
                f"server {event.server} has all {event.what} again, "
                f"{words.duration(event.seconds)} after it took over"
            )
        case events.WorkerLost():
            said = event.how.splitlines() or [""]
            why = f": {said[-1]}" if len(said) > 1 else ""
            return f"worker {event.worker} (pid {event.pid}) {said[0]}{why}"
        case events.RowsLost():
            return event.error
        case events.ServerStruck():
            return f"{event.signal} to server {event.server} (pid {event.pid})"
        case events.SaveDurable():
            return (
                f"checkpoint of batch {event.step} ({event.checkpoint}): "
                f"{words.size(event.bytes)}, stall {words.duration(event.stall_s)}"
            )
        case events.KernelsCompiled() if event.seconds > _LONG_S:
            return f"kernels compiled in {words.duration(event.seconds)}, once on a machine"
        case events.SaveFailed():
            return f"checkpoint given up: {event.error}"
        case events.Restored():
            return (
                f"everybody is at the checkpoint of batch {event.step}: "
                f"{words.size(event.bytes)} in {words.duration(event.seconds)}"
            )
        case events.Recovered():
            lost = " and ".join(map(str, event.servers))
            have = "s {} have" if len(event.servers) > 1 else " {} has"
            return (
                f"server{have.format(lost)} the rows of batch {event.checkpoint_step}: "
                f"{words.size(event.bytes)} in {words.duration(event.seconds)}"
            )
    return None
