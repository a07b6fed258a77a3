"""What a pickle of ``torch.save`` may name, and what is made of it instead.

    containers            plain dicts, lists, sets
    tensors, parameters   ``StoredTensor``: where their numbers lie (tensors.py)
    numpy                 ``PickledArray``; single numbers as they are
    other known things    ``Opaque`` or a record: they may be in a file, and cannot be imported

Invariant: a stand-in makes plain values of its arguments and keeps no reference to anything that
could be called.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from holdfast.boundary.budget import Account
from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.interchange.archive.files import Extent
from holdfast.interchange.archive.pickles import (
    Maker,
    Names,
    Record,
    has_own_hash,
    is_plain_key,
    record,
)
from holdfast.interchange.archive.tensors import (
    DIMENSIONS_MAX,
    StoredTensor,
    stored,
    view_record,
)

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8", "QInt32Storage": "qint32", "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
}  # fmt: skip
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex128", "complex64", "complex32", "uint16", "uint32", "uint64", "qint8", "qint32",
    "quint8", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
    "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)  # fmt: skip
_QSCHEMES = (
    "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)  # fmt: skip
_OPAQUE_TENSORS = {
    "_rebuild_qtensor": "quantized tensor", "_rebuild_sparse_tensor": "sparse tensor",
    "_rebuild_meta_tensor_no_storage": "meta tensor", "_rebuild_nested_tensor": "nested tensor",
    "_rebuild_wrapper_subclass": "tensor of a class of its own",
    "_rebuild_device_tensor_from_numpy": "tensor of another device",
}  # fmt: skip
_NUMPY_NUMBERS = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)} | {
    "b1", "f2", "f4", "f8"
}  # fmt: skip
# Values that training loops put into checkpoints; none is ever part of a model.
_RECORDS = (
    ("argparse", "Namespace"), ("types", "SimpleNamespace"), ("datetime", "datetime"),
    ("datetime", "date"), ("datetime", "timedelta"), ("datetime", "timezone"),
    *((m, n) for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "WindowsPath",
      "PurePosixPath", "PureWindowsPath")),
)  # fmt: skip
_ATTRIBUTE_DICTS = tuple(
    (f"{package}.{module}", "AttributeDict")
    for package, module in (
        ("lightning", "fabric.utilities.data"), ("lightning_fabric", "utilities.data"),
        ("lightning", "pytorch.utilities.parsing"), ("pytorch_lightning", "utilities.parsing"),
    )
)  # fmt: skip
_ODD_KEYS_MAX = 1000
_TENSOR_BYTES = 700
_ITEM_BYTES = 120  # of memory that a copied item of a container takes at most


@dataclass(frozen=True, slots=True)
class Opaque:
    """Something that a file may hold and that cannot be imported."""

    kind: str


@dataclass(frozen=True, slots=True)
class StoredNumbers:
    """A record of numbers, as pickles refer to it."""

    record: Extent
    dtype: torch.dtype | None
    """None: only whoever views it knows."""


class PickledDtype(Record):
    """A number type of numpy."""

    __slots__ = ()

    def dtype(self) -> np.dtype[Any]:
        """The type, if it is a plain one.

        Raises:
            InvalidRequestError: it is another.
        """
        code = self.given[0] if self.given else None
        order = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "<"
        if not isinstance(code, str) or code not in _NUMPY_NUMBERS or order not in ("<", "|"):
            raise InvalidRequestError(
                "a numpy array of a type that is not imported", type=str(code)[:20],
                order=str(order)[:20], todo="save it as a tensor",
            )  # fmt: skip
        return np.dtype(f"<{code}")


class PickledArray(Record):
    """An array of numpy."""

    __slots__ = ()

    def array(self) -> np.ndarray:
        """The array; it shares the memory of the pickle's bytes.

        Raises:
            CorruptDataError: it is described in an unknown way.
            InvalidRequestError: its type is not imported.
        """
        match self.state:
            case (int(), tuple() as shape, PickledDtype() as described, bool() as is_fortran,
                  bytes() as data):  # fmt: skip
                return _array(data, described.dtype(), shape, "F" if is_fortran else "C")
        raise CorruptDataError("a numpy array is described in an unknown way")


def _array(data: bytes, dtype: np.dtype[Any], shape: tuple[Any, ...], order: Any) -> np.ndarray:
    is_shape = len(shape) <= 32 and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or math.prod(shape) * dtype.itemsize != len(data):
        raise CorruptDataError("a numpy array is described in an unknown way")
    return np.frombuffer(data, dtype).reshape(shape, order=order)


@functools.cache
def torch_names() -> Names:
    """All that a pickle of ``torch.save`` may name."""
    names: dict[tuple[str, str], Any] = {
        ("torch", "Size"): Maker("torch.Size", _size),
        ("torch", "device"): _opaque("device"),
        ("torch", "Tensor"): Opaque("class"),
        ("torch.nn.parameter", "Parameter"): Maker("Parameter", _parameter),
        ("torch.nn.parameter", "Buffer"): Maker("Buffer", _parameter),
        ("torch.serialization", "_get_layout"): _opaque("layout"),
        ("torch", "UntypedStorage"): StorageKind(None),
        ("torch.storage", "UntypedStorage"): StorageKind(None),
        ("_codecs", "encode"): Maker("encode", _encode),
        ("numpy", "dtype"): Maker("dtype", lambda account, *given: PickledDtype("dtype", *given)),
        ("numpy", "ndarray"): Opaque("class"),
        ("torch._tensor", "_rebuild_from_type_v2"): Maker("tensor", _typed, _TENSOR_BYTES),
    }
    for name, dtype in _STORAGES.items():
        names["torch", name] = StorageKind(getattr(torch, dtype))
    for name in _DTYPES:
        if hasattr(torch, name):
            names["torch", name] = getattr(torch, name)
    names |= {("torch", name): Opaque("quantization scheme") for name in _QSCHEMES}
    rebuilds: dict[str, Callable[..., Any]] = {
        "_rebuild_tensor": _tensor, "_rebuild_tensor_v2": _tensor, "_rebuild_tensor_v3": _tensor_v3,
        "_rebuild_parameter": _parameter, "_rebuild_parameter_with_state": _parameter,
        "_rebuild_device_tensor_from_cpu_tensor": _moved,
    }  # fmt: skip
    for name, make in rebuilds.items():
        names["torch._utils", name] = Maker("tensor", make, _TENSOR_BYTES)
    names |= {("torch._utils", name): _opaque(kind) for name, kind in _OPAQUE_TENSORS.items()}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names[module, "scalar"] = Maker("numpy scalar", _scalar)
        names[module, "_reconstruct"] = Maker("numpy array", _reconstruct)
    for module in ("numpy.core.numeric", "numpy._core.numeric"):
        names[module, "_frombuffer"] = Maker("numpy array", _from_buffer)
    for builtins in ("builtins", "__builtin__"):
        names |= {
            (builtins, "set"): Maker("set", _set), (builtins, "frozenset"): Maker("set", _set),
            (builtins, "complex"): Maker("complex", _complex),
            (builtins, "bytearray"): Maker("bytearray", _bytes),
            (builtins, "bytes"): Maker("bytes", _bytes), (builtins, "list"): Maker("list", _list),
            (builtins, "dict"): Maker("dict", _dict),
            (builtins, "slice"): _opaque("slice"), (builtins, "range"): _opaque("range"),
            (builtins, "xrange"): _opaque("range"), (builtins, "unicode"): Opaque("class"),
            (builtins, "long"): Opaque("class"),
            (builtins, "int"): Opaque("class"), (builtins, "float"): Opaque("class"),
            (builtins, "str"): Opaque("class"), (builtins, "bool"): Opaque("class"),
        }  # fmt: skip
    for name in ("OrderedDict", "Counter"):
        names["collections", name] = Maker(name, _dict)
    names["collections", "defaultdict"] = Maker("defaultdict", lambda account, *given: {})
    names["collections", "deque"] = Maker("deque", _deque)
    names |= {name: Maker("AttributeDict", _dict) for name in _ATTRIBUTE_DICTS}
    names |= {name: record(name[1]) for name in _RECORDS}
    return MappingProxyType(names)


@dataclass(frozen=True, slots=True)
class StorageKind:
    """Stands for a class of torch's storages: which numbers a record holds; None: just bytes."""

    dtype: torch.dtype | None


def _opaque(kind: str) -> Maker:
    return Maker(kind, lambda account, *given: Opaque(kind))


# Tensors.


def _size(account: Account, sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, tuple | list):
        raise TypeError
    if len(sizes) > DIMENSIONS_MAX:
        raise ValueError
    return tuple(sizes)


def _tensor(
    account: Account, numbers: Any, at: Any, shape: Any, stride: Any, *rest: Any
) -> StoredTensor | Opaque:
    """``_rebuild_tensor`` and ``_v2``, which is given ``requires_grad``, hooks and metadata too."""
    if not isinstance(numbers, StoredNumbers) or numbers.dtype is None:
        raise TypeError
    return _view(numbers.record, numbers.dtype, at, shape, stride, rest[2:])


def _tensor_v3(
    account: Account, numbers: Any, at: Any, shape: Any, stride: Any, grad: Any, hooks: Any,
    dtype: Any, *rest: Any,
) -> StoredTensor | Opaque:  # fmt: skip
    if not isinstance(numbers, StoredNumbers) or not isinstance(dtype, torch.dtype):
        raise TypeError
    return _view(numbers.record, dtype, at, shape, stride, rest)


def _view(
    extent: Extent, dtype: torch.dtype, at: Any, shape: Any, stride: Any, metadata: tuple[Any, ...]
) -> StoredTensor | Opaque:
    if not isinstance(shape, tuple) or not isinstance(stride, tuple) or type(at) is not int:
        raise TypeError
    lazy = metadata[0] if metadata and metadata[0] is not None else {}
    if not isinstance(lazy, dict):
        raise TypeError
    bits = {key for key, is_set in lazy.items() if is_set is not False}
    if bits - {"neg"} or (bits and not dtype.is_floating_point):
        return Opaque("lazy view")
    return stored(view_record(extent, dtype, at, shape, stride, is_negated=bool(bits)))


def _parameter(account: Account, data: Any = None, *rest: Any) -> StoredTensor | Opaque:
    if not isinstance(data, StoredTensor | Opaque):
        raise TypeError
    return data


def _moved(account: Account, data: Any, dtype: Any, *rest: Any) -> StoredTensor | Opaque:
    """A tensor of a device without storages, as it was copied to the host."""
    if not isinstance(data, StoredTensor) or data.dtype != dtype:
        return Opaque("tensor of another device")
    return data


def _typed(account: Account, rebuild: Any, kind: Any, given: Any, state: Any) -> Any:
    """A tensor of a class of its own, or one with attributes: it is a tensor nevertheless."""
    if type(rebuild) is not Maker or rebuild.make is _typed or not isinstance(given, tuple):
        raise TypeError
    return _parameter(account, rebuild.make(account, *given))


# numpy.


def _scalar(account: Account, described: Any, data: Any = None) -> Any:
    if not isinstance(described, PickledDtype) or not isinstance(data, bytes):
        raise TypeError
    try:
        dtype = described.dtype()
    except InvalidRequestError:
        return Opaque("numpy scalar")
    return _array(data, dtype, (), "C")[()]


def _reconstruct(account: Account, *given: Any) -> PickledArray:
    return PickledArray("ndarray")


def _from_buffer(account: Account, data: Any, described: Any, shape: Any, order: Any) -> Any:
    made = PickledArray("ndarray")
    made.set_state((1, shape, described, order == "F", data))
    return made


# Containers and plain values.


def _dict(account: Account, items: Any = ()) -> dict[Any, Any]:
    """Of nothing, of a dict, or of pairs."""
    if not isinstance(items, dict | list | tuple):
        raise TypeError
    account.take_memory(_ITEM_BYTES * len(items), claim="a dict")
    pairs = items.items() if isinstance(items, dict) else items
    made = [(key, value) for key, value in pairs]
    _check_keys([key for key, _ in made])
    return dict(made)


def _list(account: Account, items: Any = ()) -> list[Any]:
    if not isinstance(items, list | tuple):
        raise TypeError
    account.take_memory(_ITEM_BYTES * len(items), claim="a list")
    return list(items)


def _deque(account: Account, items: Any = (), *rest: Any) -> list[Any]:
    return _list(account, items)


def _set(account: Account, items: Any = ()) -> set[Any]:
    if not isinstance(items, list | tuple):
        raise TypeError
    account.take_memory(_ITEM_BYTES * len(items), claim="a set")
    _check_keys(items)
    return set(items)


def _check_keys(keys: Sequence[Any]) -> None:
    is_quick = len(keys) <= _ODD_KEYS_MAX or all(has_own_hash(key) for key in keys)
    if not is_quick or not all(is_plain_key(key) for key in keys):
        raise TypeError


def _complex(account: Account, real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError
    return complex(real, imaginary)


def _encode(account: Account, text: Any, encoding: Any) -> bytes:
    """Bytes, as pickles of protocol 2 have them."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError
    account.take_memory(len(text), claim="bytes")
    return text.encode("latin1")


def _bytes(account: Account, data: Any = b"", *encoding: Any) -> bytes:
    if isinstance(data, str) and encoding:
        return _encode(account, data, encoding[0])
    if not isinstance(data, bytes):
        raise TypeError
    return data
