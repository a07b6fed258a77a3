"""Files of ``torch.save``: a step as one, and one as a source.

    {"model": state_dict, "optimizer": state_dict, "parameter_names": {...}, "step": 1000}

With several optimizers the key is ``optimizers``, a dict by name. Fused ones are under
``fused_optimizer`` (fused.py). ``parameter_names`` says what
torch does not: by optimizer, the names of its parameters in their order. ``torch.load`` reads it
with ``weights_only=True``.

Invariants:
- Reading executes nothing: ``weights_only`` is never off.
- Tensors of a source are mapped: numbers are read when rows are copied.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import CorruptDataError, InvalidRequestError, NotFoundError
from holdfast.interchange import handout as handouts
from holdfast.interchange.fused import KEY as FUSED_KEY
from holdfast.interchange.handout import Handout, OnTable
from holdfast.interchange.source import PARAMETER_NAMES, Choice, Source, find_parts, stored
from holdfast.interchange.torchzip import Extent, TensorRef, read_structure
from holdfast.interchange.wholeness import whole_file


def write_torch(handout: Handout, out: Path, *, on_table: OnTable) -> int:
    """Write a step as a file of ``torch.save``, table by table; its size. Replaces ``out``.

    Raises:
        CorruptDataError: the checkpoint is damaged; nothing is written.
    """
    handouts.check_skips_data()
    tree: dict[str, Any] = {"model": handout.model}
    if len(handout.optimizers) == 1:
        (tree["optimizer"],) = handout.optimizers.values()
    elif handout.optimizers:
        tree["optimizers"] = handout.optimizers
    if handout.optimizers:
        tree[PARAMETER_NAMES] = handout.parameters
    if handout.fused is not None:
        tree[FUSED_KEY] = handout.fused
    tree["step"] = handout.step
    with whole_file(out) as temporary:
        with torch.serialization.skip_data():
            torch.save(tree, temporary)
        size = temporary.stat().st_size
        written = read_structure(Extent(temporary, 0, size))
        handouts.fill(handout, list(_pair(tree, written)), on_table)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
    return size


def _pair(tree: Any, written: Any) -> list[tuple[torch.Tensor, TensorRef]]:
    """Each tensor with its place in the file: the two trees have one shape."""
    if isinstance(tree, torch.Tensor):
        assert isinstance(written, TensorRef)
        return [(tree, written)]
    if isinstance(tree, dict):
        return [pair for key in tree for pair in _pair(tree[key], written[key])]
    if isinstance(tree, list | tuple):
        return [p for a, b in zip(tree, written, strict=True) for p in _pair(a, b)]
    return []


def read_torch(path: Path, choice: Choice) -> Source:
    """A file of ``torch.save`` as a source.

    Raises:
        NotFoundError: there is no such file.
        InvalidRequestError: it is of another kind, or holds more than tensors and plain values.
        CorruptDataError: it is damaged or cut off.
    """
    if not path.is_file():
        raise NotFoundError("no such file", path=str(path))
    if not _is_zip(path):
        with path.open("rb") as file:
            head = file.read(4)
        if head == b"PK\x03\x04":
            raise CorruptDataError("the file is cut off", path=str(path))
        raise InvalidRequestError(
            "this is no file of torch.save", path=str(path),
            todo="of a file older than torch 1.6: torch.load it, and torch.save it again",
        )  # fmt: skip
    try:
        tree = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # what a stranger's file makes torch raise is anything
        if type(error).__name__ == "UnpicklingError" and "nsupported" in str(error):
            raise InvalidRequestError(
                "the file holds more than tensors and plain values; it was not run",
                path=str(path),
                todo="save state_dict()s alone",
            ) from error
        raise CorruptDataError(
            "not a whole file of torch.save", path=str(path), detail=str(error)[:120]
        ) from error
    return find_parts(_stored(tree), choice, path=str(path), format="torch")


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return False


def _stored(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return stored(tree)
    if isinstance(tree, dict):
        return {key: _stored(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_stored(value) for value in tree]
    return tree
