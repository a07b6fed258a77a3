"""A row that changed is never missed, and every cursor sees every change once."""

from __future__ import annotations

import copy
import gc
import io
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.tracking import Cursor, Marks, Tracker
from holdfast.checkpoint.tracking.optimizers import steps
from holdfast.checkpoint.tracking.watch import TableWatch
from holdfast.errors import InvalidRequestError
from holdfast.kernels.rows import bitmap
from holdfast.model.tables import find_tables


def rows_of(marks: Marks, table: str, rows: int = 1000) -> list[int]:
    return list(bitmap.ids(marks[table], 0, rows))


def peek(tracker: Tracker, cursor: Cursor) -> Marks:
    tracker.catch_up(cursor)
    return cursor.peek()


def advance(tracker: Tracker, cursor: Cursor) -> Marks:
    tracker.catch_up(cursor)
    return cursor.advance()


class Trained:
    """Two tables, trained by lookups: marks appear when the optimizer has stepped."""

    def __init__(self, *, sparse: bool = True) -> None:
        self.model = nn.ModuleDict(
            {
                "a": nn.Embedding(1000, 4, sparse=sparse),
                "b": nn.EmbeddingBag(500, 4, mode="sum", sparse=sparse),
            }
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.tracker = Tracker(find_tables(self.model, [self.optimizer]))

    def backward(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.model[name](*args, **kwargs).sum().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, *ids: int) -> None:
        self.backward("a", torch.tensor(ids))
        self.step()


both = pytest.mark.parametrize("sparse", [True, False])


@both
def test_lookups_of_all_forms_are_marked(sparse: bool) -> None:
    it = Trained(sparse=sparse)
    cursor = it.tracker.cursor()
    it.backward("a", torch.tensor([[1, 2], [3, 999]]))
    it.backward("a", input=torch.tensor(7))
    it.backward("a", torch.tensor([5, 6], dtype=torch.int32))
    it.backward("b", torch.tensor([10, 11, 12]), torch.tensor([0, 2]))
    it.backward("b", torch.arange(40).view(2, 20)[:, ::2])
    assert rows_of(peek(it.tracker, cursor), "a.weight") == []
    it.step()
    seen = advance(it.tracker, cursor)
    assert rows_of(seen, "a.weight") == [1, 2, 3, 5, 6, 7, 999]
    assert rows_of(seen, "b.weight") == sorted({10, 11, 12, *range(0, 40, 2)})
    assert rows_of(peek(it.tracker, cursor), "a.weight") == []


@both
def test_inference_is_not_marked(sparse: bool) -> None:
    it = Trained(sparse=sparse)
    cursor = it.tracker.cursor()
    with torch.no_grad():
        it.model["a"](torch.tensor([1]))
    it.model.eval()
    it.model["a"](torch.tensor([2]))
    it.backward("a", torch.tensor([3]))  # fine-tuning in eval mode does change rows
    it.step()
    assert rows_of(peek(it.tracker, cursor), "a.weight") == [3]


def test_max_norm_rewrites_rows_in_any_forward_pass() -> None:
    model = nn.Embedding(10, 4, max_norm=1.0)
    nn.init.ones_(model.weight)  # no row is short enough to stay as it is
    tracker = Tracker(find_tables(model))
    cursor = tracker.cursor()
    tracker.reset()  # the rows are known as they are
    with torch.no_grad():
        model(torch.tensor([4]))
    assert rows_of(peek(tracker, cursor), "weight", 10) == [4]


def test_lookup_tracking_is_refused_where_lookups_rewrite_rows() -> None:
    model = nn.Embedding(10, 4, max_norm=1.0, sparse=True)
    with pytest.raises(InvalidRequestError, match="max_norm rewrites rows"):
        Tracker(find_tables(model), tracking="lookup")


def test_an_edit_before_a_lookup_with_max_norm_is_not_hidden_by_it() -> None:
    model = nn.Embedding(10, 4, max_norm=1.0)
    nn.init.ones_(model.weight)  # no row is short enough to stay as it is
    tracker = Tracker(find_tables(model))
    cursor = tracker.cursor()
    with torch.no_grad():
        model.weight[7] = 0.5
        model(torch.tensor([4]))
    assert 7 in rows_of(peek(tracker, cursor), "weight", 10)


@both
def test_rows_looked_up_before_a_checkpoint_and_stepped_after_it_are_not_lost(sparse: bool) -> None:
    it = Trained(sparse=sparse)
    cursor = it.tracker.cursor()
    it.backward("a", torch.tensor([100]))
    advance(it.tracker, cursor)
    it.backward("a", torch.tensor([200]))
    it.step()
    assert rows_of(advance(it.tracker, cursor), "a.weight") == [100, 200]


@both
def test_gradients_that_no_module_call_explains_are_seen(sparse: bool) -> None:
    it = Trained(sparse=sparse)
    cursor = it.tracker.cursor()
    weight = it.model["a"].weight
    nn.functional.embedding(torch.tensor([8, 9]), weight, sparse=sparse).sum().backward()
    it.step()
    assert rows_of(advance(it.tracker, cursor), "a.weight") == [8, 9]


def test_many_lookups_between_two_steps_are_all_kept() -> None:
    it = Trained(sparse=False)
    cursor = it.tracker.cursor()
    for row in range(300):
        it.backward("a", torch.tensor([row]))
    it.step()
    assert rows_of(advance(it.tracker, cursor), "a.weight") == list(range(300))


def test_watched_model_can_be_copied_and_stored_whole() -> None:
    it = Trained(sparse=False)
    cursor = it.tracker.cursor()
    twin = copy.deepcopy(it.model)
    torch.save(it.model, io.BytesIO())
    twin["a"](torch.tensor([1])).sum().backward()
    assert rows_of(peek(it.tracker, cursor), "a.weight") == []


def test_cursors_are_independent() -> None:
    it = Trained()
    tracker = it.tracker
    first = tracker.cursor()
    it.train(1)
    second = tracker.cursor()
    it.train(2)
    assert rows_of(advance(it.tracker, first), "a.weight") == [1, 2]
    it.train(3)
    assert rows_of(peek(it.tracker, second), "a.weight") == [2, 3]
    assert rows_of(advance(it.tracker, first), "a.weight") == [3]
    assert rows_of(advance(it.tracker, second), "a.weight") == [2, 3]
    assert rows_of(peek(it.tracker, first), "a.weight") == []


def test_what_is_given_back_is_seen_again_by_that_cursor_alone() -> None:
    it = Trained()
    tracker = it.tracker
    first, second = tracker.cursor(), tracker.cursor()
    it.train(1)
    taken = advance(it.tracker, first)
    advance(it.tracker, second)
    first.give_back(taken)
    it.train(9)
    assert rows_of(advance(it.tracker, first), "a.weight") == [1, 9]
    assert rows_of(advance(it.tracker, first), "a.weight") == []
    assert rows_of(advance(it.tracker, second), "a.weight") == [9]


@pytest.mark.parametrize(("tracking", "bits_a_row"), [("lookup", 2), ("auto", 2 + 32)])
def test_memory_is_a_few_bits_a_row(tracking: str, bits_a_row: int) -> None:
    model = nn.Embedding(1_000_000, 64, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = Tracker(find_tables(model, [optimizer]), tracking=tracking)
    cursor = tracker.cursor()
    tracker.begin_save("weight", is_whole=True)
    model(torch.tensor([1, 2, 3])).sum().backward()
    optimizer.step()
    assert rows_of(advance(tracker, cursor), "weight") == [1, 2, 3]
    assert tracker.bytes <= bits_a_row * 1_000_064 // 8


def test_marks_of_many_threads_are_all_kept() -> None:
    tracker = Trained().tracker
    cursor = tracker.cursor()

    def mark(start: int) -> None:
        for row in range(start, 1000, 8):
            tracker.mark("a.weight", np.array([row]))

    threads = [threading.Thread(target=mark, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows_of(peek(tracker, cursor), "a.weight") == list(range(1000))


def test_a_tracker_puts_no_hooks_on_the_model() -> None:
    """They would be copied, pickled, compiled and scripted with it."""
    model = nn.Embedding(10, 4, max_norm=1.0)
    tracker = Tracker(find_tables(model))
    assert not model._forward_hooks and not model._forward_pre_hooks
    tracker.close()


class Broken(torch.optim.SGD):
    """An optimizer that cannot say what it moves."""

    is_broken = False

    def __getattribute__(self, name: str) -> Any:
        if name == "param_groups" and Broken.is_broken:
            raise RuntimeError("no groups today")
        return super().__getattribute__(name)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.parameters:
            parameter.data.sub_(parameter.grad, alpha=0.1)


def test_an_optimizer_that_fails_when_it_is_looked_at_does_not_stop_training() -> None:
    model = nn.Embedding(50, 4)
    optimizer = Broken(model.parameters(), lr=0.1)
    optimizer.parameters = list(model.parameters())  # type: ignore[attr-defined]
    tracker = Tracker(find_tables(model))
    cursor = tracker.cursor()
    tracker.reset()
    model(torch.tensor([3, 9])).sum().backward()
    Broken.is_broken = True
    try:
        optimizer.step()
    finally:
        Broken.is_broken = False
    (notice,) = tracker.catch_up(cursor)[:1]
    assert "no groups today" in notice.reason
    assert rows_of(cursor.advance(), "weight", 50) == [3, 9]


def test_staged_rows_that_cannot_be_hashed_do_not_fail_their_save() -> None:
    model = nn.Embedding(50, 4)
    tracker = Tracker(find_tables(model))
    cursor = tracker.cursor()
    tracker.begin_save("weight", is_whole=True)
    tracker.learn("weight", range(50), ["weight"], [np.zeros((3, 4), np.float32)])
    tracker.end_save(is_committed=True)
    tracker.catch_up(cursor)
    assert rows_of(cursor.advance(), "weight", 50) == list(range(50))


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_tracker_that_is_closed_or_forgotten_hears_of_no_steps(is_closed: bool) -> None:
    gc.collect()  # trackers that other tests forgot
    it = Trained()
    assert any(known() is it.tracker for known in steps._listeners)
    if is_closed:
        it.tracker.close()
        assert not any(known() is it.tracker for known in steps._listeners)
    else:
        del it.tracker
        gc.collect()
        assert all(known() is None for known in steps._listeners)
        it.train(1)


def test_trackers_collected_in_mid_step_do_not_break_it() -> None:
    class Collecting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            gc.collect()

    model = nn.Embedding(10, 4)
    optimizer = Collecting(model.parameters(), lr=0.1)
    for _ in range(20):
        circle: list[Any] = [Tracker(find_tables(model, [optimizer]))]
        circle.append(circle)
        del circle
        optimizer.step()


def test_shared_weight_is_one_table_watched_in_both_places() -> None:
    model = nn.ModuleDict({"x": nn.Embedding(20, 4), "y": nn.Embedding(20, 4)})
    model["y"].weight = model["x"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tables = find_tables(model, [optimizer])
    assert [table.name for table in tables] == ["x.weight"]
    tracker = Tracker(tables)
    cursor = tracker.cursor()
    (model["x"](torch.tensor([1])) + model["y"](torch.tensor([2]))).sum().backward()
    optimizer.step()
    assert rows_of(peek(tracker, cursor), "x.weight", 20) == [1, 2]


def test_hash_tracking_sees_any_change_of_weights_or_state() -> None:
    model = nn.Embedding(100, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.tensor([0])).sum().backward()
    optimizer.step()
    tracker = Tracker(find_tables(model, [optimizer]), tracking="hash")
    cursor = tracker.cursor()
    advance(tracker, cursor)  # learns the rows
    assert rows_of(peek(tracker, cursor), "weight", 100) == []
    model.weight.data.view(torch.int32)[5, 3] ^= 1  # the last bit, however large the weight is
    optimizer.state[model.weight]["momentum_buffer"].numpy()[8, 0] = -0.0
    taken = advance(tracker, cursor)
    assert rows_of(taken, "weight", 100) == [5, 8]
    assert rows_of(peek(tracker, cursor), "weight", 100) == []
    cursor.give_back(taken)
    assert rows_of(peek(tracker, cursor), "weight", 100) == [5, 8]


@pytest.mark.parametrize("is_replicated", [True, False])
def test_rows_that_only_other_ranks_looked_up_are_marked(is_replicated: bool) -> None:
    model = nn.Embedding(20, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = Tracker(find_tables(model, [optimizer], is_replicated=is_replicated))
    cursor = tracker.cursor()
    model(torch.tensor([1, 2])).sum().backward()
    assert model.weight.grad is not None
    model.weight.grad[7] = 1.0  # what adding up gradients over ranks does
    optimizer.step()
    assert rows_of(peek(tracker, cursor), "weight", 20) == [1, 2, 7]
    tracker.close()


def test_a_parameter_added_to_an_optimizer_later_is_tracked() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(50, 4), "b": nn.Embedding(50, 4)})
    optimizer = torch.optim.SGD(model["a"].parameters(), lr=0.1)
    tracker = Tracker(find_tables(model, [optimizer]))
    cursor = tracker.cursor()
    model["a"](torch.tensor([1])).sum().backward()
    optimizer.step()
    advance(tracker, cursor)
    optimizer.add_param_group({"params": list(model["b"].parameters())})
    model["b"](torch.tensor([3])).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    model["b"](torch.tensor([4])).sum().backward()
    optimizer.step()
    seen = advance(tracker, cursor)
    assert rows_of(seen, "b.weight", 50) == [4]
    assert rows_of(seen, "a.weight", 50) == []


def test_an_optimizer_that_was_not_given_is_seen_and_told_of() -> None:
    model = nn.Embedding(50, 4)
    tracker = Tracker(find_tables(model))
    cursor = tracker.cursor()
    stranger = torch.optim.Adagrad(model.parameters(), fused=True)  # its writes are not counted
    model(torch.tensor([3])).sum().backward()
    stranger.step()
    (notice,) = tracker.catch_up(cursor)
    assert "Adagrad trains it and was not given" in notice.reason
    assert rows_of(cursor.advance(), "weight", 50) == [3]


def test_lookup_tracking_is_refused_where_gradients_do_not_tell_all() -> None:
    model = nn.Embedding(10, 2)
    tables = find_tables(model, [torch.optim.Adam(model.parameters())])
    with pytest.raises(InvalidRequestError, match=r"weight: Adam keeps.*tracking='auto'"):
        Tracker(tables, tracking="lookup")
    with pytest.raises(InvalidRequestError, match=r"unknown tracking.*'auto', 'lookup', 'hash'"):
        Tracker(tables, tracking="luck")


def test_whatever_fails_in_tracking_training_goes_on_and_rows_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    it = Trained()
    cursor = it.tracker.cursor()

    def fail(*args: Any) -> None:
        raise ValueError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr(TableWatch, "_mark_gradient", fail)
        it.train(5)
    notices = it.tracker.catch_up(cursor)
    assert 5 in rows_of(cursor.advance(), "a.weight")
    assert any("tracking failed (ValueError: no such thing)" in n.reason for n in notices)
    with monkeypatch.context() as patched:
        patched.setattr(TableWatch, "_happened", fail)
        it.train(6)
        it.tracker.catch_up(cursor)
        it.tracker.scan(cursor)
    assert 6 in rows_of(cursor.advance(), "a.weight")


def test_a_closure_is_training_code_inside_a_step() -> None:
    it = Trained()
    cursor = it.tracker.cursor()
    seen = []

    def closure(*args: Any) -> float:
        seen.append(args)
        with torch.no_grad():
            it.model["a"].weight[77] = 1.0
        return 1.5

    it.train(1)
    advance(it.tracker, cursor)
    closure.kept = "by a trainer"  # type: ignore[attr-defined]
    assert it.optimizer.step(closure) == 1.5
    assert it.optimizer.step(closure=closure) == 1.5
    assert seen == [(), ()]
    assert 77 in rows_of(advance(it.tracker, cursor), "a.weight")


def test_an_optimizer_of_memory_that_a_table_shares_writes_to_it() -> None:
    model = nn.Embedding(50, 4)
    flat = nn.Parameter(model.weight.data.view(-1))
    tracker = Tracker(find_tables(model))
    cursor = tracker.cursor()
    tracker.begin_save("weight", is_whole=True)
    (watch,) = tracker._watches.values()
    tracker.learn("weight", range(50), ["weight"], [model.weight.detach().numpy().copy()])
    optimizer = torch.optim.SGD([flat], lr=0.1)
    for _ in range(6):  # longer than a table that nothing trains is compared
        flat.grad = torch.zeros(200)
        flat.grad[40] = 1.0
        optimizer.step()
        assert 10 in rows_of(advance(tracker, cursor), "weight", 50)
    assert watch.bytes > 0


@pytest.mark.parametrize(
    ("tracking", "sparse", "kind", "bytes_max"),
    [
        ("auto", True, torch.optim.SGD, 4.5),
        ("auto", False, torch.optim.SGD, 4.6),
        ("auto", False, torch.optim.Adam, 4.8),
        ("hash", True, torch.optim.SGD, 8.5),
        ("lookup", True, torch.optim.SGD, 0.5),
    ],
)
def test_memory_a_row(
    tracking: str, sparse: bool, kind: type[torch.optim.Optimizer], bytes_max: float
) -> None:
    rows = 64_000
    model = nn.Embedding(rows, 4, sparse=sparse)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    (table,) = find_tables(model, [optimizer])
    tracker = Tracker([table], tracking=tracking)
    cursor = tracker.cursor()
    for _ in range(3):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        tracker.catch_up(cursor)
        tracker.begin_save("weight", is_whole=True)
        names = [column.name for column in table.schema().columns]
        tracker.learn("weight", range(rows), names, table.arrays())
        cursor.advance()
    assert 0.1 < tracker.bytes / rows < bytes_max
