"""SIGKILL on both sides of S3: of the process that trains, and of the server it saves to.

HOLDFAST_S3_KILLS (6) is how often each is killed; 100 takes some minutes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.storage import open_storage
from tests.conftest import fingerprint
from tests.crash.story import Plot, assert_every_kept_step_is_exact, assert_recovers, oracle, train
from tests.s3servers import BUCKET, Rclone, Server

pytestmark = pytest.mark.soak

SEED = 20240614
KILLS = int(os.environ.get("HOLDFAST_S3_KILLS", "6"))
PART_BYTES = 1000
ROOT = Path(__file__).parents[2]
PLOT = Plot("adagrad", "consecutive", base_later="consecutive", keep=3, last_step=100)


@pytest.mark.parametrize("kind", ["rclone", "moto"])
def test_training_killed_again_and_again_restores_its_last_commit(
    request: pytest.FixtureRequest, kind: str
) -> None:
    server: Server = request.getfixturevalue(kind)
    root = f"killed/{uuid.uuid4().hex}"
    options = json.dumps(server.options(part_bytes=PART_BYTES))
    where = [f"s3://{BUCKET}/{root}", options]
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.killed_on_s3", *where, str(KILLS), str(SEED)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=160 + 20 * KILLS,
    )
    assert done.returncode == 0, f"seed {SEED}: {done.stderr[-3000:]}"
    seen = json.loads(done.stdout)
    assert seen["kills"] == KILLS
    assert seen["resumed"] == sorted(seen["resumed"])
    # Otherwise the test would prove little: lives must get somewhere.
    assert len(set(seen["resumed"])) > KILLS // 2
    assert server.uploads(root) == [], "unfinished uploads of dead processes stayed"


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Rclone]:
    """A server of its own, to be killed."""
    server = Rclone(tmp_path)
    server.start()
    yield server
    server.kill()


def test_saves_survive_a_server_that_is_killed_and_comes_back(doomed: Rclone) -> None:
    """By sending again what was not answered; or a save fails, and the next makes up for it.

    Parts of an unfinished upload are lost with the server: such a save must fail.
    """
    options = doomed.options(part_bytes=20_000, tries=30, retry_s_max=0.3)
    storage = open_storage(f"s3://{BUCKET}/run", **options)
    chance = random.Random(SEED)
    is_over = threading.Event()
    killed = 0

    def kill_now_and_then() -> None:
        nonlocal killed
        while killed < KILLS:
            time.sleep(chance.random() * 0.5)
            doomed.kill()
            time.sleep(chance.random() * 0.3)
            doomed.start()
            killed += 1
        is_over.set()

    model = PLOT.build()
    torch.manual_seed(99)
    failed: list[str] = []
    durable: list[int] = []
    with PLOT.checkpointer(storage, model) as ck:
        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        step = 0
        while not is_over.is_set() and step < 2 * PLOT.last_step - 2:
            train(model, range(step, step + 1), ck.step)
            step += 1
            try:
                durable.append(PLOT.save(ck))
            except hf.UnavailableError as error:
                failed.append(str(error))
        killer.join()
        train(model, range(step, step + 1), ck.step)
        durable.append(PLOT.save(ck))
        assert fingerprint(*model) == oracle(PLOT)[step + 1]
    assert killed == KILLS
    assert len(durable) > len(failed), f"seed {SEED}: {failed}"
    assert_every_kept_step_is_exact(storage, PLOT)
    assert_recovers(storage, PLOT, durable[-1])


def test_a_save_to_a_server_that_stays_away_fails_and_the_last_commit_is_there(
    doomed: Rclone,
) -> None:
    options = doomed.options(part_bytes=PART_BYTES, tries=3, retry_s=0.01)
    storage = open_storage(f"s3://{BUCKET}/run", **options)
    model = PLOT.build()
    torch.manual_seed(99)
    with PLOT.checkpointer(storage, model) as ck:
        train(model, range(1), ck.step)
        PLOT.save(ck)
        doomed.kill()
        train(model, range(1, 2), ck.step)
        with pytest.raises(hf.UnavailableError):
            ck.save().result()
        doomed.start()
        assert assert_every_kept_step_is_exact(storage, PLOT) == (1,)
        assert hf.verify(storage).is_sound
        train(model, range(2, 3), ck.step)
        assert PLOT.save(ck) == 3
    assert_recovers(storage, PLOT, 3)
