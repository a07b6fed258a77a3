"""Tables of TorchRec's dense kernels: ordinary parameters, trained by torch's optimizers.

TorchRec uses them for data-parallel tables, and for any table whose plan says so. The gradient of a
parameter is dense and, where the table is data-parallel, the sum over all ranks: its rows that are
not zero are the rows that a step changes, whoever looked them up.

Not here: which optimizers move other rows too (checkpoint/tracking/); fused kernels (fused.py).
"""

from __future__ import annotations

import torch
from torch import nn

from holdfast.model.shard import Shard
from holdfast.model.tables import Table


class DenseKernelTable(Table):
    """A shard of a table that is a parameter of a sharded module."""

    def __init__(
        self,
        name: str,
        home: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        shard: Shard,
    ) -> None:
        """``home``: the module whose ``weight`` is the parameter."""
        weight = home.weight
        assert isinstance(weight, nn.Parameter)
        super().__init__(name, weight, optimizer=optimizer, shard=shard)
        self._home = home

    def is_current(self) -> bool:
        """Whether the module still has this parameter."""
        return self._home.weight is self.parameter
