"""Plain DDP: tables and network on every rank. Killed and restarted, it ends as if undisturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import holdfast as hf
from tests.ranks import ddp
from tests.ranks.pool import Pool

SEED, LIVES = 11, 2


def test_killed_and_restarted_it_ends_as_if_undisturbed(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run("train_ddp", 2, url=str(tmp_path / "undisturbed"))
    for name, values in whole[0].items():
        assert np.array_equal(values, whole[1][name]), name
    print(f"seed {SEED}")
    url, out = tmp_path / "killed", tmp_path / "out"
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         f"--max-restarts={LIVES + 1}", "--monitor-interval=0.2", ddp.__file__, str(url), str(out),
         str(SEED), str(LIVES)],
        # Else torch 2.13 keeps the store, and its own gloo groups meet the dead.
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
             "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        with np.load(out / f"rank{rank}.npz") as found:
            assert set(found) == set(whole[rank])
            for name, values in whole[rank].items():
                assert np.array_equal(found[name], values), (rank, name)
    assert hf.verify(url).is_sound
    run = hf.open(url)
    assert run.catalog.restores >= 1
    # Rows changed by the other rank's batches alone are in deltas too.
    last = run.steps[-1]
    assert run.catalog.checkpoint(last).kind == "delta"
    assert np.array_equal(run.read(last, "items.weight").weight, whole[0]["model.items.weight"])
    assert len({entry.extent.object for entry in run.catalog.alive(last)}) > 1
