"""A training process that is killed again and again; run by test_sigkill.py as its own program.

    python -m tests.crash.killed FOLDER KILLS SEED [grid]

The parent imports everything once, starts no threads, and forks a child for every life. A child
resumes, compares all it restored with what an earlier life wrote down before saving, reports, and
trains on, saving at every step, until the parent kills it. With a grid, extraction runs beside the
training, and what earlier lives left undone is worked off first.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

import holdfast as hf
from holdfast.checkpoint.extract import next_grid
from holdfast.storage import open_storage
from tests.conftest import TinyModel, fingerprint, make_optimizers, train_steps

ROWS = 1500
PATIENCE_S = 60.0


def checksum_of(model: TinyModel, optimizers: list[torch.optim.Optimizer]) -> str:
    """A digest of every number of the model and its optimizers."""
    digest = hashlib.sha256()
    for name, value in sorted(fingerprint(model, optimizers).items()):
        digest.update(name.encode() + b"\0" + value)
    return digest.hexdigest()[:32]


def digest_of_users(rows: bytes) -> str:
    """A digest of the larger table, which can be read without a model."""
    return hashlib.sha256(rows).hexdigest()[:32]


def read_oracle(path: Path) -> dict[int, tuple[str, str]]:
    """What the state was after each step; lives that repeat a step must agree."""
    known: dict[int, tuple[str, str]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            step, digest, users = line.split()
            found = known.setdefault(int(step), (digest, users))
            assert found == (digest, users), f"step {step} differs on repeat"
    return known


def settings_of(*, has_grid: bool) -> dict[str, Any]:
    """How the run is saved."""
    if has_grid:
        return {"strategy": "incrcp", "extract": 0.1, "keep": hf.Keep(last=3, every=5)}
    return {"strategy": hf.Strategy("mine", base="intermittent", codec="fp32"), "keep": 2}


def live(run: Path, oracle: Path, tell: int, *, is_last: bool, has_grid: bool) -> None:
    """One life: check what is there, say so, train until killed."""
    known = read_oracle(oracle)
    torch.manual_seed(3 if not known else len(known) + 1000)
    model = TinyModel(rows=ROWS)
    optimizers = make_optimizers(model, "adagrad")
    torch.manual_seed(99)
    storage = open_storage(str(run))
    settings = settings_of(has_grid=has_grid)
    ck = hf.Checkpointer(storage, model=model, optimizer=optimizers, every=1, threads=1, **settings)
    durable = ck.steps[-1] if ck.steps else None
    if durable is None:
        # Nothing was committed: this life is the first again.
        torch.manual_seed(3)
        fresh = TinyModel(rows=ROWS)
        model.load_state_dict(fresh.state_dict())
        torch.manual_seed(99)
    else:
        opened = hf.open(str(run))
        assert opened.steps == ck.steps
        for step in opened.steps:
            users = opened.read(step, "users.weight").weight.tobytes()
            assert digest_of_users(users) == known[step][1], f"step {step} is not what was saved"
    start = ck.resume()
    ck.wait()
    assert start == (durable or 0)
    if durable is not None:
        assert checksum_of(model, optimizers) == known[start][0], (
            f"step {start} is not what was saved"
        )
        named = {name for name, _ in hf.open(str(run)).catalog.objects}
        assert {item.name for item in storage.list("objects/")} == named
        assert not list((run / ".tmp").iterdir())
    os.write(tell, f"{start}\n".encode())
    if is_last:
        assert hf.verify(storage).is_sound
        return
    out = os.open(oracle, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def after() -> None:
        users = digest_of_users(model.users.weight.detach().numpy().tobytes())
        line = f"{ck.current_step + 1} {checksum_of(model, optimizers)} {users}\n"
        os.write(out, line.encode())
        os.fsync(out)
        ck.step()

    train_steps(model, optimizers, range(start, 1 << 30), rows=ROWS, after=after)


def warm_up(folder: Path, *, has_grid: bool) -> None:
    """Load every kernel before the first fork, so that lives start quickly; leaves no thread."""
    model = TinyModel(rows=ROWS)
    optimizers = make_optimizers(model, "adagrad")
    storage = open_storage(str(folder))
    settings = settings_of(has_grid=has_grid)
    with hf.Checkpointer(storage, model=model, optimizer=optimizers, **settings) as ck:
        ck.save().durable()
        for ids in ([1, 2, 5, 900], [1, 2, 7]):
            ck.step()
            ck.mark("users.weight", ids)
            ck.save().durable()
            ck.wait()
        ck.resume()
    hf.open(str(folder)).read(1, "users.weight")
    hf.verify(storage)


def start_life(run: Path, oracle: Path, *, is_last: bool, has_grid: bool) -> tuple[int, int]:
    """Fork a child; its process id and the pipe on which it reports."""
    ear, tell = os.pipe()
    child = os.fork()
    if child:
        os.close(tell)
        return child, ear
    try:
        os.close(ear)
        live(run, oracle, tell, is_last=is_last, has_grid=has_grid)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def hear(ear: int) -> int:
    """The step a child resumed at."""
    ready, _, _ = select.select([ear], [], [], PATIENCE_S)
    data = os.read(ear, 64) if ready else b""
    if not data:
        raise SystemExit("a life ended before its check was over")
    return int(data)


def has_leftovers(run: Path) -> bool:
    """Whether the last life was killed in the middle of something."""
    unfinished = run / ".tmp"
    return unfinished.exists() and any(unfinished.iterdir())


def has_waiting(run: Path) -> bool:
    """Whether the last life was killed before its increments were worked off."""
    try:
        return next_grid(hf.open(run).catalog) is not None
    except hf.NotFoundError:
        return False


def main(folder: str, kills: int, seed: int, *, has_grid: bool) -> None:
    """Kill so many lives and print what was seen as JSON."""
    run, oracle = Path(folder) / "run", Path(folder) / "oracle"
    chance = random.Random(seed)
    warm_up(Path(folder) / "warm", has_grid=has_grid)
    checks, leftovers, waiting, resumed = 0, 0, 0, set()
    for _ in range(kills):
        child, ear = start_life(run, oracle, is_last=False, has_grid=has_grid)
        # One life in five is killed whenever, be it while it restores or takes over.
        if chance.random() < 0.8:
            resumed.add(hear(ear))
            checks += 1
        time.sleep(chance.random() ** 2 * 0.25)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(ear)
        if not os.WIFSIGNALED(status):
            raise SystemExit("a life ended by itself")
        leftovers += has_leftovers(run)
        waiting += has_waiting(run)
    child, ear = start_life(run, oracle, is_last=True, has_grid=has_grid)
    resumed.add(hear(ear))
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit("the last life failed")
    print(json.dumps({"kills": kills, "checks": checks, "leftovers": leftovers,
                      "waiting": waiting, "steps": len(resumed)}))  # fmt: skip


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # torch's own, about sparse tensors
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), has_grid=sys.argv[4:] == ["grid"])
