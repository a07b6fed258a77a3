"""A training process that is killed again and again; run by test_sigkill.py as its own program.

    python -m tests.crash.killed FOLDER KILLS SEED [grid]

The parent imports everything once, starts no threads, and forks a child for every life. A child
resumes, compares all it restored with what an earlier life wrote down before saving, reports, and
trains on, saving at every step, until it is killed. With a grid, extraction runs beside the
training, and what earlier lives left undone is worked off first.

Half of the lives are killed by the parent, at a random moment. The others kill themselves at a
moment that is chosen before they begin (death.py), so that the moments that matter most, in
mid-save and between a save and the end of its round, happen however busy the machine is.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import holdfast as hf
from holdfast.checkpoint.grid.round_plan import plan_round
from holdfast.storage import open_storage
from tests.conftest import TinyModel, fingerprint, make_optimizers, train_steps
from tests.crash.death import Death, DyingStorage, Moment, choose_death

ROWS = 1500
PATIENCE_S = 120.0

# How lives end, in turn; None is killed by the parent.
TURNS = (None, Moment.WRITE, None, Moment.SAVED, None, Moment.CALL, None, Moment.COMMIT, None,
         Moment.SAVED)  # fmt: skip
GRID_TURNS = (None, Moment.BUNDLE, None, Moment.ROUND, None, Moment.CALL, None, Moment.BUNDLE,
              Moment.COMMIT, Moment.SAVED)  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class World:
    """What all lives share."""

    folder: Path
    has_grid: bool

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def oracle(self) -> Path:
        return self.folder / "oracle"


def live(world: World, tell: int, *, is_last: bool, death: Death | None) -> None:
    """One life: check what is there, say so, train until killed."""
    run, oracle = world.run, world.oracle
    known = read_oracle(oracle)
    torch.manual_seed(3 if not known else len(known) + 1000)
    model = TinyModel(rows=ROWS)
    optimizers = make_optimizers(model, "adagrad")
    torch.manual_seed(99)
    storage = DyingStorage(open_storage(str(run)), death)
    settings = settings_of(has_grid=world.has_grid)
    ck = hf.Checkpointer(storage, model=model, optimizer=optimizers, every=1, threads=1, **settings)
    durable = ck.all_steps()[-1] if ck.all_steps() else None
    if durable is None:
        # Nothing was committed: this life is the first again.
        torch.manual_seed(3)
        fresh = TinyModel(rows=ROWS)
        model.load_state_dict(fresh.state_dict())
        torch.manual_seed(99)
    else:
        opened = hf.open(str(run))
        assert opened.steps == ck.all_steps()
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
    storage.begin_training(start)
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


def warm_up(world: World) -> None:
    """Load every kernel before the first fork, so that lives start quickly; leaves no thread."""
    folder = world.folder / "warm"
    model = TinyModel(rows=ROWS)
    optimizers = make_optimizers(model, "adagrad")
    storage = open_storage(str(folder))
    settings = settings_of(has_grid=world.has_grid)
    with hf.Checkpointer(storage, model=model, optimizer=optimizers, **settings) as ck:
        ck.save().result()
        for ids in ([1, 2, 5, 900], [1, 2, 7]):
            ck.step()
            ck.mark("users.weight", ids)
            ck.save().result()
            ck.wait()
        ck.resume()
    hf.open(str(folder)).read(1, "users.weight")
    hf.verify(storage)


@dataclass(frozen=True, slots=True)
class Life:
    """A child, and the pipe on which it reports; the pipe ends with the child."""

    child: int
    ear: int

    @classmethod
    def start(cls, world: World, *, is_last: bool = False, death: Death | None = None) -> Life:
        """Fork it."""
        ear, tell = os.pipe()
        child = os.fork()
        if child:
            os.close(tell)
            return cls(child, ear)
        try:
            os.close(ear)
            live(world, tell, is_last=is_last, death=death)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def hear(self) -> int | None:
        """The step at which it resumed; none if it ended before."""
        ready, _, _ = select.select([self.ear], [], [], PATIENCE_S)
        if not ready:
            raise SystemExit("a life neither got ahead nor ended")
        data = os.read(self.ear, 64)
        return int(data) if data else None

    def end(self) -> int:
        """Wait for its end: how it ended."""
        ready, _, _ = select.select([self.ear], [], [], PATIENCE_S)
        if not ready:
            os.kill(self.child, signal.SIGKILL)
            raise SystemExit("a life outlived the moment of its death")
        _, status = os.waitpid(self.child, 0)
        os.close(self.ear)
        return status


def has_leftovers(run: Path) -> bool:
    """Whether the last life was killed in the middle of something."""
    unfinished = run / ".tmp"
    return unfinished.exists() and any(unfinished.iterdir())


def has_waiting(run: Path) -> bool:
    """Whether the last life was killed before its increments were worked off."""
    try:
        return plan_round(hf.open(run).catalog) is not None
    except hf.NotFoundError:
        return False


@dataclass
class Seen:
    """What happened in all lives."""

    kills: int = 0
    chosen: int = 0  # killed themselves at the moment they were told
    checks: int = 0  # compared all they restored
    leftovers: int = 0  # left an unfinished object
    waiting: int = 0  # left an increment without its round
    resumed: set[int] = field(default_factory=set)
    rollup: int = 0  # no life may resume before this step

    def note_resumed(self, start: int | None) -> None:
        """A life compared all it restored; nothing committed may be gone."""
        if start is None:
            return
        if start < self.rollup:
            raise SystemExit(f"a life resumed at {start}, though {self.rollup} was committed")
        self.rollup = start
        self.checks += 1
        self.resumed.add(start)

    def note_death(self, world: World, death: Death | None) -> None:
        """A life ended; one that chose when, must have left what that moment leaves."""
        left, waits = has_leftovers(world.run), has_waiting(world.run)
        if death is not None:
            self.chosen += 1
            self.rollup += death.leaves_progress
            if (death.leaves_unfinished and not left) or (death.leaves_waiting and not waits):
                raise SystemExit(f"{death} did not leave what it should: {left} {waits}")
        self.kills += 1
        self.leftovers += left
        self.waiting += waits


def end_life(world: World, seen: Seen, death: Death | None, chance: random.Random) -> None:
    """One life and its death."""
    life = Life.start(world, death=death)
    # Of those that the parent kills, one in five is killed whenever, be it while it restores.
    if death is not None or chance.random() < 0.8:
        seen.note_resumed(start := life.hear())
        if start is None and (death is None or death.moment is not Moment.CALL):
            raise SystemExit("a life ended before its check was over")
    if death is None:
        time.sleep(chance.random() ** 2 * 0.25)
        os.kill(life.child, signal.SIGKILL)
    status = life.end()
    if not os.WIFSIGNALED(status):
        raise SystemExit("a life ended by itself")
    seen.note_death(world, death)


def main(folder: str, kills: int, seed: int, *, has_grid: bool) -> None:
    """Kill so many lives and print what was seen as JSON."""
    world, seen, chance = World(Path(folder), has_grid), Seen(), random.Random(seed)
    warm_up(world)
    turns = GRID_TURNS if has_grid else TURNS
    for number in range(kills):
        moment = turns[number % len(turns)]
        death = None if moment is None else choose_death(moment, chance)
        end_life(world, seen, death, chance)
    last = Life.start(world, is_last=True)
    seen.note_resumed(last.hear())
    if last.end():
        raise SystemExit("the last life failed")
    print(json.dumps({"kills": seen.kills, "chosen": seen.chosen, "checks": seen.checks,
                      "leftovers": seen.leftovers, "waiting": seen.waiting,
                      "steps": len(seen.resumed)}))  # fmt: skip


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # torch's own, about sparse tensors
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), has_grid=sys.argv[4:] == ["grid"])
