"""``holdfast train --metrics-port --tensorboard``: a running training is measured."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.unit.cli.conftest import SMALL
from tests.unit.metrics.exposition import Family, parse


def scrape(url: str) -> dict[str, Family]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return parse(answer.read().decode())


def test_running_training_is_scraped_and_drawn(tmp_path: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    command = [sys.executable, "-m", "holdfast.cli.main", "train", "--url", str(tmp_path / "run"),
               "--steps", "5000", "--metrics-port", "0", "--tensorboard", str(tmp_path / "tb"),
               *SMALL]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                          text=True) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("metrics: http://127.0.0.1:"), line
            url = line.removeprefix("metrics: ").strip()
            deadline = time.monotonic() + 120
            while True:
                found = scrape(url)
                saved = found.get("holdfast_checkpoints_total")
                if saved is not None and "holdfast_train_loss" in found:
                    break
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
            assert sum(saved.samples.values()) >= 1
            assert found["holdfast_run_tables"].samples["holdfast_run_tables", ()] == 26
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 128 + 15
    read = loading.EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    assert {"holdfast/train_loss", "holdfast/checkpoint_bytes_total"} <= set(read.Tags()["scalars"])


def test_host_without_a_port_is_refused(call, tmp_path: Path) -> None:
    code, facts, _ = call("train", "--url", tmp_path / "run", "--metrics-host", "0.0.0.0")
    assert (code, facts["error"]["type"]) == (1, "InvalidRequestError")
    assert not (tmp_path / "run").exists()
