"""No batch is in flight at a checkpoint; a resumed run neither repeats nor skips a sample."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import holdfast as hf
from tests.conftest import TinyModel, fingerprint, make_optimizers

EVERY = 5


class Pairs(Dataset[torch.Tensor]):
    """Sample ``i`` is recognisable: its first id is ``i``."""

    def __len__(self) -> int:
        return 180

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, (7 * index) % 180])


def granted() -> Any:
    return hf.GrantedLoader(
        Pairs(), batch_size=6, shuffle=True, seed=5, batches=60, num_workers=2, prefetch=2
    )


def stateful() -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    # A DataLoader without a generator of its own draws from the global one each time it starts.
    own = torch.Generator().manual_seed(0)
    return torchdata.StatefulDataLoader(
        Pairs(), batch_size=6, num_workers=2, prefetch_factor=2, generator=own
    )


@contextlib.contextmanager
def reading(reader: Any) -> Iterator[Iterator[torch.Tensor]]:
    """The reader's batches; its workers end with the block.

    The garbage collector may close a loader's queues before it gets to the loader. Then no word
    to end reaches the workers, and torch waits 5 s for each.
    """
    batches = iter(reader)
    try:
        yield batches
    finally:
        if isinstance(reader, hf.GrantedLoader):
            reader.close()
        else:
            for _ in batches:  # a StatefulDataLoader has no close(): it ends with its last batch
                pass


def train(
    ck: hf.Checkpointer, model: nn.Module, optimizers: list[Any], batches: Iterable[torch.Tensor],
    *, steps: int,
) -> Iterator[list[int]]:  # fmt: skip
    """Train so many steps; yields the samples of each."""
    for _, ids in zip(range(steps), batches, strict=False):
        for optimizer in optimizers:
            optimizer.zero_grad()
        target = (ids.sum(1) % 2).float()
        nn.functional.binary_cross_entropy_with_logits(model(ids), target).backward()
        for optimizer in optimizers:
            optimizer.step()
        ck.step()
        yield ids[:, 0].tolist()


def build(seed: int) -> tuple[TinyModel, list[Any]]:
    torch.manual_seed(seed)
    model = TinyModel()
    return model, make_optimizers(model, "adagrad")


@pytest.mark.filterwarnings("ignore:.*set_vital.*")
@pytest.mark.parametrize("make_reader", [granted, stateful])
def test_resume_neither_repeats_nor_skips_with_prefetching_workers(
    tmp_path: Path, make_reader: Any
) -> None:
    steps = 28
    model, optimizers = build(1)
    reader = make_reader()
    with hf.Checkpointer(
        tmp_path / "whole", model=model, optimizer=optimizers, reader=reader, every=EVERY,
        codec="fp32",
    ) as ck, reading(reader) as batches:  # fmt: skip
        expected = list(train(ck, model, optimizers, batches, steps=steps))
    expected_model = fingerprint(model, optimizers)
    assert len({tuple(batch) for batch in expected}) == steps

    consumed: list[list[int]] = []
    for stop in (8, 19, steps):  # each run dies in mid-interval, with batches in flight
        model, optimizers = build(1)
        reader = make_reader()
        with hf.Checkpointer(
            tmp_path / "cut", model=model, optimizer=optimizers, reader=reader, every=EVERY,
            codec="fp32", save_last=False,
        ) as ck:  # fmt: skip
            start = ck.resume()
            assert start % EVERY == 0
            del consumed[start:]
            with reading(reader) as batches:
                consumed += train(ck, model, optimizers, batches, steps=stop - start)
                if isinstance(reader, hf.GrantedLoader):
                    assert reader.in_flight > 0 or stop == steps
    assert consumed == expected
    assert fingerprint(model, optimizers) == expected_model


def test_no_batch_is_in_flight_when_a_checkpoint_is_taken(tmp_path: Path) -> None:
    model, optimizers = build(1)
    reader = granted()
    at_checkpoint: list[int] = []

    class Watched:
        def __init__(self) -> None:
            self.grant = reader.grant

        def state_dict(self) -> dict[str, Any]:
            at_checkpoint.append(reader.in_flight)
            state: dict[str, Any] = reader.state_dict()
            return state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            reader.load_state_dict(state)

    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizers, reader=Watched(), every=EVERY
    ) as ck, reading(reader) as batches:  # fmt: skip
        between = [reader.in_flight for _ in train(ck, model, optimizers, batches, steps=25)]
    assert at_checkpoint == [0] * 5
    assert max(between) > 0


def test_manual_save_in_mid_interval_resumes_at_the_batch_after_it(tmp_path: Path) -> None:
    model, optimizers = build(1)
    reader = granted()
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizers, reader=reader, every=5
    ) as ck, reading(reader) as batches:  # fmt: skip
        seen = list(train(ck, model, optimizers, batches, steps=7))
        ck.save().result()
    reader = granted()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, reader=reader, every=5) as ck:
        assert ck.resume() == 7
        with reading(reader) as batches:
            seen += train(ck, model, optimizers, batches, steps=23)
    samples = [sample for batch in seen for sample in batch]
    assert sorted(samples) == list(range(180))
