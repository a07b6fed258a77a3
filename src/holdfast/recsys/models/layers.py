"""The parts every click model is made of: tables, multilayer perceptrons, parameter groups.

Invariants:
- Initial values come from torch's global generator and nothing else: one ``torch.manual_seed``
  fixes the model.
- A table is written once when it is made, so that large ones start quickly.

Not here: the models themselves (dlrm.py, deepfm.py, pnn.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

from holdfast.errors import InvalidRequestError

# B samples, T tables, W floats in a row

Tables = nn.ModuleList


def check_table_rows(table_rows: Sequence[int]) -> None:
    """Refuse an empty list of tables and empty tables."""
    if not table_rows or min(table_rows) < 1:
        raise InvalidRequestError(
            "every table needs at least one row",
            table_rows=list(table_rows),
            todo="pass one positive size per table",
        )


def _first_rows(rows: int, width: int) -> torch.Tensor:
    # DLRM's choice: a bound that shrinks with the table
    return torch.empty(rows, width).uniform_(-1 / math.sqrt(rows), 1 / math.sqrt(rows))


def make_bags(table_rows: Sequence[int], *, width: int, sparse: bool) -> Tables:
    """One summing ``EmbeddingBag`` per table, uniform in ±1/sqrt(rows)."""
    check_table_rows(table_rows)
    return nn.ModuleList(
        nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse, _weight=_first_rows(rows, width))
        for rows in table_rows
    )


def make_embeddings(table_rows: Sequence[int], *, width: int, sparse: bool) -> Tables:
    """One plain ``Embedding`` per table, uniform in ±1/sqrt(rows)."""
    check_table_rows(table_rows)
    return nn.ModuleList(
        nn.Embedding(rows, width, sparse=sparse, _weight=_first_rows(rows, width))
        for rows in table_rows
    )


def look_up_bags(tables: Tables, ids_BT: torch.Tensor) -> torch.Tensor:
    """The rows of every sample, as [B, T, W]."""
    columns = zip(tables, ids_BT.unsqueeze(2).unbind(dim=1), strict=True)
    return torch.stack([table(ids_B1) for table, ids_B1 in columns], dim=1)


def look_up_embeddings(tables: Tables, ids_BT: torch.Tensor) -> torch.Tensor:
    """The rows of every sample, as [B, T, W]."""
    columns = zip(tables, ids_BT.unbind(dim=1), strict=True)
    return torch.stack([table(ids_B) for table, ids_B in columns], dim=1)


def make_mlp(sizes: Sequence[int], *, ends_linear: bool) -> nn.Sequential:
    """Linear layers of the given sizes with ReLU between them (and after, unless it ends linear).

    >>> [tuple(layer.weight.shape) for layer in make_mlp([3, 4, 1], ends_linear=True)[::2]]
    [(4, 3), (1, 4)]
    """
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        linear = nn.Linear(inputs, outputs)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / (inputs + outputs)))
        nn.init.normal_(linear.bias, std=math.sqrt(1 / outputs))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if ends_linear else layers))


def pair_products(fields_BFW: torch.Tensor) -> torch.Tensor:
    """The inner product of every pair of a sample's F vectors, as [B, F*(F-1)/2].

    >>> pair_products(torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])).tolist()
    [[11.0, 17.0, 39.0]]
    """
    products_BFF = torch.bmm(fields_BFW, fields_BFW.transpose(1, 2))
    fields = fields_BFW.shape[1]
    row, column = torch.tril_indices(fields, fields, offset=-1, device=fields_BFW.device)
    return products_BFF[:, row, column]


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """A model's table parameters and its other ones, each in the order of ``parameters()``.

    So that a loop can give the tables an optimizer for sparse gradients (SparseAdam, Adagrad) and
    the rest any other. A parameter shared by several modules is listed once.
    """
    table_ids = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    tables: list[nn.Parameter] = []
    dense: list[nn.Parameter] = []
    for parameter in model.parameters():
        (tables if id(parameter) in table_ids else dense).append(parameter)
    return tables, dense
