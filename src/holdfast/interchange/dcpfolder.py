"""Folders of torch.distributed.checkpoint (DCP): a step as one, and one as a source.

A folder holds ``.metadata``, a pickle that says where each tensor's pieces lie, and files of
pieces, each an archive of ``torch.save``. Written by DCP itself: model and optimizer by parameter
names, as ``get_state_dict`` gives them, so that ``dcp.load`` and ``set_state_dict`` take them on
any number of ranks. Read without DCP: its own reader runs whatever the pickle says.

Invariants:
- The metadata is read as records, pieces and values as archives (archive/): nothing is run.
- A piece lies inside the folder and inside its file, is reached through no link, and shares no byte
  with another; the pieces of a tensor cover it exactly (cover.py).
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.boundary.budget import DEPTH_MAX, Account, Budget
from holdfast.errors import CorruptDataError, InvalidRequestError, NotFoundError
from holdfast.interchange import handout as handouts
from holdfast.interchange.archive import nested
from holdfast.interchange.archive.files import (
    Extent,
    InputFile,
    find_inside,
    folder_bytes,
    shown,
    whole,
)
from holdfast.interchange.archive.names import torch_names
from holdfast.interchange.archive.pickles import Names, UnknownNameError, read_pickle, record
from holdfast.interchange.archive.structure import read_structure
from holdfast.interchange.archive.tensors import (
    DIMENSIONS_MAX,
    SIZE_MAX,
    Piece,
    StoredTensor,
    TensorRef,
)
from holdfast.interchange.cover import check_apart, check_cover
from holdfast.interchange.fused import KEY as FUSED_KEY
from holdfast.interchange.handout import Handout, OnTable
from holdfast.interchange.source import Choice, Source, find_parts
from holdfast.interchange.wholeness import whole_folder

METADATA = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
_RECORDS = (
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
    "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
)  # fmt: skip


@functools.cache
def _names() -> Names:
    """All that DCP's metadata may name."""
    of_torch = torch_names()
    return {
        **{(f"{_CHECKPOINT}.metadata", kind): record(kind) for kind in _RECORDS},
        (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): record("_StorageInfo"),
        **{name: made for name, made in of_torch.items() if name[0].startswith("pathlib")},
        **{name: made for name, made in of_torch.items() if isinstance(made, torch.dtype)},
        **{
            name: of_torch[name]
            for name in (
                ("collections", "OrderedDict"),
                ("torch", "Size"),
                ("torch.serialization", "_get_layout"),
            )
        },
    }


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a folder: its place in the state, and its pieces' archives by offset."""

    path: tuple[str | int, ...]
    tensor: tuple[torch.dtype, tuple[int, ...]] | None
    """Its type and shape; None: not a tensor."""
    pieces: Mapping[tuple[int, ...] | None, tuple[tuple[int, ...], Extent]]


def read_items(folder: Path, account: Account) -> dict[str, Item]:
    """Every entry of a folder, by its flat name; nothing but the metadata is read.

    Raises:
        InvalidRequestError: it is no folder of DCP, one that is compressed, or one that claims more
            than its size allows.
        CorruptDataError: the metadata is damaged, or says what cannot be.
    """
    try:
        metadata = whole(find_inside(folder, [METADATA]))
    except NotFoundError as error:
        raise InvalidRequestError(
            "this is no folder of torch.distributed.checkpoint", path=shown(folder),
            todo="a whole one holds .metadata",
        ) from error  # fmt: skip
    what = shown(metadata.path)
    with account.holding_memory(2 * metadata.bytes, claim="the metadata of a folder"):
        root = read_pickle(metadata.read(), _names(), what=what, account=account)
    try:
        return _Metadata(folder, root).items()
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise CorruptDataError("the metadata says what cannot be", path=what) from error


class _Metadata:
    """What DCP's metadata says, checked entry by entry."""

    def __init__(self, folder: Path, root: Any) -> None:
        self._folder = folder
        self._root = root
        self._files: dict[tuple[str, ...], InputFile] = {}
        self._extents: list[Extent] = []

    def items(self) -> dict[str, Item]:
        """Every entry, by its flat name."""
        described, planned = _dict(self._root.get("state_dict_metadata")), None
        if self._root.fields.get("planner_data") is not None:
            planned = _dict(self._root.get("planner_data"))
        places: dict[tuple[str, tuple[int, ...] | None], Extent] = {}
        for place, info in _dict(self._root.get("storage_data")).items():
            offset = place.fields.get("offset")
            key = _text(place.get("fqn")), None if offset is None else _sizes(offset)
            places[key] = self._find(info)
        check_apart(self._extents)
        found: dict[str, Item] = {}
        for name, meta in described.items():
            path = _path((planned or {}).get(name, (_text(name),)))
            if meta.kind == "BytesStorageMetadata":
                found[name] = Item(path, None, {None: ((), places[name, None])})
                continue
            dtype = meta.get("properties").state[0]
            if not isinstance(dtype, torch.dtype):
                raise CorruptDataError("a tensor without a type", name=name[:80])
            shape, chunks = _sizes(meta.get("size")), meta.get("chunks")
            spans = [(_sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))) for chunk in chunks]
            check_cover(name, shape, spans)
            pieces: dict[tuple[int, ...] | None, tuple[tuple[int, ...], Extent]] = {
                offsets: (sizes, places[name, offsets]) for offsets, sizes in spans
            }
            found[name] = Item(path, (dtype, shape), pieces)
        return found

    def _find(self, info: Any) -> Extent:
        if info.fields.get("transform_descriptors"):
            raise InvalidRequestError(
                "the folder's pieces are compressed or encrypted", path=shown(self._folder),
                todo="save it without extensions",
            )  # fmt: skip
        parts = tuple(_text(info.get("relative_path")).split("/"))
        offset, length = info.get("offset"), info.get("length")
        if type(offset) is not int or type(length) is not int or len(parts) > DEPTH_MAX:
            raise CorruptDataError("a piece lies nowhere", file="/".join(parts)[:80])
        if parts not in self._files:
            try:
                self._files[parts] = find_inside(self._folder, parts)
            except NotFoundError as error:
                raise CorruptDataError(
                    "a file is missing or cut off", file="/".join(parts)[:80]
                ) from error
        file = self._files[parts]
        if offset < 0 or length < 0 or offset + length > file.bytes:
            raise CorruptDataError(
                "a file is missing or cut off", file=shown(file.path), bytes=file.bytes,
                needed=offset + length,
            )  # fmt: skip
        self._extents.append(Extent(file, offset, length))
        return self._extents[-1]


def read_dcp(folder: Path, choice: Choice, *, is_trusted: bool = False) -> Source:
    """A folder of DCP as a source. ``is_trusted`` lifts the limits on what it may cost.

    Raises:
        NotFoundError, InvalidRequestError, CorruptDataError: as ``read_items``.
    """
    account = Budget(folder_bytes(folder), is_trusted=is_trusted).open_account()
    tree: dict[Any, Any] = {}
    for name, item in read_items(folder, account).items():
        value = _value(name, item, account) if item.tensor is None else _tensor(name, item, account)
        _put(tree, item.path, value, name)
    root = _listed(tree)
    nested.check_size(root, account, what=shown(folder))
    return find_parts(root, choice, account=account, path=shown(folder), format="dcp")


def _tensor(name: str, item: Item, account: Account) -> StoredTensor:
    assert item.tensor is not None
    dtype, shape = item.tensor
    pieces = []
    for offsets, (sizes, extent) in item.pieces.items():
        found = _read(name, extent, account)
        if not isinstance(found, StoredTensor) or (found.dtype, found.shape) != (dtype, sizes):
            raise CorruptDataError("a piece is not what the metadata says", name=name[:80])
        if math.prod(sizes):
            pieces.append(Piece(offsets or (), found.pieces[0].ref))
    return StoredTensor(shape, dtype, tuple(pieces))


def _value(name: str, item: Item, account: Account) -> Any:
    ((_, extent),) = item.pieces.values()
    return _read(name, extent, account)


def _read(name: str, extent: Extent, account: Account) -> Any:
    try:
        return read_structure(extent, account)
    except UnknownNameError as error:
        raise CorruptDataError(
            "an entry is more than a tensor or a plain value; it was not run", entry=name[:80],
            name=error.facts["name"],
        ) from error  # fmt: skip


def _put(tree: dict[Any, Any], path: tuple[str | int, ...], value: Any, name: str) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise InvalidRequestError("two entries have one name", name=name[:80])
    if path[-1] in tree:
        raise InvalidRequestError("two entries have one name", name=name[:80])
    tree[path[-1]] = value


def _listed(tree: Any, key: Any = None) -> Any:
    """Groups back as the list they were; an optimizer's state keeps its numbers."""
    if not isinstance(tree, dict):
        return tree
    made = {name: _listed(value, name) for name, value in tree.items()}
    if key != "state" and made and set(made) == set(range(len(made))):
        return [made[index] for index in range(len(made))]
    return made


def write_dcp(handout: Handout, out: Path, *, on_table: OnTable) -> int:
    """Write a step as a folder of DCP, table by table; its size. Replaces ``out``.

    Raises:
        CorruptDataError: the checkpoint is damaged; nothing is written.
        InvalidRequestError: an optimizer's parameter has no name in the model.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    tree: dict[str, Any] = {"model": handout.model}
    if handout.optimizers:
        tree["optimizer"] = _by_name(handout)
    if handout.fused is not None:
        tree[FUSED_KEY] = handout.fused
    tree["step"] = handout.step
    with whole_folder(out) as temporary:
        # torch cannot leave numbers out of a file of many archives: placeholders go there as zeros.
        with (
            warnings.catch_warnings(),
            handouts.reporting("torch.distributed.checkpoint", CheckpointException),
        ):
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
            save(tree, storage_writer=FileSystemWriter(temporary), no_dist=True)
        places: list[tuple[torch.Tensor, TensorRef]] = []
        # It is of our own making; only its size bounds the time that looking at it takes.
        account = Budget(folder_bytes(temporary), is_trusted=True).open_account()
        for item in read_items(temporary, account).values():
            if item.tensor is not None:
                ((_, extent),) = item.pieces.values()
                found = read_structure(extent, account)
                if not isinstance(found, StoredTensor):
                    raise InvalidRequestError(
                        "a tensor is of a kind that is not exported",
                        path=[str(part)[:80] for part in item.path],
                        todo="export with --format torch",
                    )
                places.append((_at(tree, item.path), found.pieces[0].ref))
        handouts.fill(handout, places, on_table)
        size = sum(path.stat().st_size for path in temporary.iterdir())
    return size


def _at(tree: Any, path: tuple[str | int, ...]) -> torch.Tensor:
    try:
        for part in path:
            tree = tree[part]
    except (LookupError, TypeError):
        tree = None
    if not isinstance(tree, torch.Tensor):
        raise InvalidRequestError(
            "the state has keys that torch.distributed.checkpoint does not keep apart",
            path=[str(part)[:80] for part in path],
            todo="export with --format torch",
        )
    return tree


def _by_name(handout: Handout) -> dict[str, Any]:
    """All optimizers as one, by names for numbers: as ``get_optimizer_state_dict`` has them."""
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for key, packed in handout.optimizers.items():
        names = handout.parameters.get(key, [])
        for group in packed["param_groups"]:
            if any(index >= len(names) or names[index] is None for index in group["params"]):
                raise InvalidRequestError(
                    "an optimizer's parameter has no name in the model", optimizer=key,
                    todo="export with --format torch, or weights alone: --weights-only",
                )  # fmt: skip
            groups.append({**group, "params": [names[index] for index in group["params"]]})
        state |= {
            key if isinstance(key, str) else str(names[key]): entries
            for key, entries in packed["state"].items()
        }
    return {"state": state, "param_groups": groups}


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CorruptDataError("the metadata holds no dict where one belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CorruptDataError("the metadata holds no name where one belongs")
    return value


def _path(value: Any) -> tuple[str | int, ...]:
    """Where an entry lies in the state."""
    is_path = isinstance(value, tuple | list) and 0 < len(value) <= DEPTH_MAX
    if not is_path or not all(type(part) in (int, str) for part in value):
        raise CorruptDataError("the metadata holds no path where one belongs")
    return tuple(value)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > DIMENSIONS_MAX:
        raise CorruptDataError("the metadata holds an impossible size")
    if not all(type(size) is int and 0 <= size < SIZE_MAX for size in value):
        raise CorruptDataError("the metadata holds an impossible size")
    return value
