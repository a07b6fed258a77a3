"""A stored run: its checkpoints, its tables, what lies dead in it.

Invariant: the value holds every number; what a narrow terminal leaves out is in ``to_dict``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.report import words
from holdfast.report.layout import NAME_MAX, add_numbers, literal, make_grid, make_table

_WIDE = 110  # columns from which on the reasons fit beside the numbers


@dataclass(frozen=True, slots=True)
class CheckpointLine:
    """One checkpoint of a run."""

    step: int
    kind: str
    base: int
    rows: int
    bytes: int
    restore_bytes: int
    full_bytes: int
    codec: str
    state_codec: str
    stall_s: float
    time: float
    reason: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TableLine:
    """One table as of a step: its columns, and what a restore reads of it."""

    name: str
    rows: int
    columns: tuple[tuple[str, int, str], ...]
    """Name, width and number type of each."""
    model_bytes: int
    """What its rows take in the model."""
    stored_rows: int
    stored_bytes: int
    dead_rows: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A run as of one catalog; tables as of one step."""

    url: str
    run: str
    catalog: int
    catalogs: int
    objects: int
    objects_bytes: int
    restores: int
    now: float
    step: int
    checkpoints: tuple[CheckpointLine, ...]
    tables: tuple[TableLine, ...]

    @property
    def dead_rows(self) -> int:
        """Stored rows that a restore of the step reads over: a newer version replaces them."""
        return sum(table.dead_rows for table in self.tables)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        fields = dataclasses.asdict(self)
        for table in fields["tables"]:
            table["columns"] = [
                {"name": name, "width": width, "dtype": dtype}
                for name, width, dtype in table["columns"]
            ]
            table["fp32_bytes"] = table["model_bytes"]  # its name when all tables were float32
        fields["dead_rows"] = self.dead_rows
        return fields


def table_lines(
    schemas: Sequence[tuple[str, int, tuple[tuple[str, int, str], ...], int]],
    stored: Mapping[str, Sequence[tuple[int, int, int]]],
) -> tuple[TableLine, ...]:
    """Lines from (name, rows, columns, bytes of a row) and, by table, (rows, bytes, dead rows) of
    its segments.

    >>> schema = ("t", 10, (("weight", 4, "float32"),), 16)
    >>> lines = table_lines([schema], {"t": [(10, 50, 3), (3, 20, 0)]})
    >>> lines[0].stored_rows, lines[0].stored_bytes, lines[0].dead_rows, lines[0].model_bytes
    (13, 70, 3, 160)
    """
    lines = []
    for name, rows, columns, row_bytes in schemas:
        segments = stored.get(name, ())
        lines.append(
            TableLine(
                name=name,
                rows=rows,
                columns=columns,
                model_bytes=rows * row_bytes,
                stored_rows=sum(segment[0] for segment in segments),
                stored_bytes=sum(segment[1] for segment in segments),
                dead_rows=sum(segment[2] for segment in segments),
            )
        )
    return tuple(lines)


def render(seen: Inspection, *, width: int, lines_max: int = 30) -> RenderableType:
    """Everything, for a terminal of ``width`` columns; at most ``lines_max`` lines a table."""
    parts: list[RenderableType] = [
        header(seen),
        checkpoints_table(seen, width=width, lines_max=lines_max),
    ]
    if width < _WIDE and seen.checkpoints:
        last = seen.checkpoints[-1]
        why = literal(f"why step {last.step} is a {last.kind}: {last.reason}", style="dim")
        parts += [Text(), why]
    if any(line.metrics or line.metadata for line in seen.checkpoints):
        parts += [Text(), annotations_table(seen, lines_max=lines_max)]
    parts += [Text(), tables_table(seen, lines_max=lines_max), Text(), dead_note(seen)]
    return Group(*parts)


def header(seen: Inspection) -> RenderableType:
    """The run in three lines."""
    grid = make_grid()
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    grid.add_row("run", seen.url)
    grid.add_row(
        "stored",
        f"{words.size(seen.objects_bytes)} in {words.counted(seen.objects, 'object')}, "
        f"catalog {seen.catalog} ({seen.catalogs} kept)",
    )
    grid.add_row("restored", "never" if not seen.restores else words.counted(seen.restores, "time"))
    return Group(grid, Text())


def checkpoints_table(seen: Inspection, *, width: int, lines_max: int = 30) -> Table:
    """The checkpoints, newest last; the last ``lines_max`` of them."""
    table = make_table("Checkpoints")
    table.add_column("step", justify="right", style="cyan", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    add_numbers(table, "base", "rows", "size", "of full")
    table.add_column("codec", no_wrap=True)
    table.add_column("state", no_wrap=True)
    add_numbers(table, "stall", "age")
    is_wide = width >= _WIDE
    if is_wide:
        table.add_column("reason", overflow="fold", ratio=1, style="dim")
    hidden = max(0, len(seen.checkpoints) - lines_max)
    if hidden:
        table.add_row("…", str(hidden), "more", *[""] * (7 + is_wide), style="dim")
    for line in seen.checkpoints[hidden:]:
        cells: list[RenderableType] = [
            str(line.step),
            line.kind,
            "–" if line.kind == "base" else str(line.base),
            words.count(line.rows),
            words.size(line.bytes),
            words.share(line.bytes, line.full_bytes),
            literal(line.codec, most=NAME_MAX),
            literal(line.state_codec, most=NAME_MAX),
            words.duration(line.stall_s),
            words.age(seen.now - line.time),
        ]
        style = "bold" if line.kind == "base" else None
        table.add_row(*cells, *([line.reason] if is_wide else []), style=style)
    return table


def annotations_table(seen: Inspection, *, lines_max: int = 30) -> Table:
    """What the user said of checkpoints; of the last ``lines_max`` that have something said."""
    table = make_table("Metrics and metadata")
    table.add_column("step", justify="right", style="cyan", no_wrap=True)
    table.add_column("metrics", overflow="fold")
    table.add_column("metadata", overflow="fold", style="dim")
    said = [line for line in seen.checkpoints if line.metrics or line.metadata]
    if len(said) > lines_max:
        table.add_row("…", f"{len(said) - lines_max} more", style="dim")
    for line in said[-lines_max:]:
        metadata = json.dumps(line.metadata) if line.metadata else ""
        table.add_row(str(line.step), shown_metrics(line.metrics), metadata)
    return table


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """Metrics in a cell.

    >>> shown_metrics({"auc": 0.812345678, "loss": 12000.0})
    'auc 0.8123, loss 1.2e+04'
    """
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def tables_table(seen: Inspection, *, lines_max: int = 30) -> Table:
    """The tables as of the inspected step; the ``lines_max`` largest of them."""
    table = make_table(f"Tables at step {seen.step}")
    table.add_column("table", overflow="fold", style="cyan")
    add_numbers(table, "rows")
    table.add_column("floats a row", overflow="fold")
    add_numbers(table, "in model", "stored", "of that", "dead rows")
    largest = sorted(seen.tables, key=lambda line: -line.model_bytes)[:lines_max]
    for line in seen.tables:
        if line not in largest:
            continue
        table.add_row(
            line.name,
            words.count(line.rows),
            widths(line.columns),
            words.size(line.model_bytes),
            words.size(line.stored_bytes),
            words.share(line.stored_bytes, line.model_bytes),
            words.count(line.dead_rows),
        )
    if len(largest) < len(seen.tables):
        smaller = len(seen.tables) - len(largest)
        table.add_row(f"… {words.counted(smaller, 'smaller table')}", style="dim")
    table.add_section()
    model_bytes = sum(line.model_bytes for line in seen.tables)
    stored_bytes = sum(line.stored_bytes for line in seen.tables)
    table.add_row(
        "all",
        words.count(sum(line.rows for line in seen.tables)),
        "",
        words.size(model_bytes),
        words.size(stored_bytes),
        words.share(stored_bytes, model_bytes),
        words.count(seen.dead_rows),
        style="bold",
    )
    return table


_SHORT = {"float32": "", "float16": " fp16", "bfloat16": " bf16", "float64": " fp64"}


def widths(columns: Sequence[tuple[str, int, str]]) -> str:
    """How many floats a row has: its weights, then each kind of row state by name; and their type
    where it is not float32.

    >>> widths([("weight", 16, "bfloat16"), ("exp_avg", 16, "bfloat16"), ("sum", 1, "float32")])
    '16 bf16 + exp_avg 16 bf16 + sum 1'
    """
    (_, width, dtype), *state = columns
    shown = [f"{width}{_SHORT[dtype]}"]
    return " + ".join([*shown, *(f"{name} {width}{_SHORT[dtype]}" for name, width, dtype in state)])


def dead_note(seen: Inspection) -> Text:
    """What dead rows mean, with this run's number."""
    stored = sum(line.stored_rows for line in seen.tables)
    return Text(
        f"A restore of step {seen.step} reads {words.count(stored)} stored rows; "
        f"{words.count(seen.dead_rows)} of them ({words.share(seen.dead_rows, stored)}) are dead: "
        "a newer segment replaces them.",
        style="dim",
    )
