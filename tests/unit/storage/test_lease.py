"""Who may write where the store cannot say: one at a time, by everyone's own clock."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from holdfast.errors import ConflictError, UnavailableError
from holdfast.storage.lease import Holder, Lease, is_dead, this_process
from holdfast.storage.settings import RemoteSettings

SETTINGS = RemoteSettings(lease_s=30.0, settle_s=2.0)


class World:
    """A store of one object, and a clock for all; what happens while someone sleeps is planned."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.data: bytes | None = None
        self.plans: list[tuple[float, Callable[[], None]]] = []
        self.write_s = 0.0
        self.failing: list[Exception] = []

    def read(self) -> bytes | None:
        return self.data

    def write(self, data: bytes) -> None:
        self.sleep(self.write_s)
        if self.failing:
            raise self.failing.pop()
        self.data = data

    def remove(self) -> None:
        self.data = None

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [plan for plan in self.plans if plan[0] <= until]:
            plan = min(due, key=lambda item: item[0])
            self.plans.remove(plan)
            self.now = max(self.now, plan[0])
            plan[1]()
        self.now = until

    def at(self, seconds: float, act: Callable[[], object]) -> None:
        """Plan something, so many seconds from now."""
        self.plans.append((self.now + seconds, lambda: (act(), None)[1]))

    def lease(self, *, dead: tuple[str, ...] = ()) -> Lease:
        return Lease(
            self,
            SETTINGS,
            url="s3://bucket/run",
            clock=lambda: self.now,
            sleep=self.sleep,
            is_dead=lambda process: process in dead,
            has_renewer=False,
        )

    def holder(self) -> Holder | None:
        return None if self.data is None else Holder.from_bytes(self.data)


def hold(lease: Lease) -> None:
    with lease.held():
        pass


def test_a_free_lease_is_taken_and_kept() -> None:
    world = World()
    lease = world.lease()
    assert not lease.is_held
    hold(lease)
    assert lease.is_held
    started = world.now
    hold(lease)
    assert world.now == started, "a lease that is held costs nothing"


def test_a_writer_that_lives_keeps_it_and_the_second_gets_a_conflict() -> None:
    world = World()
    first, second = world.lease(), world.lease()
    hold(first)
    for tick in range(1, 20):
        world.at(10.0 * tick, first.renew)
    before = world.now
    with pytest.raises(ConflictError, match="another writer"):
        hold(second)
    assert world.now - before <= SETTINGS.lease_s / 2
    assert first.is_held and not second.is_held
    hold(first)


def test_a_writer_that_is_silent_is_overtaken_after_its_lease_and_knows_it() -> None:
    world = World()
    first, second = world.lease(), world.lease()
    hold(first)
    taken = world.now
    hold(second)
    assert world.now - taken >= SETTINGS.lease_s
    assert not first.is_held and second.is_held
    world.at(5.0, second.renew)
    with pytest.raises(ConflictError):
        hold(first)
    assert second.is_held


def test_a_writer_known_to_be_dead_is_overtaken_at_once() -> None:
    world = World()
    hold(world.lease())
    holder = world.holder()
    assert holder is not None and holder.process == this_process()
    second = world.lease(dead=(holder.process,))
    before = world.now
    hold(second)
    assert world.now - before <= 2 * SETTINGS.settle_s
    assert second.is_held


def test_a_lease_given_back_is_free_at_once() -> None:
    world = World()
    first, second = world.lease(), world.lease()
    hold(first)
    first.release()
    assert world.data is None and not first.is_held
    hold(second)
    assert second.is_held
    first.release()
    assert second.is_held and world.data is not None, "only the holder gives it back"


@pytest.mark.parametrize("lag_s", [0.0, 0.5, 1.9, 2.5, 3.9])
def test_of_two_that_find_it_free_exactly_one_holds_it(lag_s: float) -> None:
    world = World()
    first, second = world.lease(), world.lease()
    outcomes: list[str] = []

    def attempt(lease: Lease, name: str) -> None:
        try:
            hold(lease)
            outcomes.append(name)
        except ConflictError:
            pass

    world.at(lag_s, lambda: attempt(second, "second"))  # in the middle of the first one's waits
    attempt(first, "first")
    assert len(outcomes) == 1
    assert [first.is_held, second.is_held].count(True) == 1


def test_a_name_that_crosses_ours_on_its_way_wins() -> None:
    """A rival that found it free as well, and whose request takes effect a moment after ours."""
    world = World()
    lease = world.lease()
    rival = Holder("rival", 1, "elsewhere", "").to_bytes()
    world.at(SETTINGS.settle_s + 1.9, lambda: setattr(world, "data", rival))
    with pytest.raises(ConflictError):
        hold(lease)
    assert not lease.is_held and world.data == rival


def test_a_name_written_too_late_is_given_back_and_not_used() -> None:
    world = World()
    lease = world.lease()
    world.write_s = SETTINGS.settle_s + 0.5
    before = world.now
    with pytest.raises(UnavailableError, match="too slow"):
        hold(lease)
    assert world.data is None and not lease.is_held
    assert world.now - before > 2 * SETTINGS.lease_s, (
        "each further try waits for a holder to notice"
    )


def test_an_unanswered_claim_is_made_again() -> None:
    world = World()
    world.failing = [UnavailableError("no answer")]
    lease = world.lease()
    hold(lease)
    assert lease.is_held


def test_a_lease_that_ended_is_not_used_for_a_request() -> None:
    world = World()
    lease = world.lease()
    with lease.held():
        lease.check()
        world.now += SETTINGS.lease_s
        with pytest.raises(UnavailableError, match="lease ended"):
            lease.check()


def test_a_request_that_outlasted_the_lease_counts_only_if_nobody_took_it() -> None:
    world = World()
    lease, other = world.lease(), world.lease()
    with lease.held():
        world.now += SETTINGS.lease_s + 1
    with pytest.raises(ConflictError), lease.held():
        hold(other)  # waits until the first is silent for too long


def test_renewal_stops_where_another_name_stands() -> None:
    world = World()
    lease = world.lease()
    hold(lease)
    world.data = Holder("someone", 1, "elsewhere", "").to_bytes()
    assert not lease.renew()
    assert not lease.is_held
    holder = world.holder()
    assert holder is not None and holder.token == "someone", "nothing was overwritten"


def test_an_object_that_is_missing_for_a_moment_is_not_free() -> None:
    world = World()
    first, second = world.lease(), world.lease()
    hold(first)
    stored, world.data = world.data, None  # replaced by removing it first
    world.at(0.1, lambda: setattr(world, "data", stored))
    with pytest.raises(ConflictError):
        hold(second)
    assert world.data == stored


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"token": 1}', b"[" * 5000])
def test_a_damaged_record_is_a_holder_that_is_waited_for(data: bytes) -> None:
    world = World()
    world.data = data
    before = world.now
    hold(world.lease())
    assert world.now - before >= SETTINGS.lease_s


def test_a_process_is_dead_when_it_is_gone_even_before_its_parent_looked() -> None:
    program = "from holdfast.storage.lease import this_process; print(this_process(), flush=True)"
    program += "; import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        name = child.stdout.readline().decode().strip()
        assert not is_dead(name)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_dead(name), "a zombie writes nothing"
    assert is_dead(name)
    assert not is_dead(name.replace(name.split("/")[0], "another-boot"))


def test_a_forgotten_lease_is_given_back_by_its_renewer() -> None:
    world = World()
    settings = RemoteSettings(lease_s=0.4, settle_s=0.01)
    lease = Lease(world, settings, url="x")
    hold(lease)
    beat = world.holder()
    for _ in range(500):
        if world.holder() != beat:
            break
        time.sleep(0.01)
    assert world.holder() != beat, "no sign of life"
    del lease
    gc.collect()
    for _ in range(500):
        if world.data is None:
            break
        time.sleep(0.01)
    assert world.data is None
