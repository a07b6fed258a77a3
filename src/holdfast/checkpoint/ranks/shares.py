"""Which rows of a replicated table a rank writes.

Every rank holds the same rows, so each writes a share of them: the stall, the encoding and the
upload of a base are divided by the number of ranks. Tables so small that a share is not worth a
segment of its own are rank 0's.

Invariant: the shares of all ranks hold each row exactly once, and depend on nothing but the table
and the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.model.pieces import Piece
from holdfast.model.tables import Table

SMALL_BYTES = 1 << 20


def share_of(piece: Piece, *, rank: int, ranks: int) -> range:
    """The local rows that a rank writes of the piece it holds.

    >>> [share_of(Piece(1000, 1024, is_replicated=True), rank=r, ranks=3) for r in range(3)]
    [range(0, 333), range(333, 666), range(666, 1000)]
    >>> share_of(Piece(10, 4, is_replicated=True), rank=1, ranks=3)
    range(0, 0)
    """
    rows = piece.local_rows
    if not piece.is_replicated:
        return range(rows)
    if 4 * rows * len(piece.floats) < SMALL_BYTES:
        return range(rows if rank == 0 else 0)
    return range(rows * rank // ranks, rows * (rank + 1) // ranks)


def shares_of(tables: Iterable[Table], *, rank: int, ranks: int) -> dict[str, range]:
    """The local rows that a rank writes, by table."""
    return {table.name: share_of(table.piece, rank=rank, ranks=ranks) for table in tables}
