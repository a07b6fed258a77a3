"""Objects of a class are found, and other threads do not notice."""

from __future__ import annotations

import threading

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from holdfast.loading.unfollowed import has_running_loader, instances_of


class Mine(StepLR):
    """A class derived from one that is derived."""


def test_objects_are_found_by_their_class_and_what_derives_from_it() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    mine, plateau = Mine(optimizer, 3), ReduceLROnPlateau(optimizer)
    found = instances_of(LRScheduler, ReduceLROnPlateau)
    assert any(item is mine for item in found) and any(item is plateau for item in found)
    assert not any(item is plateau for item in instances_of(StepLR))
    iterator = iter(DataLoader([1, 2, 3]))  # type: ignore[arg-type]
    assert any(item is iterator for item in instances_of(_BaseDataLoaderIter))
    assert not any(item is iterator for item in instances_of(Mine))


def test_tuples_of_other_threads_are_left_alone() -> None:
    failed: list[BaseException] = []
    is_over = threading.Event()

    def build() -> None:
        while not is_over.is_set():
            try:
                tuple(number for number in range(2000))
            except SystemError as error:  # bad argument to internal function
                failed.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        for _ in range(50):
            has_running_loader(None)
    finally:
        is_over.set()
        thread.join()
    assert failed == []
