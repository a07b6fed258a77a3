"""Messages that no worker or server would send: refused with an error, and nothing changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from holdfast.cluster import parts
from holdfast.cluster.kinds import SERVER_KINDS, role_of
from holdfast.cluster.message import Caller, Message
from holdfast.cluster.pushes import Entrusted, Gradients
from holdfast.cluster.server import Server
from holdfast.cluster.shard import Shard
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.cluster.view import View
from holdfast.cluster.wire import Stream
from holdfast.errors import ConflictError, HoldfastError, InvalidRequestError
from holdfast.model.placement import Placement

TOKEN = "token"
PLACED = Placement(3, data=2, parity=1)
EPOCH = 4
SPEC = ClusterSpec(
    (
        TableSpec("users", 24, 2, PLACED, "xor", Optimizer("momentum"), seed=1, bound=0.5),
        TableSpec("alone", 9, 3, Placement(3), "none", Optimizer("sgd"), seed=2, bound=0.5),
    ),
    locks=2,
)
WIDTH = SPEC.tables[0].width
VIEW = View(EPOCH, ("127.0.0.1:1",) * 3, version=7)
I4, F4 = np.int32, np.float32


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(TOKEN)
    with Stream(server.address, token=TOKEN, name="coordinator", epoch=None) as stream:
        meta = {"spec": SPEC.to_json(), "server": 0, "view": VIEW.to_json()}
        stream.ask(Message("begin", meta))
    with Stream(server.address, token=TOKEN, name="worker-3", epoch=EPOCH) as stream:
        stream.ask(parts.pack_stage(3, 5, {0: [gradients(0, [1])]}))
    yield server
    server.close()


def gradients(table: int, slots: list[int]) -> Gradients:
    dim = SPEC.tables[table].dim
    return Gradients(table, np.array(slots), np.ones((len(slots), dim), np.float32))


def snapshot(shard: Shard) -> dict[str, Any]:
    """Everything a shard holds and knows."""
    found: dict[str, Any] = {
        "applied": shard.applied_W.tobytes(),
        "durable": shard.durable_W().tobytes(),
        "staged": [sorted(shard.staged(worker)) for worker in range(256)],
        "copies": [len(shard.copies(owner, range(256))) for owner in range(SPEC.servers)],
        "waiting": shard.waiting(),
        "epoch": shard.epoch,
        "frozen": dict(shard._out._frozen),
        "barred": set(shard._pushes._barred),
        "ready": shard.ready_G.tobytes(),
        "reports": [
            (report.flushed, report.kept, report.receivers, report.marks_GW.tobytes())
            for report in map(shard.report, range(SPEC.servers))
        ],
    }
    for table in shard.arenas:
        found[table.spec.name] = (table.records_MW.tobytes(), table.parities_QW.tobytes())
    return found


def check_refused(
    server: Server, message: Message, *, name: str = "worker-0", epoch: int | None = EPOCH
) -> HoldfastError:
    """The answer is an error, nothing has changed, and the stream and the server go on."""
    before = snapshot(server.shard)
    with Stream(server.address, token=TOKEN, name=name, epoch=epoch) as stream:
        with pytest.raises(HoldfastError) as refused:
            stream.ask(message)
        assert stream.is_open
        pulled = stream.ask(parts.pack_slots("pull", [(0, np.arange(3))])).arrays[0]
    assert len(pulled) == 3 * SPEC.tables[0].dim
    assert snapshot(server.shard) == before
    return refused.value


def check_malformed(server: Server, message: Message, **caller: Any) -> None:
    assert isinstance(check_refused(server, message, **caller), InvalidRequestError)


# Requests of workers.

ONE = np.ones(2, F4)
PUSHES: dict[str, tuple[Mapping[str, Any], tuple[np.ndarray, ...]]] = {
    "no meta": ({}, (np.zeros(1, I4), ONE)),
    "no tables": ({"worker": 0, "number": 0}, (np.zeros(1, I4), ONE)),
    "no arrays": ({"arenas": [[0, 1]]}, ()),
    "no gradients": ({"arenas": [[0, 1]]}, (np.zeros(1, I4),)),
    "tables are a number": ({"arenas": 7}, (np.zeros(1, I4), ONE)),
    "tables are text": ({"arenas": "users"}, (np.zeros(1, I4), ONE)),
    "a table without count": ({"arenas": [[0]]}, (np.zeros(1, I4), ONE)),
    "a count of text": ({"arenas": [[0, "x"]]}, (np.zeros(1, I4), ONE)),
    "no such table": ({"arenas": [[2, 1]]}, (np.zeros(1, I4), ONE)),
    "a table below zero": ({"arenas": [[-1, 1]]}, (np.zeros(1, I4), np.ones(3, F4))),
    "a count below zero": ({"arenas": [[0, 2], [0, -1]]}, (np.zeros(1, I4), ONE)),
    "a huge count": ({"arenas": [[0, 1 << 62]]}, (np.zeros(1, I4), ONE)),
    "a count beyond any": ({"arenas": [[0, 1 << 80]]}, (np.zeros(1, I4), ONE)),
    "fewer rows than counted": ({"arenas": [[0, 2]]}, (np.zeros(1, I4), ONE)),
    "more rows than counted": ({"arenas": [[0, 1]]}, (np.zeros(2, I4), ONE)),
    "too few gradients": ({"arenas": [[0, 1]]}, (np.zeros(1, I4), ONE[:1])),
    "too many gradients": ({"arenas": [[0, 1]]}, (np.zeros(1, I4), np.ones(3, F4))),
    "a slot below zero": ({"arenas": [[0, 1]]}, (np.array([-1], I4), ONE)),
    "a slot beyond the shard": ({"arenas": [[0, 1]]}, (np.array([8], I4), ONE)),
    "a slot beyond any": ({"arenas": [[0, 1]]}, (np.array([1 << 62]), ONE)),
    "an unsigned slot beyond any": (
        {"arenas": [[0, 1]]},
        (np.array([(1 << 64) - 1], np.uint64), ONE),
    ),
    "gradients of doubles": ({"arenas": [[0, 1]]}, (np.zeros(1, I4), np.ones(2))),
    "gradients of integers": ({"arenas": [[0, 1]]}, (np.zeros(1, I4), np.ones(2, I4))),
    "the second table is bad": ({"arenas": [[0, 1], [1, 1]]}, (np.array([0, 9]), np.ones(5, F4))),
}


@pytest.mark.parametrize("what", PUSHES)
@pytest.mark.parametrize("kind", ["push", "stage", "assign", "supply"])
def test_malformed_pushes_change_nothing(server: Server, kind: str, what: str) -> None:
    meta, arrays = PUSHES[what]
    if what != "no meta":
        meta = {"worker": 0, "number": 0, **meta}
    if kind == "stage":
        meta = {**meta, "parts": [{"owner": 0, **meta}]}
    check_malformed(server, Message(kind, meta, arrays))


STAGES: dict[str, Any] = {
    "no parts": None,
    "parts are text": "parts",
    "more parts than arrays": [{"owner": 0, "arenas": [[0, 1]]}] * 2,
    "no owner": [{"arenas": [[0, 1]]}],
    "an owner below zero": [{"owner": -1, "arenas": [[0, 1]]}],
    "an owner of text": [{"owner": "0", "arenas": [[0, 1]]}],
    "a copy for one it is no witness of": [{"owner": 1, "arenas": [[0, 1]]}],
    "a copy for nobody": [{"owner": 99, "arenas": [[0, 1]]}],
    "a copy of no such table": [{"owner": 2, "arenas": [[7, 1]]}],
}


@pytest.mark.parametrize("what", STAGES)
def test_malformed_copies_change_nothing(server: Server, what: str) -> None:
    meta = {"worker": 0, "number": 0, "parts": STAGES[what]}
    check_malformed(server, Message("stage", meta, (np.zeros(1, I4), ONE)))


def pushed(kind: str, worker: Any, number: Any) -> Message:
    if kind == "stage":
        return parts.pack_stage(worker, number, {0: [gradients(0, [0])]})
    return parts.pack_gradients(kind, {"worker": worker, "number": number}, [gradients(0, [0])])


@pytest.mark.parametrize("worker", [-1, 256, 1 << 70, None, "x", [0], {}])
@pytest.mark.parametrize("kind", ["push", "stage"])
def test_workers_out_of_range_push_nothing(server: Server, kind: str, worker: Any) -> None:
    check_malformed(server, pushed(kind, worker, 0))


@pytest.mark.parametrize("number", [None, "nan", "x", [1], {}])
@pytest.mark.parametrize("kind", ["push", "stage", "commit"])
def test_numbers_that_are_none_push_nothing(server: Server, kind: str, number: Any) -> None:
    check_malformed(server, pushed(kind, 0, number))


def test_what_was_not_staged_cannot_be_committed(server: Server) -> None:
    for worker, number in ((0, 0), (3, 6)):
        check_malformed(server, Message("commit", {"worker": worker, "number": number}))


PULLS: dict[str, tuple[Mapping[str, Any], tuple[np.ndarray, ...]]] = {
    "no meta": ({}, (np.zeros(1, I4),)),
    "no arrays": ({"arenas": [[0, 1]]}, ()),
    "no such table": ({"arenas": [[5, 1]]}, (np.zeros(1, I4),)),
    "a table below zero": ({"arenas": [[-1, 1]]}, (np.zeros(1, I4),)),
    "a huge count": ({"arenas": [[0, 1 << 62]]}, (np.zeros(1, I4),)),
    "a slot below zero": ({"arenas": [[0, 1]]}, (np.array([-1]),)),
    "a slot beyond the shard": ({"arenas": [[0, 1]]}, (np.array([8]),)),
    "a slot that is not a number": ({"arenas": [[0, 1]]}, (np.array([np.inf], F4),)),
    "more slots than counted": ({"arenas": [[0, 1]]}, (np.zeros(3, I4),)),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("what", PULLS)
def test_malformed_pulls_are_refused(server: Server, what: str) -> None:
    check_malformed(server, Message("pull", *PULLS[what]))


# Differences, and what belongs to them.


def fold(**changes: Any) -> Message:
    """A flush that is right but for what is changed."""
    meta = {"number": 1, "frozen": [], "receivers": [0], "arenas": [[0, 1, WIDTH, "difference"]]}
    arrays = {
        "marks": np.full((2, 1), -1, np.int64),
        "slots": np.zeros(1, I4),
        "positions": np.zeros(1, np.uint8),
        "diffs": np.ones(WIDTH, np.uint32),
    }
    for name, value in changes.items():
        (arrays if name in arrays else meta)[name] = value
    return Message("fold", meta, tuple(array for array in arrays.values() if array is not None))


FOLDS: dict[str, dict[str, Any]] = {
    "no number": {"number": None},
    "a number of text": {"number": "x"},
    "no receivers": {"receivers": None},
    "frozen is text": {"frozen": "x"},
    "tables are none": {"arenas": None},
    "no width": {"arenas": [[0, 1]]},
    "no kind": {"arenas": [[0, 1, WIDTH]]},
    "an unknown kind": {"arenas": [[0, 1, WIDTH, "record"]]},
    "a kind that is a list": {"arenas": [[0, 1, WIDTH, ["gradient"]]]},
    "gradients for parities of differences": {
        "arenas": [[0, 1, 2, "gradient"]],
        "diffs": np.ones(2, np.float32),
    },
    "no such table": {"arenas": [[2, 1, WIDTH, "difference"]]},
    "a table below zero": {"arenas": [[-1, 1, WIDTH, "difference"]]},
    "a table without parity": {"arenas": [[1, 1, WIDTH, "difference"]]},
    "a count below zero": {"arenas": [[0, -1, WIDTH, "difference"]]},
    "a count of a half": {"arenas": [[0, 0.5, WIDTH, "difference"]]},
    "a huge count": {"arenas": [[0, 1 << 62, WIDTH, "difference"]]},
    "a count beyond any": {"arenas": [[0, 1 << 80, WIDTH, "difference"]]},
    "a width below one": {"arenas": [[0, 1, 0, "difference"]]},
    "a huge width": {"arenas": [[0, 1, 1 << 62, "difference"]]},
    "another width": {"arenas": [[0, 1, 1, "difference"]], "diffs": np.ones(1, np.uint32)},
    "fewer differences than counted": {"diffs": np.ones(WIDTH - 1, np.uint32)},
    "more differences than counted": {"diffs": np.ones(2 * WIDTH, np.uint32)},
    "more slots than counted": {"slots": np.zeros(2, I4)},
    "more positions than counted": {"positions": np.zeros(2, np.uint8)},
    "no differences": {"diffs": None},
    "differences of doubles": {"diffs": np.ones(WIDTH)},
    "differences of long words": {"diffs": np.ones(WIDTH, np.int64)},
    "more marks than workers": {"marks": np.zeros(257, np.int64)},
    "a slot below zero": {"slots": np.array([-1], I4)},
    "a slot beyond the parities": {"slots": np.array([99], I4)},
    "a position beyond the stripe": {"positions": np.array([2], np.uint8)},
}


@pytest.mark.parametrize("what", FOLDS)
def test_malformed_differences_change_nothing(server: Server, what: str) -> None:
    check_malformed(server, fold(**FOLDS[what]), name="server-1")


@pytest.mark.parametrize("name", ["worker-1", "server-x", "server", "coordinator", "server-3"])
def test_only_servers_send_differences(server: Server, name: str) -> None:
    check_malformed(server, fold(), name=name)


@pytest.mark.parametrize("message", [fold(), Message("apply", {"number": 1})])
def test_differences_on_a_control_stream_are_refused(server: Server, message: Message) -> None:
    check_refused(server, message, name="server-1", epoch=None)


def test_differences_of_another_epoch_are_refused(server: Server) -> None:
    error = check_refused(server, fold(), name="server-1", epoch=EPOCH + 1)
    assert isinstance(error, ConflictError)
    with pytest.raises(ConflictError):
        Stream(server.address, token=TOKEN, name="server-1", epoch=EPOCH - 1)


# What recovering servers and the coordinator ask.

CALLERS: dict[str, tuple[str, int | None]] = {
    "coordinator": ("coordinator", None),
    "driver": ("driver", None),
    "server": ("server-1", EPOCH),
    "worker": ("worker-3", EPOCH),
    "nobody we know": ("somebody", EPOCH),
}

ASKED: dict[str, Message] = {
    "an unknown kind": Message("explode"),
    "an empty kind": Message(""),
    "freeze without meta": Message("freeze"),
    "freeze of no range": Message("freeze", {"ticket": "t", "granules": None}),
    "thaw without meta": Message("thaw"),
    "apply without number": Message("apply"),
    "fetch without meta": Message("fetch", {}, (np.zeros(1, I4), np.zeros(0, I4))),
    "fetch without arrays": Message("fetch", {"ticket": "t", "arena": 0}),
    "fetch of what is not frozen": Message(
        "fetch", {"ticket": "t", "arena": 0}, (np.zeros(1, I4), np.zeros(0, I4))
    ),
    "report of nobody": Message("report"),
    "report of no such server": Message("report", {"source": 3}),
    "settle of nobody": Message("settle", {"source": None, "number": 0}),
    "settle without number": Message("settle", {"source": 1}),
    "read without meta": Message("read"),
    "read of no such table": Message(
        "read", {"arena": 2, "is_parity": False, "start": 0, "stop": 1}
    ),
    "read of text": Message("read", {"arena": 0, "is_parity": 0, "start": "a", "stop": 1}),
    "bar of nobody": Message("bar"),
    "resolve of nobody": Message("resolve", {"last": 0, "is_lost": True}),
    "resolve of no such worker": Message("resolve", {"worker": 256, "last": 5, "is_lost": True}),
    "resolve without a number": Message("resolve", {"worker": 3, "is_lost": True}),
    "resolve of nobody knows": Message("resolve", {"worker": 3, "last": 5}),
    "held of nobody": Message("held", {}),
    "copies of nobody": Message("copies", {"workers": [3], "after": [-1, -1]}),
    "copies of no workers": Message("copies", {"owner": 2, "after": [-1, -1]}),
    "copies after nothing": Message("copies", {"owner": 2, "workers": None}),
    "owed of nobody": Message("owed", {"workers": ["x"], "after": [-1, -1]}),
    "inherit nothing": Message("inherit"),
    "keep rows beyond the shard": parts.pack_entrusted(
        "inherit", {}, [Entrusted(3, 7, [gradients(0, [99])])]
    ),
    "entrust for nobody": Message("entrust", {"parts": []}),
    "entrust to no witness": Message("entrust", {"owner": 1, "parts": []}),
    "entrust of no such table": Message(
        "entrust",
        {"owner": 2, "parts": [{"worker": 0, "number": 0, "arenas": [[7, 1]]}]},
        (np.zeros(1, I4), ONE),
    ),
    "past of no such worker": Message("past", {"worker": 256}),
    "begin again": Message("begin", {"spec": SPEC.to_json(), "server": 1, "view": VIEW.to_json()}),
    "begin with nothing": Message("begin"),
    "adopt when serving": Message("adopt", {"spec": SPEC.to_json(), "server": 1, "reports": []}),
    "a view that is none": Message("view", {"view": {"epoch": "x"}}),
    "no view": Message("view"),
}


@pytest.mark.parametrize("what", ASKED)
def test_malformed_orders_change_nothing(server: Server, what: str) -> None:
    message = ASKED[what]
    senders = SERVER_KINDS[message.kind].senders if message.kind in SERVER_KINDS else ()
    for name, epoch in CALLERS.values():
        error = check_refused(server, message, name=name, epoch=epoch)
        if senders and role_of(Caller(name, epoch))[0] not in senders:
            assert isinstance(error, InvalidRequestError)
            assert "may ask for this" in str(error)
        else:
            assert "may ask for this" not in str(error)


@pytest.mark.parametrize("slots", [[-1], [8], [1 << 62]])
def test_fetching_rows_that_are_not_here_is_refused(server: Server, slots: list[int]) -> None:
    none_N, slots_N = np.zeros(0, np.int64), np.array(slots)
    with Stream(server.address, token=TOKEN, name="server-1", epoch=EPOCH) as stream:
        stream.ask(Message("freeze", {"ticket": "1.0", "granules": [0, 1]}))
        for arrays in ((slots_N, none_N), (none_N, slots_N)):
            message = Message("fetch", {"ticket": "1.0", "arena": 0}, arrays)
            check_malformed(server, message, name="server-1")
        stream.ask(Message("thaw", {"ticket": "1.0"}))


def test_a_view_that_is_older_changes_nothing(server: Server) -> None:
    before = snapshot(server.shard)
    with Stream(server.address, token=TOKEN, name="coordinator", epoch=None) as stream:
        old = View(EPOCH - 1, VIEW.addresses, version=VIEW.version - 1)
        stream.ask(Message("view", {"view": old.to_json()}))
    assert snapshot(server.shard) == before


@pytest.mark.parametrize("kind", ["pull", "push", "fold", "freeze", "report", "drain", "stats"])
def test_a_server_without_a_shard_says_so(kind: str) -> None:
    spare = Server(TOKEN)
    try:
        names = {"push": "worker-0", "report": "coordinator"}
        name = names.get(kind, "server-1")
        meta = {"worker": 0, "number": 0, "source": 1, "granules": []}
        message = fold() if kind == "fold" else Message(
            kind, {"arenas": [], "ticket": "t", **meta}, (np.zeros(0, I4), np.zeros(0, F4))
        )  # fmt: skip
        with (
            Stream(spare.address, token=TOKEN, name=name) as stream,
            pytest.raises(ConflictError, match="holds nothing yet"),
        ):
            stream.ask(message)
    finally:
        spare.close()
