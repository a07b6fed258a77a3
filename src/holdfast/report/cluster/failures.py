"""Losses of servers on a cluster: how long until it answered, trained, was whole, was as far again.

    events -> Progress (samples over time) and Failure (one a lost server)

Invariants:
- Times and batches are the events' own; a rate is samples between two moments, nothing smoothed.
- A failure lasts from the kill (or, unasked, from when it was seen) until the replacement has its
  rows and its parities, and every worker trains again.
- What is not known is None, never a guess.

Not here: what a whole run came to (training.py), checkpoints (second_layer.py).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from holdfast import events


@dataclass(frozen=True, slots=True)
class Failure:
    """A server that was lost, and how the cluster came over it. Seconds count from the kill."""

    server: int
    how: str
    time: float
    seen_s: float | None
    """None: everybody was replaced for another's loss, before its own was seen."""
    replaced_s: float | None
    rows_s: float | None
    whole_s: float | None
    steps_s: float | None
    """Until every worker had finished a step that it had not finished before."""
    regained_s: float | None
    """Until more was done than at the kill: at once, unless everybody went back."""
    lost_s: float | None
    """What it cost: seconds of training at the rate before it, until it was over."""
    is_loaded: bool
    """Whether its rows came from a checkpoint, instead of being decoded."""
    rows: int
    """Rows that the server held."""
    rows_swept: int
    """Of them, decoded range by range; the others were asked for before their turn."""
    before: float | None
    during: float | None
    after: float | None
    """Samples a second; during: until it was whole and every worker trained again."""

    @property
    def over_s(self) -> float | None:
        """Until the cluster was whole and every worker trained again."""
        if self.whole_s is None or self.steps_s is None:
            return self.whole_s
        return max(self.whole_s, self.steps_s)


class Progress:
    """How many samples were done at any moment, from the progress that was told.

    Where a cluster goes back to a checkpoint, samples that are done become fewer; samples that
    were trained do not.
    """

    def __init__(self, happened: Sequence[events.Event]) -> None:
        self.times: list[float] = []
        self.done: list[int] = []
        size = 0
        for event in sorted(happened, key=lambda event: event.time):  # threads tell them
            if isinstance(event, events.ClusterStarted):
                size = event.batch_size
            elif isinstance(event, events.ClusterProgress):
                self.times.append(event.time)
                self.done.append(event.samples)
            elif isinstance(event, events.Restored) and self.times:  # until then nothing changed
                self.times += [event.time, event.time]
                self.done += [self.done[-1], min(self.done[-1], event.step * size)]
        self.trained = self.done[:1]
        for before, after in pairwise(self.done):
            self.trained.append(self.trained[-1] + max(0, after - before))

    def samples_at(self, moment: float) -> float:
        """Samples trained until then, between two reports in proportion."""
        times, trained = self.times, self.trained
        if not times or moment <= times[0]:
            return float(trained[0]) if times else 0.0
        if moment >= times[-1]:
            return float(trained[-1])
        at = bisect.bisect_left(times, moment)
        share = (moment - times[at - 1]) / (times[at] - times[at - 1])
        return trained[at - 1] + share * (trained[at] - trained[at - 1])

    def done_at(self, moment: float) -> float:
        """Samples that were done then, by the last report before it."""
        at = bisect.bisect_right(self.times, moment)
        return float(self.done[at - 1]) if at else 0.0

    def lost_s(self, start: float, end: float | None, rate: float | None) -> float | None:
        """Seconds between two moments in which, at this rate, no sample would have been won."""
        if end is None or not rate or not self.times:
            return None
        end = min(end, self.times[-1])
        return end - start - (self.done_at(end) - self.done_at(start)) / rate

    def rate(self, start: float | None, end: float | None) -> float | None:
        """Samples trained a second between two moments; None if there is no such span."""
        if not self.times or start is None or end is None:
            return None
        start, end = max(start, self.times[0]), min(end, self.times[-1])
        if end - start < 1e-6:
            return None
        return (self.samples_at(end) - self.samples_at(start)) / (end - start)

    def regained(self, start: float, since: float) -> float | None:
        """When, from ``since`` on, more was done than ever before ``start``; None: it was not."""
        most = max((d for t, d in zip(self.times, self.done, strict=True) if t <= start), default=0)
        return next(
            (t for t, d in zip(self.times, self.done, strict=True) if t > since and d > most), None
        )

    @property
    def first_step(self) -> float | None:
        """When the first batch was done: what came before is the start of processes."""
        return next((t for t, d in zip(self.times, self.done, strict=True) if d > 0), None)

    @property
    def end(self) -> float | None:
        """The last report."""
        return self.times[-1] if self.times else None


def find_failures(
    happened: Sequence[events.Event], *, rows_of: Sequence[int] = (), workers: int, parity: int
) -> tuple[Failure, ...]:
    """Every loss of a server, in the order of time."""
    progress = Progress(happened)
    told = [e for e in happened if isinstance(e, events.BatchTrained)]
    losses = _find_losses(happened)
    found: list[Failure] = []
    for at, loss in enumerate(losses):
        start, server = loss.time, loss.server
        end = next((o.time for o in losses[at + 1 :] if o.server == server), float("inf"))
        mine = [e for e in happened if loss.seen <= e.time < end]
        replaced = _time_of(mine, events.ServerReplaced, server)
        loaded = _loaded(mine, server)
        rows = _time_of(mine, events.ServerRecovered, server, what="rows")
        parities = _time_of(mine, events.ServerRecovered, server, what="parities")
        if loaded is not None:
            rows, parities = loaded, parities if parity else loaded
        whole = max(rows, parities) if rows is not None and parities is not None else None
        steps = _first_steps(told, loaded or start, workers)
        is_over = None if whole is None else max(whole, steps or whole)
        before = progress.rate(_calm_since(found, start, progress.first_step), start)
        following = losses[at + 1].time if at + 1 < len(losses) else progress.end
        found.append(
            Failure(
                server=server,
                how=loss.how,
                time=start,
                seen_s=loss.seen - start if loss.is_seen else None,
                replaced_s=_since(start, replaced),
                rows_s=_since(start, rows),
                whole_s=_since(start, whole),
                steps_s=_since(start, steps),
                regained_s=_since(start, progress.regained(start, loaded or start)),
                lost_s=progress.lost_s(start, is_over, before),
                is_loaded=loaded is not None,
                rows=rows_of[server] if server < len(rows_of) else 0,
                rows_swept=sum(
                    e.rows
                    for e in mine
                    if isinstance(e, events.RangeRecovered) and e.server == server
                ),
                before=before,
                during=progress.rate(start, is_over),
                after=progress.rate(is_over, following),
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A server that was lost: when, by what, and when that was seen."""

    server: int
    time: float
    how: str
    seen: float
    is_seen: bool = True


def _find_losses(happened: Sequence[events.Event]) -> list[_Loss]:
    """Losses that were seen, from the signals that they answer to; and signals to servers that
    were replaced together with everybody before anybody saw it."""
    found: list[_Loss] = []
    struck: dict[int, events.ServerStruck] = {}  # the first signal that is not answered yet
    for event in happened:
        match event:
            case events.ServerStruck():
                struck.setdefault(event.server, event)
            case events.ServerLost() if event.server >= 0:
                cause = struck.pop(event.server, None)
                start = event.time if cause is None else cause.time
                how = event.how.partition("\n")[0] if cause is None else cause.signal
                found.append(_Loss(event.server, start, how, event.time))
            case events.ServerReplaced() if event.server in struck:
                cause = struck.pop(event.server)
                found.append(
                    _Loss(event.server, cause.time, cause.signal, cause.time, is_seen=False)
                )
    return sorted(found, key=lambda loss: loss.time)


def _time_of(
    happened: Sequence[events.Event], kind: type[events.Event], server: int, **fields: str
) -> float | None:
    for event in happened:
        if not isinstance(event, kind) or getattr(event, "server", None) != server:
            continue
        if all(getattr(event, name) == value for name, value in fields.items()):
            return event.time
    return None


def _loaded(happened: Sequence[events.Event], server: int) -> float | None:
    """When a server had its rows from a checkpoint."""
    for event in happened:
        is_partial = isinstance(event, events.Recovered) and server in event.servers
        if isinstance(event, events.Restored) or is_partial:
            return event.time
        if isinstance(event, events.ServerRecovered) and event.server == server:
            return None  # it was decoded: a checkpoint that follows is of another loss
    return None


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else moment - start


def _calm_since(
    failures: Sequence[Failure], start: float, first_step: float | None
) -> float | None:
    """Since when nothing was missing: the last failure's end, or the first step."""
    if not failures:
        return first_step
    last = failures[-1]
    if last.over_s is None or last.time + last.over_s > start:
        return None
    return last.time + last.over_s


def _first_steps(told: Sequence[events.BatchTrained], start: float, workers: int) -> float | None:
    """When as many workers as there are had finished a step after ``start``."""
    firsts: dict[int, float] = {}
    for each in told:
        if each.at > start:
            firsts[each.worker] = min(each.at, firsts.get(each.worker, each.at))
    return sorted(firsts.values())[workers - 1] if len(firsts) >= workers else None
