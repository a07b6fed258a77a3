"""A training process that is sent SIGTERM; run by test_preempted.py as its own program.

    python -m tests.crash.preempted FOLDER LIVES SEED

The parent imports everything once, starts no threads, and forks a child for every life. Some lives
send themselves the signal at a moment that is chosen (MOMENTS), each on a run of its own; then so
many lives on one run are sent it by the parent at random moments. After each life another one
resumes, compares all it restored with a training that was never stopped, and trains on. What was
seen is printed as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import holdfast as hf
from holdfast import events
from holdfast.storage import open_storage
from tests.conftest import TinyModel, make_optimizers, train_steps
from tests.crash.held_up import HeldUpStorage
from tests.crash.killed import checksum_of

ROWS = 1500
STEPS = 12  # of a life that is not stopped
EVERY = 4
AT = 6  # the step in which chosen moments are
STEP_S, STEPS_OF_A_LIFE = 0.005, 80  # at random moments: at least, and about at most
PATIENCE_S = 120.0
TERM = signal.SIGTERM


def term() -> None:
    """Send this process the signal."""
    os.kill(os.getpid(), TERM)


def term_later() -> None:
    """The same in a moment, when the main thread is busy with something else."""
    threading.Timer(0.3, term).start()


def stick() -> None:
    """Wait in C code for ever: no Python handler runs on this thread any more."""
    lock, libc = ctypes.create_string_buffer(256), ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


class Life:
    """A training, and the moments at which something happens to it."""

    def __init__(self, run: Path, tell: int, **settings: Any) -> None:
        torch.manual_seed(3)
        self.model = TinyModel(rows=ROWS)
        self.optimizers = make_optimizers(self.model, "adagrad")
        torch.manual_seed(99)
        self.tell = tell
        self.in_step: Callable[[int], object] = lambda step: None
        self.on_write: Callable[[str], object] = lambda name: None
        self.storage = HeldUpStorage(open_storage(str(run)), lambda name: self.on_write(name))
        log = events.json_lines(run.parent / f"{run.name}.events")
        settings = {"codec": "fp32", "threads": 1, "events": log, "every": EVERY, **settings}
        self.ck = hf.Checkpointer(
            self.storage, model=self.model, optimizer=self.optimizers, **settings
        )

    def train(self, last: int, after: Callable[[int], object] = lambda step: None) -> None:
        """Train up to a step."""

        def step() -> None:
            number = self.ck.current_step + 1
            self.in_step(number)
            os.write(self.tell, f"{number}\n".encode())
            self.ck.step()
            after(number)

        steps = range(self.ck.current_step, last)
        train_steps(self.model, self.optimizers, steps, rows=ROWS, after=step)


# What happens to a life at a chosen moment: given the life, before it trains.


def at_step(act: Callable[[], object]) -> Callable[[Life], None]:
    """Do something in the middle of a step."""

    def arrange(life: Life) -> None:
        life.in_step = lambda step: act() if step == AT else None

    return arrange


def in_save(life: Life) -> None:
    """In the background, while a save writes."""

    def once(name: str) -> None:
        life.on_write = lambda name: None
        term()

    life.on_write = once


def twice(life: Life) -> None:
    """A second signal, while the storage hangs."""

    def first(step: int) -> None:
        if step == AT:
            life.ck.wait()
            term()
            life.storage.hold()
            life.on_write = lambda name: term()

    life.in_step = first


def hanging(life: Life) -> None:
    """The storage does not answer."""

    def first(step: int) -> None:
        if step == AT:
            life.ck.wait()
            life.storage.hold()
            term()

    life.in_step = first


def closing(life: Life) -> None:
    """The last save, of the end of the block, is being written."""

    def once(name: str) -> None:
        if life.ck.current_step == STEPS - 1:
            life.on_write = lambda name: None
            term()

    life.on_write = once


def starting(life: Life) -> None:
    """Before the first step."""
    term()


QUICK = {"preempt_deadline_s": 0.5}
MOMENTS: dict[str, tuple[Callable[[Life], None], dict[str, Any]]] = {
    "step": (at_step(term), {}),
    "save": (in_save, {}),
    "start": (starting, {}),
    "twice": (twice, {}),
    "close": (closing, {"steps": STEPS - 1}),
    "hanging": (hanging, QUICK),
    "endless": (at_step(lambda: (term(), threading.Event().wait())), QUICK),
    "stuck": (at_step(lambda: (term_later(), stick())), QUICK),
    "stuck at start": (lambda life: (term_later(), stick()), {}),
    "stuck twice": (at_step(lambda: (term_later(), term(), stick())), {}),
}


def start(act: Callable[[int], None], errors: Path) -> tuple[int, int]:
    """Fork a life; its process, and the pipe on which it tells its steps."""
    ear, tell = os.pipe()
    errors.write_text("")
    child = os.fork()
    if child:
        os.close(tell)
        return child, ear
    code = 0
    try:
        os.close(ear)
        out = os.open(errors, os.O_WRONLY)
        os.dup2(out, 2)
        act(tell)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        os.write(tell, b"finally\n")
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def hear(ear: int) -> list[str]:
    """All that a life tells, until it ends."""
    data = b""
    while True:
        ready, _, _ = select.select([ear], [], [], PATIENCE_S)
        if not ready:
            raise SystemExit("a life neither got ahead nor ended")
        more = os.read(ear, 4096)
        if not more:
            os.close(ear)
            return data.decode().split()
        data += more


def end(child: int) -> int:
    """How a life ended: its exit code, or minus its signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def live(run: Path, name: str, tell: int) -> None:
    """A life with a chosen moment."""
    arrange, settings = MOMENTS[name]
    steps = settings.get("steps", STEPS)
    settings = {key: value for key, value in settings.items() if key != "steps"}
    life = Life(run, tell, **settings)
    with life.ck as ck:
        ck.resume()
        arrange(life)
        life.train(steps)


def live_on(run: Path, oracle: list[str], tell: int, *, last: int) -> None:
    """Resume, compare, train on; again and again until stopped if ``last`` is far."""
    life = Life(run, tell)
    life.in_step = lambda step: time.sleep(STEP_S)
    with life.ck as ck:
        first = ck.resume()
        assert checksum_of(life.model, life.optimizers) == oracle[first], f"step {first} differs"
        os.write(tell, f"resumed {first}\n".encode())

        def check(step: int) -> None:
            assert checksum_of(life.model, life.optimizers) == oracle[step], f"step {step} differs"

        life.train(last, after=check)


def train_oracle(steps: int) -> list[str]:
    """What the state is after each step of a training that is never stopped."""
    torch.manual_seed(3)
    model = TinyModel(rows=ROWS)
    optimizers = make_optimizers(model, "adagrad")
    torch.manual_seed(99)
    found = [checksum_of(model, optimizers)]
    after = lambda: found.append(checksum_of(model, optimizers))  # noqa: E731
    train_steps(model, optimizers, range(steps), rows=ROWS, after=after)
    return found


def saved_steps(run: Path) -> list[int]:
    """What is there."""
    try:
        return list(hf.open(run).steps)
    except hf.NotFoundError:
        return []


def answers(run: Path) -> list[dict[str, Any]]:
    """What was said about notices."""
    file = run.parent / f"{run.name}.events"
    found = events.read_events(file) if file.exists() else ()
    return [
        {"step": e.step, "is_saved": e.is_saved, "reason": e.reason}
        for e in found
        if isinstance(e, events.Preempted)
    ]


def choose_moments(folder: Path, oracle: list[str]) -> dict[str, Any]:
    """One life for each chosen moment, and one after it."""
    seen = {}
    for number, name in enumerate(MOMENTS):
        run, errors = folder / f"run{number}", folder / f"err{number}"
        child, ear = start(lambda tell, name=name, run=run: live(run, name, tell), errors)  # type: ignore[misc]
        told = hear(ear)
        facts = {
            "code": end(child),
            "told": told,
            "steps": saved_steps(run),
            "answers": answers(run),
            "stderr": errors.read_text(),
        }
        child, ear = start(lambda tell, run=run: live_on(run, oracle, tell, last=STEPS), errors)  # type: ignore[misc]
        facts["later"] = hear(ear)
        facts["later_code"] = end(child)
        facts["later_stderr"] = errors.read_text()
        seen[name] = facts
    return seen


def send_at_random(folder: Path, lives: int, chance: random.Random, oracle: list[str]) -> list[Any]:
    """Lives on one run that are sent the signal at random moments."""
    seen: list[Any] = []
    runs, errors = 0, folder / "errors"
    for _ in range(lives):
        # However fast the machine is, no life comes to the end by itself.
        if seen and len(oracle) - max(seen[-1]["steps"], default=0) < 2 * STEPS_OF_A_LIFE:
            runs += 1
        run = folder / f"random{runs}"
        child, ear = start(partial(live_on, run, oracle, last=len(oracle) - 1), errors)
        time.sleep(chance.random() ** 2 * STEPS_OF_A_LIFE * STEP_S)
        os.kill(child, TERM)
        told = hear(ear)
        seen.append({"run": runs, "code": end(child), "told": told, "steps": saved_steps(run),
                     "stderr": errors.read_text()})  # fmt: skip
    return seen


def main(folder: Path, lives: int, seed: int) -> None:
    """Print what was seen as JSON."""
    oracle = train_oracle(400)
    # Every kernel is loaded before the first fork, so that lives start quickly; no thread is left.
    warm = Life(folder / "warm", os.open(os.devnull, os.O_WRONLY))
    with warm.ck as ck:
        warm.train(EVERY + 1)
        ck.wait()
        ck.resume()
    assert threading.active_count() == 1
    seen = {
        "chosen": choose_moments(folder, oracle),
        "random": send_at_random(folder, lives, random.Random(seed), oracle),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # torch's own, about sparse tensors
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
