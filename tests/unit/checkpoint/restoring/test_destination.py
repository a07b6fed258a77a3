"""Where stored rows go: any cuts and rows stored into any held, against plain indexing."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.restoring.destination import Held, join_columns, plan_destinations
from holdfast.model.schema import Column, cuts_of
from holdfast.model.shard import Shard

ROWS, WIDTH = 7, 6

bounds = st.sets(st.integers(1, WIDTH - 1)).map(lambda inner: [0, *sorted(inner), WIDTH])


def a_store(cuts: list[int]) -> dict[str, list[np.ndarray]]:
    """Columns of each stored cut: weights that tell their place, state like them, a sum a row."""
    weights = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    found = {}
    for index, (lo, hi) in enumerate(pairwise(cuts)):
        schema = Shard(ROWS, WIDTH, columns=range(lo, hi)).schema("t")
        found[schema.name] = [
            weights[:, lo:hi].copy(),
            -weights[:, lo:hi],
            np.full((ROWS, 1), 10.0 ** (index % 3), np.float32),
        ]
    return found


def schemas_of(cuts: list[int]) -> list:
    return [
        Shard(ROWS, WIDTH, columns=range(lo, hi)).schema(
            "t", (Column("exp_avg", hi - lo), Column("sum", 1))
        )
        for lo, hi in pairwise(cuts)
    ]


@given(bounds, st.integers(0, WIDTH - 1), st.integers(1, WIDTH), st.sets(st.integers(0, ROWS - 1)))
def test_every_float_held_comes_from_where_it_is_stored(
    cuts: list[int], start: int, width: int, rows: set[int]
) -> None:
    floats = range(start, min(WIDTH, start + width))
    shard = Shard(ROWS, WIDTH, np.array(sorted(rows), np.int64), floats)
    # Where every cut is one float wide, a sum for each row cannot be told from one for each float.
    has_sums = any(hi - lo > 1 for lo, hi in pairwise(cuts))
    arrays = {
        "weight": np.full((len(rows), len(floats)), np.nan, np.float32),
        "exp_avg": np.full((len(rows), len(floats)), np.nan, np.float32),
        **({"sum": np.full((len(rows), 1), np.nan, np.float32)} if has_sums else {}),
    }
    destinations, joins = plan_destinations([Held("t", shard, arrays)], schemas_of(cuts))
    stored = a_store(cuts)
    for name, found in destinations.items():
        for one in found:
            for into in one.columns:
                into.array_MD[:] = stored[name][into.column][sorted(rows)][:, into.floats]
    for join in joins:
        join.run()
    whole = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
    wanted = whole[sorted(rows)][:, floats.start : floats.stop]
    assert np.array_equal(arrays["weight"], wanted)
    assert np.array_equal(arrays["exp_avg"], -wanted)
    if has_sums:
        shares = [
            (10.0 ** (index % 3), len(range(max(lo, floats.start), min(hi, floats.stop))))
            for index, (lo, hi) in enumerate(pairwise(cuts))
        ]
        mean = sum(value * w for value, w in shares) / len(floats)
        assert np.allclose(arrays["sum"], mean, rtol=1e-6)


@given(bounds)
def test_cuts_side_by_side_are_the_whole_table(cuts: list[int]) -> None:
    parts = cuts_of(schemas_of(cuts))["t"]
    stored = a_store(cuts)
    columns = join_columns(parts, [stored[part.name] for part in parts])
    assert np.array_equal(columns[0], np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH))
    assert np.array_equal(columns[1], -columns[0])
