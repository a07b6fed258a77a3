"""Commands on a run in a bucket: reached by storage options, and what they say is the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import holdfast as hf
from tests.s3servers import BUCKET, Server

CHANGING = ("url", "seconds", "now")


@pytest.fixture
def options_file(moto: Server, tmp_path: Path) -> str:
    path = tmp_path / "options.json"
    path.write_text(json.dumps(moto.options()))
    return f"@{path}"


def test_reading_commands_say_the_same_of_a_bucket_as_of_the_folder(
    call, trained: Path, moto: Server, options_file: str, tmp_path: Path
) -> None:
    for path in trained.rglob("*"):
        if path.is_file():
            moto.put(f"cli/{path.relative_to(trained).as_posix()}", path.read_bytes())
    url = f"s3://{BUCKET}/cli"
    for command in (["inspect"], ["verify"], ["diff", 10, 30]):
        code, near, _ = call(command[0], trained, *command[1:])
        assert code == 0
        inline = json.dumps(moto.options())
        code, far, _ = call(command[0], url, *command[1:], "--storage-options", inline)
        assert code == 0
        same = {name: value for name, value in near.items() if name not in CHANGING}
        assert {name: far[name] for name in same} == same
    more = ["--step", 20, "--storage-options", options_file]
    assert call("restore", trained, "--out", tmp_path / "near", *more[:2])[0] == 0
    assert call("restore", url, "--out", tmp_path / "far", *more)[0] == 0
    near_file, far_file = load_file(tmp_path / "near"), load_file(tmp_path / "far")
    assert near_file.keys() == far_file.keys()
    assert all(np.array_equal(near_file[name], far_file[name]) for name in near_file)


def test_train_saves_to_a_bucket_and_resumes_from_it(call, moto: Server, options_file: str) -> None:
    url = f"s3://{BUCKET}/cli-train"
    command = ["train", "--url", url, "--storage-options", options_file, "--preset", "tiny"]
    command += ["--rows", "2000", "--batch-size", "32", "--every", "4"]
    for steps in (8, 12):
        code, data, _ = call(*command, "--steps", steps)
        assert code == 0 and data["is_complete"]
    run = hf.open(url, storage_options=moto.options())
    assert run.steps == (4, 8, 12)
    assert "catalog" in {name.split("/")[1] for name in moto.everything("cli-train")}


@pytest.mark.parametrize("text", ["hunter2", "[1]", '{"key": "hunter2"', '{"hunter2":' * 9999])
def test_options_that_are_no_json_object_are_refused_and_not_shown(call, text: str) -> None:
    code, data, _ = call("inspect", "s3://bucket/run", "--storage-options", text)
    assert code == 1
    assert "JSON object" in data["error"]["message"] and "hunter2" not in str(data)


def test_a_folder_takes_no_options(call, trained: Path) -> None:
    code, data, _ = call("verify", trained, "--storage-options", '{"key": "x"}')
    assert code == 1 and "takes no options" in data["error"]["message"]
