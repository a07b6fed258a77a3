"""One import of a file that may lie: an error of ours and nothing left, or exactly right rows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast as hf
from holdfast.interchange.dcpfolder import write_dcp
from holdfast.interchange.handout import hand_out
from holdfast.interchange.torchfile import write_torch
from holdfast.interchange.weightsfile import Wanted, export
from holdfast.model.names import plain_name
from tests.hostile.mutators import independent

TABLES = ["e.weight"]


def check_import(source: Path, url: Path, **settings: Any) -> str:
    """Import; "refused", "right", or "unconfirmed" where no other reader reads the source.

    Raises:
        AssertionError: something is left after an error, or what was stored is not what the source
            says, or a reader does not open it. Any other error that is not ours is one too.
    """
    before = sorted(path.name for path in url.parent.iterdir())
    try:
        done = hf.import_checkpoint(source, url, **{"tables": TABLES, **settings})
    except hf.HoldfastError as error:
        str(error)
        assert sorted(path.name for path in url.parent.iterdir()) == before
        return "refused"
    report = hf.verify(url)
    assert report.is_sound, report.damages
    run = hf.open(url)
    assert run.steps == (done.step,)
    try:
        if source.is_dir():
            found: Any = independent.read_folder(source)
            model = {k.removeprefix("model."): v for k, v in found.items()}
            states = list(found.values())
        else:
            found = independent.read_archive(source.read_bytes())
            model = _model_of(found)
            states = _tensors(found)
    except Exception:
        model, states = {}, None
    named: dict[str, list[Any]] = {}
    for name, value in model.items():
        named.setdefault(plain_name(name) if isinstance(name, str) else name, []).append(value)
    for schema in run.tables(done.step):
        rows = run.read(done.step, schema.name)
        assert rows.weight.shape == (schema.rows, schema.width)
        some = run.read(done.step, schema.name, [schema.rows - 1, 0])
        assert _are_same(some.weight, rows.weight[[schema.rows - 1, 0]])
        if states is None:
            continue
        assert any(_are_same(rows.weight, value) for value in named[schema.name]), schema
        for key, column in rows.state.items():
            assert any(_are_same(column, value) for value in states), key
    dense = run.dense(done.step)
    if states is not None:
        for name, value in dense["model"].items():
            if isinstance(value, torch.Tensor):
                assert any(_are_same(value, other) for other in named[name]), name
    return "right" if states is not None else "unconfirmed"


def check_exports(url: Path, out: Path) -> None:
    """Write a run's steps in every format: each is written, or refused with an error of ours."""
    run = hf.open(url)
    for step in run.steps:
        for index, write in enumerate((write_torch, write_dcp)):
            for weights_only in (False, True):
                with contextlib.suppress(hf.HoldfastError):
                    handout = hand_out(run, step, weights_only=weights_only)
                    write(handout, out / f"{index}{weights_only}", on_table=lambda a, b: None)
        with contextlib.suppress(hf.HoldfastError):
            export(run, step, out / "weights", Wanted(has_state=True))


def _model_of(found: Any) -> dict[Any, Any]:
    for key in ("model", "state_dict"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            return found[key]
    return found if isinstance(found, dict) else {}


def _tensors(value: Any, depth: int = 0) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if depth > 6 or not isinstance(value, dict | list | tuple):
        return []
    items = value.values() if isinstance(value, dict) else value
    return [tensor for item in items for tensor in _tensors(item, depth + 1)]


def _are_same(one: Any, other: Any) -> bool:
    """Whether two hold the same numbers, whatever holds them and in as many rows."""
    arrays = []
    for value in (one, other):
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.device.type != "cpu":
                return False
            value = value.detach().resolve_neg().resolve_conj()
            if value.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
                value = value.float()
            value = value.numpy()
        arrays.append(np.asarray(value))
    a, b = arrays
    if a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc" or a.size != b.size:
        return False
    a, b = a.reshape(-1), b.reshape(-1)
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
