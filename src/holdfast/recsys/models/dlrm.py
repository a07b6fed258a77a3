"""DLRM: a bottom network for the dense features, tables for the ids, a top network over both.

Not here: sizes that papers used (presets.py), the loss and the loop (the trainer's).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.models.layers import look_up_bags, make_bags, make_mlp, pair_products

# B samples, T tables, F = T + 1 vectors of a sample, W floats in a row

Interaction = Literal["dot", "cat"]


class DLRM(nn.Module):
    """Click log-odds from a batch.

    The bottom network turns the dense features into one more vector of the rows' width. The top
    network then sees either all vectors side by side (``cat``, (T+1)*W inputs, as in CPR section
    5.1) or that one vector and the inner products of all pairs (``dot``, as DLRM was published).
    ``bottom`` starts with the number of dense features and ends with the width; ``top`` names the
    layers after its input and ends with 1.
    """

    def __init__(
        self,
        table_rows: Sequence[int],
        *,
        width: int = 16,
        bottom: Sequence[int] = (13, 64, 16),
        top: Sequence[int] = (64, 1),
        interaction: Interaction = "dot",
        sparse: bool = True,
    ) -> None:
        super().__init__()
        if len(bottom) < 2 or bottom[-1] != width or not top or top[-1] != 1:
            raise InvalidRequestError(
                "the networks do not fit the rows",
                width=width,
                bottom=tuple(bottom),
                top=tuple(top),
                todo="end bottom with the width and top with 1",
            )
        if interaction not in ("dot", "cat"):
            raise InvalidRequestError(
                "unknown interaction", interaction=interaction, todo="use 'dot' or 'cat'"
            )
        fields = len(table_rows) + 1
        inputs = fields * width if interaction == "cat" else width + fields * (fields - 1) // 2
        self.interaction = interaction
        self.tables = make_bags(table_rows, width=width, sparse=sparse)
        self.bottom = make_mlp(bottom, ends_linear=False)
        self.top = make_mlp((inputs, *top), ends_linear=True)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The log-odds of a click for every sample, as [B]."""
        dense_BW = self.bottom(batch.dense)
        rows_BTW = look_up_bags(self.tables, batch.ids)
        fields_BFW = torch.cat([dense_BW.unsqueeze(1), rows_BTW], dim=1)
        if self.interaction == "cat":
            seen = fields_BFW.flatten(1)
        else:
            seen = torch.cat([dense_BW, pair_products(fields_BFW)], dim=1)
        logits: torch.Tensor = self.top(seen).squeeze(1)
        return logits
