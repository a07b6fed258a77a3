"""Signals that end a process, heard in time to save first; one place for the whole process.

    signal -> handler: flags only -> listeners save -> the last one lets the signal act
           -> wakeup fd -> watching thread: hears of it even while the main thread is in C code

A signal *acts* as it would have without us: the handler that was there before runs, or the process
ends. By default ``SystemExit(128 + signal)`` is raised where the last listener is done, so that
``finally`` blocks run and the exit code is what a shell reports for that signal (143 for SIGTERM).

Invariants:
- The handler takes no lock: it asks listeners what they hold, flags them, and sends one byte.
- A signal that is ignored (``SIG_IGN``) or handled outside of Python is left alone.
- A handler that somebody installs later stays, and decides whether the process ends. If it calls
  ours, we save; if it does not, we do not even hear.
- A second signal acts at once. So does one that finds no listener with something to save.
- When the last listener leaves, the handlers from before are back. A forked child has them at once.

Not here: what is saved, and by when (preemption.py).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

from holdfast.errors import InvalidRequestError

_Previous = Callable[[int, FrameType | None], Any] | int | signal.Handlers
_LOOK = 0  # what the handler sends to the watching thread; no signal has this number
_STUCK_S = 1.0  # for the main thread to let a signal act; after that it is stuck in C code


class Listener(Protocol):
    """Who saves before a signal acts."""

    def flag(self, signum: int) -> None:
        """There was a signal. Called in the handler: sets attributes and nothing else."""
        ...

    def awake(self) -> None:
        """A flag may have been set. Called on the watching thread."""
        ...

    def holds(self, signum: int) -> bool:
        """Whether this one has something to save before the signal may act."""
        ...


class _Watched:
    """What one process listens to."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.listeners: tuple[tuple[weakref.ref[Listener], frozenset[int]], ...] = ()
        self.handlers: dict[int, _Handler] = {}
        self.heard: dict[int, int] = {}  # signals that reached the watching thread
        self.sockets: tuple[socket.socket, socket.socket] | None = None
        self.has_wakeup = False
        self.thread: threading.Thread | None = None

    def who(self, signum: int) -> list[Listener]:
        """The listeners to a signal that are alive."""
        return [
            found
            for reference, signums in self.listeners
            if signum in signums and (found := reference()) is not None
        ]


_watched = _Watched()
_lock = threading.RLock()  # never taken by the handler
_forking = threading.local()  # the signals that a thread had blocked before it forked


def as_signums(names: Sequence[str | int]) -> tuple[int, ...]:
    """Signals by their names or numbers.

    >>> as_signums(("SIGTERM",)) == (int(signal.SIGTERM),)
    True

    Raises:
        InvalidRequestError: there is no such signal, or it cannot be handled.
    """
    found = []
    for name in (names,) if isinstance(names, str) else names:
        try:
            number = signal.Signals[name] if isinstance(name, str) else signal.Signals(name)
        except (KeyError, ValueError) as error:
            raise _refusal(name) from error
        if number.name in ("SIGKILL", "SIGSTOP"):
            raise _refusal(name)
        found.append(int(number))
    return tuple(found)


def _refusal(name: object) -> InvalidRequestError:
    return InvalidRequestError(
        "no signal that can be handled",
        signal=name,
        todo='name signals as preempt_signals=("SIGTERM", "SIGUSR1"), or () for none',
    )


def check_deadline(deadline_s: float) -> None:
    """Refuse what is no deadline.

    Raises:
        InvalidRequestError: it is not a positive number.
    """
    if not deadline_s > 0:
        raise InvalidRequestError("a deadline to save by is a positive time", seconds=deadline_s)


def listen(listener: Listener, signums: Sequence[int]) -> None:
    """Hear of these signals; again, to come before handlers that were installed since. In another
    thread than the main one only ``wake`` is heard."""
    with _lock:
        _start_watching()
        entry = (weakref.ref(listener), frozenset(signums))
        others = tuple(e for e in _watched.listeners if e[0]() not in (None, listener))
        _watched.listeners = (*others, entry)
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in signums:
            _install(signum)
        if _watched.handlers:
            _take_wakeup()


def unlisten(listener: Listener) -> None:
    """Hear no more; the last one puts back what was there before."""
    with _lock:
        left = tuple(e for e in _watched.listeners if e[0]() not in (None, listener))
        _watched.listeners = left
        if left:
            return
        if threading.current_thread() is threading.main_thread():
            for handler in list(_watched.handlers.values()):
                handler.remove()
        stopping = _stop_watching()
    if stopping is not None:
        stopping.join()


def wake() -> None:
    """Have every listener look at its flags, on the watching thread; may be called anywhere."""
    sockets = _watched.sockets
    if sockets is not None:
        with contextlib.suppress(OSError):  # full: it is awake anyway; closed: nobody listens
            sockets[1].send(bytes([_LOOK]))


def act(listener: Listener, signum: int) -> None:
    """A listener is done; the last of them lets the signal act.

    Raises:
        SystemExit: the process ends, as it does by this signal.
    """
    if any(other.holds(signum) for other in _watched.who(signum) if other is not listener):
        return
    handler = _watched.handlers.get(signum)
    if handler is None:
        return
    if threading.current_thread() is threading.main_thread():
        handler.act(sys._getframe(), is_orderly=True)
        return
    if handler.ends:
        handler.act_in_main()
        raise SystemExit(128 + signum)  # this thread too
    if callable(handler.previous):
        handler.act_in_main()


def overdue(signum: int) -> None:
    """The time to save is over: let the signal act now, whatever the main thread is doing."""
    handler = _watched.handlers.get(signum)
    if handler is None:
        return
    if handler.ends:
        os._exit(128 + signum)  # threads that hang would keep an orderly exit waiting
    if threading.current_thread() is threading.main_thread():
        handler.act(sys._getframe(), is_orderly=True)
    elif callable(handler.previous):
        handler.act_in_main()


class _Handler:
    """Our handler of one signal, and the one that it stands in for."""

    def __init__(self, signum: int, previous: _Previous) -> None:
        self.signum = signum
        self.previous = previous
        self.is_noticed = False
        self._is_to_act = False

    @property
    def is_current(self) -> bool:
        """Whether the signal comes here first."""
        return signal.getsignal(self.signum) is self

    @property
    def ends(self) -> bool:
        """Whether the signal would have ended the process. A handler that came after us has decided
        something else."""
        return self.is_current and not callable(self.previous)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """On the main thread, between two instructions of whatever it is doing."""
        watched = _watched
        if watched.handlers.get(signum) is not self:
            # Removed. Somebody who came after us still calls, or put us back: we are not there.
            if callable(self.previous):
                self.previous(signum, frame)
            else:
                self.act(frame, is_orderly=False)
            return
        if self._is_to_act:
            self.act(frame, is_orderly=True)
            return
        listeners = watched.who(signum)
        is_ours = not self.is_noticed and os.getpid() == watched.pid
        if is_ours and any(one.holds(signum) for one in listeners):
            self.is_noticed = True
            for one in listeners:
                one.flag(signum)
            wake()
            return
        self.act(frame, is_orderly=False)

    def act(self, frame: FrameType | None, *, is_orderly: bool) -> None:
        """Do what the signal would have done without us; on the main thread."""
        ends = self.ends
        self.remove()
        if callable(self.previous):
            self.previous(self.signum, frame)
        elif not ends:
            return
        elif is_orderly:
            raise SystemExit(128 + self.signum)
        else:
            signal.signal(self.signum, signal.SIG_DFL)
            os.kill(os.getpid(), self.signum)

    def act_in_main(self) -> None:
        """The same, on the main thread, from another one."""
        self._is_to_act = True
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, self.signum)

    def remove(self) -> None:
        """Put back what was there before, unless somebody else has come since."""
        if _watched.handlers.get(self.signum) is self:
            del _watched.handlers[self.signum]
        found = signal.getsignal(self.signum)
        if isinstance(found, _Handler):  # this one, or one before that somebody put back
            signal.signal(self.signum, _before_us(found))


def _before_us(found: Any) -> Any:
    """The handler that a removed one of ours stands in for."""
    while isinstance(found, _Handler) and _watched.handlers.get(found.signum) is not found:
        found = found.previous
    return found


def _install(signum: int) -> None:
    found = _before_us(signal.getsignal(signum))
    # None: installed by C code, which cannot be put back.
    if isinstance(found, _Handler) or found is None or found == signal.SIG_IGN:
        return
    handler = _Handler(signum, found)
    with contextlib.suppress(ValueError, OSError):  # not in this interpreter
        signal.signal(signum, handler)
        _watched.handlers[signum] = handler
        _watched.heard.pop(signum, None)


def _start_watching() -> None:
    if _watched.sockets is not None:
        return
    ear, mouth = _watched.sockets = socket.socketpair()
    mouth.setblocking(False)
    _watched.thread = threading.Thread(
        target=_watch, args=(ear,), name="holdfast-signals", daemon=True
    )
    _watched.thread.start()


def _take_wakeup() -> None:
    """Have the interpreter tell the watching thread of signals, as soon as they come."""
    if _watched.has_wakeup or _watched.sockets is None:
        return
    found = signal.set_wakeup_fd(_watched.sockets[1].fileno(), warn_on_full_buffer=False)
    if found == -1:
        _watched.has_wakeup = True
    else:
        signal.set_wakeup_fd(found)  # somebody's already; then the handler alone wakes us


def _give_back_wakeup(watched: _Watched) -> None:
    if not watched.has_wakeup or watched.sockets is None:
        return
    watched.has_wakeup = False
    found = signal.set_wakeup_fd(-1)
    if found not in (-1, watched.sockets[1].fileno()):
        signal.set_wakeup_fd(found)  # somebody took it from us


def _stop_watching() -> threading.Thread | None:
    """Have the watching thread end; where it can be waited for, that thread."""
    sockets, thread = _watched.sockets, _watched.thread
    if sockets is None or thread is None:
        return None
    if threading.current_thread() is not threading.main_thread() and _watched.has_wakeup:
        return None  # only the main thread can give it back
    _give_back_wakeup(_watched)
    _watched.sockets = _watched.thread = None
    sockets[1].shutdown(socket.SHUT_RDWR)  # ends the thread's recv
    sockets[1].close()
    return thread


def _watch(ear: socket.socket) -> None:
    """The watching thread: passes on what the handler, or the interpreter itself, sends."""
    with ear:
        while data := ear.recv(64):
            # The interpreter sends every signal that has a handler in Python: SIGCHLD, for one,
            # since torch's DataLoader handles it. Those concern no listener.
            ours = [number for number in data if number == _LOOK or number in _watched.handlers]
            for number in ours:
                handler = _watched.handlers.get(number)
                # A handler that took over from ours may have other plans with this signal.
                if handler is not None and handler.is_current:
                    _hear(handler)
            for reference, _ in _watched.listeners if ours else ():
                if (listener := reference()) is not None:
                    listener.awake()
            listener = None


def _hear(handler: _Handler) -> None:
    """A signal came, and the main thread may be too busy to handle it."""
    signum = handler.signum
    listeners = _watched.who(signum)
    is_held = any(one.holds(signum) for one in listeners)
    count = _watched.heard[signum] = _watched.heard.get(signum, 0) + is_held
    if count == 1:
        for one in listeners:
            one.flag(signum)
    elif handler.ends:
        ender = threading.Timer(_STUCK_S, _end_stuck, (handler,), {"is_held": is_held})
        ender.daemon = True
        ender.start()


def _end_stuck(handler: _Handler, *, is_held: bool) -> None:
    """The signal was to act at once, and the process is still there."""
    if is_held or not handler.is_noticed:
        os._exit(128 + handler.signum)


def _before_fork() -> None:
    """Hold signals back in this thread. Until a child is somebody else it would not hear a signal
    of its own, and would send word of it through our socket: its parent would end."""
    if _watched.handlers:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, tuple(_watched.handlers))


def _after_fork() -> None:
    mask, _forking.mask = getattr(_forking, "mask", None), None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_as_child() -> None:
    _forget_in_child()
    _after_fork()


def _forget_in_child() -> None:
    """A forked child is somebody else: signals to it are none of ours, and act as before."""
    global _watched, _lock
    gone, _watched, _lock = _watched, _Watched(), threading.RLock()
    with contextlib.suppress(ValueError, OSError):
        for handler in gone.handlers.values():
            if handler.is_current:
                signal.signal(handler.signum, handler.previous)
        if gone.sockets is not None:
            _give_back_wakeup(gone)
            for one in gone.sockets:
                one.close()


def _at_exit() -> None:
    """The interpreter ends: nothing is saved any more, and signals act as before."""
    with contextlib.suppress(ValueError, OSError):
        for handler in list(_watched.handlers.values()):
            handler.remove()
        _stop_watching()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_begin_as_child
    )
