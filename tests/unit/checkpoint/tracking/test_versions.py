"""Every write that torch counts is seen, once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.tracking.versions import VersionCounters
from holdfast.model.tables import find_tables


@torch.no_grad()
def edit(model: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    model.weight[3] = 0


@torch.no_grad()
def average(model: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    model.weight.lerp_(torch.zeros(20, 4), 0.1)


def load(model: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def load_optimizer(model: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def edit_state(model: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.weight]["sum"].mul_(2)


def replace_state(model: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.weight]["sum"] = torch.ones(20, 4)


def other_storage(model: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    model.weight.data = torch.zeros(20, 4)


def same_memory_and_count(model: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    """Another tensor around the same memory, written to as often as the one before."""
    state = optimizer.state[model.weight]
    old = state["sum"]
    state["sum"] = old.data
    for _ in range(old._version):
        state["sum"][3] += 1
    assert (state["sum"]._version, state["sum"].data_ptr()) == (old._version, old.data_ptr())


WRITES = [
    edit,
    average,
    load,
    load_optimizer,
    edit_state,
    replace_state,
    other_storage,
    same_memory_and_count,
]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_is_seen_once(
    write: Callable[[nn.Embedding, torch.optim.Optimizer], None],
) -> None:
    model = nn.Embedding(20, 4)
    optimizer = torch.optim.Adagrad(model.parameters())
    (table,) = find_tables(model, [optimizer])
    versions = VersionCounters(table)
    model(torch.tensor([1])).sum().backward()
    assert not versions.has_changed()  # reading and gradients write nothing
    write(model, optimizer)
    assert versions.has_changed()
    versions.look()
    assert not versions.has_changed()


def test_another_sparse_tensor_of_moments_is_seen() -> None:
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (table,) = find_tables(model, [optimizer])
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    versions = VersionCounters(table)
    assert versions.has_sparse_state
    state = optimizer.state[model.weight]
    state["momentum_buffer"] = state["momentum_buffer"].clone()
    assert versions.has_changed()
    versions.look()
    assert not versions.has_changed()
    state["momentum_buffer"].mul_(2)
    assert versions.has_changed()


def test_inference_tensors_are_not_counted() -> None:
    with torch.inference_mode():
        model = nn.Embedding(20, 4)
    assert not VersionCounters(find_tables(model)[0]).is_counted


def test_other_memory_at_the_same_address_is_seen() -> None:
    model = nn.Embedding(20, 4)
    memory = np.ones((20, 4), np.float32)
    model.weight.data = torch.from_numpy(memory)
    (table,) = find_tables(model)
    versions = VersionCounters(table)
    assert not versions.look_at_storages()
    model.weight.data = torch.zeros(20, 4)
    model.weight.data = torch.from_numpy(memory)  # as an allocator gives an address out again
    assert not versions.has_changed()
    assert versions.look_at_storages()
    assert not versions.look_at_storages()


def test_weights_swapped_out_and_in_again_are_the_same() -> None:
    model = nn.Embedding(20, 4)
    (table,) = find_tables(model)
    versions = VersionCounters(table)
    own = model.weight.data
    model.weight.data = torch.zeros(20, 4)
    model.weight.data = own
    assert not versions.has_changed()
    assert not versions.look_at_storages()
