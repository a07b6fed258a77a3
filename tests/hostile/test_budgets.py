"""What reading a run may take: bounded by the bytes of its catalog and objects (security.md)."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.checkpoint.format import object as object_format
from holdfast.checkpoint.format.catalog import (
    BASE,
    DELTA,
    Catalog,
    CheckpointEntry,
    GridEntry,
    SegmentEntry,
)
from holdfast.checkpoint.format.object import Extent, Index
from holdfast.checkpoint.restoring import fetch
from holdfast.model.schema import Column, TableSchema
from holdfast.storage.base import Storage
from tests.hostile.forger import Held, forge, write_catalog

FACTOR, CONSTANT_BYTES = 64, 256 << 20
READING = """
import re, sys
from pathlib import Path
import numpy as np
import holdfast as hf
from holdfast.checkpoint.diff import diff_steps
from holdfast.model.dtypes import array_dtype
from holdfast.interchange.weightsfile import Wanted, export

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def use(path, out):
    assert hf.verify(path).is_sound
    run = hf.open(path)
    step = run.steps[-1]
    diff_steps(run, run.steps[0], step)
    for table in run.tables(step):
        run.read(step, table.name)
        run.read(step, table.name, range(table.rows // 3))
        run.read(step, table.name, [0, table.rows - 1])
    export(run, step, Path(out), Wanted())
    for name, ids, rows in run.updates(run.steps[0]):
        pass
    run.dense(step)

small, large, out = sys.argv[1:]
use(small, out)
before = peak_bytes()
use(large, out)
print(peak_bytes() - before)
"""


def train(path: Path, rows: int, codec: str) -> None:
    """A base and a delta of one table."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Embedding(rows, 64, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hf.Checkpointer(
        str(path), model=model, optimizer=optimizer, codec=codec, strategy="incrcp"
    ) as ck:
        ck.save().result()
        model(torch.arange(0, rows, 3)).sum().backward()
        optimizer.step()
        ck.step()


def make(path: Path, kind: str, size: int) -> None:
    if kind == "segments":
        forge(path, size, [Held(1, None, [row]) for row in range(size)], {1: 1})
    elif kind == "layers":
        make_layers(path, 40 * size, size)
    else:
        train(path, 40 * size, kind)


def make_layers(path: Path, rows: int, layers: int) -> None:
    """A base, and births of which each has few rows all over the table, in two segments that lie
    between each other."""
    held = [Held(1, None, range(rows))]
    for born in range(2, 2 + layers):
        held += [Held(born, None, range(0, rows, 1000)), Held(born, None, [1, rows - 1])]
    forge(path, rows, held, {1: 1, 1 + layers: 1})


@pytest.mark.parametrize("kind", ["asym2", "fp32", "segments", "layers"])
def test_reading_takes_no_more_than_a_multiple_of_what_is_there(tmp_path: Path, kind: str) -> None:
    make(tmp_path / "small", kind, 20)
    make(tmp_path / "large", kind, 3_000)
    size = sum(path.stat().st_size for path in (tmp_path / "large").rglob("*") if path.is_file())
    given = [str(tmp_path / name) for name in ("small", "large", "out.safetensors")]
    found = subprocess.run(
        [sys.executable, "-c", READING, *given], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    taken = int(found.stdout)
    print(f"{kind}: {size:,} bytes, {taken:,} of memory")
    assert taken <= FACTOR * size + CONSTANT_BYTES


VERIFYING = """
import re, sys
from pathlib import Path
import holdfast as hf

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

small, large = sys.argv[1:]
hf.verify(small)
before = peak_bytes()
lost = {step for damage in hf.verify(large).damages for step in damage.steps}
assert lost == set(hf.open(large).steps)
print(peak_bytes() - before)
"""


def make_catalog(path: Path, kind: str, size: int) -> None:
    """A catalog alone, of many steps: its objects are not there."""
    at = Extent("objects/c1/dense", 16, 0, 0)
    checkpoints = tuple(
        CheckpointEntry(
            step=step, ordinal=0, kind=BASE if step == base else DELTA, base=base, schema=0,
            time=0.0, codec="", state_codec="", rows=0, row_bytes=0, bytes=0, full_bytes=0,
            stall_s=0.0, reason="", dense=at,
        )
        for step in range(size)
        for base in [step if kind == "bases" else 0]
    )  # fmt: skip
    rows, tables = (0, 10 * size) if kind == "bases" else (2, 1)
    schema = tuple(TableSchema(f"{n}", rows, (Column("weight", 1),)) for n in range(tables))
    lost = [Extent(f"objects/c1/{n}", 16, 1, 0) for n in range(0 if kind == "bases" else size)]
    segments = tuple(
        SegmentEntry("0", 1 + n % 7, size - n % 5, 1, 0, 0, extent) for n, extent in enumerate(lost)
    )
    objects = ((at.object, 100), *((extent.object, 100) for extent in lost))
    path.mkdir()
    catalog = Catalog(
        run="r", number=1, writer="w", schemas=(schema,), checkpoints=checkpoints,
        segments=segments, objects=objects,
    )  # fmt: skip
    write_catalog(path, catalog)


@pytest.mark.parametrize(("kind", "size"), [("bases", 2_000), ("steps", 9_000)])
def test_verifying_a_catalog_of_many_steps_takes_no_more_either(
    tmp_path: Path, kind: str, size: int
) -> None:
    """Steps times tables, or steps times damages, are far more than the catalog has bytes."""
    make_catalog(tmp_path / "small", kind, 20)
    make_catalog(tmp_path / "large", kind, size)
    bytes_ = (tmp_path / "large" / "catalog" / "00000001.json").stat().st_size
    given = [str(tmp_path / name) for name in ("small", "large")]
    found = subprocess.run(
        [sys.executable, "-c", VERIFYING, *given], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    taken = int(found.stdout)
    print(f"{kind}: {bytes_:,} bytes, {taken:,} of memory")
    assert taken <= FACTOR * bytes_ + CONSTANT_BYTES


def test_verifying_a_run_of_many_grids_is_linear_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time counts, too: each object's index is read once, no grid is compared with all others."""
    count = 100
    rollups = range(2, 2 + 2 * count, 2)
    segments = [Held(1, None, range(10))]
    for rollup in rollups:
        died = rollup + 2 if rollup != rollups[-1] else None
        segments += [Held(rollup, died, [1, 2]), Held(rollup + 1, died, [2])]
    catalog = forge(
        tmp_path / "run", 10, segments, dict.fromkeys(range(1, 2 + 2 * count), 1),
        older_grids={(rollup, rollup + 2, rollup + 1): {} for rollup in rollups[:-1]},
        grid=(rollups[-1], rollups[-1] + 1), kills={},
    )  # fmt: skip
    read: Counter[str] = Counter()
    compared = 0
    is_equal = GridEntry.__eq__

    def read_index(storage: Storage, name: str, total_bytes: int) -> Index:
        read[name] += 1
        return object_format.read_index(storage, name, total_bytes)

    def compare(one: GridEntry, other: object) -> bool:
        nonlocal compared
        compared += 1
        return is_equal(one, other)

    for module in (fetch, importlib.import_module("holdfast.checkpoint.verify")):
        monkeypatch.setattr(module, "read_index", read_index)
    monkeypatch.setattr(GridEntry, "__eq__", compare)
    assert hf.verify(tmp_path / "run").is_sound
    assert read == Counter(name for name, _ in catalog.objects)
    assert compared < 20 * count
