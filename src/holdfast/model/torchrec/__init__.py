"""TorchRec's sharded models: their tables, rows and row state, as Holdfast sees them.

Loaded only where a program has loaded TorchRec (model/tables.py, ``ADAPTERS``).
"""

from holdfast.model.torchrec.claim import claim
from holdfast.model.torchrec.optimizers import unwrap

__all__ = ["claim", "unwrap"]
