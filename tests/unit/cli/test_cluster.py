"""Training on a cluster from the command line: kills, what is told, refusals, no process left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast
from holdfast import events
from holdfast.cli.follow import Follower
from holdfast.cluster import rayengine
from holdfast.report.cluster.training import split_runs, summarize

SMALL = ["train", "--preset", "tiny", "--rows", "1500", "--batch-size", "64", "--workers", "2"]
SMALL += ["--servers", "3", "--silence", "0"]


def test_a_server_is_killed_training_goes_on_and_all_is_told(call, tmp_path: Path) -> None:
    code, data, err = call(
        *SMALL, "--strategy", "ecrm", "--steps", 30, "--kill", "1@0.4", "--audit",
        "--events", tmp_path / "e.jsonl", "--png", tmp_path / "p.png",
    )  # fmt: skip
    assert code == 0, data
    assert data["setup"]["strategy"] == "ecrm"
    assert (data["setup"]["data"], data["setup"]["parity"], data["setup"]["code"]) == (2, 1, "xor")
    (failure,) = data["failures"]
    assert (failure["server"], failure["how"]) == (1, "SIGKILL")
    assert 0 < failure["replaced_s"] < failure["rows_s"] <= failure["whole_s"]
    assert failure["rows"] > 400
    assert data["pushes_lost"] >= 0
    assert data["audit"]["wrong"] == 0
    assert data["audit"]["stripes"] > 700
    assert 0.5 < data["auc"] < data["best_auc"]
    assert data["cpu_s"] > data["worker_cpu_s"] > 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    happened = list(events.read_events(tmp_path / "e.jsonl"))
    progress = [e for e in happened if isinstance(e, events.ClusterProgress)]
    assert (progress[-1].batches, progress[-1].samples) == (30, 30 * 64)
    assert sum(isinstance(e, events.ServerReplaced) for e in happened) == 1
    assert "server 1" in err
    struck = [e for e in happened if isinstance(e, events.ServerStruck)]
    assert [(e.server, e.signal) for e in struck] == [(1, "SIGKILL")]
    (run,) = split_runs(happened)
    told = json.loads(json.dumps(summarize(run).to_dict()))
    assert told == {name: data[name] for name in told}  # the file alone says the same


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("full", ["--codec", "asym8"]), ("cpr", []), ("ecrec", ["--second-layer", "cpr"])],
)
def test_what_cannot_be_decoded_comes_from_the_last_checkpoint(
    call, tmp_path: Path, strategy: str, options: list[str]
) -> None:
    kills = ["--kill", "1@0.6", "--kill", "2@0.6"]
    code, data, _ = call(
        *SMALL, "--strategy", strategy, *options, "--steps", 50, "--every", 10, *kills, "--audit",
        "--url", tmp_path / "run",
    )  # fmt: skip
    assert code == 0, data
    assert sorted(failure["server"] for failure in data["failures"]) == [1, 2]
    assert all(failure["is_loaded"] for failure in data["failures"])
    assert all(failure["replaced_s"] > 0 for failure in data["failures"])
    assert all(failure["whole_s"] is not None for failure in data["failures"])
    layer = data["layer"]
    assert layer["checkpoints"] >= 1  # on a busy machine a save may outlast the next interval
    assert layer["restore_bytes"] > 0
    if strategy == "full":
        assert (layer["recoveries"], layer["pls"]) == (0, 0)
        assert layer["restores"] >= 1
    else:
        assert (layer["restores"], layer["batches_again"]) == (0, 0)
        assert layer["recoveries"] >= 1
        assert layer["pls"] > 0
    assert data["auc"] > 0.5
    assert data["sound"] is True
    run = holdfast.open(tmp_path / "run")
    assert 0 < run.steps[-1] <= 50  # which saves a busy machine finishes is left to it
    assert holdfast.verify(tmp_path / "run").is_sound
    code, data, _ = call(*SMALL, "--strategy", strategy, *options, "--url", tmp_path / "run")
    assert code == 1
    assert "checkpoints here already" in data["error"]["message"]


@pytest.mark.xdist_group("ray")
def test_a_cluster_of_ray_processes_trains_and_loses_a_server(call) -> None:
    code, data, _ = call(
        *SMALL, "--engine", "ray", "--strategy", "ecrec", "--steps", 60, "--kill", "1@0.4",
        "--audit",
    )  # fmt: skip
    assert code == 0, data
    (failure,) = data["failures"]
    assert (failure["server"], failure["how"]) == (1, "SIGKILL")
    assert failure["whole_s"] is not None
    assert data["setup"]["engine"] == "ray"
    assert data["audit"]["wrong"] == 0
    assert data["audit"]["stripes"] > 700
    assert data["worker_cpu_s"] > 0
    assert data["cpu_s"] is None  # Ray's processes are not ours


@pytest.mark.xdist_group("ray")
def test_a_ray_that_does_not_start_is_tried_again_and_then_told(call, monkeypatch) -> None:
    with rayengine._environment(rayengine._LOCAL_ENVIRONMENT):
        import ray
    tries = []

    def init(**given: object) -> None:
        tries.append(given["address"])
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    code, data, _ = call(*SMALL, "--engine", "ray", "--steps", 3)
    assert (code, data["error"]["type"]) == (1, "UnavailableError")
    assert "timed out" in data["error"]["facts"]["found"]
    assert tries == ["local", "local"]


def test_without_ray_the_error_says_what_to_install(call, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, data, _ = call(*SMALL, "--engine", "ray", "--steps", 3)
    assert code == 1
    assert "holdfast[cluster]" in data["error"]["message"]


def test_one_server_and_one_worker_train_the_same_twice(call) -> None:
    alone = ["--servers", 1, "--workers", 1, "--strategy", "none", "--steps", 5]
    code, data, _ = call(*SMALL, *alone, "--compare")
    assert code == 0, data
    assert data["failures"] == data["without_failures"]["failures"] == []
    assert data["without_failures"]["auc"] == data["auc"]  # nobody else pushes in between
    assert data["audit"] is None


def test_without_any_code_a_kill_ends_the_run_and_says_what_is_lost(call) -> None:
    code, data, _ = call(*SMALL, "--strategy", "none", "--steps", 30, "--kill", "0@0.3")
    assert code == 1
    assert data["error"]["type"] == "DataLossError"
    assert data["error"]["facts"]["servers"] == [0]


def test_an_interrupted_command_leaves_no_process_behind(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    command = [sys.executable, "-m", "holdfast.cli.main", *SMALL, "--steps", "100000"]
    with subprocess.Popen(
        [*command, "--events", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as cluster:
        follower, happened = Follower(path), []
        try:
            while cluster.poll() is None:
                happened += follower.read()
                if any(isinstance(e, events.ClusterProgress) for e in happened):
                    break
                time.sleep(0.05)
            cluster.send_signal(signal.SIGINT)
            assert cluster.wait(60) == 130
        finally:
            cluster.kill()
    started = [
        e.pid for e in happened if isinstance(e, events.ServerStarted | events.WorkerStarted)
    ]
    assert len(started) == 6
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--servers", 1], "one server has no other"),
        (["--data-rows", 3, "--parity", 1], "need a server each"),
        (["--parity", 0], "needs a parity row"),
        (["--kill", "7@0.5"], "no such server"),
        (["--kill", "1@1.5"], "between the first batch and the last"),
        (["--kill", "1@0"], "between the first batch and the last"),
        (["--stop", "one"], "not a server and a share"),
        (["--strategy", "none", "--parity", 1], "nothing is coded"),
        (["--strategy", "none", "--hot-rows", 9], "only rows of coded stripes"),
        (["--strategy", "ecrm", "--code", "sum", "--hot-rows", 9], "only rows of coded stripes"),
        (["--data", "criteo:x"], "synthetic clicks"),
        (["--rows", 5], "too few rows"),
        (["--url", "runs/x"], "nothing is saved"),
        (["--keep", 3, "--codec", "fp32"], "nothing is saved"),
        (["--threads", 3, "--lose", "1@3"], "mean nothing on a cluster"),
        (["--strategy", "full", "--parity", 1], "nothing is coded"),
        (["--strategy", "full", "--second-layer", "cpr"], "is a layer of checkpoints itself"),
        (["--strategy", "none", "--second-layer", "cpr"], "checkpoints alone are a strategy"),
        (["--engine", "local", "--address", "auto"], "on this machine alone"),
        (["--allow-remote"], "on this machine alone"),
        (["--address", "127.0.0.1:1"], "no Ray cluster answers here"),
        (["--png", "picture.gif"], "a .png or a .svg"),
    ],
)
def test_absurd_settings_are_refused_before_anything_starts(
    call, options: list[object], said: str
) -> None:
    code, data, _ = call(*SMALL, *options)
    assert code == 1
    assert said in data["error"]["message"]


@pytest.mark.parametrize("options", [["--kill", "1@0.5"], ["--audit"], ["--parity", 1]])
def test_a_clusters_options_need_workers(call, options: list[object], tmp_path: Path) -> None:
    code, data, _ = call("train", "--url", tmp_path / "run", *options)
    assert code == 1
    assert data["error"]["facts"]["options"] == [options[0]]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("strategy", ["ecrec", "ecrm", "none"])
def test_a_clusters_strategies_need_workers(call, strategy: str, tmp_path: Path) -> None:
    code, data, _ = call("train", "--url", tmp_path / "run", "--strategy", strategy)
    assert code == 1
    assert "give --servers and --workers" in data["error"]["message"]


def test_the_demo_kills_servers_one_after_the_other_and_checks_every_stripe(
    call, tmp_path: Path
) -> None:
    code, data, _ = call(
        "demo", "--part", "cluster", "--folder", tmp_path, "--rows", 1500, "--batch-size", 64,
        "--steps", 150, "--no-compare",
    )  # fmt: skip
    assert code == 0
    cluster = data["cluster"]
    lost = [failure["server"] for failure in cluster["failures"]]
    assert lost in ([1], [1, 3])  # the second waits until the first is recovered from
    assert (cluster["setup"]["servers"], cluster["setup"]["workers"]) == (5, 2)
    assert cluster["sound"] is True
    assert cluster["audit"]["wrong"] == 0
    assert cluster["without_failures"] is None
    assert Path(cluster["picture"]).exists()
