"""Ways of writing to a table beside its optimizer: averages, edits, loaded and replaced weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.loops.program import (
    WIDTH,
    Items,
    Program,
    adagrad,
    draw,
    escaping,
    loop,
    loss_of,
    train,
)


def _edited(rows: int, edit: Callable[[Items, int], object]) -> Program:
    """Trains, and edits the table by hand at every fourth step."""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t % 4 == 0:
            with torch.no_grad():
                edit(model, t)

    return Program(model, [optimizer], step)


def _averaged(rows: int, average: Callable[[nn.Parameter, nn.Parameter], object]) -> Program:
    model = nn.ModuleDict({"online": Items(rows), "target": Items(rows)})
    model["target"].load_state_dict(model["online"].state_dict())
    model["target"].requires_grad_(False)
    optimizer = adagrad(model["online"])

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model["online"](draw(rows))))
        pairs = zip(model["target"].parameters(), model["online"].parameters(), strict=True)
        with torch.no_grad():
            for target, online in pairs:
                average(target, online)

    return Program(model, [optimizer], step)


@loop
def ema_by_lerp(rows: int) -> Program:
    """A frozen copy moved by `lerp_` (EMA, target networks)"""
    return _averaged(rows, lambda target, online: target.lerp_(online, 0.1))


@loop
def ema_by_data(rows: int) -> Program:
    """A frozen copy moved by `.data.mul_().add_()`"""
    return _averaged(
        rows, lambda target, online: target.data.mul_(0.9).add_(online.data, alpha=0.1)
    )


@loop
def ema_by_new_data(rows: int) -> Program:
    """A frozen copy moved by `target.data = m * target.data + ...`"""

    def average(target: nn.Parameter, online: nn.Parameter) -> None:
        target.data = 0.9 * target.data + 0.1 * online.data

    return _averaged(rows, average)


@loop
def ema_by_swapped_weights(rows: int) -> Program:
    """EMA weights swapped in by `.data` for an evaluation, and out again"""
    model = Items(rows)
    optimizer = adagrad(model)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        backup = {}
        for name, parameter in model.named_parameters():
            shadow[name].lerp_(parameter.detach(), 0.1)
            backup[name] = parameter.data
            parameter.data = shadow[name]
        with torch.no_grad():
            model(draw(rows))
        for name, parameter in model.named_parameters():
            parameter.data = backup[name]

    return Program(model, [optimizer], step)


@loop
def averaged_model(rows: int) -> Program:
    """`torch.optim.swa_utils.AveragedModel` (SWA, EMA)"""
    online = Items(rows)
    model = nn.ModuleDict({"online": online})
    model["ema"] = AveragedModel(online, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = adagrad(online)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(online(draw(rows))))
        model["ema"].update_parameters(online)

    return Program(model, [optimizer], step)


@loop
def load_state_dict(rows: int) -> Program:
    """`load_state_dict(best)` of model and optimizer in mid-run"""
    model = Items(rows)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    best: list[dict[str, object]] = []

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t == 4:
            best.extend(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))
        if t in (8, 13):
            model.load_state_dict(best[0])
        if t in (8, 17):
            optimizer.load_state_dict(best[1])

    return Program(model, [optimizer], step)


@loop
def assign_state_dict(rows: int) -> Program:
    """`load_state_dict(best, assign=True)`: new parameters in place of the old ones"""
    model = Items(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best: list[dict[str, torch.Tensor]] = []

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t == 4:
            best.append(copy.deepcopy(model.state_dict()))
        if t in (8, 14):
            model.load_state_dict(copy.deepcopy(best[0]), assign=True)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return Program(model, [optimizer], step)


@loop
def parameter_replaced(rows: int) -> Program:
    """`module.weight = nn.Parameter(...)` of the same shape, and a new optimizer group"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t == 7:
            old = model.item.weight
            model.item.weight = nn.Parameter(old.detach() * 0.5)
            optimizer.state.pop(old, None)
            optimizer.param_groups[0]["params"] = list(model.parameters())

    return Program(model, [optimizer], step)


@loop
def assigned_rows(rows: int) -> Program:
    """`weight[ids] = 0` under `no_grad`"""

    def edit(model: Items, t: int) -> None:
        model.item.weight[torch.randint(0, rows, (250,))] = 0

    return _edited(rows, edit)


@loop
def index_copy(rows: int) -> Program:
    """`weight.index_copy_(0, ids, rows)` under `no_grad`"""

    def edit(model: Items, t: int) -> None:
        ids = torch.randperm(rows)[:250]
        model.item.weight.index_copy_(0, ids, torch.randn(len(ids), WIDTH))

    return _edited(rows, edit)


@loop
def fill(rows: int) -> Program:
    """`weight.fill_(0.5)` under `no_grad`"""
    return _edited(rows, lambda model, t: model.item.weight.fill_(0.5 + t))


@loop
def edit_through_views(rows: int) -> Program:
    """Edits through `weight.detach()`, `state_dict()` and slices"""

    def edit(model: Items, t: int) -> None:
        model.item.weight.detach()[t].add_(1)
        model.state_dict()["item.weight"][rows - t].mul_(2)
        model.item.weight[t * 7 : t * 7 + 3].zero_()

    return _edited(rows, edit)


@loop
def edited_row_state(rows: int) -> Program:
    """Edits of the optimizer's row state (`optimizer.state[p]["sum"][ids] = 0`)"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t % 4 == 0:
            optimizer.state[model.item.weight]["sum"][torch.randint(0, rows, (99,))] = 0.25

    return Program(model, [optimizer], step)


@loop
def inference_mode_edit(rows: int) -> Program:
    """Edits under `torch.inference_mode()`"""

    def edit(model: Items, t: int) -> None:
        with torch.inference_mode():
            model.item.weight[rows - 1 - t] = 3.0

    return _edited(rows, edit)


@loop
def module_to(rows: int) -> Program:
    """`model.to(...)`, `.double().float()` in mid-run"""
    model = Items(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t == 7:
            model.half().float()
        if t == 11:
            model.to("cpu")

    return Program(model, [optimizer], step)


@loop
def shared_memory(rows: int) -> Program:
    """`model.share_memory()`: other processes may write (Hogwild)"""
    model = Items(rows)
    model.share_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # What another process has: the same memory, and version counters of its own.
    theirs = Items(rows)
    for own, other in zip(model.parameters(), theirs.parameters(), strict=True):
        other.data = own.data
    its_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        train(theirs, its_optimizer, lambda: loss_of(theirs(draw(rows))))

    return Program(model, [optimizer], step)


def _grow(model: Items, optimizer: torch.optim.Optimizer, rows: int) -> None:
    """What a vocabulary that grows does: a larger table with the old rows, and their state."""
    old, new = model.item, nn.Embedding(rows, WIDTH)
    with torch.no_grad():
        new.weight[: len(old.weight)] = old.weight
    model.item = new
    state = optimizer.state.pop(old.weight, {})
    for name, value in state.items():
        if value.shape == old.weight.shape:
            grown = torch.zeros_like(new.weight)
            grown[: len(value)] = value
            state[name] = grown
    optimizer.state[new.weight] = state
    optimizer.param_groups[0]["params"] = list(model.parameters())


@loop
def grown_table(rows: int) -> Program:
    """A table that grows: `model.item = nn.Embedding(more, ...)`"""
    model = Items(rows)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(t: int) -> None:
        if t in (7, 16):
            _grow(model, optimizer, rows + 10 * t)
        train(model, optimizer, lambda: loss_of(model(draw(2 * len(model.item.weight)))))

    return Program(model, [optimizer], step)


@loop
def module_replaced(rows: int) -> Program:
    """`model.item = nn.Embedding(...)` of the same shape"""
    model = Items(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        if t in (7, 16):
            model.item = nn.Embedding(rows, WIDTH)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        train(model, optimizer, lambda: loss_of(model(draw(rows))))

    return Program(model, [optimizer], step)


@loop
def table_added(rows: int) -> Program:
    """A table that is added in mid-run"""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        if t == 7:
            model.extra = nn.Embedding(rows, WIDTH)
            optimizer.add_param_group({"params": list(model.extra.parameters())})
        ids = draw(rows)
        items = model.item(ids) + (model.extra(ids) if t >= 7 else 0)
        train(model, optimizer, lambda: loss_of(model.score(items, ids)))

    return Program(model, [optimizer], step)


# Writes that torch does not count: test_escapes.py.

EDITED_AT = 4, 24
"""The steps at which programs of this kind edit: before they are found out, and after."""


def _escaping(rows: int, edit: Callable[[torch.Tensor], object]) -> Program:
    """Trains, and edits a few rows unseen."""
    model = Items(rows)
    optimizer = adagrad(model)

    def step(t: int) -> None:
        train(model, optimizer, lambda: loss_of(model(draw(rows))))
        if t in EDITED_AT:
            edit(model.item.weight)

    return Program(model, [optimizer], step)


def _some(weight: torch.Tensor) -> torch.Tensor:
    return torch.randint(0, len(weight), (9,))


@escaping
def data_edit(rows: int) -> Program:
    """`weight.data[ids] = 0`"""

    def edit(weight: torch.Tensor) -> None:
        weight.data[_some(weight)] = 0

    return _escaping(rows, edit)


@escaping
def numpy_edit(rows: int) -> Program:
    """Edits through a NumPy view: `weight.detach().numpy()[ids] = 0`"""

    def edit(weight: torch.Tensor) -> None:
        weight.detach().numpy()[_some(weight).numpy()] = 0

    return _escaping(rows, edit)


@escaping
def fused_kernel_edit(rows: int) -> Program:
    """A fused kernel called by hand (`torch._fused_sgd_`)"""

    def edit(weight: torch.Tensor) -> None:
        gradient = torch.zeros_like(weight)
        gradient[_some(weight)] = 1
        torch._fused_sgd_(
            [weight.detach()],
            [gradient],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=0.1,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    return _escaping(rows, edit)


@escaping
def another_optimizer_by_data(rows: int) -> Program:
    """A second optimizer, not of torch, that writes through `.data`"""

    def edit(weight: torch.Tensor) -> None:
        weight.data.sub_(0.1 * weight.grad)
        weight.data[_some(weight)] *= 0.5

    return _escaping(rows, edit)
