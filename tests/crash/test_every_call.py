"""Fail at the k-th storage call, for every k: what was committed stays, what was not never shows.

A crash ends the process there; an outage is an error that the training loop survives.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import holdfast as hf
from holdfast import events
from holdfast.storage import Storage, open_storage
from tests.conftest import fingerprint
from tests.crash.story import (
    Model,
    Plot,
    Recorder,
    assert_nothing_unreferenced,
    assert_recovers,
    oracle,
    train,
)
from tests.fault import Fault, FaultyStorage, SimulatedCrash, When

PLOTS = {
    "folder": Plot("adagrad", "one-shot", base_later="full", keep=1),
    "memory": Plot("sgd", "consecutive", base_later="intermittent", keep=2),
    "grid in a folder": Plot("sgd", *["consecutive"] * 2, 9, 0.3, 4, 5),
    "grid in memory": Plot("sgd", *["recovery-time"] * 2, 3, 0.0, 4, 5),
}

VERBS = {"create", "write", "close", "put_if_absent", "get", "get_into"}
VERBS |= {"size", "list", "delete", "clean"}


class Places:
    """Fresh storages of one kind, each removed when the next one is asked for."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind = kind
        self._folder = folder
        self._count = 0

    def fresh(self) -> Storage:
        """An empty storage."""
        self._count += 1
        if "memory" in self._kind:
            fsspec.filesystem("memory").store.clear()
            return open_storage(f"memory://crash-{self._count}")
        shutil.rmtree(self._folder / str(self._count - 1), ignore_errors=True)
        return open_storage(str(self._folder / str(self._count)))


@pytest.fixture(params=list(PLOTS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def places(kind: str, tmp_path: Path) -> Iterator[Places]:
    yield Places(kind, tmp_path)
    fsspec.filesystem("memory").store.clear()


def tell(storage: Storage, plot: Plot, on_durable: Callable[[int], None]) -> None:
    """The whole story; whatever fails, ends it."""
    for stop in (plot.first_steps, plot.last_step):
        model = plot.build()
        torch.manual_seed(99)
        ck = plot.checkpointer(storage, model, is_later=stop == plot.last_step)
        try:
            start = ck.resume()

            def after(ck: hf.Checkpointer = ck) -> None:
                ck.step()
                on_durable(plot.save(ck))

            train(model, range(start, stop), after)
        finally:
            with contextlib.suppress(SimulatedCrash):
                ck.close()


def count_calls(places: Places, plot: Plot) -> list[str]:
    faulty = FaultyStorage(places.fresh())
    tell(faulty, plot, lambda step: None)
    return faulty.calls


def test_the_story_has_every_kind_of_call(places: Places, kind: str) -> None:
    faulty = FaultyStorage(places.fresh())
    durable: list[int] = []
    tell(faulty, PLOTS[kind], durable.append)
    assert durable == list(range(1, PLOTS[kind].last_step + 1))
    verbs = {call.split()[0] for call in faulty.calls}
    assert verbs == VERBS
    deleted = {call.split()[1] for call in faulty.calls if call.startswith("delete objects")}
    if PLOTS[kind].extract is None:
        # Consecutive increments need their whole chain of rows; dense state goes with its
        # checkpoint.
        assert sum("/rows-" in name for name in deleted) == {"folder": 3, "memory": 0}[kind]
        assert any("/dense-" in name for name in deleted)
    else:
        kinds = {call.split("/")[2].split("-")[0] for call in faulty.calls if "create" in call}
        # With threshold zero nothing that is dead stays where it is.
        assert kinds == {"rows", "dense", "live", "extracted"} | (
            {"kills"} if PLOTS[kind].extract else set()
        )
        assert any("/rows-" in name for name in deleted)


def is_worth_it(label: str, when: When) -> bool:
    """Leave out what equals another case: after a call that the storage survives unchanged, and
    after a write, comes the next call; a torn call other than a write did nothing."""
    verb = label.split()[0]
    if when is When.TORN:
        return verb == "write"
    return when is When.BEFORE or verb in ("create", "close", "put_if_absent", "delete", "clean")


def cases(calls: list[str], when: When, plot: Plot, *, is_crash: bool) -> Iterator[tuple[int, str]]:
    """The calls at which to fail, numbered from 1.

    A story with a grid makes twice as many. There an object's second write or read between two
    commits is like its first, and a crash before a call leaves what one after the call before
    does, but for a commit.
    """
    commits, seen = 0, set()
    is_in_folder = plot == PLOTS["grid in a folder"]
    for at, label in enumerate(calls, start=1):
        is_new = (label, commits) not in seen
        seen.add((label, commits))
        is_commit = label.startswith("put_if_absent")
        commits += is_commit
        if not is_worth_it(label, when):
            continue
        if plot.extract is not None:
            is_repeated = is_crash and when is When.BEFORE and not is_commit
            # Errors take the same way from any storage; a folder's calls are slow.
            is_repeated |= is_in_folder and not is_crash and not is_worth_it(label, When.AFTER)
            if not is_new or is_repeated:
                continue
        yield at, label


@pytest.mark.parametrize("when", list(When), ids=lambda when: when.value)
def test_crash_at_every_call_leaves_the_last_commit(places: Places, kind: str, when: When) -> None:
    plot = PLOTS[kind]
    for at, label in cases(count_calls(places, plot), when, plot, is_crash=True):
        bare = places.fresh()
        recorder = Recorder(bare)
        durable: list[int] = []
        faulty = FaultyStorage(recorder, Fault(at, when))
        with contextlib.suppress(
            SimulatedCrash
        ):  # the end of a round that crashes is heard by none
            tell(faulty, plot, durable.append)
        assert faulty.has_crashed
        gc.collect(0)  # a dead process holds no lock on its unfinished files
        context = f"crash {when.value} call {at} ({label})"
        last = recorder.last_step
        assert not durable or (last is not None and last >= durable[-1]), context
        try:
            assert_recovers(bare, plot, last)
        except BaseException as error:
            error.add_note(context)
            raise


# An outage of a call that a save depends on must reach the training loop; the rest is housekeeping
# (reported as an event) or is settled by reading back.
_MUST_REPORT = ("create ", "write ", "close ", "get_into ", "size objects/")


class Survivor:
    """A training loop that catches storage errors, reports them, and goes on."""

    def __init__(self, storage: Storage, plot: Plot) -> None:
        self._storage = storage
        self._plot = plot
        self.errors: list[str] = []
        self.told: list[str] = []  # failures that cost space or speed, but no checkpoint

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.CollectionFailed | events.ExtractionFailed):
            self.told.append(event.error)

    def _open(self, model: Model, *, is_later: bool) -> tuple[hf.Checkpointer, int]:
        while True:
            try:
                ck = self._plot.checkpointer(
                    self._storage, model, is_later=is_later, events=self._hear
                )
            except hf.UnavailableError as error:
                self.errors.append(str(error))
                continue
            try:
                return ck, ck.resume()
            except hf.UnavailableError as error:
                self.errors.append(str(error))
                ck.close()

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except hf.UnavailableError as error:
            self.errors.append(str(error))

    def run(self) -> None:
        """The story; any save may fail once, and then the next one makes up for it."""
        for stop in (self._plot.first_steps, self._plot.last_step):
            model = self._plot.build()
            torch.manual_seed(99)
            ck, start = self._open(model, is_later=stop == self._plot.last_step)
            with ck:
                for step in range(start, stop):
                    train(model, range(step, step + 1), ck.step)
                    self._attempt(lambda: self._plot.save(ck))  # noqa: B023 - called at once
                if stop not in ck.all_steps():
                    self._attempt(lambda: self._plot.save(ck))  # noqa: B023
            assert fingerprint(*model) == oracle(self._plot)[stop]


def check_survived(survivor: Survivor, bare: Storage, plot: Plot, label: str) -> None:
    if label.startswith(_MUST_REPORT):
        assert survivor.errors or survivor.told
    assert_recovers(bare, plot, plot.last_step)


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER], ids=lambda when: when.value)
def test_outage_at_every_call_is_reported_and_the_next_save_is_whole(
    places: Places, kind: str, when: When
) -> None:
    plot = PLOTS[kind]
    for at, label in cases(count_calls(places, plot), when, plot, is_crash=False):
        bare = places.fresh()
        survivor = Survivor(FaultyStorage(bare, Fault.outage(at, when)), plot)
        try:
            survivor.run()
            check_survived(survivor, bare, plot, label)
        except BaseException as error:
            error.add_note(f"outage {when.value} call {at} ({label}); reported {survivor.errors}")
            raise
        assert len(survivor.errors) <= 1


class DoomedCommit:
    """A storage where one commit is carried out, but neither its answer nor a look at it arrives.

    The writer cannot know whether the commit happened.
    """

    def __init__(self, inner: Storage, *, at_commit: int) -> None:
        self._inner = inner
        self._countdown = at_commit
        self._is_deaf = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def put_if_absent(self, name: str, data: bytes) -> None:
        self._inner.put_if_absent(name, data)
        self._countdown -= 1
        if self._countdown == 0:
            self._is_deaf = True
            raise hf.UnavailableError("the answer was lost")

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        if self._is_deaf:
            self._is_deaf = False
            raise hf.UnavailableError("no answer")
        return self._inner.get(name, offset=offset, length=length)


@pytest.mark.parametrize("base", ["full", "one-shot", "consecutive", "intermittent"])
@pytest.mark.parametrize("then", ["save", "retry", "restore", "rewind", "resume"])
def test_commit_of_unknown_outcome_never_mixes_two_histories(
    tmp_path: Path, base: str, then: str
) -> None:
    plot = Plot("sgd", base, base_later=base, keep=9)
    model = plot.build()
    torch.manual_seed(99)
    bare = open_storage(str(tmp_path))
    with plot.checkpointer(DoomedCommit(bare, at_commit=3), model) as ck:  # type: ignore[arg-type]
        for step in range(2):
            train(model, range(step, step + 1), ck.step)
            ck.save().result()
        train(model, range(2, 3), ck.step)
        with pytest.raises(hf.UnavailableError, match="answer was lost"):
            ck.save().result()
        if then == "retry":
            with contextlib.suppress(hf.InvalidRequestError):  # it is saved already, after all
                ck.save().result()
        elif then == "restore":
            restored = ck.restore(ck.all_steps()[-1])
            if restored != ck.all_steps()[-1]:  # only now is it known that step 3 was committed
                ck.restore(restored, discard_later=True)
        elif then == "rewind":
            ck.restore(1, discard_later=True)
        elif then == "resume":
            assert ck.resume() in (2, 3)
        start = ck.current_step
        # Other data than the first time: a row of the abandoned future would show.
        seen = {start: fingerprint(*model)}
        for step in range(start, start + 4, 2):
            train(model, range(step + 50, step + 52), ck.step)
            ck.save().result()
            seen[step + 2] = fingerprint(*model)
        for step in sorted(set(ck.all_steps()) & set(seen), reverse=True):
            ck.restore(step)
            assert fingerprint(*model) == seen[step], step
        assert ck.all_steps()[-1] == start + 4


def test_failed_save_is_reported_at_the_next_step_which_still_counts(tmp_path: Path) -> None:
    plot = PLOTS["folder"]
    bare = open_storage(str(tmp_path))
    calls = FaultyStorage(bare)
    plot.checkpointer(calls, plot.build()).close()
    model = plot.build()
    torch.manual_seed(99)
    faulty = FaultyStorage(bare, Fault.outage(len(calls.calls) + 2))  # the first write
    with plot.checkpointer(faulty, model) as ck:
        train(model, range(1), ck.step)
        ck.save()
        while ck._saves.running is not None and not ck._saves.running.is_over:
            pass
        with pytest.raises(hf.UnavailableError, match="injected outage"):
            train(model, range(1, 2), ck.step)
        train(model, range(2, 3), ck.step)
        assert ck.current_step == 3
        assert fingerprint(*model) == oracle(plot)[3]
        ck.save().result()
    assert_recovers(bare, plot, 3)


def test_failed_save_is_reported_by_close(tmp_path: Path) -> None:
    plot = PLOTS["folder"]
    model = plot.build()
    faulty = FaultyStorage(open_storage(str(tmp_path)), Fault.outage(4))
    ck = plot.checkpointer(faulty, model)
    train(model, range(1), ck.step)
    ck.save()
    with pytest.raises(hf.UnavailableError, match="injected outage"):
        ck.close()
    ck.close()


def test_failed_commit_leaves_no_object_behind_after_the_next(tmp_path: Path) -> None:
    plot = PLOTS["folder"]
    model = plot.build()
    bare = open_storage(str(tmp_path))
    counting = FaultyStorage(bare)
    with plot.checkpointer(counting, model) as ck:
        train(model, range(1), ck.step)
        ck.save().result()
        train(model, range(1, 2), ck.step)
        calls = len(counting.calls)
        ck.save().result()
    second = counting.calls[calls:]
    commit = next(i for i, call in enumerate(second) if call.startswith("put_if_absent"))
    shutil.rmtree(tmp_path)
    model = plot.build()
    faulty = FaultyStorage(bare, Fault.outage(calls + commit + 1))
    with plot.checkpointer(faulty, model) as ck:
        train(model, range(1), ck.step)
        ck.save().result()
        train(model, range(1, 2), ck.step)
        with pytest.raises(hf.UnavailableError):
            ck.save().result()
        ck.save().result()
        assert_nothing_unreferenced(bare)
