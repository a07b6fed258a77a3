"""What a table looks like, without its values: names, rows, columns. Needs nothing, not even NumPy.

A model's tables (tables.py), a cluster's (cluster/store.py) and a catalog's are described alike.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Column:
    """One kind of number a row holds: its weights, or one part of its optimizer state."""

    name: str
    width: int


@dataclass(frozen=True, slots=True)
class TableSchema:
    """What a table looks like, without its values."""

    name: str
    rows: int
    columns: tuple[Column, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one fp32 row with its state."""
        return 4 * sum(column.width for column in self.columns)
