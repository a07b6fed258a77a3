"""A device that is behind, made of host memory: the flow of a GPU, on CPU tensors.

What is copied to the host holds garbage until somebody waits for it. A copy on the "device" holds
garbage until something waits for the point of the training stream at which it was made. So code
that forgets to wait, or that sends the table itself instead of a copy, stores wrong bytes.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from holdfast.checkpoint.saving.staging import BUFFER_BYTES
from holdfast.model import devices

GARBAGE = 0x5A
FETCHER = "holdfast-fetch"


def spoil(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with garbage."""
    tensor.view(-1).view(torch.uint8).fill_(GARBAGE)
    return tensor


class LateArrival:
    """A copy that is made when somebody waits for it."""

    def __init__(self, device: PretendDevice, source: torch.Tensor, into: torch.Tensor) -> None:
        self._device = device
        self._source = source
        self._into: torch.Tensor | None = into
        self._once = threading.Lock()

    def is_over(self) -> bool:
        """Whether it was made; a prompt device makes it when asked."""
        if self._device.is_prompt:
            self.wait()
        return self._into is None

    def wait(self) -> None:
        """Make it now; the thread that brings copies to the host waits at the gate."""
        if threading.current_thread().name.startswith(FETCHER):
            self._device.fetches += 1
            self._device.gate.wait()
            self._device.on_fetch()
        with self._once:
            if self._into is not None:
                self._into.view(-1).copy_(self._source.view(-1))
                self._into = None


class PretendDevice:
    """Queues everything; ``gate`` closed, no snapshot's copy leaves it."""

    def __init__(self, *, is_prompt: bool = True, free_bytes: int = 1 << 40) -> None:
        self.is_prompt = is_prompt
        self.free = free_bytes
        self.gate = threading.Event()
        self.gate.set()
        self.on_fetch: Callable[[], None] = lambda: None
        self.on_copy: Callable[[], None] = lambda: None
        self.fetches = 0
        self.copies = 0
        self.pinned = 0
        self._counting = threading.RLock()
        self.held = 0

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A flat copy, hidden until it is ready."""
        return self._hidden(devices.BlockingDevice(tensors[0].device).join(tensors))

    def gather(self, column: torch.Tensor, ids_N: np.ndarray) -> torch.Tensor:
        """A copy of some rows, hidden until it is ready."""
        return self._hidden(column[torch.from_numpy(ids_N)])

    def _hidden(self, copy: torch.Tensor) -> torch.Tensor:
        self.on_copy()
        self.copies += 1
        shown: Any = spoil(torch.empty_like(copy))
        shown.hidden = (self.copies, copy)
        self._hold(shown.nbytes)
        weakref.finalize(shown, self._hold, -shown.nbytes)
        return shown

    def _hold(self, size: int) -> None:
        with self._counting:
            self.held += size

    def ready(self) -> object:
        """How many copies were made so far."""
        return self.copies

    def copy_to_host(self, copy: torch.Tensor, into: torch.Tensor, after: object) -> LateArrival:
        """What has become ready, later; garbage of what has not."""
        assert isinstance(after, int)
        assert copy.numel() == into.numel() and copy.dtype == into.dtype
        spoil(into)
        number, hidden = copy.hidden  # type: ignore[attr-defined]
        return LateArrival(self, hidden if number <= after else copy, into)

    def host_memory(self, size: int) -> torch.Tensor:
        """Memory that counts as pinned."""
        self.pinned += size
        return spoil(torch.empty(size, dtype=torch.uint8, device="cpu"))

    def free_bytes(self) -> int:
        """What it was told to have, without its copies."""
        return self.free - self.held


@contextlib.contextmanager
def pretending(device: PretendDevice | None = None) -> Iterator[PretendDevice]:
    """Within the block host memory is a device's."""
    device = device or PretendDevice()
    with devices.registered("cpu", lambda _: device):
        yield device


class Synchronised(AssertionError):
    """Something waited for the device."""


class _NoWaiting(TorchFunctionMode):
    """Refuses whatever makes a program wait for the device that a tensor is on."""

    NAMES = frozenset(
        ("cpu", "numpy", "item", "tolist", "nonzero", "unique", "masked_select", "__bool__",
         "__int__", "__float__", "__index__", "__array__")
    )  # fmt: skip

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch, unless it waits."""
        name = getattr(func, "__name__", "")
        if name in self.NAMES:
            raise Synchronised(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Fail where the program waits for a device: a real one, or host memory that pretends."""
    if device == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return

    def refuse(tensor: torch.Tensor) -> torch.Tensor:
        raise Synchronised("to_host waits for the device")

    with _NoWaiting(), mock.patch.object(devices, "to_host", refuse):
        yield


SMALL_BUFFER = BUFFER_BYTES >> 9  # 16 KiB: many parts of a small table
