"""Version counters: whether anything wrote to a table since it was looked at last.

torch counts the writes to every tensor (``Tensor._version``), whoever made them: an optimizer,
``load_state_dict``, an average moved by ``lerp_``, an edit in place under ``no_grad``. Comparing
counters before an optimizer steps and at a save tells training from all other writes.

Not counted by torch: writes through ``.data``, through a NumPy view, by fused kernels. The hashes
find those (hashes.py). Other memory in the place of a tensor's (``p.data = ...``) has another
address, and at a save another storage, also where the allocator gave it the same address again.

Invariants:
- A write that torch counts, or another tensor in the place of one, is seen exactly once.
- The tensors of the last look are kept alive until the next: no other can have their identity, and
  one that has their memory and their count is still another.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.model.tables import Table

Counters = list[tuple[int, int]]
"""Of each tensor its address, and how many writes torch has counted."""


class VersionCounters:
    """The addresses and versions of a table's weight and row state, as of the last look."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._state: list[Any] = []  # what the optimizer kept for this parameter at that look
        self._tensors: list[torch.Tensor] = []
        self._seen_tensors: list[torch.Tensor] = []
        self._seen: Counters | None = []
        self._sparse: list[torch.Tensor] = []  # moments that SGD keeps as sparse tensors
        self._seen_sparse: list[tuple[torch.Tensor, int]] = []
        self._storages: list[tuple[torch.Tensor, StorageWeakRef | None]] = []
        self.look()
        self.look_at_storages()

    @property
    def is_counted(self) -> bool:
        """Whether torch counts writes to this table at all (not to inference tensors)."""
        return self._seen is not None

    def look(self) -> None:
        """Take the table as it is now as seen."""
        self._find_tensors()
        self._seen_tensors = self._tensors
        self._seen = self._counters()
        self._seen_sparse = [(tensor, tensor._version) for tensor in self._sparse]

    @property
    def has_sparse_state(self) -> bool:
        """Whether the optimizer keeps sparse tensors for this table, which have no address."""
        return bool(self._sparse)

    @property
    def seen_tensors(self) -> list[torch.Tensor]:
        """The tensors of the last look, the weight first."""
        return self._seen_tensors

    def take_over(self, seen: Counters) -> None:
        """Take these counters of the same tensors as seen: somebody else has looked since."""
        self._seen = seen

    def has_changed(self) -> bool:
        """Whether something wrote since the last look."""
        self._find_tensors()
        before, now = self._seen_tensors, self._tensors
        is_other = before is not now and not _are_same(before, now)
        return is_other or self._seen != self._counters() or self._has_changed_sparse()

    def _has_changed_sparse(self) -> bool:
        seen, now = self._seen_sparse, self._sparse
        return len(seen) != len(now) or any(
            tensor is not before or tensor._version != version
            for tensor, (before, version) in zip(now, seen, strict=True)
        )

    def weight_writes(self) -> int:
        """How many writes to the weight torch has counted since the last look."""
        if not self._seen:
            return 0
        return int(self._seen_tensors[0]._version) - self._seen[0][1]

    def look_at_storages(self) -> bool:
        """Whether a tensor's memory is another than at the last call, also if it moved back to the
        same address: the weak references keep a storage's identity from being given out again.

        Of tensors that were there at both calls; ``has_changed`` tells of others.
        """
        self._find_tensors()
        storages = [(tensor, _storage_of(tensor)) for tensor in self._tensors]
        known, self._storages = self._storages, storages
        return any(
            tensor is before and storage.cdata != other.cdata
            for tensor, storage in storages
            for before, other in known
            if storage is not None and other is not None
        )

    def _find_tensors(self) -> None:
        """The weight and the row state as they are now; searched only where they may be others."""
        table = self._table
        if not table.has_parameter:
            if not self._tensors:
                self._tensors = [table.weight(), *table.state_tensors().values()]
            return
        optimizer, parameter = table.optimizer, table.parameter
        kept = {} if optimizer is None else optimizer.state.get(parameter, {})
        state = list(kept.values())
        is_same = self._tensors and self._tensors[0] is parameter
        if is_same and _are_same(state, self._state):
            return
        self._state = state
        tensors = (value for value in state if isinstance(value, torch.Tensor))
        self._sparse = [tensor for tensor in tensors if tensor.layout == torch.sparse_coo]
        self._tensors = [parameter, *table.state_tensors().values()]

    def _counters(self) -> Counters | None:
        try:
            return count_writes(self._tensors)
        except RuntimeError:  # inference tensors have no counter
            return None


def count_writes(tensors: Sequence[torch.Tensor]) -> Counters:
    """The counters as they are now.

    Raises:
        RuntimeError: of an inference tensor, which has none.
    """
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]


def _are_same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef | None:
    try:
        memory = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a tensor of a library's own kind
        return None
    return StorageWeakRef(memory)  # type: ignore[no-untyped-call]
