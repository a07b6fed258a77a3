"""The campaign's files of other programs: ``torch.save``'s and folders of DCP, with lies in them.

Honest ones are saved by torch itself and exported from a run of ours; an import refuses a lie with
an error of ours and leaves nothing, or stores exactly what other readers find in the file.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import holdfast as hf
from holdfast.interchange.handout import hand_out
from holdfast.interchange.torchfile import write_torch
from tests.hostile.campaign_runs import Prey
from tests.hostile.campaign_storage import MemoryStorage
from tests.hostile.mutators.import_check import check_exports, check_import
from tests.hostile.mutators.torch_files import mutate_dcp_folder, mutate_torch_file

TABLE = "e.weight"


@dataclass(frozen=True, slots=True)
class Source:
    """An honest file or folder, and the names of its tables."""

    path: Path
    tables: tuple[str, ...]

    @property
    def mutate(self) -> Callable[[Path, Path, random.Random], str]:
        """What puts lies in it."""
        return mutate_dcp_folder if self.path.is_dir() else mutate_torch_file


def _saved(kind: type[torch.optim.Optimizer]) -> dict[str, Any]:
    """What a small training saves."""
    torch.manual_seed(0)
    table, top = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((50, 4), (3,)))
    optimizer = kind([(TABLE, table), ("top.weight", top)], lr=0.1)  # type: ignore[call-arg]
    (table.sum() * 2 + top.sum()).backward()
    optimizer.step()
    model = {TABLE: table.detach(), "top.weight": top.detach()}
    return {"model": model, "optimizer": optimizer.state_dict(), "step": 5, "lr": [0.1, 0.2]}


def make_sources(folder: Path, prey: Prey) -> list[Source]:
    """Honest files and folders; ``prey`` is exported to some of them."""
    folder.mkdir()
    found = []
    for kind in (torch.optim.Adagrad, torch.optim.Adam):
        state = _saved(kind)
        path = folder / f"{kind.__name__}.pt"
        torch.save(state, path)
        found.append(Source(path, (TABLE,)))
        named = {**state, "optimizer": _by_name(state["optimizer"])}
        dcp.save(named, checkpoint_id=folder / kind.__name__, no_dist=True)
        found.append(Source(folder / kind.__name__, (TABLE,)))
    run = hf.open(MemoryStorage(prey.files))
    handout = hand_out(run, run.steps[-1], weights_only=False)
    tables = tuple(schema.name for schema in run.tables(run.steps[-1]))
    path = folder / "ours.pt"
    write_torch(handout, path, on_table=lambda done, total: None)
    torch.save(torch.load(path, weights_only=True), path)  # with the checksums of a zip
    return [*found, Source(path, tables)]


def _by_name(state: dict[str, Any]) -> dict[str, Any]:
    names = (TABLE, "top.weight")
    held = dict(zip(names, state["state"].values(), strict=True))
    return {"state": held, "param_groups": [{"params": list(names), "lr": 0.1}]}


def make_lie(source: Source, room: Path, rng: random.Random) -> tuple[Path, str]:
    """A copy of a source with a lie in it, and what that is."""
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    path = room / "source"
    return path, f"{source.path.name}: {source.mutate(source.path, path, rng)}"


def attempt(source: Source, path: Path, rng: random.Random) -> str:
    """Import a lie, and export what came of it; what became of it.

    Raises:
        AssertionError: what was stored is not what the file says, or something was left.
    """
    url = path.parent / "run"
    outcome = check_import(path, url, tables=list(source.tables))
    if outcome != "refused" and rng.random() < 0.1:
        check_exports(url, path.parent)
    return outcome


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files of a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
