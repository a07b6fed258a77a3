"""recsys/data/criteo.py and the reader over it: every line once, in order, whatever is cut
where."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.errors import CorruptDataError, InvalidRequestError, NotFoundError
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.data.criteo import CriteoFiles, criteo_reader, day_files
from holdfast.recsys.data.reader import FileReader, Position, Shard
from holdfast.recsys.data.vocabulary import HashedIds
from tests.unit.recsys.data.criteo_lines import Sample, make_samples, write

IDS = HashedIds([50] * 26)


def numbers(batches: list[Batch]) -> list[int]:
    """The numbers of the samples, from their first integer."""
    return [round(math.expm1(value)) for batch in batches for value in batch.dense[:, 0].tolist()]


def three_files(folder: Path, samples: list[Sample]) -> list[Path]:
    """23 samples in a plain, a gzipped and an unfinished file, an empty one between."""
    lines = [sample.line for sample in samples]
    return [
        write(folder / "day_0", lines[:9]),
        write(folder / "day_1", []),
        write(folder / "day_2.gz", lines[9:16]),
        write(folder / "day_3", lines[16:], last=""),
    ]


@pytest.mark.parametrize("block_bytes", [1, 50, 300, 1 << 20])
def test_parses_what_the_lines_say(tmp_path: Path, block_bytes: int) -> None:
    samples = make_samples(23)
    source = CriteoFiles(three_files(tmp_path, samples), block_bytes=block_bytes)
    blocks = list(source.blocks(Position(), Shard()))
    assert np.concatenate([b.labels_N for b in blocks]).tolist() == [s.label for s in samples]
    assert np.concatenate([b.codes_NT for b in blocks]).tolist() == [s.codes for s in samples]
    dense = np.concatenate([b.dense_ND for b in blocks])
    assert dense.tolist() == [[v or 0 for v in s.integers] for s in samples]


def test_batches_span_files_and_transform_the_values(tmp_path: Path) -> None:
    samples = make_samples(23)
    reader = criteo_reader(three_files(tmp_path, samples), batch_size=5, ids=IDS)
    batches = list(reader)
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
    assert torch.allclose(
        torch.cat([b.dense for b in batches]), torch.tensor([s.dense for s in samples])
    )
    expected = IDS.ids(np.array([s.codes for s in samples], dtype=np.uint64))
    assert torch.equal(torch.cat([b.ids for b in batches]), torch.from_numpy(expected))
    assert torch.cat([b.labels for b in batches]).tolist() == [s.label for s in samples]
    dropping = criteo_reader(three_files(tmp_path, samples), batch_size=5, ids=IDS, drop_last=True)
    assert numbers(list(dropping)) == list(range(20))


@pytest.mark.parametrize("block_bytes", [100, 1 << 20])
@pytest.mark.parametrize("stop_after", range(9))
def test_resuming_repeats_and_skips_no_sample(
    tmp_path: Path, block_bytes: int, stop_after: int
) -> None:
    files = three_files(tmp_path, make_samples(23))

    def reader() -> FileReader:
        return FileReader(CriteoFiles(files, block_bytes=block_bytes), batch_size=3, ids=IDS)

    first = reader()
    begun = []
    if stop_after:
        for batch in first:
            begun.append(batch)
            if len(begun) == stop_after:
                break
    second = reader()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert numbers(begun + list(second)) == list(range(23))
    assert (second.epoch, first.epoch) == (1, 0)
    assert numbers(list(second)) == list(range(23))


def test_windows_line_ends_are_read(tmp_path: Path) -> None:
    samples = make_samples(4)
    path = write(tmp_path / "a", [s.line for s in samples], newline="\r\n", last="\r\n")
    (block,) = CriteoFiles([path]).blocks(Position(), Shard())
    assert block.codes_NT.tolist() == [s.codes for s in samples]


def spoiled(field: int, value: str) -> str:
    fields = make_samples(1)[0].line.split("\t")
    fields[field] = value
    return "\t".join(fields)


BAD_LINES = {
    "": "1 fields instead of 40",
    "0\t1\t2": "3 fields instead of 40",
    make_samples(1)[0].line + "\t": "41 fields instead of 40",
    spoiled(0, "2"): "field 1 is '2'",
    spoiled(0, ""): "field 1 is ''",
    spoiled(0, "01"): "field 1 is '01'",
    spoiled(3, "1.5"): "field 4 is '1.5'",
    spoiled(3, "-"): "field 4 is '-'",
    spoiled(3, "1-"): "field 4 is '1-'",
    spoiled(3, "a"): "field 4 is 'a'",
    spoiled(3, "9" * 19): "field 4 is '9999999999999999999'",
    spoiled(39, "xyz"): "field 40 is 'xyz'",
    spoiled(14, "123456789"): "field 15 is '123456789'",
    spoiled(14, "-1"): "field 15 is '-1'",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items())
def test_a_bad_line_is_named_after_the_good_ones_before_it(
    tmp_path: Path, line: str, reason: str
) -> None:
    lines = [sample.line for sample in make_samples(6)]
    path = write(tmp_path / "log", [*lines[:4], line, *lines[4:]])
    batches = []
    with pytest.raises(InvalidRequestError) as caught:
        batches.extend(iter(criteo_reader([path], batch_size=2, ids=IDS)))
    reader = iter(criteo_reader([path], batch_size=2, ids=IDS))
    assert numbers([next(reader), next(reader)]) == [0, 1, 2, 3]
    assert reason in str(caught.value)
    assert caught.value.facts == {"file": str(path), "line": 5}


def test_bad_lines_are_skipped_counted_and_resumed_past(tmp_path: Path) -> None:
    lines = [sample.line for sample in make_samples(6)]
    bad = list(BAD_LINES)
    path = write(tmp_path / "log", [bad[0], *lines[:3], *bad[1:4], *lines[3:], *bad[4:]])

    def reader() -> FileReader:
        return criteo_reader([path], batch_size=2, ids=IDS, on_bad="skip")

    whole = reader()
    assert numbers(list(whole)) == list(range(6))
    assert whole.skipped == len(bad)
    first = reader()
    batches = iter(first)
    begun = [next(batches), next(batches)]
    assert first.skipped == 4
    second = reader()
    second.load_state_dict(first.state_dict())
    assert numbers(begun + list(second)) == list(range(6))
    assert second.skipped == len(bad)


def stateful_loader(files: list[Path], workers: int) -> StatefulDataLoader:
    reader = criteo_reader(files, batch_size=3, ids=IDS)
    return StatefulDataLoader(reader, batch_size=None, num_workers=workers)


# torchdata calls this when it starts
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("stop_after", [1, 4])
def test_two_torchdata_workers_share_the_samples_and_resume(
    tmp_path: Path, stop_after: int
) -> None:
    files = three_files(tmp_path, make_samples(23))
    whole = numbers(list(stateful_loader(files, 2)))
    assert sorted(whole) == list(range(23))
    assert whole != sorted(whole)
    first = stateful_loader(files, 2)
    begun = []
    for batch in first:
        begun.append(batch)
        if len(begun) == stop_after:
            break
    state = first.state_dict()
    del first
    second = stateful_loader(files, 2)
    second.load_state_dict(state)
    assert numbers(begun + list(second)) == whole


def test_refuses_a_state_of_other_files_or_another_share(tmp_path: Path) -> None:
    files = three_files(tmp_path, make_samples(23))
    state = criteo_reader(files, batch_size=3, ids=IDS).state_dict()
    with pytest.raises(InvalidRequestError, match="other files"):
        criteo_reader(files[:2], batch_size=3, ids=IDS).load_state_dict(state)
    with pytest.raises(InvalidRequestError, match="not a reader's state"):
        criteo_reader(files, batch_size=3, ids=IDS).load_state_dict({"file": 0})
    reader = criteo_reader(files, batch_size=3, ids=IDS)
    reader.load_state_dict({**state, "shard": [1, 2, 3]})
    with pytest.raises(InvalidRequestError, match="another share"):
        next(iter(reader))


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "day_0.gz", [s.line for s in make_samples(200)])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CorruptDataError, match=r"day_0\.gz"):
        list(criteo_reader([path], batch_size=3, ids=IDS))
    with pytest.raises(NotFoundError, match="day_7"):
        criteo_reader([tmp_path / "day_7"], batch_size=3, ids=IDS)
    endless = tmp_path / "binary"
    endless.write_bytes(b"x" * (1 << 17))
    with pytest.raises(InvalidRequestError, match="too long"):
        list(CriteoFiles([endless], block_bytes=4096).blocks(Position(), Shard()))


def test_day_files_come_in_the_order_of_days(tmp_path: Path) -> None:
    for name in ("day_10", "day_2.gz", "day_0", "day_x", "other"):
        (tmp_path / name).touch()
    assert [path.name for path in day_files(tmp_path)] == ["day_0", "day_2.gz", "day_10"]
    (tmp_path / "day_2").touch()
    with pytest.raises(InvalidRequestError, match="twice"):
        day_files(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError):
        day_files(tmp_path / "empty")
