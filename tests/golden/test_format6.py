"""The bytes of format 6 as released: what a user said of checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast as hf
from holdfast.checkpoint.store import catalogs
from tests.golden.make_format6 import METADATA, METRICS, ROWS, WIDTH, make_model, write_store
from tests.golden.test_format1 import xxh3

STORE = Path(__file__).parent / "format6"


def newest(store: Path) -> tuple[bytes, dict[str, Any]]:
    line, text = max((store / "catalog").iterdir()).read_bytes().splitlines()
    return line, json.loads(text)


def test_the_store_is_there_and_sound() -> None:
    run = hf.open(STORE)
    assert hf.verify(STORE).is_sound
    weight = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH) / 8
    for step in (0, 1, 2):
        assert np.array_equal(run.read(step, "users.weight").weight, weight)
        assert run.info(step).metrics == METRICS.get(step, {})
        assert run.info(step).metadata == (METADATA if step == 0 else {})
        weight[3] -= 1
    assert run.best("auc").step == 0
    assert run.best("auc", mode="min").step == 2


@pytest.mark.parametrize("is_new", [False, True])
def test_the_page_describes_the_catalog(is_new: bool, tmp_path: Path) -> None:
    store = tmp_path / "new" if is_new else STORE
    if is_new:
        write_store(store)
    line, body = newest(store)
    text = json.dumps(body, separators=(",", ":")).encode()
    assert line == b"holdfast-catalog 6 " + f"{xxh3(text):016x}".encode()
    assert body["format"] == 6 and body["ranks"] == []
    assert body["annotations"] == [[0, METRICS[0], METADATA], [2, METRICS[2], {}]]


def test_training_goes_on_and_keeps_what_was_said(tmp_path: Path) -> None:
    url = tmp_path / "run"
    shutil.copytree(STORE, url)
    model, optimizer = make_model()
    with hf.Checkpointer(url, model=model, optimizer=optimizer, codec="fp32") as ck:
        assert ck.resume() == 2
        ck.step()
        ck.save().result(timeout=60)
    assert newest(url)[1]["annotations"] == newest(STORE)[1]["annotations"]


def test_a_run_of_which_nothing_is_said_stays_in_the_format_it_had(tmp_path: Path) -> None:
    model, optimizer = make_model()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizer, keep=1) as ck:
        ck.save(metrics={"auc": 0.5}).result(timeout=60)
        assert newest(tmp_path)[1]["format"] == 6
        ck.step()  # the checkpoint that had a metric is dropped
    line, body = newest(tmp_path)
    assert line.startswith(b"holdfast-catalog 2 ") and "annotations" not in body


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "said",
    [
        [0, {"auc": "high"}, {}],
        [0, {"auc": None}, {}],
        [0, {"auc": True}, {}],
        [0, {"": 1.0}, {}],
        [0, {"x" * 129: 1.0}, {}],
        [0, {"\ud800": 1.0}, {}],
        [0, {f"m{i}": 1.0 for i in range(65)}, {}],
        [0, [], {}],
        [0, {}, []],
        [0, {}, "text"],
        [0, {}, {"x": "y" * 4097}],
        [0, {}, {"x": deep(17)}],
        [0, {}, {"x": 1 << 63}],
        [0, {}, {"x": "\udc00"}],
        [0, {}],
        [7, {"auc": 1.0}, {}],
        [-1, {"auc": 1.0}, {}],
        ["0", {"auc": 1.0}, {}],
    ],
    ids=lambda said: ascii(said)[:40],
)
def test_annotations_that_nobody_can_have_written_are_refused(said: list[Any]) -> None:
    refuse({**newest(STORE)[1], "annotations": [said]})


@pytest.mark.parametrize("lie", ["1e999", "-1e999", "NaN", "Infinity"])
@pytest.mark.parametrize("where", ['[0,{"auc":%s},{}]', '[0,{},{"auc":[%s]}]'])
def test_numbers_that_are_not_finite_are_refused(lie: str, where: str) -> None:
    body = {**newest(STORE)[1], "annotations": "HERE"}
    text = json.dumps(body, separators=(",", ":")).replace('"HERE"', f"[{where % lie}]").encode()
    refuse_text(text, 6)


def test_metadata_nested_beyond_any_bound_is_refused() -> None:
    body = {**newest(STORE)[1], "annotations": "HERE"}
    lie = '[[0,{},{"x":' + "[" * 5000 + "]" * 5000 + "}]]"
    refuse_text(json.dumps(body, separators=(",", ":")).replace('"HERE"', lie).encode(), 6)


def refuse(body: dict[str, Any]) -> None:
    refuse_text(json.dumps(body, separators=(",", ":")).encode(), body["format"])


def refuse_text(text: bytes, format_: int) -> None:
    head = f"holdfast-catalog {format_} {xxh3(text):016x}\n".encode()
    with pytest.raises(hf.CorruptDataError, match="impossible"):
        catalogs.from_bytes(head + text + b"\n")
