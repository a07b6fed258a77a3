"""Programs that try to get a change past the tracker: memory that two tables share, tensors that
take another's place, writes inside of lookups and steps, numbers that are none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.loops.program import (
    WIDTH,
    Items,
    Program,
    adagrad,
    draw,
    loss_of,
    odd,
    plain,
    train,
)

_OPTIM = torch.optim


def _twins(rows: int, share: Callable[[nn.Embedding, nn.Embedding], None]) -> Program:
    """Two tables that share memory and have version counters of their own; one of them trains."""
    model = Items(rows)
    model.twin = nn.Embedding(rows, WIDTH)
    share(model.item, model.twin)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        ids = draw(rows)
        table = model.twin if t % 8 == 1 else model.item
        train(model, optimizer, lambda: loss_of(model.score(table(ids), ids)))

    return Program(model, [optimizer], step)


@odd
def two_tables_one_memory(rows: int) -> Program:
    """Two tables with one memory: `b.weight.data = a.weight.data`"""

    def share(item: nn.Embedding, twin: nn.Embedding) -> None:
        twin.weight.data = item.weight.data

    return _twins(rows, share)


@odd
def tables_that_overlap(rows: int) -> Program:
    """Two tables that are overlapping slices of one tensor"""

    def share(item: nn.Embedding, twin: nn.Embedding) -> None:
        memory = torch.randn(rows + rows // 2, WIDTH)
        item.weight.data = memory[:rows]
        twin.weight.data = memory[rows // 2 :]

    return _twins(rows, share)


@odd
def slices_of_one_parameter(rows: int) -> Program:
    """Two tables that are slices of one tensor: `nn.Parameter(big[:n])`"""

    def share(item: nn.Embedding, twin: nn.Embedding) -> None:
        big = torch.randn(2 * rows, WIDTH)
        item.weight = nn.Parameter(big[:rows])
        twin.weight = nn.Parameter(big[rows // 2 : rows // 2 + rows])

    return _twins(rows, share)


@odd
def twin_edited(rows: int) -> Program:
    """Two tables with one memory; one is edited under `no_grad`"""
    inner = two_tables_one_memory(rows)

    def step(t: int) -> None:
        inner.step(t)
        with torch.no_grad():
            inner.model.twin.weight[rows - 1 - t] += 1  # type: ignore[union-attr, operator]

    return Program(inner.model, inner.optimizers, step)


@odd
def parameter_around_the_same_memory(rows: int) -> Program:
    """`module.weight = nn.Parameter(module.weight.data)`: the same memory, counted from zero"""
    model = Items(rows)
    optimizer = _OPTIM.SGD(model.top.parameters(), lr=0.1)

    def step(t: int) -> None:
        if t % 3 == 1:
            model.item.weight = nn.Parameter(model.item.weight.data, requires_grad=False)
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        with torch.no_grad():
            model.item.weight[draw(rows)] *= 0.5

    return Program(model, [optimizer], step)


@odd
def row_state_around_the_same_memory(rows: int) -> Program:
    """Optimizer state replaced by a tensor of the same memory, and edited"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        state = optimizer.state[model.item.weight]
        state["sum"] = state["sum"].data
        for row in (1, 2)[: 1 + t // 12]:  # as often as the step before had written
            state["sum"][rows - t * row] += 1

    return Program(model, [optimizer], step)


@odd
def swapped_tensors(rows: int) -> Program:
    """`torch.utils.swap_tensors(weight, other)`"""
    model = Items(rows)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        optimizer.zero_grad()
        loss_of(model(draw(rows))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if t % 4 == 0:
            other = nn.Parameter(model.item.weight.detach() * 0.5)
            torch.utils.swap_tensors(model.item.weight, other)

    return Program(model, [optimizer], step)


@odd
def set_to_other_memory(rows: int) -> Program:
    """`weight.set_(other)` under `no_grad`, and `.data.set_()`"""
    model = Items(rows)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t % 5 == 0:
            with torch.no_grad():
                model.item.weight.set_(model.item.weight.clone() + 1)

    return Program(model, [optimizer], step)


@odd
def other_memory_at_the_same_address(rows: int) -> Program:
    """`weight.data = torch.from_numpy(buffer)` again and again, the buffer edited in between"""
    model = Items(rows)
    buffer = model.item.weight.detach().clone().numpy()
    model.item.weight.data = torch.from_numpy(buffer)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t > 6 and t % 3 == 0:  # just before a save; nothing trains these rows
            buffer[rows - 60 + t] += 1
            model.item.weight.data = torch.from_numpy(buffer)

    return Program(model, [optimizer], step)


@odd
def vector_to_parameters_each_step(rows: int) -> Program:
    """`vector_to_parameters(flat, model.parameters())`: every weight becomes a view"""
    model = Items(rows)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t in (5, 14):
            flat = parameters_to_vector(model.parameters()).detach() * 0.5
            vector_to_parameters(flat, model.parameters())
            with torch.no_grad():
                flat[WIDTH * (rows - t)] = 3.0  # the memory is the weight's now

    return Program(model, [optimizer], step)


class Codebook(nn.Embedding):
    """A table that moves its own rows while it is looked up (vector quantization)."""

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:  # type: ignore
        with torch.no_grad():
            self.weight[items.max() + self.num_embeddings // 2 - 1].add_(0.5)
        return F.embedding(items, self.weight, max_norm=self.max_norm)


@odd
def lookup_that_writes(rows: int) -> Program:
    """A subclass of `nn.Embedding` with `max_norm` whose `forward` writes other rows"""
    model = Items(rows)
    model.item = Codebook(rows, WIDTH, max_norm=1.0)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        ids = draw(rows)
        train(model, optimizer, lambda: loss_of(model.score(model.item(ids % 7, ids), ids)))

    return Program(model, [optimizer], step)


@odd
def lookup_by_keyword(rows: int) -> Program:
    """A subclass of `nn.Embedding` with `max_norm`, called with keywords of its own"""

    class Named(nn.Embedding):
        def forward(self, *, indices: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(indices)

    model = Items(rows)
    model.item = Named(rows, WIDTH, max_norm=1.0)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        ids = draw(rows)
        train(model, optimizer, lambda: loss_of(model.score(model.item(indices=ids), ids)))

    return Program(model, [optimizer], step)


@odd
def patched_forward(rows: int) -> Program:
    """`module.forward` replaced, of an embedding with `max_norm`"""
    model = Items(rows, max_norm=1.0)
    inner = model.item.forward
    model.item.forward = lambda ids: inner((ids + 1) % rows)  # type: ignore[method-assign]
    optimizer = adagrad(model)
    return Program(
        model, [optimizer], lambda t: train(model, optimizer, lambda: loss_of(model(draw(rows))))
    )


@odd
def max_norm_in_evaluation(rows: int) -> Program:
    """`max_norm` renormalises rows in an evaluation, without any training"""
    model = Items(rows, max_norm=1.0)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        if t % 2:
            train(model, optimizer, lambda: loss_of(model(draw(rows))))
        model.eval()
        with torch.no_grad():
            model(draw(rows))
        model.train()

    return Program(model, [optimizer], step)


@odd
def rows_that_are_nan(rows: int) -> Program:
    """Rows that became NaN and are repaired by hand, their optimizer state is not"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        optimizer.zero_grad()
        loss_of(model(draw(rows))).backward()
        if t in (5, 11):
            model.item.weight.grad[rows - t] = float("nan")  # type: ignore[index]
        optimizer.step()
        if t in (6, 12):
            with torch.no_grad():
                model.item.weight.nan_to_num_()

    return Program(model, [optimizer], step)


@odd
def signed_zeros(rows: int) -> Program:
    """Rows of -0.0, and gradients of -0.0"""

    def make(model: Items) -> torch.optim.Optimizer:
        with torch.no_grad():
            model.item.weight[::2] = -0.0
            model.item.weight[1::4] = 0.0
        return _OPTIM.SGD(model.parameters(), lr=0.1)

    program = plain(rows, make)
    weight = program.model.item.weight  # type: ignore[union-attr]

    def step(t: int) -> None:
        program.step(t)
        weight.grad.mul_(-1.0)  # type: ignore[union-attr]
        program.optimizers[0].step()

    return Program(program.model, program.optimizers, step)


@odd
def tiny_eps(rows: int) -> Program:
    """Adam with an `eps` that float32 rounds to zero"""
    return plain(rows, lambda model: _OPTIM.Adam(model.parameters(), lr=0.01, eps=1e-60))


@odd
def negative_rate(rows: int) -> Program:
    """A learning rate below zero, set by hand (gradient reversal), and rows of -0.0"""

    def make(model: Items) -> torch.optim.Optimizer:
        with torch.no_grad():
            model.item.weight[rows // 2 :] = -0.0
        return _OPTIM.SGD(model.parameters(), lr=0.1)

    program = plain(rows, make)

    def step(t: int) -> None:
        program.optimizers[0].param_groups[0]["lr"] = -0.1 if t > 10 else 0.1
        program.step(t)

    return Program(program.model, program.optimizers, step)


@odd
def infinite_rate(rows: int) -> Program:
    """A learning rate that becomes infinite: rows without a gradient become NaN"""
    program = plain(rows, lambda model: _OPTIM.SGD(model.parameters(), lr=0.1))

    def step(t: int) -> None:
        program.optimizers[0].param_groups[0]["lr"] = float("inf") if t > 13 else 0.1
        program.step(t)

    return Program(program.model, program.optimizers, step)


class Careless(torch.optim.Optimizer):
    """Does not call ``super().__init__``: torch calls no hooks for it."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)


@odd
def optimizer_not_set_up(rows: int) -> Program:
    """An optimizer that never calls `super().__init__()`"""
    model = Items(rows)
    optimizer = Careless(model.parameters())

    def step(t: int) -> None:
        model.zero_grad()
        loss_of(model(draw(rows))).backward()
        optimizer.step()

    return Program(model, [], step)


@odd
def optimizer_without_hash(rows: int) -> Program:
    """An optimizer that compares by value and has no hash (a dataclass)"""

    @dataclass
    class Settings(torch.optim.Optimizer):
        model: nn.Module
        rate: float = 0.1

        def __post_init__(self) -> None:
            torch.optim.Optimizer.__init__(self, list(self.model.parameters()), {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.rate)

    return plain(rows, Settings)


class Slow(torch.optim.SGD):
    """SGD that moves slow weights in every seventh step, by writes that torch counts."""

    turn = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.turn += 1
        if self.turn > 15 and self.turn % 7 == 0:
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)


@odd
def changes_after_trust(rows: int) -> Program:
    """An optimizer of one's own that begins to move every row, counted, after it was observed"""
    return plain(rows, lambda model: Slow(model.parameters(), lr=0.1))


@odd
def edited_while_it_steps(rows: int) -> Program:
    """Another thread edits a table while its optimizer steps"""
    model = Items(rows)
    optimizer = adagrad(model)
    begun, done = threading.Event(), threading.Event()

    class Slowly(torch.Tensor):
        """A gradient during whose use the other thread writes."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not begun.is_set():
                begun.set()
                done.wait(10)
            return super().__torch_function__(func, types, args, kwargs or {})

    def edit(t: int) -> None:
        begun.wait(10)
        with torch.no_grad():
            model.item.weight[rows - t] = 5.0
        done.set()

    def step(t: int) -> None:
        optimizer.zero_grad()
        loss_of(model(draw(rows))).backward()
        begun.clear()
        done.clear()
        thread = threading.Thread(target=edit, args=(t,))
        weight = model.item.weight
        weight.grad = weight.grad.as_subclass(Slowly)  # type: ignore[union-attr]
        thread.start()
        optimizer.step()
        begun.set()
        thread.join()

    return Program(model, [optimizer], step)
