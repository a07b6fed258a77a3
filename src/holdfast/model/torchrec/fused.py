"""Tables of TorchRec's fused kernels, which hold rows and row state and update both in backward.

    lookup of a kernel -> gradient of its output arrives -> mark the rows it looked up

A kernel (fbgemm's split table-batched embedding) holds this rank's shards of several tables, looks
all of them up in one call, and its backward applies the optimizer. So the ids a call was given,
after TorchRec has sent every rank its own, are the rows that its backward changes: exactly these.

Invariants:
- Rows are marked when the gradient of a lookup arrives, just before the kernel applies it: a lookup
  without a backward (evaluation) marks nothing.
- Ids are those of the shard: TorchRec has made them local before they reach the kernel.
- On a GPU no lookup waits: a copy of the ids stays there until the host knows where each feature's
  begin, a few numbers that arrive behind training. Then the rows are marked, on the GPU.

Not here: which kernels a model has (claim.py), tables that torch's optimizers train (dense.py).

# N ids of a call, F features; bounds_F: where a feature's ids begin
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch.utils.hooks import RemovableHandle

from holdfast.errors import InvalidRequestError
from holdfast.model import devices
from holdfast.model.shard import Shard
from holdfast.model.tables import Mark, Table

# Optimizers whose row state is known, and which move only rows that were looked up: weight decay
# and moments are applied to the rows of a batch alone.
KNOWN = {
    EmbOptimType.EXACT_SGD: (),
    EmbOptimType.EXACT_ADAGRAD: ("sum",),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: ("sum",),
    EmbOptimType.ADAM: ("exp_avg", "exp_avg_sq"),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: ("exp_avg", "exp_avg_sq"),
}
_APPLIED = "applied_lr"  # the kernel's own rate, until it takes over the group's
_COUNTS_STEPS = (EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM)


class Kernel:
    """One fused kernel: what it holds, and who wants to hear which rows change."""

    def __init__(self, module: SplitTableBatchedEmbeddingBagsCodegen, groups: list[Any]) -> None:
        """``groups``: the parameter groups that set the kernel's learning rate at each step."""
        self.module = module
        self._groups = groups
        self._marks: dict[int, Mark] = {}
        self._hook: RemovableHandle | None = None
        # On a device: ids of lookups, and where each feature's begin, which is still to arrive.
        self._lookups: deque[tuple[torch.Tensor, torch.Tensor, devices.Arrival]] = deque()
        self._popping = threading.Lock()  # backward may run on a thread of its own

    def state_of(self, index: int) -> dict[str, torch.Tensor]:
        """The row state of the kernel's table ``index``, sharing memory.

        One number a row is [rows, 1], as TorchRec's optimizers for torch have it.
        """
        states = self.module.get_optimizer_state()
        found = sorted(states[index].items()) if states else []
        return {key: value.detach().view(len(value), -1) for key, value in found}

    def scalars(self) -> dict[str, Any]:
        """Optimizer state that is not of rows: the rate, and how many steps Adam has taken.

        Schedulers set the group's rate; the kernel takes it over when the fused optimizer steps or
        zeroes gradients, which is after a checkpoint. Where the two differ both are stored.
        """
        steps = int(self.module.iter.item())
        counts = {"step": float(steps)} if self.module.optimizer in _COUNTS_STEPS else {}
        applied = float(self.module.get_learning_rate())
        rate = float(self._groups[0]["lr"]) if self._groups else applied
        is_applied = np.float32(rate) == np.float32(applied)  # the kernel keeps it as one
        return {"lr": rate, **({} if is_applied else {_APPLIED: applied}), **counts}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Take over what ``scalars`` gave, or what a torch optimizer had in its place."""
        if "lr" in scalars:
            self.module.set_learning_rate(float(scalars.get(_APPLIED, scalars["lr"])))
            for group in self._groups:
                group["lr"] = float(scalars["lr"])
        if "step" in scalars and self.module.optimizer in _COUNTS_STEPS:
            self.module.iter.fill_(int(scalars["step"]))
            self.module.iter_cpu.fill_(int(scalars["step"]))

    def watch(self, index: int, mark: Mark) -> Callable[[], None]:
        """Call ``mark`` with the rows of a table that a backward changes; answers with the end."""
        self._marks[index] = mark
        if self._hook is None:
            seen = _Lookup(weakref.ref(self))
            self._hook = self.module.register_forward_hook(seen, with_kwargs=True)

        def end() -> None:
            self._marks.pop(index, None)
            if not self._marks and self._hook is not None:
                self._hook.remove()
                self._hook = None

        return end

    def note(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """A backward is about to apply the gradients of these lookups."""
        features = len(self.module.feature_table_map)
        starts_F = bag_starts(len(offsets) - 1, features, batch_sizes)
        if devices.is_on_host(ids):
            self._mark(ids.numpy(), offsets.numpy()[starts_F])
            return
        bounds, arrival = devices.gather(offsets, starts_F).to_new_host()
        # A copy: a pipeline may put the next batch in the same memory.
        self._lookups.append((ids.clone(), bounds, arrival))
        self.settle(is_waited=False)

    def settle(self, *, is_waited: bool = True) -> None:
        """Mark the rows of lookups whose bounds have arrived; ``is_waited``: of all."""
        while True:
            with self._popping:
                if not self._lookups or not (is_waited or self._lookups[0][2].is_over()):
                    return
                ids, bounds, arrival = self._lookups.popleft()
            arrival.wait()
            self._mark(ids, bounds.numpy())

    def _mark(self, ids: np.ndarray | torch.Tensor, bounds_F: np.ndarray) -> None:
        for feature, index in enumerate(self.module.feature_table_map):
            mark = self._marks.get(index)
            here = ids[int(bounds_F[feature]) : int(bounds_F[feature + 1])]
            if mark is not None and len(here):
                rows = self.module.embedding_specs[index][0]
                if isinstance(here, torch.Tensor):
                    mark(looked_up_on_device(here, rows))
                else:
                    mark(looked_up(here, rows))


class _Lookup:
    """A hook after a kernel's forward pass; a copied or pickled model carries it without effect."""

    def __init__(self, kernel: Callable[[], Kernel | None]) -> None:
        self._kernel = kernel

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_nobody,)

    def __call__(
        self,
        module: SplitTableBatchedEmbeddingBagsCodegen,
        args: tuple[Any, ...],
        given: dict[str, Any],
        output: torch.Tensor,
    ) -> None:
        if not output.requires_grad:
            return
        call = dict(zip(("indices", "offsets"), args, strict=False)) | given
        ids, offsets = call["indices"].detach(), call["offsets"].detach()
        sizes = call.get("batch_size_per_feature_per_rank")

        def arrived(gradient: torch.Tensor) -> None:
            kernel = self._kernel()
            if kernel is not None:
                kernel.note(ids, offsets, sizes)

        output.register_hook(arrived)  # type: ignore[no-untyped-call]


def _nobody() -> None:
    return None


def bag_starts(
    bags: int, features: int, batch_sizes: Sequence[Sequence[int]] | None = None
) -> np.ndarray:
    """The first bag of each feature, and how many there are in all: the offsets of these bags are
    where the ids of a feature begin.

    Bags come feature by feature; ``batch_sizes`` by feature and rank where features have batches
    of their own.

    >>> bag_starts(4, 2)
    array([0, 2, 4])
    >>> bag_starts(4, 2, [[1, 0], [2, 1]])
    array([0, 1, 4])
    """
    if batch_sizes is None:
        sizes = np.full(features, bags // features)
    else:
        sizes = np.array([sum(sizes) for sizes in batch_sizes], np.int64)
    return np.concatenate([[0], np.cumsum(sizes)])


def looked_up(ids_N: np.ndarray, rows: int) -> np.ndarray:
    """The rows that a kernel changes for these ids: -1 is no row, others outside are row 0.

    >>> looked_up(np.array([1, 2, -1, 7]), 5)
    array([1, 2, 0])
    """
    if ids_N.min() >= 0 and ids_N.max() < rows:
        return ids_N
    ids_N = ids_N[ids_N != -1]
    return np.where((ids_N >= 0) & (ids_N < rows), ids_N, 0)


def looked_up_on_device(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """``looked_up`` without waiting for a device: -1 counts as row 0, too, which is a row more.

    >>> looked_up_on_device(torch.tensor([1, 2, -1, 7]), 5)
    tensor([1, 2, 0, 0])
    """
    return ids.where((ids >= 0) & (ids < rows), torch.zeros_like(ids))


class FusedTable(Table):
    """A shard of a table that a fused kernel holds."""

    def __init__(self, name: str, kernel: Kernel, index: int, *, shard: Shard) -> None:
        """``index``: which of the kernel's tables it is."""
        super().__init__(name, None, shard=shard)
        self._kernel = kernel
        self._index = index
        self._weight: torch.Tensor = kernel.module.split_embedding_weights()[index].detach()
        self._state = kernel.state_of(index)

    def weight(self) -> torch.Tensor:
        """The weights held, as the kernel has them."""
        return self._weight

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The kernel's row state."""
        return self._state

    @property
    def watch(self) -> Callable[[Mark], Callable[[], None]]:
        """Hear of the rows that a backward changes."""
        return lambda mark: self._kernel.watch(self._index, mark)

    def settle(self) -> None:
        """Have the rows of all lookups up to now marked."""
        self._kernel.settle()

    def is_current(self) -> bool:
        """Whether the kernel still holds the same memory."""
        weight = self._kernel.module.split_embedding_weights()[self._index]
        is_same = weight.data_ptr() == self._weight.data_ptr()
        return bool(is_same and weight.shape == self._weight.shape)

    def scalars(self) -> dict[str, Any]:
        """The kernel's: the same for all of its tables."""
        return self._kernel.scalars()

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Take over what ``scalars`` gave."""
        self._kernel.load_scalars(scalars)

    def make_room(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """The kernel made room when it was built: make sure that it is what is needed.

        Raises:
            InvalidRequestError: the checkpoint was taken with another optimizer.
        """
        own = {key: value.numel() for key, value in self._state.items()}
        stored = {key: int(np.prod(shape)) for key, shape in shapes.items()}
        if own != stored:
            raise InvalidRequestError(
                "the checkpoint's optimizer is another than the table's",
                table=self.whole_name,
                checkpoint=stored,
                model=own,
                optimizer=self._kernel.module.optimizer.value,
                todo="shard the model with the fused optimizer it was trained with",
            )
