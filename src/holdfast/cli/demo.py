"""``holdfast demo``: train, kill the process half-way, resume, and show what that cost.

    child: holdfast train --events FILE          parent: follows FILE, draws, kills, starts again

The child is the ordinary command in its own process and dies by SIGKILL: no handler of ours runs.

Invariant: no child outlives the demo, however it ends.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.output import Json, show, stderr

if TYPE_CHECKING:
    from holdfast import events
    from holdfast.cli.progress import TrainingBar

_POLL_S = 0.02
_GOODBYE_S = 10.0


def demo(
    folder: Annotated[
        Path, typer.Option("--folder", help="Where the demo's own folder is made.")
    ] = Path("runs"),
    steps: Annotated[int, typer.Option(min=4, help="Steps in all.")] = 400,
    rows: Annotated[int, typer.Option(min=104, help="Rows of all tables together.")] = 500_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a step.")] = 1024,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 40,
    codec: Annotated[
        str | None, typer.Option(help="How weights are stored; default: by expected restores.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    has_twin: Annotated[
        bool,
        typer.Option(
            "--compare/--no-compare", help="Train a second time, never killed, and compare."
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Train, kill the process half-way, resume: see what survives and what it costs."""
    from holdfast.errors import InvalidRequestError

    if steps < 2 * every:
        raise InvalidRequestError(
            "too few steps for a checkpoint before the kill and one after it",
            steps=steps,
            every=every,
            todo=f"use --steps {4 * every} or a smaller --every",
        )
    home = _make_home(folder)
    options = ["--steps", steps, "--rows", rows, "--batch-size", batch_size, "--every", every]
    options += ["--seed", seed, *(["--codec", codec] if codec else [])]
    setting = Setting(home, [str(option) for option in options], steps, every)
    _run(setting, has_twin=has_twin, as_json=as_json)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the demo plays and what its children are asked to train."""

    home: Path
    options: list[str]
    steps: int
    every: int

    @property
    def url(self) -> Path:
        """The run that is killed."""
        return self.home / "run"

    @property
    def kill_step(self) -> int:
        """Half-way between two checkpoints, about half-way through.

        >>> Setting(Path(), [], steps=400, every=40).kill_step
        220
        """
        return max(1, self.steps // 2 // self.every) * self.every + max(1, self.every // 2)


def _make_home(folder: Path) -> Path:
    home = folder / time.strftime("demo-%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        try:
            home.mkdir(parents=True)
            return home
        except FileExistsError:
            home = home.with_name(f"{home.name.split('_')[0]}_{number}")
    raise FileExistsError(home)


def _run(setting: Setting, *, has_twin: bool, as_json: bool) -> None:
    from holdfast.cli.follow import Follower
    from holdfast.cli.progress import watch_training
    from holdfast.report import story as stories
    from holdfast.report.timeline import draw_timeline
    from holdfast.report.training import summarize

    began = time.perf_counter()
    console = stderr()
    happened: list[events.Event] = []
    follower = Follower(setting.home / "events.jsonl")
    console.print(
        f"training a DLRM on synthetic clicks; everything goes to {setting.home}",
        markup=False,
        soft_wrap=True,
    )
    with watch_training(console, setting.steps) as watch, _terminable():

        def look() -> None:
            for event in follower.read():
                happened.append(event)
                watch(event)

        killed_at = _train_and_kill(setting, happened, look)
        watch.say(f"SIGKILL at step {_last_step(happened)}; starting the same command again ...")
        facts = _train_to_end(setting, "run", look)
        twin_auc = _train_twin(setting, watch) if has_twin else None
        watch.say("reading back and verifying every byte ...")
        is_sound = _is_sound(setting.url)
    kill = stories.find_kill(happened, killed_at=killed_at)
    picture = setting.home / "timeline.png"
    has_picture = draw_timeline(happened, kill, picture)
    if not has_picture:
        console.print("no picture: matplotlib is missing (pip install 'holdfast[plots]')")
    story = stories.Story(
        training=summarize(happened, best_auc=facts["best_auc"]),
        kill=kill,
        uninterrupted_auc=twin_auc,
        is_sound=is_sound,
        seconds=time.perf_counter() - began,
        picture=picture if has_picture else None,
    )
    show(story.to_dict(), lambda width: stories.render(story), is_json=as_json)
    if not is_sound:
        raise typer.Exit(1)


def _train_and_kill(
    setting: Setting, happened: list[events.Event], look: Callable[[], None]
) -> float:
    """Train until some steps after a durable checkpoint, then SIGKILL; when that was."""
    from holdfast import events as kinds
    from holdfast.errors import InvalidRequestError

    with _child(setting, "run") as child:
        while child.poll() is None:
            look()
            durable = max((e.step for e in happened if isinstance(e, kinds.SaveDurable)), default=0)
            if 0 < durable < _last_step(happened) and _last_step(happened) >= setting.kill_step:
                child.kill()
                killed_at = time.time()
                child.wait()
                look()
                return killed_at
            time.sleep(_POLL_S)
        _check_exit(setting, "run", child.returncode)
    raise InvalidRequestError(
        "training was over before it could be killed",
        steps=setting.steps,
        todo="give it more to do: --steps, --rows or --batch-size",
    )


def _train_to_end(setting: Setting, name: str, look: Callable[[], None]) -> dict[str, Any]:
    """Train until the end; what the child printed."""
    with _child(setting, name) as child:
        while child.poll() is None:
            look()
            time.sleep(_POLL_S)
        look()
        _check_exit(setting, name, child.returncode)
    facts: dict[str, Any] = json.loads((setting.home / f"{name}.json").read_text())
    return facts


def _train_twin(setting: Setting, watch: TrainingBar) -> float | None:
    """Train the same from the start in a run of its own, never killed; its AUC."""
    from holdfast import events as kinds
    from holdfast.cli.follow import Follower

    watch.say("for comparison: the same training, never killed ...")
    follower = Follower(setting.home / "twin-events.jsonl")

    def look() -> None:
        for event in follower.read():
            if isinstance(event, kinds.TrainProgress):
                watch(event)

    auc: float | None = _train_to_end(setting, "twin", look)["auc"]
    return auc


def _last_step(happened: list[events.Event]) -> int:
    from holdfast import events as kinds

    return max((e.step for e in happened if isinstance(e, kinds.TrainProgress)), default=0)


def _is_sound(url: Path) -> bool:
    from holdfast.checkpoint.verify import verify
    from holdfast.storage import open_storage

    return verify(open_storage(url)).is_sound


@contextmanager
def _child(setting: Setting, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """``holdfast train`` in a process of its own, which ends with the block."""
    events_name = "events.jsonl" if name == "run" else f"{name}-events.jsonl"
    command = [sys.executable, "-m", "holdfast.cli.main", "train", "--json", *setting.options]
    command += ["--url", str(setting.home / name), "--events", str(setting.home / events_name)]
    with (
        (setting.home / f"{name}.json").open("wb") as out,
        (setting.home / f"{name}.log").open("ab") as log,
        # its own session: a Ctrl-C of the terminal is for the demo, which then ends its child
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True
        ) as child,
    ):
        try:
            yield child
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask the child to stop, then make it; also where a second signal cuts the waiting short."""
    if child.poll() is not None:
        return
    try:
        child.terminate()
        child.wait(_GOODBYE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        child.kill()


def _check_exit(setting: Setting, name: str, code: int) -> None:
    from holdfast.errors import HoldfastError

    if code:
        log = setting.home / f"{name}.log"
        lines = log.read_text(errors="replace").strip().splitlines()
        raise HoldfastError(
            "the training process failed",
            exit_code=code,
            said=lines[-1] if lines else "",
            todo=f"see {log}",
        )


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that the child is ended too."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
