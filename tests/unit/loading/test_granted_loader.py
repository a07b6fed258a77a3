"""A prefetching loader with grants neither repeats nor skips a sample, ever."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast.errors import InvalidRequestError
from holdfast.loading.granted_loader import GrantedLoader, shuffled
from holdfast.loading.stateful import GrantedReader, Reader

SAMPLES = 53


class Squares(Dataset[tuple[int, int]]):
    """Sample i is (i, i squared): a sample read under the wrong index shows."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index * index


class Endless(Dataset[int]):
    """Item i is a batch of its own, for any i; it has no length."""

    def __getitem__(self, index: int) -> int:
        return index


class Broken(Squares):
    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 9:
            raise RuntimeError("sample 9 cannot be read")
        return super().__getitem__(index)


def samples_of(batch: list[torch.Tensor]) -> list[int]:
    index, square = batch
    assert torch.equal(square, index * index)
    return [int(i) for i in index]


def make(**settings: Any) -> GrantedLoader:
    return GrantedLoader(Squares(), **{"batch_size": 4, "num_workers": 2, "seed": 11, **settings})


@pytest.fixture
def whole_order() -> Iterator[Any]:
    """The order without grants and workers: what every other way must reproduce."""

    def order(**settings: Any) -> list[int]:
        loader = make(**{**settings, "num_workers": 0})
        return [sample for batch in loader for sample in samples_of(batch)]

    yield order


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("interval", [3, 5, 14, 100])
def test_grants_do_not_change_the_order_and_leave_nothing_in_flight(
    whole_order: Any, shuffle: bool, interval: int
) -> None:
    expected = whole_order(shuffle=shuffle, batches=30)
    loader = make(shuffle=shuffle, batches=30)
    loader.grant(interval)
    consumed: list[int] = []
    was_ahead = False
    for number, batch in enumerate(loader, start=1):
        consumed += samples_of(batch)
        if number % interval == 0:
            assert loader.in_flight == 0
            loader.grant(interval)
        elif number < 30:
            was_ahead |= loader.in_flight > 0
    loader.close()
    assert consumed == expected
    assert was_ahead
    # 30 batches are two epochs (14 batches each, the last of one sample) and two batches more
    assert sorted(consumed[:SAMPLES]) == list(range(SAMPLES))
    assert sorted(consumed[SAMPLES : 2 * SAMPLES]) == list(range(SAMPLES))
    assert (consumed[:SAMPLES] != consumed[SAMPLES : 2 * SAMPLES]) is shuffle


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("stop_at", [1, 4, 6, 8, 13, 14, 15, 28, 29])
def test_a_resumed_loader_repeats_and_skips_nothing(
    whole_order: Any, shuffle: bool, stop_at: int
) -> None:
    """Interval ends (4, 8, 28), epoch ends (14, 28) and mid-interval, one short last interval."""
    expected = whole_order(shuffle=shuffle, batches=30)
    first = make(shuffle=shuffle, batches=30)
    first.grant(4)
    consumed: list[int] = []
    for number, batch in enumerate(first, start=1):
        consumed += samples_of(batch)
        if number % 4 == 0:
            first.grant(4)
        if number == stop_at:
            break
    state = json.loads(json.dumps(first.state_dict()))
    first.close()

    second = make(shuffle=shuffle, batches=30, num_workers=0)
    second.load_state_dict(state)
    second.grant(30 - stop_at)
    for batch in second:
        consumed += samples_of(batch)
    assert consumed == expected


def test_mid_interval_state_counts_what_was_handed_out_not_what_was_read() -> None:
    loader = make()
    loader.grant(10)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.in_flight > 0
    assert loader.state_dict()["batches"] == loader.position == 3
    loader.close()


def test_loading_a_state_forgets_what_is_in_flight() -> None:
    loader = make()
    state = loader.state_dict()
    begun = [samples_of(batch) for batch in itertools.islice(loader, 3)]
    assert loader.in_flight > 0
    loader.load_state_dict(state)
    assert loader.in_flight == 0
    again = [samples_of(batch) for batch in loader]
    loader.close()
    assert again[:3] == begun
    assert sorted(itertools.chain(*again)) == list(range(SAMPLES))


def test_leaving_the_loop_and_coming_back_goes_on() -> None:
    loader = make()
    begun = [samples_of(batch) for batch in itertools.islice(loader, 3)]
    rest = [samples_of(batch) for batch in loader]
    loader.close()
    assert list(itertools.chain(*begun, *rest)) == list(range(SAMPLES))


def test_without_a_total_an_iteration_is_an_epoch_in_a_new_order() -> None:
    loader = make(shuffle=True, num_workers=0)
    epochs = []
    for epoch in range(3):
        assert loader.epoch == epoch
        epochs.append([sample for batch in loader for sample in samples_of(batch)])
    assert all(sorted(epoch) == list(range(SAMPLES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len(loader) == 14


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_used_up_grant_says_to_call_step_and_can_be_renewed(num_workers: int) -> None:
    loader = make(num_workers=num_workers)
    loader.grant(2)
    batches = iter(loader)
    consumed = samples_of(next(batches)) + samples_of(next(batches))
    with pytest.raises(InvalidRequestError, match=r"ck\.step\(\) after every batch"):
        next(batches)
    loader.grant(None)
    consumed += [sample for batch in batches for sample in samples_of(batch)]
    loader.close()
    assert consumed == list(range(SAMPLES))


def test_a_grant_in_mid_interval_replaces_the_one_before() -> None:
    loader = make()
    loader.grant(6)
    batches = iter(loader)
    consumed = samples_of(next(batches))
    loader.grant(2)
    consumed += samples_of(next(batches)) + samples_of(next(batches))
    with pytest.raises(InvalidRequestError):
        next(batches)
    loader.grant(3)
    consumed += [sample for _ in range(3) for sample in samples_of(next(batches))]
    assert loader.in_flight == 0
    loader.close()
    assert consumed == list(range(24))


def test_a_dataset_of_batches_without_length_is_read_by_index() -> None:
    loader = GrantedLoader(Endless(), num_workers=2, start=7)
    loader.grant(5)
    assert list(itertools.islice(loader, 5)) == [7, 8, 9, 10, 11]
    assert loader.in_flight == 0
    loader.close()
    with pytest.raises(TypeError):
        len(loader)


def test_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    loader = make(num_workers=0)
    loader.grant(1)
    for _ in loader:
        loader.grant(1)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failing_sample_is_reported_and_counts_as_not_read(num_workers: int) -> None:
    loader = GrantedLoader(Broken(), batch_size=4, num_workers=num_workers)
    batches = iter(loader)
    assert samples_of(next(batches)) + samples_of(next(batches)) == list(range(8))
    with pytest.raises(RuntimeError, match="sample 9"):
        next(batches)
    assert loader.position == 2
    assert loader.in_flight == 0
    loader.close()


def test_spawned_workers_read_the_same(whole_order: Any) -> None:
    loader = make(shuffle=True, start_method="spawn", num_workers=1)
    consumed = [sample for batch in loader for sample in samples_of(batch)]
    loader.close()
    assert consumed == whole_order(shuffle=True)


def test_closing_stops_the_workers_while_an_error_of_theirs_is_held() -> None:
    before = set(multiprocessing.active_children())
    loader = GrantedLoader(Broken(), batch_size=10, num_workers=2)
    with pytest.raises(RuntimeError, match="sample 9") as error:
        next(iter(loader))
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    loader.close()
    assert not workers & set(multiprocessing.active_children())
    assert error.traceback  # it still holds torch's iterator


@pytest.mark.parametrize("is_in_a_cycle", [False, True])
def test_workers_of_a_forgotten_loader_end_by_themselves(
    monkeypatch: pytest.MonkeyPatch, is_in_a_cycle: bool
) -> None:
    killed = []

    def terminate(worker: BaseProcess) -> None:
        killed.append(worker)
        really_terminate(worker)

    really_terminate = BaseProcess.terminate
    monkeypatch.setattr(BaseProcess, "terminate", terminate)
    before = set(multiprocessing.active_children())
    loader = make()
    next(iter(loader))
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    if is_in_a_cycle:
        loader.itself = loader  # type: ignore[attr-defined]
    del loader
    gc.collect()
    assert not killed  # torch waits for those that do not end, and then kills them
    assert not workers & set(multiprocessing.active_children())


@pytest.mark.parametrize("size", [*range(1, 18), 64, 65, 1000])
def test_shuffling_is_a_bijection_computed_in_pieces(size: int) -> None:
    places = shuffled(np.arange(size), size=size, seed=2, epoch=1)
    assert sorted(places.tolist()) == list(range(size))
    piece = shuffled(np.arange(size // 2, size), size=size, seed=2, epoch=1)
    assert piece.tolist() == places[size // 2 :].tolist()


def test_shuffling_looks_random_and_differs_by_seed_and_epoch() -> None:
    size = 4096
    orders = [
        shuffled(np.arange(size), size=size, seed=seed, epoch=epoch)
        for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    for order in orders:
        assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.06
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.06
    assert (orders[0] == orders[1]).mean() < 0.01
    assert (orders[0] == orders[2]).mean() < 0.01


def test_the_loader_is_what_a_checkpointer_accepts() -> None:
    loader = make(num_workers=0)
    assert isinstance(loader, Reader)
    assert isinstance(loader, GrantedReader)


def test_refuses_what_it_cannot_keep() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(InvalidRequestError, match="index"):
        GrantedLoader(Stream())
    with pytest.raises(InvalidRequestError, match="shuffled"):
        GrantedLoader(Endless(), shuffle=True)
    with pytest.raises(InvalidRequestError, match="range"):
        make(batch_size=0)
    with pytest.raises(InvalidRequestError, match="at least one"):
        make(num_workers=0).grant(0)
    saved = make(num_workers=0).state_dict()
    for change in ({"seed": 1}, {"batch_size": 5}, {"shuffle": True}, {"batches": -1}):
        with pytest.raises(InvalidRequestError, match="another order"):
            make(num_workers=0).load_state_dict({**saved, **change})
    closed = make(num_workers=0)
    closed.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        iter(closed)
