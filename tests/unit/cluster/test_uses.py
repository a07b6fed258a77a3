"""Uses of rows on one server: counted by table, taken by a snapshot, put back if it fails."""

from __future__ import annotations

import json

import numpy as np
import pytest

from holdfast.checkpoint.selecting.priority import Priority
from holdfast.cluster.uses import PriorityOrder, Span, Uses
from holdfast.kernels.rows import bitmap

ROWS = 400


def make_uses(by: str, weights_MD: np.ndarray | None = None, **more: object) -> Uses:
    """Rows 0 to 200 are of a large table, 200 to 240 of a small one, then another large one."""
    order = PriorityOrder(Priority(by=by, **more), ("a", "c"))

    def span(name: str, start: int, stop: int) -> Span:
        table_MD = np.zeros((ROWS, 2), np.float32) if weights_MD is None else weights_MD
        return Span(name, start, stop, lambda: table_MD[start:stop])

    return Uses(order, [span("c", 240, 400), span("a", 0, 200), span("b", 200, 240)], ROWS)


def words(ids: range | np.ndarray) -> bitmap.Words:
    words_W = bitmap.new(ROWS)
    bitmap.mark(words_W, np.array(ids, np.int64), ROWS)
    return words_W


def chosen(uses: Uses, changed: range | np.ndarray = range(ROWS)) -> list[int]:
    return bitmap.ids(uses.choose(words(changed)), 0, ROWS).tolist()


def test_each_large_table_gives_its_most_used_rows_and_small_ones_all_that_changed() -> None:
    uses = make_uses("mfu", r=0.05)
    for _ in range(2):
        uses.see(np.array([399, 7, 210, 250, 199], np.int32))
    uses.see(np.arange(100, 120))
    assert chosen(uses, range(ROWS - 1)) == [7, *range(100, 108), 199, *range(200, 240), 250]
    assert chosen(uses, np.array([7, 8, 205, 399])) == [7, 205, 399]


def test_uses_put_back_are_added_to_those_since_and_a_full_counter_stays_full() -> None:
    uses = make_uses("mfu", r=0.005)  # one row of each table
    for _ in range(3):
        uses.see(np.array([5, 300]))
    uses.see(np.array([6]))
    taken_W = words(np.array([5, 300]))
    taken = uses.take(taken_W)
    assert [found.tolist() for found in taken] == [[3], [3]]
    for _ in range(2):
        uses.see(np.array([6]))
    uses.see(np.array([5]))
    assert chosen(uses, np.array([5, 6, 300])) == [6]
    uses.put_back(taken_W, taken)
    assert chosen(uses, np.array([5, 6, 300])) == [5, 300]  # 4 against 3
    full = [np.array([2**32 - 2], np.uint32), np.array([0], np.uint32)]
    uses.put_back(taken_W, full)
    assert uses.take(words(np.array([5])))[0].tolist() == [2**32 - 1]


@pytest.mark.parametrize("seed", range(3))
def test_a_list_put_back_never_has_more_than_its_share_of_rows(seed: int) -> None:
    uses = make_uses("ssu", r=0.1, period=1, seed=seed)
    uses.see(np.arange(0, 20))
    everything_W = words(range(ROWS))
    first = chosen(uses, range(200))
    assert first == list(range(20))
    taken = uses.take(everything_W)
    assert chosen(uses, range(200)) == []
    uses.see(np.arange(10, 30))
    uses.put_back(everything_W, taken)
    found = chosen(uses, range(200))
    assert len(found) == 20 and set(found) <= set(range(30))
    uses.see(np.arange(50, 70))
    assert len(chosen(uses, range(200))) == 20


def test_rows_that_changed_most_are_measured_where_they_lie() -> None:
    weights_MD = np.zeros((ROWS, 2), np.float32)
    uses = make_uses("scar", weights_MD, r=0.01)  # 2 rows and 1
    weights_MD[[3, 9, 11, 260, 270], 1] = [1, 5, 2, 1, -3]
    assert chosen(uses, np.array([3, 9, 11, 260, 270])) == [9, 11, 270]
    taken_W = words(np.array([9, 11]))
    taken = uses.take(taken_W)
    assert chosen(uses, np.array([3, 9, 11])) == [3]
    uses.put_back(taken_W, taken)
    assert chosen(uses, np.array([3, 9, 11])) == [9, 11]


def test_an_order_goes_through_a_message_unchanged() -> None:
    order = PriorityOrder(Priority(by="ssu", r=0.25, share=0.5, period=3, seed=9), ("a", "b"))
    assert PriorityOrder.from_json(json.loads(json.dumps(order.to_json()))) == order
