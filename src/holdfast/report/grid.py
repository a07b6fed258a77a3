"""A chunk grid as people see it: cells by birth and death, what is dead in them, what a step reads.

    born ->        10  20  30
    alive           #   #   #     row 0: versions that nothing has replaced yet
    30              #   #         died at 30
    20              #             died at 20

Deaths run downwards from the newest, so that what a restore of step s reads (born <= s < died) is
the rectangle in the upper left corner, as in IncrCP, section 4.2.

Invariants:
- The value holds every cell; only a drawing joins neighbouring checkpoints where they do not fit,
  and says so. An edge of the step's rectangle is always an edge of the drawing.
- What is marked as read does not depend on colour: the rectangle is drawn with lines.

Not here: reading a run (cli/grid.py), characters of a drawing (canvas.py), pictures
(grid_picture.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.report import words
from holdfast.report.canvas import SHADES, Canvas, Mark, Scale, make_scale
from holdfast.report.layout import add_numbers, make_grid, make_table

ROWS, BYTES = "rows", "bytes"
MEASURES = (ROWS, BYTES)
_CELL_WIDTH_MAX = 7
LINES_MAX = 30  # of a drawing, if nobody asks for all


@dataclass(frozen=True, slots=True)
class GridCell:
    """The chunks of one birth and death; ``died`` None: row 0, alive as long as the grid is."""

    born: int
    died: int | None
    chunks: int
    rows: int
    bytes: int
    dead_rows: int
    """Rows that died before the others in it, and are still in place."""
    is_read: bool = False
    masked_rows: int = 0
    """Rows that a restore of the step reads in vain."""

    def measure(self, by: str) -> int:
        """Its rows or its bytes."""
        return self.rows if by == ROWS else self.bytes


@dataclass(frozen=True, slots=True)
class Bundle:
    """An object that holds chunks of the grid: how many still live, how much of it is garbage."""

    object: str
    kind: str
    bytes: int
    chunks: int
    chunk_bytes: int
    garbage_bytes: int


@dataclass(frozen=True, slots=True)
class StepRead:
    """What a restore of one step reads: of the base, of the rollup, and of the grid above them."""

    step: int
    base_segments: int
    base_rows: int
    base_bytes: int
    rollup_segments: int
    rollup_rows: int
    rollup_bytes: int
    segments: int
    rows: int
    bytes: int
    masked_rows: int
    waiting_segments: int
    """Those that extraction has not seen yet: they are read in the order of their births."""


@dataclass(frozen=True, slots=True)
class GridView:
    """One grid of a run: its cells, its objects, and what one step reads of it."""

    url: str
    rollups: tuple[int, ...]
    """What each grid of the run stands on: the step of a rollup, or of a base."""
    base: int
    rollup: int
    """The step of the base where no rollup lies between."""
    end: int | None
    through: int
    tables: tuple[str, ...]
    checkpoints: tuple[int, ...]
    cells: tuple[GridCell, ...]
    bundles: tuple[Bundle, ...]
    base_chunks: int
    base_rows: int
    base_bytes: int
    rollup_chunks: int
    rollup_rows: int
    rollup_bytes: int
    deleted_rows: int
    deletion_vector_bytes: int
    waiting: tuple[int, ...]
    """Births that extraction has not worked off."""
    read: StepRead | None = None

    @property
    def has_rollup(self) -> bool:
        """Whether the grid stands on a rollup over its base."""
        return self.rollup > self.base

    @property
    def total(self) -> GridCell:
        """All cells together."""
        return _join(self.cells)

    @property
    def alive(self) -> GridCell:
        """Row 0 together."""
        return _join(cell for cell in self.cells if cell.died is None)

    @property
    def extracted(self) -> GridCell:
        """All cells below row 0 together."""
        return _join(cell for cell in self.cells if cell.died is not None)

    @property
    def garbage_bytes(self) -> int:
        """Bytes of chunks that nothing names any more, in objects that still live."""
        return sum(bundle.garbage_bytes for bundle in self.bundles)

    @property
    def bundle_bytes(self) -> int:
        """Size of the objects that hold the grid."""
        return sum(bundle.bytes for bundle in self.bundles)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        fields = dataclasses.asdict(self)
        for name in ("total", "alive", "extracted"):
            part: GridCell = getattr(self, name)
            fields[name] = {
                "chunks": part.chunks,
                "rows": part.rows,
                "bytes": part.bytes,
                "dead_rows": part.dead_rows,
                "dead_fraction": part.dead_rows / part.rows if part.rows else 0.0,
            }
        fields["garbage_bytes"] = self.garbage_bytes
        fields["bundle_bytes"] = self.bundle_bytes
        return fields


def _join(cells: Iterable[GridCell]) -> GridCell:
    found = list(cells)
    return GridCell(
        born=0,
        died=None,
        chunks=sum(cell.chunks for cell in found),
        rows=sum(cell.rows for cell in found),
        bytes=sum(cell.bytes for cell in found),
        dead_rows=sum(cell.dead_rows for cell in found),
        is_read=any(cell.is_read for cell in found),
        masked_rows=sum(cell.masked_rows for cell in found),
    )


# Which cells are drawn together.


@dataclass(frozen=True, slots=True)
class Layout:
    """A grid as it is drawn: columns of births, lines of deaths (newest first), joined cells.

    ``cells`` are (line, column, cell); line 0 is row 0 and has no deaths of its own.
    """

    columns: tuple[tuple[int, ...], ...]
    lines: tuple[tuple[int, ...], ...]
    cells: tuple[tuple[int, int, GridCell], ...]
    read_columns: int
    read_lines: int

    @property
    def joined(self) -> tuple[int, int]:
        """How many checkpoints share a column, and a line, at most."""
        return max(map(len, self.columns), default=1), max(map(len, self.lines), default=1)


def plan_layout(seen: GridView, *, columns_max: int, lines_max: int) -> Layout:
    """Join neighbouring checkpoints until the grid fits."""
    step = None if seen.read is None else seen.read.step
    columns = join_steps(seen.checkpoints, most=columns_max, edge=step)
    died = sorted({cell.died for cell in seen.cells if cell.died is not None})
    lines = [(), *reversed(join_steps(died, most=lines_max - 1, edge=step))]
    column_of = {born: at for at, group in enumerate(columns) for born in group}
    line_of: dict[int | None, int] = {d: at for at, group in enumerate(lines) for d in group}
    line_of[None] = 0
    places: dict[tuple[int, int], list[GridCell]] = {}
    for cell in seen.cells:
        places.setdefault((line_of[cell.died], column_of[cell.born]), []).append(cell)
    read_columns = read_lines = 0
    if step is not None:
        read_columns = sum(group[0] <= step for group in columns)
        read_lines = 1 + sum(group[0] > step for group in lines[1:])
    return Layout(
        tuple(columns),
        tuple(lines),
        tuple((line, column, _join(found)) for (line, column), found in sorted(places.items())),
        read_columns,
        read_lines if read_columns else 0,
    )


def join_steps(
    steps: Sequence[int], *, most: int, edge: int | None = None
) -> list[tuple[int, ...]]:
    """Neighbours in groups of one size, no more than ``most`` of them.

    No group holds steps on both sides of ``edge``.

    >>> join_steps([1, 2, 3, 4, 5], most=3)
    [(1, 2), (3, 4), (5,)]
    >>> join_steps([1, 2, 3, 4, 5], most=3, edge=1)
    [(1,), (2, 3), (4, 5)]
    """
    sides = [list(steps)]
    if edge is not None:
        sides = [[s for s in steps if s <= edge], [s for s in steps if s > edge]]
    for size in range(1, len(steps) + 1):
        groups = [tuple(side[at : at + size]) for side in sides for at in range(0, len(side), size)]
        if len(groups) <= max(most, len(sides)):
            return groups
    return []


# The terminal.


def render(
    seen: GridView, *, width: int, by: str = BYTES, lines_max: int = LINES_MAX
) -> RenderableType:
    """Everything, for a terminal of ``width`` columns; the drawing has at most so many lines."""
    parts: list[RenderableType] = [header(seen)]
    if seen.cells:
        parts += [draw(seen, width=width, by=by, lines_max=lines_max), Text()]
    else:
        below = "rollup" if seen.has_rollup else "base"
        parts += [Text(f"no chunks yet: nothing changed since the {below}", style="dim"), Text()]
    parts += [totals_table(seen), Text(), notes(seen)]
    return Group(*parts)


def header(seen: GridView) -> RenderableType:
    """Which grid this is."""
    grid = make_grid()
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("run", seen.url)
    others = [rollup for rollup in seen.rollups if rollup != seen.rollup]
    text = f"{seen.rollup}"
    if seen.has_rollup:
        text += f", over the base of step {seen.base}"
    if seen.end is not None:
        text += f", ended at step {seen.end}"
    if others:
        text += f" ({words.counted(len(others), 'other grid')}, of {_some(others)}: --base)"
    below = "rollup" if seen.has_rollup else "base"
    grid.add_row(f"grid of {below}", text)
    grid.add_row("tables", _some(seen.tables))
    grid.add_row("checkpoints", f"{words.count(len(seen.checkpoints))} since the {below}")
    return Group(grid, Text())


def _some(items: Sequence[object], most: int = 6) -> str:
    if len(items) <= most:
        return ", ".join(map(str, items))
    return f"{', '.join(map(str, items[: most - 1]))}, … ({len(items)} in all)"


def draw(
    seen: GridView, *, width: int, by: str = BYTES, lines_max: int = LINES_MAX
) -> RenderableType:
    """The cells: shades, or numbers where they fit; lines around what the step reads."""
    died = [cell.died for cell in seen.cells if cell.died is not None]
    longest = len(str(max([*seen.checkpoints, *died])))
    label_width = max(len("alive"), longest)
    is_deep = len(set(died)) + 1 > lines_max
    if is_deep:
        label_width = max(label_width, 2 * longest + 1)
    room = max(8, width - label_width - 3)  # a blank and the two edges
    plan = plan_layout(seen, columns_max=room, lines_max=lines_max)
    cell_width = max(1, min(_CELL_WIDTH_MAX, room // max(1, len(plan.columns))))
    scale = make_scale(cell.measure(by) for _, _, cell in plan.cells)
    canvas = Canvas(
        columns=tuple(str(group[0]) for group in plan.columns),
        lines=("alive", *(span(group) for group in plan.lines[1:])),
        marks=_marks(plan, by, scale),
        edge_lines=plan.read_lines,
        edge_columns=plan.read_columns,
        cell_width=cell_width,
        label_width=label_width,
    )
    texts = [canvas.head("died", "born"), *(canvas.line(at) for at in range(len(plan.lines)))]
    if plan.read_lines:
        texts.insert(1 + plan.read_lines, canvas.bottom())
    texts += [canvas.axis(), Text(), legend(scale, by)]
    if plan.read_lines and seen.read is not None:
        texts.append(Text(f"│┘ what a restore of step {seen.read.step} reads", style="dim"))
    per_column, per_line = plan.joined
    if per_column > 1 or per_line > 1:
        said = []
        if per_column > 1:
            said.append(f"a column is up to {words.counted(per_column, 'checkpoint')}")
        if per_line > 1:
            said.append(f"a line up to {words.counted(per_line, 'death')}")
        texts.append(Text(f"to fit, {' and '.join(said)}; --json has every cell", style="dim"))
    return Group(*texts)


def _marks(plan: Layout, by: str, scale: Scale) -> dict[tuple[int, int], Mark | None]:
    """What each cell shows; None where one could be but is not: nothing dies before its birth."""
    marks: dict[tuple[int, int], Mark | None] = {
        (line, column): None
        for line, deaths in enumerate(plan.lines)
        for column, births in enumerate(plan.columns)
        if line == 0 or deaths[-1] > births[0]
    }
    for line, column, cell in plan.cells:
        number = cell.measure(by)
        marks[line, column] = Mark(number, scale.shade(number), cell.is_read)
    return marks


def span(steps: Sequence[int]) -> str:
    """Some neighbouring steps in short.

    >>> span([10]), span([10, 20, 30])
    ('10', '10–30')
    """
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"


def legend(scale: Scale, by: str) -> Text:
    """What the shades mean."""
    text = Text("", style="dim")
    bounds = scale.bounds()
    if scale.least == scale.most:
        return text.append(f"{SHADES[-1]} {measured(scale.most, by)} a cell")
    for shade, least in zip(SHADES, bounds, strict=True):
        text.append(f"{shade} from {measured(least, by)}   ")
    return text.append(f"most {measured(scale.most, by)}")


def measured(number: int, by: str) -> str:
    """A number of rows or bytes."""
    return words.counted(number, "row") if by == ROWS else words.size(number)


def totals_table(seen: GridView) -> Table:
    """Chunks, rows, bytes and dead rows: of base and rollup, of row 0, of the cells."""
    table = make_table("Chunks")
    table.add_column("", no_wrap=True)
    add_numbers(table, "chunks", "rows", "size", "dead in place", "of its rows")
    table.add_row("base", words.count(seen.base_chunks), words.count(seen.base_rows),
                  words.size(seen.base_bytes), "", "", style="dim")  # fmt: skip
    if seen.has_rollup:
        table.add_row("rollup", words.count(seen.rollup_chunks), words.count(seen.rollup_rows),
                      words.size(seen.rollup_bytes), "", "", style="dim")  # fmt: skip
    for name, part in (("alive (row 0)", seen.alive), ("extracted", seen.extracted)):
        table.add_row(name, *_numbers(part))
    table.add_section()
    table.add_row("grid", *_numbers(seen.total), style="bold")
    return table


def _numbers(part: GridCell) -> list[str]:
    return [
        words.count(part.chunks),
        words.count(part.rows),
        words.size(part.bytes),
        words.count(part.dead_rows),
        words.share(part.dead_rows, part.rows),
    ]


def notes(seen: GridView) -> RenderableType:
    """What the step reads; objects and their garbage; what extraction has not done yet."""
    grid = make_grid()
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in note_lines(seen):
        grid.add_row(name, text)
    return grid


def note_lines(seen: GridView) -> list[tuple[str, str]]:
    """What to know of a grid beside its cells, as (name, text)."""
    lines = []
    if seen.read is not None:
        read = seen.read
        text = (
            f"{words.counted(read.segments, 'segment')} of the grid, {words.size(read.bytes)}, "
            f"{words.counted(read.rows, 'row')}; {words.count(read.masked_rows)} of them "
            f"({words.share(read.masked_rows, read.rows)}) masked; and "
            f"{words.counted(read.base_segments, 'segment')} of the base, "
            f"{words.size(read.base_bytes)}"
        )
        if seen.has_rollup:
            text += (
                f", and {words.counted(read.rollup_segments, 'segment')} of the rollup, "
                f"{words.size(read.rollup_bytes)}"
            )
        if read.waiting_segments:
            text += f"; {read.waiting_segments} are not worked off and replayed in order"
        lines.append((f"step {read.step} reads", text))
    for kind, bundles in by_kind(seen.bundles):
        live = [bundle.chunks for bundle in bundles]
        lines.append(
            (
                f"{kind} objects",
                f"{words.count(len(bundles))} with {words.counted(sum(live), 'chunk')} alive "
                f"({_from_to(live)} each), "
                f"{words.size(sum(bundle.bytes for bundle in bundles))}, "
                f"{words.size(sum(bundle.garbage_bytes for bundle in bundles))} of it garbage",
            )
        )
    if seen.bundles:
        lines.append(
            (
                "garbage",
                f"{words.size(seen.garbage_bytes)}, "
                f"{words.share(seen.garbage_bytes, seen.bundle_bytes)} of these objects' bytes",
            )
        )
    lines.append(
        (
            "deletion vectors",
            f"name {words.counted(seen.deleted_rows, 'row')}, "
            f"{words.size(seen.deletion_vector_bytes)}; worked off up to step {seen.through}",
        )
    )
    if seen.waiting:
        lines.append(("waiting", f"the increments of {_some(seen.waiting)}"))
    return lines


def _from_to(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return words.count(low) if low == high else f"{words.count(low)} to {words.count(high)}"


def by_kind(bundles: Sequence[Bundle]) -> list[tuple[str, list[Bundle]]]:
    """Objects grouped by what was written into them."""
    kinds: dict[str, list[Bundle]] = {}
    for bundle in bundles:
        kinds.setdefault(bundle.kind, []).append(bundle)
    return sorted(kinds.items())
