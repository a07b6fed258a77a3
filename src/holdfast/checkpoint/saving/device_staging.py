"""Copies on a GPU between the snapshot and the host: bounded, and gone when they have arrived.

    snapshot (training waits): room -> copy on the device
    fetcher (a thread):        copy -> host buffer of the pool -> the room is given back

Invariants:
- Copies take at most half of the memory that was free on the device when the snapshot began,
  except that one copy is always granted.
- ``reserve`` waits only for copies under way. Each ends, well or not, and gives its room back.

Not here: the host's buffers (staging.py), how a device copies (model/devices.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Self

import torch

from holdfast.checkpoint.saving.staging import BUFFER_BYTES, Buffer
from holdfast.model.devices import Arrival, Device, DeviceCopy


class DeviceRoom:
    """How much memory of a device copies may take, until they have left for the host."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._bytes_max = 0
        self._out = 0
        self._changed = threading.Condition()
        self.measure()

    def host_buffer(self, size: int) -> Buffer:
        """A new buffer of memory that the device copies to by itself."""
        buffer: Buffer = self._device.host_memory(size).numpy()
        return buffer

    def measure(self) -> None:
        """Take half of the memory that is free now, and two buffers at least."""
        with self._changed:
            free = self._device.free_bytes() + self._out
            self._bytes_max = max(2 * BUFFER_BYTES, free // 2)

    def reserve(self, size: int) -> None:
        """Wait until there is room; one copy is always granted."""
        with self._changed:
            while self._out and self._out + size > self._bytes_max:
                self._changed.wait()
            self._out += size

    def wait_for_others(self, size: int) -> None:
        """Wait until nothing is out but the caller's own ``size``."""
        with self._changed:
            while self._out > size:
                self._changed.wait()

    def give_back(self, size: int) -> None:
        """A copy has left for the host."""
        with self._changed:
            self._out -= size
            self._changed.notify_all()


class DeviceStaging:
    """Copies on a device, and the room they take there. As a context: until they have left."""

    def __init__(self, room: DeviceRoom, size: int, copy: Callable[[], list[DeviceCopy]]) -> None:
        """``copy`` makes copies of ``size`` bytes, as soon as there is room for them."""
        self._room = room
        self._size = size
        room.reserve(size)
        try:
            try:
                self._copies = copy()
            except torch.cuda.OutOfMemoryError:
                # Training has taken memory since it was measured; copies under way give some back.
                room.wait_for_others(size)
                self._copies = copy()
        except BaseException:
            room.give_back(size)
            raise

    def bring(self, into: Sequence[torch.Tensor]) -> None:
        """Bring the copies to host memory, and wait until they are there."""
        arrivals: list[Arrival] = []
        try:
            for copy, target in zip(self._copies, into, strict=True):
                arrivals.append(copy.to_host(target))
        finally:
            for arrival in arrivals:  # also after an error: nothing may still write to the targets
                arrival.wait()

    def bring_one(self) -> torch.Tensor:
        """Bring the only copy to host memory of its own, and wait until it is there."""
        (copy,) = self._copies
        found, arrival = copy.to_new_host()
        arrival.wait()
        return found

    def give_back(self) -> None:
        """Let go of the copies and their room."""
        self._copies = []
        self._room.give_back(self._size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()
