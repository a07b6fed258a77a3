"""Gradients that wait for parity, in the order in which they were applied to their rows.

    push -> rows change here, their gradients wait -> flush -> parity repeats the same steps

Gradients do not add up while they wait, as differences do: an optimizer's two steps are not one.

Invariants:
- Gradients of one row leave in the order in which they came, whatever is held back meanwhile.
- Nothing here belongs to the caller: what waits is a copy.

Not here: rows, and those that are told to parity as differences (arenashard.py).

# N rows of a push, K rows that leave, D weights of a row, M rows of the server
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

IsOpen = Callable[[np.ndarray], np.ndarray]


class GradientQueue:
    """Gradients of rows of one arena."""

    def __init__(self, dim: int, room: int) -> None:
        """Empty; ``room`` is how many should wait at most."""
        self._dim = dim
        self._room = room
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self.rows = 0

    @property
    def room(self) -> int:
        """How many more should wait."""
        return max(0, self._room - self.rows)

    def add(self, slots_N: np.ndarray, grads_ND: np.ndarray) -> None:
        """Let gradients wait that were just applied."""
        if len(slots_N):
            self._waiting.append((np.array(slots_N, np.int64), np.array(grads_ND, np.float32)))
            self.rows += len(slots_N)

    def take(self, is_open: IsOpen | None = None) -> tuple[np.ndarray, np.ndarray]:
        """What may leave, oldest first; None: everything.

        >>> queue = GradientQueue(1, 9)
        >>> queue.add(np.array([4, 7]), np.array([[1.0], [2.0]]))
        >>> queue.add(np.array([4]), np.array([[3.0]]))
        >>> slots_K, grads_KD = queue.take(lambda slots_N: slots_N == 4)
        >>> slots_K.tolist(), grads_KD.ravel().tolist(), queue.rows
        ([4, 4], [1.0, 3.0], 1)
        """
        if not self._waiting:
            return np.empty(0, np.int64), np.empty((0, self._dim), np.float32)
        slots_N = np.concatenate([slots_N for slots_N, _ in self._waiting])
        grads_ND = np.concatenate([grads_ND for _, grads_ND in self._waiting])
        self.clear()
        if is_open is None:
            return slots_N, grads_ND
        is_open_N = is_open(slots_N)
        self.add(slots_N[~is_open_N], grads_ND[~is_open_N])
        return slots_N[is_open_N], grads_ND[is_open_N]

    def forget(self, is_gone_M: np.ndarray) -> None:
        """Gradients of rows that are told to parity otherwise do not wait any more."""
        self.take(lambda slots_N: is_gone_M[slots_N])

    def clear(self) -> None:
        """Nothing waits any more."""
        self._waiting = []
        self.rows = 0
