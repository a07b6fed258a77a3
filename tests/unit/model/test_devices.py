"""Copies out of a device's memory: as of when they were made, and waited for by who reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.model import devices
from holdfast.model.devices import BlockingDevice, CudaDevice

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn,
          torch.complex64]  # fmt: skip


def test_host_memory_has_no_device_unless_it_is_registered() -> None:
    tensor = torch.zeros(3)
    assert devices.is_on_host(tensor) and devices.device_of(tensor) is None
    with devices.registered("cpu", BlockingDevice):
        assert not devices.is_on_host(tensor)
        found = devices.device_of(tensor)
        assert isinstance(found, BlockingDevice) and devices.device_of(tensor) is found
    assert devices.is_on_host(tensor) and devices.device_of(tensor) is None


def test_what_is_registered_is_taken_back_after_an_error() -> None:
    with pytest.raises(KeyError), devices.registered("cpu", BlockingDevice):
        raise KeyError
    assert devices.is_on_host(torch.zeros(1))


def test_devices_of_a_kind_that_is_not_known_are_waited_for() -> None:
    assert isinstance(devices.device_of(torch.zeros(3, device="meta")), BlockingDevice)


def test_a_tensor_on_the_host_is_not_copied() -> None:
    tensor = torch.arange(4.0)
    assert devices.to_host(tensor).data_ptr() == tensor.data_ptr()
    with devices.registered("cpu", BlockingDevice):
        copy = devices.to_host(tensor)
    assert copy.data_ptr() != tensor.data_ptr() and torch.equal(copy, tensor)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (0, 4)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_shape_arrive_as_they_were(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape).to(dtype)
    with devices.registered("cpu", BlockingDevice):
        found = devices.to_host(tensor)
        twice, arrival = devices.join([tensor, tensor]).to_new_host()
    arrival.wait()
    assert found.shape == tensor.shape
    for copy in (found, *twice.split([tensor.numel()] * 2)):
        assert copy.dtype == dtype
        assert copy.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_a_copy_is_not_what_is_written_later() -> None:
    column = torch.arange(20.0).view(10, 2)
    one = devices.join([column[2:4]])
    two = devices.join([column[:1], column.t()[1]])  # not contiguous
    some = devices.gather(column, np.array([1, 9]))
    column.zero_()
    found = [copy.to_new_host()[0].view(-1).tolist() for copy in (one, two, some)]
    assert found == [[4, 5, 6, 7], [0, 1, *range(1, 20, 2)], [2, 3, 18, 19]]


class FakeCuda:
    """Streams and events that write down what is asked of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events = 0

    def stream(self, name: str) -> Any:
        fake = self

        class Stream:
            def __repr__(self) -> str:
                return name

            def wait_event(self, event: object) -> None:
                fake.calls.append(f"{self} waits for {event}")

        return Stream()

    def event_type(self) -> type:
        fake = self

        class Event:
            def __init__(self, *, blocking: bool = False) -> None:
                fake.events += 1
                self.number, self.blocking = fake.events, blocking

            def __repr__(self) -> str:
                return f"event {self.number}"

            def record(self, stream: object) -> None:
                fake.calls.append(f"{stream} records {self}")

            def query(self) -> bool:
                return False

            def synchronize(self) -> None:
                fake.calls.append(f"the host waits for {self}, blocking={self.blocking}")

        return Event


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """The calls of torch.cuda that a device makes, on CPU tensors."""
    fake = FakeCuda()

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        fake.calls.append(f"on {stream}")
        yield
        fake.calls.append(f"off {stream}")

    def record_stream(tensor: torch.Tensor, stream: object) -> None:
        fake.calls.append(f"memory is used by {stream}")

    copy = torch.Tensor.copy_

    def copy_(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        fake.calls.append(f"copy, non_blocking={non_blocking}")
        return copy(into, source)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: fake.stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.stream("training"))
    monkeypatch.setattr(torch.cuda, "Event", fake.event_type())
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    return fake


def test_a_gpu_copies_on_a_side_stream_after_training_and_before_the_memory_is_given_out(
    cuda: FakeCuda,
) -> None:
    with devices.registered("cpu", CudaDevice):
        found, arrival = devices.join([torch.arange(3.0)]).to_new_host()
    assert not arrival.is_over()
    arrival.wait()
    assert found.tolist() == [0, 1, 2]
    assert cuda.calls == [
        "training records event 1",
        "on side",
        "side waits for event 1",
        "copy, non_blocking=True",
        "side records event 2",
        "off side",
        "memory is used by side",
        "the host waits for event 2, blocking=True",
    ]


def test_rows_are_gathered_on_the_gpu(cuda: FakeCuda) -> None:
    column = torch.arange(8.0).view(4, 2)
    with devices.registered("cpu", CudaDevice):
        copy = devices.gather(column, np.array([3, 0]))
        column.zero_()
        found, arrival = copy.to_new_host()
    arrival.wait()
    assert found.tolist() == [[6, 7], [0, 1]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory can be pinned on this machine")
def test_memory_is_ordinary_where_it_cannot_be_pinned(cuda: FakeCuda) -> None:
    memory = CudaDevice(CPU).host_memory(100)
    assert memory.nbytes == 100 and memory.dtype == torch.uint8


def test_half_of_the_free_memory_of_a_gpu_counts_what_torch_keeps(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert CudaDevice(CPU).free_bytes() == 1200
