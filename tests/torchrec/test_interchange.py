"""Fused optimizers leave as TorchRec's own state, plain torch loads them, and they come back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.cli.main import run as run_command
from tests.torchrec.cases import Shards, check_restored
from tests.torchrec.pool import Pool

STEP = 4
FUSED = ("rowwise-adagrad", "adagrad", "sgd")


@pytest.fixture(scope="module", params=FUSED)
def saved(
    request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, list[Shards]]:
    """A run of two ranks with every kind of sharding, and its tables at its last step, whole: where
    cuts of a table have a number each for a row, that is their mean."""
    url = tmp_path_factory.mktemp("run")
    pool.run(
        "save", ranks=2, url=str(url), optimizer=request.param, layout=0, strategy="incrcp",
        saves=(2, STEP),
    )  # fmt: skip
    run = hf.open(url)
    whole: Shards = {}
    for schema in run.tables(STEP):
        rows = run.read(STEP, schema.name)
        whole[schema.name] = [(0, 0, {"weight": rows.weight, **rows.state})]
    return url, request.param, [whole]


def export(url: Path, out: Path, kind: str) -> Path:
    code = run_command(
        ["restore", str(url), "--step", str(STEP), "--format", kind, "--out", str(out), "--json"]
    )
    assert code == 0
    return out


def weights_and_fused(ranks: list[Shards], url: Path) -> list[Shards]:
    """Without the state of tables that torch's optimizers train."""
    dense = hf.open(url).dense(STEP)
    torchs = {name for group in dense["parameters"]["tables"] for name in group}
    return [
        {
            name: [(r, c, {"weight": a["weight"]} if name in torchs else a) for r, c, a in parts]
            for name, parts in shards.items()
        }
        for shards in ranks
    ]


def test_state_has_the_names_and_shapes_that_torchrec_gives_it(
    saved: tuple[Path, str, list[Shards]], tmp_path: Path
) -> None:
    url, optimizer, _ = saved
    file = torch.load(export(url, tmp_path / "step.pt", "torch"), weights_only=True)
    fused = file["fused_optimizer"]
    assert [group["lr"] for group in fused["param_groups"]] == [pytest.approx(0.1)]
    assert set(fused["param_groups"][0]["params"]) == set(fused["state"]) != set()
    for name, states in fused["state"].items():
        weight = file["model"][name]
        table = name.split(".")[-2]
        shapes = {
            "rowwise-adagrad": {f"{table}.momentum1": weight.shape[:1]},
            "adagrad": {f"{table}.momentum1": weight.shape},
            "sgd": {},
        }[optimizer]
        assert {key: value.shape for key, value in states.items()} == shapes


@pytest.mark.parametrize("ranks", [1, 2])
def test_plain_torch_loads_the_file_into_torchrec(
    saved: tuple[Path, str, list[Shards]], pool: Pool, ranks: int, tmp_path: Path
) -> None:
    url, optimizer, held = saved
    path = export(url, tmp_path / "step.pt", "torch")
    loaded = pool.run("load_file", ranks=ranks, path=str(path), optimizer=optimizer, layout=0)
    assert check_restored(held, loaded) > 7_000


@pytest.mark.parametrize("ranks", [1, 2])
def test_dcp_loads_the_folder_into_torchrec(
    saved: tuple[Path, str, list[Shards]], pool: Pool, ranks: int, tmp_path: Path
) -> None:
    """DCP cuts whole tensors by itself, but for one number a row of a table cut by columns, of
    which TorchRec has one for each cut."""
    url, optimizer, held = saved
    if optimizer != "adagrad":
        pytest.skip("SGD keeps no state; row-wise numbers have another form in TorchRec")
    path = export(url, tmp_path / "step", "dcp")
    loaded = pool.run("load_folder", ranks=ranks, path=str(path), optimizer=optimizer, layout=0)
    assert check_restored(weights_and_fused(held, url), weights_and_fused(loaded, url)) > 7_000


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_an_export_becomes_a_run_again(
    saved: tuple[Path, str, list[Shards]], pool: Pool, kind: str, tmp_path: Path
) -> None:
    """Other ranks, another sharding, another place: what was saved, with its rate."""
    url, optimizer, held = saved
    path = export(url, tmp_path / "export", kind)
    tables = [schema.name for schema in hf.open(url).tables(STEP)]
    hf.import_checkpoint(path, tmp_path / "new", tables=tables)
    dense = hf.open(tmp_path / "new").dense(STEP)
    assert dense["table_state"] == hf.open(url).dense(STEP)["table_state"]
    if kind == "dcp":  # one optimizer, where the run had two
        return
    restored = pool.run(
        "restore", ranks=3, url=str(tmp_path / "new"), optimizer=optimizer, layout=2, step=STEP
    )
    assert check_restored(held, restored) > 7_000
