"""The bytes of format 5 as released: servers in groups, and rows found where the page says."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.checkpoint.restoring.restore import read_ids
from holdfast.errors import InvalidRequestError
from tests.golden.make_format5 import CHANGED, PLACEMENT, ROWS, WIDTH, make_model, write_store
from tests.golden.test_format1 import xxh3

STORE = Path(__file__).parent / "format5"


def newest(store: Path) -> tuple[bytes, dict[str, Any]]:
    line, text = max((store / "catalog").iterdir()).read_bytes().splitlines()
    return line, json.loads(text)


def server_of(row: int, shards: list[int]) -> int:
    """As docs/format.md has it."""
    servers, data, _, _, groups = shards
    within, at = servers // groups, row // groups
    return row % groups * within + (at + at // math.lcm(data, within)) % within


def test_the_store_is_there_and_sound() -> None:
    run = hf.open(STORE)
    assert run.steps == (0, 1)
    assert hf.verify(STORE).is_sound
    weight = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH) / 8
    assert np.array_equal(run.read(0, "users.weight").weight, weight)
    weight[list(CHANGED)] -= 1
    assert np.array_equal(run.read(1, "users.weight").weight, weight)


@pytest.mark.parametrize("is_new", [False, True])
def test_the_page_describes_the_catalog(is_new: bool, tmp_path: Path) -> None:
    store = tmp_path / "new" if is_new else STORE
    if is_new:
        write_store(store)
    line, body = newest(store)
    text = json.dumps(body, separators=(",", ":")).encode()
    assert line == b"holdfast-catalog 5 " + f"{xxh3(text):016x}".encode()
    assert body["format"] == 5
    assert body["shards"] == [6, 2, 1, 0, 2]
    run = hf.open(store)
    for segment in run.catalog.segments:
        servers = {server_of(row, body["shards"]) for row in read_ids(run.storage, segment)}
        assert len(servers) == 1


def test_groups_come_back_and_each_servers_rows_are_recovered_alone(tmp_path: Path) -> None:
    url = tmp_path / "run"
    shutil.copytree(STORE, url)
    assert hf.open(url).catalog.sharding.placement == PLACEMENT  # type: ignore[union-attr]
    model, optimizer = make_model()
    with hf.Checkpointer(
        url, model=model, optimizer=optimizer, codec="fp32", servers=PLACEMENT
    ) as ck:
        ck.resume()
        saved = model["users"].weight.detach().numpy().copy()
        for server in range(PLACEMENT.servers):
            held = PLACEMENT.rows_of(server, ROWS)
            model["users"].weight.data[held] = np.nan
            ck.recover([server])
            assert np.array_equal(model["users"].weight.detach().numpy(), saved)
        ck.step()
        ck.save().result(timeout=60)
    assert hf.open(url).info(2).kind == "delta"  # not a base again, as for another placement


def test_servers_without_groups_stay_in_the_format_they_had(tmp_path: Path) -> None:
    model, optimizer = make_model()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizer, servers=6) as ck:
        ck.save().result(timeout=60)
    line, body = newest(tmp_path)
    assert line.startswith(b"holdfast-catalog 2 ")
    assert body["shards"] == [6, 6, 0, 0]


def test_groups_of_an_older_format_or_of_one_are_refused() -> None:
    from holdfast.checkpoint.store import catalogs

    body = newest(STORE)[1]
    lies: list[dict[str, Any]] = [{**body, "shards": [6, 2, 1, 0, n]} for n in (0, 1, 4)]
    lies.append({**body, "format": 3})
    for lie in lies:
        text = json.dumps(lie, separators=(",", ":")).encode()
        head = f"holdfast-catalog {lie['format']} {xxh3(text):016x}\n".encode()
        with pytest.raises(hf.CorruptDataError, match="impossible"):
            catalogs.from_bytes(head + text + b"\n")


def test_what_was_stored_with_other_groups_is_not_taken_for_these(tmp_path: Path) -> None:
    """0.4.0 stored no groups: such a run is read as one group, and recovery refuses another."""
    url = tmp_path / "run"
    shutil.copytree(STORE, url)
    path = max((url / "catalog").iterdir())
    body = {**newest(STORE)[1], "format": 2, "shards": [6, 2, 1, 0]}
    del body["ranks"]
    text = json.dumps(body, separators=(",", ":")).encode()
    path.write_bytes(f"holdfast-catalog 2 {xxh3(text):016x}\n".encode() + text + b"\n")
    model, optimizer = make_model()
    with hf.Checkpointer(url, model=model, optimizer=optimizer, servers=PLACEMENT) as ck:
        ck.resume()
        with pytest.raises(InvalidRequestError):
            ck.recover([1])
