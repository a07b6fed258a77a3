from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.cluster.orders import (
    ServerOrder,
    check_address,
    check_fits,
    check_next,
    check_view,
    renewal_of,
)
from holdfast.cluster.progress import Progress
from holdfast.cluster.shard import Renewal
from holdfast.cluster.spec import ClusterSpec, TableSpec
from holdfast.cluster.view import View
from holdfast.errors import InvalidRequestError
from holdfast.model.placement import Placement

SPEC = ClusterSpec((TableSpec("users", 24, 2, Placement(3, data=2, parity=1)),), locks=2)
VIEW = View(4, ("127.0.0.1:1", "[::1]:2", "host-3.example:65535"), version=7)
GOOD: dict[str, Any] = {
    "spec": SPEC.to_json(),
    "server": 2,
    "view": VIEW.to_json(),
    "coordinator": "127.0.0.1:4711",
    "flush_every_s": 2,
    "recovery_share": 0.03,
    "two_phase": True,
    "renewal": 1,
}


def test_an_order_is_read_as_it_was_given() -> None:
    order = ServerOrder.from_json(GOOD)
    assert order == ServerOrder(SPEC, 2, VIEW, "127.0.0.1:4711", 2.0, 0.03, True, 1)
    few = {name: GOOD[name] for name in ("spec", "server", "view")}
    assert ServerOrder.from_json(few) == ServerOrder(SPEC, 2, VIEW, "", 0.0, 1.0, False, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"server": 3}, {"server": -1}, {"server": "2"}, {"server": True}, {"server": None},
        {"server": 1 << 80}, {"coordinator": None}, {"coordinator": "nowhere"},
        {"coordinator": "host:99999"}, {"coordinator": "a:1/../b"}, {"flush_every_s": -1},
        {"flush_every_s": float("nan")}, {"flush_every_s": 1e300}, {"flush_every_s": "2"},
        {"flush_every_s": True}, {"recovery_share": 0}, {"recovery_share": float("nan")},
        {"recovery_share": "x"}, {"renewal": -1}, {"renewal": 0.5},
        {"view": View(4, ("127.0.0.1:1",), version=7).to_json()},
        {"view": dataclasses.replace(VIEW, addresses=("",) * 3).to_json()},
        {"view": dataclasses.replace(VIEW, lacks_rows=frozenset({3})).to_json()},
        {"view": dataclasses.replace(VIEW, joined=(5, 4, 4)).to_json()},
    ],
    ids=str,
)  # fmt: skip
def test_an_order_that_cannot_be_followed_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        ServerOrder.from_json({**GOOD, **wrong})


@pytest.mark.parametrize("address", ["", "a", "a:", ":1", "a:b", "a:1 ", "a b:1", "a:-1", 7, None])
def test_what_is_no_host_and_port_is_no_address(address: object) -> None:
    with pytest.raises(InvalidRequestError, match="not an address"):
        check_address(address)


def test_a_shard_that_does_not_fit_is_refused_before_it_is_made() -> None:
    check_fits(SPEC, 0)
    huge = TableSpec("users", 1 << 40, 1 << 16, Placement(3, data=2, parity=1))
    with pytest.raises(InvalidRequestError, match="do not fit"):
        check_fits(ClusterSpec((huge,)), 0)
    many = TableSpec("users", 24, 2, Placement(1 << 16, data=2, parity=1))
    with pytest.raises(InvalidRequestError, match="do not fit"):
        check_fits(ClusterSpec((many,), locks=4096), 0)


def test_views_follow_each_other_as_members_change() -> None:
    later = VIEW.replacing({1: "127.0.0.1:9"}, epoch=6)
    for view in (VIEW, VIEW.with_rows(1), later, later.with_rows(1).with_parities(1)):
        check_next(view, VIEW)
        check_view(view, SPEC)


@pytest.mark.parametrize(
    "view",
    [
        dataclasses.replace(VIEW, epoch=3, version=8),  # an epoch never falls
        dataclasses.replace(VIEW, epoch=9, version=8),  # a change of members is a new version
        dataclasses.replace(VIEW, epoch=1 << 40, version=1 << 40),
        dataclasses.replace(VIEW, version=1 << 40),
    ],
)
def test_a_view_from_nowhere_is_refused(view: View) -> None:
    with pytest.raises(InvalidRequestError, match="no such view"):
        check_next(view, VIEW)


def test_a_renewal_names_servers_that_there_are() -> None:
    assert renewal_of(None, SPEC) is None
    assert renewal_of([3, [0, 2]], SPEC) == Renewal(3, (0, 2))
    for wrong in ([3, [3]], [-1, []], [3, "x"], ["3", []]):
        with pytest.raises(InvalidRequestError):
            renewal_of(wrong, SPEC)


# What servers report.

PROGRESS = Progress(2, 4, 0, "range", seconds=0.5, granule=1, rows=9, left=3)


def test_progress_travels_as_json_and_comes_back_the_same() -> None:
    assert Progress.from_json(PROGRESS.to_json(), servers=3) == PROGRESS


@pytest.mark.parametrize(
    "wrong",
    [
        {"server": 3}, {"server": -1}, {"server": "2"}, {"what": "explode"}, {"what": None},
        {"what": ["rows"]}, {"seconds": -1}, {"seconds": float("nan")}, {"seconds": "x"},
        {"joined": None}, {"rows": -1}, {"left": 0.5}, {"granule": "x"}, {"renewal": {}},
        {"error": 7},
    ],
    ids=str,
)  # fmt: skip
def test_progress_of_nobody_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        Progress.from_json({**PROGRESS.to_json(), **wrong}, servers=3)
