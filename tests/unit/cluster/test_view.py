from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.view import View
from holdfast.errors import InvalidRequestError

SERVERS = st.frozensets(st.integers(0, 4))


@st.composite
def views(draw: st.DrawFn) -> View:
    addresses = tuple(draw(st.lists(st.text(max_size=9), min_size=5, max_size=5)))
    counts = st.integers(0, 1 << 62)
    return View(draw(counts), addresses, draw(SERVERS), draw(SERVERS), draw(counts))


@settings(deadline=None)
@given(views())
def test_a_view_travels_as_json_and_comes_back_the_same(view: View) -> None:
    assert View.from_json(json.loads(json.dumps(view.to_json()))) == view


@settings(deadline=None)
@given(views(), st.frozensets(st.integers(0, 4), min_size=1), st.integers(1, 5))
def test_replacements_lack_everything_and_others_stay(
    view: View, lost: frozenset[int], later: int
) -> None:
    after = view.replacing({server: f"new-{server}" for server in lost}, epoch=view.epoch + later)
    assert after.epoch == view.epoch + later
    assert after.version > view.version
    assert after.lacks_rows == view.lacks_rows | lost
    assert after.lacks_parities == view.lacks_parities | lost
    for server, address in enumerate(view.addresses):
        assert after.addresses[server] == (f"new-{server}" if server in lost else address)


@settings(deadline=None)
@given(views(), st.integers(0, 4))
def test_what_comes_back_makes_a_newer_view_of_the_same_epoch(view: View, server: int) -> None:
    rows, parities = view.with_rows(server), view.with_parities(server)
    assert rows.version > view.version and parities.version > view.version
    assert rows.epoch == parities.epoch == view.epoch
    assert rows.lacks_rows == view.lacks_rows - {server}
    assert rows.lacks_parities == view.lacks_parities
    assert parities.lacks_parities == view.lacks_parities - {server}
    assert parities.lacks_rows == view.lacks_rows
    assert server not in rows.with_parities(server).lacking
    assert view.lacking - {server} == rows.with_parities(server).lacking


def test_an_epoch_never_comes_twice() -> None:
    view = View(3, ("a", "b"))
    for epoch in (2, 3):
        with pytest.raises(AssertionError):
            view.replacing({0: "c"}, epoch=epoch)


GOOD = View(1, ("a:1",)).to_json()


@pytest.mark.parametrize(
    "value",
    [
        {},
        *({key: value for key, value in GOOD.items() if key != name} for name in GOOD),
        {**GOOD, "epoch": None},
        {**GOOD, "epoch": "x"},
        {**GOOD, "addresses": 7},
        {**GOOD, "lacks_rows": [None]},
        {**GOOD, "lacks_parities": ["x"]},
        {**GOOD, "version": []},
    ],
)
def test_what_is_not_a_view_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="not a view"):
        View.from_json(value)
