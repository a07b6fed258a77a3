"""The bytes of format 1 as released: every later version reads them to the same numbers.

The last tests read the committed files with ``struct`` and ``json`` alone, by the numbers of
docs/format.md, so that the page is checked and not only the code.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import holdfast as hf
from holdfast.checkpoint.format.codec import CODEC_NAMES
from holdfast.storage import Storage, open_storage
from tests.golden.make_format1 import (
    BASE_STEP,
    DELTA_STEP,
    SPLIT,
    STATE,
    TABLE_ROWS,
    WIDTH,
    delta_ids,
    every_codec,
)

HERE = Path(__file__).parent
FILES = {
    "catalog/00000001.json",
    "catalog/00000002.json",
    "objects/c00000001/rows-00000003.hf",
    "objects/c00000002/rows-00000005.hf",
}


def read_everything(storage: Storage) -> dict[str, np.ndarray]:
    """Every table at every step and the dense state, by name."""
    run = hf.open(storage.url)
    found: dict[str, np.ndarray] = {}
    for step in run.steps:
        for schema in run.tables(step):
            rows = run.read(step, schema.name)
            found[f"{step}/{schema.name}/weight"] = rows.weight
            found[f"{step}/{schema.name}/{STATE}"] = rows.state[STATE]
        found[f"{step}/dense"] = run.dense(step)["model"]["w"].numpy()
    return found


@pytest.fixture
def golden() -> Storage:
    return open_storage(str(HERE / "format1"))


def test_no_golden_file_is_missing(golden: Storage) -> None:
    assert {item.name for item in golden.list("")} == FILES
    assert (HERE / "format1.npz").exists()


def test_golden_store_is_sound(golden: Storage) -> None:
    report = hf.verify(golden)
    assert report.is_sound, report.damages
    assert (report.catalogs, report.objects, report.segments) == (2, 2, 3 * len(every_codec()))


def test_golden_rows_read_to_the_same_bits(golden: Storage) -> None:
    found = read_everything(golden)
    with np.load(HERE / "format1.npz", allow_pickle=False) as expected:
        assert set(found) == set(expected.files)
        for name in expected.files:
            assert found[name].tobytes() == expected[name].tobytes(), name


def test_golden_store_has_every_codec_of_its_time(golden: Storage) -> None:
    names = {schema.name for schema in hf.open(golden.url).tables(BASE_STEP)}
    assert names == set(CODEC_NAMES), "a new codec needs golden bytes of its own"
    extras = hf.open(golden.url).dense(DELTA_STEP)["extras"]
    assert extras == {"step": DELTA_STEP, "name": "é"}


def xxh3(data: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(data))


def body_of(name: str) -> dict[str, Any]:
    """A catalog, by the page: a line of three words, a line of JSON."""
    line, text, rest = (HERE / "format1" / name).read_bytes().split(b"\n")
    assert rest == b""
    word, number, digest = line.split(b" ")
    assert (word, number) == (b"holdfast-catalog", b"1")
    assert digest == f"{xxh3(text):016x}".encode()
    body: dict[str, Any] = json.loads(text)
    assert body["format"] == 1
    return body


def footer_of(data: bytes) -> list[Any]:
    """An object's index, by the page."""
    assert data[:16] == b"HOLDFAST" + bytes([1, 0, 0, 0]) + bytes(4)
    assert data[-8:] == b"TSAFDLOH"
    length, digest = struct.unpack("<QQ", data[-24:-8])
    footer = data[-24 - length : -24]
    assert xxh3(footer) == digest
    parsed = json.loads(footer)
    assert parsed["format"] == 1
    end = 16
    for _, _, offset, size, sum_ in parsed["segments"]:
        assert offset == end
        end += size
        assert f"{xxh3(data[offset:end]):016x}" == sum_
    assert end == len(data) - 24 - length
    segments: list[Any] = parsed["segments"]
    return segments


def ids_by_the_page(encoding: int, data: bytes, count: int, first: int, last: int) -> list[int]:
    if encoding == 0:
        return list(range(first, last + 1))
    bits = "".join(f"{byte:08b}"[::-1] for byte in data)
    if encoding == 1:
        return [first + at for at, bit in enumerate(bits) if bit == "1"]
    ids, at = [first], 0
    while len(ids) < count:
        width, gaps = data[at], min(128, count - len(ids))
        block = "".join(f"{b:08b}"[::-1] for b in data[at + 1 : at + 1 + -(-gaps * width // 8)])
        for gap in range(gaps):
            ids.append(ids[-1] + 1 + int(block[gap * width : (gap + 1) * width][::-1] or "0", 2))
        at += 1 + -(-gaps * width // 8)
    return ids


def uncoded(data: bytes, bits: int, rows: int, width: int) -> np.ndarray:
    """Packed codes, lowest bits first, each row on a byte of its own."""
    row_bytes = (width * bits + 7) // 8
    out = np.empty((rows, width), np.int64)
    for row in range(rows):
        packed = int.from_bytes(data[row * row_bytes : (row + 1) * row_bytes], "little")
        out[row] = [packed >> bits * i & (1 << bits) - 1 for i in range(width)]
    return out


def column_by_the_page(wire: bytes, data: bytes, rows: int, width: int) -> np.ndarray:
    """One column of a segment, decoded from the page's description alone."""
    kind, bits, zero, block_rows = struct.unpack("<BBHI", wire)
    assert zero == 0
    if kind == 1:
        assert len(data) == 4 * rows * width
        return np.frombuffer(data, "<f4").reshape(rows, width)
    at = 0

    def take(dtype: str, count: int) -> np.ndarray:
        nonlocal at
        at += count * np.dtype(dtype).itemsize
        return np.frombuffer(data[at - count * np.dtype(dtype).itemsize : at], dtype)

    def codes() -> np.ndarray:
        nonlocal at
        size = rows * ((width * bits + 7) // 8)
        at += size
        return uncoded(data[at - size : at], bits, rows, width)

    f32 = np.float32
    if kind == 2:
        out = take("<f2", rows * width).astype(f32).reshape(rows, width)
    elif kind == 3:
        halves = take("<u2", rows * width).astype(np.uint32)
        out = (halves << 16).view(f32).reshape(rows, width)
    elif kind in (4, 5, 6):
        scale = take("<f2", rows).astype(f32)[:, None]
        middle = f32(-0.5) * f32(2**bits - 1)
        offset = middle * scale if kind == 4 else take("<f2", rows).astype(f32)[:, None]
        out = (codes().astype(np.float64) * scale + offset).astype(f32)
    elif kind == 7:
        low, high = take("<u2", rows).astype(np.int64), take("<u2", rows).astype(np.int64)
        steps = 2**bits - 2
        step = (((high - low) << 16) + steps - 1) // steps
        found = codes()
        pattern = np.maximum(1, (low[:, None] << 16) + (found - 1) * step[:, None])
        out = np.where(found == 0, 0, pattern).astype(np.uint32).view(f32)
    else:
        blocks = rows if kind == 8 else -(-rows // block_rows)
        books = take("<f2", blocks << bits).astype(f32).reshape(blocks, -1)
        block = np.arange(rows) // (1 if kind == 8 else block_rows)
        if kind == 10:
            block = take("<u2" if blocks <= 65536 else "<u4", rows)
        out = np.take_along_axis(books[block], codes(), axis=1)
    assert not any(data[at : -(-at // 4) * 4])
    at = -(-at // 4) * 4
    (exceptions,) = take("<u4", 1).tolist()
    places = take("<u4", exceptions)
    raw = take("<u4", exceptions * width).view("<f4").reshape(exceptions, width)
    assert at == len(data)
    out = out.copy()
    out[places] = raw
    return out


def test_every_segment_reads_by_the_numbers_of_the_page(golden: Storage) -> None:
    body = body_of("catalog/00000002.json")
    seen = set()
    tables = {table.name: index for index, table in enumerate(every_codec())}
    with np.load(HERE / "format1.npz", allow_pickle=False) as expected:
        for name, size in body["objects"]:
            data = (HERE / "format1" / name).read_bytes()
            assert len(data) == size
            index = {entry[2]: entry for entry in footer_of(data)}
            for table, born, died, rows, first, last, place, offset, length, sum_ in body[
                "segments"
            ]:
                if body["objects"][place][0] != name:
                    continue
                label = body["tables"][table]
                assert died is None
                assert index[offset] == ["rows", label, offset, length, sum_]
                segment = data[offset : offset + length]
                magic, fmt, encoding, columns, count, zero = struct.unpack("<4sHBBII", segment[:16])
                assert (magic, fmt, columns, count, zero) == (b"HFSG", 1, 2, rows, 0)
                low, high, ids_bytes, ids_sum = struct.unpack("<QQQQ", segment[16:48])
                assert (low, high) == (first, last)
                assert struct.unpack("<Q", segment[96:104]) == (xxh3(segment[:96]),)
                at = 104
                id_data = segment[at : at + ids_bytes]
                assert xxh3(id_data) == ids_sum
                ids = ids_by_the_page(encoding, id_data, count, first, last)
                if born == DELTA_STEP:
                    assert ids == delta_ids(tables[label]).tolist()
                else:
                    assert ids in (list(range(SPLIT)), list(range(SPLIT, TABLE_ROWS)))
                at += -(-ids_bytes // 8) * 8
                for column, (part, width) in enumerate((("weight", WIDTH), (STATE, 1))):
                    wire, found_width, zero, size = struct.unpack(
                        "<8sIIQ", segment[48 + 24 * column : 72 + 24 * column]
                    )
                    assert (found_width, zero) == (width, 0)
                    values = column_by_the_page(wire, segment[at : at + size], rows, width)
                    wanted = expected[f"{born}/{label}/{part}"][ids]
                    assert values.tobytes() == wanted.tobytes(), (label, part)
                    at += -(-size // 8) * 8
                    seen.add((wire[0], wire[1]))
                assert at == length
                seen.add(encoding)
    assert {0, 1, 2} <= seen
    assert len(seen) == 3 + len(CODEC_NAMES)


def test_dense_state_reads_by_the_page() -> None:
    body = body_of("catalog/00000002.json")
    for entry in body["checkpoints"]:
        place, offset, length, sum_ = entry["dense"]
        data = (HERE / "format1" / body["objects"][place][0]).read_bytes()[offset : offset + length]
        assert f"{xxh3(data):016x}" == sum_
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_bytes])
        structure = json.loads(header["__metadata__"]["holdfast.tree"])
        (model,) = [value for key, value in structure["d"] if key == "model"]
        assert model == {"d": [["w", {"x": "0"}]]}
        start, stop = header["0"]["data_offsets"]
        raw = data[8 + header_bytes :][start:stop]
        assert np.frombuffer(raw, "<f4").tolist() == [entry["step"] + i for i in range(3)]
