"""A model's dense parameters as rows of a table: flattened one after the other, the end padded.

    parameters -> one long vector -> rows of 256 -> the table "dense", placed and replicated as any

So networks need nothing of their own on servers: they are pulled, trained and recovered as rows.

Invariants:
- ``read`` after ``write`` gives the same rows; the padding is zeros.
- A parameter that several modules share is there once.
- The order is that of ``model.parameters()``: processes that build the same model agree on it.

Not here: buffers (batch norm's means), which stay with each worker; who pulls and pushes
(worker.py).

# R rows of the table, D = 256 weights of each
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from holdfast.errors import InvalidRequestError

NAME = "dense"
DIM = 256


def count_rows(floats: int) -> int:
    """How many rows hold so many floats.

    >>> count_rows(256), count_rows(257)
    (1, 2)
    """
    return -(-floats // DIM)


class Dense:
    """The trainable parameters of a model, seen as rows."""

    def __init__(self, model: nn.Module) -> None:
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        for name, parameter in named:
            if parameter.dtype != torch.float32:
                raise InvalidRequestError(
                    "servers train float32 parameters", parameter=name, dtype=str(parameter.dtype)
                )
        if not named:
            raise InvalidRequestError("the model has no dense parameters to train")
        self.names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        ends = np.cumsum([parameter.numel() for parameter in self._parameters]).tolist()
        self._spans = list(zip([0, *ends[:-1]], ends, strict=True))
        self.rows = count_rows(ends[-1])

    def read(self) -> np.ndarray:
        """The parameters' values."""
        return self._flatten([parameter.detach() for parameter in self._parameters])

    def write(self, rows_RD: np.ndarray) -> None:
        """Set the parameters."""
        if rows_RD.shape != (self.rows, DIM):
            raise InvalidRequestError(
                "the model's dense parameters are not those of the cluster",
                rows=self.rows,
                found=rows_RD.shape,
                todo="build the same model in the driver and in every worker",
            )
        flat = torch.from_numpy(rows_RD).reshape(-1)
        with torch.no_grad():
            for parameter, (start, end) in zip(self._parameters, self._spans, strict=True):
                parameter.copy_(flat[start:end].view_as(parameter))

    def gradients(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows that have a gradient, and it; a parameter without one adds zeros to a row."""
        has_gradient_R = np.zeros(self.rows, bool)
        for name, parameter, (start, end) in zip(
            self.names, self._parameters, self._spans, strict=True
        ):
            gradient = parameter.grad
            if gradient is not None and end > start:
                if gradient.is_sparse:
                    raise InvalidRequestError(
                        "a local table is trained here",
                        parameter=name,
                        todo="put session.embedding_bag or session.embedding in its place",
                    )
                has_gradient_R[start // DIM : count_rows(end)] = True
        ids_R = np.flatnonzero(has_gradient_R)
        return ids_R, self._flatten([each.grad for each in self._parameters])[ids_R]

    def zero_grad(self) -> None:
        """Forget gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def _flatten(self, tensors: Sequence[torch.Tensor | None]) -> np.ndarray:
        rows_RD = np.zeros((self.rows, DIM), np.float32)
        flat = torch.from_numpy(rows_RD).view(-1)
        for tensor, (start, end) in zip(tensors, self._spans, strict=True):
            if tensor is not None:
                flat[start:end] = tensor.reshape(-1)
        return rows_RD
