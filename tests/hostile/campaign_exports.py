"""Ways out of a mutated run: files of three formats, a live model, a run of its own.

What is written is read back by torch and safetensors themselves, not by the project.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import holdfast as hf
from holdfast.interchange.dcpfolder import write_dcp
from holdfast.interchange.handout import hand_out
from holdfast.interchange.torchfile import write_torch
from holdfast.interchange.weightsfile import Wanted, export
from tests.hostile.campaign_poison import poison_tensor
from tests.hostile.campaign_reading import ROWS_MAX, Seen, Target
from tests.hostile.campaign_runs import Live, train, watch
from tests.hostile.campaign_storage import MemoryStorage


def export_safetensors(target: Target) -> list[Seen]:
    """``holdfast restore --format safetensors``."""
    step = target.step()
    path = target.out / "weights.safetensors"
    if target.rng.random() < 0.3:
        return _export_some(target, step, path)
    has_state = target.rng.random() < 0.5
    export(target.run, step, path, Wanted(has_state=has_state))
    found = safetensors.torch.load_file(path)
    seen = []
    for schema in target.run.tables(step):
        names = [schema.name, *(f"optimizer.{schema.name}.{c.name}" for c in schema.columns[1:])]
        for name, column in zip(names, schema.columns, strict=True):
            if name in found:
                seen.append(_tensor(step, schema.name, column.name, found.pop(name)))
    _same_dense(target, step, found)
    return seen


def _export_some(target: Target, step: int, path: Path) -> list[Seen]:
    """Some rows of one table."""
    schema = target.table(step)
    count = min(schema.rows, ROWS_MAX)
    starts = [target.rng.randrange(max(1, count)) for _ in range(target.rng.randrange(1, 4))]
    spans = tuple((start, min(count, start + target.rng.choice((1, 9)))) for start in starts)
    export(target.run, step, path, Wanted((schema.name,), spans, has_state=True))
    found = safetensors.torch.load_file(path)
    ids = np.concatenate([np.arange(a, b) for a, b in spans])
    names = [schema.name, *(f"optimizer.{schema.name}.{c.name}" for c in schema.columns[1:])]
    return [
        dataclasses.replace(_tensor(step, schema.name, column.name, found[name]), ids=ids)
        for name, column in zip(names, schema.columns, strict=True)
    ]


def _same_dense(target: Target, step: int, found: dict[str, Any]) -> None:
    """Note where an export's dense tensors are not those of the step."""
    model = target.run.dense(step)["model"]
    for name, value in found.items():
        if not isinstance(value, torch.Tensor) or name.startswith("optimizer."):
            continue
        stored = model.get(name)
        if not isinstance(stored, torch.Tensor) or not _same(stored, value):
            target.notes.append(f"the export has another {name!a:.40} than the step")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != b.layout or a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.layout != torch.strided:
        return _same(a._values(), b._values())
    flat = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(*flat)) if a.numel() else True


def _tensor(step: int, table: str, column: str, tensor: torch.Tensor) -> Seen:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return Seen(step, table, column, tensor.numpy().reshape(len(tensor), -1))


def export_torch(target: Target) -> list[Seen]:
    """``holdfast restore --format torch``."""
    step = target.step()
    handout = hand_out(target.run, step, weights_only=target.rng.random() < 0.4)
    path = target.out / "step.pt"
    write_torch(handout, path, on_table=lambda done, total: None)
    found = torch.load(path, weights_only=True)
    return _state_seen(target, step, found, has_positions=True)


def export_dcp(target: Target) -> list[Seen]:
    """``holdfast restore --format dcp``."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    step = target.step()
    handout = hand_out(target.run, step, weights_only=target.rng.random() < 0.4)
    path = target.out / "folder"
    write_dcp(handout, path, on_table=lambda done, total: None)
    found: dict[str, Any] = {}
    _load_state_dict(
        found, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )  # fmt: skip
    return _state_seen(target, step, found, has_positions=False)


def _state_seen(target: Target, step: int, found: Any, *, has_positions: bool) -> list[Seen]:
    """The tables of an exported state, with row state where its place is plain."""
    seen = []
    model = dict(found["model"])
    aliases = target.run.dense(step).get("aliases") or {}
    for name in aliases:
        model.pop(name, None)
    names = found.get("parameter_names", {})
    optimizer = found.get("optimizer")
    for schema in target.run.tables(step):
        tensor = model.pop(schema.name, None)
        if tensor is not None:
            seen.append(_tensor(step, schema.name, schema.columns[0].name, tensor))
        if optimizer is None:
            continue
        where = schema.name if not has_positions else None
        if has_positions:
            (listed,) = names.values()
            where = listed.index(schema.name) if schema.name in listed else None
        state = optimizer["state"].get(where, {}) if where is not None else {}
        seen += [
            _tensor(step, schema.name, column.name, state[column.name])
            for column in schema.columns[1:]
            if column.name in state and len(target.run.stored(step, schema.name)) == 1
        ]
    _same_dense(target, step, model)
    return seen


TABLES = ("users.weight", "items.weight")


def resume(target: Target) -> list[Seen]:
    """A live model takes the run over; its tables are full of the pattern before."""
    if target.prey.make is None:
        return []
    live = target.prey.make()
    parameters = dict(live.model.named_parameters())
    for name in TABLES:
        poison_tensor(parameters[name])
    placement = target.prey.settings.get("servers")
    ck = watch(live, MemoryStorage(target.storage.files), servers=placement)
    try:
        step = ck.resume()
        if placement is not None:
            for name in TABLES:
                poison_rows(parameters[name], placement, 1)
            ck.recover([1])
    finally:
        with contextlib.suppress(hf.HoldfastError):
            ck.close()
    return _live_seen(live, step)


def _live_seen(live: Live, step: int) -> list[Seen]:
    """The tables of a live model with their row state."""
    parameters = dict(live.model.named_parameters())
    state = {p: held for optimizer in live.optimizers for p, held in optimizer.state.items()}
    seen = []
    for name in TABLES:
        seen.append(_tensor(step, name, "weight", parameters[name].detach()))
        seen += [
            _tensor(step, name, key, value)
            for key, value in state.get(parameters[name], {}).items()
            if isinstance(value, torch.Tensor) and value.ndim == 2
        ]
    return seen


def train_on(target: Target) -> list[Seen]:
    """Training goes on: one more step is saved, the grid is worked off, old steps stay as they
    were."""
    if target.prey.make is None or not target.prey.settings.get("strategy"):
        return []
    live = target.prey.make()
    storage = MemoryStorage(target.storage.files)
    ck = watch(live, storage, **target.prey.settings)
    try:
        ck.resume()
        try:
            train(live, torch.tensor([[1, 2], [3, 5], [target.rng.randrange(99), 7]]))
        except Exception:  # torch's: an optimizer with a setting that it cannot work with
            return []
        ck.step()
        ck.save().result()
        ck.wait()
    finally:
        with contextlib.suppress(hf.HoldfastError):
            ck.close()
    run = hf.open(storage)
    if hf.verify(target.storage).is_sound and not hf.verify(storage).is_sound:
        target.notes.append("unsound after one more step")
    step = target.step()
    if step not in run.steps:
        return []
    return [
        Seen(step, schema.name, schema.columns[0].name, run.read(step, schema.name).weight)
        for schema in run.tables(step)
    ]


def poison_rows(parameter: torch.Tensor, placement: hf.Placement, server: int) -> None:
    """Fill the rows of a server with the pattern: they are lost."""
    rows = torch.from_numpy(placement.rows_of(server, len(parameter)))
    lost = parameter.detach()[rows]
    poison_tensor(lost)
    parameter.detach()[rows] = lost


def import_export(target: Target) -> list[Seen]:
    """An exported file becomes a run of its own, which reads as the first."""
    step = target.step()
    handout = hand_out(target.run, step, weights_only=True)
    path = target.out / "again.pt"
    write_torch(handout, path, on_table=lambda done, total: None)
    tables = [schema.name for schema in target.run.tables(step)]
    if any(set(name) & set("*?[]") for name in tables):
        return []
    url = target.out / "imported"
    hf.import_checkpoint(path, url, tables=tables, step=step)
    again = hf.open(url)
    if not hf.verify(url).is_sound:
        target.notes.append("an imported run is not sound")
    return [
        Seen(step, name, schema.columns[0].name, again.read(step, name).weight)
        for schema, name in zip(target.run.tables(step), tables, strict=True)
    ]
