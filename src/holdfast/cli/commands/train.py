"""``holdfast train``: train a click model with checkpoints; the same command again resumes.

    options -> Job -> cli/train_job.py          with --workers: options -> ClusterJob -> cluster.py

Invariant: an option that would be passed over is refused.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from holdfast.cli import options
from holdfast.cli.options import BasePolicy, Model, Optimizer, StrategyName
from holdfast.cli.options import Preset as Preset
from holdfast.cli.output import Json, StorageOptions, parse_storage_options

if TYPE_CHECKING:
    from holdfast.checkpoint.planning.interval import Every
    from holdfast.checkpoint.strategy import Strategy
    from holdfast.cli.measuring import Measuring
    from holdfast.recsys.cluster_train import Workload


# what means something only on one machine, and only on a cluster
_LOCAL_OPTIONS = ("base_policy", "extract", "lose", "prefetch", "threads")
_CLUSTER_OPTIONS = (
    "data_rows", "parity", "hot_rows", "code", "kill", "stop", "spares", "silence",
    "flush_every", "second_layer", "engine", "address", "allow_remote", "is_audited",
    "is_compared", "picture",
)  # fmt: skip


def train(
    context: typer.Context,
    url: Annotated[
        str | None,
        options.option(
            "Where checkpoints go: a folder or URL. Default: runs/train; on a cluster a temporary "
            "folder.",
            options.SAVES,
        ),
    ] = None,
    storage_options: StorageOptions = None,
    model: options.ModelOption = Model.DLRM,
    preset: options.PresetOption = Preset.SMALL,
    rows: options.Rows = 500_000,
    optimizer: Annotated[
        Optimizer,
        options.option(
            "Of the tables; momentum, rowwise-adagrad and adam on a cluster only.", options.MODEL
        ),
    ] = Optimizer.ADAGRAD,
    steps: options.Steps = 1000,
    batch_size: options.BatchSize = 1024,
    strategy: Annotated[
        StrategyName | None,
        options.option(
            "What survives failures. Default: check-n-run; with --workers ecrec.",
            options.SAVES,
        ),
    ] = None,
    base_policy: Annotated[
        BasePolicy | None,
        options.option("When to take a base, if not as the strategy says.", options.SAVES),
    ] = None,
    codec: options.CodecName = None,
    state_codec: options.StateCodecName = None,
    extract: Annotated[
        float | None,
        options.option(
            "Share of dead rows that a grid's chunks may keep (R), 0 to 1. Default: chosen by "
            "itself.",
            options.SAVES,
            metavar="R",
        ),
    ] = None,
    expected_restores: Annotated[
        float | None,
        options.option(
            "Store few bits: the fewer restores, the fewer. Default: every bit is stored.",
            options.SAVES,
            min=0,
        ),
    ] = None,
    every: options.EveryOrTime = "100",
    keep: Annotated[
        int | None, options.option("Keep only the last so many.", options.SAVES, min=1)
    ] = None,
    servers: Annotated[
        int | None,
        options.option(
            "Divide the rows among so many servers, recovered apart; with --workers: processes.",
            options.SAVES,
            min=1,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        options.option("Train on a cluster, by so many worker processes.", options.CLUSTER, min=1),
    ] = None,
    data_rows: options.DataRows = None,
    parity: options.Parity = None,
    code: options.CodeName = None,
    hot_rows: options.HotRows = None,
    kill: options.Kill = None,
    stop: options.Stop = None,
    spares: options.Spares = 1,
    silence: options.Silence = 1.0,
    flush_every: options.FlushEvery = None,
    second_layer: options.SecondLayerOption = None,
    engine: options.EngineOption = None,
    address: options.Address = None,
    allow_remote: options.AllowRemote = False,
    is_audited: options.Audited = False,
    is_compared: Annotated[
        bool,
        options.option("Train again without the kills, and compare.", options.CLUSTER, "--compare"),
    ] = False,
    picture: options.Picture = None,
    lose: Annotated[
        list[str] | None,
        options.option(
            "Let a server lose its rows after a step and recover them (repeatable).",
            options.SAVES,
            metavar="SERVER@STEP",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        options.option(
            "clicks (synthetic, the default), criteo:PATH or parquet:PATH (a file or a folder; "
            "repeatable).",
            options.DATA,
            metavar="KIND[:PATH]",
        ),
    ] = None,
    touched: options.Touched = None,
    seed: options.Seed = 0,
    prefetch: Annotated[
        int, options.option("Processes that prefetch synthetic clicks.", options.DATA, min=0)
    ] = 0,
    threads: Annotated[
        int | None,
        options.option("Torch's threads. Default: 1 for small models.", options.OTHER, min=1),
    ] = None,
    events_file: options.EventsFile = None,
    metrics_port: options.MetricsPort = None,
    metrics_host: options.MetricsHost = None,
    tensorboard: options.TensorBoardFolder = None,
    as_json: Json = False,
) -> None:
    """Train a click model with checkpoints. The same command again resumes.

    With --workers: train on a cluster of processes that loses servers and goes on.
    """
    from holdfast.cli.train_job import Job, run_job, steps_of
    from holdfast.recsys.train import Recipe

    check_options(context, is_cluster=workers is not None)
    interval = parse_every(every, is_cluster=workers is not None)
    measuring = choose_measuring(metrics_port, metrics_host, tensorboard)
    kind, files = parse_data(data or ["clicks"])
    if workers is not None:
        from holdfast.cli.commands import cluster

        chosen = (strategy or StrategyName.ECREC).value
        layout = cluster.choose_layout(
            chosen,
            servers=5 if servers is None else servers,
            data=data_rows,
            parity=parity,
            code=None if code is None else code.value,
            optimizer=optimizer.value,
        )
        strikes = cluster.parse_strikes(kill or [], layout.servers, "SIGKILL")
        strikes += cluster.parse_strikes(stop or [], layout.servers, "SIGSTOP")
        cluster.check_picture(picture)
        workload = make_workload(
            model.value, preset.value, rows, batch_size, seed, kind=kind, touched=touched,
            interval=steps_of(interval),
        )  # fmt: skip
        if hot_rows is not None:
            layout = cluster.choose_hot_rows(
                workload, layout, hot_rows, batches=steps, flush_every_s=flush_every
            )
        cluster_job = cluster.ClusterJob(
            strategy=chosen,
            workload=workload,
            layout=layout,
            workers=workers,
            batches=steps,
            strikes=strikes,
            layer=cluster.choose_layer(
                chosen,
                None if second_layer is None else second_layer.value,
                every=steps_of(interval),
                url=url,
                codec=codec,
                state_codec=state_codec,
                keep=keep,
                expected_restores=expected_restores,
                storage_options=parse_storage_options(storage_options) or None,
            ),
            engine=cluster.choose_engine(
                None if engine is None else engine.value, address, allow_remote=allow_remote
            ),
            is_audited=is_audited,
            is_compared=is_compared,
            spares=spares,
            silence_s=silence,
            flush_every_s=flush_every,
            events_file=events_file,
            measuring=measuring,
            picture=picture,
        )  # fmt: skip
        cluster.run_cluster_job(cluster_job, is_json=as_json)
        return
    recipe = Recipe(
        model=cast(Any, model.value),
        preset=preset.value,
        rows=rows,
        batch_size=batch_size,
        optimizer=optimizer.value,
        seed=seed,
        data=kind,
        touched=touched,
    )
    settings: dict[str, Any] = {
        "every": interval,
        "codec": codec,
        "state_codec": state_codec,
        "expected_restores": expected_restores,
        "keep": keep,
        "strategy": choose_strategy(
            (strategy or StrategyName.CHECK_N_RUN).value, base_policy, extract
        ),
        "servers": servers,
        "total_steps": steps,
        "storage_options": parse_storage_options(storage_options),
    }
    losses = parse_losses(lose or [], servers)
    if threads is None and preset in (Preset.TINY, Preset.SMALL):
        threads = 1  # layers this small lose more to handing work around than they gain
    job = Job(
        url or "runs/train", recipe, files, steps, settings, prefetch, threads, events_file, losses,
        measuring,
    )  # fmt: skip
    exit_code = run_job(job, is_json=as_json)
    if exit_code:
        raise typer.Exit(exit_code)


def parse_every(text: str, *, is_cluster: bool) -> Every:
    """Steps or a time between checkpoints; on a cluster batches.

    >>> parse_every("90s", is_cluster=False).seconds
    90.0

    Raises:
        InvalidRequestError: neither; or a time on a cluster.
    """
    from holdfast.checkpoint.planning.interval import Every, as_every
    from holdfast.errors import InvalidRequestError

    every = as_every(text)
    assert isinstance(every, Every)
    if is_cluster and every.steps is None:
        raise InvalidRequestError(
            "on a cluster checkpoints are counted in batches", every=text, todo="give --every 100"
        )
    return every


def check_options(context: typer.Context, *, is_cluster: bool) -> None:
    """Refuse options that would be passed over.

    Raises:
        InvalidRequestError: names them as they were written.
    """
    from holdfast.errors import InvalidRequestError

    foreign = _LOCAL_OPTIONS if is_cluster else _CLUSTER_OPTIONS
    given = [
        str(parameter.opts[0])
        for parameter in context.command.params
        if parameter.name in foreign
        and getattr(context.get_parameter_source(str(parameter.name)), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise InvalidRequestError(
            "these options mean nothing on a cluster" if is_cluster
            else "these options are of training on a cluster",
            options=given,
            todo="leave out --workers" if is_cluster else "give --workers too",
        )  # fmt: skip


def choose_measuring(port: int | None, host: str | None, folder: Path | None) -> Measuring:
    """Where metrics go.

    Raises:
        InvalidRequestError: a host without a port.
    """
    from holdfast.cli.measuring import LOOPBACK, Measuring
    from holdfast.errors import InvalidRequestError

    if port is None and host is not None:
        raise InvalidRequestError("metrics are served at a port", todo="give --metrics-port too")
    return Measuring(port, host or LOOPBACK, folder)


def make_workload(
    model: str,
    preset: str,
    rows: int,
    batch_size: int,
    seed: int,
    *,
    kind: str,
    touched: float | None,
    interval: int,
) -> Workload:
    """What a cluster trains.

    Raises:
        InvalidRequestError: other data than a cluster's workers read.
    """
    from holdfast.errors import InvalidRequestError
    from holdfast.recsys.cluster_train import Workload
    from holdfast.recsys.train import choose_skew

    if kind != "clicks":
        raise InvalidRequestError("workers of a cluster read synthetic clicks", data=kind)
    found = Workload(
        model=cast(Any, model), preset=preset, rows=rows, batch_size=batch_size, seed=seed
    )
    if touched is None:
        return found
    recipe = dataclasses.replace(found.recipe, touched=touched)
    return dataclasses.replace(found, skew=choose_skew(recipe, interval=interval))


def choose_strategy(name: str, base_policy: BasePolicy | None, extract: float | None) -> Strategy:
    """A strategy by name, with what was chosen otherwise.

    Raises:
        InvalidRequestError: the choices do not go together.
    """
    from holdfast.checkpoint.grid.decide import as_extract
    from holdfast.checkpoint.strategy import STRATEGIES
    from holdfast.errors import InvalidRequestError

    if name not in STRATEGIES:
        raise InvalidRequestError(
            "this strategy is one of a cluster", strategy=name, todo="give --servers and --workers"
        )
    other: dict[str, Any] = {}
    if base_policy is not None:
        other["base"] = base_policy.value
    if extract is not None:
        other["extract"] = as_extract(extract)
    return dataclasses.replace(STRATEGIES[name], **other)


def parse_losses(given: list[str], servers: int | None) -> dict[int, list[int]]:
    """Which servers fail after which steps.

    >>> parse_losses(["3@500", "1@500", "3@800"], 4)
    {500: [3, 1], 800: [3]}

    Raises:
        InvalidRequestError: not a server and a step, or no such server.
    """
    from holdfast.errors import InvalidRequestError
    from holdfast.model.placement import Placement

    found: dict[int, list[int]] = {}
    for item in given:
        server, at, step = item.partition("@")
        if not at or not server.isdecimal() or not step.isdecimal() or int(step) < 1:
            raise InvalidRequestError(
                "not a server and a step", lose=item, todo="write it like --lose 3@500"
            )
        if servers is None:
            raise InvalidRequestError("rows are lost by servers", todo="give --servers too")
        Placement(servers).check_server(int(server))
        found.setdefault(int(step), []).append(int(server))
    return found


def parse_data(given: list[str]) -> tuple[str, list[str]]:
    """The kind of data, and its files.

    >>> parse_data(["criteo:day_0", "criteo:day_1"])
    ('criteo', ['day_0', 'day_1'])

    Raises:
        InvalidRequestError: unknown, mixed, or without a path.
    """
    from holdfast.errors import InvalidRequestError

    pairs = [item.partition(":") for item in given]
    kinds = {kind for kind, _, _ in pairs}
    paths = [path for _, _, path in pairs]
    todo = "write clicks, criteo:PATH or parquet:PATH; repeat it for more files of one kind"
    if len(kinds) != 1 or not kinds <= {"clicks", "criteo", "parquet"}:
        raise InvalidRequestError("unknown or mixed data", data=given, todo=todo)
    kind = kinds.pop()
    if (kind == "clicks") == any(paths) or (kind != "clicks" and not all(paths)):
        raise InvalidRequestError("data with the wrong path", data=given, todo=todo)
    return kind, [] if kind == "clicks" else paths
