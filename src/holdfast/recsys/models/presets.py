"""Named sizes: the models of the papers, one for demos and one for tests.

Not here: what the models compute (dlrm.py, deepfm.py, pnn.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np

from holdfast.errors import InvalidRequestError
from holdfast.recsys.models.deepfm import DeepFM
from holdfast.recsys.models.dlrm import DLRM, Interaction
from holdfast.recsys.models.layers import check_table_rows
from holdfast.recsys.models.pnn import PNN

ModelKind = Literal["dlrm", "deepfm", "pnn"]

# distinct values of the 26 categorical columns of the Criteo Kaggle training file
CRITEO_KAGGLE_ROWS: tuple[int, ...] = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Preset:
    """Layer sizes. ``bottom``, ``top`` and ``interaction`` are DLRM's, ``deep`` the others'."""

    width: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    deep: tuple[int, ...]
    interaction: Interaction


# kaggle and terabyte: CPR section 5.1; with 26 tables their top inputs are 432 and 1728
PRESETS = MappingProxyType(
    {
        "tiny": Preset(4, (13, 16, 4), (16, 1), (16,), "dot"),
        "small": Preset(16, (13, 64, 16), (64, 32, 1), (64, 32), "dot"),
        "kaggle": Preset(16, (13, 512, 256, 64, 16), (512, 256, 1), (400, 400, 400), "cat"),
        "terabyte": Preset(64, (13, 512, 256, 64), (512, 512, 256, 1), (400, 400, 400), "cat"),
    }
)


def make_model(
    preset: str, table_rows: Sequence[int], *, kind: ModelKind = "dlrm", sparse: bool = True
) -> DLRM | DeepFM | PNN:
    """A model of a named size over the given tables.

    >>> make_model("kaggle", [3] * 26).top[0].in_features
    432

    Raises:
        InvalidRequestError: no such preset or kind; the message names those that exist.
    """
    if preset not in PRESETS:
        raise InvalidRequestError(
            "unknown preset", preset=preset, todo=f"use one of {', '.join(PRESETS)}"
        )
    size = PRESETS[preset]
    if kind == "dlrm":
        return DLRM(
            table_rows,
            width=size.width,
            bottom=size.bottom,
            top=size.top,
            interaction=size.interaction,
            sparse=sparse,
        )
    if kind == "deepfm":
        return DeepFM(table_rows, width=size.width, deep=size.deep, sparse=sparse)
    if kind == "pnn":
        return PNN(table_rows, width=size.width, deep=size.deep, sparse=sparse)
    raise InvalidRequestError("unknown kind of model", kind=kind, todo="use dlrm, deepfm or pnn")


def scaled_rows(
    cardinalities: Sequence[int],
    *,
    total_rows: int | None = None,
    scale: float | None = None,
    floor: int = 4,
) -> tuple[int, ...]:
    """Table sizes in the same proportions, by a factor or to an exact total.

    No table falls below ``floor`` rows, nor below its own size where that is smaller.

    >>> scaled_rows([1000, 100, 3], scale=0.1)
    (100, 10, 3)
    >>> scaled_rows([1000, 100, 3], total_rows=200)
    (179, 18, 3)

    Raises:
        InvalidRequestError: not exactly one of total_rows and scale, or the floors need more rows.
    """
    check_table_rows(cardinalities)
    if (total_rows is None) == (scale is None):
        raise InvalidRequestError(
            "give exactly one of total_rows and scale", total_rows=total_rows, scale=scale
        )
    sizes = np.array(cardinalities, dtype=np.int64)
    floors = np.minimum(sizes, floor)
    if scale is not None:
        return tuple(np.maximum(floors, np.rint(sizes * scale).astype(np.int64)).tolist())
    assert total_rows is not None
    if total_rows < floors.sum():
        raise InvalidRequestError(
            "too few rows for the tables", total_rows=total_rows, floors=int(floors.sum())
        )
    low, high = 0.0, 1.0 + total_rows / int(sizes.sum())
    for _ in range(60):
        middle = (low + high) / 2
        total = np.maximum(floors, np.rint(sizes * middle).astype(np.int64)).sum()
        low, high = (middle, high) if total <= total_rows else (low, middle)
    rows = np.maximum(floors, np.rint(sizes * low).astype(np.int64))
    rows[sizes.argmax()] += total_rows - rows.sum()
    return tuple(rows.tolist())
