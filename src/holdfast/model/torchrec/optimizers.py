"""TorchRec's optimizers of optimizers: the torch optimizers inside, which are what is saved.

A training loop holds one ``CombinedOptimizer`` of the fused optimizers and of wrappers around
torch's. Fused ones belong to their tables (fused.py). A wrapper shares the state and the groups of
the optimizer inside, until that one loads a checkpoint and makes new ones: then they are handed on.

Invariant: after a restore every wrapper sees the state and groups that its optimizer trains with.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

from holdfast.errors import InvalidRequestError


def unwrap(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer] | None:
    """The torch optimizers inside one of TorchRec's; None if it is not one.

    Raises:
        InvalidRequestError: it has state of its own that cannot be saved here.
    """
    if not isinstance(optimizer, KeyedOptimizer):
        return None
    return list(_inside(optimizer, []))


def _inside(
    optimizer: torch.optim.Optimizer, around: list[KeyedOptimizer]
) -> Iterator[torch.optim.Optimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, part in optimizer.optimizers:
            yield from _inside(part, around)  # its own state and groups are always its parts'
    elif isinstance(optimizer, FusedOptimizer):
        return
    elif isinstance(optimizer, KeyedOptimizerWrapper | GradientClippingOptimizer):
        yield from _inside(optimizer._optimizer, [*around, optimizer])
    elif isinstance(optimizer, KeyedOptimizer):
        raise InvalidRequestError(
            "an optimizer of this kind is not supported",
            type=type(optimizer).__name__,
            todo="pass the optimizer inside it, and what sets the rate in extras=",
        )
    else:
        _keep_joined(optimizer, around)
        yield optimizer


def _keep_joined(optimizer: torch.optim.Optimizer, around: list[KeyedOptimizer]) -> None:
    def loaded(inner: torch.optim.Optimizer) -> None:
        for wrapper in around:
            wrapper.state = inner.state
            wrapper.param_groups = inner.param_groups

    optimizer.register_load_state_dict_post_hook(loaded)
