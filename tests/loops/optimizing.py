"""Optimizers, and what training loops do with gradients and parameter groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.loops.program import BATCH, Items, Program, adagrad, draw, loop, loss_of, plain, train

Make = Callable[[Items], Any]
_OPTIM = torch.optim


def _split(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Make:
    """One optimizer for the tables and SGD for the network, as sparse gradients need it."""
    return lambda model: [make(model.tables()), _OPTIM.SGD(model.top.parameters(), lr=0.1)]


@loop
def sgd(rows: int) -> Program:
    """SGD"""
    return plain(rows, lambda model: _OPTIM.SGD(model.parameters(), lr=0.1))


@loop
def sgd_maximize(rows: int) -> Program:
    """SGD with `maximize=True`"""

    def make(model: Items) -> torch.optim.Optimizer:
        with torch.no_grad():
            model.item.weight[rows // 2 :: 3] = -0.0  # rows that no step touches
        return _OPTIM.SGD(model.parameters(), lr=0.01, maximize=True)

    return plain(rows, make)


@loop
def momentum(rows: int) -> Program:
    """SGD with momentum, dense gradients"""
    return plain(rows, lambda m: _OPTIM.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True))


@loop
def momentum_sparse(rows: int) -> Program:
    """SGD with momentum, sparse gradients"""
    return plain(rows, _split(lambda p: _OPTIM.SGD(p, lr=0.1, momentum=0.9)), sparse=True)


@loop
def adagrad_sparse(rows: int) -> Program:
    """Adagrad, sparse gradients"""
    return plain(rows, _split(lambda p: _OPTIM.Adagrad(p, lr=0.1)), sparse=True)


@loop
def sparse_adam(rows: int) -> Program:
    """SparseAdam"""
    return plain(rows, _split(lambda p: _OPTIM.SparseAdam(p, lr=0.1)), sparse=True)


@loop
def adam(rows: int) -> Program:
    """Adam"""
    return plain(rows, lambda model: _OPTIM.Adam(model.parameters(), lr=0.01))


@loop
def adam_foreach(rows: int) -> Program:
    """Adam with `foreach=True`, `amsgrad=True`"""
    return plain(rows, lambda m: _OPTIM.Adam(m.parameters(), lr=0.01, foreach=True, amsgrad=True))


@loop
def adam_fused(rows: int) -> Program:
    """Adam with `fused=True`"""
    return plain(rows, lambda model: _OPTIM.Adam(model.parameters(), lr=0.01, fused=True))


@loop
def adagrad_fused(rows: int) -> Program:
    """Adagrad with `fused=True`"""
    return plain(rows, lambda model: _OPTIM.Adagrad(model.parameters(), lr=0.01, fused=True))


@loop
def sgd_fused(rows: int) -> Program:
    """SGD with `fused=True`"""
    return plain(rows, lambda model: _OPTIM.SGD(model.parameters(), lr=0.01, fused=True))


@loop
def adamw(rows: int) -> Program:
    """AdamW with its default weight decay"""
    return plain(rows, lambda model: _OPTIM.AdamW(model.parameters(), lr=0.01))


@loop
def adamw_without_decay(rows: int) -> Program:
    """AdamW with `weight_decay=0` for the tables"""

    def make(model: Items) -> torch.optim.Optimizer:
        groups = [
            {"params": model.tables(), "weight_decay": 0.0},
            {"params": list(model.top.parameters())},
        ]
        return _OPTIM.AdamW(groups, lr=0.01)

    return plain(rows, make)


@loop
def nadam(rows: int) -> Program:
    """NAdam"""
    return plain(rows, lambda model: _OPTIM.NAdam(model.parameters(), lr=0.01))


@loop
def radam(rows: int) -> Program:
    """RAdam"""
    return plain(rows, lambda model: _OPTIM.RAdam(model.parameters(), lr=0.01))


@loop
def rmsprop(rows: int) -> Program:
    """RMSprop, centered, with momentum"""
    return plain(
        rows, lambda m: _OPTIM.RMSprop(m.parameters(), lr=0.01, centered=True, momentum=0.5)
    )


@loop
def adadelta(rows: int) -> Program:
    """Adadelta"""
    return plain(rows, lambda model: _OPTIM.Adadelta(model.parameters()))


@loop
def adamax(rows: int) -> Program:
    """Adamax"""
    return plain(rows, lambda model: _OPTIM.Adamax(model.parameters(), lr=0.01))


@loop
def asgd(rows: int) -> Program:
    """ASGD"""
    return plain(rows, lambda model: _OPTIM.ASGD(model.parameters(), lr=0.01))


@loop
def rprop(rows: int) -> Program:
    """Rprop"""
    return plain(rows, lambda model: _OPTIM.Rprop(model.parameters(), lr=0.01))


@loop
def lbfgs(rows: int) -> Program:
    """LBFGS, `optimizer.step(closure)`"""
    model = Items(rows)
    optimizer = _OPTIM.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=2)

    def step(t: int) -> None:
        ids = draw(rows)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(ids))
            loss.backward()
            return loss

        optimizer.step(closure)

    return Program(model, [optimizer], step)


@loop
def closure(rows: int) -> Program:
    """`optimizer.step(closure)`, the closure edits a table"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(draw(rows)))
            loss.backward()
            with torch.no_grad():
                model.item.weight[rows - 1 - t] = 1.0
            return loss

        optimizer.step(closure)

    return Program(model, [optimizer], step)


@loop
def weight_decay(rows: int) -> Program:
    """SGD with weight decay, switched off in mid-run"""
    program = plain(rows, lambda m: _OPTIM.SGD(m.parameters(), lr=0.1, weight_decay=1e-2))

    def step(t: int) -> None:
        if t == 12:
            program.optimizers[0].param_groups[0]["weight_decay"] = 0.0
        program.step(t)

    return Program(program.model, program.optimizers, step)


@loop
def weight_decay_then_moments(rows: int) -> Program:
    """Adam with weight decay, switched off and on in mid-run"""
    program = plain(rows, lambda m: _OPTIM.Adam(m.parameters(), lr=0.01))

    def step(t: int) -> None:
        decay = 1e-2 if 5 <= t < 10 or 16 <= t < 18 else 0.0
        program.optimizers[0].param_groups[0]["weight_decay"] = decay
        program.step(t)

    return Program(program.model, program.optimizers, step)


@loop
def learning_rate_schedule(rows: int) -> Program:
    """A schedule (`LambdaLR`) that begins with a rate of zero"""
    model = Items(rows)
    optimizer = _OPTIM.Adam(model.parameters(), lr=0.01)
    schedule = _OPTIM.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, max(0, t - 4) / 4))

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        schedule.step()

    return Program(model, [optimizer], step)


def _clipped(rows: int, clip: Callable[[Items], object]) -> Program:
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        optimizer.zero_grad()
        loss_of(model(draw(rows))).backward()
        clip(model)
        optimizer.step()

    return Program(model, [optimizer], step)


@loop
def clip_by_norm(rows: int) -> Program:
    """`clip_grad_norm_`"""
    return _clipped(rows, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.01))


@loop
def clip_by_value(rows: int) -> Program:
    """`clip_grad_value_`"""
    return _clipped(rows, lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-4))


def _scaled(rows: int, *, fused: bool) -> Program:
    model = Items(rows)
    optimizer = _OPTIM.Adam(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def step(t: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(draw(rows)).float())
        if t % 5 == 0:
            loss = loss * float("inf")  # the scaler skips this step
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return Program(model, [optimizer], step)


@loop
def grad_scaler(rows: int) -> Program:
    """`GradScaler` and autocast, with steps that it skips"""
    return _scaled(rows, fused=False)


@loop
def grad_scaler_fused(rows: int) -> Program:
    """`GradScaler` with a fused optimizer"""
    return _scaled(rows, fused=True)


@loop
def accumulation(rows: int) -> Program:
    """Gradient accumulation over batches and over saves"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        for _ in range(2):
            loss_of(model(draw(rows))).backward()
        if t % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return Program(model, [optimizer], step)


@loop
def zero_grad_in_place(rows: int) -> Program:
    """`zero_grad(set_to_none=False)` straight after the step"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        loss_of(model(draw(rows))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return Program(model, [optimizer], step)


@loop
def group_added_later(rows: int) -> Program:
    """`add_param_group` in mid-run"""
    model = Items(rows)
    optimizer = _OPTIM.Adam(model.top.parameters(), lr=0.01)

    def step(t: int) -> None:
        if t == 5:
            optimizer.add_param_group({"params": [model.item.weight]})
        if t == 11:
            optimizer.add_param_group({"params": [model.user.weight], "weight_decay": 0.01})
        train(model, optimizer, lambda: loss_of(model(draw(rows))))

    return Program(model, [optimizer], step)


@loop
def frozen_and_unfrozen(rows: int) -> Program:
    """`requires_grad_(False)` for a while, and back"""
    model = Items(rows)
    optimizer = _OPTIM.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(t: int) -> None:
        model.item.requires_grad_(not 5 <= t < 11)
        train(model, optimizer, lambda: loss_of(model(draw(rows))))

    return Program(model, [optimizer], step)


@loop
def second_optimizer(rows: int) -> Program:
    """A second optimizer that the Checkpointer was not given"""
    model = Items(rows)
    known = _OPTIM.SGD([*model.user.parameters(), *model.top.parameters()], lr=0.1)
    unknown = _OPTIM.Adam(model.item.parameters(), lr=0.01)
    for _ in range(3):  # it has moments before the Checkpointer sees it
        train(model, unknown, lambda: loss_of(model(draw(rows, 4 * BATCH))))

    def step(t: int) -> None:
        train(model, [known, unknown], lambda: loss_of(model(draw(rows))))

    return Program(model, [known], step)


@loop
def two_optimizers_one_table(rows: int) -> Program:
    """Two optimizers that move one table in turns"""
    model = Items(rows)
    saved = _OPTIM.SGD(model.parameters(), lr=0.1)
    other = _OPTIM.Adam(model.item.parameters(), lr=0.01)

    def step(t: int) -> None:
        train(model, other if t % 3 == 1 else saved, lambda: loss_of(model(draw(rows))))

    return Program(model, [saved], step)


@loop
def optimizer_replaced(rows: int) -> Program:
    """Another optimizer takes over in mid-run"""
    model = Items(rows)
    first = _OPTIM.SGD(model.parameters(), lr=0.1)
    second = _OPTIM.Adam(model.parameters(), lr=0.01)

    def step(t: int) -> None:
        train(model, first if t <= 6 else second, lambda: loss_of(model(draw(rows))))

    return Program(model, [first], step)


def _in_backward(rows: int, *, fused: bool) -> Program:
    model = Items(rows)
    optimizers = {p: _OPTIM.Adam([p], lr=0.01, fused=fused) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(t: int) -> None:
        loss_of(model(draw(rows))).backward()

    return Program(model, list(optimizers.values()), step)


@loop
def optimizer_in_backward(rows: int) -> Program:
    """Optimizers in backward (`register_post_accumulate_grad_hook`)"""
    return _in_backward(rows, fused=False)


@loop
def optimizer_in_backward_fused(rows: int) -> Program:
    """Fused optimizers in backward"""
    return _in_backward(rows, fused=True)


@loop
def no_optimizer(rows: int) -> Program:
    """No optimizer: `p.sub_(lr * p.grad)` under `no_grad`"""
    model = Items(rows)

    def step(t: int) -> None:
        model.zero_grad()
        loss_of(model(draw(rows))).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)

    return Program(model, [], step)


@loop
def no_optimizer_by_data(rows: int) -> Program:
    """No optimizer: `p.data -= lr * p.grad`"""
    model = Items(rows)

    def step(t: int) -> None:
        model.zero_grad()
        loss_of(model(draw(rows))).backward()
        for parameter in model.parameters():
            parameter.data.sub_(0.1 * parameter.grad)

    return Program(model, [], step)


@loop
def compiled_optimizer(rows: int) -> Program:
    """`torch.compile(optimizer.step)`"""
    torch._dynamo.reset()
    model = Items(rows)
    optimizer = adagrad(model)
    compiled = torch.compile(lambda: optimizer.step(), backend="aot_eager")

    def step(t: int) -> None:
        optimizer.zero_grad()
        loss_of(model(draw(rows))).backward()
        compiled()

    return Program(model, [optimizer], step)
