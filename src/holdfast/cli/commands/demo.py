"""``holdfast demo``: kill processes while a model trains; see what survives and what it costs.

    cluster: servers are killed one after the other, training goes on      (cluster.py)
    checkpoints: the training process itself is killed half-way, and resumed
        child: holdfast train --events FILE      parent: follows FILE, draws, kills, starts again

The child is the ordinary command in its own process and dies by SIGKILL: no handler of ours runs.

Invariant: no child outlives the demo, however it ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.commands.cluster import terminable
from holdfast.cli.output import Json, print_json, show, stderr

if TYPE_CHECKING:
    from holdfast import events
    from holdfast.cli.commands.cluster import ClusterJob
    from holdfast.cli.progress import TrainingBar

_POLL_S = 0.02
_GOODBYE_S = 10.0

_STEPS, _STEPS_SHORT = 400, 160  # of the checkpoints' part, alone and after the cluster's
_CLUSTER_BATCHES, _CLUSTER_ROWS, _CLUSTER_BATCH = 120, 60_000, 512


class Part(StrEnum):
    """What there is to see."""

    ALL = "all"
    CLUSTER = "cluster"
    CHECKPOINTS = "checkpoints"


def demo(
    part: Annotated[
        Part, typer.Option(help="The cluster, the checkpoints in full, or both in short.")
    ] = Part.ALL,
    folder: Annotated[
        Path, typer.Option("--folder", help="Where the demo's own folder is made.")
    ] = Path("runs"),
    steps: Annotated[
        int | None,
        typer.Option(
            min=4, help="Steps in all. Default: what takes half a minute.", show_default=False
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=104, help="Rows of all tables together; fewer on the cluster.")
    ] = 500_000,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Samples a step; fewer on the cluster.")
    ] = 1024,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 40,
    codec: Annotated[
        str | None, typer.Option(help="How weights are stored; default: by expected restores.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    has_twin: Annotated[
        bool,
        typer.Option("--compare/--no-compare", help="Train again, nothing killed, and compare."),
    ] = True,
    as_json: Json = False,
) -> None:
    """Kill processes while a model trains: see what survives and what it costs.

    First servers of a cluster, which goes on without a pause; then a training process, which is
    resumed from its last checkpoint.
    """
    from holdfast.errors import InvalidRequestError

    in_full = part == Part.CHECKPOINTS
    own_steps = steps or (_STEPS if in_full else _STEPS_SHORT)
    if part != Part.CLUSTER and own_steps < 2 * every:
        raise InvalidRequestError(
            "too few steps for a checkpoint before the kill and one after it",
            steps=own_steps,
            every=every,
            todo=f"use --steps {4 * every} or a smaller --every",
        )
    home = _make_home(folder)
    facts: dict[str, Any] = {}
    if part == Part.CLUSTER or (part == Part.ALL and _has_cluster()):
        job = cluster_job(
            home,
            rows=rows,
            batch_size=batch_size,
            batches=steps or _CLUSTER_BATCHES,
            seed=seed,
            is_compared=has_twin,
        )
        facts["cluster"] = _show_cluster(job, as_json=as_json)
    if part == Part.CLUSTER:
        if as_json:
            print_json(facts)
    else:
        options = ["--steps", own_steps, "--rows", rows, "--batch-size", batch_size]
        options += ["--every", every, "--seed", seed, *(["--codec", codec] if codec else [])]
        setting = Setting(home, [str(option) for option in options], own_steps, every)
        facts["sound"] = _run(setting, facts, has_twin=has_twin and in_full, as_json=as_json)
    if not (facts.get("sound", True) and facts.get("cluster", {}).get("sound", True)):
        raise typer.Exit(1)


def _has_cluster() -> bool:
    """Whether what a cluster needs is installed; says so if not."""
    from holdfast.errors import InvalidRequestError

    try:
        import holdfast.cluster.wire  # noqa: F401
    except InvalidRequestError as error:
        stderr().print(f"without the cluster's part: {error}", markup=False, soft_wrap=True)
        return False
    return True


def cluster_job(
    home: Path, *, rows: int, batch_size: int, batches: int, seed: int, is_compared: bool
) -> ClusterJob:
    """What the cluster's part trains: one server is killed at a third, another at two thirds."""
    from holdfast.cli.commands.cluster import ECREC, ClusterJob, Strike
    from holdfast.recsys.cluster_train import Layout, Workload

    return ClusterJob(
        strategy=ECREC,
        workload=Workload(
            rows=min(rows, _CLUSTER_ROWS), batch_size=min(batch_size, _CLUSTER_BATCH), seed=seed
        ),
        layout=Layout(servers=5, data=4, parity=1),
        workers=2,
        batches=batches,
        strikes=(Strike(1, 1 / 3, "SIGKILL"), Strike(3, 2 / 3, "SIGKILL")),
        is_audited=True,
        is_compared=is_compared,
        is_patient=True,
        spares=2,  # the second kill comes sooner than the next spare could start
        silence_s=5.0,  # nothing hangs here; a laptop at its limits may seem to
        events_file=home / "cluster-events.jsonl",
        picture=home / "cluster.png",
    )


def _show_cluster(job: ClusterJob, *, as_json: bool) -> dict[str, Any]:
    """Train on a cluster that loses servers, and show it; its facts."""
    from holdfast.cli.commands.cluster import train_on_cluster

    with terminable():
        story = train_on_cluster(job, stderr())
    if not as_json:
        show({}, lambda width: story.render("Holdfast demo: a cluster"), is_json=False)
    return story.to_dict()


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


def _run(setting: Setting, facts: dict[str, Any], *, has_twin: bool, as_json: bool) -> bool:
    """Train, kill, resume and show it, after these facts; whether all that was stored is sound."""
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
    with watch_training(console, setting.steps) as watch, terminable():

        def look() -> None:
            for event in follower.read():
                happened.append(event)
                watch(event)

        killed_at = _train_and_kill(setting, happened, look)
        watch.say(f"SIGKILL at step {_last_step(happened)}; starting the same command again ...")
        best_auc = _train_to_end(setting, "run", look)["best_auc"]
        twin_auc = _train_twin(setting, watch) if has_twin else None
        watch.say("reading back and verifying every byte ...")
        is_sound = _is_sound(setting.url)
    kill = stories.find_kill(happened, killed_at=killed_at)
    picture = setting.home / "timeline.png"
    has_picture = draw_timeline(happened, kill, picture)
    if not has_picture:
        console.print("no picture: matplotlib is missing (pip install 'holdfast[plots]')")
    story = stories.Story(
        training=summarize(happened, best_auc=best_auc),
        kill=kill,
        uninterrupted_auc=twin_auc,
        is_sound=is_sound,
        seconds=time.perf_counter() - began,
        picture=picture if has_picture else None,
    )
    show({**facts, **story.to_dict()}, lambda width: stories.render(story), is_json=as_json)
    return is_sound


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
