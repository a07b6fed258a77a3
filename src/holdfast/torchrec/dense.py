"""Tables of TorchRec's dense kernels: ordinary parameters, trained by torch's optimizers.

TorchRec uses them for data-parallel tables, and for any table whose plan says so. The gradient of a
parameter is dense and, where the table is data-parallel, the sum over all ranks: its rows that are
not zero are the rows that a step changes, whoever looked them up.

Not here: which optimizers move other rows too (tables.py); fused kernels (fused.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from holdfast.pieces import Piece
from holdfast.tables import Mark, Table, moves_unseen


class DenseTable(Table):
    """A piece of a table that is a parameter of a sharded module."""

    def __init__(
        self,
        name: str,
        home: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        piece: Piece,
    ) -> None:
        """``home``: the module whose ``weight`` is the parameter."""
        weight = home.weight
        assert isinstance(weight, nn.Parameter)
        super().__init__(name, weight, optimizer=optimizer, piece=piece)
        self._home = home

    @property
    def watch(self) -> Callable[[Mark], Callable[[], None]]:
        """Hear of the rows that an optimizer's step changes."""
        return self._watch

    def _watch(self, mark: Mark) -> Callable[[], None]:
        if self.optimizer is None:
            return lambda: None

        def stepped(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
            gradient = self.parameter.grad
            if gradient is not None and gradient.numel():
                mark(gradient.count_nonzero(dim=1).nonzero().view(-1).cpu().numpy())

        return self.optimizer.register_step_post_hook(stepped).remove

    def unseen_mover(self) -> str | None:
        """Why rows without a gradient would change, if they do."""
        return moves_unseen(self.optimizer, self.parameter)

    def is_current(self) -> bool:
        """Whether the module still has this parameter."""
        return self._home.weight is self.parameter
