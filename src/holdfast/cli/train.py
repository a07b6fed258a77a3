"""``holdfast train``: train a click model with checkpoints; the same command again resumes.

    options -> Job -> trainjob.py          with --workers: options -> ClusterJob -> cluster.py

Invariant: an option that would be passed over is refused.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from holdfast.cli.output import Json

if TYPE_CHECKING:
    from holdfast.checkpoint.strategy import Strategy
    from holdfast.recsys.clustertrain import Workload


class Model(StrEnum):
    """The models there are."""

    DLRM = "dlrm"
    DEEPFM = "deepfm"
    PNN = "pnn"


class Preset(StrEnum):
    """The sizes there are."""

    TINY = "tiny"
    SMALL = "small"
    KAGGLE = "kaggle"
    TERABYTE = "terabyte"


class Optimizer(StrEnum):
    """The tables' optimizers there are."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAGRAD = "adagrad"
    ROWWISE_ADAGRAD = "rowwise-adagrad"
    SPARSE_ADAM = "sparse-adam"
    ADAM = "adam"


class StrategyName(StrEnum):
    """The strategies there are."""

    CHECK_N_RUN = "check-n-run"
    FULL = "full"
    INCRCP = "incrcp"
    CPR = "cpr"
    CPR_MFU = "cpr-mfu"
    CPR_SSU = "cpr-ssu"
    CPR_SCAR = "cpr-scar"
    NONE = "none"
    ECRM = "ecrm"
    ECREC = "ecrec"


class BasePolicy(StrEnum):
    """The base policies there are."""

    INTERMITTENT = "intermittent"
    ONE_SHOT = "one-shot"
    CONSECUTIVE = "consecutive"
    FULL = "full"
    RECOVERY_TIME = "recovery-time"


class Code(StrEnum):
    """The codes there are."""

    XOR = "xor"
    RS = "rs"
    SUM = "sum"


_MODEL, _SAVES, _DATA, _OTHER = "Model", "Checkpoints", "Data", "Other"
_CLUSTER = "Cluster (with --workers)"

# what means something only on one machine, and only on a cluster
_LOCAL_OPTIONS = (
    "url", "base_policy", "codec", "state_codec", "extract", "expected_restores", "keep", "lose",
    "prefetch", "threads",
)  # fmt: skip
_CLUSTER_OPTIONS = (
    "data_rows", "parity", "code", "kill", "stop", "spares", "silence", "is_audited",
    "is_compared", "picture",
)  # fmt: skip


def _option(help_: str, panel: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_, rich_help_panel=panel, **more)


def train(
    context: typer.Context,
    url: Annotated[str, _option("Where checkpoints go: a folder or URL.", _SAVES)] = "runs/train",
    model: Annotated[Model, _option("Kind of model.", _MODEL)] = Model.DLRM,
    preset: Annotated[Preset, _option("Size of its networks.", _MODEL)] = Preset.SMALL,
    rows: Annotated[int, _option("Rows of all tables together.", _MODEL, min=1)] = 500_000,
    optimizer: Annotated[
        Optimizer,
        _option("Of the tables; momentum, rowwise-adagrad and adam on a cluster only.", _MODEL),
    ] = Optimizer.ADAGRAD,
    steps: Annotated[int, _option("Steps in all, resumed ones included.", _OTHER, min=1)] = 1000,
    batch_size: Annotated[int, _option("Samples a step.", _DATA, min=1)] = 1024,
    strategy: Annotated[
        StrategyName | None,
        _option(
            "What survives failures. Default: check-n-run; with --workers ecrec (or ecrm, none).",
            _SAVES,
        ),
    ] = None,
    base_policy: Annotated[
        BasePolicy | None, _option("When to take a base, if not as the strategy says.", _SAVES)
    ] = None,
    codec: Annotated[
        str | None, _option("How weights are stored: fp32, asym8, adaptive4, ...", _SAVES)
    ] = None,
    state_codec: Annotated[
        str | None, _option("How row state is stored: fp32, log8, ...", _SAVES)
    ] = None,
    extract: Annotated[
        float | None,
        _option(
            "Share of dead rows that a grid's chunks may keep (R), 0 to 1. Default: chosen by "
            "itself.",
            _SAVES,
            metavar="R",
        ),
    ] = None,
    expected_restores: Annotated[
        float, _option("The fewer, the fewer bits are stored.", _SAVES, min=0)
    ] = 20,
    every: Annotated[int, _option("Steps between checkpoints.", _SAVES, min=1)] = 100,
    keep: Annotated[int | None, _option("Keep only the last so many.", _SAVES, min=1)] = None,
    servers: Annotated[
        int | None,
        _option(
            "Divide the rows among so many servers, recovered apart; with --workers: processes.",
            _SAVES,
            min=1,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        _option("Train on a cluster, by so many worker processes.", _CLUSTER, min=1),
    ] = None,
    data_rows: Annotated[
        int | None, _option("Rows of a stripe (k). Default: up to 4.", _CLUSTER, min=1)
    ] = None,
    parity: Annotated[
        int | None, _option("Parity rows of a stripe (r). Default: 1.", _CLUSTER, min=0)
    ] = None,
    code: Annotated[
        Code | None, _option("Of stripes. Default: xor for one parity row, else rs.", _CLUSTER)
    ] = None,
    kill: Annotated[
        list[str] | None,
        _option(
            "SIGKILL a server when that share of the batches is done (repeatable).",
            _CLUSTER,
            metavar="SERVER@SHARE",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        _option("The same with SIGSTOP: it hangs.", _CLUSTER, metavar="SERVER@SHARE"),
    ] = None,
    spares: Annotated[
        int, _option("Servers that wait to take a lost one's place.", _CLUSTER, min=0)
    ] = 1,
    silence: Annotated[
        float,
        _option(
            "Seconds after which a silent server is taken for dead; 0: never.",
            _CLUSTER,
            min=0,
        ),
    ] = 1.0,
    is_audited: Annotated[
        bool, _option("Recompute every stripe after the run.", _CLUSTER, "--audit")
    ] = False,
    is_compared: Annotated[
        bool, _option("Train again without the kills, and compare.", _CLUSTER, "--compare")
    ] = False,
    picture: Annotated[
        Path | None, _option("Draw throughput over time here.", _CLUSTER, "--png", "--svg")
    ] = None,
    lose: Annotated[
        list[str] | None,
        _option(
            "Let a server lose its rows after a step and recover them (repeatable).",
            _SAVES,
            metavar="SERVER@STEP",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        _option(
            "clicks (synthetic, the default), criteo:PATH or parquet:PATH (a file or a folder; "
            "repeatable).",
            _DATA,
            metavar="KIND[:PATH]",
        ),
    ] = None,
    touched: Annotated[
        float | None,
        _option(
            "Share of the rows an interval touches (synthetic clicks). Default: 0.26, as in "
            "production, where the interval is long enough.",
            _DATA,
        ),
    ] = None,
    seed: Annotated[int, _option("Of the model and the synthetic clicks.", _OTHER, min=0)] = 0,
    prefetch: Annotated[
        int, _option("Processes that prefetch synthetic clicks.", _DATA, min=0)
    ] = 0,
    threads: Annotated[
        int | None, _option("Torch's threads. Default: 1 for small models.", _OTHER, min=1)
    ] = None,
    events_file: Annotated[
        Path | None, _option("Append what happens here, as JSON lines.", _OTHER, "--events")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a click model with checkpoints. The same command again resumes.

    With --workers: train on a cluster of processes that loses servers and goes on.
    """
    from holdfast.cli.trainjob import Job, run_job
    from holdfast.recsys.train import Recipe

    check_options(context, is_cluster=workers is not None)
    kind, files = parse_data(data or ["clicks"])
    if workers is not None:
        from holdfast.cli.cluster import ClusterJob, choose_layout, parse_strikes, run_cluster_job

        chosen = (strategy or StrategyName.ECREC).value
        layout = choose_layout(
            chosen,
            servers=5 if servers is None else servers,
            data=data_rows,
            parity=parity,
            code=None if code is None else code.value,
            optimizer=optimizer.value,
        )
        strikes = parse_strikes(kill or [], layout.servers, "SIGKILL")
        strikes += parse_strikes(stop or [], layout.servers, "SIGSTOP")
        workload = make_workload(
            model.value, preset.value, rows, batch_size, seed, kind=kind, touched=touched,
            interval=every,
        )  # fmt: skip
        cluster_job = ClusterJob(
            strategy=chosen,
            workload=workload,
            layout=layout,
            workers=workers,
            batches=steps,
            strikes=strikes,
            is_audited=is_audited,
            is_compared=is_compared,
            spares=spares,
            silence_s=silence,
            events_file=events_file,
            picture=picture,
        )
        run_cluster_job(cluster_job, is_json=as_json)
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
        "every": every,
        "codec": codec,
        "state_codec": state_codec,
        "expected_restores": expected_restores,
        "keep": keep,
        "strategy": choose_strategy(
            (strategy or StrategyName.CHECK_N_RUN).value, base_policy, extract
        ),
        "servers": servers,
        "total_steps": steps,
    }
    losses = parse_losses(lose or [], servers)
    if threads is None and preset in (Preset.TINY, Preset.SMALL):
        threads = 1  # layers this small lose more to handing work around than they gain
    job = Job(url, recipe, files, steps, settings, prefetch, threads, events_file, losses)
    exit_code = run_job(job, is_json=as_json)
    if exit_code:
        raise typer.Exit(exit_code)


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
    from holdfast.recsys.clustertrain import Workload
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
    from holdfast.checkpoint.grid import as_extract
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
    from holdfast.placement import Placement

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
