"""What changed between two steps, for people: tables, then the rows that moved most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from holdfast.checkpoint.diff import RowChange, StepDiff, TableDiff
from holdfast.report import words
from holdfast.report.layout import add_numbers, literal, make_table


@dataclass(frozen=True, slots=True)
class Changes:
    """A diff, where it comes from, and what reading it took."""

    url: str
    diff: StepDiff
    read_bytes: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        diff = self.diff
        return {
            "url": self.url,
            "a": diff.a,
            "b": diff.b,
            "is_swapped": diff.is_swapped,
            "is_across_bases": diff.is_across_bases,
            "changed": diff.changed,
            "tables": [_table_dict(table) for table in diff.tables],
            "only_in_a": list(diff.only_in_a),
            "only_in_b": list(diff.only_in_b),
            "read_bytes": self.read_bytes,
            "seconds": self.seconds,
        }


def _table_dict(table: TableDiff) -> dict[str, Any]:
    return {
        "table": table.table,
        "rows": table.rows,
        "rewritten": table.rewritten,
        "changed": table.changed,
        "share": table.share,
        "l2_mean": _number(table.l2_mean),
        "l2_max": _number(table.l2_max),
        "not_finite": table.not_finite,
        "state_changed": dict(table.state_changed),
        "top": [
            {"row": row.row, "l2": _number(row.l2), "before": _number(row.before)}
            for row in table.top
        ],
    }


def _number(value: float) -> float | None:
    """A number as JSON can hold it."""
    return value if math.isfinite(value) else None


def render(seen: Changes, *, lines_max: int = 40) -> RenderableType:
    """Everything; tables that did not change are only counted."""
    diff = seen.diff
    parts: list[RenderableType] = []
    if diff.is_swapped:
        parts.append(Text(f"the later step was given first: shown from {diff.a} to {diff.b}\n"))
    changed = [t for t in diff.tables if t.changed or any(n for _, n in t.state_changed)]
    if not changed:
        parts.append(Text(f"nothing changed from step {diff.a} to step {diff.b}"))
    else:
        parts.append(_tables(diff, changed, lines_max))
        rows = _most_moved(changed)
        if rows:
            parts += [Text(), rows]
    parts += [Text(), literal(_note(seen, len(diff.tables) - len(changed)), style="dim")]
    return Group(*parts)


def _tables(diff: StepDiff, changed: list[TableDiff], lines_max: int) -> RenderableType:
    table = make_table(f"Changed from step {diff.a} to step {diff.b}")
    table.add_column("table", overflow="fold", style="cyan")
    add_numbers(table, "rows", "rewritten", "changed", "share", "mean L2", "most L2")
    table.add_column("state", overflow="fold", justify="right")
    largest = sorted(changed, key=lambda item: -item.changed)[:lines_max]
    for item in changed:
        if item not in largest:
            continue
        table.add_row(
            item.table,
            words.count(item.rows),
            words.count(item.rewritten),
            words.count(item.changed),
            words.share(item.changed, item.rows),
            f"{item.l2_mean:.3g}",
            f"{item.l2_max:.3g}",
            ", ".join(f"{name} {words.count(n)}" for name, n in item.state_changed) or "–",
        )
    if len(largest) < len(changed):
        fewer = words.counted(len(changed) - len(largest), "table")
        table.add_row(f"… {fewer} with fewer changes", style="dim")
    table.add_section()
    rows = sum(item.rows for item in diff.tables)
    table.add_row(
        "all compared",
        words.count(rows),
        words.count(sum(item.rewritten for item in diff.tables)),
        words.count(diff.changed),
        words.share(diff.changed, rows),
        style="bold",
    )
    return table


def _most_moved(tables: list[TableDiff]) -> RenderableType | None:
    """The rows that moved most, over all tables, as many as were asked for of each."""
    most = max((len(table.top) for table in tables), default=0)
    rows: list[tuple[str, RowChange]] = [(t.table, row) for t in tables for row in t.top]
    rows.sort(key=lambda item: -item[1].l2)
    if not rows:
        return None
    shown = make_table("Rows that moved most")
    shown.add_column("table", overflow="fold", style="cyan")
    add_numbers(shown, "row", "L2 of change", "L2 before")
    for name, row in rows[:most]:
        length = f"{row.l2:.4g}" if math.isfinite(row.l2) else "not finite"
        shown.add_row(name, str(row.row), length, f"{row.before:.4g}")
    return shown


def _note(seen: Changes, unchanged: int) -> str:
    diff = seen.diff
    said = []
    if unchanged:
        said.append(f"{words.counted(unchanged, 'table')} did not change")
    if diff.is_across_bases:
        said.append("a base lies between the steps, so every row was rewritten and compared")
    odd = sum(table.not_finite for table in diff.tables)
    if odd:
        said.append(f"{words.counted(odd, 'change')} without a length (NaN or infinity)")
    for name, tables in (("a", diff.only_in_a), ("b", diff.only_in_b)):
        if tables:
            step = diff.a if name == "a" else diff.b
            said.append(f"only at step {step}, or of another shape: {', '.join(tables)}")
    said.append(f"{words.size(seen.read_bytes)} read in {words.duration(seen.seconds)}")
    return "; ".join(said)
