"""A row that changed is never missed, and every cursor sees every change once."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.tracker import Canary, HashTracker, LookupTracker, Marks
from holdfast.errors import InvalidRequestError
from holdfast.kernels import bitmap
from holdfast.tables import find_tables


def rows_of(marks: Marks, table: str, rows: int = 1000) -> list[int]:
    return list(bitmap.ids(marks[table], 0, rows))


def make() -> tuple[nn.ModuleDict, LookupTracker]:
    model = nn.ModuleDict({"a": nn.Embedding(1000, 4), "b": nn.EmbeddingBag(500, 4, mode="sum")})
    return model, LookupTracker(find_tables(model))


def test_lookups_of_all_forms_are_marked() -> None:
    model, tracker = make()
    cursor = tracker.cursor()
    model["a"](torch.tensor([[1, 2], [3, 999]]))
    model["a"](input=torch.tensor(7))
    model["a"](torch.tensor([5, 6], dtype=torch.int32))
    model["b"](torch.tensor([10, 11, 12]), torch.tensor([0, 2]))
    model["b"](torch.arange(40).view(2, 20)[:, ::2])
    seen = cursor.advance()
    assert rows_of(seen, "a.weight") == [1, 2, 3, 5, 6, 7, 999]
    assert rows_of(seen, "b.weight") == sorted({10, 11, 12, *range(0, 40, 2)})
    assert rows_of(cursor.peek(), "a.weight") == []


def test_inference_is_not_marked_and_max_norm_always_is() -> None:
    model, tracker = make()
    cursor = tracker.cursor()
    with torch.no_grad():
        model["a"](torch.tensor([1]))
    model.eval()
    model["a"](torch.tensor([2]))
    assert rows_of(cursor.peek(), "a.weight") == []
    model["a"](torch.tensor([3])).sum().backward()
    assert rows_of(cursor.peek(), "a.weight") == [3]
    renormed = nn.Embedding(10, 4, max_norm=1.0)
    tracker = LookupTracker(find_tables(renormed))
    cursor = tracker.cursor()
    with torch.no_grad():
        renormed(torch.tensor([4]))
    assert rows_of(cursor.peek(), "weight", 10) == [4]


def test_cursors_are_independent() -> None:
    model, tracker = make()
    first = tracker.cursor()
    model["a"](torch.tensor([1]))
    second = tracker.cursor()
    model["a"](torch.tensor([2]))
    assert rows_of(first.advance(), "a.weight") == [1, 2]
    model["a"](torch.tensor([3]))
    assert rows_of(second.peek(), "a.weight") == [2, 3]
    assert rows_of(first.advance(), "a.weight") == [3]
    assert rows_of(second.advance(), "a.weight") == [2, 3]
    assert rows_of(first.peek(), "a.weight") == []


def test_what_is_given_back_is_seen_again_by_that_cursor_alone() -> None:
    model, tracker = make()
    first, second = tracker.cursor(), tracker.cursor()
    model["a"](torch.tensor([1]))
    taken = first.advance()
    second.advance()
    first.give_back(taken)
    model["a"](torch.tensor([9]))
    assert rows_of(first.advance(), "a.weight") == [1, 9]
    assert rows_of(first.advance(), "a.weight") == []
    assert rows_of(second.advance(), "a.weight") == [9]


def test_one_cursor_costs_a_bit_a_row() -> None:
    model = nn.Embedding(1_000_000, 64)
    tracker = LookupTracker(find_tables(model))
    cursor = tracker.cursor()
    model(torch.tensor([1, 2, 3]))
    cursor.advance()
    assert tracker.bytes <= 0.0005 * model.weight.nbytes


def test_marks_of_many_threads_are_all_kept() -> None:
    _model, tracker = make()
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
    model, tracker = make()
    cursor = tracker.cursor()
    tracker.close()
    model["a"](torch.tensor([1]))
    assert rows_of(cursor.peek(), "a.weight") == []


def test_shared_weight_is_one_table_watched_in_both_places() -> None:
    model = nn.ModuleDict({"x": nn.Embedding(20, 4), "y": nn.Embedding(20, 4)})
    model["y"].weight = model["x"].weight
    tables = find_tables(model)
    assert [table.name for table in tables] == ["x.weight"]
    cursor = LookupTracker(tables).cursor()
    model["x"](torch.tensor([1]))
    model["y"](torch.tensor([2]))
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
