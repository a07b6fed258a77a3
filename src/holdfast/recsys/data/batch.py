"""A batch of samples: what every reader makes and every model takes.

Invariants:
- All three tensors have the same first dimension, in the same order of samples.
- ``ids`` are row ids: column t is below the rows of table t. Hashing or a vocabulary made them.

Not here: making batches (clicks.py, reader.py) and using them (recsys/models/dlrm.py,
recsys/models/deepfm.py, recsys/models/pnn.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# B samples, D dense features, T tables


@dataclass(frozen=True, slots=True)
class Batch:
    """B samples: D dense features, one row id in each of T tables, and whether it was clicked.

    >>> batch = Batch(torch.zeros(2, 13), torch.zeros(2, 26, dtype=torch.int64), torch.ones(2))
    >>> len(batch)
    2
    """

    dense: torch.Tensor  # [B, D] float32
    ids: torch.Tensor  # [B, T] int64
    labels: torch.Tensor  # [B] float32, 0 or 1

    def __len__(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The same samples on another device."""
        return Batch(self.dense.to(device), self.ids.to(device), self.labels.to(device))

    def pin_memory(self) -> Batch:
        """The same samples in page-locked memory; torch's DataLoader asks for it by this name."""
        return Batch(self.dense.pin_memory(), self.ids.pin_memory(), self.labels.pin_memory())
