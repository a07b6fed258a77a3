"""Devices that run behind the program (GPUs): copies out of their memory, without waiting for them.

    training stream:  ... step | copy on the device | step ...      training waits for nothing else
    side stream:                      \\-> device copy -> pinned host memory -> a thread that waits

Everything that depends on the kind of device is here. A tensor in host memory has no ``Device``.
Tables on CUDA (and ROCm, which torch calls the same) use streams, events and pinned memory. Any
other device is copied by ``BlockingDevice``: the same flow, and a copy is over when it was asked
for.

Invariants:
- ``join`` and ``gather`` copy in the order of training: what training writes later is not in the
  copy.
- A copy on the host is whole only after ``Arrival.wait``. Only that waits for the device.
- The memory of a device copy is not given out again before it was read.

No code of this module was ever run on a GPU: see docs/gpu.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Arrival(Protocol):
    """A copy on its way to host memory."""

    def is_over(self) -> bool:
        """Whether it has arrived; does not wait."""

    def wait(self) -> None:
        """Wait until it has arrived."""


class Device(Protocol):
    """A device with its own memory; its work is queued, and done later, in order."""

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A flat copy of tensors of one type, one after the other, on the device."""

    def gather(self, column: torch.Tensor, ids_N: npt.NDArray[np.int64]) -> torch.Tensor:
        """A copy of some rows, on the device."""

    def ready(self) -> object:
        """A point in the queue of training: after all that the calling thread has asked for."""

    def copy_to_host(self, copy: torch.Tensor, into: torch.Tensor, after: object) -> Arrival:
        """Begin to copy into host memory, of the same type and size, once ``after`` is reached.

        Any thread may call it.
        """

    def host_memory(self, size: int) -> torch.Tensor:
        """Bytes of host memory that this device can copy to by itself; ordinary memory where there
        is none of that kind left. A copy to ordinary memory may keep its caller waiting."""

    def free_bytes(self) -> int:
        """Memory on the device that nobody uses now."""


class _Over:
    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class BlockingDevice:
    """A device of a kind that is not known here: whoever asks for a copy waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A flat copy of tensors of one type, on the device."""
        return _join(tensors)

    def gather(self, column: torch.Tensor, ids_N: npt.NDArray[np.int64]) -> torch.Tensor:
        """A copy of some rows, on the device."""
        return column.index_select(0, torch.from_numpy(ids_N).to(column.device))

    def ready(self) -> object:
        """Nothing: the device does what it is asked in order."""
        return None

    def copy_to_host(self, copy: torch.Tensor, into: torch.Tensor, after: object) -> Arrival:
        """Copy now."""
        into.view(-1).copy_(copy.view(-1))
        return _Over()

    def host_memory(self, size: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def free_bytes(self) -> int:
        """Nobody knows: nothing is taken to be free, so that few rows at a time are copied."""
        return 0


class _CudaArrival:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_over(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice(BlockingDevice):
    """A GPU: copies leave on a stream of their own, into pinned memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def gather(self, column: torch.Tensor, ids_N: npt.NDArray[np.int64]) -> torch.Tensor:
        """A copy of some rows, on the device."""
        ids = self.host_memory(ids_N.nbytes).view(torch.int64)
        ids.copy_(torch.from_numpy(ids_N))
        return column.index_select(0, ids.to(self.device, non_blocking=True))

    def ready(self) -> object:
        """An event in the stream that the calling thread trains on."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def copy_to_host(self, copy: torch.Tensor, into: torch.Tensor, after: object) -> Arrival:
        """Begin to copy on the side stream, once ``after`` is reached."""
        assert isinstance(after, torch.cuda.Event)
        # Blocking: whoever waits sleeps.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side):
            self._side.wait_event(after)
            into.view(-1).copy_(copy.view(-1), non_blocking=True)
            done.record(self._side)
        # The allocator knows of the training stream alone, and would give the memory out again.
        copy.record_stream(self._side)
        return _CudaArrival(done)

    def host_memory(self, size: int) -> torch.Tensor:
        """Pinned memory; ordinary memory where the system pins no more."""
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return super().host_memory(size)

    def free_bytes(self) -> int:
        """What the driver has left, and what torch's allocator keeps unused."""
        left, _ = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(left + kept)


def _join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    if len(flat) == 1:
        return flat[0].clone(memory_format=torch.contiguous_format)
    # As bytes: not every type of number can be concatenated on every device.
    parts = [part.contiguous().view(torch.uint8) for part in flat]
    return torch.cat(parts).view(flat[0].dtype)


Make = Callable[[torch.device], Device]

_HOST = {"cpu"}
_makers: dict[str, Make] = {"cuda": CudaDevice}
_made: dict[torch.device, Device] = {}


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in memory that this process reads by itself.

    >>> is_on_host(torch.zeros(1))
    True
    """
    return tensor.device.type in _HOST


def device_of(tensor: torch.Tensor) -> Device | None:
    """The device whose memory a tensor is in; None for host memory."""
    if is_on_host(tensor):
        return None
    found = _made.get(tensor.device)
    if found is None:
        found = _makers.get(tensor.device.type, BlockingDevice)(tensor.device)
        _made[tensor.device] = found
    return found


@contextlib.contextmanager
def registered(kind: str, make: Make) -> Iterator[None]:
    """Within the block, tensors on devices of this kind are copied by what ``make`` makes.

    ``registered("cpu", make)`` sends tensors in host memory the way that those on a GPU go.
    """
    host, makers, made = set(_HOST), dict(_makers), dict(_made)
    _HOST.discard(kind)
    _makers[kind] = make
    _made.clear()
    try:
        yield
    finally:
        _HOST.update(host)
        _makers.clear()
        _makers.update(makers)
        _made.clear()
        _made.update(made)


class DeviceCopy:
    """A copy of numbers of a model, on their device, as they were when it was made."""

    def __init__(self, device: Device, copy: torch.Tensor) -> None:
        self._device = device
        self._copy = copy
        self._after = device.ready()

    @property
    def nbytes(self) -> int:
        """How large it is."""
        return self._copy.nbytes

    def to_host(self, into: torch.Tensor) -> Arrival:
        """Begin to copy it into host memory of the same type and size."""
        return self._device.copy_to_host(self._copy, into, self._after)

    def to_new_host(self) -> tuple[torch.Tensor, Arrival]:
        """``to_host``, into memory for it alone."""
        into = self._device.host_memory(self.nbytes).view(self._copy.dtype)
        into = into.view(self._copy.shape)
        return into, self.to_host(into)


def join(tensors: Sequence[torch.Tensor]) -> DeviceCopy:
    """A flat copy of tensors of one type and device, one after the other."""
    device = device_of(tensors[0]) or BlockingDevice(tensors[0].device)
    return DeviceCopy(device, device.join(tensors))


def gather(column: torch.Tensor, ids_N: npt.NDArray[np.int64]) -> DeviceCopy:
    """A copy of some rows of a column."""
    device = device_of(column) or BlockingDevice(column.device)
    return DeviceCopy(device, device.gather(column, ids_N))


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory: itself if it is there, else a copy. Waits for the device.

    Takes no memory of the device, however large the tensor is.
    """
    tensor = tensor.detach()
    if is_on_host(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
