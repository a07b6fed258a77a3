"""The container ``torch.save`` writes: a zip of stored records, one of them the structure's pickle.

A tensor's numbers are one record, as they lie in memory. Where a record begins in a file is known
without reading it, so a tensor of any size can be mapped: read a part at a time, or filled in
after torch has written the file without numbers (``torch.serialization.skip_data``).

Invariant: what is mapped lies inside the record it belongs to, and the record inside its archive.

Not here: what a structure means (source.py), reading whole files (torchfile.py).
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from holdfast.errors import CorruptDataError, HoldfastError, InvalidRequestError
from holdfast.interchange import restricted

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file."""

    path: Path
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor in an archive: where its numbers begin, and its shape; contiguous."""

    extent: Extent
    dtype: torch.dtype
    shape: tuple[int, ...]

    def map(self, mode: str = "c") -> np.ndarray:
        """Its bytes, flat; by default changes stay in memory."""
        size = math.prod(self.shape) * self.dtype.itemsize
        if size == 0:
            return np.empty(0, np.uint8)
        return np.memmap(
            self.extent.path, np.uint8, mode=cast(Any, mode), offset=self.extent.offset, shape=size
        )

    def tensor(self) -> torch.Tensor:
        """The tensor, mapped: a part of it is read when it is looked at."""
        flat = torch.from_numpy(self.map())
        return flat.view(self.dtype).reshape(self.shape)


class _Window(RawIOBase):
    """Bytes of a file as a file of their own."""

    def __init__(self, extent: Extent) -> None:
        self._file: IO[bytes] = extent.path.open("rb")
        self._extent = extent
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._extent.bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._extent.bytes - self._at)
        size = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._extent.offset + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def read_bytes(extent: Extent) -> bytes:
    """The bytes themselves."""
    with extent.path.open("rb") as file:
        file.seek(extent.offset)
        return file.read(extent.bytes)


def read_structure(archive: Extent) -> Any:
    """What an archive holds, with a ``TensorRef`` for every tensor: no numbers are read.

    Raises:
        CorruptDataError: it is no such archive, or damaged.
        InvalidRequestError: it holds more than plain values and contiguous tensors.
    """
    try:
        with zipfile.ZipFile(cast(Any, _Window(archive))) as members:
            records, pickled = _find_records(members, archive)
    except HoldfastError:
        raise
    except Exception as error:  # what a stranger's zip makes zipfile raise is anything
        raise CorruptDataError(
            "not an archive of torch", path=str(archive.path), at=archive.offset
        ) from error

    def storage(reference: Any) -> tuple[Extent, torch.dtype]:
        match reference:
            case ("storage", torch.dtype() as dtype, str() as key, str(), int()) if key in records:
                return records[key], dtype
        raise CorruptDataError("a tensor refers to no record", path=str(archive.path))

    names = {
        ("collections", "OrderedDict"): dict,
        ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(str(archive.path)),
        **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    }
    return restricted.read_pickle(
        pickled, names, what=f"structure of {archive.path.name}", persistent=storage
    )


class _Rebuild:
    """Stands for the function with which torch's pickles make tensors."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __setstate__(self, state: object) -> None:
        raise CorruptDataError("a pickle tries to change a function", path=self._path)

    def __call__(self, *given: Any) -> TensorRef:
        match given:
            case ((Extent() as extent, torch.dtype() as dtype), int() as at, shape, stride, *_):
                return self._make(extent, dtype, at, _sizes(shape), _sizes(stride))
        raise CorruptDataError("a tensor is described in an unknown way", path=self._path)

    def _make(
        self,
        extent: Extent,
        dtype: torch.dtype,
        at: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> TensorRef:
        dense = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        is_contiguous = len(shape) == len(stride) and all(
            size <= 1 or a == b for size, a, b in zip(shape, stride, dense, strict=True)
        )
        if not is_contiguous and math.prod(shape) > 0:
            raise InvalidRequestError(
                "a tensor is not contiguous", path=self._path, shape=shape, stride=stride,
                todo="save it with .contiguous()",
            )  # fmt: skip
        start, size = at * dtype.itemsize, math.prod(shape) * dtype.itemsize
        if at < 0 or start + size > extent.bytes:
            raise CorruptDataError(
                "a tensor reaches beyond its record", path=self._path, shape=shape,
                bytes=size, record_bytes=extent.bytes,
            )  # fmt: skip
        return TensorRef(Extent(extent.path, extent.offset + start, size), dtype, shape)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise CorruptDataError("a tensor has an impossible shape", shape=repr(value)[:60])
    return value


def _find_records(members: zipfile.ZipFile, archive: Extent) -> tuple[dict[str, Extent], bytes]:
    """Where every tensor's numbers lie in the file, and the structure's pickle."""
    records: dict[str, Extent] = {}
    pickled: bytes | None = None
    for info in members.infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise CorruptDataError("a record is compressed", path=str(archive.path))
        _, _, name = info.filename.partition("/")
        if name == "byteorder" and members.read(info) != b"little":
            raise InvalidRequestError("numbers are not little-endian", path=str(archive.path))
        if name == "data.pkl":
            if pickled is not None or info.file_size > restricted.BYTES_MAX:
                raise CorruptDataError("an archive has an impossible structure",
                                       path=str(archive.path))  # fmt: skip
            pickled = members.read(info)
        elif name.startswith("data/"):
            records[name.removeprefix("data/")] = _find_record(info, archive)
    if pickled is None:
        raise CorruptDataError("an archive without a structure", path=str(archive.path))
    return records, pickled


def _find_record(info: zipfile.ZipInfo, archive: Extent) -> Extent:
    head = read_bytes(Extent(archive.path, archive.offset + info.header_offset, _LOCAL_HEADER.size))
    fields = _LOCAL_HEADER.unpack(head)
    start = info.header_offset + _LOCAL_HEADER.size + fields[-2] + fields[-1]
    if fields[0] != b"PK\x03\x04" or start + info.file_size > archive.bytes:
        raise CorruptDataError("a record reaches beyond its archive", path=str(archive.path))
    return Extent(archive.path, archive.offset + start, info.file_size)
