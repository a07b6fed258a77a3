"""The rows that an optimizer's moments keep moving: those that ever had a gradient.

    gradient rows of each interval + rows with optimizer state -> rows that may move without one

Adam and momentum move a row after its last gradient until its moments have faded. What faded
before a save has moved its row all the same, so the rows are known from the beginning of an
interval between two saves, never from its end.

Invariant: ``rows_W`` names every row that has moments, or ``advance`` says that all must be taken.

# words_W: a bitmap of the table's rows, W words (kernels/rows/bitmap.py)
"""

from __future__ import annotations

import torch

from holdfast.checkpoint.tracking.marks import DeviceMarks, Words, nonzero_rows
from holdfast.kernels.rows import bitmap
from holdfast.model import devices
from holdfast.model.tables import Table


class Moments:
    """Which rows of one table have, or had, moments."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.rows_W: Words | None = None
        """Rows that ever had a gradient; None: nobody needed to know yet."""
        self._is_unseen = bool(table.state_tensors() or self._sparse_state())

    def note_decay(self) -> None:
        """Every row got moments, by weight decay: also those that no gradient names."""
        self._is_unseen = True

    def advance(
        self, fresh_W: Words, *, has_moments: bool, is_known: bool, was_written: bool
    ) -> bool:
        """Add the rows of an interval that had a gradient; whether all rows must be taken for it.

        ``has_moments``: an optimizer stepped that has some, or may. ``is_known``: by its class.
        ``was_written``: its state may have been replaced.
        """
        if self.rows_W is None and not has_moments:
            return False
        is_lost = has_moments and self._is_unseen
        if is_lost or self.rows_W is None or was_written:
            fresh_W = fresh_W | self._state_rows()
        self.rows_W = fresh_W if self.rows_W is None else fresh_W | self.rows_W
        if has_moments:
            self._is_unseen = False
        return is_lost and is_known  # rows of an optimizer that is not known are compared

    def reset(self, *, has_moments: bool) -> None:
        """The table and its optimizer were just loaded."""
        self.rows_W = self._state_rows() if has_moments else None
        self._is_unseen = not has_moments and bool(
            self._table.state_tensors() or self._sparse_state()
        )

    def _state_rows(self) -> Words:
        """Rows whose optimizer state is not zero."""
        rows = self._table.rows
        found_W, words_W = bitmap.new(rows), bitmap.new(rows)
        for state in self._table.state_tensors().values():
            if devices.is_on_host(state):
                nonzero_rows(state, words_W)
            else:
                marks = DeviceMarks(rows, state.device)
                marks.mark_nonzero(state)
                words_W = marks.take()
            bitmap.union_into(found_W, words_W)
        for value in self._sparse_state():
            bitmap.mark(found_W, devices.to_host(value._indices()[0]).contiguous().numpy(), rows)
        return found_W

    def _sparse_state(self) -> list[torch.Tensor]:
        """Optimizer state that is kept as sparse tensors (SGD's momentum)."""
        optimizer = self._table.optimizer
        if optimizer is None or not self._table.has_parameter:
            return []
        state = optimizer.state.get(self._table.parameter, {}).values()
        tensors = [value for value in state if torch.is_tensor(value) and value.ndim]
        return [value for value in tensors if value.layout == torch.sparse_coo]

    @property
    def bytes(self) -> int:
        """Memory it keeps."""
        return 0 if self.rows_W is None else self.rows_W.nbytes
