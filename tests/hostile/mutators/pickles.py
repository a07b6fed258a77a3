"""Lies in a pickle: its operations and their arguments changed, so that what is left is readable.

``mutate_pickle`` takes a pickle apart with ``pickletools`` and changes one or a few operations: a
number becomes one that no reader expects, a text another, a name another, an operation is left out,
repeated, moved or replaced. Nothing is ever loaded here.
"""

from __future__ import annotations

import pickletools
import random
import struct

NUMBERS = (
    -(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 49, 50, 51, 63, 64, 200, 201, 255, 256, 800,
    2**15, 2**16 - 1, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**45, 2**53, 2**56 - 1,
    2**56, 2**57, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**500, -(2**500),
)  # fmt: skip
TEXTS = (
    "", "a", "0", "1", "step", "model", "optimizer", "e.weight", "top.weight", "params", "state",
    "cpu", "meta", "cuda:0", "storage", "..", "/", "../..", "\\", "\0", "\n", "\x1b[31m", "[/red]",
    "é", "\U0001f600", "\ud800", "a\udfff", "data/0", "x" * 5000, "_orig_mod.e.weight", "#0",
)  # fmt: skip
GLOBALS = (
    "os system", "builtins eval", "builtins getattr", "builtins set", "builtins complex",
    "builtins bytearray", "__builtin__ set", "_codecs encode", "torch Size", "torch FloatStorage",
    "torch DoubleStorage", "torch ByteStorage", "torch BoolStorage", "torch HalfStorage",
    "torch ComplexFloatStorage", "torch QInt8Storage", "torch float32", "torch complex32",
    "torch device", "torch load", "torch Tensor", "torch.storage UntypedStorage",
    "torch.nn.parameter Parameter", "collections OrderedDict", "collections Counter",
    "collections defaultdict", "collections deque", "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state",
    "torch._utils _rebuild_qtensor", "torch._utils _rebuild_sparse_tensor",
    "torch._utils _rebuild_meta_tensor_no_storage", "torch._utils _rebuild_nested_tensor",
    "torch._utils _rebuild_wrapper_subclass", "torch._tensor _rebuild_from_type_v2",
    "torch.serialization _get_layout", "numpy dtype", "numpy ndarray",
    "numpy._core.multiarray scalar", "numpy._core.multiarray _reconstruct", "argparse Namespace",
    "lightning.fabric.utilities.data AttributeDict", "holdfast.errors HoldfastError",
)  # fmt: skip
# Operations without an argument, and a few with one that is always read.
_BARE = [bytes([code]) for code in b"(012N)]}.tabesubcQRoidl"] + [
    bytes([code]) for code in b"\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x98"
]
_ARGUED = [b"K\x00", b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\xff", b"h\x00", b"h\x07", b"q\x00",
           b"q\x07", b"\x8a\x00", b"\x8a\x01\xff", b"\x8c\x01x", b"C\x01x", b"B\x01\x00\x00\x00x",
           b"G\x7f\xf8\x00\x00\x00\x00\x00\x00", b"U\x01x", b"\x82\x01",
           b"\x96\x00\x00\x00\x00\x00\x01\x00\x00", b"\x95\x00\x00\x00\x00\x00\x00\x00\x00",
           b"\x8e\x00\x00\x00\x00\x01\x00\x00\x00", b"\x8b\xff\xff\xff\x7f",
           b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b"I01\n", b"L5L\n", b"S'x'\n",
           b"V\\ud800\n", b"F1.5\n", b"p0\n", b"g0\n", b"P0\n"]  # fmt: skip


def number(value: int) -> bytes:
    """An operation that makes a number."""
    size = (value.bit_length() + 8) // 8
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def text(value: str) -> bytes:
    """An operation that makes a text."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def global_(name: str) -> bytes:
    """An operation that names something."""
    return b"c" + name.replace(" ", "\n", 1).encode() + b"\n"


def split(data: bytes) -> list[tuple[str, bytes]]:
    """A pickle's operations: what each is called, and its bytes."""
    found = [(op.name, at or 0) for op, _, at in pickletools.genops(data)]
    ends = [at for _, at in found[1:]] + [len(data)]
    return [(name, data[at:end]) for (name, at), end in zip(found, ends, strict=True)]


def mutate_pickle(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A pickle with one lie or a few, and what they are."""
    operations = split(data)
    told = []
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(operations))
        lie = rng.choice((_argue, _argue, _argue, _replace, _insert, _drop, _repeat, _swap, _flip))
        told.append(lie(operations, at, rng))
    return b"".join(op for _, op in operations), "pickle: " + "; ".join(told)


def _argue(operations: list[tuple[str, bytes]], at: int, rng: random.Random) -> str:
    """Change an argument to another of its kind."""
    candidates = [i for i, (name, _) in enumerate(operations) if _kind(name)]
    at = rng.choice(candidates) if candidates else at
    name, old = operations[at]
    kind = _kind(name)
    if kind == "number":
        new = number(rng.choice(NUMBERS))
    elif kind == "text":
        new = text(rng.choice(TEXTS))
    elif kind == "global":
        new = global_(rng.choice(GLOBALS))
    elif kind == "get":
        new = bytes([*b"h", rng.randrange(256)])
    else:
        return _flip(operations, at, rng)
    operations[at] = name, new
    return f"{old[:40]!r} -> {new[:40]!r}"


def _kind(name: str) -> str:
    if name.startswith(("BININT", "LONG1", "NEWTRUE", "NEWFALSE", "NONE", "BINFLOAT")):
        return "number"
    if "UNICODE" in name:
        return "text"
    return {"GLOBAL": "global", "BINGET": "get", "LONG_BINGET": "get"}.get(name, "")


def _replace(operations: list[tuple[str, bytes]], at: int, rng: random.Random) -> str:
    new = rng.choice(_BARE + _ARGUED)
    old, operations[at] = operations[at][1], ("", new)
    return f"{old[:20]!r} => {new!r}"


def _insert(operations: list[tuple[str, bytes]], at: int, rng: random.Random) -> str:
    new = rng.choice(_BARE + _ARGUED)
    operations.insert(at, ("", new))
    return f"+{new!r} at {at}"


def _drop(operations: list[tuple[str, bytes]], at: int, rng: random.Random) -> str:
    if len(operations) == 1:
        return "nothing"
    return f"-{operations.pop(at)[1][:20]!r} at {at}"


def _repeat(operations: list[tuple[str, bytes]], at: int, rng: random.Random) -> str:
    end = at + rng.randrange(1, 8)
    operations[end:end] = operations[at:end] * rng.choice((1, 1, 3))
    return f"twice {at}:{end}"


def _swap(operations: list[tuple[str, bytes]], at: int, rng: random.Random) -> str:
    other = rng.randrange(len(operations))
    operations[at], operations[other] = operations[other], operations[at]
    return f"{at} <-> {other}"


def _flip(operations: list[tuple[str, bytes]], at: int, rng: random.Random) -> str:
    name, old = operations[at]
    new = bytearray(old)
    new[rng.randrange(len(new))] = rng.randrange(256)
    operations[at] = name, bytes(new)
    return f"{old[:20]!r} ~ {bytes(new[:20])!r}"
