"""Holdfast: fault-tolerant training for recommendation models.

    import holdfast as hf
    with hf.Checkpointer(url, model=model, optimizer=optimizer, every=1000) as ck:
        ck.resume()
        for batch in ck.epochs(loader, 5):
            ...
            ck.step()

Names are imported when first used, so that a process that needs only storage or kernels does not
pay for torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from holdfast.checkpoint.checkpointer import Checkpointer
    from holdfast.checkpoint.format.codec import Codec
    from holdfast.checkpoint.grid.decide import Extract
    from holdfast.checkpoint.planning.bits import BitsFor, FailureEstimate
    from holdfast.checkpoint.planning.interval import Every, Pls
    from holdfast.checkpoint.planning.retention import Keep
    from holdfast.checkpoint.restoring.restore import RestoreStats
    from holdfast.checkpoint.run import CheckpointInfo, Rows, Run
    from holdfast.checkpoint.run import open as open
    from holdfast.checkpoint.saving.pending import PendingSave, SaveStats
    from holdfast.checkpoint.selecting.priority import Priority
    from holdfast.checkpoint.settings import Settings
    from holdfast.checkpoint.strategy import Strategy
    from holdfast.checkpoint.verify import VerifyReport, verify
    from holdfast.errors import (
        CommitUnknownError,
        ConflictError,
        CorruptDataError,
        DataLossError,
        HoldfastError,
        HoldfastWarning,
        InvalidRequestError,
        NotFoundError,
        SaveCancelledError,
        UnavailableError,
    )
    from holdfast.integrations.attach import Attachment, attach
    from holdfast.interchange.importer import Imported, import_checkpoint
    from holdfast.loading.granted_loader import GrantedLoader
    from holdfast.loading.stateful import Stateful
    from holdfast.model.placement import Placement
    from holdfast.model.shard import Shard
    from holdfast.storage.base import Storage

# All that ``from holdfast import *`` brings: not ``open``, which would hide Python's own.
__all__ = [
    "Attachment",
    "BitsFor",
    "CheckpointInfo",
    "Checkpointer",
    "Codec",
    "CommitUnknownError",
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
    "PendingSave",
    "Placement",
    "Pls",
    "Priority",
    "RestoreStats",
    "Rows",
    "Run",
    "SaveCancelledError",
    "SaveStats",
    "Settings",
    "Shard",
    "Stateful",
    "Storage",
    "Strategy",
    "UnavailableError",
    "VerifyReport",
    "attach",
    "import_checkpoint",
    "verify",
]

_HOMES = {
    "checkpoint.checkpointer": ("Checkpointer",),
    "checkpoint.format.codec": ("Codec",),
    "checkpoint.grid.decide": ("Extract",),
    "checkpoint.planning.bits": ("BitsFor", "FailureEstimate"),
    "checkpoint.planning.interval": ("Every", "Pls"),
    "checkpoint.planning.retention": ("Keep",),
    "checkpoint.restoring.restore": ("RestoreStats",),
    "checkpoint.run": ("CheckpointInfo", "Rows", "Run", "open"),
    "checkpoint.saving.pending": ("PendingSave", "SaveStats"),
    "checkpoint.selecting.priority": ("Priority",),
    "checkpoint.settings": ("Settings",),
    "checkpoint.strategy": ("Strategy",),
    "checkpoint.verify": ("VerifyReport", "verify"),
    "errors": (
        "CommitUnknownError",
        "ConflictError",
        "CorruptDataError",
        "DataLossError",
        "HoldfastError",
        "HoldfastWarning",
        "InvalidRequestError",
        "NotFoundError",
        "SaveCancelledError",
        "UnavailableError",
    ),
    "integrations.attach": ("Attachment", "attach"),
    "interchange.importer": ("Imported", "import_checkpoint"),
    "loading.granted_loader": ("GrantedLoader",),
    "loading.stateful": ("Stateful",),
    "model.shard": ("Shard",),
    "model.placement": ("Placement",),
    "storage.base": ("Storage",),
}
_MODULE_OF = {name: home for home, names in _HOMES.items() for name in names}
_RENAMED = {"Save": "PendingSave", "Piece": "Shard"}  # names of 0.4


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("holdfast")
    if name in _RENAMED:
        from holdfast.deprecation import warn_renamed

        new = _RENAMED[name]
        warn_renamed(f"holdfast.{name}", f"holdfast.{new}")
        return getattr(_import_module(f"holdfast.{_MODULE_OF[new]}"), new)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(_import_module(f"holdfast.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF, "__version__"])
