"""Honest files of torch and folders of DCP with a lie in them: refused, or imported exactly."""

from __future__ import annotations

import random
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.conftest import EXAMPLES, SEED
from tests.hostile.mutators.import_check import check_exports, check_import
from tests.hostile.mutators.torch_files import mutate_dcp_folder, mutate_torch_file
from tests.unit.interchange.sharded import save_sharded

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of much that a lie makes of a file
FILES, FOLDERS = 400 * EXAMPLES, 200 * EXAMPLES


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """An allocation of gigabytes fails the test, and not the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def checkpoint(kind: type[torch.optim.Optimizer], *, is_named: bool) -> dict[str, Any]:
    """What a small training saves."""
    torch.manual_seed(0)
    table, top = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((50, 4), (3,)))
    optimizer = kind([("e.weight", table), ("top.weight", top)], lr=0.1)  # type: ignore[call-arg]
    (table.sum() * 2 + top.sum()).backward()
    optimizer.step()
    state = optimizer.state_dict()
    if is_named:  # as DCP's helpers have it
        names = ("e.weight", "top.weight")
        state["state"] = dict(zip(names, state["state"].values(), strict=True))
        state["param_groups"][0] = {"params": list(names), "lr": 0.1}
    return {
        "model": {"e.weight": table.detach(), "top.weight": top.detach()},
        "optimizer": state,
        "step": 5,
        "hyper_parameters": {"lr": 0.1, "layers": [1, 2]},
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("files")
    torch.save(checkpoint(torch.optim.Adagrad, is_named=False), folder / "adagrad.pt")
    torch.save(checkpoint(torch.optim.Adam, is_named=False), folder / "adam.pt")
    torch.save(checkpoint(torch.optim.Adam, is_named=False)["model"], folder / "weights.pt")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("folders")
    for kind in (torch.optim.Adagrad, torch.optim.Adam):
        state = checkpoint(kind, is_named=True)
        dcp.save(state, checkpoint_id=folder / kind.__name__, no_dist=True)
    save_sharded(
        folder / "sharded",
        {"model.e.weight": torch.randn(50, 4), "model.top.weight": torch.randn(3)},
    )
    return sorted(folder.iterdir())


def attack(
    sources: list[Path], mutate: Callable[[Path, Path, random.Random], str], count: int, room: Path
) -> Counter[str]:
    """Import so many mutations; each can be made again from the seed that a failure names."""
    found: Counter[str] = Counter()
    for source in sources:
        assert check_import(source, room / "honest") == "right"
        shutil.rmtree(room / "honest")
    for seed in range(SEED, SEED + count):
        rng = random.Random(seed)
        work = room / "work"
        work.mkdir()
        told = mutate(rng.choice(sources), work / "source", rng)
        try:
            result = check_import(work / "source", work / "run")
            found[result] += 1
            if result != "refused" and rng.random() < 0.1:
                check_exports(work / "run", work)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {told}") from error
        shutil.rmtree(work)
    return found


def test_files_of_torch_that_lie_are_refused_or_right(files: list[Path], tmp_path: Path) -> None:
    found = attack(files, mutate_torch_file, FILES, tmp_path)
    assert found["refused"] > FILES // 3 and found["right"] > FILES // 20, found
    assert found["unconfirmed"] < FILES // 20, found


def test_folders_of_dcp_that_lie_are_refused_or_right(folders: list[Path], tmp_path: Path) -> None:
    found = attack(folders, mutate_dcp_folder, FOLDERS, tmp_path)
    assert found["refused"] > FOLDERS // 3 and found["right"] > FOLDERS // 20, found
    assert found["unconfirmed"] < FOLDERS // 20, found
