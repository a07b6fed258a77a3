"""Lying files of ``torch.save`` and folders of DCP, made of honest ones and a seed.

    mutate_torch_file(source, out, rng)  what a program saves, its pickle, or its zip is changed
    mutate_dcp_folder(source, out, rng)  its metadata, a piece, or a file of the folder is

Each changes one thing and repairs what stands around it: sizes, offsets and checksums fit, so that
the lie itself is what a reader has to notice. The answer says in a few words what it is.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from tests.hostile.mutators.pickles import NUMBERS, TEXTS, mutate_pickle
from tests.hostile.mutators.values import mutate_values
from tests.hostile.mutators.zips import Member, build_zip, mutate_zip, split_zip


def mutate_torch_file(source: Path, out: Path, rng: random.Random) -> str:
    """Write a file of ``torch.save`` that lies; ``source`` is an honest one."""
    changed, told = mutate_archive(source.read_bytes(), rng)
    out.write_bytes(changed)
    return told


def mutate_archive(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """The bytes of an honest archive with a lie in them."""
    match rng.choice(("values", "pickle", "pickle", "zip")):
        case "values":
            tree = torch.load(io.BytesIO(data), weights_only=False)  # an honest file of our own
            told = mutate_values(tree, rng) if isinstance(tree, dict) else "nothing"
            buffer = io.BytesIO()
            try:
                torch.save(tree, buffer, pickle_protocol=rng.choice((2, 2, 2, 4, 5)))
            except Exception as error:  # torch cannot save it, so nobody can have
                return data, f"nothing ({type(error).__name__})"
            return buffer.getvalue(), told
        case "pickle":
            members = split_zip(data)
            for index, member in enumerate(members):
                if member.name.endswith(b"/data.pkl"):
                    changed, told = mutate_pickle(member.data, rng)
                    members[index] = Member(member.name, changed)
                    return build_zip(members), told
            return data, "nothing"
    return mutate_zip(data, rng)


def mutate_dcp_folder(source: Path, out: Path, rng: random.Random) -> str:
    """Write a folder of DCP that lies; ``source`` is an honest one, ``out`` does not exist."""
    shutil.copytree(source, out)
    match rng.choice(("record", "record", "pickle", "piece", "piece", "file")):
        case "record":
            return _lie_in_records(out, rng)
        case "pickle":
            path = out / ".metadata"
            changed, told = mutate_pickle(path.read_bytes(), rng)
            path.write_bytes(changed)
            return f"metadata {told}"
        case "piece":
            return _lie_in_piece(out, rng)
    return _lie_about_file(out, rng)


def _load(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())  # an honest one of our own


def _store(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def _lie_in_records(folder: Path, rng: random.Random) -> str:
    """Another number, name, shape or type somewhere in the metadata."""
    metadata = _load(folder)
    index, info = rng.choice(list(metadata.storage_data.items()))
    name, entry = rng.choice(list(metadata.state_dict_metadata.items()))
    number = rng.choice((*NUMBERS, *(info.offset + n for n in (-4, 4, 64)), info.length - 1))
    lie = rng.choice(("offset", "length", "file", "type", "size", "chunk", "chunks", "path", "drop",
                      "forget", "share", "swap", "transform", "rename"))  # fmt: skip
    told = f"metadata: {lie} of {name}"
    if lie == "offset":
        info.offset, told = number, f"metadata: offset of {index.fqn} is {number}"
    elif lie == "length":
        info.length, told = number, f"metadata: length of {index.fqn} is {number}"
    elif lie == "file":
        info.relative_path = rng.choice(
            ("../x", "/etc/passwd", str(folder / "__0_0.distcp"), "", ".", "a/../__0_0.distcp",
             ".metadata", "\0", *TEXTS, 5, None)
        )  # fmt: skip
        told = f"metadata: {index.fqn} lies in {info.relative_path!r}"[:80]
    elif lie == "transform":
        info.transform_descriptors = rng.choice((["zstd"], [], "x", 5))
    elif lie == "drop":
        del metadata.storage_data[index]
    elif lie == "forget":
        del metadata.state_dict_metadata[name]
    elif lie == "share":
        other = rng.choice(list(metadata.storage_data.values()))
        info.offset, info.length = other.offset, other.length
        info.relative_path = other.relative_path
    elif lie == "swap":
        other = rng.choice(list(metadata.state_dict_metadata))
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata[other]
    elif lie == "rename":
        new = rng.choice(TEXTS)
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(name)
    elif lie == "path":
        path = rng.choice((("a",) * 70, (), ("model", 5), (1,), ("model",), "x", ("model", None),
                           ("optimizer", "state", 0), (2**70,), ("model", "\ud800")))  # fmt: skip
        metadata.planner_data[name] = path
        told = f"metadata: {name} belongs to {path!r}"[:80]
    elif hasattr(entry, "chunks"):
        told = f"metadata: {_lie_in_tensor(entry, lie, rng)} of {name}"
    _store(folder, metadata)
    return told


def _lie_in_tensor(entry: Any, lie: str, rng: random.Random) -> str:
    chunk = rng.choice(entry.chunks)

    def other(sizes: tuple[int, ...]) -> Any:
        changed = list(sizes)
        if changed:
            at = rng.randrange(len(changed))
            changed[at] = rng.choice((0, 1, changed[at] + 1, changed[at] - 1, *NUMBERS))
        if rng.random() < 0.2:
            changed.append(1)
        try:
            return torch.Size(changed)
        except (OverflowError, TypeError, ValueError):
            return tuple(changed)

    if lie == "type":
        entry.properties.dtype = rng.choice((torch.float16, torch.float64, torch.int32, "x", None))
        return "type"
    if lie == "size":
        entry.size = other(tuple(entry.size))
        return f"size {tuple(entry.size)}"
    if lie == "chunk":
        chunk.sizes, chunk.offsets = other(tuple(chunk.sizes)), other(tuple(chunk.offsets))
        return f"chunk {tuple(chunk.offsets)} {tuple(chunk.sizes)}"
    entry.chunks = rng.choice(([], [*entry.chunks, chunk], entry.chunks[1:], entry.chunks * 100))
    return f"{len(entry.chunks)} chunks"


def _lie_in_piece(folder: Path, rng: random.Random) -> str:
    """Another archive in the place of one; offsets and lengths are repaired."""
    metadata = _load(folder)
    index, info = rng.choice(list(metadata.storage_data.items()))
    path = folder / info.relative_path
    data = path.read_bytes()
    start, end = info.offset, info.offset + info.length
    changed, told = mutate_archive(data[start:end], rng)
    path.write_bytes(data[:start] + changed + data[end:])
    for other in metadata.storage_data.values():
        if other.relative_path == info.relative_path and other.offset >= end:
            other.offset += len(changed) - info.length
    info.length = len(changed)
    _store(folder, metadata)
    return f"piece {index.fqn}: {told}"


def _lie_about_file(folder: Path, rng: random.Random) -> str:
    """Something else where a file should be."""
    path = rng.choice(sorted(folder.iterdir()))
    data = path.read_bytes()
    lie = rng.choice(("cut", "gone", "link", "pipe", "folder", "longer", "flip", "empty"))
    path.unlink()
    if lie == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif lie == "link":
        outside = folder.with_name(f"{folder.name}.outside")
        outside.write_bytes(data)
        path.symlink_to(outside)
    elif lie == "pipe":
        os.mkfifo(path)
    elif lie == "folder":
        path.mkdir()
    elif lie == "longer":
        path.write_bytes(data + b"\0" * 100)
    elif lie == "flip":
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(flipped)
    elif lie == "empty":
        path.write_bytes(b"")
    return f"file {path.name}: {lie}"
