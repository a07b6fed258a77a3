"""Files of ``torch.save``: a step as one, and one as a source.

    {"model": state_dict, "optimizer": state_dict, "parameter_names": {...}, "step": 1000}

With several optimizers the key is ``optimizers``, a dict by name. Fused ones are under
``fused_optimizer`` (fused.py). ``parameter_names`` says what
torch does not: by optimizer, the names of its parameters in their order. ``torch.load`` reads it
with ``weights_only=True``.

Invariants:
- Reading executes nothing: files are read by archive/, never by ``torch.load``.
- Numbers of a source are read when rows are copied.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from holdfast.boundary.budget import Budget
from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.interchange import handout as handouts
from holdfast.interchange.archive.files import find_file, shown, whole
from holdfast.interchange.archive.pickles import UnknownNameError
from holdfast.interchange.archive.structure import read_structure
from holdfast.interchange.archive.tensors import StoredTensor, TensorRef
from holdfast.interchange.archive.zips import begins_as_zip, is_zip
from holdfast.interchange.fused import KEY as FUSED_KEY
from holdfast.interchange.handout import Handout, OnTable
from holdfast.interchange.source import PARAMETER_NAMES, Choice, Source, find_parts
from holdfast.interchange.wholeness import whole_file


def write_torch(handout: Handout, out: Path, *, on_table: OnTable) -> int:
    """Write a step as a file of ``torch.save``, table by table; its size. Replaces ``out``.

    Raises:
        CorruptDataError: the checkpoint is damaged; nothing is written.
        InvalidRequestError: a tensor is of a kind that is not exported.
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
        with torch.serialization.skip_data(), handouts.reporting("torch.save"):
            torch.save(tree, temporary)
        file = find_file(temporary)
        # It is of our own making; only its size bounds the time that looking at it takes.
        account = Budget(file.bytes, is_trusted=True).open_account()
        written = read_structure(whole(file), account)
        handouts.fill(handout, list(_pair(tree, written)), on_table)
        with temporary.open("rb+") as out_file:
            os.fsync(out_file.fileno())
    return file.bytes


def _pair(tree: Any, written: Any) -> list[tuple[torch.Tensor, TensorRef]]:
    """Each tensor with its place in the file: the two trees have one shape, and one order."""
    if isinstance(tree, torch.Tensor):
        if not isinstance(written, StoredTensor):
            raise InvalidRequestError(
                "a tensor is of a kind that is not exported", layout=str(tree.layout),
                todo="export weights alone: --weights-only",
            )  # fmt: skip
        return [(tree, written.pieces[0].ref)]
    if not isinstance(tree, dict | list | tuple):
        return []
    is_alike = isinstance(written, dict if isinstance(tree, dict) else list | tuple)
    if not is_alike or len(tree) != len(written):
        raise InvalidRequestError(
            "the state has values that torch.save does not keep apart",
            todo="export weights alone: --weights-only",
        )
    if isinstance(tree, dict):
        tree, written = tree.values(), written.values()
    return [pair for a, b in zip(tree, written, strict=True) for pair in _pair(a, b)]


def read_torch(path: Path, choice: Choice, *, is_trusted: bool = False) -> Source:
    """A file of ``torch.save`` as a source. ``is_trusted`` lifts the limits on what it may cost.

    Raises:
        NotFoundError: there is no such file.
        InvalidRequestError: it is of another kind, holds more than tensors and plain values, or
            claims more than its size allows.
        CorruptDataError: it is damaged or cut off.
    """
    file = find_file(path)
    archive = whole(file)
    if not is_zip(archive):
        if begins_as_zip(archive):
            raise CorruptDataError("the file is cut off", path=shown(path))
        raise InvalidRequestError(
            "this is no file of torch.save", path=shown(path),
            todo="of a file older than torch 1.6: torch.load it, and torch.save it again",
        )  # fmt: skip
    account = Budget(file.bytes, is_trusted=is_trusted).open_account()
    try:
        tree = read_structure(archive, account)
    except UnknownNameError as error:
        raise InvalidRequestError(
            "the file holds more than tensors and plain values; it was not run",
            path=shown(path),
            name=error.facts["name"],
            todo="save state_dict()s alone",
        ) from error
    return find_parts(tree, choice, account=account, path=shown(path), format="torch")
