"""One table through saves: methods follow what happens to it, and what escapes is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.tracking import FULL_TURN_SAVES, Notice, Tracker
from holdfast.checkpoint.tracking.method import choose_method
from holdfast.checkpoint.tracking.optimizers.evidence import SAVES_OBSERVED
from holdfast.kernels.rows import bitmap
from holdfast.model.tables import find_tables

ROWS = 2000


class Mine(torch.optim.Adagrad):
    """Not known, and moves rows with a gradient."""


class Wanderer(torch.optim.SGD):
    """Not known, and moves a row that nobody asked for."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter[int(torch.randint(0, ROWS, ()))] += 1


class Slow(torch.optim.Optimizer):
    """Not known, and keeps moving rows by moments of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                slow = state.setdefault("slow", torch.zeros_like(parameter))
                slow.mul_(0.9).add_(parameter.grad)
                parameter.add_(slow, alpha=-0.1)


class Watched:
    """A table that is trained and saved; rows that a save must take are known by comparing."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(11)
        self.model = nn.Embedding(ROWS, 4)
        self.optimizer = make(self.model.parameters())
        (self.table,) = find_tables(self.model, [self.optimizer])
        self.tracker = Tracker([self.table])
        self.cursor = self.tracker.cursor()
        self.notices: list[Notice] = []
        self.save()

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randint(0, ROWS // 2, (20,))).square().sum().backward()
        self.optimizer.step()

    def save(self) -> set[int]:
        """What a checkpointer does with the tracker at a save; the rows it took."""
        self.notices += self.tracker.catch_up(self.cursor)
        rows_N = bitmap.ids(self.cursor.advance()["weight"], 0, ROWS)
        if not hasattr(self, "saved"):
            rows_N = np.arange(ROWS)
            self.tracker.begin_save("weight", is_whole=True)
        arrays = [array_ND.copy() for array_ND in self.table.arrays()]
        names = [column.name for column in self.table.schema().columns]
        self.tracker.learn("weight", rows_N, names, [array_ND[rows_N] for array_ND in arrays])
        self.tracker.scan(self.cursor)
        if not hasattr(self, "saved") or len(arrays) != len(self.saved):
            self.saved = arrays
        for saved_ND, array_ND in zip(self.saved, arrays, strict=True):
            saved_ND[rows_N] = array_ND[rows_N]
        return set(rows_N.tolist())

    def stale(self) -> list[int]:
        """Rows that a restore would bring back otherwise than they are."""
        differs = np.zeros(ROWS, bool)
        for saved_ND, array_ND in zip(self.saved, self.table.arrays(), strict=True):
            differs |= (saved_ND.view(np.uint32) != array_ND.view(np.uint32)).any(1)
        return np.flatnonzero(differs).tolist()

    @property
    def methods(self) -> list[str]:
        return [notice.method for notice in self.notices]


@pytest.mark.parametrize(
    ("make", "rows_max"),
    [(Mine, 60), (Slow, ROWS // 2), (lambda p: Wanderer(p, lr=0.1), 80)],
    ids=["gradient", "moments", "wanders"],
)
def test_an_unknown_optimizer_is_compared_then_trusted_as_far_as_it_was_seen_to_hold(
    make: Callable[[Any], torch.optim.Optimizer], rows_max: int
) -> None:
    it = Watched(make)
    for _ in range(SAVES_OBSERVED + 6):
        for _ in range(3):
            it.train()
        rows = it.save()
        assert it.stale() == []
    assert len(rows) <= rows_max
    assert it.methods[0] == "compare"


def test_an_optimizer_is_trusted_though_it_trained_before_the_first_save() -> None:
    """The first save has nothing to compare with, and so says nothing of the optimizer."""
    torch.manual_seed(11)
    model = nn.Embedding(ROWS, 4)
    optimizer = Mine(model.parameters())
    (table,) = find_tables(model, [optimizer])
    tracker = Tracker([table])
    cursor = tracker.cursor()
    chosen = []
    for _ in range(SAVES_OBSERVED + 3):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(0, ROWS // 2, (20,))).square().sum().backward()
            optimizer.step()
        watch = tracker._watches["weight"]
        chosen.append(choose_method(watch._happened()).name)
        tracker.catch_up(cursor)
        is_first = len(chosen) == 1
        rows_N = bitmap.ids(cursor.advance()["weight"], 0, ROWS)
        tracker.begin_save("weight", is_whole=is_first)
        names = [column.name for column in table.schema().columns]
        tracker.learn("weight", rows_N, names, [array_ND[rows_N] for array_ND in table.arrays()])
    assert chosen == ["compare"] * (1 + SAVES_OBSERVED) + ["gradient"] * 2


def test_rows_that_a_save_leaves_are_checked_after_it_took_all_of_them_as_changed() -> None:
    """A save of hot rows takes some of the marked rows: the check in turn must go on."""
    it = Watched(lambda p: torch.optim.Adagrad(p, lr=0.1))
    it.tracker.mark_all()
    it.tracker.catch_up(it.cursor)
    it.cursor.advance()
    it.tracker.begin_save("weight", is_whole=False)
    it.tracker.end_save(is_committed=True)
    it.model.weight.data[ROWS - 7] = 42.0
    for _ in range(FULL_TURN_SAVES):
        it.tracker.scan(it.cursor)
    it.tracker.catch_up(it.cursor)
    assert ROWS - 7 in bitmap.ids(it.cursor.peek()["weight"], 0, ROWS)


@pytest.mark.parametrize("row", [0, 777, ROWS - 1])
def test_an_edit_that_torch_does_not_count_is_found_within_a_turn(row: int) -> None:
    it = Watched(lambda p: torch.optim.Adagrad(p, lr=0.1))
    it.train()
    it.save()
    it.model.weight.data[row] = 42.0
    it.model.weight.detach().numpy()[(row + 5) % ROWS] = 43.0
    saves = 0
    while it.stale():
        it.train()
        it.save()
        saves += 1
        assert saves <= FULL_TURN_SAVES + 1
    (found,) = [notice for notice in it.notices if notice.is_escape]
    assert ".data" in found.todo
    it.model.weight.data[(row + 9) % ROWS] = 44.0  # from now on rows are compared at every save
    it.save()
    assert it.stale() == []


def test_rows_that_training_moves_while_a_part_is_checked_are_no_escape() -> None:
    it = Watched(lambda p: torch.optim.Adagrad(p, lr=0.1))
    for _ in range(2 * FULL_TURN_SAVES):
        it.train()
        it.save()
        it.tracker.scan(it.cursor)
        for _ in range(3):
            it.train()
            it.tracker.scan(it.cursor)
        it.save()
        assert it.stale() == []
    assert it.notices == []


def test_a_frozen_table_that_something_averages_is_compared() -> None:
    it = Watched(lambda p: torch.optim.SGD(p, lr=0.1))
    sizes = []
    for turn in range(4):
        with torch.no_grad():
            it.model.weight[turn * 10 : turn * 10 + 5].lerp_(torch.ones(5, 4), 0.5)
        sizes.append(len(it.save()))
        assert it.stale() == []
    assert sizes == [5, 5, 5, 5]
    assert it.methods == ["compare"]


def test_a_table_that_changes_nearly_whole_is_no_longer_compared() -> None:
    it = Watched(lambda p: torch.optim.SGD(p, lr=0.1))
    for _ in range(5):
        with torch.no_grad():
            it.model.weight.mul_(0.99)
        assert len(it.save()) == ROWS
    assert it.methods == ["compare", "whole"]
    assert it.table.rows * 4 > it.tracker.bytes  # the hashes are gone


def test_moments_are_known_again_after_a_restore() -> None:
    it = Watched(lambda p: torch.optim.Adam(p, lr=0.1))
    it.train()
    it.save()
    it.tracker.reset()
    it.optimizer.zero_grad()
    it.model(torch.tensor([1])).sum().backward()
    it.optimizer.step()
    it.save()
    assert it.stale() == []


def test_a_step_that_raised_half_way_is_a_write() -> None:
    class Failing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data[9] = 1.0
            raise RuntimeError("half way")

    it = Watched(lambda p: Failing(p, lr=0.1))
    with pytest.raises(RuntimeError, match="half way"):
        it.train()
    it.save()
    assert it.stale() == []


def test_tables_of_inference_tensors_are_compared() -> None:
    with torch.inference_mode():
        model = nn.Embedding(50, 4)
        model.weight.requires_grad_(False)
    tracker = Tracker(find_tables(model))
    cursor = tracker.cursor()
    tracker.catch_up(cursor)
    cursor.advance()
    with torch.inference_mode():
        model.weight[7] = 0
    tracker.catch_up(cursor)
    assert bitmap.ids(cursor.advance()["weight"], 0, 50).tolist() == [7]


@pytest.mark.parametrize("is_restored", [True, False])
def test_moments_that_fade_before_the_next_save_have_moved_their_rows(is_restored: bool) -> None:
    it = Watched(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.01))
    it.train()
    it.save()
    if is_restored:
        it.tracker.reset()
    else:  # every row gets moments that no gradient told of
        it.optimizer.param_groups[0]["weight_decay"] = 0.1
        it.train()
        it.save()
        it.optimizer.param_groups[0]["weight_decay"] = 0.0
    for _ in range(40):  # 0.01 ** 40 is zero
        it.optimizer.zero_grad()
        it.model(torch.tensor([1])).sum().backward()
        it.optimizer.step()
    it.save()
    assert it.stale() == []
    for _ in range(2):
        it.train()
        rows = it.save()
        assert it.stale() == []
    assert len(rows) < ROWS
