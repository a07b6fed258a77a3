"""What a training loop relies on, told through the real thing: saves, resumes, failures."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import events
from holdfast.storage import open_storage
from tests.conftest import TinyModel, fingerprint, make_optimizers, train_steps

EXACT = {"codec": "fp32"}


def build(kind: str = "adagrad", *, sparse: bool = True, seed: int = 3) -> tuple[TinyModel, Any]:
    torch.manual_seed(seed)
    model = TinyModel(sparse=sparse)
    return model, make_optimizers(model, kind)


@pytest.mark.parametrize(
    ("kind", "sparse", "tracking"),
    [
        ("sgd", True, "lookup"),
        ("sgd", False, "lookup"),
        ("adagrad", True, "lookup"),
        ("adagrad", False, "lookup"),
        ("sparse-adam", True, "lookup"),
        ("momentum", True, "hash"),
        ("momentum", False, "hash"),
        ("adam", False, "hash"),
        ("sgd-decay", False, "hash"),
        ("sgd", True, "auto"),
        ("adagrad", False, "auto"),
        ("sparse-adam", True, "auto"),
        ("momentum", False, "auto"),
        ("adam", False, "auto"),
        ("sgd-decay", False, "auto"),
    ],
)
@pytest.mark.parametrize("base", ["full", "one-shot", "consecutive", "intermittent"])
def test_resumed_training_is_bit_identical(
    tmp_path: Path, kind: str, sparse: bool, tracking: str, base: str
) -> None:
    settings = {
        "strategy": hf.Strategy("mine", base=base, codec="fp32"),
        "tracking": tracking,
        "every": 4,
        "save_last": False,  # as after a crash
    }
    model, optimizers = build(kind, sparse=sparse)
    torch.manual_seed(99)
    train_steps(model, optimizers, range(30))
    expected = fingerprint(model, optimizers)

    model, optimizers = build(kind, sparse=sparse)
    torch.manual_seed(99)
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **settings) as ck:
        assert ck.resume() == 0
        train_steps(model, optimizers, range(14), after=ck.step)
    for stop in (23, 30):
        model, optimizers = build(kind, sparse=sparse, seed=1234)
        torch.manual_seed(stop)
        with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **settings) as ck:
            start = ck.resume()
            assert start == (12 if stop == 23 else 20)
            train_steps(model, optimizers, range(start, stop), after=ck.step)
    assert fingerprint(model, optimizers) == expected


@pytest.mark.parametrize("base", ["full", "one-shot", "consecutive", "intermittent"])
def test_every_kept_step_restores_exactly(tmp_path: Path, base: str) -> None:
    model, optimizers = build("sparse-adam")
    strategy = hf.Strategy("mine", base=base, codec="fp32")
    seen: dict[int, dict[str, bytes]] = {}
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizers, strategy=strategy, every=3
    ) as ck:

        def after() -> None:
            if ck.step() is not None:
                seen[ck.current_step] = fingerprint(model, optimizers)

        train_steps(model, optimizers, range(24), after=after)
        ck.wait()
        assert ck.all_steps() == tuple(seen)
        for step in (6, 24, 3, 15, 12):
            ck.restore(step)
            assert fingerprint(model, optimizers) == seen[step]
    run = hf.open(tmp_path)
    for step in seen:
        rows = run.read(step, "users.weight")
        assert rows.weight.tobytes() == seen[step]["model.users.weight"]
        assert rows.state["exp_avg"].tobytes() == seen[step]["0.0.exp_avg"]
        some = run.read(step, "items.weight", rows=[70, 3, 3, 0])
        whole = np.frombuffer(seen[step]["model.items.weight"], np.float32).reshape(-1, 5)
        assert np.array_equal(some.weight, whole[[70, 3, 3, 0]])


@pytest.mark.parametrize("base", ["one-shot", "consecutive", "intermittent"])
def test_updates_bring_a_serving_copy_up_to_date(tmp_path: Path, base: str) -> None:
    model, optimizers = build("sgd")
    strategy = hf.Strategy("mine", base=base, codec="fp32")
    copies: dict[int, np.ndarray] = {}
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizers, strategy=strategy, every=2
    ) as ck:

        def after() -> None:
            if ck.step() is not None:
                copies[ck.current_step] = model.users.weight.detach().numpy().copy()

        train_steps(model, optimizers, range(16), after=after)
    run = hf.open(tmp_path)
    for since, copy in copies.items():
        served = copy.copy()
        touched = 0
        for table, ids, rows in run.updates(since=since):
            if table == "users.weight":
                served[ids] = rows
                touched += len(ids)
        assert np.array_equal(served, copies[16])
        if base == "consecutive" and since == 14:
            assert touched == np.any(copies[14] != copies[16], axis=1).sum()


def test_delta_holds_exactly_the_rows_looked_up(tmp_path: Path) -> None:
    model, optimizers = build("sgd")
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT) as ck:
        train_steps(model, optimizers, range(1), after=ck.step)
        ck.save().result()
        before = model.users.weight.detach().clone()
        train_steps(model, optimizers, range(1, 3), after=ck.step)
        stats = ck.save().result()
        with torch.no_grad():
            model(torch.tensor([[199, 198], [195, 194]]))
        model.eval()
        model(torch.tensor([[197, 196], [195, 194]]))
        train_steps(model, optimizers, range(3, 4), after=ck.step)
        changed = int((model.users.weight != before).any(1).sum())
        after_stats = ck.save().result()
    assert stats.kind == after_stats.kind == "delta"
    run = hf.open(tmp_path)
    users = [s for s in run.catalog.alive(4) if s.table == "users.weight" and s.born == 4]
    assert sum(s.rows for s in users) == changed


def test_eval_mode_with_backward_is_tracked(tmp_path: Path) -> None:
    model, optimizers = build("sgd")
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT) as ck:
        ck.step()
        ck.save().result()
        model.eval()
        model(torch.tensor([[5, 6], [7, 8]])).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        ck.step()
        expected = fingerprint(model, optimizers)
        ck.save().result()
        ck.restore(2)
        assert fingerprint(model, optimizers) == expected


@pytest.mark.parametrize(
    ("kind", "word"),
    [("adam", "Adam"), ("momentum", "momentum"), ("sgd-decay", "weight_decay")],
)
def test_lookup_tracking_is_refused_where_rows_move_without_a_gradient(
    tmp_path: Path, kind: str, word: str
) -> None:
    model, optimizers = build(kind, sparse=False)
    with pytest.raises(hf.InvalidRequestError, match=f"{word}.*tracking='auto'"):
        hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, tracking="lookup")


def test_table_whose_optimizer_was_not_given_is_saved_and_told_of(tmp_path: Path) -> None:
    model, optimizers = build("sgd")
    told: list[events.Event] = []
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizers[1], events=told.append, **EXACT
    ) as ck:
        train_steps(model, optimizers, range(2), after=ck.step)
        ck.save().result()
        train_steps(model, optimizers, range(2, 4), after=ck.step)
        expected = fingerprint(model, optimizers)
        ck.save().result()
        train_steps(model, optimizers, range(4, 6))
        ck.restore(4)
        assert fingerprint(model, optimizers) == expected
    notices = [event for event in told if isinstance(event, events.TrackingMethod)]
    assert {notice.table for notice in notices} == {"users.weight", "items.weight"}
    assert all("so is not saved" in notice.reason for notice in notices)


def test_weight_decay_switched_on_later_is_saved_from_then_on(tmp_path: Path) -> None:
    model, optimizers = build("adagrad", sparse=False)
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT) as ck:
        train_steps(model, optimizers, range(1), after=ck.step)
        ck.save().result()
        optimizers[0].param_groups[0]["weight_decay"] = 0.1
        train_steps(model, optimizers, range(1, 2), after=ck.step)
        expected = fingerprint(model, optimizers)
        assert ck.save().result().kind == "base"
        train_steps(model, optimizers, range(2, 4))
        ck.restore(2)
        assert fingerprint(model, optimizers) == expected
    assert "100 % of the rows changed" in hf.open(tmp_path).catalog.checkpoint(2).reason


def test_replaced_weight_is_followed(tmp_path: Path) -> None:
    model, optimizers = build("sgd")
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT) as ck:
        ck.save().result()
        model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
        ck.step()
        ck.save().result()
        expected = model.users.weight.detach().clone()
    assert np.array_equal(hf.open(tmp_path).read(1, "users.weight").weight, expected)


def test_weight_replaced_by_one_of_another_shape_begins_a_new_base(tmp_path: Path) -> None:
    model, optimizers = build("sgd")
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT) as ck:
        ck.save().result()
        model.users.weight = nn.Parameter(torch.randn(7, 3))
        ck.step()
        ck.save().result()
    run = hf.open(tmp_path)
    assert (run.info(1).kind, run.read(0, "users.weight").weight.shape) == ("base", (200, 8))
    assert np.array_equal(run.read(1, "users.weight").weight, model.users.weight.detach())


def test_rows_edited_by_hand_are_saved(tmp_path: Path) -> None:
    model, optimizers = build("sgd")
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT) as ck:
        ck.save().result()
        with torch.no_grad():
            model.users.weight[17] = 1.0
        ck.step()
        ck.save().result()
        model.users.weight.data[18] = 2.0  # torch does not count this: it is declared
        ck.mark("users.weight", [18])
        ck.step()
        ck.save().result()
    run = hf.open(tmp_path)
    assert np.all(run.read(1, "users.weight", rows=[17]).weight == 1.0)
    assert np.all(run.read(2, "users.weight", rows=[18]).weight == 2.0)


def test_save_holds_the_values_of_its_step_whatever_training_does_next(tmp_path: Path) -> None:
    gate = threading.Event()
    model, optimizers = build("adagrad")
    storage = SlowStorage(open_storage(str(tmp_path)), gate)
    with hf.Checkpointer(storage, model=model, optimizer=optimizers, **EXACT) as ck:
        train_steps(model, optimizers, range(2), after=ck.step)
        expected = fingerprint(model, optimizers)
        save = ck.save()
        assert save.stats.stall_s > 0
        assert not save.done()
        train_steps(model, optimizers, range(2, 6))
        assert fingerprint(model, optimizers) != expected
        gate.set()
        save.result()
        ck.restore(2)
        assert fingerprint(model, optimizers) == expected


class SlowStorage:
    """A storage whose objects become durable only when the gate opens."""

    def __init__(self, inner: Any, gate: threading.Event) -> None:
        self._inner = inner
        self._gate = gate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, name: str) -> Any:
        self._gate.wait()
        return self._inner.create(name)


def test_busy_wait_waits_and_busy_cancel_cancels(tmp_path: Path) -> None:
    for on_busy in ("wait", "cancel"):
        gate = threading.Event()
        model, optimizers = build("sgd")
        seen: list[events.Event] = []
        storage = SlowStorage(open_storage(str(tmp_path / on_busy)), gate)
        with hf.Checkpointer(
            storage, model=model, optimizer=optimizers, on_busy=on_busy, events=seen.append, **EXACT
        ) as ck:
            train_steps(model, optimizers, range(1), after=ck.step)
            first = ck.save()
            train_steps(model, optimizers, range(1, 2), after=ck.step)
            threading.Timer(0.05, gate.set).start()
            second = ck.save()
            second.result()
            expected = fingerprint(model, optimizers)
            if on_busy == "wait":
                assert ck.all_steps() == (1, 2)
                assert first.result().kind == "base"
            else:
                assert ck.all_steps() == (2,)
                with pytest.raises(hf.HoldfastError, match="newer save"):
                    first.result()
                assert any(isinstance(event, events.SaveCancelled) for event in seen)
            ck.restore(2)
            assert fingerprint(model, optimizers) == expected


def test_staging_smaller_than_the_model_still_saves_everything(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyModel(rows=300_000)
    optimizers = make_optimizers(model, "adagrad")
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizers, staging_bytes_max=1, **EXACT
    ) as ck:
        train_steps(model, optimizers, range(1), rows=300_000, after=ck.step)
        ck.save().result()
        assert ck._bench.pool.bytes_held < 3 * (8 << 20) < ck._state.full_bytes() * 2
        expected = fingerprint(model, optimizers)
        ck.restore(1)
        assert fingerprint(model, optimizers) == expected


def test_saving_on_existing_checkpoints_without_resume_is_refused(tmp_path: Path) -> None:
    model, optimizers = build()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers) as ck:
        ck.save().result()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, save_last=False) as ck:
        ck.step()
        with pytest.raises(hf.InvalidRequestError, match="resume"):
            ck.save()
        assert ck.all_steps() == (0,)


def test_going_back_needs_a_word_and_then_drops_what_came_after(tmp_path: Path) -> None:
    model, optimizers = build("sgd")
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, every=2, **EXACT) as ck:
        train_steps(model, optimizers, range(8), after=ck.step)
        ck.restore(4)
        train_steps(model, optimizers, range(4, 5), after=ck.step)
        with pytest.raises(hf.InvalidRequestError, match="discard_later"):
            ck.save()
        ck.wait()
        assert hf.open(tmp_path).steps == (2, 4, 6, 8)
        ck.restore(4, discard_later=True)
        train_steps(model, optimizers, range(4, 6), after=ck.step)
        ck.wait()
        expected = fingerprint(model, optimizers)
        assert ck.all_steps() == (2, 4, 6)
        ck.restore(2)
        ck.restore(6)
        assert fingerprint(model, optimizers) == expected
    run = hf.open(tmp_path)
    with pytest.raises(hf.InvalidRequestError, match="went back"):
        list(run.updates(since=5))
    names = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.hf")}
    assert names == {name for name, _ in run.catalog.objects}


def test_second_writer_gets_a_conflict_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizers = build("sgd")
    first = hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT)
    train_steps(model, optimizers, range(1), after=first.step)
    first.save().result()
    other_model, other_optimizers = build("sgd")
    second = hf.Checkpointer(tmp_path, model=other_model, optimizer=other_optimizers, **EXACT)
    assert second.resume() == 1
    train_steps(model, optimizers, range(1, 2), after=first.step)
    with pytest.raises(hf.ConflictError, match="another writer"):
        first.save().result()
    train_steps(other_model, other_optimizers, range(1, 2), after=second.step)
    expected = fingerprint(other_model, other_optimizers)
    second.save().result()
    second.restore(2)
    assert fingerprint(other_model, other_optimizers) == expected
    for ck in (first, second):
        ck.close()


def test_checkpoint_of_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model, optimizers = build()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers) as ck:
        ck.save().result()
    other = TinyModel(rows=90)
    others = make_optimizers(other, "adagrad")
    before = fingerprint(other, others)
    with (
        hf.Checkpointer(tmp_path, model=other, optimizer=others) as ck,
        pytest.raises(hf.InvalidRequestError, match="another shape"),
    ):
        ck.resume()
    assert fingerprint(other, others) == before


def test_retention_keeps_what_it_says_and_frees_the_rest(tmp_path: Path) -> None:
    model, optimizers = build("sgd")
    keep = hf.Keep(last=2, every=4)
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizers, every=1, keep=keep, **EXACT
    ) as ck:
        train_steps(model, optimizers, range(10), after=ck.step)
    run = hf.open(tmp_path)
    assert run.steps == (1, 5, 9, 10)
    names = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.hf")}
    assert names == {name for name, _ in run.catalog.objects}
    assert len(list((tmp_path / "catalog").iterdir())) == 2
    for step in run.steps:
        run.read(step, "users.weight")


def test_bits_follow_expected_restores_and_fall_back(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    model, optimizers = build()

    def make() -> hf.Checkpointer:
        return hf.Checkpointer(
            tmp_path, model=model, optimizer=optimizers, expected_restores=1, events=seen.append
        )

    with make() as ck:
        ck.save().result()
    for step in range(1, 4):
        with make() as ck:
            ck.resume()
            ck.step()
            ck.save().result()
            info = hf.open(tmp_path).info(step)
            assert info.codec == ("adaptive2" if step <= 1 else "asym8")
    reasons = [e.reason for e in seen if isinstance(e, events.CodecChosen)]
    assert "1 expected restores" in reasons[0]
    assert "2 restores so far exceed the 1 expected" in reasons[-2]


def test_failure_estimate_gives_the_expected_restores(tmp_path: Path) -> None:
    model, optimizers = build()
    estimate = hf.FailureEstimate(training_h=24, nodes=3, failures_per_node_day=1.0)
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizers, expected_restores=estimate
    ) as ck:
        ck.save().result()
    assert hf.open(tmp_path).info(0).codec == "adaptive3"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "whole number"),
        ({"every": 2.5}, "whole number"),
        ({"strategy": "magic"}, "unknown strategy"),
        ({"codec": "int4"}, "codec"),
        ({"on_busy": "ignore"}, "on_busy"),
        ({"tracking": "none"}, "tracking"),
        ({"keep": 0}, "positive"),
        ({"expected_restores": -1}, "zero or more"),
        ({"speed": 9}, "unknown setting"),
        ({"reader": 5}, "state_dict"),
        ({"staging_bytes_max": 0}, "positive"),
    ],
)
def test_wrong_settings_get_a_clear_error(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    model, optimizers = build()
    with pytest.raises(hf.InvalidRequestError, match=message):
        hf.Checkpointer(tmp_path / "run", model=model, optimizer=optimizers, **settings)
    assert not (tmp_path / "run").exists()


def test_scheduler_and_rng_come_back(tmp_path: Path) -> None:
    model, optimizers = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[1], 3)
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizers, extras={"lr": scheduler}
    ) as ck:
        train_steps(model, optimizers, range(4), after=lambda: (ck.step(), scheduler.step()))
        ck.save().result()
        drawn = (torch.rand(3).tolist(), np.random.rand(), scheduler.get_last_lr())
        ck.restore(4)
        assert (torch.rand(3).tolist(), np.random.rand(), scheduler.get_last_lr()) == drawn


def test_events_tell_the_story_in_order(tmp_path: Path) -> None:
    model, optimizers = build()
    path = tmp_path / "log" / "events.jsonl"
    with hf.Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizers, every=2, events=path
    ) as ck:
        train_steps(model, optimizers, range(2), after=ck.step)
    kinds = [event.kind for event in events.read_events(path)]
    assert kinds[:2] == ["kernels_compiled", "run_opened"]
    order = ["codec_chosen", "save_started", "save_staged", "save_durable"]
    assert [kind for kind in kinds if kind in order] == order
