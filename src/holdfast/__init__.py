"""Holdfast: training of recommendation models that loses machines and goes on.

    import holdfast as hf
    ck = hf.Checkpointer(url, model=model, optimizer=optimizer, every=1000)
    step = ck.resume()
    for batch in loader:
        ...
        ck.step()

Names are imported when first used, so that a process that needs only storage or kernels does not
pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.bitwidth import BitsFor, FailureEstimate
    from holdfast.checkpoint.checkpointer import Checkpointer
    from holdfast.checkpoint.codec import Codec
    from holdfast.checkpoint.grid import Extract
    from holdfast.checkpoint.interval import Every, Pls
    from holdfast.checkpoint.priority import Priority
    from holdfast.checkpoint.retention import Keep
    from holdfast.checkpoint.run import CheckpointInfo, Rows, Run, open
    from holdfast.checkpoint.save import Save, SaveStats
    from holdfast.checkpoint.strategy import Strategy
    from holdfast.checkpoint.verify import VerifyReport, verify
    from holdfast.errors import (
        ConflictError,
        CorruptDataError,
        DataLossError,
        HoldfastError,
        HoldfastWarning,
        InvalidRequestError,
        NotFoundError,
        UnavailableError,
    )
    from holdfast.integrations.attach import Attachment, attach
    from holdfast.interchange.importer import Imported, import_checkpoint
    from holdfast.loading.granted_loader import GrantedLoader
    from holdfast.pieces import Piece
    from holdfast.placement import Placement

__all__ = [
    "Attachment",
    "BitsFor",
    "CheckpointInfo",
    "Checkpointer",
    "Codec",
    "ConflictError",
    "CorruptDataError",
    "DataLossError",
    "Every",
    "Extract",
    "FailureEstimate",
    "GrantedLoader",
    "HoldfastError",
    "HoldfastWarning",
    "Imported",
    "InvalidRequestError",
    "Keep",
    "NotFoundError",
    "Piece",
    "Placement",
    "Pls",
    "Priority",
    "Rows",
    "Run",
    "Save",
    "SaveStats",
    "Strategy",
    "UnavailableError",
    "VerifyReport",
    "attach",
    "import_checkpoint",
    "open",
    "verify",
]

_HOMES = {
    "checkpoint.bitwidth": ("BitsFor", "FailureEstimate"),
    "checkpoint.checkpointer": ("Checkpointer",),
    "checkpoint.codec": ("Codec",),
    "checkpoint.grid": ("Extract",),
    "checkpoint.interval": ("Every", "Pls"),
    "checkpoint.priority": ("Priority",),
    "loading.granted_loader": ("GrantedLoader",),
    "checkpoint.retention": ("Keep",),
    "checkpoint.run": ("CheckpointInfo", "Rows", "Run", "open"),
    "checkpoint.strategy": ("Strategy",),
    "checkpoint.verify": ("VerifyReport", "verify"),
    "checkpoint.save": ("Save", "SaveStats"),
    "integrations.attach": ("Attachment", "attach"),
    "interchange.importer": ("Imported", "import_checkpoint"),
    "pieces": ("Piece",),
    "placement": ("Placement",),
    "errors": (
        "ConflictError",
        "CorruptDataError",
        "DataLossError",
        "HoldfastError",
        "HoldfastWarning",
        "InvalidRequestError",
        "NotFoundError",
        "UnavailableError",
    ),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"holdfast.{home}"), name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
