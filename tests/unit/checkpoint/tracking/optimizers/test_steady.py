"""Steps that are looked at together mark what each table's own watch would mark."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.checkpoint.tracking import Tracker
from holdfast.checkpoint.tracking.watch import TableWatch
from holdfast.kernels.rows import bitmap
from holdfast.model.tables import find_tables

ROWS = 3000
NAMES = ("a", "b", "c")
Changed = dict[str, list[int]]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
}


class Training:
    """Three tables with sparse gradients, one optimizer, and what a save would take."""

    def __init__(self, kind: str = "Adagrad") -> None:
        torch.manual_seed(5)
        self.model = nn.ModuleDict({name: nn.Embedding(ROWS, 4, sparse=True) for name in NAMES})
        self.optimizer = OPTIMIZERS[kind](self.model.parameters())
        self.draw = torch.Generator().manual_seed(6)
        self.steps(1)  # SparseAdam makes its state now
        self.tracker = Tracker(find_tables(self.model, [self.optimizer]))
        self.cursor = self.tracker.cursor()
        self.save()

    def weight(self, name: str) -> nn.Parameter:
        weight: nn.Parameter = self.model[name].weight
        return weight

    def backward(self, *names: str) -> None:
        self.optimizer.zero_grad()
        for name in names or NAMES:
            ids = torch.randint(0, ROWS, (20,), generator=self.draw)
            self.model[name](ids).square().sum().backward()

    def steps(self, count: int, *names: str) -> None:
        for _ in range(count):
            self.backward(*names)
            self.optimizer.step()

    def rows(self) -> dict[str, torch.Tensor]:
        """Each table's rows with their state, but for SGD's sparse moments."""
        found = {}
        for name in NAMES:
            state = self.optimizer.state[self.weight(name)].values()
            tensors = [one for one in state if torch.is_tensor(one) and not one.is_sparse]
            kept = [one for one in tensors if one.shape[:1] == (ROWS,)]
            found[name] = torch.cat([self.weight(name), *kept], 1).detach().clone()
        return found

    def save(self) -> Changed:
        """What a save now would take; the next one begins from here."""
        self.tracker.catch_up(self.cursor)
        marks = self.cursor.advance()
        for name in NAMES:
            self.tracker.begin_save(f"{name}.weight", is_whole=False)
        return {name: bitmap.ids(marks[f"{name}.weight"], 0, ROWS).tolist() for name in NAMES}

    def changes(self, between: Callable[[], object]) -> tuple[Changed, Changed]:
        """What really changed since the last save, and what a save would take."""
        before = self.rows()
        between()
        after = self.rows()
        really = {
            name: (before[name] != after[name]).any(1).nonzero().flatten().tolist()
            for name in NAMES
        }
        return really, self.save()


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tables that their own watches looked at, step by step."""
    seen: list[str] = []
    look = TableWatch.after_step

    def after_step(self: TableWatch, *args: Any) -> None:
        seen.append(self.table.name)
        look(self, *args)

    monkeypatch.setattr(TableWatch, "after_step", after_step)
    return seen


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "SparseAdam"])
def test_usual_steps_are_looked_at_together_and_exactly_their_rows_are_taken(
    kind: str, looks: list[str]
) -> None:
    it = Training(kind)
    for _ in range(3):
        looks.clear()
        really, taken = it.changes(lambda: it.steps(7))
        assert really == taken
        assert all(0 < len(rows) < ROWS // 2 for rows in taken.values())
        assert looks == [f"{name}.weight" for name in NAMES]  # in the first step after a save


def test_rows_are_told_as_often_as_gradients_name_them() -> None:
    it = Training()
    heard: list[tuple[str, int]] = []
    it.tracker.listen(lambda table, ids_N: heard.append((table, len(ids_N))))
    it.steps(4)
    assert sorted(heard) == sorted((f"{name}.weight", 20) for name in NAMES for _ in range(4))


def edit(it: Training) -> None:
    with torch.no_grad():
        it.weight("b")[17] = 3.0


def edit_state(it: Training) -> None:
    it.optimizer.state[it.weight("b")]["sum"][18] += 1.0


def replace_state(it: Training) -> None:
    state = it.optimizer.state[it.weight("b")]
    state["sum"] = state["sum"].clone()
    state["sum"].numpy()[19] += 1.0


def load_state(it: Training) -> None:
    state = copy.deepcopy(it.optimizer.state_dict())
    state["state"][1]["sum"][20] += 1.0
    it.optimizer.load_state_dict(state)


def exchange_memory(it: Training) -> None:
    other = it.weight("b").detach().clone()
    other[21] = 4.0
    it.weight("b").data = other


def step_by_another_optimizer(it: Training) -> None:
    other = torch.optim.SGD([it.weight("b")], lr=0.3)
    it.backward("b")
    other.step()


def step_with_a_closure_that_edits(it: Training) -> None:
    def closure() -> float:
        it.backward()
        edit(it)
        return 0.0

    it.optimizer.step(closure)


class Rate(float):
    """A rate that calls a function when the last of the tables is moved."""

    def __new__(cls, rate: float, call: Callable[[], None]) -> Rate:
        return super().__new__(cls, rate)

    def __init__(self, rate: float, call: Callable[[], None]) -> None:
        self._call = call
        self._left = len(NAMES)

    def __truediv__(self, other: Any) -> float:
        self._left -= 1
        if not self._left:
            self._call()
        return float(self) / float(other)


def step_at_a_rate_that_calls(it: Training, call: Callable[[], None]) -> None:
    group = it.optimizer.param_groups[0]
    rate = group["lr"]
    group["lr"] = Rate(rate, call)
    try:
        it.steps(1)
    finally:
        group["lr"] = rate


def step_that_raises(it: Training) -> None:
    def fail() -> None:
        raise RuntimeError("a step that ends half way")

    with pytest.raises(RuntimeError, match="half way"):
        step_at_a_rate_that_calls(it, fail)


def step_while_another_thread_writes(it: Training) -> None:
    def write() -> None:
        writing = threading.Thread(target=edit, args=(it,))
        writing.start()
        writing.join()

    step_at_a_rate_that_calls(it, write)


def step_of_some_tables(it: Training) -> None:
    it.steps(1, "a", "c")


def step_with_a_dense_gradient(it: Training) -> None:
    it.backward()
    gradient = it.weight("b").grad
    assert gradient is not None
    it.weight("b").grad = gradient.to_dense()
    it.optimizer.step()


def step_with_ids_that_lie_apart(it: Training) -> None:
    it.backward()
    ids = torch.tensor([[7, 0], [2999, 0], [7, 0]]).t()[:1]
    assert not ids.is_contiguous()
    values = torch.ones(3, 4)
    it.weight("b").grad = torch.sparse_coo_tensor(ids, values, (ROWS, 4))
    it.optimizer.step()


def step_with_weight_decay(it: Training) -> None:
    it.optimizer.zero_grad()
    for name in NAMES:
        it.weight(name).grad = torch.zeros(ROWS, 4)
    it.optimizer.param_groups[0]["weight_decay"] = 0.1
    it.optimizer.step()
    it.optimizer.param_groups[0]["weight_decay"] = 0.0


def step_with_a_hook_that_edits(it: Training) -> None:
    hook = it.optimizer.register_step_post_hook(lambda *_: edit(it))
    it.steps(1)
    hook.remove()


def step_with_a_hook_that_edits_uncounted(it: Training) -> None:
    def clear(*_: Any) -> None:
        it.weight("b").data[22] = 0.0

    hook = it.optimizer.register_step_post_hook(clear)
    it.steps(1)
    hook.remove()


def add_a_group(it: Training) -> None:
    it.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


EVENTS = (
    edit,
    edit_state,
    replace_state,
    load_state,
    exchange_memory,
    step_by_another_optimizer,
    step_with_a_closure_that_edits,
    step_that_raises,
    step_while_another_thread_writes,
    step_of_some_tables,
    step_with_a_dense_gradient,
    step_with_ids_that_lie_apart,
    step_with_weight_decay,
    step_with_a_hook_that_edits,
    step_with_a_hook_that_edits_uncounted,
    add_a_group,
)


@pytest.mark.parametrize("after", [0, 3], ids=["and a save", "and steps"])
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_whatever_comes_between_usual_steps_no_row_is_missed(
    event: Callable[[Training], None], after: int
) -> None:
    it = Training()

    def train() -> None:
        it.steps(4)
        event(it)
        it.steps(after)

    for _ in range(2):
        really, taken = it.changes(train)
        for name in NAMES:
            assert set(really[name]) <= set(taken[name]), name


def test_an_optimizer_without_gradients_leaves_usual_steps_exact() -> None:
    it = Training()
    other = torch.optim.SGD([it.weight("b")], lr=0.1)

    def train() -> None:
        it.steps(3)
        it.optimizer.zero_grad()
        other.step()
        it.steps(3)

    for _ in range(2):
        really, taken = it.changes(train)
        assert really == taken


def test_moments_that_were_there_for_a_single_step_have_moved_rows_that_are_taken() -> None:
    it = Training("momentum")

    def train() -> None:
        it.steps(3)
        state = it.optimizer.state[it.weight("b")]
        own = state["momentum_buffer"]
        foreign = torch.sparse_coo_tensor([[2000]], torch.ones(1, 4), (ROWS, 4))
        state["momentum_buffer"] = foreign.coalesce()
        it.steps(1)
        state["momentum_buffer"] = own
        it.steps(1)

    for _ in range(2):
        really, taken = it.changes(train)
        assert 2000 in really["b"]
        for name in NAMES:
            assert set(really[name]) <= set(taken[name]), name
