"""Two steps compared: the same as comparing plain copies of both, reading only what may differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.checkpoint import diff as diffs
from holdfast.checkpoint.diff import RowChange, TableDiff, diff_steps
from holdfast.checkpoint.run import Run
from holdfast.errors import InvalidRequestError, NotFoundError
from tests.fault import FaultyStorage

Copies = dict[int, dict[str, list[np.ndarray]]]
GRID = hf.Strategy("grid", base="consecutive", codec="fp32", extract=hf.Extract(0.1))
ROWS = {"a.weight": 400, "b.weight": 60, "quiet.weight": 50}


class Tables(nn.Module):
    """Three tables; the last one is looked up at the first step and then never again."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Embedding(ROWS["a.weight"], 8, sparse=True)
        self.b = nn.Embedding(ROWS["b.weight"], 3, sparse=True)
        self.quiet = nn.Embedding(ROWS["quiet.weight"], 4, sparse=True)


class Trainer:
    """Trains and saves; keeps a plain copy of every step it saved."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = Tables()
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.draw = np.random.default_rng(5)
        self.step = 0
        self.copies: Copies = {}

    def train(self, url: Path, strategy: object, saves: int, **settings: object) -> None:
        with hf.Checkpointer(
            url, model=self.model, optimizer=self.optimizer, strategy=strategy, **settings
        ) as ck:
            ck.resume()
            for _ in range(saves):
                for _ in range(2):
                    self._one_step()
                    ck.step()
                ck.save().result()
                self.copies[self.step] = self._copy()

    def _one_step(self) -> None:
        self.step += 1
        self.optimizer.zero_grad()
        loss = self.model.a(self._ids(400)).sum() + (self.model.b(self._ids(60)) ** 2).sum()
        if self.step == 1:
            loss = loss + self.model.quiet(torch.arange(5)).sum()
        loss.backward()
        self.optimizer.step()

    def _ids(self, rows: int) -> torch.Tensor:
        return torch.tensor(np.minimum(self.draw.zipf(1.5, 20) - 1, rows - 1))

    def _copy(self) -> dict[str, list[np.ndarray]]:
        found = {}
        for name, weight in self.model.named_parameters():
            state = self.optimizer.state[weight]["sum"]
            found[name] = [weight.detach().numpy().copy(), state.numpy().copy()]
        return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Copies]:
    """A grid of 12 checkpoints, a new base, and a grid of 5 more."""
    url = tmp_path_factory.mktemp("diff") / "run"
    trainer = Trainer()
    trainer.train(url, GRID, 12)
    trainer.train(url, "full", 1)
    trainer.train(url, GRID, 5)
    assert sum(e.kind == "base" for e in hf.open(url).catalog.checkpoints) == 2
    return url, trainer.copies


def check(found: TableDiff, before: list[np.ndarray], after: list[np.ndarray], top: int) -> None:
    """Compare with what plain NumPy says of two whole tables."""
    differs = (before[0].view(np.uint32) != after[0].view(np.uint32)).any(axis=1)
    l2 = np.sqrt(((after[0].astype(np.float64) - before[0]) ** 2).sum(axis=1))
    assert found.changed == differs.sum()
    assert found.rewritten >= found.changed
    assert found.share == found.changed / len(l2)
    assert dict(found.state_changed) == {"sum": (before[1] != after[1]).any(axis=1).sum()}
    assert found.not_finite == 0
    if not found.changed:
        assert (found.l2_mean, found.l2_max, found.top) == (0.0, 0.0, ())
        return
    assert found.l2_mean == pytest.approx(l2[differs].mean(), rel=1e-12)
    assert found.l2_max == pytest.approx(l2.max(), rel=1e-12)
    rows = np.flatnonzero(differs)
    order = rows[np.lexsort((rows, -l2[rows]))][:top]
    assert [change.row for change in found.top] == order.tolist()
    assert [change.l2 for change in found.top] == pytest.approx(l2[order])
    own = np.sqrt((before[0].astype(np.float64) ** 2).sum(axis=1))
    assert [change.before for change in found.top] == pytest.approx(own[order])


@pytest.mark.parametrize("piece_bytes", [1, 3000, 16 << 20])
@pytest.mark.parametrize(
    ("a", "b"), [(2, 4), (2, 24), (8, 20), (22, 24), (24, 26), (10, 30), (26, 36), (30, 32)]
)
def test_a_diff_equals_the_comparison_of_whole_copies(
    trained: tuple[Path, Copies], a: int, b: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, copies = trained
    monkeypatch.setattr(diffs, "PIECE_BYTES", piece_bytes)
    found = diff_steps(hf.open(url), a, b, top=7)
    assert (found.a, found.b, found.is_swapped) == (a, b, False)
    assert found.is_across_bases == (a < 26 <= b)
    assert [table.table for table in found.tables] == list(ROWS)
    for table in found.tables:
        check(table, copies[a][table.table], copies[b][table.table], 7)
    assert found.changed == sum(table.changed for table in found.tables) > 0


@pytest.mark.parametrize("strategy", ["check-n-run", "full"])
@pytest.mark.parametrize("codec", ["fp32", "asym4"])
def test_strategies_without_a_grid_are_compared_as_they_are_stored(
    tmp_path: Path, strategy: str, codec: str
) -> None:
    trainer = Trainer()
    trainer.train(tmp_path, strategy, 5, codec=codec)
    run = hf.open(tmp_path)
    stored = {
        step: {
            name: [rows.weight, rows.state["sum"]]
            for name in ROWS
            for rows in [run.read(step, name)]
        }
        for step in run.steps
    }
    for a, b in [(2, 4), (4, 10), (6, 8)]:
        for table in diff_steps(run, a, b, top=3).tables:
            check(table, stored[a][table.table], stored[b][table.table], 3)


def test_increments_that_wait_for_extraction_are_compared_too(tmp_path: Path) -> None:
    trainer = Trainer()
    trainer.train(tmp_path, hf.Strategy("naive", base="consecutive", codec="fp32"), 6)
    run = hf.open(tmp_path)
    assert not run.catalog.grids
    for a, b in [(2, 12), (6, 8)]:
        for table in diff_steps(run, a, b).tables:
            check(table, trainer.copies[a][table.table], trainer.copies[b][table.table], 10)


def test_rewritten_rows_are_those_saved_in_between(trained: tuple[Path, Copies]) -> None:
    run = hf.open(trained[0])
    within = diff_steps(run, 8, 10, ["a.weight"]).tables[0]
    assert within.rewritten == within.changed == within.state_changed[0][1]
    across = diff_steps(run, 24, 28, ["a.weight"]).tables[0]
    assert across.rewritten == ROWS["a.weight"] > across.changed


def test_the_order_of_the_steps_does_not_matter_and_is_told(trained: tuple[Path, Copies]) -> None:
    run = hf.open(trained[0])
    forth, back = diff_steps(run, 4, 12), diff_steps(run, 12, 4)
    assert back.is_swapped and not forth.is_swapped
    assert (back.a, back.b, back.tables) == (forth.a, forth.b, forth.tables)


def test_a_step_does_not_differ_from_itself(trained: tuple[Path, Copies]) -> None:
    found = diff_steps(hf.open(trained[0]), 12, 12)
    assert found.changed == 0
    assert all(table.rewritten == 0 and not table.top for table in found.tables)


def reads(url: Path, act: Callable[[Run], object]) -> tuple[Run, list[str]]:
    opened = hf.open(url)
    counter = FaultyStorage(opened.storage)
    act(Run(counter, opened.catalog))
    return opened, counter.calls


def test_a_table_that_did_not_change_is_not_read(trained: tuple[Path, Copies]) -> None:
    _, calls = reads(trained[0], lambda run: diff_steps(run, 4, 24, ["quiet.weight"]))
    assert calls == []


def test_only_objects_of_the_two_steps_are_read(trained: tuple[Path, Copies]) -> None:
    run, calls = reads(trained[0], lambda run: diff_steps(run, 8, 10))
    needed = {s.extent.object for step in (8, 10) for s in run.catalog.alive(step)}
    needed |= {
        grid.deletion_vectors.object
        for grid in run.catalog.grids
        if grid.deletion_vectors is not None
    }
    assert {call.split()[1] for call in calls} <= needed


def test_only_the_named_tables_are_compared(trained: tuple[Path, Copies]) -> None:
    run = hf.open(trained[0])
    found = diff_steps(run, 4, 12, ["b.weight", "a.weight", "b.weight"])
    assert [table.table for table in found.tables] == ["b.weight", "a.weight"]
    assert (found.only_in_a, found.only_in_b) == ((), ())


def test_no_top_rows_are_shown_where_none_are_asked_for(trained: tuple[Path, Copies]) -> None:
    found = diff_steps(hf.open(trained[0]), 4, 12, top=0)
    assert found.changed > 0
    assert all(table.top == () for table in found.tables)


def test_what_does_not_exist_is_refused(trained: tuple[Path, Copies]) -> None:
    run = hf.open(trained[0])
    for a, b in [(3, 4), (4, 999)]:
        with pytest.raises(NotFoundError, match="no checkpoint of this step"):
            diff_steps(run, a, b)
    with pytest.raises(NotFoundError, match="no such table"):
        diff_steps(run, 4, 12, ["nope"])


def test_numbers_that_are_not_finite_are_counted_apart(tmp_path: Path) -> None:
    model = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def look_up(*rows: int) -> None:
        optimizer.zero_grad()
        model(torch.tensor(rows)).sum().backward()
        optimizer.step()

    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizer, strategy=GRID) as ck:
        with torch.no_grad():
            model.weight.zero_()
            model.weight[6] = torch.nan
        ck.step()
        ck.save().result()
        look_up(1, 2, 3, 4, 6)
        with torch.no_grad():
            model.weight[1] = torch.nan
            model.weight[2, 0] = 3.0
            model.weight[3] = -0.0
        ck.step()
        ck.save().result()
    table = diff_steps(hf.open(tmp_path), 1, 2).tables[0]
    # row 4 was written again as it was, row 6 too although it is no number
    assert (table.rewritten, table.changed, table.not_finite) == (5, 3, 1)
    assert (table.l2_mean, table.l2_max) == (1.5, 3.0)
    assert table.top == (
        RowChange(1, np.inf, 0.0),
        RowChange(2, 3.0, 0.0),
        RowChange(3, 0.0, 0.0),
    )


def test_a_table_of_another_shape_is_named_not_compared(tmp_path: Path) -> None:
    for rows in (10, 12):
        model = nn.ModuleDict({"same": nn.Embedding(5, 2), "other": nn.Embedding(rows, 2)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hf.Checkpointer(
            tmp_path / str(rows), model=model, optimizer=optimizer, tracking="hash"
        ) as ck:
            ck.step()
            ck.save().result()
    small, large = hf.open(tmp_path / "10"), hf.open(tmp_path / "12")
    before = {t.name: t for t in small.tables(1)}
    after = {t.name: t for t in large.tables(1)}
    assert diffs._choose(before, after, None) == ["same.weight"]
    with pytest.raises(InvalidRequestError, match="different shapes"):
        diffs._choose(before, after, ["other.weight"])
