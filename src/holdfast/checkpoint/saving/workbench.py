"""The workbench of a process that saves: memory and threads, kept from save to save.

    snapshot: copiers fill buffers of the pool -> save: encoders empty them
    tables on a GPU: copied there (DeviceRoom) -> the fetcher fills buffers of the pool -> encoders

Copying and encoding have threads of their own: a snapshot, for which training stands still, never
waits for a thread that encodes. There is one fetcher, so that buffers are acquired in the order in
which parts are stored: a part can never wait for a buffer that a later part holds.

Not here: how much memory that may be (staging.py), what is done with it (snapshot.py, save.py).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Self

from holdfast.checkpoint.saving.device_staging import DeviceRoom
from holdfast.checkpoint.saving.staging import StagingPool
from holdfast.model.devices import Device


class Workbench:
    """What snapshots are copied with and saves are encoded with."""

    def __init__(self, *, bytes_max: int, threads: int) -> None:
        self.pool = StagingPool(bytes_max)
        self.copiers = ThreadPoolExecutor(threads, "holdfast-copy")
        self.encoders = ThreadPoolExecutor(threads, "holdfast-encode")
        self.fetcher = ThreadPoolExecutor(1, "holdfast-fetch")
        self._rooms: dict[Device, DeviceRoom] = {}
        # One part more than can be encoded at a time: none of the threads waits for storage.
        self.parts_max = threads + 1

    def measure(self) -> None:
        """A snapshot begins: see how much memory its copies may take on devices."""
        for room in self._rooms.values():
            room.measure()

    def room(self, device: Device) -> DeviceRoom:
        """The memory for copies on a device."""
        if device not in self._rooms:
            self._rooms[device] = DeviceRoom(device)
        return self._rooms[device]

    def close(self) -> None:
        """End the threads, once they have nothing more to do."""
        self.copiers.shutdown()
        self.fetcher.shutdown()
        self.encoders.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
