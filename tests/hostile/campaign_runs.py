"""The runs that the campaign attacks: small, good, and together with every kind of state there is.

Each is made by real training through the public API, or is one of the golden stores. They live in
memory as bytes, made the same in every process: names are numbered, clocks stand still.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn

import holdfast as hf
from holdfast.checkpoint.format import tree
from holdfast.checkpoint.format.catalog import Catalog, RestoreTiming
from holdfast.checkpoint.planning import bases
from tests.hostile.campaign_storage import MemoryStorage
from tests.hostile.mutators.dense_trees import read_dense
from tests.hostile.mutators.stored_run import StoredRun, lay_out, take_apart

GOLDEN = Path(__file__).parent.parent / "golden"
TIME = 1.7e9


@dataclass(frozen=True, slots=True)
class Live:
    """A model with its optimizers and what goes along, as a Checkpointer takes them."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    extras: dict[str, Any]
    reader: Any = None


@dataclass(frozen=True, slots=True)
class Prey:
    """A good run. ``make`` builds the model it is of; None: a golden store, which nothing can
    resume, and whose dense state is not all that an optimizer needs."""

    name: str
    files: dict[str, bytes]
    run: StoredRun
    make: Callable[[], Live] | None
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the Checkpointer that made it."""
    weight: float = 1.0
    """How often it is attacked, among the others."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(map(len, self.files.values()))


class Small(nn.Module):
    """Two tables and a small network."""

    def __init__(self, rows: Sequence[int], widths: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.users = nn.Embedding(rows[0], widths[0], sparse=True, dtype=dtype)
        self.items = nn.EmbeddingBag(rows[1], widths[1], mode="sum", sparse=True)
        self.norm = nn.BatchNorm1d(sum(widths))
        self.top = nn.Linear(sum(widths), 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores for pairs of ids."""
        users = self.users(ids[:, 0] % self.users.num_embeddings).float()
        items = self.items(ids % self.items.num_embeddings)
        found: torch.Tensor = self.top(self.norm(torch.cat([users, items], 1))).squeeze(1)
        return found


def make_small(
    rows: Sequence[int] = (48, 30),
    widths: Sequence[int] = (4, 3),
    dtype: torch.dtype = torch.float32,
    tables: str = "adagrad",
    has_extras: bool = False,
) -> Live:
    """A model of ``Small`` and its optimizers, the same every time."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    model = Small(rows, widths, dtype)
    weights = [model.users.weight, model.items.weight]
    dense = [*model.norm.parameters(), *model.top.parameters()]
    optimizers: list[torch.optim.Optimizer] = {
        "adagrad": lambda: [torch.optim.Adagrad(weights, lr=0.1)],
        "adam": lambda: [torch.optim.SparseAdam(weights, lr=0.01)],
        "sgd": lambda: [torch.optim.SGD(weights, lr=0.1)],
    }[tables]()
    optimizers.append(torch.optim.SGD(dense, lr=0.05, momentum=0.9))
    extras = {}
    if has_extras:
        extras["lr"] = torch.optim.lr_scheduler.StepLR(optimizers[-1], 3)
    return Live(model, optimizers, extras)


def watch(live: Live, storage: MemoryStorage, **settings: Any) -> hf.Checkpointer:
    """A Checkpointer of a model, whatever the machine and the time of day."""
    return hf.Checkpointer(
        storage, model=live.model, optimizer=live.optimizers or None, extras=live.extras,
        reader=live.reader, threads=1, preempt_signals=(), clock=lambda: TIME, **settings,
    )  # fmt: skip


def train(live: Live, ids: torch.Tensor) -> None:
    """One step on a batch of pairs of ids."""
    for optimizer in live.optimizers:
        optimizer.zero_grad()
    live.model(ids).square().mean().backward()
    for optimizer in live.optimizers:
        optimizer.step()


class Life:
    """A run's life: train, save, go back; every save is durable and worked off before the next."""

    def __init__(self, make: Callable[[], Live], **settings: Any) -> None:
        self._make = make
        self._settings = settings
        self.storage = MemoryStorage()
        self._draw = torch.Generator().manual_seed(11)
        self.open()

    def open(self) -> None:
        """A new process."""
        self.live = self._make()
        self.ck = watch(self.live, self.storage, **self._settings)
        self.ck.resume()

    def save(self, *, steps: int = 1, rows: int = 6) -> None:
        """Train some steps, then save."""
        for _ in range(steps):
            train(self.live, torch.randint(0, 10**6, (rows, 2), generator=self._draw))
            self.ck.step()
        self._pin()
        self.ck.save().result()
        self.ck.wait()

    def _pin(self) -> None:
        """What bases and rollups are decided by depends on bytes alone."""

        def pinned(catalog: Catalog) -> Catalog:
            growth = tuple(dataclasses.replace(item, build_s=1e9) for item in catalog.growth)
            slow = (RestoreTiming(1, 1.0, 1, 1.0),) if catalog.restore_timings else ()
            return dataclasses.replace(catalog, growth=growth, restore_timings=slow)

        self.ck._writer.note(pinned)

    def back(self, step: int) -> None:
        """Go back to a step and on from there."""
        self.ck.restore(step, discard_later=True)

    def crash(self) -> None:
        """End, and resume in another process."""
        self.ck.close()
        self.open()

    def end(self) -> dict[str, bytes]:
        """The run's bytes."""
        self.ck.close()
        return self.storage.files


def _plain(make: Callable[[], Live], saves: int = 3, **settings: Any) -> dict[str, bytes]:
    life = Life(make, **settings)
    for _ in range(saves):
        life.save(steps=2)
    return life.end()


def _gridded(make: Callable[[], Live], strategy: hf.Strategy) -> dict[str, bytes]:
    """Increments, rollups, going back, rounds of extraction in between."""
    with mock.patch.multiple(bases, ROLLUP_PAYS_AT=1e-9, ROLLUP_SHARE_MAX=2.0):
        life = Life(make, strategy=strategy)
        for rows in (8, 3, 5, 2, 6):
            life.save(rows=rows)
        life.back(4)
        for rows in (4, 9):
            life.save(rows=rows)
        life.crash()
        life.save(rows=3)
        return life.end()


def _two_bases(make: Callable[[], Live], **settings: Any) -> dict[str, bytes]:
    life = Life(make, strategy=hf.Strategy("mine", base="one-shot", codec=None), **settings)
    life.save(steps=2)
    life.save()
    files = life.end()
    life = Life(make, strategy="full", **settings)
    life.storage.files.update(files)
    life.crash()
    life.save()
    life._settings["strategy"] = hf.Strategy("mine", base="consecutive", codec=None)
    life.crash()
    life.save()
    return life.end()


def _golden(name: str) -> dict[str, bytes]:
    return read_folder(GOLDEN / name)


def read_folder(root: Path) -> dict[str, bytes]:
    """The files of a run in a folder."""
    found = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def _ranks(make: Callable[[], Live]) -> dict[str, bytes]:
    """What two ranks saved of a table cut by columns: a golden store, its dense state complete."""
    run = take_apart(_golden("format3"))
    text = json.dumps(run.body)
    for name in ("users", "items"):
        text = text.replace(f'"{name}"', f'"{name}.weight"').replace(
            f'"{name}[', f'"{name}.weight['
        )
    run.body = json.loads(text)
    cuts = [table[0] for table in run.body["schemas"][0] if len(table) > 3]
    dense = {part.key: part for _, part in run.parts("dense") if part.label == "dense"}
    model = make().model.state_dict()
    state = {
        "model": {name: value for name, value in model.items() if name.startswith("top")},
        "optimizers": None, "parameters": {}, "aliases": {}, "table_state": {},
        "row_state_shapes": {**{cut: {"sum": [12, 1]} for cut in cuts}, "items.weight": {}},
        "rng": {}, "extras": {"reader": {"at": 0}}, "pls": None,
    }  # fmt: skip
    for part in dense.values():
        part.data = tree.to_bytes(*tree.flatten(state))
    return lay_out(run).files()


class Cut(nn.Module):
    """The tables of the golden store of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(12, 6, sparse=True)
        self.items = nn.Embedding(9, 6, sparse=True)
        self.top = nn.Linear(6, 1)


class _Reader:
    """Takes the states of other numbers of ranks."""

    def state_dict(self) -> dict[str, int]:
        """Nothing of interest."""
        return {"at": 0}

    def load_state_dict(self, state: Any) -> None:
        """Keep nothing."""

    def load_rank_states(self, states: Any) -> None:
        """Keep nothing."""


def make_cut() -> Live:
    """The model of the store of two ranks; it has no optimizer."""
    torch.manual_seed(5)
    return Live(Cut(), [], {}, _Reader())


def _imported(make: Callable[[], Live]) -> dict[str, bytes]:
    """A run that began as a file of torch.save: nothing is known of random state and extras."""
    live = make()
    train(live, torch.arange(12).view(6, 2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.pt"
        optimizers = [optimizer.state_dict() for optimizer in live.optimizers]
        torch.save({"model": live.model.state_dict(), "optimizers": optimizers, "step": 3}, path)
        hf.import_checkpoint(
            path, Path(folder) / "run", model=live.model, optimizer=live.optimizers
        )
        life = Life(make)
        life.ck.close()
        life.storage.files = read_folder(Path(folder) / "run")
        life.open()
        life.save()
        return life.end()


class _Names:
    """Names in a row instead of random ones."""

    def __init__(self) -> None:
        self._next = itertools.count(1)

    def token_hex(self, size: int) -> str:
        """The next name."""
        return f"{next(self._next):0{2 * size}x}"


@contextlib.contextmanager
def _same_every_time() -> Iterator[None]:
    with mock.patch("holdfast.checkpoint.store.writer.secrets", _Names()):
        yield


def _settled(files: dict[str, bytes], *, has_rng: bool = True) -> dict[str, bytes]:
    """Only what the newest catalog names, and what was measured made the same every time.

    Random state is most of what small models store: most runs go without it.
    """
    run = take_apart(files)
    run.others = {}
    for _, part in run.parts("dense") if not has_rng else ():
        dense = read_dense(part.data)
        named = {pair[0]: pair for pair in dense.tree["d"]}
        named["rng"][1] = None
        part.data = dense.without_unused().write()
    for entry in run.body["checkpoints"]:
        if isinstance(entry, list):
            entry[12] = entry[14] = 0.25  # stall_s, build_s
    run.body["growth"] = [[*item[:2], 0.25][: len(item)] for item in run.body["growth"]]
    if "recoveries" in run.body:
        run.body["recoveries"] = [[1, 0.25, 1, 0.25] for _ in run.body["recoveries"]]
    return lay_out(run).files()


def _grid(threshold: float, *, rollups: bool) -> hf.Strategy:
    return hf.Strategy(
        "mine", base="consecutive", codec="fp32", extract=hf.Extract(threshold), rollups=rollups
    )


@dataclass(frozen=True, slots=True)
class Story:
    """How a run came to be: of which model, by which life, with which settings."""

    make: Callable[[], Live] = make_small
    live: Callable[..., dict[str, bytes]] = _plain
    settings: dict[str, Any] = field(default_factory=dict)


_BOOKS = hf.Codec("kmeans-block", 2, block_rows=8, iterations=4)
STORIES = {
    "plain": Story(),
    "bases": Story(lambda: make_small(tables="adam", has_extras=True), _two_bases),
    "half": Story(lambda: make_small(dtype=torch.float16, tables="sgd")),
    "brain": Story(lambda: make_small(dtype=torch.bfloat16)),
    "wide": Story(lambda: make_small(dtype=torch.float64)),
    "adaptive": Story(settings={"codec": "adaptive4"}),
    "coded": Story(settings={"codec": "asym2", "state_codec": "fp16"}),
    "books": Story(settings={"codec": _BOOKS, "state_codec": "log4"}),
    "pure": Story(live=_gridded, settings={"strategy": _grid(0.0, rollups=False)}),
    "masked": Story(live=_gridded, settings={"strategy": _grid(1.0, rollups=False)}),
    "mixed": Story(live=_gridded, settings={"strategy": _grid(0.3, rollups=False)}),
    "rollups": Story(live=_gridded, settings={"strategy": _grid(0.2, rollups=True)}),
    "incrcp": Story(live=_gridded, settings={"strategy": _grid(1.0, rollups=True)}),
    "servers": Story(settings={"servers": hf.Placement(3)}),
    "coded servers": Story(settings={"servers": hf.Placement(5, data=3, parity=1)}),
    "long": Story(lambda: make_small(rows=(900, 60), widths=(8, 2), tables="sgd")),
    "ranks": Story(make_cut, _ranks),
    "imported": Story(live=_imported),
}
WITH_RNG = ("plain", "masked", "half")
GOLDENS = ("format1", "format2", "format3", "format4", "format5", "compiled", "dense_bf16/run")


def make_prey(names: Sequence[str] | None = None) -> list[Prey]:
    """All the runs, or those of some names."""
    found = []
    for name, story in STORIES.items():
        if names is None or name in names:
            with _same_every_time():
                made = story.live(story.make, **story.settings)
            files = _settled(made, has_rng=name in WITH_RNG)
            found.append(Prey(name, files, take_apart(files), story.make, story.settings))
    for name in GOLDENS:
        if names is None or name in names:
            files = _settled(_golden(name))
            found.append(Prey(name, files, take_apart(files), None, weight=0.5))
    return found
