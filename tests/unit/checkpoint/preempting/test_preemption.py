"""A notice becomes a checkpoint within a deadline: one process, with handlers of our own."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from holdfast import events
from holdfast.storage import open_storage
from tests.conftest import TinyModel, fingerprint, make_optimizers, train_steps
from tests.crash.held_up import HeldUpStorage

TERM = int(signal.SIGTERM)


class Run:
    """A training that can be told to do things in mid-step."""

    def __init__(self, url: Path, **settings: Any) -> None:
        torch.manual_seed(3)
        self.model = TinyModel()
        self.optimizers = make_optimizers(self.model, "adagrad")
        torch.manual_seed(99)
        self.seen: list[events.Event] = []
        self.states: dict[int, dict[str, bytes]] = {}
        self.storage = HeldUpStorage(open_storage(str(url)))
        settings = {"codec": "fp32", "events": self.seen.append, **settings}
        self.ck = hf.Checkpointer(
            self.storage, model=self.model, optimizer=self.optimizers, **settings
        )

    def train(self, steps: int, *, in_step: dict[int, Callable[[], object]] | None = None) -> None:
        """So many steps more; what to do in the middle of some of them, by number."""
        first = self.ck.current_step

        def after() -> None:
            step = self.ck.current_step + 1
            self.states[step] = fingerprint(self.model, self.optimizers)
            (in_step or {}).get(step, lambda: None)()
            self.ck.step()

        train_steps(self.model, self.optimizers, range(first, first + steps), after=after)

    @property
    def answers(self) -> list[events.Preempted]:
        return [event for event in self.seen if isinstance(event, events.Preempted)]

    def saves(self) -> list[int]:
        return [event.step for event in self.seen if isinstance(event, events.SaveStarted)]


def check_exact(url: Path, run: Run, step: int) -> None:
    """A new process would find that step, to the bit."""
    torch.manual_seed(1)
    model = TinyModel()
    optimizers = make_optimizers(model, "adagrad")
    settings: dict[str, Any] = {"codec": "fp32", "save_last": False}
    with hf.Checkpointer(url, model=model, optimizer=optimizers, **settings) as ck:
        assert ck.resume() == step
        assert fingerprint(model, optimizers) == run.states[step]


@pytest.fixture
def ran() -> Iterator[list[int]]:
    """Signals that reached the handler from before us."""
    found: list[int] = []
    before = signal.signal(TERM, lambda signum, frame: found.append(signum))
    yield found
    signal.signal(TERM, before)


def term() -> None:
    signal.raise_signal(TERM)


def test_a_signal_in_mid_step_saves_that_step_then_the_handler_from_before_runs(
    tmp_path: Path, ran: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, every=10, save_last=False)
    with run.ck as ck:
        run.train(13, in_step={13: lambda: (term(), ck.is_preempted and pytest.fail("too early"))})
        assert ran == [TERM] and ck.is_preempted
        assert ck.all_steps() == (10, 13)
        (answer,) = run.answers
        assert (answer.step, answer.is_saved, answer.reason) == (13, True, "SIGTERM")
        assert "holdfast: SIGTERM: step 13 is saved" in capfd.readouterr().err
        run.train(3)  # the handler from before let training go on
        assert len(run.answers) == 1 and run.saves() == [10, 13]
    check_exact(tmp_path, run, 13)


def test_a_notice_saves_and_training_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path, save_last=False)
    with run.ck as ck:
        assert not ck.is_preempted
        run.train(4, in_step={3: ck.preempt})
        assert ck.is_preempted and ck.all_steps() == (3,)
        (answer,) = run.answers
        assert (answer.step, answer.is_saved, answer.reason) == (3, True, "ck.preempt()")
        run.train(2, in_step={6: lambda: (ck.preempt(), ck.preempt(5.0))})
        assert run.saves() == [3, 6] and len(run.answers) == 2
    check_exact(tmp_path, run, 6)


def test_a_notice_may_come_from_another_thread(tmp_path: Path) -> None:
    run = Run(tmp_path, save_last=False)

    def notice() -> None:
        thread = threading.Thread(target=run.ck.preempt)
        thread.start()
        thread.join()

    with run.ck:
        run.train(2, in_step={2: notice})
    check_exact(tmp_path, run, 2)


def test_a_notice_may_come_in_a_signal_handler(tmp_path: Path) -> None:
    run = Run(tmp_path, save_last=False)
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: run.ck.preempt())
    try:
        with run.ck:
            run.train(3, in_step={2: lambda: signal.raise_signal(signal.SIGUSR1)})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert [answer.step for answer in run.answers] == [2]


def test_other_signals_can_be_named(tmp_path: Path) -> None:
    found: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: found.append(signum))
    term_before = signal.getsignal(TERM)
    try:
        run = Run(tmp_path, preempt_signals=("SIGUSR1",), save_last=False)
        with run.ck:
            assert signal.getsignal(TERM) is term_before
            run.train(3, in_step={2: lambda: signal.raise_signal(signal.SIGUSR1)})
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [signal.SIGUSR1]
    assert [(answer.step, answer.reason) for answer in run.answers] == [(2, "SIGUSR1")]


def test_no_signals_are_handled_where_none_are_named(tmp_path: Path, ran: list[int]) -> None:
    before = signal.getsignal(TERM)
    run = Run(tmp_path, preempt_signals=(), save_last=False)
    with run.ck as ck:
        assert signal.getsignal(TERM) is before
        run.train(2, in_step={1: term})
        assert ran == [TERM] and not run.answers
        ck.preempt()  # still heard
        run.train(1)
        assert [answer.step for answer in run.answers] == [3]


@pytest.mark.parametrize("is_due", [False, True])
def test_a_step_is_not_saved_twice(tmp_path: Path, is_due: bool) -> None:
    run = Run(tmp_path, every=3 if is_due else None)
    with run.ck as ck:
        run.train(3, in_step={3: ck.preempt})
        ck.save()
    assert run.saves() == [3]


def test_a_save_that_runs_is_waited_for_not_cancelled(tmp_path: Path) -> None:
    run = Run(tmp_path, on_busy="cancel", save_last=False)
    with run.ck as ck:
        run.train(2)
        run.storage.hold()
        ck.save()

        def notice() -> None:
            ck.preempt()
            assert run.storage.is_held()
            threading.Timer(0.05, run.storage.let_go).start()

        run.train(1, in_step={3: notice})
        assert ck.all_steps() == (2, 3)
    assert not [event for event in run.seen if isinstance(event, events.SaveCancelled)]


def test_a_save_that_failed_before_is_made_up_for(tmp_path: Path) -> None:
    run = Run(tmp_path, save_last=False)
    with run.ck as ck:
        run.train(2)
        run.storage.fail_next()
        save = ck.save()
        while not save.done():
            time.sleep(0.01)
        run.train(1, in_step={3: ck.preempt})
        assert [(answer.step, answer.is_saved) for answer in run.answers] == [(3, True)]
    check_exact(tmp_path, run, 3)


def test_a_save_that_fails_is_told_and_the_signal_acts(tmp_path: Path, ran: list[int]) -> None:
    run = Run(tmp_path, save_last=False)
    with run.ck:
        run.train(1)
        run.storage.fail_next()
        run.train(1, in_step={2: term})
        (answer,) = run.answers
        assert not answer.is_saved and "no room" in answer.reason
        assert ran == [TERM]


def test_a_notice_whose_save_fails_raises_as_any_save(tmp_path: Path) -> None:
    run = Run(tmp_path, save_last=False)
    with run.ck as ck:
        run.storage.fail_next()
        with pytest.raises(hf.UnavailableError, match="no room"):
            run.train(1, in_step={1: ck.preempt})
        assert [answer.is_saved for answer in run.answers] == [False]
        run.train(1)


def test_a_storage_that_hangs_keeps_the_process_no_longer_than_the_deadline(
    tmp_path: Path, ran: list[int]
) -> None:
    run = Run(tmp_path, preempt_deadline_s=0.05, save_last=False)
    with run.ck as ck:
        run.train(1)
        ck.save().result()
        run.storage.hold()
        run.train(1, in_step={2: term})
        assert ran == [TERM] and ck.is_preempted
        (answer,) = run.answers
        assert (answer.step, answer.is_saved) == (2, False)
        assert "durable" in answer.reason
        run.storage.let_go()


def test_a_step_that_never_ends_keeps_the_process_no_longer_than_the_deadline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = threading.Event()
    before = signal.signal(TERM, lambda signum, frame: ended.set())
    try:
        run = Run(tmp_path, preempt_deadline_s=0.05, save_last=False)
        with run.ck:
            run.train(2, in_step={2: lambda: (term(), ended.wait())})
            (answer,) = run.answers
            assert (answer.step, answer.is_saved) == (1, False)
            assert "step 1 is not saved" in capfd.readouterr().err
    finally:
        signal.signal(TERM, before)


def test_a_step_that_ends_after_the_deadline_of_a_notice_is_saved_all_the_same(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, save_last=False)

    def wait_for_the_deadline() -> None:
        run.ck.preempt(deadline_s=0.01)
        while not run.answers:
            threading.Event().wait(0.01)

    with run.ck as ck:
        run.train(2, in_step={2: wait_for_the_deadline})
        assert [answer.is_saved for answer in run.answers] == [False]
        ck.wait()
        assert ck.all_steps() == (2,) and ck.is_preempted


def test_a_signal_before_the_first_step_acts_at_once(tmp_path: Path, ran: list[int]) -> None:
    run = Run(tmp_path)
    with run.ck:
        term()
        assert ran == [TERM]
    assert not run.answers


@pytest.mark.parametrize("save_last", [True, False])
def test_a_signal_after_the_last_step_acts_at_the_end(
    tmp_path: Path, ran: list[int], save_last: bool
) -> None:
    run = Run(tmp_path, save_last=save_last)
    with run.ck:
        run.train(2)
        term()
        assert ran == []
    assert ran == [TERM]
    assert [(answer.step, answer.is_saved) for answer in run.answers] == [(2, save_last)]


def test_without_a_handler_from_before_the_process_exits_with_the_usual_code(
    tmp_path: Path,
) -> None:
    before = signal.signal(TERM, signal.SIG_DFL)
    try:
        run = Run(tmp_path)
        with pytest.raises(SystemExit) as caught, run.ck:
            run.train(5, in_step={3: term})
        assert caught.value.code == 143
        assert signal.getsignal(TERM) == signal.SIG_DFL
        run = Run(tmp_path / "other")
        with pytest.raises(SystemExit), run.ck:
            run.train(1)
            term()
    finally:
        signal.signal(TERM, before)
    assert hf.open(tmp_path).steps == (3,)
    assert hf.open(tmp_path / "other").steps == (1,)


def test_two_models_are_both_saved_before_the_signal_acts(tmp_path: Path, ran: list[int]) -> None:
    first, second = Run(tmp_path / "a"), Run(tmp_path / "b")
    with first.ck, second.ck:
        first.train(2)
        second.train(1)
        first.train(1, in_step={3: term})
        assert ran == [] and first.ck.is_preempted
        first.train(1)
        second.train(1)
        assert ran == [TERM]
    assert [answer.step for answer in first.answers] == [3]
    assert [answer.step for answer in second.answers] == [2]


def test_training_in_another_thread_is_saved_too(tmp_path: Path, ran: list[int]) -> None:
    run = Run(tmp_path, save_last=False)
    with run.ck as ck:
        thread = threading.Thread(target=run.train, args=(2,))
        thread.start()
        thread.join()
        term()
        thread = threading.Thread(target=run.train, args=(1,))
        thread.start()
        thread.join()
        assert ck.all_steps() == (3,) and ran == [TERM]


def test_a_checkpointer_made_in_another_thread_leaves_signals_alone(
    tmp_path: Path, ran: list[int]
) -> None:
    before = signal.getsignal(TERM)

    def train() -> None:
        run = Run(tmp_path, save_last=False)
        with run.ck as ck:
            assert signal.getsignal(TERM) is before
            run.train(2, in_step={2: ck.preempt})
            assert [answer.step for answer in run.answers] == [2]

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert hf.open(tmp_path).steps == (2,)
    term()
    assert ran == [TERM]


def test_no_thread_and_no_handler_is_left_behind(tmp_path: Path, ran: list[int]) -> None:
    before, threads = signal.getsignal(TERM), threading.active_count()
    run = Run(tmp_path)
    with run.ck as ck:
        run.train(2, in_step={1: ck.preempt})
    assert signal.getsignal(TERM) is before
    assert threading.active_count() <= threads


@pytest.mark.parametrize(
    "wrong", [
        {"preempt_deadline_s": 0}, {"preempt_deadline_s": float("nan")},
        {"preempt_signals": ("SIGNOPE",)}, {"preempt_signals": ("SIGKILL",)},
    ],
)  # fmt: skip
def test_nonsense_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(hf.InvalidRequestError):
        Run(tmp_path, **wrong)


def test_a_notice_without_time_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.ck as ck:
        with pytest.raises(hf.InvalidRequestError):
            ck.preempt(deadline_s=-1)
        run.train(1)
    with pytest.raises(hf.InvalidRequestError, match="closed"):
        ck.preempt()
