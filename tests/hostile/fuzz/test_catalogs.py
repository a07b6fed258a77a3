"""Lying catalogs: whatever a reader does with one, only our errors and stored rows come out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint.format.checksum import as_hex, checksum
from holdfast.checkpoint.store import catalogs
from holdfast.storage import open_storage
from tests.golden import make_format4
from tests.golden.make_format1 import every_codec, write_store
from tests.golden.make_format2 import TABLES, write_grid_store
from tests.hostile.fuzz.lies import COUNTS, NODES, SEED, Store, as_catalog, fuzz, use


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


@pytest.fixture(scope="module", params=["format 1", "format 2", "format 4", "a grid"])
def stores(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("lies")
    if request.param == "a grid":
        write_grid_store(open_storage(str(path)), TABLES[:1])
        return Store(path)
    if request.param == "format 4":
        make_format4.write_store(open_storage(str(path)))
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
        case "a type that there is not":
            body["schemas"][0][0][2][0][2:] = ["float8"]
        case "a type in an older format":
            body["format"] = 3
            body["schemas"][0][0][2][0][2:] = ["float16"]
        case "another type":
            body["schemas"][0][0][2][0][2:] = ["float64"]
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
    "smaller table", "wider column", "a type that there is not", "a type in an older format",
    "another type", "no columns", "more columns", "a segment twice",
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
        for schema in run.tables(run.steps[0]):
            run.read(run.steps[0], schema.name)


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
