"""Tests of this folder run twice: on CPU tensors that pretend to be on a device, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.pretend import SMALL_BUFFER, PretendDevice, pretending

NO_GPU = "there is no GPU on this machine: this was not run on one"
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)),
]


@pytest.fixture(params=DEVICES)
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a model is: on CPU tensors that pretend, or on a GPU."""
    where: str = request.param
    if where == "cuda":
        yield where
        return
    with pretending(PretendDevice(is_prompt=False)):
        yield where


@pytest.fixture
def device() -> Iterator[PretendDevice]:
    """CPU tensors pretend to be on this device."""
    with pretending() as pretended:
        yield pretended


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> int:
    """Buffers so small that tables of tests take many."""
    for module in ("staging", "snapshot", "device_staging"):
        monkeypatch.setattr(f"holdfast.checkpoint.saving.{module}.BUFFER_BYTES", SMALL_BUFFER)
    return SMALL_BUFFER
