"""Lies with a correct checksum: parsers answer with our errors, and touch nothing they should not.

Every mutation is followed by a repair of the checksums around it, so that it is the parser that is
tested and not the checksum.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint import catalog as catalogs
from holdfast.checkpoint import tree
from holdfast.checkpoint.checksum import as_hex, checksum
from holdfast.checkpoint.codec import parse_codec
from holdfast.checkpoint.object import read_index
from holdfast.checkpoint.restore import restore_rows
from holdfast.checkpoint.segment import Segment, encode_segment, header_bytes
from holdfast.storage import open_storage
from holdfast.tables import Column, TableSchema
from tests.golden.make_format1 import (
    BASE_STEP,
    TABLE_ROWS,
    every_codec,
    make_rows,
    write_store,
)

SEED = 20240613
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    39,
    40,
    41,
    255,
    2**31,
    2**32 - 1,
    2**40,
    2**56,
    2**62,
    2**63,
    2**64 - 1,
)
COUNTS = (*NUMBERS, -1, 2**70, 1.5, float("inf"), float("nan"), True, None, "x", "16", [], {}, [[]])
fuzz = settings(max_examples=300, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """A lying count must not cost memory: an allocation of gigabytes fails the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# Segments


def good_segment(codec: str, ids_N: np.ndarray) -> bytes:
    weight, state = make_rows(3, len(ids_N))
    encoded = encode_segment(ids_N, [weight, state], [parse_codec(codec), parse_codec("log8")])
    return b"".join(memoryview(b).cast("B") for b in encoded.buffers)  # type: ignore[call-overload]


IDS = (np.arange(8, 20), np.array([0, 5, 6, 31]), np.flatnonzero(np.arange(40) % 3))
CODECS = ("fp32", "fp16", "sym3", "asym4", "adaptive2", "log4", "kmeans2", "kmeans4-block")
CODECS += ("kmeans3-cluster", "bf16", "asym8")
SEGMENTS = [good_segment(codec, ids.astype(np.int64)) for codec in CODECS for ids in IDS]
SCHEMA = TableSchema("t", TABLE_ROWS, (Column("weight", 5), Column("sum", 1)))
# offset and struct code of every number of a header with two columns
FIELDS = [(4, "H"), (6, "B"), (7, "B"), (8, "I"), (12, "I"), (16, "Q"), (24, "Q"), (32, "Q")]
FIELDS += [(48, "B"), (49, "B"), (50, "H"), (52, "I"), (56, "I"), (60, "I"), (64, "Q")]
FIELDS += [(72, "B"), (73, "B"), (80, "I"), (88, "Q")]


def repaired(data: bytearray) -> bytes:
    """The segment with the header's checksum made right."""
    end = header_bytes(data[7]) if len(data) > 7 else 0
    if 8 <= end <= len(data):
        struct.pack_into("<Q", data, end - 8, checksum(memoryview(data)[: end - 8]))
    return bytes(data)


def read_segment(data: bytes) -> None:
    """Read all of a segment into a guarded table: refused, or nothing outside is touched."""
    guarded = [np.full((TABLE_ROWS + 2, c.width), 7, np.float32) for c in SCHEMA.columns]
    with contextlib.suppress(hf.HoldfastError):
        segment = Segment(memoryview(data), where="here")
        segment.check_schema(SCHEMA)
        ids_N = segment.ids()
        assert ids_N.min() >= 0 and ids_N.max() < TABLE_ROWS
        for index, whole in enumerate(guarded):
            segment.decode_into(index, whole[1:-1], ids_N)
            assert segment.decode(index).shape == (len(ids_N), SCHEMA.columns[index].width)
    for whole in guarded:
        assert (whole[[0, -1]] == 7).all()


def test_the_corpus_is_accepted() -> None:
    for data in SEGMENTS:
        segment = Segment(memoryview(data), where="here")
        segment.check_schema(SCHEMA)
        segment.decode(0)
        assert repaired(bytearray(data)) == data


@given(
    st.sampled_from(SEGMENTS),
    st.lists(st.tuples(st.sampled_from(FIELDS), st.sampled_from(NUMBERS)), min_size=1, max_size=3),
)
@fuzz
def test_lying_segment_headers_are_refused_or_harmless(
    good: bytes, lies: list[tuple[tuple[int, str], int]]
) -> None:
    data = bytearray(good)
    for (offset, code), value in lies:
        struct.pack_into(f"<{code}", data, offset, value % (1 << 8 * struct.calcsize(code)))
    read_segment(repaired(data))


@pytest.mark.parametrize("shift", [1, 20, 21, 28, 2**20, 2**55, 2**56 - 32, 2**61, 2**63])
def test_segments_moved_past_the_table_are_refused(shift: int) -> None:
    for good in SEGMENTS:
        data = bytearray(good)
        first, last = struct.unpack_from("<QQ", data, 16)
        struct.pack_into("<QQ", data, 16, first + shift, last + shift)
        read_segment(repaired(data))
        if last + shift >= TABLE_ROWS:
            with pytest.raises(hf.CorruptDataError, match="here"):
                Segment(memoryview(repaired(data)), where="here").check_schema(SCHEMA)


@given(st.sampled_from(SEGMENTS), st.data())
@fuzz
def test_lying_segment_contents_are_refused_or_harmless(good: bytes, data: st.DataObject) -> None:
    changed = bytearray(good)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(header_bytes(2), len(good) - 1))
        changed[at] = data.draw(st.sampled_from([0, 1, 0x7C, 0x7F, 0x80, 0xFF]))
    read_segment(repaired(changed))


@given(st.binary(max_size=400))
@fuzz
def test_random_bytes_are_no_segment(data: bytes) -> None:
    read_segment(data)
    read_segment(repaired(bytearray(b"HFSG\x01\x00" + data)))


# Objects


class OneObject:
    """A storage of one object."""

    url = "memory"

    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self, name: str) -> int:
        return len(self._data)

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        assert offset >= 0 and (length is None or offset + length <= len(self._data))
        return self._data[offset:] if length is None else self._data[offset : offset + length]


def framed(footer: bytes, body: bytes = bytes(64)) -> bytes:
    """An object with this footer, its checksum right."""
    head = struct.pack("<8sII", b"HOLDFAST", 1, 0)
    return head + body + footer + struct.pack("<QQ8s", len(footer), checksum(footer), b"TSAFDLOH")


def index_of(data: bytes) -> dict[int, Any]:
    return read_index(OneObject(data), "o.hf", len(data))  # type: ignore[arg-type]


def test_the_frame_is_accepted() -> None:
    segments = [["rows", "t", 16, 40, f"{255:016x}"], ["dense", "d", 56, 24, f"{1:016x}"]]
    footer = json.dumps({"format": 1, "segments": segments}).encode()
    assert set(index_of(framed(footer))) == {16, 56}


@pytest.mark.parametrize("field", range(5))
@pytest.mark.parametrize("value", COUNTS, ids=repr)
def test_lying_footers_are_refused_or_consistent(field: int, value: Any) -> None:
    entry: list[Any] = ["rows", "t", 16, 64, f"{255:016x}"]
    entry[field] = value
    try:
        index = index_of(framed(json.dumps({"format": 1, "segments": [entry]}).encode()))
    except hf.CorruptDataError:
        return
    (extent,) = index.values()
    assert (extent.offset, extent.bytes) == (16, 64)


@pytest.mark.parametrize(
    "footer",
    [
        b"", b"{", b"[]", b"1", b"null", b'"x"', b"{}", b'{"format":1}', b"\xff\xfe",
        b'{"format":2,"segments":[]}', b'{"format":1,"segments":7}', b'{"format":1,"segments":{}}',
        b'{"format":1,"segments":[7]}', b'{"format":1,"segments":[[]]}',
        b'{"format":1,"segments":[["rows","t",16,40,"0"],["rows","t",55,25,"0"]]}',
        b'{"format":1,"segments":[["rows","t",16,40,"0"],["rows","t",57,23,"0"]]}',
        b'{"format":1,"segments":[["rows","t",16,100,"0"],["rows","t",116,-36,"0"]]}',
        b'{"format":1,"segments":[["rows","t",16,1e999,"0"]]}',
        b'{"format":1,"segments":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"format":1,"segments":[["rows","t",' + b"9" * 5000 + b',1,"0"]]}',
    ],
    ids=lambda footer: footer[:40].decode("latin1"),
)  # fmt: skip
def test_impossible_footers_are_refused(footer: bytes) -> None:
    with pytest.raises(hf.CorruptDataError, match=r"o\.hf"):
        index_of(framed(footer))


@given(st.binary(max_size=200))
@fuzz
def test_random_bytes_are_no_object(data: bytes) -> None:
    for candidate in (data, framed(data), framed(b"")[: len(data)]):
        with pytest.raises(hf.CorruptDataError):
            index_of(candidate)


# Dense state


def dense_bytes(structure: Any, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    return tree.to_bytes(structure, tensors or {"0": torch.arange(6.0), "1": torch.ones(2, 3)})


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4), st.sampled_from(["0", "1", "2"]),
)  # fmt: skip
TAGS = st.sampled_from(["d", "l", "t", "x", "n", "s", "b", "f", "sparse", "", "z"])
NODES = st.recursive(
    LEAVES,
    lambda node: st.one_of(
        st.lists(node, max_size=4),
        st.dictionaries(TAGS, node, max_size=2),
        st.tuples(TAGS, node).map(lambda pair: {pair[0]: pair[1]}),
    ),
    max_leaves=12,
)


@given(NODES)
@fuzz
def test_lying_dense_structures_are_refused_or_built(node: Any) -> None:
    with contextlib.suppress(hf.CorruptDataError):
        tree.from_bytes(dense_bytes(node))


@pytest.mark.parametrize(
    "node",
    [
        {"sparse": ["0", "1", [2**70, 3], True]},
        {"sparse": ["0", "1", [2**62, 2**62], True]},
        {"sparse": ["0", "1", [-1], False]},
        {"sparse": ["1", "0", [3, 3], 7]},
        {"sparse": ["0", "1", "ab", True]},
        {"s": ["9"]}, {"s": []}, {"n": 0}, {"x": None}, {"b": "é"}, {"b": 5}, {"f": "1"},
        {"d": [[[], 1]]}, {"d": [[{"l": []}, 1]]}, {"d": 5}, {"l": None},
    ],
    ids=repr,
)  # fmt: skip
def test_impossible_dense_structures_are_refused(node: Any) -> None:
    with pytest.raises(hf.CorruptDataError):
        tree.from_bytes(dense_bytes(node))


def test_deeply_nested_dense_structure_is_refused() -> None:
    text = '{"l":[' * 50_000 + "]}" * 50_000
    header = json.dumps({"__metadata__": {"holdfast.tree": text}}).encode()
    with pytest.raises(hf.CorruptDataError):
        tree.from_bytes(len(header).to_bytes(8, "little") + header)


@given(st.binary(max_size=120), st.integers(0, 2**64 - 1))
@fuzz
def test_random_bytes_are_no_dense_state(data: bytes, length: int) -> None:
    good = dense_bytes({"x": "0"})
    for bad in (data, length.to_bytes(8, "little") + good[8:], good[: len(data)]):
        if bad != good:
            with pytest.raises(hf.CorruptDataError):
                tree.from_bytes(bad)


# Catalogs


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lies")
    write_store(open_storage(str(path)), every_codec()[:3])
    return path


def body_of(store: Path) -> dict[str, Any]:
    text = (store / "catalog/00000002.json").read_bytes()
    body: dict[str, Any] = json.loads(text.split(b"\n")[1])
    return body


def as_catalog(body: Any) -> bytes:
    text = json.dumps(body, separators=(",", ":")).encode()
    return f"holdfast-catalog 1 {as_hex(checksum(text))}\n".encode() + text + b"\n"


def places_in(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON tree."""
    items: Any = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places_in(value, (*path, key))


def with_lie(body: Any, path: tuple[Any, ...], lie: Callable[[Any, Any], None]) -> Any:
    copy = json.loads(json.dumps(body))
    node = copy
    for key in path[:-1]:
        node = node[key]
    lie(node, path[-1])
    return copy


def use(store: Path, body: Any) -> None:
    """Do with a lying store whatever a reader does; only our errors may come out."""
    expected = use.expected  # type: ignore[attr-defined]
    try:
        data = as_catalog(body)
    except (ValueError, TypeError):
        return
    (store / "catalog/00000002.json").write_bytes(data)
    storage = open_storage(str(store))
    with contextlib.suppress(hf.HoldfastError):
        hf.verify(storage)
    try:
        run = hf.open(store)
    except hf.HoldfastError:
        return
    for step in run.steps:
        for schema in run.tables(step):
            with contextlib.suppress(hf.HoldfastError):
                weight = run.read(step, schema.name).weight
                # A liar may exchange rows, but memory that nobody wrote is never handed out.
                assert all(row.tobytes() in expected for row in weight), (step, schema.name)
            if schema.rows == TABLE_ROWS:
                targets = [np.zeros((schema.rows, c.width), np.float32) for c in schema.columns]
                with contextlib.suppress(hf.HoldfastError):
                    restore_rows(storage, run.catalog, step, {schema.name: targets}, threads=1)
        with contextlib.suppress(hf.HoldfastError):
            run.dense(step)
        with contextlib.suppress(hf.HoldfastError):
            run.dead_rows(step)
        with contextlib.suppress(hf.HoldfastError):
            list(run.updates(since=step))


@pytest.fixture
def lying(store: Path) -> Iterator[Path]:
    path = store / "catalog/00000002.json"
    good = path.read_bytes()
    run = hf.open(store)
    use.expected = {  # type: ignore[attr-defined]
        row.tobytes()
        for step in run.steps
        for table in run.tables(step)
        for row in run.read(step, table.name).weight
    }
    yield store
    path.write_bytes(good)


def test_one_lie_anywhere_in_a_catalog_is_refused_or_harmless(lying: Path) -> None:
    body = body_of(lying)
    chance = random.Random(SEED)
    for path in places_in(body):
        for value in chance.sample(COUNTS, 4):

            def put(node: Any, key: Any, value: Any = value) -> None:
                node[key] = value

            try:
                use(lying, with_lie(body, path, put))
            except BaseException as error:
                error.add_note(f"seed {SEED}: {path} = {value!r}")
                raise


def test_anything_missing_from_a_catalog_is_refused_or_harmless(lying: Path) -> None:
    body = body_of(lying)
    for path in places_in(body):

        def drop(node: Any, key: Any) -> None:
            del node[key]

        try:
            use(lying, with_lie(body, path, drop))
        except BaseException as error:
            error.add_note(f"without {path}")
            raise


def lie_about(body: dict[str, Any], what: str) -> None:
    segment = body["segments"][0]
    match what:
        case "table of 2**40 rows":
            body["schemas"][0][0][1] = 2**40
        case "table of 2**61 rows":
            body["schemas"][0][0][1] = 2**61
        case "smaller table":
            body["schemas"][0][0][1] = 4
        case "wider column":
            body["schemas"][0][0][2][0][1] = 500
        case "no columns":
            body["schemas"][0][0][2] = []
        case "more columns":
            body["schemas"][0][0][2].append(["more", 1])
        case "unknown table":
            body["tables"][0] = "nobody"
        case "a segment is missing":
            del body["segments"][0]
        case "a segment twice":
            body["segments"].append(list(segment))
        case "born late":
            segment[1] = 10**6
        case "born after it died":
            segment[1], segment[2] = 5, 3
        case "dead before any step":
            segment[1], segment[2] = 0, 1
        case "rows of another table":
            segment[0] = 1
        case "ids outside":
            segment[5] = 10**9
        case "extent outside":
            segment[7] = 10**9
        case "object that does not exist":
            body["objects"][0][0] = "objects/c00000001/r0-none.hf"
        case "object outside the run":
            body["objects"][0][0] = "../../../etc/passwd"
        case "the catalog as object":
            body["objects"][0][0] = "catalog/00000001.json"
        case "huge object":
            body["objects"][0][1] = 2**61
        case "dense in a segment's place":
            body["checkpoints"][0]["dense"] = segment[6:]
        case "segment in the dense state's place":
            segment[6:] = body["checkpoints"][0]["dense"]
        case "base that never was":
            body["checkpoints"][1]["base"] = 4
        case "steps out of order":
            body["checkpoints"].reverse()
        case _:
            raise AssertionError(what)


# Rows that no segment holds cannot be restored: such a catalog must not look like a good one.
UNCOVERED = (
    "table of 2**40 rows", "table of 2**61 rows", "a segment is missing", "born late",
    "dead before any step", "unknown table",
)  # fmt: skip
LIES = (
    "smaller table", "wider column", "no columns", "more columns", "a segment twice",
    "born after it died", "rows of another table", "ids outside", "extent outside",
    "object that does not exist", "object outside the run", "the catalog as object", "huge object",
    "dense in a segment's place", "segment in the dense state's place", "base that never was",
    "steps out of order",
)  # fmt: skip


@pytest.mark.parametrize("what", [*UNCOVERED, *LIES])
def test_known_lies_are_refused_or_harmless(lying: Path, what: str) -> None:
    body = body_of(lying)
    lie_about(body, what)
    use(lying, body)


@pytest.mark.parametrize("what", UNCOVERED)
def test_rows_that_no_segment_holds_are_refused(lying: Path, what: str) -> None:
    body = body_of(lying)
    lie_about(body, what)
    (lying / "catalog/00000002.json").write_bytes(as_catalog(body))
    with pytest.raises((hf.CorruptDataError, hf.DataLossError)):
        run = hf.open(lying)
        for schema in run.tables(BASE_STEP):
            run.read(BASE_STEP, schema.name)


@given(st.binary(max_size=200))
@fuzz
def test_random_bytes_are_no_catalog(data: bytes) -> None:
    text = f"holdfast-catalog 1 {as_hex(checksum(data))}\n".encode() + data + b"\n"
    for candidate in (data, text):
        with pytest.raises(hf.CorruptDataError):
            catalogs.from_bytes(candidate)


@given(NODES)
@fuzz
def test_any_json_is_no_catalog(node: Any) -> None:
    with pytest.raises(hf.CorruptDataError):
        catalogs.from_bytes(as_catalog(node))
