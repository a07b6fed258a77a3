"""A rule names every row that an optimizer moves: checked against the real optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.checkpoint.tracking.optimizers import rules
from holdfast.checkpoint.tracking.optimizers.rules import rule_of

ROWS = 60


def sparse_adam(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parameters), **settings)


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], str]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, rules.GRADIENT),
    "sgd-maximize": (torch.optim.SGD, {"lr": 0.1, "maximize": True}, rules.UNKNOWN),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}, rules.GRADIENT),
    "adagrad-decaying-rate": (torch.optim.Adagrad, {"lr_decay": 0.1}, rules.GRADIENT),
    "adagrad-fused": (torch.optim.Adagrad, {"fused": True}, rules.GRADIENT),
    "sparse-adam": (sparse_adam, {}, rules.GRADIENT),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, rules.TRAINED),
    "nesterov": (
        torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, rules.TRAINED
    ),
    "adam": (torch.optim.Adam, {}, rules.TRAINED),
    "adam-amsgrad": (torch.optim.Adam, {"amsgrad": True}, rules.TRAINED),
    "adam-fused": (torch.optim.Adam, {"fused": True}, rules.TRAINED),
    "adam-foreach": (torch.optim.Adam, {"foreach": True}, rules.TRAINED),
    "adamw-without-decay": (torch.optim.AdamW, {"weight_decay": 0}, rules.TRAINED),
    "nadam": (torch.optim.NAdam, {}, rules.TRAINED),
    "radam": (torch.optim.RAdam, {}, rules.TRAINED),
    "rmsprop": (torch.optim.RMSprop, {}, rules.TRAINED),
    "rmsprop-centered": (
        torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, rules.TRAINED
    ),
    "adadelta": (torch.optim.Adadelta, {}, rules.TRAINED),
    "adamw": (torch.optim.AdamW, {}, rules.ALL),
    "sgd-decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, rules.ALL),
    "adagrad-decay": (torch.optim.Adagrad, {"weight_decay": 0.1}, rules.ALL),
    "adam-eps-0": (torch.optim.Adam, {"eps": 0}, rules.ALL),
    "adam-eps-rounded-to-0": (torch.optim.Adam, {"eps": 1e-60}, rules.ALL),
    "sgd-rate-as-tensor": (torch.optim.SGD, {"lr": torch.tensor(0.1)}, rules.GRADIENT),
    "adamax": (torch.optim.Adamax, {}, rules.UNKNOWN),
    "asgd": (torch.optim.ASGD, {}, rules.UNKNOWN),
    "rprop": (torch.optim.Rprop, {}, rules.UNKNOWN),
}  # fmt: skip


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rule_names_every_row_that_moves(name: str, dtype: torch.dtype) -> None:
    make, settings, moves = OPTIMIZERS[name]
    torch.manual_seed(5)
    is_sparse = name == "sparse-adam"
    table = nn.Embedding(ROWS, 3, sparse=is_sparse, dtype=dtype)
    optimizer = make(table.parameters(), **settings)
    group = optimizer.param_groups[0]
    is_half = dtype == torch.float16
    name = str(dtype).removeprefix("torch.")
    rule = rule_of(optimizer, group, dtype=name, is_sparse=is_sparse)
    if is_half and group.get("eps", 1) < 1e-8 * 2 and moves != rules.UNKNOWN and not is_sparse:
        moves = rules.ALL  # eps is rounded to 0
    if dtype == torch.float64 and group.get("eps") == 1e-60:
        moves = rules.TRAINED  # it is not
    assert rule.moves == moves
    trained: set[int] = set()
    for _ in range(12):
        before = record(table, optimizer)
        ids = torch.randint(0, 40, (4,))
        optimizer.zero_grad()
        (table(ids) * torch.randn(4, 3, dtype=dtype)).sum().backward()
        count = table.weight._version
        optimizer.step()
        if rule.moves in (rules.GRADIENT, rules.TRAINED):
            assert table.weight._version - count <= rule.writes
        trained |= set(ids.tolist())
        moved = set(torch.nonzero((record(table, optimizer) != before).any(1)).view(-1).tolist())
        if moves == rules.GRADIENT:
            assert moved <= set(ids.tolist())
        elif moves == rules.TRAINED:
            assert moved <= trained


def record(table: nn.Embedding, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Every bit of every row: weights and row state; state that is not there yet is zero."""
    state = optimizer.state.get(table.weight, {}).values()
    columns = [table.weight.detach().clone()]
    columns += [v.clone() for v in state if torch.is_tensor(v) and v.shape == table.weight.shape]
    columns += [torch.zeros(ROWS, 3, dtype=table.weight.dtype)] * (5 - len(columns))
    return torch.cat(columns, dim=1).view(torch.uint8)


def test_a_subclass_is_not_known() -> None:
    class Mine(torch.optim.Adagrad):
        pass

    optimizer = Mine([nn.Parameter(torch.zeros(2))])
    assert rule_of(optimizer, optimizer.param_groups[0]).moves == rules.UNKNOWN


def test_a_rule_that_costs_much_says_what_to_change() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))])
    rule = rule_of(optimizer, optimizer.param_groups[0])
    assert rule.reason == "AdamW with weight_decay moves every row"
    assert "weight_decay=0" in rule.todo


def adagrad() -> torch.optim.Optimizer:
    return torch.optim.Adagrad([nn.Parameter(torch.zeros(2))])


def test_hooks_of_a_user_make_every_optimizer_unknown() -> None:
    optimizer = adagrad()
    group = optimizer.param_groups[0]
    key = rules.rule_key(optimizer, group)
    for register in (optimizer.register_step_post_hook, register_optimizer_step_pre_hook):
        handle = register(lambda *args: None)
        assert rule_of(optimizer, group).moves == rules.UNKNOWN
        assert rules.rule_key(optimizer, group) != key
        handle.remove()
        assert rule_of(optimizer, group).moves == rules.GRADIENT
        assert rules.rule_key(optimizer, group) == key


def test_a_class_with_another_step_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = adagrad()
    own = torch.optim.Adagrad.step
    assert rules.has_own_step(torch.optim.Adagrad)

    @functools.wraps(own)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    monkeypatch.setattr(torch.optim.Adagrad, "step", patched)
    assert not rules.has_own_step(torch.optim.Adagrad)
    assert rule_of(optimizer, optimizer.param_groups[0]).moves == rules.UNKNOWN


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"lr": 0.2}, True),
        ({"lr": 0.0}, False),
        ({"weight_decay": 0.1}, False),
        ({"betas": (0.8, 0.99)}, True),
        ({"betas": (0.0, 0.99)}, False),
        ({"amsgrad": True}, False),
        ({"name": "tables"}, False),
    ],
)
def test_an_observation_holds_while_no_setting_is_switched(
    change: dict[str, Any], is_same: bool
) -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(2))])
    group = optimizer.param_groups[0]
    before = rules.settings_key(optimizer, group)
    group.update(change)
    assert (rules.settings_key(optimizer, group) == before) is is_same
    hash(before)


def test_maximize_changes_the_sign_of_zeros_without_a_gradient() -> None:
    table = nn.Embedding(ROWS, 3)
    table.weight.data.fill_(-0.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, maximize=True)
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert not torch.signbit(table.weight[5:]).any()  # why it is not known
