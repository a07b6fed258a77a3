"""The catalog: what exists. Committing the next one is what makes a checkpoint exist.

A catalog is a whole description of a run: its checkpoints, the segments they are made of, the
objects those lie in. Catalogs are numbered; the highest number is the run's state. Restoring step
``s`` reads the segments with ``born <= s < died`` in the order they were born: later wins.

Invariants:
- A catalog names only objects that are already durable.
- A committed catalog is never rewritten: the next number is put only if absent, so of two writers
  one gets ``ConflictError``.
- Every object a kept checkpoint needs is in ``objects``; nothing else is.

Not here: choosing rows (selection.py), what to drop (retention.py), deleting (writer.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Self

from holdfast.checkpoint import stored_json
from holdfast.checkpoint.checksum import as_hex, checksum
from holdfast.checkpoint.object import Extent
from holdfast.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from holdfast.storage.base import Storage
from holdfast.tables import Column, TableSchema

FORMAT = 1
PREFIX = "catalog/"
_MAGIC = "holdfast-catalog"
BASE, DELTA = "base", "delta"


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """Some versions of one table's rows: born at one checkpoint, dead from another on."""

    table: str
    born: int
    died: int | None
    rows: int
    first: int
    last: int
    extent: Extent

    def is_alive(self, step: int) -> bool:
        """Whether a restore of ``step`` reads this segment."""
        return self.born <= step and (self.died is None or step < self.died)


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint: what kind it is, what it cost, and where its dense state lies."""

    step: int
    ordinal: int
    kind: str
    base: int
    schema: int
    time: float
    codec: str
    state_codec: str
    rows: int
    row_bytes: int
    bytes: int
    full_bytes: int
    stall_s: float
    reason: str
    dense: Extent


@dataclass(frozen=True, slots=True)
class Rewind:
    """Training went back to ``to`` and on from there: steps up to ``last`` were let go."""

    to: int
    last: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """A run's state as of one commit."""

    run: str
    number: int
    writer: str
    restores: int = 0
    schemas: tuple[tuple[TableSchema, ...], ...] = ()
    checkpoints: tuple[CheckpointEntry, ...] = ()
    segments: tuple[SegmentEntry, ...] = ()
    objects: tuple[tuple[str, int], ...] = ()
    rewinds: tuple[Rewind, ...] = ()
    growth: tuple[tuple[int, int], ...] = ()
    """(step, bytes of rows) of the last base and every delta since, retained or not."""

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be restored, ascending."""
        return tuple(entry.step for entry in self.checkpoints)

    @property
    def last(self) -> CheckpointEntry | None:
        """The newest checkpoint."""
        return self.checkpoints[-1] if self.checkpoints else None

    def checkpoint(self, step: int) -> CheckpointEntry:
        """The checkpoint of a step.

        Raises:
            NotFoundError: lists the steps that exist.
        """
        for entry in self.checkpoints:
            if entry.step == step:
                return entry
        shown = list(self.steps)
        if len(shown) > 12:
            shown = [*shown[:5], "...", *shown[-5:]]  # type: ignore[list-item]
        raise NotFoundError("no checkpoint of this step", step=step, steps=shown)

    def schema_of(self, entry: CheckpointEntry) -> tuple[TableSchema, ...]:
        """The tables as they were at a checkpoint."""
        return self.schemas[entry.schema]

    def alive(self, step: int, table: str | None = None) -> list[SegmentEntry]:
        """What a restore of ``step`` reads, oldest born first; one table's, or every table's."""
        chosen = [
            segment
            for segment in self.segments
            if segment.is_alive(step) and (table is None or segment.table == table)
        ]
        return sorted(chosen, key=lambda segment: segment.born)

    def with_checkpoint(
        self,
        entry: CheckpointEntry,
        segments: tuple[SegmentEntry, ...],
        objects: tuple[tuple[str, int], ...],
        *,
        replaces_since: int | None,
    ) -> Self:
        """This catalog and one more checkpoint.

        ``replaces_since`` is the step whose successors this checkpoint holds every row of: older
        segments born after it die now (a base replaces all that came before).
        """
        replaced = -1 if entry.kind == BASE else replaces_since
        older = tuple(
            dataclasses.replace(segment, died=entry.step)
            if segment.died is None and replaced is not None and segment.born > replaced
            else segment
            for segment in self.segments
        )
        grown = (entry.step, entry.row_bytes)
        return dataclasses.replace(
            self,
            checkpoints=(*self.checkpoints, entry),
            segments=(*older, *segments),
            objects=(*self.objects, *objects),
            growth=(grown,) if entry.kind == BASE else (*self.growth, grown),
        )

    def delta_sizes(self) -> list[float] | None:
        """The deltas since the last base as fractions of its bytes; None without a base."""
        if not self.growth:
            return None
        base_bytes = max(1, self.growth[0][1])
        return [size / base_bytes for _, size in self.growth[1:]]

    def rewound(self, step: int) -> Self:
        """This catalog without what came after ``step``."""
        last = self.last
        if last is None or last.step <= step:
            return self
        kept = tuple(entry for entry in self.checkpoints if entry.step <= step)
        segments = tuple(
            dataclasses.replace(s, died=None) if s.died is not None and s.died > step else s
            for s in self.segments
            if s.born <= step
        )
        growth = tuple(item for item in self.growth if item[0] <= step)
        if kept and not growth:  # behind the last base: what is still known of the one before
            base_bytes = sum(s.extent.bytes for s in segments if s.born == kept[-1].base)
            deltas = [e for e in kept if e.base == kept[-1].base and e.kind == DELTA]
            growth = ((kept[-1].base, base_bytes), *((e.step, e.row_bytes) for e in deltas))
        rewound = dataclasses.replace(
            self,
            checkpoints=kept,
            segments=segments,
            rewinds=(*self.rewinds, Rewind(step, last.step)),
            growth=growth,
        )
        return rewound.without_dead()

    def keeping(self, steps: frozenset[int]) -> Self:
        """This catalog with only these checkpoints, and only what they need."""
        kept = tuple(entry for entry in self.checkpoints if entry.step in steps)
        return dataclasses.replace(self, checkpoints=kept).without_dead()

    def without_dead(self) -> Self:
        """This catalog without segments that no checkpoint reads and objects that hold none."""
        steps = self.steps

        def is_read(segment: SegmentEntry) -> bool:
            at = bisect.bisect_left(steps, segment.born)
            return at < len(steps) and segment.is_alive(steps[at])

        segments = tuple(segment for segment in self.segments if is_read(segment))
        needed = {s.extent.object for s in segments} | {e.dense.object for e in self.checkpoints}
        objects = tuple(item for item in self.objects if item[0] in needed)
        return dataclasses.replace(self, segments=segments, objects=objects)


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
    body = {
        "format": FORMAT,
        "run": catalog.run,
        "number": catalog.number,
        "writer": catalog.writer,
        "restores": catalog.restores,
        "schemas": [
            [[t.name, t.rows, [[c.name, c.width] for c in t.columns]] for t in schema]
            for schema in catalog.schemas
        ],
        "objects": [list(item) for item in catalog.objects],
        "checkpoints": [
            {**_fields(entry), "dense": extent(entry.dense)} for entry in catalog.checkpoints
        ],
        "tables": tables,
        "segments": [
            [table_at[s.table], s.born, s.died, s.rows, s.first, s.last, *extent(s.extent)]
            for s in catalog.segments
        ],
        "rewinds": [[r.to, r.last] for r in catalog.rewinds],
        "growth": [list(item) for item in catalog.growth],
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    return f"{_MAGIC} {FORMAT} {as_hex(checksum(text))}\n".encode() + text + b"\n"


def _fields(entry: CheckpointEntry) -> dict[str, Any]:
    return {
        field.name: getattr(entry, field.name)
        for field in dataclasses.fields(entry)
        if field.name != "dense"
    }


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
    if words[1] != str(FORMAT).encode():
        raise damaged(f"unknown format {words[1][:8]!r}")
    try:
        catalog = _parse(stored_json.parse(text))
        _check(catalog)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, AttributeError) as error:
        raise damaged(f"impossible content ({error!r})"[:200]) from error
    return catalog


def _parse(body: dict[str, Any]) -> Catalog:
    if body["format"] != FORMAT:
        raise ValueError("format")
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

    tables = [stored_json.text(name) for name in body["tables"]]
    schemas = tuple(
        tuple(
            TableSchema(
                stored_json.text(name),
                stored_json.count(rows),
                tuple(
                    Column(stored_json.text(c), stored_json.count(width)) for c, width in columns
                ),
            )
            for name, rows, columns in schema
        )
        for schema in body["schemas"]
    )
    checkpoints = tuple(
        CheckpointEntry(**{**fields, "dense": extent(*fields["dense"])})
        for fields in body["checkpoints"]
    )
    segments = tuple(
        SegmentEntry(
            tables[stored_json.count(table)],
            stored_json.count(born),
            None if died is None else stored_json.count(died),
            stored_json.count(rows),
            stored_json.count(first),
            stored_json.count(last),
            extent(place, offset, size, sum_),
        )
        for table, born, died, rows, first, last, place, offset, size, sum_ in body["segments"]
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
            (stored_json.count(step), stored_json.count(size)) for step, size in body["growth"]
        ),
    )


def _check(catalog: Catalog) -> None:
    sizes = dict(catalog.objects)
    steps = catalog.steps
    floats: dict[str, int] = {}  # numbers in a row of each table, in the schema that has fewest
    for schema in catalog.schemas:
        for table in schema:
            row = sum(column.width for column in table.columns)
            floats[table.name] = min(row, floats.get(table.name, row))
    if list(steps) != sorted(set(steps)):
        raise ValueError("steps are not ascending")
    for schema in catalog.schemas:
        for table in schema:
            if not table.columns or any(c.width == 0 for c in table.columns):
                raise ValueError(f"table {table.name!r} has no columns")
    for entry in catalog.checkpoints:
        for count in (entry.step, entry.ordinal, entry.base, entry.rows, entry.bytes,
                      entry.row_bytes, entry.full_bytes):  # fmt: skip
            stored_json.count(count)
        for text in (entry.kind, entry.codec, entry.state_codec, entry.reason):
            stored_json.text(text)
        stored_json.number(entry.time)
        stored_json.number(entry.stall_s)
        if entry.kind not in (BASE, DELTA) or entry.base > entry.step:
            raise ValueError(f"checkpoint of step {entry.step} has an impossible kind or base")
        catalog.schemas[stored_json.count(entry.schema)]
    extents = [s.extent for s in catalog.segments] + [e.dense for e in catalog.checkpoints]
    for extent in extents:
        if extent.offset + extent.bytes > sizes[extent.object]:
            raise ValueError(f"segment lies outside its object {extent.object!r}")
    for s in catalog.segments:
        if s.rows == 0 or s.last < s.first or s.rows > s.last - s.first + 1:
            raise ValueError("segment has impossible ids")
        # No codec spends less than 2 bits on a number: what a catalog claims is bounded by bytes
        # that it must be able to show.
        if s.rows * floats.get(s.table, 1) > 4 * s.extent.bytes:
            raise ValueError("segment has more rows than its bytes can hold")
        if s.died is not None and s.died <= s.born:
            raise ValueError("segment died before it was born")


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
        ConflictError: another writer committed this number first.
        UnavailableError: storage failed; whether the catalog was committed is then known to be
            no, or, where reading back failed too, unknown (the original error is raised).
    """
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
