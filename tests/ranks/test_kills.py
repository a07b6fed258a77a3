"""A rank is killed while all save: the checkpoint before is whole, the others are told, the next
run goes on and cleans up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from holdfast.storage import open_storage
from tests.ranks.held import assemble, expected
from tests.ranks.killed import kill_one
from tests.ranks.pool import Pool

CASES = [
    (0, "storing"),
    (1, "storing"),
    (2, "stored"),
    (0, "stored"),
    (0, "committing"),
    (0, "committed"),
]


@pytest.mark.parametrize(("dies", "point"), CASES)
def test_a_killed_rank_leaves_the_last_checkpoint_whole(
    pool: Pool, tmp_path: Path, dies: int, point: str
) -> None:
    url = str(tmp_path)
    told = kill_one(url, ranks=3, dies=dies, point=point)
    assert told[dies] is None
    for rank, text in enumerate(told):
        assert rank == dies or (text is not None and text != "committed"), told
    steps = (2, 3) if point == "committed" else (2,)
    assert hf.open(url).steps == steps
    assert hf.verify(url).is_sound
    # The next run: other ranks, the same url.
    done = pool.run("train", 2, url=url, layout="row", saves=[5])
    assert [one["start"] for one in done] == [steps[-1]] * 2
    found = assemble(one["held"] for one in done)
    for table, columns in expected(5).items():
        for name, values in columns.items():
            assert np.array_equal(found[table][name], values)
    named = {name for name, _ in hf.open(url).catalog.objects}
    assert {item.name for item in open_storage(url).list("objects/")} == named
    assert hf.verify(url).is_sound
