"""What holds on a folder holds on S3: crashes and outages at storage calls, and on the wire.

On both kinds of servers: one that ignores conditional puts, where a lease decides, and one that
honours them. Objects are sent in many small parts, so that every kind of request is met.

A story makes some 60 storage calls and 150 requests; failing at each, in every way, takes minutes.
By default two calls and one request are drawn for each way; HOLDFAST_S3_CASES=20 draws so many and
half of it, kinds that were not yet drawn first, and 1000 takes all.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast.storage import Storage, open_storage
from tests.crash.story import (
    Plot,
    Recorder,
    assert_every_kept_step_is_exact,
    assert_recovers,
    train,
)
from tests.crash.test_every_call import PLOTS, Survivor, cases, check_survived, tell
from tests.fault import Fault, FaultyStorage, SimulatedCrash, When
from tests.s3proxy import Fate, Proxy, proxy_before
from tests.s3servers import BUCKET, Server

pytestmark = pytest.mark.soak

SEED = 20240613
CASES = int(os.environ.get("HOLDFAST_S3_CASES", "2"))
PART_BYTES = 1000
# A lease and its like are kept elsewhere; here the story of the folder, there that of memory.
PLOT_OF = {"rclone": PLOTS["folder"], "moto": PLOTS["memory"]}


@pytest.fixture(params=["rclone", "moto"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def plot(request: pytest.FixtureRequest, server: Server) -> Plot:
    return PLOT_OF["moto" if server.is_conditional else "rclone"]


def fresh(server: Server, **options: Any) -> Storage:
    """An empty storage."""
    settings = {"part_bytes": PART_BYTES, **options}
    endpoint = settings.pop("endpoint", None)
    url = f"s3://{BUCKET}/crash/{uuid.uuid4().hex}"
    return open_storage(url, **server.options(endpoint, **settings))


def draw(found: list[tuple[int, str]], way: str, *, count: int = CASES) -> list[tuple[int, str]]:
    """A few cases to fail in one way, of every kind first."""
    chance = random.Random(f"{SEED} {way}")
    shuffled = chance.sample(found, len(found))
    rank: dict[str, int] = {}
    ranked = []
    for at, label in shuffled:
        kind = label.split("/")[0] + label.split("-")[0][-5:]
        rank[kind] = rank.get(kind, 0) + 1
        ranked.append((rank[kind], at, label))
    ranked.sort(key=lambda item: item[0])
    return [(at, label) for _, at, label in ranked[:count]]


def test_crash_at_a_storage_call_leaves_the_last_commit(server: Server, plot: Plot) -> None:
    counting = FaultyStorage(fresh(server))
    tell(counting, plot, lambda step: None)
    chosen = [
        (when, at, label)
        for when in When
        for at, label in draw(list(cases(counting.calls, when, plot, is_crash=True)), when.value)
    ]
    for when, at, label in chosen:
        bare = fresh(server)
        recorder = Recorder(bare)
        durable: list[int] = []
        faulty = FaultyStorage(recorder, Fault(at, when))
        with contextlib.suppress(SimulatedCrash):
            tell(faulty, plot, durable.append)
        assert faulty.has_crashed
        gc.collect()  # a dead process has no upload under way
        last = recorder.last_step
        with noting(f"seed {SEED}: crash {when.value} call {at} ({label})"):
            assert not durable or (last is not None and last >= durable[-1])
            assert_recovers(bare, plot, last)
            assert server.uploads(bare.url.removeprefix(f"s3://{BUCKET}/")) == []


def test_outage_at_a_storage_call_is_reported_and_the_next_save_is_whole(
    server: Server, plot: Plot
) -> None:
    counting = FaultyStorage(fresh(server))
    tell(counting, plot, lambda step: None)
    chosen = [
        (when, at, label)
        for when in (When.BEFORE, When.AFTER)
        for at, label in draw(list(cases(counting.calls, when, plot, is_crash=False)), when.value)
    ]
    for when, at, label in chosen:
        bare = fresh(server)
        survivor = Survivor(FaultyStorage(bare, Fault.outage(at, when)), plot)
        with noting(f"seed {SEED}: outage {when.value} call {at} ({label}): {survivor.errors}"):
            survivor.run()
            check_survived(survivor, bare, plot, label)


# On the wire.


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with proxy_before(server.port) as found:
        yield found


def count_requests(server: Server, proxy: Proxy, plot: Plot) -> list[str]:
    proxy.take()
    tell(fresh(server, endpoint=proxy.endpoint), plot, lambda step: None)
    return proxy.take()


def at_request(number: int, fate: Fate, *, is_lasting: bool = False) -> Any:
    """A rule: the request of this number, from 1, meets a fate; or all from there on."""
    count = 0

    def rule(request: str) -> Fate:
        nonlocal count
        count += 1
        return fate if count == number or (is_lasting and count > number) else Fate.PASS

    return rule


def test_a_request_that_fails_once_is_sent_again_and_nobody_notices(
    server: Server, proxy: Proxy, plot: Plot
) -> None:
    requests = list(enumerate(count_requests(server, proxy, plot), start=1))
    sending = [(at, label) for at, label in requests if label.startswith(("PUT", "POST"))]
    chosen = [
        (fate, at, label)
        for fate in (Fate.TEAR, Fate.DEAF, Fate.BUSY, Fate.REFUSE)
        for at, label in draw(
            sending if fate is Fate.TEAR else requests, fate.name, count=(CASES + 1) // 2
        )
    ]
    for fate, at, label in chosen:
        storage = fresh(server, endpoint=proxy.endpoint)
        durable: list[int] = []
        proxy.rule = at_request(at, fate)
        with noting(f"seed {SEED}: {fate.name} request {at} ({label})"):
            tell(storage, plot, durable.append)
            proxy.rule = lambda request: Fate.PASS
            assert durable == list(range(1, plot.last_step + 1))
            assert_recovers(storage, plot, plot.last_step)


def test_a_server_that_is_gone_for_good_leaves_the_last_commit(
    server: Server, proxy: Proxy, plot: Plot
) -> None:
    requests = list(enumerate(count_requests(server, proxy, plot), start=1))
    for at, label in draw(requests, "gone"):
        storage = fresh(server, endpoint=proxy.endpoint, tries=2, retry_s=0.001)
        recorder = Recorder(storage)
        proxy.rule = at_request(at, Fate.REFUSE, is_lasting=True)
        # Housekeeping after the last commit is not worth an error; all else is reported.
        with contextlib.suppress(hf.UnavailableError):
            tell(recorder, plot, lambda step: None)
        proxy.rule = lambda request: Fate.PASS
        with noting(f"seed {SEED}: gone from request {at} ({label})"):
            last = recorder.last_step
            if last is not None:
                assert assert_every_kept_step_is_exact(storage, plot)[-1] == last
            assert_recovers(storage, plot, last)


def test_permanent_errors_are_not_repeated(server: Server, proxy: Proxy) -> None:
    storage = fresh(server, endpoint=proxy.endpoint)
    storage.put_if_absent("catalog/1", b"x")
    proxy.rule = lambda request: Fate.DENY
    for act in (
        lambda: storage.get("catalog/1"),
        lambda: storage.delete("catalog/1"),
        lambda: storage.list("catalog/"),
    ):
        proxy.take()
        with pytest.raises(hf.UnavailableError, match="permission denied"):
            act()
        assert len(proxy.take()) == 1


def test_a_slow_server_delays_saves_and_nothing_else(rclone: Server) -> None:
    plot = PLOT_OF["rclone"]
    with proxy_before(rclone.port) as proxy:
        proxy.delay_s, proxy.bytes_per_s = 0.005, 200_000
        storage = fresh(rclone, endpoint=proxy.endpoint)
        durable: list[int] = []
        tell(storage, plot, durable.append)
        assert durable == list(range(1, plot.last_step + 1))
        assert_recovers(storage, plot, plot.last_step)


def test_a_second_writer_gets_a_conflict_and_nothing_is_overwritten(
    server: Server, plot: Plot
) -> None:
    """Of two in one process, which share a lease where there is one, the newer has the run."""
    storage = fresh(server)
    root = storage.url.removeprefix(f"s3://{BUCKET}/") + "/"
    first = plot.build()
    torch.manual_seed(99)
    with plot.checkpointer(storage, first, save_last=False) as older:
        train(first, range(1), older.step)
        older.save().result()
        other = plot.build()
        torch.manual_seed(99)
        with plot.checkpointer(fresh_again(storage, server), other) as newer:
            start = newer.resume()
            train(other, range(start, start + 1), newer.step)
            newer.save().result()
            before = server.everything(root)
            train(first, range(1, 2), older.step)
            with pytest.raises(hf.ConflictError):
                older.save().result()
            after = server.everything(root)
            assert {name: after.get(name) for name in before if name != ".lease"} == {
                name: data for name, data in before.items() if name != ".lease"
            }
    assert_recovers(storage, plot, 2)


SECOND_PROCESS = """
import json, sys
import holdfast as hf
from holdfast.storage import open_storage
storage = open_storage(sys.argv[1], **json.loads(sys.argv[2]))
for name in ("catalog/1", "catalog/2"):
    try:
        storage.put_if_absent(name, b"second")
        print("put")
    except hf.ConflictError as error:
        print("lease" if "lease" in str(error) else "exists")
"""


def test_a_second_process_is_refused_while_the_first_lives(server: Server) -> None:
    storage = fresh(server)
    storage.put_if_absent("catalog/1", b"first")
    done = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS, storage.url, json.dumps(server.options())],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    # Where the store decides, a name is free or not; a lease is that of the whole run.
    expected = ["exists", "put"] if server.is_conditional else ["lease", "lease"]
    assert done.stdout.split() == expected
    assert storage.get("catalog/1") == b"first"


def fresh_again(storage: Storage, server: Server) -> Storage:
    return open_storage(storage.url, **server.options(part_bytes=PART_BYTES))


@contextlib.contextmanager
def noting(note: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise
