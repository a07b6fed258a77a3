"""Training from the command line: resumes exactly, refuses another recipe, stops cleanly."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast import events
from holdfast.cli.main import run
from holdfast.recsys.train import Plan, Recipe, choose_skew, evaluate, make_training
from tests.unit.cli.conftest import SMALL


def weights(url: Path, step: int) -> dict[str, np.ndarray]:
    run = hf.open(url)
    tables = {t.name: run.read(step, t.name) for t in run.tables(step)}
    rows = {name: np.hstack([rows.weight, *rows.state.values()]) for name, rows in tables.items()}
    return rows | {name: t.numpy() for name, t in run.dense(step)["model"].items()}


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse-adam"])
def test_resumed_training_equals_uninterrupted_training(
    call, tmp_path: Path, optimizer: str
) -> None:
    options = [*SMALL, "--codec", "fp32", "--optimizer", optimizer]
    code, whole, _ = call("train", "--url", tmp_path / "a", "--steps", 25, *options)
    assert code == 0
    call("train", "--url", tmp_path / "b", "--steps", 13, *options)
    code, resumed, _ = call("train", "--url", tmp_path / "b", "--steps", 25, *options)
    assert code == 0
    assert resumed["resumed_from"] == 13
    assert resumed["auc"] == whole["auc"]
    expected = weights(tmp_path / "a", 25)
    found = weights(tmp_path / "b", 25)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert np.array_equal(values, found[name]), name


def test_another_interval_on_resume_sees_the_same_samples(call, tmp_path: Path) -> None:
    options = ["--codec", "fp32", "--steps", 25]
    call("train", "--url", tmp_path / "a", *SMALL, *options)
    call("train", "--url", tmp_path / "b", *SMALL, "--codec", "fp32", "--steps", 10)
    code, _, _ = call("train", "--url", tmp_path / "b", *SMALL, *options, "--every", 4)
    assert code == 0
    assert hf.open(tmp_path / "b").steps == (10, 12, 16, 20, 24, 25)
    expected, found = weights(tmp_path / "a", 25), weights(tmp_path / "b", 25)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_another_recipe_is_refused_with_both_values(call, trained: Path) -> None:
    code, data, _ = call("train", "--url", trained, *SMALL, "--rows", 3000, "--steps", 40)
    assert code == 1
    facts = data["error"]["facts"]
    assert (facts["started_with"], facts["given"]) == ({"rows": 2000}, {"rows": 3000})


def test_a_run_that_is_complete_is_only_evaluated(call, trained: Path) -> None:
    before = hf.open(trained).steps
    code, data, err = call("train", "--url", trained, *SMALL, "--steps", 35)
    assert code == 0
    assert "already" in err
    assert data["checkpoints"] == []
    assert 0.5 < data["auc"] < data["best_auc"]
    assert hf.open(trained).steps == before == (10, 20, 30, 35)


def test_a_foreign_run_is_refused(call, tmp_path: Path) -> None:
    model = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizer) as ck:
        ck.step()
        ck.save().result()
    code, data, _ = call("train", "--url", tmp_path, *SMALL)
    assert code == 1
    assert "not made by" in data["error"]["message"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--codec", "asym5"], "unknown codec"),
        (["--data", "criteo"], "wrong path"),
        (["--data", "csv:x"], "unknown or mixed data"),
        (["--data", "clicks", "--data", "criteo:x"], "unknown or mixed data"),
        (["--data", "criteo:/does/not/exist"], "no such file"),
        (["--rows", "5"], "too few rows"),
        (["--touched", "0.99"], "too short to touch"),
    ],
)
def test_bad_values_are_refused_and_nothing_is_made(
    call, tmp_path: Path, options: list[str], said: str
) -> None:
    code, data, _ = call("train", "--url", tmp_path / "run", "--preset", "tiny", *options)
    assert code == 1
    assert said in data["error"]["message"]
    assert not (tmp_path / "run").exists()


def test_events_file_tells_the_summary(call, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    _, data, _ = call(
        "train", "--url", tmp_path / "run", "--events", file, *SMALL, "--steps", 20, "--keep", 1
    )
    happened = list(events.read_events(file))
    durable = [e for e in happened if isinstance(e, events.SaveDurable)]
    assert [e.step for e in durable] == [c["step"] for c in data["checkpoints"]] == [10, 20]
    reports = [e for e in happened if isinstance(e, events.TrainProgress)]
    assert [e.step for e in reports] == [*range(1, 21), 20]
    assert reports[-1].auc == data["auc"]
    assert hf.open(tmp_path / "run").steps == (20,)


def criteo_line(number: int) -> str:
    draw = np.random.default_rng(number)
    dense = [str(value) for value in draw.integers(0, 50, 13)]
    codes = [f"{value:x}" for value in draw.integers(0, 30, 26)]
    return "\t".join([str(int(draw.integers(0, 2))), *dense, *codes]) + "\n"


def test_files_resume_exactly_and_hold_every_tenth_batch_out(call, tmp_path: Path) -> None:
    for day in range(2):
        lines = [criteo_line(1000 * day + number) for number in range(130)]
        (tmp_path / f"day_{day}").write_text("".join(lines))
    options = ["--preset", "tiny", "--rows", 400, "--batch-size", 16, "--every", 5]
    options += ["--codec", "fp32", "--data", f"criteo:{tmp_path}"]
    _, whole, _ = call("train", "--url", tmp_path / "a", *options, "--steps", 40)
    call("train", "--url", tmp_path / "b", *options, "--steps", 23)
    code, data, _ = call("train", "--url", tmp_path / "b", *options, "--steps", 40)
    assert code == 0
    assert data["auc"] == whole["auc"] is not None
    expected, found = weights(tmp_path / "a", 40), weights(tmp_path / "b", 40)
    assert all(np.array_equal(expected[name], found[name]) for name in expected)

    recipe = Recipe(preset="tiny", rows=400, batch_size=16, data="criteo")
    files = [tmp_path / "day_0", tmp_path / "day_1"]
    training = make_training(Plan(recipe, hf_skew()), files=files, steps=40)
    batches = iter(training.reader)
    trained_on = {batch.ids.numpy().tobytes() for batch in (next(batches) for _ in range(40))}
    held_out = [batch.ids.numpy().tobytes() for batch in training.heldout()]
    assert len(held_out) == 1
    assert not trained_on & set(held_out)


def hf_skew():
    return choose_skew(Recipe(preset="tiny", rows=400, batch_size=16), interval=5)


def test_evaluate_without_both_classes_is_none(tmp_path: Path) -> None:
    training = make_training(Plan(Recipe(preset="tiny", rows=400), hf_skew()), steps=1)
    assert evaluate(training.model, []) is None


def test_ctrl_c_saves_the_step_and_leaves_the_run_resumable(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    command = [sys.executable, "-m", "holdfast.cli.main", "train", "--url", str(tmp_path / "run")]
    command += [*SMALL, "--every", "50", "--steps", "1000000", "--events", str(file)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while child.poll() is None and not (file.exists() and "save_durable" in file.read_text()):
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130, err
    assert "Traceback" not in err
    last = hf.open(tmp_path / "run").steps[-1]
    assert f"stopped at step {last} of 1000000, which is saved" in " ".join(err.split())


@pytest.mark.parametrize("model", ["dlrm", "deepfm", "pnn"])
def test_every_model_trains_with_a_grid_and_resumes_exactly(
    call, tmp_path: Path, model: str
) -> None:
    options = [*SMALL, "--model", model, "--strategy", "incrcp", "--extract", 0.1]
    options += ["--base-policy", "consecutive", "--every", 5]
    code, whole, err = call("train", "--url", tmp_path / "a", *options, "--steps", 30)
    assert code == 0
    assert whole["extraction"]["rounds"] > 0
    assert whole["extraction"]["failed"] == 0
    assert err.count("extraction up to step") == whole["extraction"]["rounds"]
    catalog = hf.open(tmp_path / "a").catalog
    assert [grid.rollup for grid in catalog.grids] == [5]
    assert any(s.died is not None for s in catalog.segments)
    call("train", "--url", tmp_path / "b", *options, "--steps", 18)
    _, resumed, _ = call("train", "--url", tmp_path / "b", *options, "--steps", 30)
    assert resumed["resumed_from"] == 18
    assert resumed["auc"] == whole["auc"]
    for step in (5, 15, 30):
        expected, found = weights(tmp_path / "a", step), weights(tmp_path / "b", step)
        assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_the_strategys_own_base_policy_and_threshold_are_the_default(call, tmp_path: Path) -> None:
    code, data, _ = call(
        "train", "--url", tmp_path / "run", *SMALL, "--strategy", "incrcp", "--steps", 20
    )
    assert code == 0
    assert {item["codec"] for item in data["checkpoints"]} == {"fp32"}
    assert hf.open(tmp_path / "run").catalog.grids[0].rollup == 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--strategy", "incrcp", "--extract", "1.5"], "share of rows"),
        (["--strategy", "incrcp", "--base-policy", "intermittent"], "made of increments"),
        (["--extract", "0.1"], "made of increments"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(
    call, tmp_path: Path, options: list[str], said: str
) -> None:
    code, data, _ = call("train", "--url", tmp_path / "run", *SMALL, *options)
    assert code == 1
    assert said in data["error"]["message"]
    assert not (tmp_path / "run").exists()


def test_a_server_loses_its_rows_and_training_goes_on(call, tmp_path: Path) -> None:
    code, data, _ = call(
        "train", "--url", tmp_path / "run", "--rows", 2000, "--steps", 30, "--every", 16,
        "--batch-size", 64, "--preset", "tiny", "--strategy", "cpr-mfu", "--servers", 4,
        "--lose", "3@15", "--lose", "1@15", "--lose", "3@25",
        "--base-policy", "consecutive",  # one base; by times measured here there may be another
    )  # fmt: skip
    assert code == 0
    first, second = data["recoveries"]
    # A base at step 2, an eighth of the rows every second step: a round ends at 18.
    assert (first["servers"], first["checkpoint_step"], first["step"]) == ([1, 3], 14, 15)
    assert (second["servers"], second["checkpoint_step"]) == ([3], 24)
    assert first["pls"] == pytest.approx(2 * (15 - 2) / 30 / 4)
    assert data["auc"] > 0.5


@pytest.mark.parametrize(
    ("flags", "words"), [
        (["--lose", "3@5"], "--servers"), (["--servers", "4", "--lose", "4@5"], "0 to 3"),
        (["--servers", "4", "--lose", "three"], "--lose 3@500"),
        (["--servers", "4", "--lose", "3@0"], "--lose 3@500"),
    ],
)  # fmt: skip
def test_servers_that_cannot_fail_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert run(["train", "--url", str(tmp_path / "run"), *flags]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_interval_can_be_a_time(call, tmp_path: Path) -> None:
    options = [*SMALL, "--steps", 6, "--codec", "fp32"]
    code, _, _ = call("train", "--url", tmp_path / "all", *options, "--every", "1ms")
    assert code == 0
    assert hf.open(tmp_path / "all").steps == (1, 2, 3, 4, 5, 6)
    code, _, _ = call("train", "--url", tmp_path / "end", *options, "--every", "2d")
    assert code == 0
    assert hf.open(tmp_path / "end").steps == (6,)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--every", "often"], "or a time"),
        (["--every", "0"], "or a time"),
        (["--every", "90s", "--workers", "1"], "counted in batches"),
    ],
)
def test_what_is_no_interval_is_refused(call, tmp_path: Path, options, error: str) -> None:
    code, data, _ = call("train", "--url", tmp_path / "run", *SMALL, *options)
    assert code != 0
    assert error in data["error"]["message"]
    assert not (tmp_path / "run").exists()
