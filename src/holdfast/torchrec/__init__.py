"""TorchRec's sharded models: their tables, rows and row state, as Holdfast sees them.

Loaded only where a program has loaded TorchRec (tables.py, ``ADAPTERS``).
"""

from holdfast.torchrec.claim import claim
from holdfast.torchrec.optimizers import unwrap

__all__ = ["claim", "unwrap"]
