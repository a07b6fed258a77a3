"""Commit and load catalogs: the step that makes a checkpoint exist. Owns a catalog's bytes.

A catalog is stored as one line with its checksum and one line of JSON (``docs/format.md``).

Invariants:
- A catalog names only objects that are already durable.
- A committed catalog is never rewritten: the next number is put only if absent, so of two writers
  one gets ``ConflictError``.
- Every number in a catalog is checked before it is used; bytes may be lies.

Not here: what a catalog says (checkpoint/format/catalog.py), who commits and deletes (writer.py).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from holdfast.checkpoint.format import stored_json
from holdfast.checkpoint.format.annotations import Annotations
from holdfast.checkpoint.format.catalog import (
    Catalog,
    CheckpointEntry,
    GridEntry,
    Growth,
    RestoreTiming,
    Rewind,
    SegmentEntry,
    Sharding,
)
from holdfast.checkpoint.format.checksum import as_hex, checksum
from holdfast.checkpoint.format.claims import check_claims
from holdfast.checkpoint.format.object import Extent
from holdfast.errors import (
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from holdfast.model.names import plain_name
from holdfast.model.placement import Placement
from holdfast.model.schema import DTYPE_BYTES, FLOAT32, Column, Cut, TableSchema
from holdfast.storage.base import Storage

FORMAT = 2
RANKS_FORMAT = 3  # where tables are cut by columns, or processes have state of their own
DTYPES_FORMAT = 4  # where a column is not float32
GROUPS_FORMAT = 5  # where servers are divided into groups
ANNOTATIONS_FORMAT = 6  # where a checkpoint has metrics or metadata
_READABLE = (1, 2, 3, 4, 5, 6)
PREFIX = "catalog/"
_MAGIC = "holdfast-catalog"


def name_of(number: int) -> str:
    """Where a catalog lies.

    >>> name_of(12)
    'catalog/00000012.json'
    """
    return f"{PREFIX}{number:08d}.json"


def _number_in(name: str) -> int | None:
    digits = name.removeprefix(PREFIX).removesuffix(".json")
    if not (digits.isascii() and digits.isdecimal()):
        return None
    return int(digits) if name == name_of(int(digits)) else None


def to_bytes(catalog: Catalog) -> bytes:
    """A catalog as stored: one line with its checksum, one line of JSON."""
    names = [name for name, _ in catalog.objects]
    place = {name: index for index, name in enumerate(names)}

    def extent(e: Extent) -> list[Any]:
        return [place[e.object], e.offset, e.bytes, as_hex(e.checksum)]

    tables = sorted({s.table for s in catalog.segments})
    table_at = {name: index for index, name in enumerate(tables)}
    format_ = _format_of(catalog)
    body = {
        "format": format_,
        "run": catalog.run,
        "number": catalog.number,
        "writer": catalog.writer,
        "restores": catalog.restores,
        "schemas": [
            [
                [
                    t.name,
                    t.rows,
                    [
                        [c.name, c.width, *([] if c.dtype == FLOAT32 else [c.dtype])]
                        for c in t.columns
                    ],
                    *([] if t.cut is None else [[t.cut.table, t.cut.start, t.cut.width]]),
                ]
                for t in schema
            ]
            for schema in catalog.schemas
        ],
        "objects": [list(item) for item in catalog.objects],
        "checkpoints": [
            [*(getattr(entry, name) for name in _CHECKPOINT_FIELDS), *extent(entry.dense)]
            for entry in catalog.checkpoints
        ],
        "tables": tables,
        "segments": [
            [
                table_at[s.table],
                s.born,
                s.died,
                s.rows,
                s.first,
                s.last,
                *extent(s.extent),
                *(() if s.deaths_through is None else (s.deaths_through,)),
            ]
            for s in catalog.segments
        ],
        "rewinds": [[r.to, r.last] for r in catalog.rewinds],
        "growth": [[item.step, item.row_bytes, item.build_s] for item in catalog.growth],
        "grids": [
            [
                g.rollup,
                g.end,
                g.through,
                None if g.deletion_vectors is None else extent(g.deletion_vectors),
            ]
            for g in catalog.grids
        ],
        "recoveries": [list(dataclasses.astuple(r)) for r in catalog.restore_timings],
    }
    if catalog.sharding is not None:
        placement = catalog.sharding.placement
        body["shards"] = [
            placement.servers, placement.data, placement.parity, catalog.sharding.since,
            *([] if placement.groups == 1 else [placement.groups]),
        ]  # fmt: skip
    if format_ >= RANKS_FORMAT:
        body["ranks"] = [
            [entry.step, [extent(e) for e in entry.ranks]]
            for entry in catalog.checkpoints
            if entry.ranks
        ]
    if format_ >= ANNOTATIONS_FORMAT:
        body["annotations"] = [
            [entry.step, dict(entry.annotations.metrics), entry.annotations.metadata_dict()]
            for entry in catalog.checkpoints
            if entry.annotations
        ]
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    return f"{_MAGIC} {format_} {as_hex(checksum(text))}\n".encode() + text + b"\n"


_CHECKPOINT_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(CheckpointEntry)
    if field.name not in ("dense", "ranks", "annotations")
)


def _format_of(catalog: Catalog) -> int:
    """The lowest format that can say what this catalog says: older readers read most runs."""
    if any(entry.annotations for entry in catalog.checkpoints):
        return ANNOTATIONS_FORMAT
    if catalog.sharding is not None and catalog.sharding.placement.groups > 1:
        return GROUPS_FORMAT
    if any(t.has_other_dtypes for schema in catalog.schemas for t in schema):
        return DTYPES_FORMAT
    is_cut = any(t.cut is not None for schema in catalog.schemas for t in schema)
    return RANKS_FORMAT if is_cut or any(e.ranks for e in catalog.checkpoints) else FORMAT


def from_bytes(data: bytes, *, where: str = "catalog") -> Catalog:
    """A catalog that ``to_bytes`` wrote, every number checked.

    Raises:
        CorruptDataError: names the catalog and what is wrong.
    """

    def damaged(why: str) -> CorruptDataError:
        return CorruptDataError(
            f"catalog is damaged: {why}",
            catalog=where,
            todo="run 'holdfast verify'; an older catalog can be opened by its number",
        )

    line, _, rest = data.partition(b"\n")
    words = line.split(b" ")
    if len(words) != 3 or words[0] != _MAGIC.encode() or not rest.endswith(b"\n"):
        raise damaged("not a catalog")
    text = rest[:-1]
    if words[2] != as_hex(checksum(text)).encode():
        raise damaged("checksum mismatch")
    if words[1] not in [str(known).encode() for known in _READABLE]:
        raise damaged(f"unknown format {words[1][:8]!r}")
    try:
        catalog = _parse(stored_json.parse(text), int(words[1]))
        check_claims(catalog)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, AttributeError) as error:
        raise damaged(f"impossible content ({error!r})"[:200]) from error
    return catalog


def _parse(body: dict[str, Any], format_: int) -> Catalog:
    if body["format"] != format_:
        raise ValueError("format")
    if format_ == 1:  # the same, with checkpoints as objects and without grids
        body = {**body, "grids": [], "recoveries": []}
        body["growth"] = [[*item, 0.0] for item in body["growth"]]
        body["checkpoints"] = [
            [*(fields[name] for name in _CHECKPOINT_FIELDS if name != "build_s"), 0.0,
             *fields["dense"]]
            for fields in body["checkpoints"]
        ]  # fmt: skip
    objects = tuple(
        (stored_json.text(name), stored_json.count(size)) for name, size in body["objects"]
    )

    def extent(place: int, offset: int, size: int, sum_: str) -> Extent:
        return Extent(
            objects[stored_json.count(place)][0],
            stored_json.count(offset),
            stored_json.count(size),
            stored_json.checksum(sum_),
        )

    tables = [plain_name(stored_json.text(name)) for name in body["tables"]]
    schemas = tuple(
        tuple(
            TableSchema(
                plain_name(stored_json.text(name)),
                stored_json.count(rows),
                tuple(_parse_column(values, format_) for values in columns),
                _parse_cut(cut, format_),
            )
            for name, rows, columns, *cut in schema
        )
        for schema in body["schemas"]
    )
    ranks = {
        stored_json.count(step): tuple(extent(*values) for values in found)
        for step, found in (body["ranks"] if format_ >= RANKS_FORMAT else [])
    }
    annotations = {
        stored_json.count(step): Annotations.from_json(metrics, metadata)
        for step, metrics, metadata in (
            body["annotations"] if format_ >= ANNOTATIONS_FORMAT else []
        )
    }
    checkpoints = tuple(
        CheckpointEntry(
            **dict(zip(_CHECKPOINT_FIELDS, values[:-4], strict=True)),
            dense=extent(*values[-4:]),
            ranks=ranks.pop(values[0], ()),
            annotations=annotations.pop(values[0], Annotations()),
        )
        for values in body["checkpoints"]
    )
    if ranks or annotations:
        raise ValueError("ranks or annotations of no checkpoint")
    segments = tuple(
        SegmentEntry(
            tables[stored_json.count(table)],
            stored_json.count(born),
            _count_or_none(died),
            stored_json.count(rows),
            stored_json.count(first),
            stored_json.count(last),
            extent(place, offset, size, sum_),
            *(stored_json.count(step) for step in more),
        )
        for table, born, died, rows, first, last, place, offset, size, sum_, *more in body[
            "segments"
        ]
    )
    grids = tuple(
        GridEntry(
            stored_json.count(rollup),
            _count_or_none(end),
            stored_json.count(through),
            None if vectors is None else extent(*vectors),
        )
        for rollup, end, through, vectors in body["grids"]
    )
    return Catalog(
        run=stored_json.text(body["run"]),
        number=stored_json.count(body["number"]),
        writer=stored_json.text(body["writer"]),
        restores=stored_json.count(body["restores"]),
        schemas=schemas,
        checkpoints=checkpoints,
        segments=segments,
        objects=objects,
        rewinds=tuple(
            Rewind(stored_json.count(to), stored_json.count(last)) for to, last in body["rewinds"]
        ),
        growth=tuple(
            Growth(stored_json.count(step), stored_json.count(size), stored_json.number(seconds))
            for step, size, seconds in body["growth"]
        ),
        grids=grids,
        restore_timings=tuple(
            RestoreTiming(
                stored_json.count(base_bytes),
                stored_json.number(base_s),
                stored_json.count(delta_bytes),
                stored_json.number(delta_s),
            )
            for base_bytes, base_s, delta_bytes, delta_s in body["recoveries"]
        ),
        sharding=_parse_sharding(body.get("shards"), format_),
    )


def _parse_column(values: list[Any], format_: int) -> Column:
    name, width, *dtype = values
    if dtype and (format_ < DTYPES_FORMAT or dtype[0] == FLOAT32 or dtype[0] not in DTYPE_BYTES):
        raise ValueError("a column of no such type")
    return Column(stored_json.text(name), stored_json.count(width), *dtype)


def _parse_cut(values: list[Any], format_: int) -> Cut | None:
    if not values:
        return None
    ((table, start, width),) = values
    if format_ < RANKS_FORMAT:
        raise ValueError("cuts came with format 3")
    return Cut(
        plain_name(stored_json.text(table)), stored_json.count(start), stored_json.count(width)
    )


def _parse_sharding(values: Any, format_: int) -> Sharding | None:
    if values is None:
        return None
    servers, data, parity, since, *more = map(stored_json.count, values)
    if data == 0 or (more and (format_ < GROUPS_FORMAT or more == [1])):
        raise ValueError("impossible sharding")
    try:
        return Sharding(Placement(servers, data, parity, *more), since)
    except InvalidRequestError as error:
        raise ValueError("impossible sharding") from error


def _count_or_none(value: object) -> int | None:
    return None if value is None else stored_json.count(value)


def numbers(storage: Storage) -> list[int]:
    """The numbers of the catalogs that exist, ascending."""
    found = (_number_in(item.name) for item in storage.list(PREFIX))
    return sorted(number for number in found if number is not None)


def load(storage: Storage, number: int) -> Catalog:
    """One catalog by its number.

    Raises:
        NotFoundError: there is none.
        CorruptDataError: it is damaged.
    """
    catalog = from_bytes(storage.get(name_of(number)), where=name_of(number))
    if catalog.number != number:
        raise CorruptDataError("catalog has the wrong number", catalog=name_of(number))
    return catalog


def load_last(storage: Storage) -> Catalog | None:
    """The run's state now; None where no run is."""
    for _ in range(16):
        existing = numbers(storage)
        if not existing:
            return None
        try:
            return load(storage, existing[-1])
        except NotFoundError:
            continue  # a writer committed and collected in between: list again
    raise UnavailableError("the catalog changes faster than it can be read", url=storage.url)


def commit(storage: Storage, catalog: Catalog) -> None:
    """Make a catalog the run's state.

    An answer lost on the way is settled by reading back what is there.

    Raises:
        InvalidRequestError: a step or a count is too large to be read back.
        ConflictError: another writer committed this number first.
        UnavailableError: storage failed; whether the catalog was committed is then known to be
            no, or, where reading back failed too, unknown (the original error is raised).
    """
    _check_counts(catalog)
    data = to_bytes(catalog)
    name = name_of(catalog.number)
    try:
        storage.put_if_absent(name, data)
    except ConflictError as error:
        if _is_ours(storage, name, data):
            return  # an earlier try was carried out although its answer was lost
        raise conflict(storage, catalog.number) from error
    except UnavailableError:
        if _is_ours(storage, name, data):
            return
        raise


def _check_counts(catalog: Catalog) -> None:
    """Refuse to write what no reader would take: a number that was counted past all bounds."""
    last = catalog.last
    counts = (
        catalog.number,
        catalog.restores,
        *(() if last is None else (last.step, last.ordinal)),
    )
    if max(counts) >= stored_json.COUNT_MAX:
        raise InvalidRequestError(
            "a number is beyond what a catalog holds",
            catalog=catalog.number,
            step=None if last is None else last.step,
            most=stored_json.COUNT_MAX - 1,
            todo="go on in a new run, with smaller steps",
        )


def conflict(storage: Storage, number: int) -> ConflictError:
    """What a writer is told that has lost the run to another."""
    return ConflictError(
        "another writer committed to this run",
        catalog=name_of(number),
        url=storage.url,
        todo="stop one of the two trainings, or give each its own url",
    )


def _is_ours(storage: Storage, name: str, data: bytes) -> bool:
    try:
        return storage.get(name) == data
    except (NotFoundError, UnavailableError):
        return False
