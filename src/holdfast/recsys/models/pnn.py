"""PNN with inner products: a deep network over the rows and the products of all their pairs.

Not here: sizes that papers used (presets.py), the loss and the loop (the trainer's).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.models.layers import look_up_bags, make_bags, make_mlp, pair_products

# B samples, D dense features, T tables, F = T + 1 fields, W floats in a row


class PNN(nn.Module):
    """Click log-odds from a batch; the dense features together form one more field.

    ``deep`` names the hidden layers.
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
        fields = len(table_rows) + 1
        inputs = fields * width + fields * (fields - 1) // 2
        self.tables = make_bags(table_rows, width=width, sparse=sparse)
        self.dense_field = nn.Linear(dense_features, width)
        self.deep = make_mlp((inputs, *deep, 1), ends_linear=True)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The log-odds of a click for every sample, as [B]."""
        rows_BTW = look_up_bags(self.tables, batch.ids)
        dense_B1W = self.dense_field(batch.dense).unsqueeze(1)
        fields_BFW = torch.cat([dense_B1W, rows_BTW], dim=1)
        seen = torch.cat([fields_BFW.flatten(1), pair_products(fields_BFW)], dim=1)
        logits: torch.Tensor = self.deep(seen).squeeze(1)
        return logits
