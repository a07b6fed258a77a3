"""What a catalog claims, checked against what it can be, before anything acts on it.

A catalog may be damaged, or made to deceive, and still carry the right checksum. What can be told
from the catalog alone is checked here, every time one is loaded. What needs the rows' ids is
checked where they are read: by every restore (checkpoint/restoring/row_check.py) and by ``verify``.

Invariants:
- Everything that a reader of the run allocates is bounded by the bytes that the catalog can show:
  no two segments share a byte, and no codec spends less than 2 bits on a number.
- Objects lie in the run's own folder of objects, each named once.
- All checkpoints over one base have the same tables; a restore reads nothing older than its base.
- A time, a step, a size or a metric is one that the rest of the program can compute with and show.

Not here: the catalog's bytes (checkpoint/store/catalogs.py).

# S segments, E extents, C checkpoints
"""

from __future__ import annotations

import numpy as np

from holdfast.checkpoint.format import stored_json
from holdfast.checkpoint.format.annotations import check_annotations
from holdfast.checkpoint.format.catalog import BASE, DELTA, Catalog, SegmentEntry
from holdfast.checkpoint.format.object import FRAME_BYTES, HEAD, Extent, number_of
from holdfast.model.schema import WEIGHT, TableSchema, cuts_of
from holdfast.storage.base import check_name

TIME_MAX = 253_402_300_799.0  # the end of the year 9999, in Unix seconds
SECONDS_MAX = 1e12
NUMBERS_A_BYTE = 4  # no codec spends less than 2 bits on a number
_TAIL_BYTES = FRAME_BYTES - len(HEAD)


def check_claims(catalog: Catalog) -> None:
    """Refuse a catalog that no writer of ours can have written.

    Raises:
        ValueError: says what is impossible.
    """
    _check_objects(catalog)
    for schema in catalog.schemas:
        _check_schema(schema)
    _check_checkpoints(catalog)
    _check_grids(catalog)
    _check_extents(catalog)
    if catalog.segments:
        _check_segments(catalog)


def _check_objects(catalog: Catalog) -> None:
    names = {name for name, _ in catalog.objects}
    if len(names) != len(catalog.objects):
        raise ValueError("an object is named twice")
    for name, size in catalog.objects:
        check_name(name)
        if number_of(name) is None or size < FRAME_BYTES:
            raise ValueError(f"not an object: {name!r:.80}")


def _check_schema(schema: tuple[TableSchema, ...]) -> None:
    if len({table.name for table in schema}) != len(schema):
        raise ValueError("a table is named twice")
    for table in schema:
        names = {column.name for column in table.columns}
        if not table.columns or len(names) != len(table.columns):
            raise ValueError(f"table {table.name!r:.80} has no columns, or two of one name")
        if table.columns[0].name != WEIGHT:
            raise ValueError(f"table {table.name!r:.80} does not begin with its weights")
        if any(not 0 < column.width < 1 << 31 for column in table.columns):
            raise ValueError(f"table {table.name!r:.80} has an impossible width")
    cuts_of(schema)  # refuses cuts that make up no table


def _check_checkpoints(catalog: Catalog) -> None:
    steps = catalog.steps
    if list(steps) != sorted(set(steps)):
        raise ValueError("steps are not ascending")
    first: dict[tuple[TableSchema, ...], int] = {}  # equal schemas are compared once, by hash
    same_as = [first.setdefault(schema, index) for index, schema in enumerate(catalog.schemas)]
    base, schema = -1, -1
    for entry in catalog.checkpoints:
        for count in (entry.step, entry.ordinal, entry.base, entry.rows, entry.bytes,
                      entry.row_bytes, entry.full_bytes):  # fmt: skip
            stored_json.count(count)
        for text in (entry.kind, entry.codec, entry.state_codec, entry.reason):
            stored_json.text(text)
        if not 0 <= stored_json.number(entry.time) <= TIME_MAX:
            raise ValueError(f"checkpoint of step {entry.step} has an impossible time")
        check_annotations(entry.annotations)
        for seconds in (entry.stall_s, entry.build_s):
            if not 0 <= stored_json.number(seconds) <= SECONDS_MAX:
                raise ValueError(f"checkpoint of step {entry.step} has an impossible duration")
        if entry.kind not in (BASE, DELTA) or entry.base > entry.step:
            raise ValueError(f"checkpoint of step {entry.step} has an impossible kind or base")
        if (entry.kind == BASE) != (entry.base == entry.step) or entry.base < base:
            raise ValueError(f"checkpoint of step {entry.step} stands on an impossible base")
        tables = same_as[stored_json.count(entry.schema)]
        if entry.base == base and tables != schema:
            raise ValueError(f"the tables change at step {entry.step}, without a base")
        base, schema = entry.base, tables


def _check_grids(catalog: Catalog) -> None:
    rollups = [grid.rollup for grid in catalog.grids]
    if rollups != sorted(set(rollups)) or len(catalog.restore_timings) > 2:
        raise ValueError("grids are not ascending, or too many recoveries")
    for grid in catalog.grids:
        if grid.through < grid.rollup or (grid.end is not None and grid.end <= grid.through):
            raise ValueError(f"grid of rollup {grid.rollup} has an impossible end")


def _check_extents(catalog: Catalog) -> None:
    """Every extent lies between the head and the tail of its object, and no two share a byte."""
    extents: list[Extent] = [s.extent for s in catalog.segments]
    for entry in catalog.checkpoints:
        extents += (entry.dense, *entry.ranks)
    extents += [
        grid.deletion_vectors for grid in catalog.grids if grid.deletion_vectors is not None
    ]
    place = {name: index for index, (name, _) in enumerate(catalog.objects)}
    sizes_O = np.array([size for _, size in catalog.objects], np.int64)
    object_E = np.array([place[extent.object] for extent in extents], np.int64)
    start_E = np.array([extent.offset for extent in extents], np.int64)
    end_E = start_E + np.array([extent.bytes for extent in extents], np.int64)
    if (start_E < len(HEAD)).any() or (end_E > sizes_O[object_E] - _TAIL_BYTES).any():
        raise ValueError("a segment lies outside its object")
    order_E = np.lexsort((end_E, start_E, object_E))
    object_E, start_E, end_E = object_E[order_E], start_E[order_E], end_E[order_E]
    is_next_E = object_E[1:] == object_E[:-1]
    if (is_next_E & (start_E[1:] < end_E[:-1])).any():
        raise ValueError("two segments share bytes of an object")


def _check_segments(catalog: Catalog) -> None:
    segments = catalog.segments
    ever = stored_json.COUNT_MAX
    born_S, died_S, rows_S, first_S, last_S, bytes_S = np.array(
        [
            (s.born, ever if s.died is None else s.died, s.rows, s.first, s.last, s.extent.bytes)
            for s in segments
        ],
        np.int64,
    ).T
    if ((rows_S == 0) | (last_S < first_S) | (rows_S > last_S - first_S + 1)).any():
        raise ValueError("a segment has impossible ids")
    if (died_S <= born_S).any():
        raise ValueError("a segment died before it was born")
    steps_C = np.array(catalog.steps, np.int64)
    bases_C = np.array([entry.base for entry in catalog.checkpoints], np.int64)
    # The checkpoints that read a segment follow each other; one that none reads costs nothing.
    reader_S = np.searchsorted(steps_C, born_S)
    end_S = np.searchsorted(steps_C, died_S)
    read_R = np.flatnonzero(reader_S < end_S)
    base_R = bases_C[reader_S[read_R]]
    if (base_R != bases_C[end_S[read_R] - 1]).any() or (born_S[read_R] < base_R).any():
        raise ValueError("a segment is read over another base than its own")
    table_rows_R, numbers_R = _tables_of(catalog, [segments[i] for i in read_R], reader_S[read_R])
    if (last_S[read_R] >= table_rows_R).any():
        raise ValueError("a segment does not fit its table")
    # As floats: the product of two lies may be beyond any integer of NumPy's.
    if (rows_S[read_R] * numbers_R > float(NUMBERS_A_BYTE) * bytes_S[read_R]).any():
        raise ValueError("a segment has more rows than its bytes can hold")


def _tables_of(
    catalog: Catalog, segments: list[SegmentEntry], reader_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For segments, and a checkpoint that reads each: rows of their tables, numbers of a row."""
    known: dict[tuple[int, str], tuple[int, float]] = {}
    for index, schema in enumerate(catalog.schemas):
        for table in schema:
            numbers = float(sum(column.width for column in table.columns))
            known[index, table.name] = table.rows, numbers
    schemas = [entry.schema for entry in catalog.checkpoints]
    found = []
    for segment, reader in zip(segments, reader_R.tolist(), strict=True):
        claimed = known.get((schemas[reader], segment.table))
        if claimed is None:
            raise ValueError(f"a segment of an unknown table {segment.table!r:.80}")
        found.append(claimed)
    rows, numbers_ = zip(*found, strict=True) if found else ((), ())
    return np.array(rows, np.int64), np.array(numbers_, np.float64)
