"""Was that right? One mutated run, all that was done with it, and what is wrong with the outcome.

What must hold, and the kinds of findings that say it did not:

- ``foreign``: an operation raised something that is not ours.
- ``memory``: it ran into the memory limit, whatever error that became.
- ``unwritten``: a row that was handed out holds memory that nobody wrote.
- ``unsound``: ``verify`` calls sound what the format does not.
- ``refused``: ``verify`` calls it sound, and an operation refuses it.
- ``differs``: it is sound, and an operation sees other rows than the oracle or another operation.
- ``disagree``: it is not sound, and two ways of reading hand out different rows.
- ``left``: a file was left behind, or one outside the run was changed.
- ``note``: an operation found something wrong by itself.

# M rows of a table
"""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import holdfast as hf
from holdfast.model.dtypes import for_users
from tests.hostile.campaign_operations import OPERATIONS, room
from tests.hostile.campaign_oracle import NoRun, Oracle
from tests.hostile.campaign_poison import is_poison
from tests.hostile.campaign_reading import Seen, Target
from tests.hostile.campaign_runs import Prey
from tests.hostile.campaign_storage import MemoryStorage

# What a sound run may still be refused for: it is of another model, or has what a format has not.
ALL = 1000  # operations: every one there is
_NEEDS_DENSE = ("torch", "dcp", "resume", "train on", "import", "safetensors", "command")
_ONE_FILE = ("safetensors", "torch", "dcp")  # these write one, or nothing
_MAY_BE_REFUSED = (hf.InvalidRequestError, hf.NotFoundError)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be. ``cause`` is the same for what has one fix."""

    kind: str
    cause: str
    detail: str


@dataclass(slots=True)
class Verdict:
    """What was done with one input, and what was wrong."""

    is_open: bool = False
    is_sound: bool = False
    findings: list[Finding] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")


class Judge:
    """Runs operations on one input and compares what they see."""

    def __init__(self, prey: Prey, files: dict[str, bytes], out: Path, rng: random.Random) -> None:
        self._prey = prey
        self._files = files
        self._out = out
        self._rng = rng
        self._verdict = Verdict()
        self._oracle: Oracle | None = None
        self._asked: set[int] = set()
        self._known: dict[tuple[int, str, str], list[Any]] = {}  # rows, who said so for each

    def run(self, count: int) -> Verdict:
        """Verify, then ``count`` operations; all of them where ``count`` is large."""
        storage = MemoryStorage(self._files)
        report = None
        with self._watching("verify"):
            report = hf.verify(storage)
            self._verdict.is_sound = report.is_sound
            sound = "sound" if report.is_sound else f"damages {str(report.damages[0])[:160]}"
            self._verdict.outcomes.append(f"verify: {sound}")
        opened: hf.Run | None = None
        with self._watching("open"):
            opened = hf.open(storage)
        self._verdict.is_open = opened is not None
        if opened is None or not opened.steps:
            if self._verdict.is_sound and opened is None:
                self._add("refused", "open", "sound, and cannot be opened")
            if self._rng.random() < 0.04:
                self._operate("command", self._target(storage, None))
            return self._verdict
        self._ask_oracle(opened.steps)
        names = list(OPERATIONS)
        weights = [weight for _, weight in OPERATIONS.values()]
        chosen = names if count >= len(names) else self._rng.choices(names, weights, k=count)
        for name in dict.fromkeys(chosen):
            self._operate(name, self._target(storage, opened))
        return self._verdict

    def _target(self, storage: MemoryStorage, opened: hf.Run | None) -> Target:
        return Target(self._prey, storage, self._out, self._rng, opened)

    def _operate(self, name: str, target: Target) -> None:
        seen: list[Seen] = []
        with room(self._out):
            with self._watching(name, may_leave=False):
                seen = OPERATIONS[name][0](target)
            left = [p.name for p in self._out.iterdir()]
            has_failed = "raised" in self._verdict.outcomes[-1]
            if name in _ONE_FILE and ((has_failed and left) or len(left) > 1):
                self._add("left", name, f"{name} left {left}")
        for note in target.notes:
            kind = "note" if self._verdict.is_sound else "disagree"
            self._add(kind, f"{name}: {note.split(' ')[0]}", f"{name}: {note}")
        for one in seen:
            self._compare(name, one)

    @contextlib.contextmanager
    def _watching(self, name: str, *, may_leave: bool = True) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
            self._verdict.outcomes.append(f"{name}: done")
        except hf.HoldfastError as error:
            self._verdict.outcomes.append(f"{name}: raised {type(error).__name__}: {error!s:.200}")
            if _is_memory(error):
                self._verdict.findings.append(finding_of(name, error))
            elif self._verdict.is_sound and not self._may_refuse(name, error):
                self._add("refused", _cause(error), f"{name}: sound; {error!r:.300}")
        except Exception as error:
            self._verdict.outcomes.append(f"{name}: raised FOREIGN {error!r:.200}")
            self._verdict.findings.append(finding_of(name, error))
        took = time.perf_counter() - started
        self._verdict.slowest = max(self._verdict.slowest, (took, name))

    def _may_refuse(self, name: str, error: hf.HoldfastError) -> bool:
        """Whether an operation may refuse a sound run so."""
        if name in _NEEDS_DENSE and "dense state lacks a part" in str(error):
            return True  # which parts there must be is the reader's to say (docs/format.md)
        return isinstance(error, _MAY_BE_REFUSED)

    def _ask_oracle(self, steps: Sequence[int]) -> None:
        """What the format says of every row that it is certain of: of a sound run at once, else
        of the steps that operations see."""
        try:
            self._oracle = Oracle(self._files)
        except NoRun as error:
            if self._verdict.is_sound:
                self._add("unsound", "no run", f"sound, and no run by the format: {error}")
            return
        for step in steps if self._verdict.is_sound else ():
            self._ask(step)

    def _ask(self, step: int) -> None:
        if self._oracle is None or step in self._asked:
            return
        self._asked.add(step)
        try:
            self._ask_of(self._oracle, step)
        except (IndexError, TypeError, KeyError, ValueError) as error:
            if self._verdict.is_sound:
                self._add("unsound", "step", f"sound, and step {step} is none: {error!r}")

    def _ask_of(self, oracle: Oracle, step: int) -> None:
        cuts: dict[str, list[Any]] = {}
        for schema in oracle.schemas(step).values():
            read = oracle.read(step, schema)
            if read.doubt_M.any() and self._verdict.is_sound:
                self._add(
                    "unsound", read.why[:60], f"sound; step {step} {schema.name!a}: {read.why}"
                )
            if not read.columns:
                continue
            if schema.cut is not None:
                cuts.setdefault(schema.cut[0], []).append((schema, read))
                continue
            for (name, _, _), rows_MD in zip(schema.columns, read.columns, strict=True):
                says = np.where(read.doubt_M, "", "oracle").astype(object)
                self._known[step, schema.name, name] = [for_users(rows_MD), says]
        for whole, parts in cuts.items():
            parts.sort(key=lambda pair: pair[0].cut[1])
            doubt_M = np.logical_or.reduce([read.doubt_M for _, read in parts])
            rows_MD = np.concatenate([for_users(read.columns[0]) for _, read in parts], axis=1)
            says = np.where(doubt_M, "", "oracle").astype(object)
            self._known[step, whole, parts[0][0].columns[0][0]] = [rows_MD, says]

    def _compare(self, name: str, seen: Seen) -> None:
        """Rows against what is known of them; what was not known is known from now on."""
        where = f"step {seen.step} {seen.table!a} {seen.column!a}"
        if is_poison(seen.rows):
            self._add("unwritten", name, f"{name}: {where} holds memory that nobody wrote")
        key = (seen.step, seen.table, seen.column)
        self._ask(seen.step)
        if key not in self._known:
            if seen.ids is None:
                self._known[key] = [seen.rows, np.full(len(seen.rows), name, object)]
            return
        rows_MD, says_M = self._known[key]
        ids = np.arange(len(rows_MD)) if seen.ids is None else seen.ids
        is_alike = seen.rows.shape == (len(ids), rows_MD.shape[1])
        if not is_alike or seen.rows.dtype != rows_MD.dtype:
            if (says_M == "oracle").any() or self._verdict.is_sound:
                found = f"{seen.rows.shape} {seen.rows.dtype}, {rows_MD.shape} {rows_MD.dtype}"
                self._add("differs" if self._verdict.is_sound else "disagree", f"{name}: shape",
                          f"{name}: {where} has shape {found}")  # fmt: skip
            return
        inside = ids < len(rows_MD)
        ids, got = ids[inside], seen.rows[inside]
        bits = f"u{got.itemsize}"
        differs = (
            np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(rows_MD[ids]).view(bits)
        ).any(axis=1)
        is_new = says_M[ids] == ""
        rows_MD[ids[is_new]] = got[is_new]
        says_M[ids[is_new]] = name
        differs &= ~is_new
        if differs.any():
            row = int(ids[np.flatnonzero(differs)[0]])
            who = says_M[row]
            kind = "differs" if self._verdict.is_sound else "disagree"
            self._add(kind, f"{name} / {who}",
                      f"{name}: {where} row {row} is not as {who} has it")  # fmt: skip

    def _add(self, kind: str, cause: str, detail: str) -> None:
        self._verdict.findings.append(Finding(kind, cause, detail))


def finding_of(name: str, error: Exception) -> Finding:
    """What an error is that an operation must not raise."""
    kind = "memory" if _is_memory(error) else "foreign"
    frames = " <- ".join(reversed(_frames(error)[-4:]))
    return Finding(kind, _cause(error), f"{name}: {error!r:.200} at {frames}")


def _is_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, is that there was no memory."""
    while error is not None:
        words = str(error)
        if (
            isinstance(error, MemoryError)
            or "allocate memory" in words
            or "Cannot allocate" in words
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _frames(error: BaseException) -> list[str]:
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = frame.filename.replace("\\", "/")
        if "/holdfast/" in path:
            found.append(f"{path.split('/holdfast/', 1)[1]}:{frame.name}:{frame.lineno}")
    return found


def _cause(error: BaseException) -> str:
    frames = _frames(error)
    return f"{type(error).__name__} in {frames[-1] if frames else str(error)[:60]}"
