"""The bytes of format 3 as released: a table cut by columns, written by two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import holdfast as hf
from tests.golden.make_format3 import (
    BASE_STEP,
    CHANGED,
    CUT,
    DELTA_STEP,
    ROWS_OF,
    WIDTH,
    own_state,
    sums,
    weights,
    write_store,
)
from tests.golden.test_format1 import xxh3

STORE = Path(__file__).parent / "format3"
STEPS = (BASE_STEP, DELTA_STEP)


def test_the_store_is_there_and_sound() -> None:
    assert hf.open(STORE).steps == STEPS
    assert hf.verify(STORE).is_sound


@pytest.mark.parametrize("step", STEPS)
def test_whole_tables_are_read_to_the_same_numbers(step: int) -> None:
    run = hf.open(STORE)
    for table in ROWS_OF:
        assert np.array_equal(run.read(step, table).weight, weights(table, step))
    mean = (CUT * sums(0, step) + (WIDTH - CUT) * sums(1, step)) / WIDTH
    assert np.allclose(run.read(step, "users").state["sum"], mean, rtol=1e-6)


def test_the_page_describes_the_catalog() -> None:
    newest = max((STORE / "catalog").iterdir())
    line, text = newest.read_bytes().splitlines()
    assert line == b"holdfast-catalog 3 " + f"{xxh3(text):016x}".encode()
    body = json.loads(text)
    assert body["format"] == 3
    cuts = {name: cut for name, _, _, *cut in body["schemas"][0]}
    assert cuts == {
        f"users[0:{CUT}]": [["users", 0, WIDTH]],
        f"users[{CUT}:{WIDTH}]": [["users", CUT, WIDTH]],
        "items": [],
    }
    assert [(step, len(extents)) for step, extents in body["ranks"]] == [(4, 2), (6, 2)]
    for step, extents in body["ranks"]:
        for rank, (place, offset, size, sum_) in enumerate(extents):
            data = (STORE / body["objects"][place][0]).read_bytes()[offset : offset + size]
            assert f"{xxh3(data):016x}" == sum_
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            tree = json.loads(header["__metadata__"]["holdfast.tree"])
            reader = dict(map(tuple, dict(map(tuple, tree["d"]))["extras"]["d"]))["reader"]
            wanted = own_state(rank, step)["extras"]
            assert isinstance(wanted, dict)
            assert reader == {"d": [["at", wanted["reader"]["at"]]]}


def test_updates_and_ranks_are_read() -> None:
    run = hf.open(STORE)
    found = {}
    for table, ids, rows in run.updates(since=BASE_STEP):
        found.setdefault(table, []).append((ids.tolist(), rows))
    users = weights("users", DELTA_STEP)[CHANGED]
    ((ids, rows),) = found[f"users[{CUT}:{WIDTH}]"]
    assert ids == CHANGED.tolist()
    assert np.array_equal(rows, users[:, CUT:])
    assert sorted(id_ for ids, _ in found["items"] for id_ in ids) == CHANGED.tolist()
    assert run.ranks(DELTA_STEP) == [own_state(rank, DELTA_STEP) for rank in range(2)]


def test_the_writer_still_writes_it(tmp_path: Path) -> None:
    from holdfast.storage import open_storage

    write_store(open_storage(str(tmp_path)))
    for path in STORE.glob("objects/*/*"):
        assert (tmp_path / path.relative_to(STORE)).read_bytes() == path.read_bytes()
