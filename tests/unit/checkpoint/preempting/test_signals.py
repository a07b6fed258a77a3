"""Signals are heard, handed on to what was there before, and given back."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.checkpoint.preempting import signals
from holdfast.errors import InvalidRequestError

TERM = int(signal.SIGTERM)


class Saver:
    """A listener that notes what it hears."""

    def __init__(self, *, has_work: bool = True) -> None:
        self.has_work = has_work
        self.flags: list[int] = []
        self.awakened = threading.Event()

    def flag(self, signum: int) -> None:
        if signum not in self.flags:
            self.flags.append(signum)

    def awake(self) -> None:
        self.awakened.set()

    def holds(self, signum: int) -> bool:
        return self.has_work


@pytest.fixture
def ran() -> Iterator[list[int]]:
    """Signals that reached the handler from before us."""
    found: list[int] = []
    before = signal.signal(TERM, lambda signum, frame: found.append(signum))
    yield found
    signal.signal(TERM, before)
    assert not signals._watched.listeners


def test_a_signal_waits_for_its_listener_then_acts_and_all_is_as_before(ran: list[int]) -> None:
    before, saver = signal.getsignal(TERM), Saver()
    signals.listen(saver, (TERM,))
    try:
        signal.raise_signal(TERM)
        assert saver.flags == [TERM] and ran == []
        assert saver.awakened.wait(60)
        signals.act(saver, TERM)
        assert ran == [TERM]
        assert signal.getsignal(TERM) is before
    finally:
        signals.unlisten(saver)
    signal.raise_signal(TERM)
    assert ran == [TERM, TERM]


def test_a_second_signal_acts_at_once(ran: list[int]) -> None:
    saver = Saver()
    signals.listen(saver, (TERM,))
    signal.raise_signal(TERM)
    signal.raise_signal(TERM)
    assert ran == [TERM]
    signals.unlisten(saver)


def test_a_signal_that_finds_nothing_to_save_acts_at_once(ran: list[int]) -> None:
    saver = Saver(has_work=False)
    signals.listen(saver, (TERM,))
    signal.raise_signal(TERM)
    assert ran == [TERM] and saver.flags == []
    signals.unlisten(saver)


def test_the_last_of_several_listeners_lets_the_signal_act(ran: list[int]) -> None:
    first, second, idle = Saver(), Saver(), Saver(has_work=False)
    for one in (first, second, idle):
        signals.listen(one, (TERM,))
    signal.raise_signal(TERM)
    first.has_work = False
    signals.act(first, TERM)
    assert ran == []
    second.has_work = False
    signals.act(second, TERM)
    assert ran == [TERM]
    for one in (first, second, idle):
        signals.unlisten(one)


def test_listeners_that_were_forgotten_hold_nothing(ran: list[int]) -> None:
    signals.listen(Saver(), (TERM,))
    signal.raise_signal(TERM)
    assert ran == [TERM]
    saver = Saver()
    signals.listen(saver, (TERM,))
    signals.unlisten(saver)


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(TERM, signal.SIG_IGN)
    try:
        saver = Saver()
        signals.listen(saver, (TERM,))
        assert signal.getsignal(TERM) == signal.SIG_IGN
        signal.raise_signal(TERM)
        assert saver.flags == []
        signals.unlisten(saver)
        assert signal.getsignal(TERM) == signal.SIG_IGN
    finally:
        signal.signal(TERM, before)


def test_a_handler_that_came_later_and_does_not_call_ours_is_left_alone(ran: list[int]) -> None:
    saver, theirs = Saver(), []
    signals.listen(saver, (TERM,))

    def later(signum: int, frame: Any) -> None:
        theirs.append(signum)

    ours = signal.signal(TERM, later)
    signal.raise_signal(TERM)
    signals.wake()
    assert saver.awakened.wait(60)  # whatever the interpreter sent before is read by now
    assert theirs == [TERM] and saver.flags == [] and ran == []
    signals.unlisten(saver)
    assert signal.getsignal(TERM) is later
    # It may still call ours, which is not there any more.
    assert callable(ours)
    ours(TERM, None)
    assert ran == [TERM]


def test_a_handler_that_came_later_and_calls_ours_is_heard(ran: list[int]) -> None:
    saver, theirs = Saver(), []
    signals.listen(saver, (TERM,))

    def later(signum: int, frame: Any) -> None:
        theirs.append(signum)
        assert callable(ours)
        ours(signum, frame)

    ours = signal.signal(TERM, later)
    signal.raise_signal(TERM)
    assert theirs == [TERM] and saver.flags == [TERM] and ran == []
    signals.act(saver, TERM)
    assert ran == [TERM]
    assert signal.getsignal(TERM) is later
    signals.unlisten(saver)
    # One more listener after that: no handler calls itself.
    again = Saver()
    signals.listen(again, (TERM,))
    signal.raise_signal(TERM)
    assert again.flags == [TERM] and theirs == [TERM]
    signals.act(again, TERM)
    assert theirs == [TERM, TERM] and ran == [TERM, TERM]
    signals.unlisten(again)
    assert signal.getsignal(TERM) is later


def test_a_handler_that_came_later_decides_whether_the_process_ends() -> None:
    before = signal.signal(TERM, signal.SIG_DFL)
    try:
        for saver in (Saver(), Saver(has_work=False)):
            signals.listen(saver, (TERM,))
            ours = signal.getsignal(TERM)
            assert callable(ours)
            signal.signal(TERM, ours.__call__)  # some other object, that calls ours
            signal.raise_signal(TERM)
            assert saver.flags == [TERM] * saver.has_work
            signals.act(saver, TERM)
            signals.overdue(TERM)
            signal.raise_signal(TERM)
            signals.unlisten(saver)
            signal.signal(TERM, signal.SIG_DFL)
    finally:
        signal.signal(TERM, before)


def test_one_that_listens_again_comes_first_again(ran: list[int]) -> None:
    saver, theirs = Saver(), []
    signals.listen(saver, (TERM,))
    first = signal.getsignal(TERM)
    assert callable(first)

    def later(signum: int, frame: Any) -> None:
        theirs.append(signum)
        first(signum, frame)

    signal.signal(TERM, later)
    signals.listen(saver, (TERM,))
    signal.raise_signal(TERM)
    assert saver.flags == [TERM] and theirs == []
    signals.act(saver, TERM)
    assert theirs == [TERM] and ran == [TERM]
    signal.signal(TERM, first)  # they put back what they had found
    signals.unlisten(saver)
    signal.raise_signal(TERM)
    assert ran == [TERM, TERM]
    again = Saver()
    signals.listen(again, (TERM,))
    signals.unlisten(again)
    assert not isinstance(signal.getsignal(TERM), type(first))


def test_in_another_thread_no_handler_is_installed(ran: list[int]) -> None:
    before, saver = signal.getsignal(TERM), Saver()

    def listen() -> None:
        signals.listen(saver, (TERM,))
        assert signal.getsignal(TERM) is before
        signals.wake()
        assert saver.awakened.wait(60)
        signals.unlisten(saver)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    signal.raise_signal(TERM)
    assert ran == [TERM] and saver.flags == []


def test_one_that_leaves_in_another_thread_holds_nothing(ran: list[int]) -> None:
    saver = Saver()
    signals.listen(saver, (TERM,))
    thread = threading.Thread(target=signals.unlisten, args=(saver,))
    thread.start()
    thread.join()
    signal.raise_signal(TERM)
    assert ran == [TERM] and saver.flags == []
    again = Saver()
    signals.listen(again, (TERM,))
    signals.unlisten(again)


def test_a_signal_acts_in_the_main_thread_also_from_another(ran: list[int]) -> None:
    where: list[threading.Thread] = []
    signal.signal(TERM, lambda signum, frame: where.append(threading.current_thread()))
    saver = Saver()
    signals.listen(saver, (TERM,))
    signal.raise_signal(TERM)
    thread = threading.Thread(target=signals.overdue, args=(TERM,))
    thread.start()
    thread.join()
    assert where == [threading.main_thread()]
    signals.unlisten(saver)


def test_the_default_action_is_an_exit_that_runs_finally_blocks() -> None:
    before = signal.signal(TERM, signal.SIG_DFL)
    try:
        saver = Saver()
        signals.listen(saver, (TERM,))
        signal.raise_signal(TERM)
        with pytest.raises(SystemExit) as caught:
            signals.act(saver, TERM)
        assert caught.value.code == 128 + TERM
        assert signal.getsignal(TERM) == signal.SIG_DFL
        signals.unlisten(saver)
    finally:
        signal.signal(TERM, before)


def _wait_to_be_ended(ready: Any) -> None:
    ready.set()
    threading.Event().wait()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_ends_by_a_signal_and_does_not_tell_its_parent() -> None:
    before = signal.signal(TERM, signal.SIG_DFL)
    saver = Saver()
    signals.listen(saver, (TERM,))
    try:
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        child = context.Process(target=_wait_to_be_ended, args=(ready,))
        child.start()
        assert ready.wait(60)
        child.terminate()
        child.join(60)
        assert child.exitcode == -TERM
        signals.wake()
        assert saver.awakened.wait(60)
        assert saver.flags == []
    finally:
        signals.unlisten(saver)
        signal.signal(TERM, before)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_signal_to_a_child_that_is_just_forked_is_its_own() -> None:
    before, saver = signal.signal(TERM, signal.SIG_DFL), Saver()
    ended: list[int] = []
    before_child = signal.signal(signal.SIGCHLD, lambda signum, frame: ended.append(signum))
    signals.listen(saver, (TERM,))
    try:
        context = multiprocessing.get_context("fork")
        for _ in range(20):
            child = context.Process(target=threading.Event().wait, args=(60,))
            child.start()
            child.terminate()
            child.join(30)
            assert child.exitcode == -TERM
        assert not saver.flags and not saver.awakened.is_set()
        assert ended  # the interpreter sent word of these, which concern nobody here
        assert TERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signals.unlisten(saver)
        signal.signal(TERM, before)
        signal.signal(signal.SIGCHLD, before_child)


def test_the_wakeup_fd_of_somebody_else_stays(ran: list[int]) -> None:
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.set_wakeup_fd(mouth)
    try:
        saver = Saver()
        signals.listen(saver, (TERM,))
        signal.raise_signal(TERM)
        assert os.read(ear, 8) == bytes([TERM])
        assert saver.awakened.wait(60) and saver.flags == [TERM]
        signals.unlisten(saver)
    finally:
        assert signal.set_wakeup_fd(-1) == mouth
        os.close(ear)
        os.close(mouth)


@pytest.mark.parametrize("names", [("SIGNOPE",), ("SIGKILL",), ("SIGSTOP",), (9999,), ("term",)])
def test_what_is_no_signal_is_refused(names: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="no signal"):
        signals.as_signums(names)
