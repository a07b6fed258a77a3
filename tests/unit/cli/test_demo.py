"""The demo with real processes: killed, resumed, told; and no child left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from holdfast import events
from holdfast.cli.follow import Follower

COMMAND = [sys.executable, "-m", "holdfast.cli.main", "demo", "--json", "--every", "20"]
COMMAND += ["--part", "checkpoints"]
TINY = ["--rows", "3000", "--batch-size", "64", "--steps", "200", "--no-compare"]


def test_a_killed_training_resumes_and_finishes(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, *TINY, "--folder", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    story = json.loads(done.stdout)
    kill = story["kill"]
    assert story["steps"] == 200
    assert 0 < kill["resumed_from"] < kill["step"] < 200
    assert kill["resumed_from"] % 20 == 0
    assert kill["lost_steps"] == kill["step"] - kill["resumed_from"]
    assert min(kill["lost_s"], kill["down_s"], kill["load_s"]) > 0
    assert story["sound"] is True
    assert 0.5 < story["auc"] < story["best_auc"]
    assert story["bytes"] < story["full_bytes"]
    assert Path(story["picture"]).read_bytes().startswith(b"\x89PNG")
    assert "SIGKILL" in done.stderr
    assert "resumed from step" in done.stderr


def test_a_demo_that_is_ended_ends_its_child(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [*COMMAND, *TINY, "--steps", "100000", "--folder", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while demo.poll() is None and not list(tmp_path.glob("demo-*/run/catalog/*")):
            time.sleep(0.05)
        children = _children(demo.pid)
        assert len(children) == 1
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 143
    finally:
        demo.kill()
        demo.wait()
    assert not Path(f"/proc/{children[0]}").exists()


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def test_too_few_steps_are_refused(call, tmp_path: Path) -> None:
    code, data, _ = call("demo", "--steps", 10, "--every", 10, "--folder", tmp_path)
    assert code == 1
    assert "too few steps" in data["error"]["message"]
    assert not list(tmp_path.iterdir())


def test_following_leaves_out_what_a_kill_tore(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = Follower(path)
    assert follower.read() == []
    first = events.SaveFailed(step=1, error="a", time=1.0)
    second = events.SaveFailed(step=2, error="b", time=2.0)
    whole = events.to_json(first)
    path.write_text(whole + "\n" + whole[:25])
    assert follower.read() == [first]
    assert follower.read() == []
    with path.open("a") as file:
        file.write(events.to_json(second) + "\n")
    assert follower.read() == [second]
