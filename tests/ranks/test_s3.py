"""Ranks that save together on S3: every rank stores its own object there, rank 0 commits."""

from __future__ import annotations

import numpy as np
import pytest

import holdfast as hf
from tests.ranks.held import assemble, expected
from tests.ranks.pool import Pool
from tests.s3servers import BUCKET, KINDS, Server


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_save_and_others_go_on(kind: str, pool: Pool, request: pytest.FixtureRequest) -> None:
    """Where conditional puts decide who commits, and where a lease does."""
    server: Server = request.getfixturevalue(kind)
    url, options = f"s3://{BUCKET}/ranks", server.options()
    for ranks, layout, saves in ((3, "row", [2, 3]), (2, "column", [4, 5]), (1, "replicated", [6])):
        given = {"url": url, "layout": layout, "saves": saves, "storage_options": options}
        done = pool.run("train", ranks, **given)
        assert all(one["start"] == (0 if ranks == 3 else saves[0] - 1) for one in done)
        found = assemble(one["held"] for one in done)
        for table, columns in expected(saves[-1]).items():
            for name, values in columns.items():
                assert np.array_equal(found[table][name], values), (ranks, table, name)
    run = hf.open(url, storage_options=options)
    assert run.steps == (2, 3, 4, 5, 6)
    assert len({entry.extent.object for entry in run.catalog.alive(3)}) > 3  # one a rank and save
    assert hf.verify(url, storage_options=options).is_sound
