"""What a file says, read by others: torch's own readers, and Python's zip.

The numbers that an import stored are compared with these. Only files that an import accepted come
here, so they are known to be small.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)


def read_archive(data: bytes) -> Any:
    """What torch says is in an archive; what it cannot read raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        except Exception:
            return _read_by_python(data)


def _read_by_python(data: bytes) -> Any:
    """With Python's zip and pickle; only names that weights_only allows are looked up."""
    from torch._weights_only_unpickler import _get_allowed_globals

    archive = zipfile.ZipFile(io.BytesIO(data))
    root = archive.namelist()[0].partition("/")[0]
    numpy_names = {"scalar", "_reconstruct", "dtype", "ndarray"}

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
                return _rebuild
            allowed = _get_allowed_globals().get(f"{module}.{name}")
            if allowed is not None:
                return allowed
            is_known = module.startswith("numpy") and name in numpy_names
            is_known |= (module, name) in {
                ("argparse", "Namespace"), ("collections", "defaultdict"), ("builtins", "list"),
                ("pathlib", "PurePosixPath"), ("builtins", "complex"), ("collections", "deque"),
                ("builtins", "frozenset"), ("__builtin__", "set"), ("torch", "UntypedStorage"),
                ("torch.storage", "UntypedStorage"),
            }  # fmt: skip
            if not is_known:
                raise ValueError(f"{module}.{name}")
            return super().find_class(module, name)

        def persistent_load(self, reference: Any) -> Any:
            _, kind, key, _, _ = reference
            dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
            raw = archive.read(f"{root}/data/{key}")
            return torch.storage.TypedStorage(
                wrap_storage=torch.UntypedStorage(list(raw)) if raw else torch.UntypedStorage(0),
                dtype=dtype,
                _internal=True,
            )

    return Reader(io.BytesIO(archive.read(f"{root}/data.pkl"))).load()


def _rebuild(storage: Any, at: int, shape: Any, stride: Any, *rest: Any) -> torch.Tensor:
    """A view; whether it wants gradients does not matter."""
    made = torch.empty(0, dtype=storage.dtype)
    made.set_(storage._untyped_storage, at, tuple(shape), tuple(stride))
    lazy = rest[2] if len(rest) > 2 else None
    return torch._neg_view(made) if lazy and lazy.get("neg") else made


def read_folder(folder: Path) -> dict[str, Any]:
    """The entries of a folder of DCP by their flat names, tensors whole."""

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            is_torch = module == "torch" and name in ("Size", *_dtypes())
            is_known = module in _METADATA_MODULES or is_torch
            is_known |= (module, name) in {
                ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"),
                ("pathlib", "WindowsPath"), ("collections", "OrderedDict"),
            }  # fmt: skip
            if not is_known:
                raise ValueError(f"{module}.{name}")
            return super().find_class(module, name)

    metadata = Reader(io.BytesIO((folder / ".metadata").read_bytes())).load()
    found: dict[str, Any] = {}
    places = {(i.fqn, tuple(i.offset or ())): info for i, info in metadata.storage_data.items()}

    def archive(name: str, offsets: tuple[int, ...]) -> Any:
        info = places[name, offsets]
        with (folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            return read_archive(file.read(info.length))

    for name, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            found[name] = archive(name, ())
            continue
        whole = torch.zeros(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            where = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[where] = archive(name, tuple(chunk.offsets))
        found[name] = whole
    return found


def _dtypes() -> list[str]:
    return [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
