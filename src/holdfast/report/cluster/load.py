"""What servers did: updates by server with and without parity, memory, bytes on the network.

    ServerCounted events -> Load

A process that was lost counts up to its last count, which is taken right before a kill. What a
server's processes did one after the other adds up.

# S servers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast import events


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly something is spread over servers: 1 is evenly."""

    most_over_mean: float | None
    most_over_least: float | None
    """The papers' measure."""


@dataclass(frozen=True, slots=True)
class Load:
    """Updates of rows on each server, and of parities; what all of them hold and sent."""

    updated_S: tuple[int, ...]
    folded_S: tuple[int, ...]
    sent_S: tuple[int, ...]
    """Rows whose differences a server sent to parities elsewhere."""
    rows: Balance
    parities: Balance
    both: Balance
    cpu_s: float
    resident_bytes: int | None
    """The most that servers alive at the end held, all together, their programs included."""
    queue_bytes: int | None
    """Set aside for differences that wait."""
    worker_bytes: int | None
    """Between workers and servers, both ways."""
    server_bytes: int | None
    """Between servers."""
    difference_bytes: int
    """Told to parities."""
    gradient_bytes: int
    """Told to copies, of hot rows for one."""


def find_load(happened: Sequence[events.Event], servers: int) -> Load | None:
    """What servers counted; None if nobody did."""
    last = {e.address: e for e in happened if isinstance(e, events.ServerCounted)}
    if not last:
        return None
    now = {e.server: e for e in last.values()}.values()  # the last process of each server
    updated_S = _by_server(last.values(), "rows_updated", servers)
    folded_S = _by_server(last.values(), "rows_folded", servers)
    return Load(
        updated_S=updated_S,
        folded_S=folded_S,
        sent_S=_by_server(last.values(), "differences", servers),
        rows=balance(updated_S),
        parities=balance(folded_S),
        both=balance([a + b for a, b in zip(updated_S, folded_S, strict=True)]),
        cpu_s=sum(e.cpu_s for e in last.values()),
        resident_bytes=_sum(e.resident_bytes for e in now),
        queue_bytes=_sum(e.queue_bytes for e in now),
        worker_bytes=_sum(e.worker_bytes for e in last.values()),
        server_bytes=_sum(e.server_bytes for e in last.values()),
        difference_bytes=sum(e.difference_bytes for e in last.values()),
        gradient_bytes=sum(e.gradient_bytes for e in last.values()),
    )


def balance(counts_S: Sequence[int]) -> Balance:
    """The most against the mean and against the least.

    >>> balance([10, 20, 30])
    Balance(most_over_mean=1.5, most_over_least=3.0)
    >>> balance([0, 0])
    Balance(most_over_mean=None, most_over_least=None)
    """
    most, least, total = max(counts_S), min(counts_S), sum(counts_S)
    return Balance(most * len(counts_S) / total if total else None, most / least if least else None)


def balance_text(found: Balance) -> str:
    """For people.

    >>> balance_text(balance([10, 20, 30]))
    'most 1.50 of the mean, 3.00 of the least'
    """
    if found.most_over_mean is None:
        return "–"
    text = f"most {found.most_over_mean:.2f} of the mean"
    if found.most_over_least is None:
        return text
    return f"{text}, {found.most_over_least:.2f} of the least"


def _by_server(counted: Iterable[events.ServerCounted], name: str, servers: int) -> tuple[int, ...]:
    counts_S = [0] * servers
    for each in counted:
        counts_S[each.server] += getattr(each, name)
    return tuple(counts_S)


def _sum(values: Iterable[int | None]) -> int | None:
    """All of them together; None if one is not known."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None
