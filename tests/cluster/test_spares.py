"""When the next spare starts, and that there are never more than wanted."""

from __future__ import annotations

import threading

from holdfast import events
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.coordinator import Settings
from tests.cluster.test_protocol import make_spec
from tests.cluster.threads import ThreadEngine


class Seen:
    """What happened, and a way to wait for it."""

    def __init__(self) -> None:
        self.all: list[events.Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: events.Event) -> None:
        with self._changed:
            self.all.append(event)
            self._changed.notify_all()

    def spares(self) -> list[int]:
        """Where in what happened spares were started."""
        return [
            at for at, e in enumerate(self.all)
            if isinstance(e, events.ServerStarted) and e.server == -1
        ]  # fmt: skip

    def wait_for_spares(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.spares()) >= count, 30)


def run(parity: int, *, spares: int) -> tuple[Cluster, ThreadEngine, Seen]:
    seen, engine = Seen(), ThreadEngine()
    cluster = Cluster(
        make_spec(servers=6, data=4, parity=parity),
        engine=engine,
        settings=Settings(spares=spares, pulse_s=0),
        log=events.EventLog([seen]),
    )
    cluster.start()
    return cluster, engine, seen


def test_where_no_more_could_be_lost_the_next_spare_starts_when_all_is_whole() -> None:
    cluster, engine, seen = run(1, spares=1)
    engine.crash(cluster.coordinator.process(2))
    seen.wait_for_spares(2)
    whole = max(at for at, e in enumerate(seen.all) if isinstance(e, events.ServerRecovered))
    assert seen.spares()[1] > whole
    cluster.close()


def test_losses_in_a_row_leave_as_many_spares_as_wanted() -> None:
    cluster, engine, seen = run(2, spares=2)
    for loss, server in enumerate((0, 3, 5), 1):
        engine.crash(cluster.coordinator.process(server))
        cluster.wait_whole(30)
        seen.wait_for_spares(2 + loss)
    cluster.close()  # waits for those that are being started
    assert len(seen.spares()) == 2 + 3
