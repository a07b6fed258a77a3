"""``holdfast compare``: one training under several strategies, the same kills, one report.

    options -> a ClusterJob for each strategy, one for none without kills -> run_once, one by one
    -> Comparison -> tables, a picture

Invariant: a run that its strategy cannot save is told as lost; the others go on.

Not here: one run (cli/cluster_run.py), what is told (report/cluster/compare.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli import options
from holdfast.cli.options import Model, Optimizer, Preset
from holdfast.cli.output import Json, show, stderr

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.cli.commands.cluster import ClusterJob
    from holdfast.report.cluster.compare import Comparison

_ALL = "none,full,check-n-run,cpr,ecrm,ecrec"


def compare(
    strategies: Annotated[
        str, options.option("What to compare, with commas between.", options.CLUSTER)
    ] = _ALL,
    model: options.ModelOption = Model.DLRM,
    preset: options.PresetOption = Preset.SMALL,
    rows: options.Rows = 200_000,
    optimizer: Annotated[Optimizer, options.option("Of the tables.", options.MODEL)] = (
        Optimizer.ADAGRAD
    ),
    steps: Annotated[int, options.option("Batches of each run.", options.OTHER, min=1)] = 400,
    batch_size: options.BatchSize = 1024,
    servers: Annotated[int, options.option("Server processes.", options.CLUSTER, min=1)] = 5,
    workers: Annotated[int, options.option("Worker processes.", options.CLUSTER, min=1)] = 2,
    data_rows: options.DataRows = None,
    parity: options.Parity = None,
    code: options.CodeName = None,
    kill: options.Kill = None,
    stop: options.Stop = None,
    spares: options.Spares = 1,
    silence: options.Silence = 1.0,
    second_layer: options.SecondLayerOption = None,
    every: options.Every = 100,
    codec: options.CodecName = None,
    state_codec: options.StateCodecName = None,
    url: Annotated[
        str | None,
        options.option(
            "Where checkpoints go, a folder for each strategy. Default: a temporary one.",
            options.SAVES,
        ),
    ] = None,
    engine: options.EngineOption = None,
    address: options.Address = None,
    allow_remote: options.AllowRemote = False,
    is_audited: options.Audited = False,
    touched: options.Touched = None,
    seed: options.Seed = 0,
    picture: options.Picture = None,
    events_file: options.EventsFile = None,
    as_json: Json = False,
) -> None:
    """Train the same on a cluster under several strategies, with the same kills, and compare.

    Costs are against 'none' without kills, which is run too. Without --kill: what each strategy
    costs where nothing fails.
    """
    from holdfast.cli.commands import cluster
    from holdfast.cli.commands.train import make_workload

    chosen = parse_strategies(strategies)
    strikes = cluster.parse_strikes(kill or [], servers, "SIGKILL")
    strikes += cluster.parse_strikes(stop or [], servers, "SIGSTOP")
    cluster.check_picture(picture)
    workload = make_workload(
        model.value, preset.value, rows, batch_size, seed, kind="clicks", touched=touched,
        interval=every,
    )  # fmt: skip
    where = cluster.choose_engine(
        None if engine is None else engine.value, address, allow_remote=allow_remote
    )

    def job(strategy: str) -> ClusterJob:
        is_coded = strategy in cluster.CODED
        saves = strategy in cluster.LAYERS or (is_coded and second_layer is not None)
        return cluster.ClusterJob(
            strategy=strategy,
            workload=workload,
            layout=cluster.choose_layout(
                strategy,
                servers=servers,
                data=data_rows if is_coded else None,
                parity=parity if is_coded else None,
                code=code.value if is_coded and code is not None else None,
                optimizer=optimizer.value,
            ),
            workers=workers,
            batches=steps,
            strikes=strikes,
            layer=cluster.choose_layer(
                strategy,
                second_layer.value if is_coded and second_layer is not None else None,
                every=every,
                url=_url_of(url, strategy) if saves else None,
                codec=codec if saves else None,
                state_codec=state_codec if saves else None,
            ),
            engine=where,
            is_audited=is_audited and is_coded,
            spares=spares,
            silence_s=silence,
        )

    coded = {
        "--data-rows": data_rows, "--parity": parity, "--code": code, "--audit": is_audited or None,
        "--second-layer": second_layer,
    }  # fmt: skip
    saving = {"--url": url, "--codec": codec, "--state-codec": state_codec}
    check_used(chosen, coded=coded, saving=saving)
    jobs = [job(strategy) for strategy in chosen]  # all are checked before the first is run
    base = replace(job(cluster.NONE), strikes=())
    with cluster.terminable():
        found = run_all(base, jobs, stderr(), picture=picture, events_file=events_file)
    show(found.to_dict(), lambda width: _render(found), is_json=as_json)
    if not found.is_sound:
        raise typer.Exit(1)


def _render(found: Comparison) -> Any:
    from holdfast.report.cluster import compare as report

    return report.render(found)


def parse_strategies(given: str) -> list[str]:
    """Names with commas between.

    >>> parse_strategies("none, ecrec")
    ['none', 'ecrec']

    Raises:
        InvalidRequestError: unknown ones, the same twice, or only one.
    """
    from holdfast.cli.commands.cluster import check_strategy
    from holdfast.errors import InvalidRequestError

    found = [name.strip() for name in given.split(",") if name.strip()]
    for name in found:
        check_strategy(name)
    if len(set(found)) != len(found):
        raise InvalidRequestError("a strategy is named twice", strategies=found)
    if len(found) < 2:
        raise InvalidRequestError(
            "one strategy has nothing to be compared with",
            strategies=found,
            todo="name at least two, or use 'holdfast train --compare'",
        )
    return found


def check_used(
    strategies: Sequence[str], *, coded: Mapping[str, object], saving: Mapping[str, object]
) -> None:
    """Refuse options that none of the strategies uses.

    Raises:
        InvalidRequestError: names them.
    """
    from holdfast.cli.commands.cluster import CODED, LAYERS
    from holdfast.errors import InvalidRequestError

    is_coded = any(name in CODED for name in strategies)
    saves = any(name in LAYERS for name in strategies)
    saves = saves or (is_coded and coded["--second-layer"] is not None)
    unused = [name for name, value in coded.items() if value is not None and not is_coded]
    unused += [name for name, value in saving.items() if value is not None and not saves]
    if unused:
        raise InvalidRequestError(
            "none of these strategies uses these options",
            strategies=list(strategies),
            options=unused,
            todo="leave them out",
        )


def _url_of(url: str | None, strategy: str) -> str | None:
    return None if url is None else f"{url.rstrip('/')}/{strategy}"


@dataclass(frozen=True, slots=True)
class _Turn:
    """One of the runs to be made, and how it is announced."""

    job: ClusterJob
    name: str


def run_all(
    base: ClusterJob,
    jobs: Sequence[ClusterJob],
    console: Console,
    *,
    picture: Path | None,
    events_file: Path | None,
) -> Comparison:
    """Run the base and then each job, one at a time."""
    from holdfast import events
    from holdfast.cli.cluster_run import run_once
    from holdfast.cli.commands.cluster import NONE
    from holdfast.recsys.cluster_train import best_auc
    from holdfast.report.cluster.compare import Comparison
    from holdfast.report.cluster.compare_picture import draw_comparison

    began = time.perf_counter()
    sinks = [] if events_file is None else [events.json_lines(events_file)]
    # without kills the base is what none would be
    jobs = [job for job in jobs if job.strategy != NONE or job.strikes]
    turns = [_Turn(base, "none, nothing killed"), *(_Turn(job, job.strategy) for job in jobs)]
    ran = []
    for number, turn in enumerate(turns, 1):
        console.print(f"[{number} of {len(turns)}] {turn.name}", markup=False, soft_wrap=True)
        each = run_once(turn.job, console, sinks)
        if each.error is not None and number == 1:
            raise each.error  # nothing could be compared with it
        if each.error is not None:
            console.print(f"{turn.name} is lost: {each.error}", markup=False, soft_wrap=True)
        ran.append(each)
    found = Comparison(
        base=ran[0].run,
        runs=tuple(each.run for each in ran[1:]),
        best_auc=best_auc(base.workload),
        picture=None,
        seconds=time.perf_counter() - began,
    )
    if picture is not None and draw_comparison(
        found, ran[0].happened, [each.happened for each in ran[1:]], picture
    ):
        return replace(found, picture=picture)
    return found
