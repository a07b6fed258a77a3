"""Folders of torch.distributed.checkpoint (DCP): a step as one, and one as a source.

A folder holds ``.metadata``, a pickle that says where each tensor's pieces lie, and files of
pieces, each an archive of ``torch.save``. Written by DCP itself: model and optimizer by parameter
names, as ``get_state_dict`` gives them, so that ``dcp.load`` and ``set_state_dict`` take them on
any number of ranks. Read without DCP: its own reader runs whatever the pickle says.

Invariants:
- The metadata is read as records (restricted.py), pieces are mapped (torchzip.py); values that are
  no tensors are read with ``weights_only=True``.
- A piece lies inside the folder and inside its file; the pieces of a tensor cover it exactly.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import CorruptDataError, InvalidRequestError, NotFoundError
from holdfast.interchange import handout as handouts
from holdfast.interchange import restricted
from holdfast.interchange.fused import KEY as FUSED_KEY
from holdfast.interchange.handout import Handout, OnTable
from holdfast.interchange.restricted import Record
from holdfast.interchange.source import Choice, Piece, Source, StoredTensor, find_parts
from holdfast.interchange.torchzip import Extent, TensorRef, read_bytes, read_structure
from holdfast.interchange.wholeness import whole_folder

METADATA = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
)  # fmt: skip
_PIECES_MAX = 1 << 16


class _Layout:
    """Stands for the function that names a tensor's layout."""

    __slots__ = ()

    def __call__(self, name: str) -> str:
        return name

    def __setstate__(self, state: object) -> None:
        raise CorruptDataError("a pickle tries to change a function")


class _Place(Record):
    """Stands for a key of the metadata's list of places."""

    kind = "MetadataIndex"

    def key(self) -> tuple[str, tuple[int, ...] | None]:
        """Whose piece, and where in it."""
        offset = self.fields.get("offset")
        return _text(self.get("fqn")), None if offset is None else _sizes(offset)


def _names() -> restricted.Names:
    """All that DCP's metadata may name."""
    kinds = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
             "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta")  # fmt: skip
    paths = [(m, n) for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "WindowsPath")]
    return {
        **{(f"{_CHECKPOINT}.metadata", kind): restricted.record(kind) for kind in kinds},
        (f"{_CHECKPOINT}.metadata", "MetadataIndex"): type("Place", (_Place,), {}),
        (f"{_CHECKPOINT}.filesystem", "_StorageInfo"): restricted.record("_StorageInfo"),
        **{path: restricted.record("Path") for path in paths},
        ("collections", "OrderedDict"): dict,
        ("torch", "Size"): tuple,
        ("torch.serialization", "_get_layout"): _Layout(),
        **{("torch", name): getattr(torch, name) for name in _DTYPES},
    }


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a folder: its place in the state, and its pieces' archives by offset."""

    path: tuple[str | int, ...]
    tensor: tuple[torch.dtype, tuple[int, ...]] | None
    """Its type and shape; None: not a tensor."""
    pieces: Mapping[tuple[int, ...] | None, tuple[tuple[int, ...], Extent]]


def read_items(folder: Path) -> dict[str, Item]:
    """Every entry of a folder, by its flat name; nothing but the metadata is read.

    Raises:
        NotFoundError: there is no such folder.
        InvalidRequestError: it is no folder of DCP, or one that is compressed.
        CorruptDataError: the metadata is damaged, or says what cannot be.
    """
    if not folder.is_dir():
        raise NotFoundError("no such folder", path=str(folder))
    metadata = folder / METADATA
    if not metadata.is_file():
        raise InvalidRequestError(
            "this is no folder of torch.distributed.checkpoint", path=str(folder),
            todo="a whole one holds .metadata",
        )  # fmt: skip
    if metadata.stat().st_size > restricted.BYTES_MAX:
        raise CorruptDataError("the metadata is too large", path=str(metadata))
    root = restricted.read_pickle(metadata.read_bytes(), _names(), what=str(metadata))
    try:
        return _items(folder, root)
    except (TypeError, AttributeError, KeyError, ValueError, RecursionError) as error:
        raise CorruptDataError("the metadata says what cannot be", path=str(metadata)) from error


def _items(folder: Path, root: Any) -> dict[str, Item]:
    described, planned = root.get("state_dict_metadata"), root.fields.get("planner_data")
    places: dict[tuple[str, tuple[int, ...] | None], Extent] = {}
    for place, info in root.get("storage_data").items():
        places[place.key()] = _extent(folder, info)
    found: dict[str, Item] = {}
    for name, meta in described.items():
        planned_path = (planned or {}).get(name, (_text(name),))
        path = tuple(part if type(part) is int else _text(part) for part in planned_path)
        if meta.kind == "BytesStorageMetadata":
            found[name] = Item(path, None, {None: ((), places[name, None])})
            continue
        dtype = meta.get("properties").state[0]
        if not isinstance(dtype, torch.dtype):
            raise CorruptDataError("a tensor without a type", name=name)
        shape, chunks = _sizes(meta.get("size")), meta.get("chunks")
        spans = [(_sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))) for chunk in chunks]
        _check_cover(name, shape, spans)
        pieces: dict[tuple[int, ...] | None, tuple[tuple[int, ...], Extent]] = {
            offsets: (sizes, places[name, offsets]) for offsets, sizes in spans
        }
        found[name] = Item(path, (dtype, shape), pieces)
    return found


def _extent(folder: Path, info: Any) -> Extent:
    if info.fields.get("transform_descriptors"):
        raise InvalidRequestError(
            "the folder's pieces are compressed or encrypted", path=str(folder),
            todo="save it without extensions",
        )  # fmt: skip
    relative = Path(_text(info.get("relative_path")))
    offset, length = info.get("offset"), info.get("length")
    path = folder / relative
    is_inside = not relative.is_absolute() and ".." not in relative.parts
    if not is_inside or type(offset) is not int or type(length) is not int:
        raise CorruptDataError("a piece lies outside the folder", file=str(relative)[:80])
    size = path.stat().st_size if path.is_file() else -1
    if size < 0 or offset < 0 or length < 0 or offset + length > size:
        raise CorruptDataError(
            "a file is missing or cut off", file=str(path), bytes=max(0, size),
            needed=offset + length,
        )  # fmt: skip
    return Extent(path, offset, length)


def _check_cover(
    name: str, shape: tuple[int, ...], spans: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Refuse pieces that overlap, reach beyond the tensor, or leave something out."""
    is_inside = all(
        len(offsets) == len(sizes) == len(shape)
        and all(a + n <= full for a, n, full in zip(offsets, sizes, shape, strict=True))
        for offsets, sizes in spans
    )
    covered = sum(math.prod(sizes) for _, sizes in spans)
    ordered = sorted(span for span in spans if math.prod(span[1]))
    is_apart = len(ordered) <= _PIECES_MAX and not any(
        _overlap(span, later)
        for index, span in enumerate(ordered)
        for later in _starting_within(ordered, index)
    )
    if not is_inside or not is_apart or covered != math.prod(shape):
        raise CorruptDataError("the pieces of a tensor do not cover it once", name=name)


_Span = tuple[tuple[int, ...], tuple[int, ...]]


def _starting_within(ordered: list[_Span], index: int) -> list[_Span]:
    """The spans after one that begin before its last row; they alone can overlap it."""
    offsets, sizes = ordered[index]
    if not offsets:
        return ordered[index + 1 :]
    found = []
    for later in ordered[index + 1 :]:
        if later[0][0] >= offsets[0] + sizes[0]:
            break
        found.append(later)
    return found


def _overlap(one: _Span, other: _Span) -> bool:
    pairs = zip(*one, *other, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in pairs)


def read_dcp(folder: Path, choice: Choice) -> Source:
    """A folder of DCP as a source.

    Raises:
        NotFoundError, InvalidRequestError, CorruptDataError: as ``read_items``.
    """
    tree: dict[Any, Any] = {}
    for name, item in read_items(folder).items():
        value = _value(name, item) if item.tensor is None else _tensor(name, item)
        _put(tree, item.path, value, name)
    return find_parts(_listed(tree), choice, path=str(folder), format="dcp")


def _tensor(name: str, item: Item) -> StoredTensor:
    assert item.tensor is not None
    dtype, shape = item.tensor
    pieces = []
    for offsets, (sizes, extent) in item.pieces.items():
        ref = read_structure(extent)
        if not isinstance(ref, TensorRef) or ref.dtype != dtype or ref.shape != sizes:
            raise CorruptDataError("a piece is not what the metadata says", name=name)
        if ref.extent.bytes:
            pieces.append(Piece(offsets or (), ref.tensor()))
    return StoredTensor(shape, dtype, tuple(pieces))


def _value(name: str, item: Item) -> Any:
    ((_, extent),) = item.pieces.values()
    if extent.bytes > restricted.BYTES_MAX:
        raise CorruptDataError("a value is too large", name=name, bytes=extent.bytes)
    try:
        return torch.load(io.BytesIO(read_bytes(extent)), weights_only=True, map_location="cpu")
    except Exception as error:  # what a stranger's bytes make torch raise is anything
        raise CorruptDataError(
            "a value is damaged, or more than a plain value; it was not run", name=name
        ) from error


def _put(tree: dict[Any, Any], path: tuple[str | int, ...], value: Any, name: str) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise InvalidRequestError("two entries have one name", name=name)
    if not path or path[-1] in tree:
        raise InvalidRequestError("two entries have one name", name=name)
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
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
            save(tree, storage_writer=FileSystemWriter(temporary), no_dist=True)
        places: list[tuple[torch.Tensor, TensorRef]] = []
        for item in read_items(temporary).values():
            if item.tensor is not None:
                ((_, extent),) = item.pieces.values()
                places.append((_at(tree, item.path), read_structure(extent)))
        handouts.fill(handout, places, on_table)
        size = sum(path.stat().st_size for path in temporary.iterdir())
    return size


def _at(tree: Any, path: tuple[str | int, ...]) -> torch.Tensor:
    for part in path:
        tree = tree[part]
    assert isinstance(tree, torch.Tensor)
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


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise CorruptDataError("the metadata holds no name where one belongs")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise CorruptDataError("the metadata holds an impossible size", size=repr(value)[:60])
    return value
