"""recsys/data/parquet.py: the same samples as from lines, by row group."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.recsys.data.criteo import criteo_reader
from holdfast.recsys.data.parquet import Columns, ParquetFiles, parquet_reader
from holdfast.recsys.data.reader import Position, Shard
from holdfast.recsys.data.vocabulary import HashedIds
from tests.unit.recsys.data.criteo_lines import Sample, make_samples, write

IDS = HashedIds([50] * 26)


def as_table(samples: list[Sample], *, kind: str = "integer") -> pa.Table:
    columns: dict[str, Any] = {"label": [s.label for s in samples]}
    for i in range(13):
        columns[f"I{i + 1}"] = pa.array([s.integers[i] for s in samples], pa.int64())
    for c in range(26):
        values = [s.categories[c] for s in samples]
        if kind == "integer":
            columns[f"C{c + 1}"] = pa.array(values, pa.int64())
        else:
            text = pa.array([None if v is None else f"{v:08x}" for v in values], pa.string())
            columns[f"C{c + 1}"] = text.dictionary_encode() if kind == "dictionary" else text
    return pa.table(columns)


def two_files(folder: Path, samples: list[Sample], *, kind: str = "integer") -> list[Path]:
    paths = [folder / "a.parquet", folder / "b.parquet"]
    pq.write_table(as_table(samples[:13], kind=kind), paths[0], row_group_size=5)
    pq.write_table(as_table(samples[13:], kind=kind), paths[1], row_group_size=4)
    return paths


def numbers(batches: list[Any]) -> list[int]:
    return [round(math.expm1(value)) for batch in batches for value in batch.dense[:, 0].tolist()]


@pytest.mark.parametrize("kind", ["integer", "text", "dictionary"])
def test_reads_what_lines_of_the_same_samples_give(tmp_path: Path, kind: str) -> None:
    samples = make_samples(23)
    lines = write(tmp_path / "log", [s.line for s in samples])
    expected = list(criteo_reader([lines], batch_size=6, ids=IDS))
    found = list(parquet_reader(two_files(tmp_path, samples, kind=kind), batch_size=6, ids=IDS))
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.dense, b.dense)
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.labels, b.labels)


@pytest.mark.parametrize("stop_after", range(1, 9))
def test_resuming_repeats_and_skips_no_sample(tmp_path: Path, stop_after: int) -> None:
    files = two_files(tmp_path, make_samples(23))
    first = parquet_reader(files, batch_size=3, ids=IDS)
    begun = []
    for batch in first:
        begun.append(batch)
        if len(begun) == stop_after:
            break
    second = parquet_reader(files, batch_size=3, ids=IDS)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert numbers(begun + list(second)) == list(range(23))


def test_shards_are_disjoint_and_complete(tmp_path: Path) -> None:
    source = ParquetFiles(two_files(tmp_path, make_samples(23)))
    shares = [
        [int(v) for block in source.blocks(Position(), Shard(i, 3)) for v in block.dense_ND[:, 0]]
        for i in range(3)
    ]
    assert all(shares)
    assert sorted(itertools.chain(*shares)) == list(range(23))


@pytest.mark.parametrize(("column", "value"), [("label", 2), ("label", None), ("C3", -1)])
def test_bad_rows_are_named_or_skipped(tmp_path: Path, column: str, value: int | None) -> None:
    table = as_table(make_samples(6))
    values = table[column].to_pylist()
    values[4] = value
    index = table.column_names.index(column)
    table = table.set_column(index, column, pa.array(values, pa.int64()))
    path = tmp_path / "bad.parquet"
    pq.write_table(table, path, row_group_size=3)
    with pytest.raises(InvalidRequestError) as caught:
        list(parquet_reader([path], batch_size=2, ids=IDS))
    assert caught.value.facts == {"file": str(path), "row_group": 1, "row": 2}
    skipping = parquet_reader([path], batch_size=2, ids=IDS, on_bad="skip")
    assert numbers(list(skipping)) == [0, 1, 2, 3, 5]
    assert skipping.skipped == 1


def test_text_that_is_not_hexadecimal_is_a_bad_row(tmp_path: Path) -> None:
    table = as_table(make_samples(3), kind="text")
    index = table.column_names.index("C5")
    table = table.set_column(index, "C5", pa.array(["1a", "shoes", ""]))
    path = tmp_path / "text.parquet"
    pq.write_table(table, path)
    with pytest.raises(InvalidRequestError, match="row=2"):
        list(parquet_reader([path], batch_size=1, ids=IDS))


def test_wrong_columns_and_files_are_named(tmp_path: Path) -> None:
    files = two_files(tmp_path, make_samples(20))
    with pytest.raises(InvalidRequestError, match=r"missing=\['clicked'\]"):
        parquet_reader(files, batch_size=2, ids=IDS, columns=Columns(label="clicked"))
    as_category = Columns(dense=("C1",), categories=("I1",))
    pq.write_table(as_table(make_samples(3), kind="text"), tmp_path / "t.parquet")
    with pytest.raises(InvalidRequestError, match="column='C1'"):
        list(
            parquet_reader(
                [tmp_path / "t.parquet"], batch_size=2, ids=HashedIds([5]), columns=as_category
            )
        )
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(files[0].read_bytes()[:100])
    with pytest.raises(CorruptDataError, match=r"broken\.parquet"):
        parquet_reader([broken], batch_size=2, ids=IDS)


def test_without_pyarrow_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = two_files(tmp_path, make_samples(20))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidRequestError, match=r"pip install holdfast\[parquet\]"):
        parquet_reader(files, batch_size=2, ids=IDS)
