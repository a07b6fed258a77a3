"""A row that changed is never missed, and every cursor sees every change once."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.tracker import HashTracker, LookupTracker, Marks
from holdfast.checkpoint.unseen import Canary
from holdfast.errors import InvalidRequestError
from holdfast.kernels import bitmap
from holdfast.tables import find_tables


def rows_of(marks: Marks, table: str, rows: int = 1000) -> list[int]:
    return list(bitmap.ids(marks[table], 0, rows))


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
        self.tracker = LookupTracker(find_tables(self.model, [self.optimizer]))

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
    assert rows_of(cursor.peek(), "a.weight") == []
    it.step()
    seen = cursor.advance()
    assert rows_of(seen, "a.weight") == [1, 2, 3, 5, 6, 7, 999]
    assert rows_of(seen, "b.weight") == sorted({10, 11, 12, *range(0, 40, 2)})
    assert rows_of(cursor.peek(), "a.weight") == []


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
    assert rows_of(cursor.peek(), "a.weight") == [3]


def test_max_norm_rewrites_rows_in_any_forward_pass() -> None:
    model = nn.Embedding(10, 4, max_norm=1.0)
    cursor = LookupTracker(find_tables(model)).cursor()
    with torch.no_grad():
        model(torch.tensor([4]))
    assert rows_of(cursor.peek(), "weight", 10) == [4]


@both
def test_rows_looked_up_before_a_checkpoint_and_stepped_after_it_are_not_lost(sparse: bool) -> None:
    it = Trained(sparse=sparse)
    cursor = it.tracker.cursor()
    it.backward("a", torch.tensor([100]))
    cursor.advance()
    it.backward("a", torch.tensor([200]))
    it.step()
    assert rows_of(cursor.advance(), "a.weight") == [100, 200]


@both
def test_gradients_that_no_module_call_explains_are_seen(sparse: bool) -> None:
    it = Trained(sparse=sparse)
    cursor = it.tracker.cursor()
    weight = it.model["a"].weight
    nn.functional.embedding(torch.tensor([8, 9]), weight, sparse=sparse).sum().backward()
    it.step()
    assert rows_of(cursor.advance(), "a.weight") == [8, 9]


def test_many_lookups_between_two_steps_are_all_kept() -> None:
    it = Trained(sparse=False)
    cursor = it.tracker.cursor()
    for row in range(300):
        it.backward("a", torch.tensor([row]))
    it.step()
    assert rows_of(cursor.advance(), "a.weight") == list(range(300))


def test_watched_model_can_be_copied_and_stored_whole() -> None:
    it = Trained(sparse=False)
    cursor = it.tracker.cursor()
    twin = copy.deepcopy(it.model)
    torch.save(it.model, io.BytesIO())
    twin["a"](torch.tensor([1])).sum().backward()
    assert rows_of(cursor.peek(), "a.weight") == []


def test_cursors_are_independent() -> None:
    it = Trained()
    tracker = it.tracker
    first = tracker.cursor()
    it.train(1)
    second = tracker.cursor()
    it.train(2)
    assert rows_of(first.advance(), "a.weight") == [1, 2]
    it.train(3)
    assert rows_of(second.peek(), "a.weight") == [2, 3]
    assert rows_of(first.advance(), "a.weight") == [3]
    assert rows_of(second.advance(), "a.weight") == [2, 3]
    assert rows_of(first.peek(), "a.weight") == []


def test_what_is_given_back_is_seen_again_by_that_cursor_alone() -> None:
    it = Trained()
    tracker = it.tracker
    first, second = tracker.cursor(), tracker.cursor()
    it.train(1)
    taken = first.advance()
    second.advance()
    first.give_back(taken)
    it.train(9)
    assert rows_of(first.advance(), "a.weight") == [1, 9]
    assert rows_of(first.advance(), "a.weight") == []
    assert rows_of(second.advance(), "a.weight") == [9]


def test_one_cursor_costs_a_bit_a_row() -> None:
    model = nn.Embedding(1_000_000, 64, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = LookupTracker(find_tables(model, [optimizer]))
    cursor = tracker.cursor()
    model(torch.tensor([1, 2, 3])).sum().backward()
    optimizer.step()
    assert rows_of(cursor.advance(), "weight") == [1, 2, 3]
    assert tracker.bytes <= 0.0005 * model.weight.nbytes


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
    assert rows_of(cursor.peek(), "a.weight") == list(range(1000))


def test_closed_tracker_leaves_the_model_alone() -> None:
    it = Trained()
    tracker = it.tracker
    cursor = tracker.cursor()
    tracker.close()
    it.train(1)
    assert rows_of(cursor.peek(), "a.weight") == []


def test_shared_weight_is_one_table_watched_in_both_places() -> None:
    model = nn.ModuleDict({"x": nn.Embedding(20, 4), "y": nn.Embedding(20, 4)})
    model["y"].weight = model["x"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tables = find_tables(model, [optimizer])
    assert [table.name for table in tables] == ["x.weight"]
    cursor = LookupTracker(tables).cursor()
    (model["x"](torch.tensor([1])) + model["y"](torch.tensor([2]))).sum().backward()
    optimizer.step()
    assert rows_of(cursor.peek(), "x.weight", 20) == [1, 2]


def test_hash_tracker_sees_any_change_of_weights_or_state() -> None:
    model = nn.Embedding(100, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.tensor([0])).sum().backward()
    optimizer.step()
    cursor = HashTracker(find_tables(model, [optimizer])).cursor()
    assert rows_of(cursor.peek(), "weight", 100) == []
    with torch.no_grad():
        model.weight[5, 3] += 1e-7
        optimizer.state[model.weight]["momentum_buffer"][8, 0] = -0.0
    taken = cursor.advance()
    assert rows_of(taken, "weight", 100) == [5, 8]
    assert rows_of(cursor.peek(), "weight", 100) == []
    cursor.give_back(taken)
    assert rows_of(cursor.peek(), "weight", 100) == [5, 8]


def test_canary_names_a_row_that_changed_unseen() -> None:
    model = nn.Embedding(300, 4)
    tables = find_tables(model)
    canary = Canary(tables)
    unmarked = {"weight": bitmap.new(300)}
    canary.check(unmarked)
    with torch.no_grad():
        model.weight[42] = 0.0
    with pytest.raises(InvalidRequestError, match="row=42"):
        canary.check(unmarked)
    bitmap.mark(unmarked["weight"], np.array([42]), 300)
    canary.check(unmarked)


@pytest.mark.parametrize("is_replicated", [True, False])
def test_rows_that_only_other_ranks_looked_up_are_marked(is_replicated: bool) -> None:
    model = nn.Embedding(20, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tables = find_tables(model, [optimizer], is_replicated=is_replicated)
    tracker = LookupTracker(tables)
    cursor = tracker.cursor()
    model(torch.tensor([1, 2])).sum().backward()
    assert model.weight.grad is not None
    model.weight.grad[7] = 1.0  # what adding up gradients over ranks does
    optimizer.step()
    marked = bitmap.ids(cursor.peek()["weight"], 0, 64).tolist()
    assert marked == ([1, 2, 7] if is_replicated else [1, 2])
    tracker.close()
