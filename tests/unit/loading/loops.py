"""Training loops as users write them, over a reader alone: fast enough to be stopped at every step.

Every step draws from the three global generators, as dropout does, and so does reading. A run
records what it drew together with its batches.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from tqdm import tqdm

from holdfast.loading.generators import load_rng_state, rng_state
from holdfast.loading.resumable_reader import ResumableReader
from tests.unit.loading.readerjob import BATCH, EPOCHS, SAMPLES, Plain, Samples, Stopped, read_ahead
from tests.unit.loading.readerjob import make_loader as make_common

Loop = Callable[["Training"], None]


class Growing:
    """A batch sampler whose batches grow, so that later epochs have fewer."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by ``epochs``."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-SAMPLES // (4 + self.epoch))

    def __iter__(self) -> Iterator[list[int]]:
        order, size = torch.randperm(SAMPLES).tolist(), 4 + self.epoch
        return iter([order[start : start + size] for start in range(0, SAMPLES, size)])


class Buckets(Sampler[list[int]]):
    """A batch sampler that draws each batch from a generator of its own."""

    def __init__(self) -> None:
        self.draw = np.random.default_rng(4)

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        for index in range(10):
            yield self.draw.integers(0, SAMPLES, size=1 + index % 3).tolist()


class Uneven:
    """An iterable without a length, of which every epoch is as long as a generator says."""

    def __init__(self) -> None:
        self.draw = random.Random(3)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.draw.randrange(6, 12)):
            yield torch.tensor([float(index), self.draw.random()])


NOISE = np.random.default_rng(7)  # of the module, as many programs have one


class Naming(Samples):
    """Draws from a generator that it has only by name."""

    def __init__(self) -> None:
        NOISE.bit_generator.state = np.random.default_rng(7).bit_generator.state

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + NOISE.random()


def make_collate() -> Callable[..., torch.Tensor]:
    """A function that draws from a generator in its closure, and from one among its arguments."""
    noise = np.random.default_rng(8)

    def collate(rows: list[torch.Tensor], *, draw: random.Random) -> torch.Tensor:
        return torch.stack(rows) + noise.random() + draw.random()

    return functools.partial(collate, draw=random.Random(9))


class Pairs:
    """Two loaders side by side; it reads one batch of the first too many at its end."""

    def __init__(self) -> None:
        own = torch.Generator().manual_seed(8)
        self.left: Any = DataLoader(Samples(), batch_size=BATCH, shuffle=True)
        self.right: Any = DataLoader(Samples(), batch_size=5, shuffle=True, generator=own)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.cat([*pair]) for pair in zip(self.left, self.right, strict=False))


def make_loader(kind: str) -> Any:
    """A loader by name."""
    samples: Any = Samples()
    weights = torch.arange(1.0, SAMPLES + 1).tolist()
    made: dict[str, Callable[[], Any]] = {
        "ragged": lambda: DataLoader(samples, batch_size=7, shuffle=True),
        "drop-last": lambda: DataLoader(samples, batch_size=7, shuffle=True, drop_last=True),
        "weighted": lambda: DataLoader(
            samples, batch_size=BATCH, sampler=WeightedRandomSampler(weights, SAMPLES)
        ),
        "replacement": lambda: DataLoader(
            samples, batch_size=BATCH, sampler=RandomSampler(samples, True, 20)
        ),
        "growing": lambda: DataLoader(samples, batch_sampler=Growing()),
        "buckets": lambda: DataLoader(samples, batch_sampler=Buckets()),
        "naming": lambda: DataLoader(Naming(), batch_size=BATCH, shuffle=True),
        "collating": lambda: DataLoader(samples, batch_size=BATCH, collate_fn=make_collate()),
        "distributed": lambda: DataLoader(
            samples, batch_size=BATCH, sampler=DistributedSampler(samples, 1, 0)
        ),
        "unbatched": lambda: DataLoader(
            samples, batch_size=None, sampler=RandomSampler(samples, num_samples=9)
        ),
        "uneven": Uneven,
        "pairs": Pairs,
        "stateful-ragged": lambda: StatefulDataLoader(samples, batch_size=7, shuffle=True),
    }
    return made[kind]() if kind in made else make_common(kind)


class Training:
    """One process's part of a run, with everything made anew."""

    def __init__(self, kind: str, *, stop: int | None, saved: Any, seed: int, way: str) -> None:
        for draw in (torch.manual_seed, random.seed, np.random.seed):
            draw(seed)
        self.loader = make_loader(kind)
        self.reader = ResumableReader(self.loader, skips_trained=way == "skips")
        if way != "epochs":
            self.reader.intercept()
        self.seen: list[Any] = []
        self.saved: Any = None
        self.steps = 0
        self._stop = stop
        if saved is not None:
            state, self.steps, rng = saved
            self.reader.load_state_dict(state)
            load_rng_state(rng)

    def epochs(self) -> Iterator[Any]:
        """All epochs."""
        return self.reader.epochs(EPOCHS)

    def forward(self, batch: torch.Tensor) -> None:
        """Use a batch, and draw."""
        assert len(self.seen) < 100, "the loop does not end"
        dropped = (torch.rand(()).item(), random.random(), float(np.random.rand()))
        self.seen.append((self.reader.epoch, batch.flatten().tolist(), dropped))

    def step(self) -> None:
        """A step is trained."""
        self.reader.trained()
        self.steps += 1
        if self.steps == self._stop:
            self.saved = (self.reader.state_dict(), self.steps, rng_state())
            raise Stopped

    def train(self, batch: torch.Tensor) -> None:
        """A step of one batch."""
        self.forward(batch)
        self.step()


def plain(run: Training) -> None:
    """As the README has it."""
    for batch in run.epochs():
        run.train(batch)


def ahead(depth: int) -> Loop:
    """Behind a generator that reads ahead."""

    def loop(run: Training) -> None:
        for batch in read_ahead(depth)(run.epochs()):
            run.train(batch)

    return loop


def double_buffer(run: Training) -> None:
    """The loop itself draws the next batch before it trains this one."""
    batches = run.epochs()
    upcoming = next(batches, None)
    while upcoming is not None:
        batch, upcoming = upcoming, next(batches, None)
        run.train(batch)


def accumulate(run: Training) -> None:
    """Three batches a step; what is left of an epoch goes into the next one's first step."""
    for number, batch in enumerate(run.epochs()):
        run.forward(batch)
        if number % 3 == 2:
            run.step()


def skip_bad(run: Training) -> None:
    """Some batches are not trained."""
    for batch in run.epochs():
        if int(batch.flatten()[0]) % 3:
            run.train(batch)


def skip_first(run: Training) -> None:
    """The very first batch is not trained."""
    for number, batch in enumerate(run.epochs()):
        if not run.steps and not number:
            continue
        run.train(batch)


def skip_errors(run: Training) -> None:
    """The loop's body fails on some batches, and the loop goes on."""
    for batch in run.epochs():
        try:
            if int(batch.flatten()[0]) % 5 == 1:
                raise ValueError
            run.forward(batch)
        except ValueError:
            continue
        run.step()


def progress_bar(run: Training) -> None:
    """Behind a progress bar, skipping batches."""
    with Path("/dev/null").open("w") as nowhere:
        for batch in tqdm(run.epochs(), file=nowhere):
            if int(batch.flatten()[0]) % 3:
                run.train(batch)


def evaluate_other(run: Training) -> None:
    """Evaluates on another loader, which draws, now and then."""
    other: Any = DataLoader(Plain(), batch_size=10, shuffle=True)
    for batch in run.epochs():
        run.forward(batch)
        if run.steps % 3 == 0:
            list(other)
        run.step()


def followed(run: Training) -> None:
    """Over the loader itself."""
    for _ in range(run.reader.epoch, EPOCHS):
        for batch in run.loader:
            run.train(batch)


def followed_by_next(run: Training) -> None:
    """The same with ``next``."""
    for _ in range(run.reader.epoch, EPOCHS):
        batches = iter(run.loader)
        while (batch := next(batches, None)) is not None:
            run.train(batch)


def followed_ahead(run: Training) -> None:
    """Reads ahead, and stops to at each epoch's end."""
    for _ in range(run.reader.epoch, EPOCHS):
        for batch in read_ahead(2)(run.loader):
            run.train(batch)


def followed_accumulating(run: Training) -> None:
    """What is left at an epoch's end goes into the next one's first step."""
    for _ in range(run.reader.epoch, EPOCHS):
        for number, batch in enumerate(run.loader):
            run.forward(batch)
            if number % 3 == 2:
                run.step()


def followed_evaluating(run: Training) -> None:
    """Evaluates on the training loader after each epoch."""
    for _ in range(run.reader.epoch, EPOCHS):
        for batch in run.loader:
            run.train(batch)
        for _ in run.loader:
            pass


def followed_evaluating_within(run: Training) -> None:
    """Evaluates on the training loader in mid-epoch, between forward and step."""
    for _ in range(run.reader.epoch, EPOCHS):
        for batch in run.loader:
            run.forward(batch)
            if run.steps % 4 == 2:
                list(run.loader)
            run.step()


def followed_peeking(run: Training) -> None:
    """Looks at a batch in mid-epoch."""
    for _ in range(run.reader.epoch, EPOCHS):
        for batch in run.loader:
            run.forward(batch)
            if run.steps % 4 == 2:
                next(iter(run.loader))
            run.step()


def followed_setting_epochs(run: Training) -> None:
    """Tells the sampler its epoch."""
    for epoch in range(run.reader.epoch, EPOCHS):
        if isinstance(run.loader.sampler, DistributedSampler):
            run.loader.sampler.set_epoch(epoch)
        for batch in run.loader:
            run.train(batch)


def from_the_first(run: Training) -> None:
    """Always begins at its first epoch."""
    for _ in range(EPOCHS):
        for batch in run.loader:
            run.train(batch)


LOOPS: dict[str, tuple[Loop, str]] = {
    "plain": (plain, "epochs"),
    "ahead-1": (ahead(1), "epochs"),
    "ahead-2": (ahead(2), "epochs"),
    "ahead-3": (ahead(3), "epochs"),
    "double-buffer": (double_buffer, "epochs"),
    "accumulate": (accumulate, "epochs"),
    "skip-bad": (skip_bad, "epochs"),
    "skip-first": (skip_first, "epochs"),
    "skip-errors": (skip_errors, "epochs"),
    "progress-bar": (progress_bar, "epochs"),
    "evaluate-other": (evaluate_other, "epochs"),
    "followed": (followed, "follows"),
    "followed-by-next": (followed_by_next, "follows"),
    "followed-ahead": (followed_ahead, "follows"),
    "followed-accumulating": (followed_accumulating, "follows"),
    "followed-evaluating": (followed_evaluating, "follows"),
    "followed-evaluating-within": (followed_evaluating_within, "follows"),
    "followed-peeking": (followed_peeking, "follows"),
    "followed-setting-epochs": (followed_setting_epochs, "follows"),
    "from-the-first": (from_the_first, "skips"),
}
