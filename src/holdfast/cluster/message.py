"""Messages between processes: a kind, a few JSON values, some arrays; and how they become bytes.

A message travels as a header (JSON: kind, meta, type and shape of every array) and a payload (the
arrays' bytes, one after another, each starting at a multiple of 64). Errors travel as messages
too, and are raised again on the other side with their class, facts and advice.

Invariants:
- Received bytes are checked before they are believed: sizes come from what has arrived, nothing
  is allocated because a header says so, nothing is executed. What our own side would never have
  sent raises ``CorruptDataError``.
- Decoded arrays are read-only; they are views on the received buffer where it lies aligned for
  them, and else copies (compiled kernels would treat an unaligned array as another type).

Not here: sockets, deadlines, sequence numbers (wire.py).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast import errors
from holdfast.checkpoint.format import stored_json
from holdfast.errors import CorruptDataError, HoldfastError, InvalidRequestError

ALIGN = 64
MESSAGE_BYTES_MAX = (2 << 30) - (1 << 20)  # protobuf's limit, less room for what wraps a message
HEADER_BYTES_MAX = 64 << 20
HELLO_BYTES_MAX = 1 << 10
DIMENSIONS_MAX = 8
_NAME_MAX = 64
_TEXT_MAX, _ENTRIES_MAX, _DEPTH_MAX = 10_000, 10_000, 4  # of a fact of an error that travels
_KIND = re.compile(rb'\s*\[\s*"([ -!#-\[\]-~]{0,40})"')
_DTYPES = {
    np.dtype(name).str: np.dtype(name)
    for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
}
_ERRORS: dict[str, type[HoldfastError]] = {
    cls.__name__: cls
    for cls in (
        errors.HoldfastError,
        errors.InvalidRequestError,
        errors.NotFoundError,
        errors.ConflictError,
        errors.UnavailableError,
        errors.CorruptDataError,
        errors.DataLossError,
    )
}
ERROR = "error"

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What one process tells another.

    >>> Message("pull", {"table": "users"}, (np.arange(3),)).arrays[0].sum()
    np.int64(3)
    """

    kind: str
    meta: Mapping[str, Any] = field(default_factory=dict)  # JSON values
    arrays: tuple[Array, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who opened a stream; ``epoch`` None is a control stream, which no epoch makes stale."""

    name: str
    epoch: int | None


def encode_hello(caller: Caller) -> bytes:
    """What a stream says first."""
    return json.dumps({"name": caller.name, "epoch": caller.epoch}).encode()


def decode_hello(hello: bytes) -> Caller:
    """Who said this.

    >>> decode_hello(encode_hello(Caller("worker-0", 3)))
    Caller(name='worker-0', epoch=3)
    """
    try:
        if len(hello) > HELLO_BYTES_MAX:
            raise ValueError("too long")
        found = stored_json.parse(hello)
        epoch = found["epoch"]
        name = stored_json.text(found["name"])
        if len(name) > _NAME_MAX or not name.isascii():
            raise ValueError("not a name")
        return Caller(name, None if epoch is None else stored_json.count(epoch))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise CorruptDataError("unreadable hello of a stream") from error


def encode(message: Message) -> tuple[bytes, Array]:
    """The header and the payload (uint8) of a message; a single array is not copied.

    Raises:
        InvalidRequestError: too large, meta that is not JSON, an array that does not travel.
    """
    arrays = [_contiguous(array) for array in message.arrays]
    described = [[array.dtype.str, list(array.shape)] for array in arrays]
    try:
        header = json.dumps([message.kind, message.meta, described], allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            "a message's meta must be JSON", kind=message.kind, found=str(error)
        ) from error
    payload_bytes = _payload_bytes([array.nbytes for array in arrays])
    if len(header) > HEADER_BYTES_MAX or len(header) + payload_bytes > MESSAGE_BYTES_MAX:
        raise InvalidRequestError(
            "a message is too large",
            kind=message.kind,
            header_bytes=len(header),
            payload_bytes=payload_bytes,
            bytes_max=MESSAGE_BYTES_MAX,
            todo="send it in parts, and numbers as arrays",
        )
    if len(arrays) == 1:
        return header, arrays[0].reshape(-1).view(np.uint8)
    payload = np.empty(payload_bytes, np.uint8)
    at = 0
    for array in arrays:
        payload[at : at + array.nbytes] = array.reshape(-1).view(np.uint8)
        payload[at + array.nbytes : _aligned(at + array.nbytes)] = 0
        at = _aligned(at + array.nbytes)
    return header, payload


def kind_of(header: bytes) -> str | None:
    """The kind of a message, without the rest of its header; None: no header of ours begins so.

    >>> kind_of(b'["pull", {}, []]')
    'pull'
    """
    found = _KIND.match(header)
    return None if found is None else found[1].decode()


def decode(header: bytes, payload: Array) -> Message:
    """The message that was encoded so.

    >>> header, payload = encode(Message("pull", {"step": 7}, (np.ones((2, 3)),)))
    >>> decode(header, payload).arrays[0].shape
    (2, 3)

    Raises:
        CorruptDataError: no message of ours is encoded so.
    """
    if len(header) > HEADER_BYTES_MAX:
        raise CorruptDataError("the header of a message is too long", bytes=len(header))
    try:
        kind, meta, described = stored_json.parse(header)
        stored_json.text(kind)
        if type(meta) is not dict or type(described) is not list:
            raise ValueError("not a header")
        shapes = [_described(entry) for entry in described]
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptDataError("unreadable header of a message", found=str(error)) from error
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape in shapes]
    if _payload_bytes(sizes) != payload.nbytes:
        raise CorruptDataError(
            "a message's arrays do not have the size its header says",
            expected=_payload_bytes(sizes),
            found=payload.nbytes,
        )
    arrays, at = [], 0
    for (dtype, shape), size in zip(shapes, sizes, strict=True):
        try:
            arrays.append(_view(payload[at : at + size], dtype).reshape(shape))
        except ValueError as error:  # no bytes, and other lengths beyond what NumPy can count
            raise CorruptDataError("an array's shape is absurd", shape=shape) from error
        at = _aligned(at + size)
    return Message(kind, meta, tuple(arrays))


def error_message(error: BaseException) -> Message:
    """An error as a message; one that is not Holdfast's own becomes a ``HoldfastError`` naming it.

    >>> raised = as_error(error_message(errors.NotFoundError("no such table", table="users")))
    >>> type(raised).__name__, str(raised)
    ('NotFoundError', "no such table. table='users'")
    """
    if not isinstance(error, HoldfastError):
        error = HoldfastError(
            "the other process failed", error=type(error).__name__, said=str(error)
        )
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS)
    shown = " ".join(f"{key}={value!r}" for key, value in error.facts.items())
    text = str(error)[:_TEXT_MAX]
    if error.todo:
        text = text.removesuffix(f"; {error.todo}")
    if shown:
        text = text.removesuffix(f". {shown}")
    facts = {key: _plain(value) for key, value in error.facts.items()}
    return Message(ERROR, {"class": name, "message": text, "facts": facts, "todo": error.todo})


def as_error(message: Message) -> HoldfastError:
    """The error that ``error_message`` made a message of."""
    try:
        cls = _ERRORS[stored_json.text(message.meta["class"])]
        text = stored_json.text(message.meta["message"])
        todo = stored_json.text(message.meta["todo"])
        return cls(text, todo=todo, **message.meta["facts"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        return CorruptDataError("unreadable error of another process", found=str(error)[:200])


def _contiguous(array: Array) -> Array:
    if array.dtype.str not in _DTYPES:
        raise InvalidRequestError(
            "arrays of this type do not travel", dtype=array.dtype.str, allowed=sorted(_DTYPES)
        )
    if array.ndim > DIMENSIONS_MAX:
        raise InvalidRequestError("an array of too many dimensions", dimensions=array.ndim)
    return np.ascontiguousarray(array).reshape(array.shape)


def _described(entry: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    name, shape = entry
    if type(name) is not str or name not in _DTYPES:
        raise ValueError(f"not an array's type: {name!r:.40}")
    if type(shape) is not list or len(shape) > DIMENSIONS_MAX:
        raise ValueError("not an array's shape")
    return _DTYPES[name], tuple(stored_json.count(length) for length in shape)


def _view(bytes_N: Array, dtype: np.dtype[Any]) -> Array:
    array = bytes_N.view(dtype)
    if not array.flags.aligned:
        array = array.copy()
    array.flags.writeable = False
    return array


def _aligned(at: int) -> int:
    return -(-at // ALIGN) * ALIGN


def _payload_bytes(sizes: Sequence[int]) -> int:
    """A single array is sent as it is; several are padded."""
    return sizes[0] if len(sizes) == 1 else sum(map(_aligned, sizes))


def _plain(value: Any, depth: int = 0) -> Any:
    """A fact as JSON: as it is where it can be, else as text; what is very long is cut short."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple | set | frozenset) and depth < _DEPTH_MAX:
        return [_plain(each, depth + 1) for each in itertools.islice(value, _ENTRIES_MAX)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and value.bit_length() < 64:
        return value
    try:
        return (value if isinstance(value, str) else repr(value))[:_TEXT_MAX]
    except (ValueError, RecursionError):  # a number or a nest beyond what can be shown
        return f"<{type(value).__name__}>"
