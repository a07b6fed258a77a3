"""Lies in dense state: a safetensors file whose metadata holds a structure as JSON."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.hostile.mutators.hostile_values import ODD, change_any, number, text, value
from tests.hostile.mutators.registry import PARTS, mutator
from tests.hostile.mutators.stored_run import Part, StoredRun

STRUCTURE = "holdfast.tree"
DTYPES = ("F32", "F64", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64", "BOOL",
          "F8_E4M3", "C64", "F4", "")  # fmt: skip


@dataclass(slots=True)
class Dense:
    """A dense segment: the structure, what the header says of tensors, and their bytes."""

    tree: Any  # bytes: JSON as it is to be written
    header: dict[str, Any]
    data: bytes
    metadata: dict[str, Any]

    def write(self) -> bytes:
        """The safetensors file."""
        metadata = {**self.metadata}
        if isinstance(self.tree, bytes):
            metadata[STRUCTURE] = self.tree.decode()
        elif self.tree is not _LEFT_OUT:
            metadata[STRUCTURE] = json.dumps(self.tree, separators=(",", ":"))
        head = json.dumps({"__metadata__": metadata, **self.header}).encode()
        head += b" " * (-len(head) % 8)
        return struct.pack("<Q", len(head)) + head + self.data

    def without_unused(self) -> Dense:
        """Without tensors that the structure does not name."""
        named = json.dumps(self.tree)
        kept: dict[str, Any] = {}
        data = b""
        for name, one in self.header.items():
            if f'"{name}"' in named:
                start, stop = one["data_offsets"]
                kept[name] = {**one, "data_offsets": [len(data), len(data) + stop - start]}
                data += self.data[start:stop]
        return Dense(self.tree, kept, data, self.metadata)


_LEFT_OUT = object()


def read_dense(data: bytes) -> Dense:
    """A dense segment, apart."""
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    return Dense(json.loads(metadata.pop(STRUCTURE)), header, data[8 + size :], metadata)


Node = tuple[Any, Any, str]  # a container, the key in it, the path


def nodes(tree: Any) -> Iterator[Node]:
    """Every node of a structure, containers and leaves, with the container it is in."""
    waiting: list[tuple[Any, Any, str]] = [([tree], 0, "")]
    while waiting:
        within, key, path = waiting.pop()
        node = within[key]
        yield within, key, path
        if not isinstance(node, dict) or len(node) != 1:
            continue
        ((tag, value_),) = node.items()
        if not isinstance(value_, list):
            continue
        if tag == "d":
            pairs = [pair for pair in value_ if isinstance(pair, list) and len(pair) == 2]
            waiting += [(pair, 1, f"{path}.{str(pair[0])[:30]}") for pair in pairs]
        elif tag in ("l", "t"):
            waiting += [(value_, i, f"{path}[{i}]") for i in range(len(value_))]


def find(tree: Any, *keys: str) -> Any:
    """The node under some keys of nested dicts; None: there is none."""
    for key in keys:
        pairs = tree.get("d", []) if isinstance(tree, dict) else []
        tree = next((pair[1] for pair in pairs if pair[0] == key), None)
    return tree


def _choose(run: StoredRun, rng: random.Random) -> tuple[Part, Dense] | None:
    found = run.parts("dense")
    if not found:
        return None
    # The last steps are what is resumed and exported.
    part = found[-1][1] if rng.random() < 0.6 else rng.choice(found)[1]
    try:
        return part, read_dense(part.data)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return None  # another mutation was here


def _other(rng: random.Random, dense: Dense, old: Any) -> Any:
    """A node in the place of another."""
    names = list(dense.header)
    tensor = rng.choice(names) if names else "0"
    shape = [number(rng, 3) for _ in range(rng.randrange(4))]
    return rng.choice(
        (
            {"x": tensor}, {"n": tensor}, {"s": [tensor]}, {"x": "nothing"}, {"x": 0},
            {"s": tensor}, {"b": "aGVsbG8="}, {"b": "?"}, {"f": "nan"}, {"f": "1e999"}, {"d": []},
            {"l": []}, {"t": []}, {"d": [["a", 1], ["a", 2]]}, {"d": [[1, 2]]},
            {"d": [[{"l": []}, 2]]}, {"d": [[{"t": [1, 2]}, {"x": tensor}]]}, {"d": [[None, 1]]},
            {"d": [["a"]]},
            {"l": [copy.deepcopy(old)]}, {"t": [copy.deepcopy(old), copy.deepcopy(old)]},
            {"d": [["0", copy.deepcopy(old)]]}, {"sparse": [tensor, tensor, shape, True]},
            {"sparse": [tensor, tensor, [1 << 40], False]}, {"sparse": []}, {"z": 1}, {},
            {"d": [], "l": []}, None, True, 0, -1, 1.5, 1 << 70, "", text(rng), [], [1],
            number(rng, 0), value(rng, 0), copy.deepcopy(rng.choice(ODD)),
        )
    )  # fmt: skip


@mutator(PARTS, 6)
def a_node_of_dense_state(run: StoredRun, rng: random.Random) -> str | None:
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    part, dense = chosen
    root = [dense.tree]
    found = [node for node in nodes(dense.tree) if node[2]]
    # Of the hundreds of numbers of a random generator now and then one is enough.
    if rng.random() < 0.95:
        found = [node for node in found if not node[2].startswith(".rng.")]
    if not found:
        return None
    within, key, path = rng.choice(found)
    old = within[key]
    within[key] = _other(rng, dense, old)
    dense.tree = root[0]
    part.data = dense.write()
    return f"{path} is {str(within[key])[:60]!a}"


@mutator(PARTS, 4)
def a_dict_of_dense_state(run: StoredRun, rng: random.Random) -> str | None:
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    part, dense = chosen
    found = [
        (within[key]["d"], path)
        for within, key, path in nodes(dense.tree)
        if isinstance(within[key], dict) and isinstance(within[key].get("d"), list)
    ]
    found = [(pairs, path) for pairs, path in found if pairs]
    if not found:
        return None
    pairs, path = rng.choice(found)
    pair = rng.choice(pairs)
    match rng.randrange(6):
        case 0:
            pairs.remove(pair)
            told = f"{pair[0]!a:.30} gone"
        case 1:
            old = pair[0]
            pair[0] = rng.choice((text(rng), 0, 1, None, True, 1.5, {"t": []}, {"l": []}, "weight"))
            told = f"{old!a:.30} is called {pair[0]!a:.30}"
        case 2:
            pairs.append([pair[0], _other(rng, dense, pair[1])])
            told = f"{pair[0]!a:.30} twice"
        case 3:
            pairs.append([rng.choice((text(rng), 7, "users.weight", "step")),
                          _other(rng, dense, pair[1])])  # fmt: skip
            told = f"one more, {pairs[-1]!a:.40}"
        case 4:
            other = rng.choice(pairs)
            pair[1], other[1] = other[1], pair[1]
            told = f"{pair[0]!a:.30} and {other[0]!a:.30} exchanged"
        case _:
            other = rng.choice(pairs)
            pair[1] = copy.deepcopy(other[1])
            told = f"{pair[0]!a:.30} as {other[0]!a:.30}"
    part.data = dense.write()
    return f"{path} {told}"


@mutator(PARTS, 4)
def what_readers_ask_dense_state_for(run: StoredRun, rng: random.Random) -> str | None:
    """The parts that restores and exports go by: shapes, names of parameters, groups, aliases."""
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    part, dense = chosen
    if not isinstance(dense.tree, dict):
        return None
    tables = [str(name) for name in run.body["tables"]] or ["x"]
    table = rng.choice(tables)
    name = rng.choice(("row_state_shapes", "parameters", "optimizers", "aliases", "table_state",
                       "model", "extras", "rng", "pls"))  # fmt: skip
    made: Any
    match name:
        case "row_state_shapes":
            shape = [number(rng, 30) for _ in range(rng.randrange(4))]
            made = {"d": [[table, {"d": [[rng.choice(("sum", "exp_avg")), {"l": shape}]]}]]}
        case "parameters":
            names = [*tables, "top.weight", "#0", 3, None]
            made = {"d": [["0", {"l": [{"l": rng.choices(names, k=rng.randrange(4))}]}]]}
        case "aliases":
            pairs = [[rng.choice((*tables, "alias", text(rng))), rng.choice((*tables, "x", 0))]
                     for _ in range(rng.randrange(1, 3))]  # fmt: skip
            made = {"d": pairs}
        case "table_state":
            held = rng.choice(({"d": [["lr", 0.1]]}, {"d": [["step", 3]]}, {"l": []}, None))
            made = {"d": [[table, held]]}
        case "optimizers":
            groups = rng.choice(({"l": []}, {"d": []}, {"l": [{"d": [["params", {"l": tables}]]}]}))
            kept = rng.choice(("named", "state", "x"))
            made = {"d": [["0", {"d": [[kept, {"d": [[table, {"d": [["step", 1]]}]]}],
                                        ["param_groups", groups]]}]]}  # fmt: skip
        case _:
            made = rng.choice((None, {"d": []}, {"l": []}, 0, {"d": [["x", {"l": []}]]}))
    pairs = dense.tree.get("d")
    if not isinstance(pairs, list):
        return None
    pairs[:] = [pair for pair in pairs if pair[0] != name]
    if rng.random() < 0.9:
        pairs.append([name, made])
    part.data = dense.write()
    return f"{name} is {str(made)[:70]!a}"


@mutator(PARTS, 4)
def tensors_of_dense_state(run: StoredRun, rng: random.Random) -> str | None:
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    part, dense = chosen
    if not dense.header:
        return None
    name = rng.choice(list(dense.header))
    one = dense.header[name]
    match rng.randrange(9):
        case 0:
            one["dtype"] = rng.choice(DTYPES)
            told = f"type {one['dtype']}"
        case 1:
            one["shape"] = rng.choice((
                [], [0], [1 << 40], [1 << 62, 4], [0, 1 << 62], [-1], one["shape"][::-1],
                [*one["shape"], 1], [1] * 70, [1.0],
            ))  # fmt: skip
            told = f"shape {one['shape']}"[:50]
        case 2:
            one["data_offsets"] = [number(rng, n) for n in one["data_offsets"]]
            told = f"offsets {one['data_offsets']}"
        case 3:
            other = dense.header[rng.choice(list(dense.header))]
            one["data_offsets"] = list(other["data_offsets"])
            told = "where another lies"
        case 4:
            del dense.header[name]
            told = "gone"
        case 5:
            dense.data = dense.data[: rng.randrange(len(dense.data) + 1)]
            told = "cut off"
        case 6:
            told = change_any(rng, dense.header)
        case 7:
            dense.header[text(rng)] = dict(one)
            told = "one more"
        case _:
            half = len(one["shape"]) and one["shape"][0] > 1
            if half:  # the same bytes as numbers of half the size: good, and of another kind
                one["dtype"] = {"F32": "I32", "I64": "F64", "U8": "I8"}.get(one["dtype"], "BOOL")
            told = f"read as {one['dtype']}"
    part.data = dense.write()
    return f"{name}: {told}"


@mutator(PARTS, 1)
def how_dense_state_is_written(run: StoredRun, rng: random.Random) -> str | None:
    chosen = _choose(run, rng)
    if chosen is None:
        return None
    part, dense = chosen
    match rng.randrange(6):
        case 0:
            depth, tag = rng.choice((30, 300, 2000, 20000)), rng.choice("lt")
            inner = f'{{"{tag}":[' * depth + "1" + "]}" * depth
            dense.tree = f'{{"d":[["model",{inner}]]}}'.encode()
            told = f"nested {depth} deep"
        case 1:
            dense.tree = value(rng, "x")
            told = f"the tree is {str(dense.tree)[:40]!a}"
        case 2:
            dense.tree = _LEFT_OUT
            told = "no tree"
        case 3:
            shared = copy.deepcopy(dense.tree)
            dense.tree = {"d": [["model", shared], ["model", shared]]}
            told = "one key twice"
        case 4:
            dense.metadata = {text(rng): rng.choice(("x", 1, None))}
            told = "other metadata"
        case _:
            size = rng.choice((0, 7, 1 << 32, (1 << 64) - 1, len(part.data)))
            part.data = struct.pack("<Q", size) + part.data[8:]
            return f"header of {size} bytes"
    part.data = dense.write()
    return told
