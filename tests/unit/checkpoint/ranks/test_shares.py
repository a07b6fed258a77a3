"""Shares of replicated tables: every row is written by exactly one rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.ranks.shares import SMALL_BYTES, share_of
from holdfast.model.pieces import Piece


@given(st.integers(0, 5000), st.sampled_from([1, 64, 1024]), st.integers(1, 9))
def test_every_row_has_one_writer(rows: int, width: int, ranks: int) -> None:
    piece = Piece(rows, width, is_replicated=True)
    shares = [share_of(piece, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [row for share in shares for row in share] == list(range(rows))
    if 4 * rows * width >= SMALL_BYTES:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_piece_that_one_rank_holds_is_its_own() -> None:
    assert share_of(Piece(100, 4, range(20, 50)), rank=3, ranks=4) == range(30)
