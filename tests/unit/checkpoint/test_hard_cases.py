"""Where checkpointers break: lost answers, late writers, interrupts, odd optimizers, exits."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import textwrap
import threading
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast import events
from holdfast.checkpoint import saver
from holdfast.checkpoint.saving.running import RunningSave
from holdfast.checkpoint.store import catalogs
from holdfast.storage import open_storage
from tests.conftest import TinyModel, fingerprint, make_optimizers, train_steps

EXACT = {"codec": "fp32"}


def build(kind: str = "sgd", seed: int = 3) -> tuple[TinyModel, Any]:
    torch.manual_seed(seed)
    model = TinyModel()
    return model, make_optimizers(model, kind)


class Wrapped:
    """A storage of which single calls are replaced."""

    def __init__(self, inner: Any, **replaced: Callable[..., Any]) -> None:
        self.inner = inner
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def many_tables(count: int, rows: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ModuleList(nn.Embedding(rows, 8, sparse=True) for _ in range(count))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_many_tables_of_half_a_buffer_each_do_not_block_each_other(tmp_path: Path) -> None:
    model, optimizer = many_tables(10, 100_000)
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizer, **EXACT) as ck:
        ck.save().result(timeout=60)
    assert hf.open(tmp_path).steps == (0,)


def test_staging_stays_bounded_with_many_small_tables(tmp_path: Path) -> None:
    model, optimizer = many_tables(60, 50_000)
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizer, staging_bytes_max=16 << 20, **EXACT
    ) as ck:
        tracemalloc.start()
        ck.save().result(timeout=60)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 60 << 20 < sum(p.nbytes for p in model.parameters())


def test_writer_that_slept_through_commits_of_another_changes_nothing(tmp_path: Path) -> None:
    models = [build(seed=1), build(seed=1)]
    first = hf.Checkpointer(tmp_path, model=models[0][0], optimizer=models[0][1], **EXACT)
    train_steps(*models[0], range(1), after=first.step)
    first.save().result()
    late = hf.Checkpointer(tmp_path, model=models[1][0], optimizer=models[1][1], **EXACT)
    for step in range(1, 5):
        train_steps(*models[0], range(step, step + 1), after=first.step)
        first.save().result()
    files = set(tmp_path.rglob("*.hf"))
    with pytest.raises(hf.ConflictError):
        late.resume()
    assert set(tmp_path.rglob("*.hf")) == files
    run = hf.open(tmp_path)
    assert run.steps == (1, 2, 3, 4, 5)
    for step in run.steps:
        run.read(step, "users.weight")
    assert hf.verify(tmp_path).is_sound
    late.step()
    with pytest.raises(hf.HoldfastError):
        late.save().result()
    train_steps(*models[0], range(5, 6), after=first.step)
    first.save().result()
    for ck in (first, late):
        ck.close()


def test_stale_commit_is_a_conflict_although_its_number_is_free(tmp_path: Path) -> None:
    model, optimizers = build()
    stale = hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT)
    stale.save().result()
    other, others = build()
    with hf.Checkpointer(tmp_path, model=other, optimizer=others, every=1, **EXACT) as ck:
        ck.resume()
        train_steps(other, others, range(4), after=ck.step)
    stale.step()
    with pytest.raises(hf.ConflictError):
        stale.save().result()
    assert hf.open(tmp_path).steps == (0, 1, 2, 3, 4)
    assert hf.verify(tmp_path).is_sound
    stale.close()


@pytest.mark.parametrize("where", ["start", "dense", "rows", "finish"])
def test_interrupted_save_loses_no_row_and_leaves_nothing_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model, optimizers = build()
    strategy = hf.Strategy("mine", base="consecutive", codec="fp32")
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, strategy=strategy) as ck:
        ck.save().result()
        train_steps(model, optimizers, range(2), after=ck.step)

        def interrupt(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        target = {
            "start": (threading.Thread, "start"),
            "dense": (saver, "take_dense"),
            "rows": (saver, "take_rows"),
            "finish": (RunningSave, "complete"),
        }[where]  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(*target, interrupt)
            with pytest.raises(KeyboardInterrupt):
                ck.save()
        train_steps(model, optimizers, range(2, 3), after=ck.step)
        expected = fingerprint(model, optimizers)
        ck.save().result(timeout=60)
        ck.restore(3)
        assert fingerprint(model, optimizers) == expected


def test_commit_whose_answer_was_lost_is_found_before_a_restore(tmp_path: Path) -> None:
    model, optimizers = build()
    inner = open_storage(str(tmp_path))
    state = {"is_broken": False}

    def put_if_absent(name: str, data: bytes) -> None:
        inner.put_if_absent(name, data)
        if state["is_broken"]:
            raise hf.UnavailableError("the answer was lost")

    def get(name: str, **kwargs: Any) -> bytes:
        if state["is_broken"] and name.startswith("catalog/"):
            raise hf.UnavailableError("unreachable")
        return inner.get(name, **kwargs)

    storage = Wrapped(inner, put_if_absent=put_if_absent, get=get)
    with hf.Checkpointer(storage, model=model, optimizer=optimizers, **EXACT) as ck:  # type: ignore[arg-type]
        train_steps(model, optimizers, range(1), after=ck.step)
        ck.save().result()
        train_steps(model, optimizers, range(1, 2), after=ck.step)
        state["is_broken"] = True
        with pytest.raises(hf.UnavailableError):
            ck.save().result()
        state["is_broken"] = False
        ck.restore(1)
        assert ck.all_steps() == (1, 2)
        train_steps(model, optimizers, range(1, 2), after=ck.step)
        with pytest.raises(hf.InvalidRequestError, match="discard_later"):
            ck.save()
        ck.restore(1, discard_later=True)
        train_steps(model, optimizers, range(1, 4), after=ck.step)
        expected = fingerprint(model, optimizers)
        ck.save().result()
        ck.restore(4)
        assert fingerprint(model, optimizers) == expected
        assert ck.all_steps() == (1, 4)


@pytest.mark.parametrize("ending", ["", "raise RuntimeError('the loop failed')"])
def test_process_that_ends_without_close_still_stores_its_last_checkpoint(
    tmp_path: Path, ending: str
) -> None:
    script = f"""
        import torch, holdfast as hf
        model = torch.nn.Embedding(400_000, 16, sparse=True)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        ck = hf.Checkpointer({str(tmp_path)!r}, model=model, optimizer=opt, every=1)
        ck.resume()
        ck.step()
        {ending}
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=120
    )
    assert hf.open(tmp_path).steps == (1,)
    assert hf.verify(tmp_path).is_sound


def test_reported_failure_neither_loses_a_step_nor_starves_the_reader(tmp_path: Path) -> None:
    model, optimizers = build()
    inner = open_storage(str(tmp_path))
    state = {"is_broken": False}

    def create(name: str) -> Any:
        if state["is_broken"]:
            raise hf.UnavailableError("disk full")
        return inner.create(name)

    grants: list[int] = []

    class Reader:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

        def grant(self, batches: int) -> None:
            grants.append(batches)

    storage = Wrapped(inner, create=create)
    with hf.Checkpointer(
        storage, model=model, optimizer=optimizers, reader=Reader(), every=2, **EXACT
    ) as ck:  # type: ignore[arg-type]
        failures = 0
        for step in range(8):
            state["is_broken"] = step in (3, 4)

            def count() -> None:
                nonlocal failures
                try:
                    ck.step()
                except hf.UnavailableError:
                    failures += 1

            train_steps(model, optimizers, range(step, step + 1), after=count)
            if ck._saves.running is not None:
                ck._saves.running.join()
        assert failures == 1
        assert ck.current_step == 8
        assert grants == [2] * 5
        expected = fingerprint(model, optimizers)
        ck.wait()
        assert ck.all_steps() == (2, 6, 8)
        ck.restore(8)
        assert fingerprint(model, optimizers) == expected


def test_row_state_of_any_shape_comes_back_in_its_shape(tmp_path: Path) -> None:
    model = nn.Embedding(64, 6)
    optimizer = torch.optim.Adafactor(model.parameters())
    settings: dict[str, Any] = {"tracking": "hash", **EXACT}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, row: int) -> None:
        optimizer.zero_grad()
        model(torch.tensor([row])).pow(2).sum().backward()
        optimizer.step()

    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizer, **settings) as ck:
        step(model, optimizer, 5)
        optimizer.state[model.weight]["cube"] = torch.rand(64, 2, 3)
        ck.step()
        ck.save().result()
    expected = fingerprint(model, [optimizer])
    fresh = nn.Embedding(64, 6)
    other = torch.optim.Adafactor(fresh.parameters())
    with hf.Checkpointer(tmp_path, model=fresh, optimizer=other, **settings) as ck:
        assert ck.resume() == 1
        assert fingerprint(fresh, [other]) == expected
        assert other.state[fresh.weight]["cube"].shape == (64, 2, 3)
        step(model, optimizer, 9)
        step(fresh, other, 9)
        assert fingerprint(fresh, [other]) == fingerprint(model, [optimizer])


def test_table_in_two_optimizers_is_refused(tmp_path: Path) -> None:
    model = nn.Embedding(10, 2, sparse=True)
    both = [torch.optim.SGD(model.parameters(), lr=1), torch.optim.Adagrad(model.parameters())]
    with pytest.raises(hf.InvalidRequestError, match="two optimizers"):
        hf.Checkpointer(tmp_path, model=model, optimizer=both)


def test_module_that_remaps_its_ids_is_tracked(tmp_path: Path) -> None:
    class Hashed(nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input % self.num_embeddings)

    model = Hashed(10, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizer, **EXACT) as ck:
        ck.save().result()
        model(torch.tensor([13])).sum().backward()
        optimizer.step()
        ck.step()
        assert ck.save().result().rows == 1
        assert np.array_equal(
            hf.open(tmp_path).read(1, "weight", rows=[3]).weight[0], model.weight[3].detach()
        )


def test_full_checkpoints_need_no_tracking(tmp_path: Path) -> None:
    model, optimizers = TinyModel(sparse=False), None
    optimizers = make_optimizers(model, "adam")
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, strategy="full") as ck:
        train_steps(model, optimizers, range(2), after=ck.step)
        expected = fingerprint(model, optimizers)
        ck.save().result()
        ck.restore(2)
        assert fingerprint(model, optimizers) == expected


def test_weights_loaded_after_construction_are_in_the_first_base(tmp_path: Path) -> None:
    model, optimizers = build()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT) as ck:
        with torch.no_grad():
            model.users.weight.fill_(0.25)
        ck.save().result()
    assert np.all(hf.open(tmp_path).read(0, "users.weight").weight == 0.25)


def test_marking_by_hand_takes_row_ids_and_nothing_else(tmp_path: Path) -> None:
    model, optimizers = build()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers) as ck:
        ck.mark("users.weight", torch.tensor([[1], [2]]))
        for wrong in (torch.ones(200, dtype=torch.bool), [0.5], [200], [-1]):
            with pytest.raises(hf.InvalidRequestError):
                ck.mark("users.weight", wrong)  # type: ignore[arg-type]


def test_failed_rewind_drops_nothing(tmp_path: Path) -> None:
    model, optimizers = build()
    inner = open_storage(str(tmp_path))
    state = {"is_broken": False}

    def create(name: str) -> Any:
        if state["is_broken"]:
            raise hf.UnavailableError("disk full")
        return inner.create(name)

    storage = Wrapped(inner, create=create)
    with hf.Checkpointer(storage, model=model, optimizer=optimizers, every=1, **EXACT) as ck:  # type: ignore[arg-type]
        train_steps(model, optimizers, range(3), after=ck.step)
        ck.restore(1, discard_later=True)
        state["is_broken"] = True
        train_steps(model, optimizers, range(1, 2), after=ck.step)
        with pytest.raises(hf.UnavailableError):
            ck.wait()
        assert ck.all_steps() == hf.open(tmp_path).steps == (1, 2, 3)
        state["is_broken"] = False
        ck.restore(3)


def test_saving_a_step_twice_returns_its_save(tmp_path: Path) -> None:
    model, optimizers = build()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, every=1) as ck:
        train_steps(model, optimizers, range(1))
        first = ck.step()
        assert ck.save() is first
        assert ck.save().result().step == 1


def test_step_reached_again_after_going_back_is_saved_again(tmp_path: Path) -> None:
    model, optimizers = build()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, every=2, **EXACT) as ck:
        train_steps(model, optimizers, range(4), after=ck.step)
        ck.restore(2, discard_later=True)
        train_steps(model, optimizers, range(10, 12), after=ck.step)
        ck.wait()
        expected = fingerprint(model, optimizers)
        ck.restore(4)
        assert fingerprint(model, optimizers) == expected


def test_resume_while_a_save_runs_loads_that_save(tmp_path: Path) -> None:
    model, optimizers = build()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT) as ck:
        ck.step()
        ck.save().result()
        ck.step()
        ck.save()
        assert ck.resume() == 2


def test_whatever_collection_raises_the_commit_stands(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    model, optimizers = build()
    inner = open_storage(str(tmp_path))

    def delete(name: str) -> None:
        raise RuntimeError("no")

    storage = Wrapped(inner, delete=delete)
    with hf.Checkpointer(
        storage, model=model, optimizer=optimizers, every=1, keep=1, events=seen.append, **EXACT
    ) as ck:  # type: ignore[arg-type]
        train_steps(model, optimizers, range(3), after=ck.step)
    assert hf.open(tmp_path).steps == (3,)
    assert any(isinstance(event, events.CollectionFailed) for event in seen)
    model, optimizers = build()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT) as ck:
        ck.resume()
    names = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.hf")}
    assert names == {name for name, _ in hf.open(tmp_path).catalog.objects}


def test_reader_that_fails_is_a_failed_save_not_a_cancelled_one(tmp_path: Path) -> None:
    seen: list[events.Event] = []

    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("reader gone")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    model, optimizers = build()
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizers, reader=Broken(), events=seen.append,
        save_last=False,
    ) as ck:  # fmt: skip
        with pytest.raises(RuntimeError, match="reader gone"):
            ck.save()
        ck.step()
    kinds = [event.kind for event in seen]
    assert "save_failed" in kinds and "save_cancelled" not in kinds


def test_both_errors_are_told_when_the_loop_and_the_last_save_fail(tmp_path: Path) -> None:
    def create(name: str) -> Any:
        raise hf.UnavailableError("disk full")

    model, optimizers = build()
    storage = Wrapped(open_storage(str(tmp_path)), create=create)
    with (
        pytest.raises(RuntimeError, match="loop") as caught,
        hf.Checkpointer(storage, model=model, optimizer=optimizers) as ck,  # type: ignore[arg-type]
    ):
        ck.save()
        raise RuntimeError("the loop failed")
    assert "disk full" in "".join(caught.value.__notes__)


def test_catalog_that_lacks_rows_is_refused(tmp_path: Path) -> None:
    model, optimizers = build()
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, **EXACT) as ck:
        ck.save().result()
    storage = open_storage(str(tmp_path))
    lying = catalogs.load_last(storage)
    assert lying is not None
    lying = dataclasses.replace(lying, number=lying.number + 1, segments=lying.segments[1:])
    storage.put_if_absent(catalogs.name_of(lying.number), catalogs.to_bytes(lying))
    with pytest.raises(hf.DataLossError, match=r"users\.weight"):
        hf.open(tmp_path).read(0, "users.weight")
    assert not hf.verify(tmp_path).is_sound


def test_sink_may_emit_and_may_wait_for_the_save(tmp_path: Path) -> None:
    model, optimizers = build()
    holder: list[hf.Checkpointer] = []

    def sink(event: events.Event) -> None:
        if isinstance(event, events.SaveStaged):
            holder[0].wait()

    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizers, events=sink) as ck:
        holder.append(ck)
        ck.save().result(timeout=60)


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_a_default_device_of_the_program_is_not_that_of_the_checkpointer(
    tmp_path: Path, kind: str
) -> None:
    """Of ``meta``, tensors hold nothing: what is made there by mistake cannot be read."""

    def build_on_host() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        with torch.device("cpu"):
            model = nn.Embedding(50, 4, sparse=kind == "momentum")
        made = {
            "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "adam": lambda: torch.optim.Adam(model.parameters()),
        }
        return model, made[kind]()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.device("cpu"):
            optimizer.zero_grad()
            model(torch.randint(0, 50, (8,))).square().sum().backward()
            optimizer.step()

    torch.set_default_device("meta")
    try:
        model, optimizer = build_on_host()
        with hf.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as ck:
            for _ in ck.epochs([1, 2, 3], 2):
                step(model, optimizer)
                ck.step()
                ck.save().result()
        other, again = build_on_host()
        with hf.Checkpointer(tmp_path / "run", model=other, optimizer=again) as ck:
            assert ck.resume() == 6
        for one in (model, other):
            torch.manual_seed(7)
            step(one, optimizer if one is model else again)
    finally:
        torch.set_default_device(None)
    assert torch.equal(model.weight, other.weight)


def test_a_scheduler_comes_back_with_containers_of_the_kinds_it_had(tmp_path: Path) -> None:
    def begin() -> tuple[Any, Any, dict[str, Any]]:
        model = nn.Embedding(50, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedules = torch.optim.lr_scheduler
        steps = schedules.MultiStepLR(optimizer, [2, 4])
        chained = schedules.ChainedScheduler([schedules.MultiStepLR(optimizer, [3])])
        return model, optimizer, {"steps": steps, "chained": chained}

    model, optimizer, extras = begin()
    settings = {"model": model, "optimizer": optimizer, "extras": extras}
    with hf.Checkpointer(tmp_path / "run", **settings) as ck:
        for _ in range(3):
            optimizer.step()
            for scheduler in extras.values():
                scheduler.step()
            ck.step()
    model, optimizer, again = begin()
    settings = {"model": model, "optimizer": optimizer, "extras": again}
    with hf.Checkpointer(tmp_path / "run", **settings) as ck:
        assert ck.resume() == 3
    for scheduler in (extras["steps"], again["steps"]):
        assert isinstance(scheduler.milestones, Counter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's: the argument is deprecated
            scheduler.step(4)  # counts the elements of its milestones
    assert extras["steps"].get_last_lr() == again["steps"].get_last_lr()


@pytest.mark.parametrize("is_given", [False, True])
def test_a_scheduler_that_does_not_go_along_is_told(tmp_path: Path, is_given: bool) -> None:
    model = nn.Embedding(50, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    extras = {"scaler": torch.amp.GradScaler("cpu"), "rng": np.random.default_rng()}
    extras |= {"scheduler": scheduler} if is_given else {}
    told: list[events.Event] = []
    settings = {"optimizer": optimizer, "extras": extras, "events": told.append}
    expected = pytest.warns(hf.HoldfastWarning, match="a scheduler changes the learning rate")
    with (
        contextlib.nullcontext() if is_given else expected,
        hf.Checkpointer(tmp_path / "run", model=model, **settings) as ck,
    ):
        for _ in range(3):
            optimizer.step()
            scheduler.step()
            ck.step()
            ck.save().result()
    assert sum(isinstance(one, events.ReaderNotice) for one in told) == (not is_given)
