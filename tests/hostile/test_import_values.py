"""Values that no program should save, in every place where one is looked for."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from tests.conftest import SEED
from tests.hostile.import_bombs import TABLE, save, save_pickle
from tests.hostile.mutators.import_check import check_exports, check_import
from tests.hostile.mutators.pickles import NUMBERS, TEXTS, global_, number, text
from tests.hostile.mutators.values import KEYS, VALUES, shared_lists

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of types it calls experimental

TREE: dict[str, Any] = {
    "model": {"e.weight": TABLE, "top.weight": torch.ones(3)},
    "optimizer": {
        "state": {0: {"sum": torch.ones(50, 4), "step": torch.tensor(1.0)}, 1: {"step": 1}},
        "param_groups": [
            {
                "params": [0, 1],
                "param_names": ["e.weight", "top.weight"],
                "lr": 0.1,
                "betas": (1, 2),
            }
        ],
    },
    "parameter_names": {"0": ["e.weight", "top.weight"]},
    "step": 5,
    "hyper_parameters": {"a": [1, 2]},
}
PLACES: list[tuple[Any, ...]] = [
    ("model",), ("model", "e.weight"), ("model", "top.weight"), ("optimizer",),
    ("optimizer", "state"), ("optimizer", "state", 0), ("optimizer", "state", 0, "sum"),
    ("optimizer", "state", 0, "step"), ("optimizer", "state", 1, "step"),
    ("optimizer", "param_groups"), ("optimizer", "param_groups", 0),
    ("optimizer", "param_groups", 0, "params"), ("optimizer", "param_groups", 0, "params", 0),
    ("optimizer", "param_groups", 0, "param_names"),
    ("optimizer", "param_groups", 0, "param_names", 1), ("optimizer", "param_groups", 0, "lr"),
    ("optimizer", "param_groups", 0, "betas"), ("parameter_names",), ("parameter_names", "0"),
    ("step",), ("hyper_parameters",), ("fused_optimizer",), ("fused_optimizer", "state"),
    ("fused_optimizer", "state", "e.weight"),
    ("fused_optimizer", "state", "e.weight", "e.momentum1"),
    ("fused_optimizer", "param_groups"), ("fused_optimizer", "param_groups", 0, "params", 0),
    ("fused_optimizer", "param_groups", 0, "lr"),
]  # fmt: skip


def tree(*, is_fused: bool) -> dict[str, Any]:
    made = copy.deepcopy(TREE)
    if is_fused:
        made["fused_optimizer"] = {
            "state": {"e.weight": {"e.momentum1": torch.ones(50)}},
            "param_groups": [{"params": ["e.weight"], "lr": 0.1}],
        }
        del made["optimizer"]
    return made


def put(made: Any, path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        made = made[part]
    made[path[-1]] = value


@pytest.mark.parametrize("path", PLACES, ids=lambda path: ".".join(map(str, path)))
def test_any_value_in_any_place_is_refused_or_right(path: tuple[Any, ...], tmp_path: Path) -> None:
    draw = random.Random(SEED)
    values = {**VALUES, **{f"number {n}"[:30]: lambda n=n: n for n in draw.sample(NUMBERS, 10)}}
    values |= {f"text {t!r}"[:30]: lambda t=t: t for t in draw.sample(TEXTS, 10)}
    for index, (name, make) in enumerate(values.items()):
        made = tree(is_fused=path[0] == "fused_optimizer")
        put(made, path, make())
        source, url = tmp_path / "a.pt", tmp_path / f"run{index}"
        torch.save(made, source, pickle_protocol=2 if index % 3 else 4)
        result = check_import(source, url)
        if result != "refused" and index % 4 == 0:
            (tmp_path / "out").mkdir(exist_ok=True)
            check_exports(url, tmp_path / "out")
        assert result in ("refused", "right", "unconfirmed"), (name, SEED)


@pytest.mark.parametrize("path", [p for p in PLACES if type(p[-1]) is str and len(p) > 1],
                         ids=lambda path: ".".join(map(str, path)))  # fmt: skip
def test_any_key_in_any_place_is_refused_or_right(path: tuple[Any, ...], tmp_path: Path) -> None:
    for index, key in enumerate((*KEYS, *TEXTS)):
        made = tree(is_fused=path[0] == "fused_optimizer")
        holder = made
        for part in path[:-1]:
            holder = holder[part]
        holder[key] = holder.pop(path[-1])
        torch.save(made, tmp_path / "a.pt")
        check_import(tmp_path / "a.pt", tmp_path / f"run{index}")


@pytest.mark.parametrize("step", [2**56, 2**57, 2**64, 1 << 2000])
def test_step_that_no_run_can_have_is_refused(step: int, tmp_path: Path) -> None:
    save(tmp_path / "a.pt", step=step)
    with pytest.raises(hf.InvalidRequestError, match="--step"):
        hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=["e.weight"])
    assert not (tmp_path / "run").exists()
    for given in (step, -1):
        with pytest.raises(hf.InvalidRequestError, match="step"):
            hf.import_checkpoint(
                tmp_path / "a.pt", tmp_path / "run", tables=["e.weight"], step=given
            )
    hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=["e.weight"], step=7)
    assert hf.open(tmp_path / "run").steps == (7,)


def test_highest_step_is_imported(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", step=2**56 - 1)
    assert check_import(tmp_path / "a.pt", tmp_path / "run") == "right"


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[31m", "\0", "a\nb", "x" * 5000], ids=ascii)
@pytest.mark.parametrize("place", ["model", "state", "group", "parameter"])
def test_names_that_are_no_text_are_refused(name: str, place: str, tmp_path: Path) -> None:
    made = tree(is_fused=False)
    group = made["optimizer"]["param_groups"][0]
    match place:
        case "model":
            made["model"][name] = torch.ones(2)
        case "state":
            made["optimizer"]["state"][0][name] = torch.ones(50, 4)
        case "group":
            group[name] = 1
        case "parameter":
            group["param_names"][1] = name
    torch.save(made, tmp_path / "a.pt")
    with pytest.raises(hf.CorruptDataError, match="name"):
        hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=["e.weight"])


@pytest.mark.parametrize("name", ["größe", "表.weight", "a b", "[/red]", "😀"])
def test_names_of_any_language_are_imported(name: str, tmp_path: Path) -> None:
    save(tmp_path / "a.pt", model={name: torch.ones(2)})
    assert check_import(tmp_path / "a.pt", tmp_path / "run") == "right"
    assert name in hf.open(tmp_path / "run").dense(0)["model"]


def test_what_is_shared_a_little_is_imported(tmp_path: Path) -> None:
    """A list that is named twice is no attack."""
    shared = shared_lists(8)
    group = {"params": [0], "lr": 0.1, "x": shared, "y": shared}
    save(tmp_path / "a.pt", optimizer={"state": {}, "param_groups": [group]})
    assert check_import(tmp_path / "a.pt", tmp_path / "run") == "right"
    dense = hf.open(tmp_path / "run").dense(0)
    assert dense["optimizers"]["0"]["param_groups"][0]["y"] == shared


@pytest.mark.parametrize(
    "made",
    [
        global_("os system") + text("true") + b"\x85R",
        b"}" + global_("torch Size") + b"K\x01s",  # a class as a key
        global_("torch._utils _rebuild_tensor_v2") + b")R",
        global_("torch._utils _rebuild_tensor_v2") + b"}b",
        global_("torch._tensor _rebuild_from_type_v2")
        + (global_("torch._tensor _rebuild_from_type_v2") + b"N)N\x86") + b"N)NtR",
        global_("numpy._core.multiarray scalar") + b")R",
        global_("numpy._core.multiarray _reconstruct") + b")RNb",
        global_("collections OrderedDict") + b"](" + number(5) + b"e\x85R",
        global_("builtins set") + b"](]](ee\x85R",
        global_("torch FloatStorage") + b"Q",
        text("storage") + b"\x85Q",
        b"]]b", b"N)R", b")N\x81", b"(((((", b"\x85\x85", b"0" * 50, b"u", b"s", b"e", b"t", b"Q",
    ],
    ids=lambda made: repr(made)[:40],
)  # fmt: skip
def test_pickles_that_call_what_they_should_not_are_refused(made: bytes, tmp_path: Path) -> None:
    save_pickle(tmp_path / "a.pt", made)
    with pytest.raises(hf.HoldfastError):
        hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=["e.weight"])
    assert not (tmp_path / "run").exists()
