"""Small real models and training loops that the tests share."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import is_hypothesis_test, settings
from torch import nn

from holdfast.model.model_state import ModelState
from tests.s3servers import Moto, Rclone, Server

settings.register_profile("holdfast", deadline=None)  # no test is about how long it takes
settings.load_profile("holdfast")
EXAMPLES = int(os.environ.get("HOLDFAST_EXAMPLES", "1"))  # times as many as a test asks for

# Tests that draw their own input begin with this seed, and print it when they fail. Where more
# examples are asked for, every run draws others.
_DRAWN = random.SystemRandom().randrange(2**32) if EXAMPLES > 1 else 20261118
SEED = int(os.environ.get("HOLDFAST_HOSTILE_SEED", _DRAWN))

# One thread for torch, in every process that tests start: they share the cores already, and threads
# that wait for each other inside tiny operations took a third of the suite's processor time.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# A runner in the background ignores Ctrl-C, and so would every process that tests start; one
# started from a terminal does not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


TESTS = Path(__file__).parent

# What begins first where several processes share the work. Kernels: each is compiled by the one
# process that tests it, and all others, servers included, load it from the cache. Then whatever
# takes long, longest first, so that no process is left alone with it at the end.
ORDER = ("unit/kernels", "benchmarks", "torchrec", "ranks", "cluster", "unit/cli", "unit/recsys",
         "clients", "gpu", "loops", "crash", "hostile", "unit/cluster", "model",
         "unit/checkpoint")  # fmt: skip
# Folders that stay together: one run of all sections, or one pool of processes, serves their tests.
WHOLE = ("benchmarks", "ranks", "torchrec")
# Whose tests may each run in another process: they take long, and share nothing.
SPREAD = ("cluster", "crash", "hostile/test_bit_flips.py", "hostile/test_campaign.py",
          "unit/cli/test_cluster.py", "unit/cli/test_demo.py", "unit/recsys", "clients",
          "gpu/test_loops.py", "loops")  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests stay together, and what begins, where several processes share the work.

    Tests of a file stay together, but for those that take long; of some folders all do. A file that
    needs more says so itself by an xdist_group: one process at a time has a Ray.
    """
    items.sort(key=lambda item: order_of(item.path))
    for item in items:
        is_spread = any(is_in(item.path, place) for place in SPREAD)
        if not is_spread and item.get_closest_marker("xdist_group") is None:
            folder = next((place for place in WHOLE if is_in(item.path, place)), None)
            together = folder or str(item.path)
            item.add_marker(pytest.mark.xdist_group(together))
    if EXAMPLES > 1:
        enlarge(items)


def enlarge(items: list[pytest.Item]) -> None:
    """More examples for every property and state machine, and others each time."""
    done = set()
    for item in items:
        if not isinstance(item, pytest.Function) or not is_hypothesis_test(item.obj):
            continue
        # A state machine's settings are its test case's; a property's stay with its function.
        function = getattr(item.obj, "__func__", item.obj)
        is_machine = hasattr(item.cls, "settings")
        found = item.cls if is_machine else function
        name = "settings" if is_machine else "_hypothesis_internal_use_settings"
        if found in done:
            continue
        done.add(found)
        asked = getattr(found, name, None) or settings.default
        more = settings(
            asked, max_examples=EXAMPLES * asked.max_examples, derandomize=False, print_blob=True
        )
        setattr(found, name, more)


def order_of(path: Path) -> int:
    """The place of a file's tests among all."""
    return next((n for n, place in enumerate(ORDER) if is_in(path, place)), len(ORDER))


def is_in(path: Path, place: str) -> bool:
    """Whether a file is this one, or in this folder."""
    return path.is_relative_to(TESTS / place)


class TinyModel(nn.Module):
    """Two tables of different width and a small network: every kind of state, a few kilobytes."""

    def __init__(self, *, rows: int = 200, sparse: bool = True) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(rows, 8, mode="sum", sparse=sparse)
        self.items = nn.Embedding(rows // 2 + 1, 5, sparse=sparse)
        self.norm = nn.BatchNorm1d(13)
        self.top = nn.Sequential(nn.Linear(13, 7), nn.Dropout(0.3), nn.ReLU(), nn.Linear(7, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Scores for a batch of id pairs."""
        users = self.users(ids)
        items = self.items(ids[:, 0] % self.items.num_embeddings)
        scores: torch.Tensor = self.top(self.norm(torch.cat([users, items], 1))).squeeze(1)
        return scores


def make_optimizers(model: TinyModel, kind: str) -> list[torch.optim.Optimizer]:
    """An optimizer of the given kind for the tables, SGD with momentum for the rest."""
    tables = [model.users.weight, model.items.weight]
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(tables, lr=0.1),
        "momentum": lambda: torch.optim.SGD(tables, lr=0.1, momentum=0.9),
        "adagrad": lambda: torch.optim.Adagrad(tables, lr=0.1),
        "sparse-adam": lambda: torch.optim.SparseAdam(tables, lr=0.01),
        "adam": lambda: torch.optim.Adam(tables, lr=0.01),
        "sgd-decay": lambda: torch.optim.SGD(tables, lr=0.1, weight_decay=0.01),
    }
    dense = [*model.norm.parameters(), *model.top.parameters()]
    return [made[kind](), torch.optim.SGD(dense, lr=0.05, momentum=0.9)]


def train_steps(
    model: TinyModel,
    optimizers: list[torch.optim.Optimizer],
    steps: range,
    *,
    rows: int = 200,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Train on batches that depend on the step alone (dropout draws from the global generator)."""
    model.train()
    for step in steps:
        draw = torch.Generator().manual_seed(1000 + step)
        ids = torch.randint(0, rows, (6, 2), generator=draw)
        target = (ids.sum(1) % 2).float()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), target)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        after()


def fingerprint(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, bytes]:
    """Every number of a model and its optimizers, as bytes by name."""
    state = ModelState(model, optimizers)
    found: dict[str, bytes] = {}
    for name, value in model.state_dict().items():
        found[f"model.{name}"] = value.detach().cpu().numpy().tobytes()
    for key, optimizer in state.optimizers.items():
        for index, entries in optimizer.state_dict()["state"].items():
            for name, value in entries.items():
                if isinstance(value, torch.Tensor):
                    dense = value.to_dense() if value.is_sparse else value
                    found[f"{key}.{index}.{name}"] = dense.detach().numpy().tobytes()
                else:
                    found[f"{key}.{index}.{name}"] = repr(value).encode()
    return found


@pytest.fixture(autouse=True, scope="module")
def imports_out_of_sight() -> Iterator[None]:
    """Take what imports left out of the garbage collector's sight: hundreds of thousands of
    objects, which each collection would pass over, and each look at all objects of the process,
    which every Checkpointer takes once."""
    gc.collect()
    gc.freeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """A test draws the same numbers in every run, whichever tests ran before it."""
    print(f"HOLDFAST_HOSTILE_SEED={SEED}")
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    random.seed(SEED)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server whose objects are files, and which ignores conditions."""
    yield from serving(Rclone(tmp_path_factory.mktemp("rclone")))


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server that honours conditions."""
    yield from serving(Moto(tmp_path_factory.mktemp("moto")))


def serving(server: Server) -> Iterator[Server]:
    """A server for as long as it is needed."""
    server.start()
    yield server
    server.kill()
