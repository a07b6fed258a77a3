"""How kernels are compiled: once on a host, kept where they can be kept, and visibly.

    @kernel   called from Python; compiled at the first call, or loaded if a process did it before
    @helper   called by kernels alone, never from Python; compiled into them

Numba compiles a function for the types of its arguments when it is first called with them. Here
one process of a host does that and keeps the result in a folder; others wait for it and load it.

    NUMBA_CACHE_DIR, if set and writable
    else beside the modules of the kernels, if that is writable
    else a folder of this user: XDG_CACHE_HOME or ~/.cache, or a private one among temporary files

What lies beside the modules is loaded even where it cannot be written: ``holdfast warmup`` fills it
when an image is built.

Invariants:
- A kept kernel is loaded only if it was made from these sources of *all* kernels, for this
  processor, by this version of Numba: a helper that changes makes every kernel stale.
- Code is loaded from no folder that another user can write to, unless NUMBA_CACHE_DIR names it.
- No lock is waited for longer than ``_PATIENCE_S``; then the kernel is compiled once more.
- A folder that cannot be read or written costs time, never a result.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba.core import caching as _caching

try:
    import fcntl
except ImportError:  # a system without it: processes may compile the same at the same time
    fcntl = None  # type: ignore[assignment]

# Numba's types know neither all of its options nor its inner classes.
njit: Any = numba.njit
caching: Any = _caching
F = TypeVar("F", bound=Callable[..., Any])

_KERNELS = Path(__file__).parent
_QUIET_S = 1.0  # of compiling, before it is told
_AGAIN_S = 5.0  # between two lines that tell it
_PATIENCE_S = 120.0  # for another process that compiles the same kernel
_POLL_S = 0.02


def kernel(**options: Any) -> Callable[[F], F]:
    """Compile a function that Python calls; ``options`` are those of ``numba.njit``."""

    def decorate(function: F) -> F:
        # No wrapper for C: nothing calls kernels from there, and it costs a tenth of the time.
        dispatcher = njit(nogil=True, no_cfunc_wrapper=True, **options)(function)
        try:
            _Kept(dispatcher)
        except AttributeError:  # a Numba that is made differently: its own cache, then
            dispatcher.enable_caching()
        compiled: F = dispatcher
        return compiled

    return decorate


def helper(**options: Any) -> Callable[[F], F]:
    """Compile a function that only kernels call."""
    decorate: Callable[[F], F] = njit(
        nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=True, **options
    )
    return decorate


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A view that cannot be written, so that a kernel is compiled once for memory of both kinds."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def as_slots(slots_N: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Slots of any whole type as the kernels take them."""
    return read_only(np.ascontiguousarray(slots_N, np.int64))


@dataclass(frozen=True, slots=True)
class Compiled:
    """What this process has compiled until now, and where such kernels are kept (None: nowhere)."""

    kernels: int
    seconds: float
    folder: Path | None


def compiled() -> Compiled:
    """What this process has compiled until now. Kernels that were loaded do not count."""
    return Compiled(_progress.kernels, _progress.seconds, _folders()[1])


def run_all(steps: Sequence[Callable[[], object]]) -> float:
    """Call what compiles kernels, one after the other, and tell how many are done if that takes
    long; the seconds that compiling took."""
    before = _progress.seconds
    with _progress.expecting(len(steps)):
        for step in steps:
            step()
            _progress.done += 1
    return _progress.seconds - before


@contextmanager
def reporting(report: Callable[[float], None]) -> Iterator[None]:
    """Call this with the seconds spent on compiling until now, whenever a kernel is begun and
    when it is compiled. The time another process took to compile the same counts too."""
    _progress.reports.append(report)
    try:
        yield
    finally:
        _progress.reports.remove(report)


class _Progress:
    """What is told of compiling. Numba compiles in one thread at a time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.done = self.total = self.kernels = 0
        self.reports: list[Callable[[float], None]] = []
        self._depth = 0
        self._told_at = 0.0

    @contextmanager
    def expecting(self, steps: int) -> Iterator[None]:
        """So many steps are to be done, on top of those that are expected already."""
        if self.done == self.total:
            self.done = self.total = 0
        self.total += steps
        aim = self.total
        try:
            yield
        finally:
            self.done = max(self.done, aim)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A kernel is compiled, or waited for."""
        if self._depth:  # one that another one calls
            yield
            return
        self._depth += 1
        began, before = time.monotonic(), self.seconds
        try:
            self.tell(began, before)
            yield
        finally:
            self._depth -= 1
            self.seconds = before + time.monotonic() - began
            self._report()

    def tell(self, began: float, before: float) -> None:
        """Say what is done, not too often."""
        now = time.monotonic()
        self.seconds = before + now - began
        self._report()
        if self.seconds < _QUIET_S or now - self._told_at < _AGAIN_S:
            return
        self._told_at = now
        what = f": {self.done} of {self.total}" if self.done < self.total else ""
        with suppress(OSError, ValueError, AttributeError):  # there may be no stderr
            print(f"holdfast: compiling kernels, once per machine{what} ...", file=sys.stderr)

    def _report(self) -> None:
        for report in list(self.reports):
            report(self.seconds)


_progress = _Progress()


class _Kept(_caching.FunctionCache):
    """A kernel's compiled forms, kept in a folder; stands between its dispatcher and compiler."""

    def __init__(self, dispatcher: Any) -> None:
        # Numba's own would look for its folder now, for each kernel that is imported.
        function = dispatcher.py_func
        self._py_func, self._name, self._enabled = function, repr(function), True
        module = function.__module__.removeprefix("holdfast.kernels.")
        self._title = f"{module}.{function.__qualname__}"
        self._impl = _Impl()
        self._context = dispatcher.targetctx
        self._compile = dispatcher._compiler.compile
        dispatcher._cache = self
        dispatcher._compiler.compile = self._compile_once

    @property
    def cache_path(self) -> str | None:
        """Where compiled forms are kept."""
        folder = _folders()[1]
        return None if folder is None else str(folder)

    def flush(self) -> None:
        """Nothing: a stale form is replaced by the next one."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled form for these types, or None."""
        target_context.refresh()
        if not self._enabled:
            return None
        key = self._key(sig, target_context)
        for folder in _folders()[0]:
            # Unreadable, or damaged: compiled anew, and written again if that is possible.
            with suppress(Exception):
                found = self._file(folder, key).load(key)
                if found is not None:
                    return self._impl.rebuild(target_context, found)
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Nothing: ``_compile_once`` has saved it."""

    def _compile_once(self, args: Any, return_type: Any) -> Any:
        """What Numba calls to compile the kernel for types that no folder has it for."""
        folder = _folders()[1]
        if not self._enabled:
            return self._compile(args, return_type)
        key = self._key(args, self._context)
        with _progress.compiling(), _locked(folder, _digest(key, self._title)) as has_waited:
            if has_waited and (found := self.load_overload(args, self._context)) is not None:
                self._context.insert_user_function(found.entry_point, found.fndesc, [found.library])
                return found
            found = self._compile(args, return_type)
            _progress.kernels += 1
            if folder is not None and self._impl.check_cachable(found):
                with suppress(OSError):
                    self._file(folder, key).save(key, self._impl.reduce(found))
            return found

    def _key(self, types: Any, context: Any) -> Any:
        """What a compiled form is for: types, processor, and the function's own code."""
        make_key: Any = self._index_key
        return make_key(types, context.codegen())

    def _file(self, folder: Path, key: Any) -> Any:
        """One file for each kernel and types: what many processes write must not be one index."""
        base = f"{self._title}-{_digest(key, self._title)}"
        return caching.IndexDataCacheFile(str(folder), base, _sources())


class _Impl(_caching.CompileResultCacheImpl):
    """Numba's, without its choice of a folder."""

    def __init__(self) -> None:
        pass

    def check_cachable(self, compiled: Any) -> bool:
        """Whether a compiled form means the same in another process."""
        return not compiled.lifted and not compiled.library.has_dynamic_globals


def _digest(key: Any, title: str) -> str:
    return hashlib.sha256(repr((key, title)).encode()).hexdigest()[:16]


@functools.cache
def _sources() -> str:
    """A digest of the sources of all kernels."""
    found = hashlib.sha256(numba.__version__.encode())
    for path in sorted(_KERNELS.rglob("*.py")):
        found.update(path.relative_to(_KERNELS).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


@functools.cache
def _folders() -> tuple[list[Path], Path | None]:
    """Where kernels are looked for, and where new ones are kept (None: nowhere)."""
    beside = _KERNELS / "__pycache__" / "compiled"
    chosen = str(numba.config.CACHE_DIR)  # type: ignore[attr-defined]
    own = f"holdfast-{_sources()[:16]}"
    first = Path(chosen) / own if chosen else beside
    if _is_writable(first):
        return [first], first
    private = next(filter(None, map(_private, _user_folders())), None)
    if private is None or not _is_writable(private / own):
        return [first], None
    return [first, private / own], private / own


def _is_writable(folder: Path) -> bool:
    """Whether files can be made there; the folder is made if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _user_folders() -> Iterator[Path]:
    """Where a user keeps what can be made again, best first."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if caches.is_absolute():
        yield caches / "holdfast"
    with suppress(RuntimeError):
        yield Path.home() / ".cache" / "holdfast"
    yield Path(tempfile.gettempdir()) / f"holdfast-{_user()}"


def _private(folder: Path) -> Path | None:
    """The folder, made if it is missing, if this user alone can write to it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError:
        return None
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == _user()
    return folder if is_ours and not found.st_mode & 0o022 else None


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


@contextmanager
def _locked(folder: Path | None, name: str) -> Iterator[bool]:
    """Hold the lock of a kernel, unless that takes too long or there are none; whether another
    process had it meanwhile, or just before."""
    if folder is None or fcntl is None:
        yield False
        return
    path = folder / f"{name}.lock"
    try:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        began, before = time.monotonic(), _progress.seconds
        while not _has_locked(lock) and time.monotonic() - began < _PATIENCE_S:
            _progress.tell(began, before)
            time.sleep(_POLL_S)
        yield True
    finally:
        with suppress(OSError):
            path.unlink()  # those who wait for it look for the kernel first
        os.close(lock)


def _has_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
