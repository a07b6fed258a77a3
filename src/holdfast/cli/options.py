"""Options of training that more than one command has: their words and limits, said once.

Not here: what becomes of them (cli/commands/train.py, cli/commands/compare.py,
cli/commands/cluster.py).
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


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


class SecondLayer(StrEnum):
    """What can save a coded cluster's checkpoints."""

    FULL = "full"
    CHECK_N_RUN = "check-n-run"
    INCRCP = "incrcp"
    CPR = "cpr"
    CPR_SCAR = "cpr-scar"
    CPR_MFU = "cpr-mfu"
    CPR_SSU = "cpr-ssu"


class EngineName(StrEnum):
    """Where a cluster's processes can run."""

    LOCAL = "local"
    RAY = "ray"


MODEL, SAVES, DATA, OTHER = "Model", "Checkpoints", "Data", "Other"
CLUSTER = "Cluster (with --workers)"


def option(help_: str, panel: str, *names: str, **more: Any) -> Any:
    """An option with its help, in a panel."""
    return typer.Option(*names, help=help_, rich_help_panel=panel, **more)


ModelOption = Annotated[Model, option("Kind of model.", MODEL)]
PresetOption = Annotated[Preset, option("Size of its networks.", MODEL)]
Rows = Annotated[int, option("Rows of all tables together.", MODEL, min=1)]
Steps = Annotated[int, option("Steps in all, resumed ones included.", OTHER, min=1)]
BatchSize = Annotated[int, option("Samples a step.", DATA, min=1)]
Every = Annotated[
    int,
    option(
        "Steps between checkpoints. With cpr-mfu, cpr-ssu and cpr-scar: steps in which as many "
        "rows are saved as there are, in 8 checkpoints of the hottest eighth.",
        SAVES,
        min=1,
    ),
]
EveryOrTime = Annotated[
    str,
    option(
        "Steps between checkpoints, or a time: 30min, 90s, 1.5h. With --workers: batches. With "
        "cpr-mfu, cpr-ssu and cpr-scar: the interval in which as many rows are saved as there "
        "are, in 8 checkpoints of the hottest eighth.",
        SAVES,
        metavar="STEPS|TIME",
    ),
]
Touched = Annotated[
    float | None,
    option(
        "Share of the rows an interval touches (synthetic clicks). Default: 0.26, as in "
        "production, where the interval is long enough.",
        DATA,
    ),
]
Seed = Annotated[int, option("Of the model and the synthetic clicks.", OTHER, min=0)]
EventsFile = Annotated[
    Path | None, option("Append what happens here, as JSON lines.", OTHER, "--events")
]
MetricsPort = Annotated[
    int | None,
    option(
        "Serve metrics for Prometheus at this port of this machine; 0: any that is free.",
        OTHER,
        min=0,
        max=65535,
    ),
]
MetricsHost = Annotated[
    str | None,
    option("Listen there instead, in a network that you trust: 0.0.0.0 is everywhere.", OTHER),
]
TensorBoardFolder = Annotated[
    Path | None, option("Write scalars for TensorBoard into this folder.", OTHER, "--tensorboard")
]
CodecName = Annotated[
    str | None, option("How weights are stored: fp32, asym8, adaptive4, ...", SAVES)
]
StateCodecName = Annotated[str | None, option("How row state is stored: fp32, log8, ...", SAVES)]
DataRows = Annotated[int | None, option("Rows of a stripe (k). Default: up to 4.", CLUSTER, min=1)]
Parity = Annotated[int | None, option("Parity rows of a stripe (r). Default: 1.", CLUSTER, min=0)]
CodeName = Annotated[
    Code | None, option("Of stripes. Default: xor for one parity row, else rs.", CLUSTER)
]
HotRows = Annotated[
    int | None,
    option(
        "Replicate up to so many frequent rows instead of coding them, where that sends less.",
        CLUSTER,
        min=1,
    ),
]
Kill = Annotated[
    list[str] | None,
    option(
        "SIGKILL a server when that share of the batches is done (repeatable).",
        CLUSTER,
        metavar="SERVER@SHARE",
    ),
]
Stop = Annotated[
    list[str] | None,
    option("The same with SIGSTOP: it hangs.", CLUSTER, metavar="SERVER@SHARE"),
]
Spares = Annotated[int, option("Servers that wait to take a lost one's place.", CLUSTER, min=0)]
Silence = Annotated[
    float,
    option("Seconds after which a silent server is taken for dead; 0: never.", CLUSTER, min=0),
]
FlushEvery = Annotated[
    float | None,
    option(
        "Seconds between differences sent to parity (ecrm, ecrec): what adds up meanwhile is sent "
        "once; without two-phase commit a lost server takes so much with it. Default: 2.",
        CLUSTER,
        min=0,
    ),
]
Audited = Annotated[bool, option("Recompute every stripe after the run.", CLUSTER, "--audit")]
SecondLayerOption = Annotated[
    SecondLayer | None,
    option(
        "Checkpoints too, for more losses at once than parities (ecrm, ecrec). Default: none.",
        CLUSTER,
    ),
]
EngineOption = Annotated[
    EngineName | None,
    option("Where processes run: on this machine, or as Ray's actors. Default: local.", CLUSTER),
]
Address = Annotated[
    str | None,
    option("A Ray cluster to run on: HOST:PORT, or auto. Default: a Ray of our own.", CLUSTER),
]
AllowRemote = Annotated[
    bool,
    option(
        "Let processes listen beyond their machine, in a network that you trust.",
        CLUSTER,
        "--allow-remote",
    ),
]
Picture = Annotated[Path | None, option("Draw a picture here.", CLUSTER, "--png", "--svg")]
