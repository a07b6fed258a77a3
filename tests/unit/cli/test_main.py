"""The edge: exit codes, one message, no traceback, quick help."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.checkpoint.planning.bases import POLICIES
from holdfast.checkpoint.strategy import STRATEGIES
from holdfast.cli.commands import cluster, train
from holdfast.cli.main import run
from holdfast.kernels import compiling
from holdfast.recsys import PRESETS
from holdfast.recsys.cluster_train import RATES
from holdfast.recsys.train import OPTIMIZERS


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom holdfast.cli.main import run\nassert run(['--help']) == 0\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_failure_is_one_line_on_stderr_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "inspect", str(tmp_path / "none")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("holdfast: no run here. url=")
    assert done.stderr.count("\n") == 1


def test_a_failure_with_json_is_an_object_on_stdout(call, tmp_path: Path) -> None:
    code, data, err = call("verify", tmp_path / "none")
    assert code == data["exit_code"] == 1
    assert data["error"]["type"] == "NotFoundError"
    assert data["error"]["facts"]["url"] == str(tmp_path / "none")
    assert data["error"]["message"] in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["inspect"],
        ["inspect", "x", "--step", "three"],
        ["train", "--model", "gpt"],
        ["train", "--steps", "0"],
        ["restore", "x"],
        ["demo", "--nonsense"],
    ],
)
def test_a_command_written_wrongly_exits_with_2_and_names_the_help(
    arguments: list[str], call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert "--help'" in capsys.readouterr().err
    code, data, _ = call(*arguments)
    assert (code, data["error"]["type"]) == (2, "UsageError")


def test_the_choices_are_the_librarys() -> None:
    assert {item.value for item in train.Preset} == set(PRESETS)
    assert {item.value for item in train.Optimizer} == {*OPTIMIZERS, *RATES}
    assert {item.value for item in train.StrategyName} == {*STRATEGIES, *cluster.STRATEGIES}
    assert {item.value for item in train.BasePolicy} == set(POLICIES)


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"holdfast {holdfast.__version__}\n"


def test_warmup_says_what_was_compiled_and_where_it_is_kept(
    call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr("holdfast.checkpoint.warm.warm_all", lambda: asked.append("checkpoints"))
    monkeypatch.setattr("holdfast.cluster.warm.warm_kernels", lambda: asked.append("servers"))
    monkeypatch.setattr("holdfast.cluster.warm.warm_sum", lambda: asked.append("sums"))
    monkeypatch.setattr(
        "holdfast.kernels.compiling.compiled", lambda: compiling.Compiled(7, 1.5, tmp_path)
    )
    found = {"compiled": 7, "seconds": 1.5, "folder": str(tmp_path)}
    assert call("warmup")[:2] == (0, found)
    assert asked == ["checkpoints"]
    assert call("warmup", "--cluster")[:2] == (0, found)
    assert asked[1:] == ["checkpoints", "servers", "sums"]
