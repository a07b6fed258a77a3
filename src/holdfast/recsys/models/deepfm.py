"""DeepFM: a factorization machine and a deep network over the same rows, added up.

Not here: sizes that papers used (presets.py), the loss and the loop (the trainer's).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.models.layers import (
    look_up_bags,
    look_up_embeddings,
    make_bags,
    make_embeddings,
    make_mlp,
)

# B samples, D dense features, T tables, F = T + D fields, W floats in a row


class DeepFM(nn.Module):
    """Click log-odds from a batch: first order + second order + deep.

    Every id has a row of ``width`` floats (shared by the second-order and the deep part) and a
    first-order weight, a row of one float in a table of its own: 2T tables in all. A dense feature
    is a field whose vector is scaled by its value. ``deep`` names the hidden layers.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        *,
        width: int = 16,
        deep: Sequence[int] = (64, 64),
        dense_features: int = 13,
        sparse: bool = True,
    ) -> None:
        super().__init__()
        if width < 1 or dense_features < 1:
            raise InvalidRequestError(
                "a size is out of range", width=width, dense_features=dense_features
            )
        fields = len(table_rows) + dense_features
        self.tables = make_bags(table_rows, width=width, sparse=sparse)
        self.weights = make_embeddings(table_rows, width=1, sparse=sparse)
        self.dense_weights = nn.Linear(dense_features, 1)
        self.dense_vectors = nn.Parameter(torch.empty(dense_features, width).normal_(std=0.1))
        self.deep = make_mlp((fields * width, *deep, 1), ends_linear=True)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The log-odds of a click for every sample, as [B]."""
        rows_BTW = look_up_bags(self.tables, batch.ids)
        dense_BDW = batch.dense.unsqueeze(2) * self.dense_vectors
        fields_BFW = torch.cat([rows_BTW, dense_BDW], dim=1)
        first_B = look_up_embeddings(self.weights, batch.ids).sum(dim=(1, 2))
        first_B = first_B + self.dense_weights(batch.dense).squeeze(1)
        # the sum over pairs, in linear time: half of (square of the sum - sum of the squares)
        square_of_sum = fields_BFW.sum(dim=1).square()
        second_B = 0.5 * (square_of_sum - fields_BFW.square().sum(dim=1)).sum(dim=1)
        logits: torch.Tensor = first_B + second_B + self.deep(fields_BFW.flatten(1)).squeeze(1)
        return logits
