"""The campaign's child: judges one input after the other within the budget of memory.

An input is a pure function of (seed, index): a mutated run, or a mutated file to import. A line of
JSON goes to stdout before each and after each, so that the parent knows which one ended a child.
"""

from __future__ import annotations

import faulthandler
import json
import random
import resource
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.boundary.budget import Budget
from holdfast.checkpoint.restoring import restore
from tests.hostile import campaign_poison
from tests.hostile.campaign_judge import ALL, Finding, Judge, Verdict, finding_of
from tests.hostile.campaign_runs import Prey, make_prey
from tests.hostile.mutators.all_mutators import mutate

HANG_S = 60.0
_OPERATIONS = 3  # for an input, besides verify
_IMPORTS = 0.06  # of all inputs


def run_child(seed: int, start: int, stop: int, *, is_shown: bool) -> None:
    """Judge inputs, and say what became of each."""
    warnings.simplefilter("ignore")
    faulthandler.enable()
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        arena = Arena(Path(folder))
        _say({"ready": True})
        for index in range(start, stop):
            _say({"at": index})
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            try:
                _say(arena.judge(seed, index, is_shown=is_shown))
            except Exception as error:  # of the campaign itself: the project's are judged
                broken = ["campaign", repr(error)[:80], traceback.format_exc()]
                _say({"index": index, "prey": "?", "told": [], "is_open": False,
                      "is_sound": False, "slowest": [0.0, ""], "findings": [broken]})  # fmt: skip
        faulthandler.cancel_dump_traceback_later()


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Arena:
    """The good runs and files, and a folder for what comes of them."""

    def __init__(self, folder: Path) -> None:
        self._out = folder / "out"
        self._prey = make_prey()
        self._sources: list[Any] = []
        if find_spec("tests.hostile.mutators.torch_files") is not None:
            from tests.hostile import campaign_imports

            self._sources = campaign_imports.make_sources(folder / "sources", self._prey[0])
        campaign_poison.install()
        self._warm()

    def _warm(self) -> None:
        """Load and compile everything before memory is counted.

        Raises:
            RuntimeError: a good run is not called good.
        """
        for one in self._prey:
            for n in range(2):
                verdict = Judge(one, one.files, self._out, random.Random(n)).run(ALL)
                if verdict.findings or not verdict.is_sound:
                    raise RuntimeError(f"the good run {one.name!r} is not: {verdict.findings}")
        for source in self._sources:
            copy = self._out / "work" / "source"
            shutil.copytree(source.path, copy) if source.path.is_dir() else _copy(source.path, copy)
            verdict = self._import(source, copy, random.Random(0))
            if verdict.findings or not verdict.is_sound:
                raise RuntimeError(f"the good file {source.path.name!r} is not: {verdict}")

    def judge(self, seed: int, index: int, *, is_shown: bool) -> dict[str, Any]:
        """What became of one input; ``is_shown``: of every operation."""
        rng = random.Random(f"{seed}:{index}")
        # Small segments too are asked for their ids first, as large ones are.
        restore._WHOLE_BYTES_MAX = rng.choice((64, 32 << 10))  # type: ignore[misc]
        if self._sources and rng.random() < _IMPORTS:
            name, told, verdict = self._judge_import(rng)
        else:
            name, told, verdict = self._judge_run(rng, is_shown=is_shown)
        return {
            "index": index, "prey": name, "told": told, "is_open": verdict.is_open,
            "is_sound": verdict.is_sound, "slowest": verdict.slowest,
            "findings": [[f.kind, f.cause, f.detail] for f in verdict.findings],
            "outcomes": verdict.outcomes if is_shown else [],
        }  # fmt: skip

    def _judge_run(self, rng: random.Random, *, is_shown: bool) -> tuple[str, list[str], Verdict]:
        chosen, files, told = make_input(self._prey, rng)
        _limit(sum(map(len, files.values())))
        verdict = Judge(chosen, files, self._out, rng).run(_OPERATIONS)
        if is_shown:
            more = Judge(chosen, files, self._out, rng).run(ALL)
            verdict.outcomes += ["and every operation:", *more.outcomes]
            verdict.findings += more.findings
        _limit(None)
        return chosen.name, told, verdict

    def _judge_import(self, rng: random.Random) -> tuple[str, list[str], Verdict]:
        from tests.hostile import campaign_imports

        source = rng.choice(self._sources)
        path, told = campaign_imports.make_lie(source, self._out / "work", rng)
        _limit(campaign_imports.size_of(path))
        verdict = self._import(source, path, rng)
        _limit(None)
        return source.path.name, [told], verdict

    def _import(self, source: Any, path: Path, rng: random.Random) -> Verdict:
        from tests.hostile import campaign_imports

        verdict = Verdict()
        try:
            outcome = campaign_imports.attempt(source, path, rng)
            verdict.is_open = verdict.is_sound = outcome != "refused"
            verdict.outcomes.append(f"import: {outcome}")
        except AssertionError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            cause = f"{where.name}:{where.lineno}"
            verdict.findings.append(Finding("import", cause, f"{where.line} {error!r:.200}"))
        except Exception as error:
            verdict.findings.append(finding_of("import", error))
        shutil.rmtree(path.parent)
        return verdict


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True)
    shutil.copy(path, to)


def make_input(
    prey: Sequence[Prey], rng: random.Random
) -> tuple[Prey, dict[str, bytes], list[str]]:
    """One mutated run."""
    (chosen,) = rng.choices(prey, [one.weight for one in prey])
    laid, told = mutate(chosen.run, rng)
    return chosen, laid.files(), told


def _limit(input_bytes: int | None) -> None:
    """Allow a process what it has and a budget; None: all it wants.

    The budget is an import's. That of reading a run (docs/security.md) is larger than small runs
    ever need.
    """
    soft = resource.RLIM_INFINITY
    if input_bytes is not None:
        status = Path("/proc/self/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmData")]
        soft = int(line.split()[1]) * 1024 + Budget(input_bytes).memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (soft, resource.RLIM_INFINITY))
