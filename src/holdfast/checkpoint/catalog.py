"""The catalog: what exists. Committing the next one is what makes a checkpoint exist.

A catalog is a whole description of a run: its checkpoints, the segments they are made of, the
objects those lie in, the grids that were made of them. Catalogs are numbered; the highest number is
the run's state. Restoring step ``s`` reads the segments with ``born <= s < died`` in the order they
were born: later wins. Up to the step a grid is worked off ``through``, it is also known which rows
of a segment are dead at ``s``, so that there no order is needed (restore.py).

Invariants:
- A catalog names only objects that are already durable.
- A committed catalog is never rewritten: the next number is put only if absent, so of two writers
  one gets ``ConflictError``.
- Every object a kept checkpoint needs is in ``objects``; nothing else is.
- Going back in time forgets every death after that time (``rewound``).

Not here: choosing rows (selection.py), what to drop (retention.py), deleting (writer.py), filling a
grid (grid.py, extract.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
from dataclasses import dataclass
from typing import Any, Self

from holdfast.checkpoint import stored_json
from holdfast.checkpoint.checksum import as_hex, checksum
from holdfast.checkpoint.object import Extent
from holdfast.errors import ConflictError, CorruptDataError, NotFoundError, UnavailableError
from holdfast.storage.base import Storage
from holdfast.tables import Column, TableSchema

FORMAT = 2
_READABLE = (1, 2)
PREFIX = "catalog/"
_MAGIC = "holdfast-catalog"
BASE, DELTA = "base", "delta"


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """Some versions of one table's rows: born at one checkpoint, all dead from another on.

    A segment may know which of its rows died before the others (segment.py); what it says of steps
    after ``deaths_through`` is void, because training went back behind them.
    """

    table: str
    born: int
    died: int | None
    rows: int
    first: int
    last: int
    extent: Extent
    deaths_through: int | None = None

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
    build_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GridEntry:
    """The grids of all tables over one base: how far they are worked off.

    ``kills`` is where the deletion vectors lie: for rows of segments that are not extracted, the
    step they died at (kills.py). They are complete for every checkpoint up to ``through``; what
    they say of later ones is void. ``end`` is the base that ended this grid.
    """

    base: int
    end: int | None
    through: int
    kills: Extent | None


@dataclass(frozen=True, slots=True)
class Growth:
    """What a checkpoint added: bytes of rows, and how long it took to build."""

    step: int
    row_bytes: int
    build_s: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """A restore that was measured: what was read of the base and of what changed since."""

    base_bytes: int
    base_s: float
    delta_bytes: int
    delta_s: float


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
    growth: tuple[Growth, ...] = ()
    """The last base and every delta since, retained or not."""
    grids: tuple[GridEntry, ...] = ()
    recoveries: tuple[Recovery, ...] = ()
    """The last two."""

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

    def grid_of(self, entry: CheckpointEntry) -> GridEntry | None:
        """The grid that a checkpoint is part of."""
        for grid in reversed(self.grids):
            if grid.base == entry.base:
                return grid
        return None

    def restore_bytes(self) -> dict[int, int]:
        """How many bytes of rows a restore of each step reads."""
        steps = self.steps
        change = [0] * (len(steps) + 1)
        for segment in self.segments:
            change[bisect.bisect_left(steps, segment.born)] += segment.extent.bytes
            if segment.died is not None:
                change[bisect.bisect_left(steps, segment.died)] -= segment.extent.bytes
        return dict(zip(steps, itertools.accumulate(change), strict=False))

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
        older, grids = self.segments, self.grids
        if replaced is not None:
            older = tuple(
                dataclasses.replace(segment, died=entry.step)
                if segment.died is None and segment.born > replaced
                else segment
                for segment in older
            )
        if entry.kind == BASE:
            grids = tuple(
                dataclasses.replace(grid, end=entry.step) if grid.end is None else grid
                for grid in grids
            )
        grown = _growth(entry)
        return dataclasses.replace(
            self,
            checkpoints=(*self.checkpoints, entry),
            segments=(*older, *segments),
            objects=(*self.objects, *objects),
            growth=(grown,) if entry.kind == BASE else (*self.growth, grown),
            grids=grids,
        )

    def with_grid(self, grid: GridEntry) -> Self:
        """This catalog with one grid begun, or moved on."""
        others = [item for item in self.grids if item.base != grid.base]
        grids = tuple(sorted((*others, grid), key=lambda item: item.base))
        return dataclasses.replace(self, grids=grids)

    def delta_sizes(self) -> list[float] | None:
        """The deltas since the last base as fractions of its bytes; None without a base."""
        if not self.growth:
            return None
        base_bytes = max(1, self.growth[0].row_bytes)
        return [item.row_bytes / base_bytes for item in self.growth[1:]]

    def rewound(self, step: int) -> Self:
        """This catalog without what came after ``step``."""
        last = self.last
        if last is None or last.step <= step:
            return self
        kept = tuple(entry for entry in self.checkpoints if entry.step <= step)
        segments = tuple(_revived(s, step) for s in self.segments if s.born <= step)
        grids = tuple(
            dataclasses.replace(
                grid,
                through=min(grid.through, step),
                end=None if grid.end is not None and grid.end > step else grid.end,
            )
            for grid in self.grids
            if grid.base <= step
        )
        growth = tuple(item for item in self.growth if item.step <= step)
        if kept and not growth:  # behind the last base: what is still known of the one before
            base_bytes = sum(s.extent.bytes for s in segments if s.born == kept[-1].base)
            deltas = [e for e in kept if e.base == kept[-1].base and e.kind == DELTA]
            build_s = next((e.build_s for e in kept if e.step == kept[-1].base), 0.0)
            base = Growth(kept[-1].base, base_bytes, build_s)
            growth = (base, *(_growth(e) for e in deltas))
        rewound = dataclasses.replace(
            self,
            checkpoints=kept,
            segments=segments,
            rewinds=(*self.rewinds, Rewind(step, last.step)),
            growth=growth,
            grids=grids,
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
        bases = {entry.base for entry in self.checkpoints}
        grids = tuple(grid for grid in self.grids if grid.base in bases)
        needed = {s.extent.object for s in segments} | {e.dense.object for e in self.checkpoints}
        needed |= {grid.kills.object for grid in grids if grid.kills is not None}
        objects = tuple(item for item in self.objects if item[0] in needed)
        return dataclasses.replace(self, segments=segments, objects=objects, grids=grids)


def _revived(segment: SegmentEntry, step: int) -> SegmentEntry:
    """A segment as training at ``step`` knew it: deaths after that are forgotten."""
    if segment.died is not None and segment.died <= step:
        return segment
    known = step if segment.deaths_through is None else min(step, segment.deaths_through)
    return dataclasses.replace(segment, died=None, deaths_through=known)


def _growth(entry: CheckpointEntry) -> Growth:
    return Growth(entry.step, entry.row_bytes, entry.build_s)


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
            [*(getattr(entry, name) for name in _CHECKPOINT_FIELDS), *extent(entry.dense)]
            for entry in catalog.checkpoints
        ],
        "tables": tables,
        "segments": [
            [table_at[s.table], s.born, s.died, s.rows, s.first, s.last, *extent(s.extent)]
            + ([] if s.deaths_through is None else [s.deaths_through])
            for s in catalog.segments
        ],
        "rewinds": [[r.to, r.last] for r in catalog.rewinds],
        "growth": [[item.step, item.row_bytes, item.build_s] for item in catalog.growth],
        "grids": [
            [g.base, g.end, g.through, None if g.kills is None else extent(g.kills)]
            for g in catalog.grids
        ],
        "recoveries": [list(dataclasses.astuple(r)) for r in catalog.recoveries],
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    return f"{_MAGIC} {FORMAT} {as_hex(checksum(text))}\n".encode() + text + b"\n"


_CHECKPOINT_FIELDS = tuple(
    field.name for field in dataclasses.fields(CheckpointEntry) if field.name != "dense"
)


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
        _check(catalog)
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
        CheckpointEntry(
            **dict(zip(_CHECKPOINT_FIELDS, values[:-4], strict=True)), dense=extent(*values[-4:])
        )
        for values in body["checkpoints"]
    )
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
            stored_json.count(base),
            _count_or_none(end),
            stored_json.count(through),
            None if kills is None else extent(*kills),
        )
        for base, end, through, kills in body["grids"]
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
        recoveries=tuple(
            Recovery(
                stored_json.count(base_bytes),
                stored_json.number(base_s),
                stored_json.count(delta_bytes),
                stored_json.number(delta_s),
            )
            for base_bytes, base_s, delta_bytes, delta_s in body["recoveries"]
        ),
    )


def _count_or_none(value: object) -> int | None:
    return None if value is None else stored_json.count(value)


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
        stored_json.number(entry.build_s)
        if entry.kind not in (BASE, DELTA) or entry.base > entry.step:
            raise ValueError(f"checkpoint of step {entry.step} has an impossible kind or base")
        catalog.schemas[stored_json.count(entry.schema)]
    bases = [grid.base for grid in catalog.grids]
    if bases != sorted(set(bases)) or len(catalog.recoveries) > 2:
        raise ValueError("grids are not ascending, or too many recoveries")
    for grid in catalog.grids:
        if grid.through < grid.base or (grid.end is not None and grid.end <= grid.through):
            raise ValueError(f"grid of base {grid.base} has an impossible end")
    extents = [s.extent for s in catalog.segments] + [e.dense for e in catalog.checkpoints]
    extents += [grid.kills for grid in catalog.grids if grid.kills is not None]
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
