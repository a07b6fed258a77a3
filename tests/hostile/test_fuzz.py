"""Lies with a correct checksum: parsers answer with our errors, and touch nothing they should not.

Every mutation is followed by a repair of the checksums around it, so that it is the parser that is
tested and not the checksum.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import random
import resource
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint import commit as catalogs
from holdfast.checkpoint import kills as killing
from holdfast.checkpoint import tree
from holdfast.checkpoint.catalog import SegmentEntry
from holdfast.checkpoint.checksum import as_hex, checksum
from holdfast.checkpoint.codec import parse_codec
from holdfast.checkpoint.fetch import Read
from holdfast.checkpoint.kills import Vector
from holdfast.checkpoint.object import Extent, read_index
from holdfast.checkpoint.restore import restore_rows
from holdfast.checkpoint.scatter import Scatter
from holdfast.checkpoint.segment import CHUNK, PLAIN, Segment, encode_segment, header_bytes
from holdfast.storage import open_storage
from holdfast.tables import Column, TableSchema
from tests.golden.make_format1 import (
    BASE_STEP,
    TABLE_ROWS,
    StoredTable,
    every_codec,
    make_rows,
    write_store,
)
from tests.golden.make_format2 import TABLES, write_grid_store

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
COUNTS = (
    *NUMBERS,
    -1,
    2**70,
    10**400,
    1.5,
    float("inf"),
    float("nan"),
    True,
    None,
    "x",
    "16",
    [],
    {},
    [[]],
)
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
    return joined(encoded.buffers)


def joined(buffers: Sequence[Any]) -> bytes:
    return b"".join(memoryview(b).cast("B") for b in buffers)


def good_chunk(codec: str, ids_N: np.ndarray, deaths: int) -> bytes:
    """A segment of a grid: with a filter, and with deaths at so many different steps."""
    state = "fp32" if codec == "fp32" else "log8"
    weight = make_rows(3, len(ids_N))
    whole = encode_segment(ids_N, weight, [parse_codec(codec), parse_codec(state)])
    segment = Segment(memoryview(joined(whole.buffers)), where="here")
    deaths_N = 20 + np.arange(len(ids_N)) % deaths if deaths else None
    taken = segment.take(np.arange(len(ids_N)), has_filter=True, deaths_K=deaths_N)
    return joined(taken.buffers)


IDS = (np.arange(8, 20), np.array([0, 5, 6, 31]), np.flatnonzero(np.arange(40) % 3))
CODECS = ("fp32", "fp16", "sym3", "asym4", "adaptive2", "log4", "kmeans2", "kmeans4-block")
CODECS += ("kmeans3-cluster", "bf16", "asym8")
SEGMENTS = [good_segment(codec, ids.astype(np.int64)) for codec in CODECS for ids in IDS]
SEGMENTS += [
    good_chunk(codec, ids.astype(np.int64), deaths)
    for codec in ("fp32", "asym4", "kmeans4-block")
    for ids in IDS
    for deaths in (0, 1, 3)
]
SCHEMA = TableSchema("t", TABLE_ROWS, (Column("weight", 5), Column("sum", 1)))
# offset and struct code of every number of a header with two columns
FIELDS = [(4, "H"), (6, "B"), (7, "B"), (8, "I"), (12, "I"), (16, "Q"), (24, "Q"), (32, "Q")]
FIELDS += [(48, "B"), (49, "B"), (50, "H"), (52, "I"), (56, "I"), (60, "I"), (64, "Q")]
FIELDS += [(72, "B"), (73, "B"), (80, "I"), (88, "Q")]
CHUNK_FIELDS = [(96, "Q"), (112, "Q")]  # bytes of filter and deaths, where the format is 2


def format_of(data: bytes | bytearray) -> int:
    return CHUNK if data[4:6] == b"\x02\x00" else PLAIN


def repaired(data: bytearray) -> bytes:
    """The segment with the header's checksum made right."""
    end = header_bytes(data[7], format_=format_of(data)) if len(data) > 7 else 0
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
        deaths_N = segment.deaths()
        assert deaths_N is None or (len(deaths_N) == len(ids_N) and deaths_N.min() >= 0)
        for column in range(2):
            segment.decode_some(column, np.arange(0, len(ids_N), 2))
        again = segment.take(np.arange(0, len(ids_N), 2), has_filter=True, deaths_K=None)
        Segment(memoryview(joined(again.buffers)), where="again").decode(0)
    for masks in (KILLS, {}):
        scatter(data, [whole[1:-1] for whole in guarded], masks)
    for whole in guarded:
        assert (whole[[0, -1]] == 7).all()


# Rows that the table does not have, and that the segment does not.
KILLS = {("t", 5): Vector(np.array([0, 6, 7, 31, 10**9]), np.array([9, 30, 21, 21, 22]))}


def scatter(data: bytes, targets: list[np.ndarray], kills: killing.Kills) -> None:
    """The way a restore goes: rows of chunks that are alive at a step, into a table.

    The lying segment is taken alone, and between two good ones.
    """
    stored = killing.from_bytes(killing.to_bytes(kills), through=99, where="here")
    table = Scatter({"t": targets}, {"t": SCHEMA}, stored, 21)
    for parts in ([data], [SEGMENTS[0], data, SEGMENTS[-1]]):
        places, at = [], 0
        for part in parts:
            rows, _, first, last = struct.unpack_from("<IIQQ", part.ljust(32, b"\0"), 8)
            extent = Extent("o.hf", at, len(part), checksum(part))
            first, last = min(first, 1 << 55), min(last, 1 << 55)  # as a catalog can have them
            places.append((SegmentEntry("t", 5, None, rows, first, last, extent), at))
            at += len(part)
        with contextlib.suppress(hf.HoldfastError):
            table.put(Read(memoryview(b"".join(parts)), tuple(places)), is_masked=True)


def test_the_corpus_is_accepted() -> None:
    for data in SEGMENTS:
        segment = Segment(memoryview(data), where="here")
        segment.check_schema(SCHEMA)
        segment.decode(0)
        assert repaired(bytearray(data)) == data


@given(
    st.sampled_from(SEGMENTS),
    st.lists(
        st.tuples(st.sampled_from(FIELDS + CHUNK_FIELDS), st.sampled_from(NUMBERS)),
        min_size=1,
        max_size=3,
    ),
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
        at = data.draw(st.integers(header_bytes(2, format_=format_of(good)), len(good) - 1))
        changed[at] = data.draw(st.sampled_from([0, 1, 0x7C, 0x7F, 0x80, 0xFF]))
    read_segment(repaired(changed))


@given(st.binary(max_size=400))
@fuzz
def test_random_bytes_are_no_segment(data: bytes) -> None:
    read_segment(data)
    for format_ in (b"\x01\x00", b"\x02\x00"):
        read_segment(repaired(bytearray(b"HFSG" + format_ + data)))


@pytest.mark.parametrize("size", [1, 8, 40, 47, 48, 60])
def test_segments_too_short_for_a_header_are_refused(tmp_path: Path, size: int) -> None:
    """A whole table of one row, of which a catalog and an object say that it is so short."""
    tables = [StoredTable("t", parse_codec("fp32"), parse_codec("fp32"))]
    write_store(open_storage(str(tmp_path)), tables)
    store = Store(tmp_path)
    body = store.body()
    body["schemas"] = [[["t", 1, [["weight", 1]]]]]
    data = bytes(size)
    name = body["objects"][0][0]
    index = [["rows", "t", 16, size, as_hex(checksum(data))]]
    whole = framed(json.dumps({"format": 1, "segments": index}).encode(), data)
    (tmp_path / name).write_bytes(whole)
    body["objects"][0][1] = len(whole)
    body["segments"] = [[0, BASE_STEP, None, 1, 0, 0, 0, 16, size, as_hex(checksum(data))]]
    body["checkpoints"] = body["checkpoints"][:1]
    body["checkpoints"][0][-4:] = body["segments"][0][6:]
    store.catalog.write_bytes(as_catalog(body))
    run = hf.open(tmp_path)
    target = np.zeros((1, 1), np.float32)
    with pytest.raises(hf.CorruptDataError, match=name):
        restore_rows(run.storage, run.catalog, BASE_STEP, {"t": [target]}, threads=1)


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
    index = read_index(OneObject(data), "o.hf", len(data))  # type: ignore[arg-type]
    return {extent.offset: extent for extent in index.extents()}


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


class Store:
    """A small run whose newest catalog is replaced by lies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        run = hf.open(path)
        self.catalog = path / catalogs.name_of(run.catalog.number)
        self.good = self.catalog.read_bytes()
        self.rows = {
            row.tobytes()
            for step in run.steps
            for table in run.tables(step)
            for row in run.read(step, table.name).weight
        }
        # With a grid, lies can bring back rows of steps that nobody can restore any more.
        self.rows |= {
            row.tobytes() for s in run.catalog.segments for row in self._segment(s.extent).decode(0)
        }

    def _segment(self, extent: Extent) -> Segment:
        data = (self.path / extent.object).read_bytes()
        part = data[extent.offset : extent.offset + extent.bytes]
        return Segment(memoryview(part), where="here")

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.good.split(b"\n")[1])
        return body


def as_format_1(body: dict[str, Any]) -> dict[str, Any]:
    """A catalog as format 1 has it: checkpoints with names, no grids, no times of building."""
    names = [field for field in catalogs._CHECKPOINT_FIELDS if field != "build_s"]
    old = {key: value for key, value in body.items() if key not in ("grids", "recoveries")}
    old["format"] = 1
    old["growth"] = [item[:2] for item in body["growth"]]
    old["checkpoints"] = [
        {**dict(zip(names, values[:-5], strict=True)), "dense": values[-4:]}
        for values in body["checkpoints"]
    ]
    return old


@pytest.fixture(scope="module", params=["format 1", "format 2", "a grid"])
def stores(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("lies")
    if request.param == "a grid":
        write_grid_store(open_storage(str(path)), TABLES[:1])
        return Store(path)
    write_store(open_storage(str(path)), every_codec()[:3])
    store = Store(path)
    if request.param == "format 1":
        store.catalog.write_bytes(as_catalog(as_format_1(store.body())))
        store = Store(path)
        assert store.body()["format"] == 1
    return store


@pytest.fixture
def lying(stores: Store) -> Iterator[Store]:
    yield stores
    stores.catalog.write_bytes(stores.good)


def as_catalog(body: Any) -> bytes:
    text = json.dumps(body, separators=(",", ":")).encode()
    format_ = body.get("format") if isinstance(body, dict) else None
    number = format_ if format_ in (1, 2) else 2
    return f"holdfast-catalog {number:d} {as_hex(checksum(text))}\n".encode() + text + b"\n"


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


def use(store: Store, body: Any) -> None:
    """Do with a lying store whatever a reader does; only our errors may come out."""
    try:
        data = as_catalog(body)
    except (ValueError, TypeError):
        return
    store.catalog.write_bytes(data)
    look_at(store)


def look_at(store: Store) -> None:
    storage = open_storage(str(store.path))
    with contextlib.suppress(hf.HoldfastError):
        hf.verify(storage)
    try:
        run = hf.open(store.path)
    except hf.HoldfastError:
        return
    for step in run.steps:
        for schema in run.tables(step):
            with contextlib.suppress(hf.HoldfastError):
                weight = run.read(step, schema.name).weight
                # A liar may exchange rows, but memory that nobody wrote is never handed out.
                assert all(row.tobytes() in store.rows for row in weight), (step, schema.name)
            if schema.rows == TABLE_ROWS:
                with contextlib.suppress(hf.HoldfastError):
                    run.read(step, schema.name, [3, 7])
                restore_guarded(run, step, schema)
        with contextlib.suppress(hf.HoldfastError):
            run.dense(step)
        with contextlib.suppress(hf.HoldfastError):
            run.dead_rows(step)
        with contextlib.suppress(hf.HoldfastError):
            list(run.updates(since=step))


def restore_guarded(run: hf.Run, step: int, schema: TableSchema) -> None:
    """Restore a table that has other memory right before and after it."""
    guarded = [np.full((schema.rows + 2, c.width), 7, np.float32) for c in schema.columns]
    targets = [whole[1:-1] for whole in guarded]
    with contextlib.suppress(hf.HoldfastError):
        restore_rows(run.storage, run.catalog, step, {schema.name: targets}, threads=1)
    for whole in guarded:
        assert (whole[[0, -1]] == 7).all()


def test_one_lie_anywhere_in_a_catalog_is_refused_or_harmless(lying: Store) -> None:
    body = lying.body()
    chance = random.Random(SEED)
    for path in places_in(body):
        for value in chance.sample(COUNTS, 1 if body.get("grids") else 3):

            def put(node: Any, key: Any, value: Any = value) -> None:
                node[key] = value

            try:
                use(lying, with_lie(body, path, put))
            except BaseException as error:
                error.add_note(f"seed {SEED}: {path} = {value!r}")
                raise


def test_anything_missing_from_a_catalog_is_refused_or_harmless(lying: Store) -> None:
    body = lying.body()
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
    first, second = body["checkpoints"][:2]
    is_named = isinstance(first, dict)
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
            if is_named:
                first["dense"] = segment[6:10]
            else:
                first[-4:] = segment[6:10]
        case "segment in the dense state's place":
            segment[6:10] = first["dense"] if is_named else first[-4:]
        case "base that never was":
            second["base" if is_named else 3] = 4
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
def test_known_lies_are_refused_or_harmless(lying: Store, what: str) -> None:
    body = lying.body()
    lie_about(body, what)
    use(lying, body)


@pytest.mark.parametrize("what", UNCOVERED)
def test_rows_that_no_segment_holds_are_refused(lying: Store, what: str) -> None:
    body = lying.body()
    lie_about(body, what)
    lying.catalog.write_bytes(as_catalog(body))
    with pytest.raises((hf.CorruptDataError, hf.DataLossError)):
        run = hf.open(lying.path)
        for schema in run.tables(BASE_STEP):
            run.read(BASE_STEP, schema.name)


# Grids


@pytest.fixture
def grid(tmp_path: Path) -> Store:
    write_grid_store(open_storage(str(tmp_path)), TABLES[:2])
    return Store(tmp_path)


GRID_LIES: dict[str, Callable[[list[Any]], None]] = {
    "worked off far ahead": lambda grid: grid.__setitem__(2, 2**55),
    "worked off before its base": lambda grid: grid.__setitem__(2, 0),
    "ends before it begins": lambda grid: grid.__setitem__(1, 1),
    "ends where it is worked off": lambda grid: grid.__setitem__(1, grid[2]),
    "never ends": lambda grid: grid.__setitem__(1, None),
    "of another base": lambda grid: grid.__setitem__(0, 7),
    "without its vectors": lambda grid: grid.__setitem__(3, None),
    "vectors outside": lambda grid: grid[3].__setitem__(1, 2**40),
    "vectors of another length": lambda grid: grid[3].__setitem__(2, 8),
    "vectors in a segment's place": lambda grid: grid[3].__setitem__(0, 0),
    "vectors of no object": lambda grid: grid[3].__setitem__(0, 10**6),
}


@pytest.mark.parametrize("what", GRID_LIES)
def test_known_lies_about_grids_are_refused_or_harmless(grid: Store, what: str) -> None:
    body = grid.body()
    assert body["grids"][0][3] is not None
    GRID_LIES[what](body["grids"][0])
    use(grid, body)


def test_a_grid_told_twice_is_refused(grid: Store) -> None:
    body = grid.body()
    body["grids"].append(list(body["grids"][-1]))
    with pytest.raises(hf.CorruptDataError, match="ascending"):
        catalogs.from_bytes(as_catalog(body))


@pytest.mark.parametrize("value", [0, 3, 4, 8, 9, 10, 2**55])
def test_deaths_that_are_void_or_not_do_not_write_outside_a_table(grid: Store, value: int) -> None:
    body = grid.body()
    for segment in body["segments"]:
        segment[10:] = [value]
    use(grid, body)


def with_kills(store: Store, data: bytes) -> None:
    """The store with other deletion vectors, every checksum around them right."""
    body = store.body()
    place, offset, _, _ = body["grids"][0][3]
    name = body["objects"][place][0]
    index = [["kills", "kills", offset, len(data), as_hex(checksum(data))]]
    footer = json.dumps({"format": 1, "segments": index}).encode()
    whole = framed(footer, data)
    (store.path / name).write_bytes(whole)
    body["objects"][place][1] = len(whole)
    body["grids"][0][3] = [place, offset, len(data), as_hex(checksum(data))]
    store.catalog.write_bytes(as_catalog(body))


EDGES = (0, 1, 2, 38, 39, 40, 41, 2**31, 2**32 - 1, 2**32, 2**40, 2**55)
LYING_KILLS = st.dictionaries(
    st.tuples(st.sampled_from(["exact", "coded", "nobody"]), st.integers(0, 16)),
    st.dictionaries(st.sampled_from(EDGES), st.integers(17, 20), min_size=1, max_size=8),
    max_size=8,
)


@given(LYING_KILLS, st.integers(-16, 0))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_lying_deletion_vectors_write_nothing_outside_a_table(
    kills: dict[tuple[str, int], dict[int, int]], shift: int
) -> None:
    vectors = {
        (table, born): killing.make_vector(
            np.array(list(rows), np.int64), np.array(list(rows.values()), np.int64) + shift
        )
        for (table, born), rows in kills.items()
    }
    store = SHARED.store()
    with_kills(store, killing.to_bytes(vectors))
    look_at(store)


@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_damaged_deletion_vectors_are_refused_or_harmless(data: st.DataObject) -> None:
    store = SHARED.store()
    changed = bytearray(SHARED.kills)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed) - 1))
        changed[at] = data.draw(st.sampled_from([*b"0919[]{},-", 0, 1, 0x7F, 0x80, 0xFF]))
    cut = data.draw(st.sampled_from([0, 0, 0, 1, 8]))
    with_kills(store, bytes(changed[cut:]))
    run = hf.open(store.path)
    for step in run.steps:
        for schema in run.tables(step):
            restore_guarded(run, step, schema)


class Shared:
    """One grid for many examples; each replaces the same object and the catalog."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self.kills = b""

    def store(self) -> Store:
        if self._store is None:
            path = Path(tempfile.mkdtemp())
            atexit.register(shutil.rmtree, path, ignore_errors=True)
            write_grid_store(open_storage(str(path)), TABLES[:2])
            self._store = Store(path)
            extent = hf.open(path).catalog.grids[0].kills
            assert extent is not None
            data = (path / extent.object).read_bytes()
            self.kills = data[extent.offset : extent.offset + extent.bytes]
        return self._store


SHARED = Shared()


@pytest.mark.parametrize("data", [b"", b"nonsense", bytes(100)])
def test_verify_finds_vectors_that_cannot_be_read(grid: Store, data: bytes) -> None:
    with_kills(grid, data)
    report = hf.verify(open_storage(str(grid.path)))
    assert {step for damage in report.damages for step in damage.steps} >= {7, 9, 10, 12}


def test_verify_finds_deaths_that_cannot_be_read(grid: Store) -> None:
    entry, segment = next(
        (s, segment)
        for s in hf.open(grid.path).catalog.segments
        for segment in [grid._segment(s.extent)]
        if segment.header.deaths.bytes
    )
    path = grid.path / entry.extent.object
    whole = bytearray(path.read_bytes())
    at, size = entry.extent.offset, entry.extent.bytes
    part = whole[at : at + size]
    deaths = segment.header.deaths
    part[deaths.offset + deaths.bytes - 1] = 99  # a number of a step that is not listed
    own = checksum(memoryview(part)[deaths.offset : deaths.offset + deaths.bytes])
    struct.pack_into("<Q", part, header_bytes(2, format_=CHUNK) - 16, own)
    whole[at : at + size] = repaired(part)
    old, new = (as_hex(sum_).encode() for sum_ in (entry.extent.checksum, checksum(
        memoryview(whole)[at : at + size]
    )))  # fmt: skip
    footer_bytes = int.from_bytes(whole[-24:-16], "little")
    footer = bytes(whole[-24 - footer_bytes : -24]).replace(old, new)
    path.write_bytes(framed(footer, bytes(whole[16 : -24 - footer_bytes])))
    body = json.loads(grid.good.split(b"\n")[1].replace(old, new))
    grid.catalog.write_bytes(as_catalog(body))
    readers = [step for step in hf.open(grid.path).steps if entry.is_alive(step)]
    report = hf.verify(open_storage(str(grid.path)))
    assert {step for damage in report.damages for step in damage.steps} >= set(readers)
    look_at(grid)


def test_the_shared_grid_is_accepted() -> None:
    store = SHARED.store()
    with_kills(store, SHARED.kills)
    report = hf.verify(open_storage(str(store.path)))
    assert report.is_sound, report.damages
    look_at(store)


@given(st.binary(max_size=200))
@fuzz
def test_random_bytes_are_no_catalog(data: bytes) -> None:
    texts = [
        f"holdfast-catalog {number} {as_hex(checksum(data))}\n".encode() + data + b"\n"
        for number in (1, 2)
    ]
    for candidate in (data, *texts):
        with pytest.raises(hf.CorruptDataError):
            catalogs.from_bytes(candidate)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "1e999", "-1e999"])
@pytest.mark.parametrize("field", [5, 12, 14])
def test_numbers_that_are_not_finite_are_refused(grid: Store, number: str, field: int) -> None:
    body = grid.body()
    body["checkpoints"][0][field] = 123456.5
    text = json.dumps(body, separators=(",", ":")).replace("123456.5", number).encode()
    line = f"holdfast-catalog 2 {as_hex(checksum(text))}\n".encode()
    with pytest.raises(hf.CorruptDataError):
        catalogs.from_bytes(line + text + b"\n")


@given(NODES)
@fuzz
def test_any_json_is_no_catalog(node: Any) -> None:
    with pytest.raises(hf.CorruptDataError):
        catalogs.from_bytes(as_catalog(node))
