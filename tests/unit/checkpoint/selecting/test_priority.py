"""Hot rows first: what a checkpoint saves of the large tables, and what becomes of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import events
from holdfast.checkpoint.selecting.priority import large_tables
from holdfast.errors import HoldfastError, InvalidRequestError, UnavailableError
from holdfast.plan.pls import PlsMeter
from holdfast.storage import open_storage

LARGE, SMALL = 800, 8
R = 0.125


class Training:
    """A large table and a small one; rows are stepped as often as asked for."""

    def __init__(self, url: Any, strategy: str | hf.Strategy, **settings: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.ModuleDict(
            {
                "large": nn.EmbeddingBag(LARGE, 4, mode="sum", sparse=True),
                "small": nn.EmbeddingBag(SMALL, 4, mode="sum", sparse=True),
            }
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.heard: list[events.Event] = []
        self.ck = hf.Checkpointer(
            url, model=self.model, optimizer=self.optimizer, strategy=strategy,
            events=self.heard.append, **settings,
        )  # fmt: skip

    def use(self, large: dict[int, int], small: list[int] | None = None) -> None:
        """One step for each time a row is used; each moves the row by one."""
        for turn in range(max(large.values())):
            self.optimizer.zero_grad()
            ids = [row for row, times in large.items() if times > turn]
            self.model["large"](torch.tensor(ids).unsqueeze(1)).sum().backward()
            if small and turn == 0:
                self.model["small"](torch.tensor(small).unsqueeze(1)).sum().backward()
            self.optimizer.step()
            self.ck.step()

    def save(self) -> set[int]:
        """Save; which rows of the large table went along."""
        step = self.ck.save().result().step
        self.ck.wait()
        run = hf.open(self.ck._storage.url)
        saved: set[int] = set()
        before = [s for s in run.steps if s < step]
        if not before:
            return set(range(LARGE))
        for table, ids_N, _ in run.updates(since=before[-1]):
            if table.startswith("large"):
                saved |= set(ids_N.tolist())
        return saved

    def stored(self) -> np.ndarray:
        run = hf.open(self.ck._storage.url)
        return run.read(run.steps[-1], "large.weight").weight


def test_the_largest_tables_that_hold_nearly_all_rows() -> None:
    kaggle = {
        f"t{i}": rows for i, rows in enumerate([10_131_227, 2_202_608, 305, 24, 12_517, 633, 4])
    }
    assert large_tables(kaggle, 0.99) == ["t0", "t1"]
    assert large_tables(kaggle, 1.0) == sorted(kaggle, key=lambda name: -kaggle[name])
    assert large_tables({}, 0.99) == []


@pytest.mark.parametrize("strategy", ["cpr-mfu", "cpr-scar"])
def test_the_most_used_rows_are_saved_and_the_others_wait(tmp_path: Path, strategy: str) -> None:
    training = Training(tmp_path, strategy)
    training.use({0: 1})
    training.save()
    hot = dict.fromkeys(range(100, 180), 5)
    warm = dict.fromkeys(range(300, 350), 3)
    cold = dict.fromkeys(range(500, 560), 1)
    training.use({**hot, **warm, **cold}, small=[1, 2])
    assert training.save() == {*hot, *range(300, 320)}  # r * 800 = 100 rows, ties by id
    weights = training.model["large"].weight.detach().numpy()
    is_old = ~(training.stored() == weights).all(axis=1)
    assert set(np.flatnonzero(is_old).tolist()) == {*range(320, 350), *cold}
    training.use({7: 1})  # what waited comes next: more used than this one row
    assert training.save() == {*range(320, 350), *cold, 7}
    assert np.array_equal(training.stored(), training.model["large"].weight.detach().numpy())
    training.ck.close()


def test_sampled_rows_are_used_rows_and_hot_ones_come_first(tmp_path: Path) -> None:
    training = Training(tmp_path, "cpr-ssu")
    training.use({0: 1})
    training.save()
    hot = dict.fromkeys(range(40), 20)
    cold = dict.fromkeys(range(200, 700), 1)
    training.use({**cold, **hot})
    saved = training.save()
    assert len(saved) <= R * LARGE
    assert saved <= {*hot, *cold}
    assert len(saved & set(hot)) > 0.9 * len(hot)
    training.ck.close()


@pytest.mark.parametrize("strategy", ["cpr-mfu", "cpr-ssu", "cpr-scar"])
def test_small_tables_are_saved_whole(tmp_path: Path, strategy: str) -> None:
    training = Training(tmp_path, strategy)
    training.use({0: 1})
    training.save()
    training.use(dict.fromkeys(range(LARGE), 1), small=[0, 3, 7])
    training.save()
    run = hf.open(tmp_path)
    small = run.read(run.steps[-1], "small.weight").weight
    assert np.array_equal(small, training.model["small"].weight.detach().numpy())
    training.ck.close()


@pytest.mark.parametrize("strategy", ["cpr-mfu", "cpr-ssu", "cpr-scar"])
def test_lost_server_gets_each_row_as_it_was_saved_last(tmp_path: Path, strategy: str) -> None:
    training = Training(tmp_path, strategy, servers=4)
    rng = np.random.default_rng(2)
    training.use({0: 1})
    training.save()
    for _ in range(4):
        training.use(
            {
                int(row): int(n)
                for row, n in zip(rng.integers(0, LARGE, 300), rng.integers(1, 4, 300), strict=True)
            }
        )
        training.save()
    stored = training.stored()
    training.use({5: 1, 6: 1})
    before = training.model["large"].weight.detach().numpy().copy()
    training.ck.recover([1])
    after = training.model["large"].weight.detach().numpy()
    lost_N = hf.Placement(4).rows_of(1, LARGE)
    expected = before.copy()
    expected[lost_N] = stored[lost_N]
    assert np.array_equal(after, expected)
    training.ck.close()


@pytest.mark.parametrize("strategy", ["cpr-mfu", "cpr-scar"])
def test_rows_of_a_failed_save_are_in_the_next(
    tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, strategy)
    training.use({0: 1})
    training.save()
    hot = dict.fromkeys(range(100, 180), 5)
    training.use(hot)
    storage = open_storage(str(tmp_path))
    with monkeypatch.context() as patch:

        def full(*args: Any, **kwargs: Any) -> None:
            raise UnavailableError("disk full")

        patch.setattr(type(storage), "put_if_absent", full)
        with pytest.raises(HoldfastError):
            training.ck.save().result()
    training.use(dict.fromkeys(range(300, 500), 1))
    assert set(hot) <= training.save()
    training.ck.close()


def test_loss_is_counted_from_the_last_round_of_saves(tmp_path: Path) -> None:
    steady = hf.Strategy("steady", base="consecutive", codec="fp32", priority=hf.Priority(by="mfu"))
    training = Training(tmp_path, steady, servers=4, total_steps=1000)
    training.use({0: 10})
    training.save()  # a base: everything, at step 10
    for _ in range(8):  # 1 / r saves of a part each are one of all
        training.use(dict.fromkeys(range(300), 1))
        training.save()
        training.use({1: 9})
    training.ck.recover([2])
    assert training.ck.pls == pytest.approx(9 / 1000 / 4)
    training.use({1: 10})
    training.save()
    training.ck.recover([2])
    assert training.ck.pls == pytest.approx((9 + 19) / 1000 / 4)
    training.ck.close()


def test_memory_is_that_of_the_paper(tmp_path: Path) -> None:
    model = nn.EmbeddingBag(64_000, 16, mode="sum", sparse=True)
    table_bytes = 64_000 * 64
    for strategy, share in (("cpr-mfu", 0.0625), ("cpr-ssu", 0.0078), ("cpr-scar", 1.0)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with hf.Checkpointer(
            tmp_path / strategy, model=model, strategy=strategy, optimizer=optimizer
        ) as ck:
            assert ck._changed._chooser is not None
            assert ck._changed._chooser.bytes <= share * table_bytes


@pytest.mark.parametrize(
    "given", [
        {"by": "luck"}, {"by": "mfu", "r": 0}, {"by": "mfu", "r": 1.5}, {"by": "ssu", "period": 0},
        {"by": "ssu", "period": 1.5}, {"by": "scar", "share": 0}, {"by": "mfu", "r": float("nan")},
    ],
)  # fmt: skip
def test_nonsense_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        hf.Priority(**given)


def test_hot_rows_first_needs_increments() -> None:
    with pytest.raises(InvalidRequestError, match="consecutive"):
        hf.Strategy("mine", base="one-shot", codec="fp32", priority=hf.Priority(by="mfu"))


def mean_pls(url: Path, strategy: str | hf.Strategy, every: int, steps: int) -> float:
    """The PLS that a failure adds, over all steps at which it may come: by the run's own meter."""
    training = Training(
        url, strategy, every=every, servers=2, total_steps=steps, codec="fp32"
    )  # fmt: skip
    lost = training.ck._lost
    added = []
    with training.ck as ck:
        ck.save().result()
        for step in range(steps):
            training.use({step % LARGE: 1})
            ck.wait()
            ck._saves.report()
            meter = PlsMeter.from_state(lost._meter.state())  # type: ignore[union-attr]
            added.append(meter.failed([0]))
    return float(np.mean(added))


@pytest.mark.parametrize(
    ("every", "r"), [(16, 0.125), (21, 0.125), (30, 0.15), (11, 0.4), (5, 0.125), (1, 0.125)]
)
def test_the_same_interval_loses_no_more_samples_with_hot_rows_first(
    every: int, r: float, tmp_path: Path
) -> None:
    steps = max(24, 6 * every)
    hot = hf.Strategy(
        "cpr-mfu", base="consecutive", codec="fp32", priority=hf.Priority(by="mfu", r=r)
    )
    all_rows = mean_pls(tmp_path / "cpr", "cpr", every, steps)
    hot_rows = mean_pls(tmp_path / "hot", hot, every, steps)
    assert 0.5 * all_rows <= hot_rows <= all_rows


def test_a_round_of_saves_holds_as_many_rows_as_the_table_within_the_interval(
    tmp_path: Path,
) -> None:
    training = Training(tmp_path, "cpr-mfu", every=20, codec="fp32")
    with training.ck as ck:
        for step in range(40):
            training.use(dict.fromkeys(range(LARGE), 1) if step % 2 else {step: 1})
            ck.wait()
    run = hf.open(tmp_path)
    steps = list(run.steps)
    assert steps == list(range(2, 41, 2))  # 20 / 8, rounded down
    deltas = [run.info(step) for step in steps if run.info(step).kind == "delta"]
    assert max(info.rows for info in deltas) == int(R * LARGE)


def test_where_the_interval_is_shorter_than_a_round_each_save_takes_more_rows(
    tmp_path: Path,
) -> None:
    training = Training(tmp_path, "cpr-mfu", every=4, codec="fp32")
    with training.ck as ck:
        for _ in range(6):
            training.use(dict.fromkeys(range(LARGE), 1))
            ck.wait()
    run = hf.open(tmp_path)
    assert run.steps == tuple(range(1, 7))
    assert {run.info(step).rows for step in run.steps[1:]} <= {LARGE // 4, LARGE + SMALL}
