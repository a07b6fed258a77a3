"""What the tests know of the models without loading TorchRec, and what a restore should give.

# R rows of a whole table, D floats of a row
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrec_train.py"

TYPES = TABLE, ROW, COLUMN, REPLICATED = ("table", "row", "column", "replicated")
COLLECTIONS = ("bags", "weighted", "sequences")
OPTIMIZERS = ("rowwise-adagrad", "adagrad", "sgd", "adam")
ROWS = (37, 50, 23, 41)
WIDTH = 16
TABLES = {
    f"{collection}.{'embeddings' if collection == 'sequences' else 'embedding_bags'}."
    f"{collection[0]}{index}.weight": rows
    for collection in COLLECTIONS
    for index, rows in enumerate(ROWS)
}

# By table: first row, first column, arrays by column name.
Shard = tuple[int, int, dict[str, np.ndarray]]
Shards = dict[str, list[Shard]]


def type_of(collection: str, index: int, layout: int) -> str:
    """How a table is sharded in a layout: collections have every type, and layouts turn them."""
    return TYPES[(index + layout + COLLECTIONS.index(collection)) % 4]


def whole(ranks: Iterable[Shards]) -> dict[str, dict[str, np.ndarray]]:
    """Every number of every table from what all ranks hold: [R, D] by table and column name.

    A row's number (of row-wise Adagrad) stands for each float of the shard it belongs to.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for shards in ranks:
        for name, parts in shards.items():
            for row, column, arrays in parts:
                rows, width = arrays["weight"].shape
                here = np.s_[row : row + rows, column : column + width]
                for key, array in arrays.items():
                    table = found.setdefault(name, {}).setdefault(
                        key, np.full((TABLES[name], WIDTH), np.nan, np.float32)
                    )
                    wide = np.broadcast_to(array.reshape(rows, -1), (rows, width))
                    # Replicas are the same on every rank.
                    assert np.isnan(table[here]).all() or np.array_equal(table[here], wide)
                    table[here] = wide
    return found


def check_restored(saved: Iterable[Shards], restored: Iterable[Shards]) -> int:
    """Compare what ranks hold with what others held; how many numbers were compared.

    All are equal to the bit, except numbers of rows that now stand for floats of several shards:
    their mean, which is what row-wise Adagrad would have come to, up to rounding.
    """
    expected = whole(saved)
    assert set(expected) == set(TABLES)
    compared = 0
    for shards in restored:
        for name, parts in shards.items():
            for row, column, arrays in parts:
                rows, width = arrays["weight"].shape
                assert set(arrays) == set(expected[name]), name
                for key, array in arrays.items():
                    wide = expected[name][key][row : row + rows, column : column + width]
                    if array.reshape(rows, -1).shape == wide.shape:
                        assert np.array_equal(array.reshape(rows, -1), wide), (name, key)
                    elif (wide == wide[:, :1]).all():
                        assert np.array_equal(array.reshape(-1), wide[:, 0]), (name, key)
                    else:
                        mean = wide.astype(np.float64).mean(1)
                        np.testing.assert_allclose(array.reshape(-1), mean, rtol=1e-6)
                    compared += array.size
    return compared
