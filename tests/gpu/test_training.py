"""Training on a device: marks, deltas, restores and hot rows are those of tables in host memory.

Each test runs on CPU tensors that pretend to be on a device, and on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import events
from holdfast.checkpoint.selecting.priority import Priority
from holdfast.checkpoint.tracking import Tracker
from holdfast.checkpoint.tracking.hashes import RowHashes, hash_tensors
from holdfast.checkpoint.tracking.watch import FULL_TURN_SAVES
from holdfast.kernels.rows import bitmap
from holdfast.model import devices
from holdfast.model.model_state import ModelState
from holdfast.model.tables import Table, find_tables
from tests.gpu.model import ITEMS, USERS, Training, check_network, check_rows
from tests.gpu.pretend import PretendDevice, Synchronised, no_waiting, pretending

KINDS = ["adagrad", "sparse-adam", "adam", "sgd"]


def begin(folder: Path, training: Training, **settings: Any) -> hf.Checkpointer:
    chosen = {"strategy": "check-n-run", "codec": "fp32", "save_last": False, **settings}
    return hf.Checkpointer(folder, model=training.model, optimizer=training.optimizers, **chosen)


def is_sparse(kind: str) -> bool:
    return kind in ("adagrad", "sparse-adam")


@pytest.mark.parametrize("strategy", ["full", "check-n-run", "incrcp"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_of_every_step_is_stored_as_it_was(
    place: str, kind: str, strategy: str, tmp_path: Path
) -> None:
    training = Training(place, sparse=is_sparse(kind), kind=kind)
    rows, networks = {}, {}
    told: list[events.Event] = []
    with begin(tmp_path / "run", training, strategy=strategy, events=told.append) as ck:
        for step in range(1, 13):
            training.step(step)
            ck.step()
            if step % 3 == 0:
                rows[step], networks[step] = training.rows(), training.network()
                ck.save()
        ck.wait()
    run = hf.open(tmp_path / "run")
    assert run.steps == (3, 6, 9, 12)
    for step in run.steps:
        check_rows(run, step, rows[step])
        check_network(run, step, networks[step])
    failed = [e for e in told if isinstance(e, events.TrackingMethod) and "failed" in e.reason]
    assert not failed


@pytest.fixture
def default_device(place: str) -> Iterator[str]:
    """``torch.set_default_device``: on a GPU the GPU; else one whose tensors hold nothing."""
    torch.set_default_device("cuda" if place == "cuda" else "meta")
    yield place
    torch.set_default_device(None)


@pytest.mark.parametrize("tracking", ["auto", "hash"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_device_is_for_the_users_tensors_alone(
    default_device: str, kind: str, tracking: str, tmp_path: Path
) -> None:
    with torch.device("cpu"):
        training = Training(default_device, sparse=is_sparse(kind), kind=kind)
    rows = {}
    told: list[events.Event] = []
    settings = {"strategy": "incrcp", "tracking": tracking, "events": told.append}
    with begin(tmp_path / "run", training, **settings) as ck:
        for step in range(1, 7):
            with torch.device("cpu"):
                training.step(step)
                rows[step] = training.rows()
            ck.step()
            ck.save().result()
    run = hf.open(tmp_path / "run")
    for step in run.steps:
        check_rows(run, step, rows[step])
    failed = [e for e in told if isinstance(e, events.TrackingMethod) and "failed" in e.reason]
    assert not failed
    training.spoil()
    with begin(tmp_path / "run", training, **settings) as ck:
        assert ck.resume() == 6
    for name, columns in training.rows().items():
        for key, column in columns.items():
            assert column.tobytes() == rows[6][name][key].tobytes(), (name, key)


def test_a_delta_holds_the_rows_that_were_trained(place: str, tmp_path: Path) -> None:
    training = Training(place)
    with begin(tmp_path / "run", training) as ck:
        training.step(1)
        ck.step()
        ck.save().result()
        before = training.rows()
        for step in (2, 3):
            training.step(step)
            ck.step()
        stats = ck.save().result()
    after = training.rows()
    changed = sum(int((before[name]["sum"] != after[name]["sum"]).any(1).sum()) for name in before)
    assert stats.kind == "delta" and stats.rows == changed


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_run_goes_on_as_if_it_had_not_ended(
    place: str, kind: str, tmp_path: Path
) -> None:
    whole = Training(place, sparse=is_sparse(kind), kind=kind)
    with begin(tmp_path / "run", whole) as ck:
        for step in range(1, 9):
            whole.step(step)
            ck.step()
            if step in (2, 5):
                ck.save().result()
                saved = whole.rows(), whole.network()
    again = Training(place, sparse=is_sparse(kind), kind=kind)
    again.spoil()
    with begin(tmp_path / "run", again) as ck:
        assert ck.resume() == 5
        assert again.model.users.weight.device.type == place
        assert as_bytes(again.rows()) == as_bytes(saved[0])
        assert as_bytes({"": again.network()}) == as_bytes({"": saved[1]})
        for step in range(6, 9):
            again.step(step)
            ck.step()
        ck.save().result()
    check_rows(hf.open(tmp_path / "run"), 8, again.rows())
    for name, columns in whole.rows().items():
        for key, column in columns.items():
            if place == "cpu":
                assert again.rows()[name][key].tobytes() == column.tobytes(), (name, key)
            else:  # its sums may come in another order
                np.testing.assert_allclose(again.rows()[name][key], column, rtol=1e-4, atol=1e-6)


def as_bytes(arrays: dict[str, dict[str, np.ndarray]]) -> dict[tuple[str, str], bytes]:
    return {(name, key): a.tobytes() for name, found in arrays.items() for key, a in found.items()}


def test_a_run_moves_between_host_and_device(place: str, tmp_path: Path) -> None:
    there = Training(place)
    with begin(tmp_path / "run", there) as ck:
        for step in (1, 2):
            there.step(step)
            ck.step()
        ck.save().result()
    with devices.registered("cpu", devices.BlockingDevice):
        here = Training("cpu")
        with begin(tmp_path / "run", here) as ck:
            assert ck.resume() == 2
    for name, columns in there.rows().items():
        for key, column in columns.items():
            assert here.rows()[name][key].tobytes() == column.tobytes(), (name, key)


@pytest.mark.parametrize("by", ["mfu", "ssu", "scar"])
@pytest.mark.parametrize("sparse", [True, False])
def test_hot_rows_are_those_of_a_model_in_host_memory(
    by: str, sparse: bool, tmp_path: Path
) -> None:
    """On a GPU training rounds otherwise, so that only CPU tensors can be compared."""
    stored = []
    for is_away in (False, True):
        training = Training("cpu", sparse=sparse)
        folder = tmp_path / str(is_away)
        host = devices.registered("other", devices.BlockingDevice)
        with pretending(PretendDevice(is_prompt=False)) if is_away else host:
            rules = Priority(by=by, r=0.01, share=1.0)
            with begin(folder, training, strategy="cpr-mfu", priority=rules) as ck:
                for step in range(1, 10):
                    training.step(step)
                    ck.step()
                    if step % 3 == 0:
                        ck.save().result()
        run = hf.open(folder)
        stored.append([
            {schema.name: run.read(step, schema.name).weight.tobytes()
             for schema in run.tables(step)}
            for step in run.steps
        ])  # fmt: skip
    assert stored[0] == stored[1]


@pytest.mark.parametrize("by", ["mfu", "ssu", "scar"])
@pytest.mark.parametrize("sparse", [True, False])
def test_hot_rows_of_a_device_are_saved_and_no_row_is_forgotten(
    place: str, by: str, sparse: bool, tmp_path: Path
) -> None:
    training = Training(place, sparse=sparse)
    rules = Priority(by=by, r=0.01, share=1.0)
    with begin(tmp_path / "run", training, strategy="cpr-mfu", priority=rules) as ck:
        ck.save().result()
        for step in (1, 2, 3):
            training.step(step)
            ck.step()
        stats = ck.save().result()
        assert 0 < stats.rows <= USERS * 0.01 + ITEMS * 0.01
        pending = ck._changed._cursor.peek()
        live = training.rows()
        for name, columns in live.items():
            found = hf.open(tmp_path / "run").read(3, name).weight
            stale = np.flatnonzero((found != columns["weight"]).any(1))
            assert len(stale)
            assert bitmap.is_set(pending[name], stale).all()


def heard_of(training: Training) -> tuple[Tracker, dict[str, list[int]]]:
    """A tracker of a training, and what its listener hears."""
    state = ModelState(training.model, training.optimizers)
    tracker = Tracker(state.tables)
    tracker.cursor()
    heard: dict[str, list[int]] = {table.name: [] for table in state.tables}
    tracker.listen(lambda name, ids_N: heard[name].extend(ids_N.tolist()))
    return tracker, heard


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_heard", [False, True])
def test_marking_never_waits_for_the_device(place: str, kind: str, is_heard: bool) -> None:
    training = Training(place, sparse=is_sparse(kind), kind=kind)
    training.step(0)
    if is_heard:
        tracker, heard = heard_of(training)
    else:
        tracker, heard = Tracker(ModelState(training.model, training.optimizers).tables), {}
        tracker.cursor()
    expected: dict[str, list[int]] = {name: [] for name in heard}
    marked: dict[str, set[int]] = {}
    for step in (1, 2, 3):
        training.backward(step)
        for name, ids in used_rows(training).items():
            expected.setdefault(name, []).extend(ids)
            marked.setdefault(name, set()).update(ids)
        with no_waiting(place):  # without torch's own step, which may wait
            tracker.before_step(training.tables)
            tracker.after_step(training.tables)
    (cursor,) = tracker._pending
    notices = tracker.catch_up(cursor)
    assert not [notice for notice in notices if "failed" in notice.reason]
    for name, words_W in cursor.peek().items():
        assert marked[name] <= set(bitmap.ids(words_W, 0, 64 * len(words_W)).tolist())
    for name, ids in heard.items():
        assert ids[: len(expected[name])] == expected[name]
    tracker.close()


def used_rows(training: Training) -> dict[str, list[int]]:
    """The rows of each gradient, as often as it names them."""
    found = {}
    for name in ("users", "items"):
        gradient = getattr(training.model, name).weight.grad.detach().cpu()
        if gradient.is_sparse:
            found[f"{name}.weight"] = gradient._indices()[0].tolist()
        else:
            found[f"{name}.weight"] = torch.nonzero(gradient.any(1)).reshape(-1).tolist()
    return found


def test_ids_that_are_declared_on_a_device_are_not_waited_for(place: str) -> None:
    model = nn.Embedding(300, 4, sparse=True).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (table,) = find_tables(model, [optimizer])
    tracker = Tracker([table])
    cursor = tracker.cursor()
    heard: list[int] = []
    tracker.listen(lambda name, ids_N: heard.extend(ids_N.tolist()))
    ids = torch.tensor([[4, 250, 4], [7, 8, 9]]).to(place)
    with no_waiting(place):
        tracker.mark(table.name, ids)
    notices = tracker.catch_up(cursor)
    assert not [notice for notice in notices if "failed" in notice.reason]
    assert {4, 7, 8, 9, 250} <= set(bitmap.ids(cursor.peek()[table.name], 0, 300).tolist())
    assert heard[:6] == [4, 250, 4, 7, 8, 9]
    tracker.close()


def test_a_lookup_with_max_norm_is_found_at_the_next_save(place: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = nn.Embedding(300, 4, max_norm=0.5, sparse=True).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as ck:
        for step in (1, 2):
            with torch.no_grad():
                model(torch.arange(100 * step, 100 * step + 50, device=place))
            ck.step()
            ck.save().result()
            stored = hf.open(tmp_path / "run").read(step, "weight").weight
            assert np.array_equal(stored, model.weight.detach().cpu().numpy())


@pytest.mark.parametrize(
    "wait",
    [lambda t: t.cpu(), lambda t: t.sum().item(), lambda t: t.nonzero(), lambda t: bool(t.any())],
)
def test_waiting_is_noticed(place: str, wait: Callable[[torch.Tensor], object]) -> None:
    tensor = torch.ones(4, device=place)
    with pytest.raises((Synchronised, RuntimeError)), no_waiting(place):
        wait(tensor)


def test_rows_hash_on_the_device_as_on_the_host(place: str) -> None:
    training = Training(place)
    training.step(1)
    for table in find_tables(training.model, [training.tables]):
        copied = [torch.from_numpy(np.array(array)) for array in table.arrays()]
        expected = hash_tensors(copied).numpy().view(np.uint64)
        hashes = RowHashes(table, range(table.rows))
        hashes.learn_all(is_exact=True)
        assert (hashes._values == expected).all()
        hashes.begin_whole(is_exact=True)
        staged = [np.array(array) for array in table.arrays()]
        hashes.learn(range(table.rows), hashes._column_names(), staged)
        assert len(hashes.differing(np.arange(table.rows))) == 0


def test_rows_written_unseen_are_found_within_a_turn(place: str, tmp_path: Path) -> None:
    training = Training(place)
    with begin(tmp_path / "run", training) as ck:
        training.step(1)
        ck.step()
        ck.save().result()
        training.model.users.weight.data[3999] += 1  # torch counts no writes through .data
        for step in range(2, FULL_TURN_SAVES + 3):
            training.step(step)
            ck.step()
            ck.save().result()
        last = FULL_TURN_SAVES + 2
        check_rows(hf.open(tmp_path / "run"), last, training.rows())


@pytest.mark.parametrize("edit", ["fill", "lerp", "load"])
def test_writes_beside_the_optimizer_are_in_the_next_delta(
    place: str, edit: str, tmp_path: Path
) -> None:
    training = Training(place)
    with begin(tmp_path / "run", training) as ck:
        training.step(1)
        ck.step()
        ck.save().result()
        weight = training.model.users.weight
        with torch.no_grad():
            if edit == "fill":
                weight[torch.tensor([5, 77, 3000]).to(place)] = 0
            elif edit == "lerp":
                weight[1000:1100].lerp_(torch.zeros(100, 8, device=place), 0.5)
            else:
                state = {k: v.clone() for k, v in training.model.state_dict().items()}
                state["users.weight"][:50] += 1
                training.model.load_state_dict(state)
        training.step(2)
        ck.step()
        ck.save().result()
    check_rows(hf.open(tmp_path / "run"), 2, training.rows())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_tables_of_other_numbers_are_stored_as_they_were(
    place: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    model = nn.Embedding(500, 6, dtype=dtype).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = tmp_path / "run"
    with hf.Checkpointer(run, model=model, optimizer=optimizer, codec="fp32") as ck:
        for step in range(1, 5):
            optimizer.zero_grad()
            model(torch.tensor([step, 10 * step]).to(place)).sum().backward()
            optimizer.step()
            ck.step()
            ck.save().result()
        expected = model.weight.detach().cpu().clone()
        nn.init.zeros_(model.weight)
        ck.restore(4)
    assert torch.equal(model.weight.detach().cpu(), expected)


def test_a_model_that_moves_to_another_device_loses_no_mark(tmp_path: Path) -> None:
    """Marks of the pretended device are collected when the table leaves it."""
    training = Training("cpu")
    with begin(tmp_path / "run", training) as ck:
        training.step(1)
        ck.step()
        ck.save().result()
        with pretending():
            training.step(2)
            ck.step()
        training.step(3)
        ck.step()
        ck.save().result()
    check_rows(hf.open(tmp_path / "run"), 3, training.rows())


def test_random_generators_of_the_device_are_restored(place: str, tmp_path: Path) -> None:
    training = Training(place)
    with begin(tmp_path / "run", training) as ck:
        training.step(1)
        ck.step()
        ck.save().result()
        expected = torch.rand(5, device=place).cpu()
        torch.rand(7, device=place)
        ck.restore(1)
        assert torch.equal(torch.rand(5, device=place).cpu(), expected)


def test_a_table_copies_its_rows_where_they_are(place: str) -> None:
    training = Training(place)
    training.step(1)
    table: Table = find_tables(training.model, [training.tables])[0]
    assert table.device is not None
    live = training.rows()["users.weight"]
    ids_N = np.array([0, 5, 3999])
    for rows in (range(10, 20), ids_N):
        copies = table.copy_on_device(rows)
        chosen = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        for copy, key in zip(copies, ("weight", "sum"), strict=True):
            found, arrival = copy.to_new_host()
            arrival.wait()
            assert found.numpy().tobytes() == live[key][chosen].tobytes()
