"""Messages as real clusters send them (messages.json), changed at random, part by part."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.cluster.message import Message, decode, encode
from holdfast.errors import InvalidRequestError

FILE = Path(__file__).parent / "messages.json"
NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2, 3, 5, 255, 256, 1 << 15, 1 << 16, 1 << 31, 1 << 32, 1 << 48, 1 << 56, 1 << 62,
    (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 1 << 80, 0.5, -0.0, 1e308, True, False,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, "", "0", "x", "-1", "1.0.sweep.0", "é\ud83d\ude00", "a" * 5000, [], {}, [[]], [None],
    [0] * 300, {"a": {"b": {}}}, "../../etc/passwd", "127.0.0.1:1", [1, [2]], {"spec": 1},
)  # fmt: skip
DTYPES = ("i1", "i2", "i4", "i8", "u1", "u4", "u8", "f2", "f4", "f8")


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A message of a real run: to whom, and from whom."""

    to: str
    caller: str
    has_epoch: bool
    message: Message


def load(folder: Path) -> list[Recorded]:
    """All of them; checkpoints lie in a folder."""
    found = []
    for entry in json.loads(FILE.read_text().replace('"FOLDER"', json.dumps(str(folder)))):
        payload = zlib.decompress(base64.b64decode(entry["payload"]))
        header = json.dumps(entry["header"]).encode()
        message = decode(header, np.frombuffer(payload, np.uint8))
        found.append(Recorded(entry["to"], entry["caller"], entry["has_epoch"], message))
    return found


class Fuzzer:
    """Changes messages; all it does follows from its generator."""

    def __init__(self, rng: random.Random, recorded: list[Recorded]) -> None:
        self.rng, self._recorded = rng, recorded
        self._kinds = sorted({each.message.kind for each in recorded})
        self._metas = [each.message.meta for each in recorded]

    def change(self, message: Message) -> Message:
        """One to four changes of any part of a message."""
        for _ in range(self.rng.choice((1, 1, 1, 2, 4))):
            message = self.rng.choices(
                (self._change_meta, self._change_arrays, self._change_kind), (6, 4, 1)
            )[0](message)
        return message

    def encode(self, message: Message) -> tuple[bytes, np.ndarray]:
        """A message as bytes; now and then they are changed too."""
        header, payload = encode(message)
        if self.rng.random() < 0.9:
            return header, payload
        data = bytearray(header)
        match self.rng.randrange(7):
            case 0:
                at = self.rng.randrange(len(data))
                data[at : at + self.rng.randint(0, 9)] = self.rng.randbytes(self.rng.randint(0, 9))
            case 1:
                data = data[: self.rng.randrange(len(data))]
            case 2:
                payload = payload[: self.rng.randint(0, len(payload))]
            case 3:
                payload = np.concatenate([payload, np.zeros(self.rng.randint(1, 99), np.uint8)])
            case 4:
                data = bytearray(b"[" * self.rng.choice((10, 1000, 100_000)))
            case 5:
                data = bytearray(b'["stats", {"a": ' + b"[" * 90_000 + b"]" * 90_000 + b"}, []]")
            case 6:
                data = bytearray(self.rng.randbytes(self.rng.randint(0, 200)))
        return bytes(data), payload

    # Parts of a message.

    def _change_kind(self, message: Message) -> Message:
        kind = self.rng.choice((*self._kinds, *self._kinds, "", "explode", "x" * 60, "welcome"))
        return dataclasses.replace(message, kind=kind)

    def _change_meta(self, message: Message) -> Message:
        meta = json.loads(json.dumps(message.meta))
        places = _places(meta)
        if not places or self.rng.random() < 0.1:  # a part of another one's
            other = self.rng.choice(self._metas)
            for key in list(other)[: self.rng.randint(1, 3)]:
                meta[key] = other[key]
            return dataclasses.replace(message, meta=meta)
        holder, key = self.rng.choice(places)
        self._change_value(holder, key)
        return dataclasses.replace(message, meta=meta)

    def _change_value(self, holder: Any, key: Any) -> None:
        value = holder[key]
        what = self.rng.randrange(8)
        if what == 0:
            del holder[key]
        elif what == 1 and type(value) is int:
            holder[key] = value + self.rng.choice((-1, 1))
        elif what == 2 and type(value) is list:
            holder[key] = value * self.rng.choice((0, 2, 300))
        elif what == 3 and type(value) is list and value:
            holder[key] = value[::-1] if len(value) > 1 else value[0]
        elif what == 4:
            holder[key] = [value] if self.rng.random() < 0.5 else {"x": value}
        elif what == 5:
            holder[key] = self.rng.choice(OTHERS)
        elif what == 6:
            other = self.rng.choice(self._metas)
            if other:
                holder[key] = other[self.rng.choice(list(other))]
        else:
            holder[key] = self.rng.choice(NUMBERS)

    def _change_arrays(self, message: Message) -> Message:
        arrays = list(message.arrays)
        if not arrays or self.rng.random() < 0.1:
            size = self.rng.choice((0, 1, 7, 1000))
            new = np.zeros(size, self.rng.choice(DTYPES))
            arrays.insert(self.rng.randint(0, len(arrays)), new)
            return dataclasses.replace(message, arrays=tuple(arrays))
        at = self.rng.randrange(len(arrays))
        change: Callable[[np.ndarray], np.ndarray] = self.rng.choice(
            (self._retyped, self._reshaped, self._resized, self._filled, self._flipped)
        )
        match self.rng.randrange(8):
            case 0:
                del arrays[at]
            case 1:
                arrays.append(arrays[at])
            case 2:
                self.rng.shuffle(arrays)
            case _:
                arrays[at] = change(arrays[at])
        return dataclasses.replace(message, arrays=tuple(arrays))

    def _retyped(self, array: np.ndarray) -> np.ndarray:
        dtype = self.rng.choice(DTYPES)
        if self.rng.random() < 0.5 and array.nbytes % np.dtype(dtype).itemsize == 0:
            return np.frombuffer(array.tobytes(), dtype)
        with np.errstate(all="ignore"):
            return array.astype(dtype)

    def _reshaped(self, array: np.ndarray) -> np.ndarray:
        shapes = [(-1,), (-1, 1), (1, -1), (1, 1, -1), (array.size, 1, 1)]
        if array.size == 0:
            return np.zeros((0, self.rng.choice((1, 1 << 20, 1 << 40))), array.dtype)
        if array.size == 1:
            shapes.append(())
        return array.reshape(self.rng.choice(shapes))

    def _resized(self, array: np.ndarray) -> np.ndarray:
        flat = array.reshape(-1)
        size = self.rng.choice((0, 1, max(0, flat.size - 1), flat.size + 1, 2 * flat.size, 20_000))
        return np.resize(flat, size) if flat.size else np.zeros(size, array.dtype)

    def _filled(self, array: np.ndarray) -> np.ndarray:
        values: tuple[Any, ...] = (0, 1, 100)
        if array.dtype.kind == "f":
            values = (np.nan, np.inf, -np.inf, 1e30, -0.0)
        elif array.dtype.kind in "iu":
            limits = np.iinfo(array.dtype)
            values = (limits.min, limits.max, 0, 1, 100)
        with np.errstate(all="ignore"):
            return np.full(array.shape, self.rng.choice(values), array.dtype)

    def _flipped(self, array: np.ndarray) -> np.ndarray:
        data = bytearray(array.tobytes())
        for _ in range(self.rng.randint(1, 4) if data else 0):
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        return np.frombuffer(bytes(data), array.dtype).reshape(array.shape)


def travels(message: Message) -> bool:
    """Whether a message can be encoded at all."""
    try:
        encode(message)
    except (InvalidRequestError, UnicodeError):
        return False
    return True


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Everything inside a value: what holds it, and where."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found: list[tuple[Any, Any]] = []
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += _places(value[key])
    return found
