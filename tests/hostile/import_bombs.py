"""Small files that ask for much memory, much disk or much time; each made by ``make_<name>``.

A few are honest and just within the limits: they show that the documented factor holds.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tests.hostile.mutators.pickles import global_, number, text
from tests.hostile.mutators.values import nested_lists, shared_lists
from tests.hostile.mutators.zips import Member, build_zip, split_zip

TABLE = torch.arange(200.0).reshape(50, 4)
Make = Callable[[Path], None]


def save(path: Path, **parts: Any) -> None:
    """A file of torch.save with a small honest table."""
    model = {"e.weight": TABLE, **parts.pop("model", {})}
    torch.save({"model": model, **parts}, path)


def save_pickle(path: Path, value: bytes) -> None:
    """A file whose model has one more entry, that a pickle describes."""
    honest = io.BytesIO()
    torch.save({"model": {"e.weight": TABLE, "x": "HERE"}}, honest)
    members = split_zip(honest.getvalue())
    for index, member in enumerate(members):
        if member.name.endswith(b"/data.pkl"):
            assert member.data.count(text("HERE")) == 1
            data = member.data.replace(text("HERE"), value)
            members[index] = dataclasses.replace(member, data=data)
    path.write_bytes(build_zip(members))


def save_deflated(path: Path, name: str, size: int, prefix: bytes = b"") -> None:
    """A file one of whose records is compressed to almost nothing."""
    honest = io.BytesIO()
    torch.save({"model": {"e.weight": TABLE}}, honest)
    with (
        zipfile.ZipFile(honest) as old,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new,
    ):
        for info in old.infolist():
            if not info.filename.endswith(f"/{name}"):
                new.writestr(info.filename, old.read(info), zipfile.ZIP_STORED)
                continue
            with new.open(info.filename, "w") as out:
                out.write(prefix)
                for _ in range(size >> 20):
                    out.write(b"\0" * (1 << 20))


def optimizer(**more: Any) -> dict[str, Any]:
    return {"state": {}, "param_groups": [{"params": [0], "lr": 0.1, **more}]}


def _memo(value: bytes, place: int) -> bytes:
    return value + b"r" + struct.pack("<I", place)


def _get(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def _copies(maker: str, count: int, items: bytes) -> bytes:
    """A list of many things that are each made of one shared list."""
    shared = _memo(b"](" + items + b"e", 900_001)
    made = _memo(global_(maker), 900_002)
    return shared + b"0" + made + b"0](" + (_get(900_002) + _get(900_001) + b"\x85R") * count + b"e"


FILES: dict[str, Make] = {
    "shared lists in the model": lambda p: save(p, model={"x": shared_lists(26)}),
    "shared lists in an optimizer": lambda p: save(p, optimizer=optimizer(x=shared_lists(40))),
    "shared lists beside": lambda p: save(p, extra=shared_lists(60)),
    "a million lists, nested": lambda p: save_pickle(p, b"]" * 10**6 + b"a" * (10**6 - 1)),
    "lists as deep as can be": lambda p: save(p, optimizer=optimizer(x=nested_lists(57))),
    "tuples, nested and hashed": lambda p: save_pickle(
        p, b"}" + b")" + b"\x85" * 10**6 + b"K\x01s"
    ),
    "expanded number": lambda p: save(p, model={"x": torch.ones(1).expand(1 << 45)}),
    "expanded number, 2 GB": lambda p: save(p, model={"x": torch.ones(1).expand(1 << 29)}),
    "expanded number, just small enough": lambda p: save(
        p, model={"x": torch.ones(1).expand(42 << 18)}
    ),
    "expanded row of a table": lambda p: save(
        p, model={"e.weight": torch.ones(1, 64).expand(10**7, 64)}
    ),
    "expanded row, just few enough": lambda p: save(
        p, model={"e.weight": torch.ones(1, 64).expand(250_000, 64)}
    ),
    "row state, expanded": lambda p: save(
        p,
        optimizer={
            "state": {0: {"sum": torch.ones(1, 1).expand(50, 1 << 26)}},
            "param_groups": [{"params": [0], "param_names": ["e.weight"]}],
        },
    ),
    "numbers over each other": lambda p: save(
        p, model={"x": torch.ones(2 << 20).as_strided((1 << 20, 2), (1, (1 << 20) - 1))}
    ),
    "rows over each other": lambda p: save(
        p, model={"e.weight": torch.ones(2 << 20).as_strided((1 << 20, 2), (1, (1 << 20) - 1))}
    ),
    "one wide row": lambda p: save(p, model={"e.weight": torch.ones(1, 1).expand(1, 1 << 24)}),
    "one tensor, named often": lambda p: save(p, model={f"x{i}": _ONE for i in range(20_000)}),
    "deflated pickle": lambda p: save_deflated(p, "data.pkl", 400 << 20, b"\x80\x02"),
    "deflated version": lambda p: save_deflated(p, "version", 400 << 20),
    "deflated byte order": lambda p: save_deflated(p, "byteorder", 400 << 20),
    "deflated numbers": lambda p: save_deflated(p, "data/0", 400 << 20),
    "two million sets": lambda p: save_pickle(p, b"](" + b"\x8f" * (2 << 20) + b"e"),
    "two million dicts": lambda p: save_pickle(p, b"](" + b"}" * (2 << 20) + b"e"),
    "two million marks": lambda p: save_pickle(p, b"(" * (2 << 20)),
    "two million memos": lambda p: save_pickle(p, b"N" + b"\x94" * (2 << 20)),
    "room for 8 GB": lambda p: save_pickle(p, b"\x96" + struct.pack("<Q", 8 << 30)),
    "a frame of 8 GB": lambda p: save_pickle(p, b"\x95" + struct.pack("<Q", 8 << 30) + b"N"),
    "a memo of 2^31": lambda p: save_pickle(p, b"Nr\xff\xff\xff\x7f"),
    "copied shapes": lambda p: save_pickle(p, _copies("torch Size", 10_000, b"K\x01" * 10_000)),
    "copied dicts": lambda p: save_pickle(
        p, _copies("collections OrderedDict", 10_000, (b"K\x01K\x02\x86" * 3000))
    ),
    "copied sets": lambda p: save_pickle(
        p, _copies("builtins set", 10_000, b"".join(number(i) for i in range(3000)))
    ),
    "copied lists": lambda p: save_pickle(p, _copies("collections deque", 10_000, b"N" * 30_000)),
    "numbers with one hash": lambda p: save_pickle(
        p, b"}(" + b"".join(number(i * (2**61 - 1)) + b"N" for i in range(1, 60_000)) + b"u"
    ),
    "numbers with one hash in a set": lambda p: save_pickle(
        p,
        _copies("builtins set", 300, b"".join(number(i * (2**61 - 1)) for i in range(1, 60_000))),
    ),
    "one text, named often": lambda p: save(p, optimizer=optimizer(x=["x" * 10**6] * 100_000)),
    "one group, named often": lambda p: save(
        p, optimizer={"state": {}, "param_groups": [_GROUP] * 50_000}
    ),
    "one state, named often": lambda p: save(
        p,
        optimizer={
            "state": dict.fromkeys(range(50_000), _GROUP),
            "param_groups": [{"params": list(range(50_000))}],
        },
    ),
    "many states of one shape": lambda p: save(
        p,
        model={f"x{i}": torch.ones(2, 2) for i in range(5000)},
        optimizer={
            "state": {i: {"sum": torch.ones(2, 2)} for i in range(5000)},
            "param_groups": [{"params": list(range(5000))}],
        },
    ),
    "too much text for a header": lambda p: save(p, optimizer=optimizer(x='"' * (40 << 20))),
    "a hundred thousand records": lambda p: _many_records(p, 100_000),
    "longer integer than can be printed": lambda p: save_pickle(
        p, b"\x8b" + struct.pack("<i", 10**6) + b"\x7f" * 10**6
    ),
}
_ONE = torch.ones(10_000)
_GROUP = {"params": [], **{str(i): i for i in range(2000)}}


def _many_records(path: Path, count: int) -> None:
    honest = io.BytesIO()
    torch.save({"model": {"e.weight": TABLE}}, honest)
    members = split_zip(honest.getvalue())
    root = members[0].name.partition(b"/")[0]
    members += [Member(root + b"/x%d" % i, b"", is_described=False) for i in range(count)]
    path.write_bytes(build_zip(members, is_wide=True))


def dcp_folder(path: Path, **more: Any) -> Any:
    """A folder with a small honest table; its metadata, to be stored again."""
    state = {"model": {"e.weight": TABLE}, **more}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return pickle.loads((path / ".metadata").read_bytes())


def store(path: Path, metadata: Any) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _values(path: Path, value: Any) -> None:
    """A folder with an entry that is no tensor."""
    metadata = dcp_folder(path, optimizer={"state": {}, "param_groups": [{"params": [], "x": 1}]})
    (index,) = (i for i in metadata.storage_data if i.fqn.endswith(".x"))
    torch.save(value, path / "value.distcp")
    size = (path / "value.distcp").stat().st_size
    place = dataclasses.replace(
        metadata.storage_data[index], relative_path="value.distcp", offset=0, length=size
    )
    metadata.storage_data[index] = place
    store(path, metadata)


def _chunks(path: Path, sizes: tuple[int, int], count: int) -> None:
    metadata = dcp_folder(path)
    entry = metadata.state_dict_metadata["model.e.weight"]
    rows, columns = sizes
    entry.chunks = [
        ChunkStorageMetadata(torch.Size((0, i * columns)), torch.Size(sizes)) for i in range(count)
    ]
    entry.size = torch.Size((rows, columns * count))
    store(path, metadata)


def _crossing(path: Path, count: int) -> None:
    """Rectangles that no cut tells apart; as many numbers as the tensor has."""
    metadata = dcp_folder(path)
    entry = metadata.state_dict_metadata["model.e.weight"]
    entry.chunks = [
        ChunkStorageMetadata(torch.Size((i, i)), torch.Size((2, 2))) for i in range(count)
    ]
    side = count + 1
    entry.chunks.append(
        ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((1, side * side - 4 * count)))
    )
    entry.size = torch.Size((side, side))
    store(path, metadata)


def _shared_archive(path: Path) -> None:
    """Ten thousand entries that lie in one archive."""
    metadata = dcp_folder(path, big=list(range(20_000)))
    (index,) = (i for i in metadata.storage_data if i.fqn == "big")
    for number_ in range(10_000):
        name = f"big{number_}"
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata["big"]
        metadata.planner_data[name] = (name,)
        metadata.storage_data[dataclasses.replace(index, fqn=name)] = metadata.storage_data[index]
    store(path, metadata)


FOLDERS: dict[str, Make] = {
    "shared lists in a value": lambda p: _values(p, shared_lists(26)),
    "expanded number in a value": lambda p: _values(p, [torch.ones(1).expand(1 << 45)]),
    "one text, named often": lambda p: _values(p, ["x" * 10**6] * 100_000),
    "sixty thousand columns": lambda p: _chunks(p, (50, 4), 60_000),
    "rectangles that cross": lambda p: _crossing(p, 60_000),
    "one archive, named often": _shared_archive,
    "metadata of sets": lambda p: (dcp_folder(p), (p / ".metadata").write_bytes(
        b"\x80\x04](" + b"\x8f" * (2 << 20) + b"e."))[0],
}  # fmt: skip
