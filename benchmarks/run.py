"""Run the benchmarks: every section in turn, one document at the end.

Not here: what is measured (one module a section), how it is shown (document.py).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from benchmarks import document
from benchmarks.machine import describe_machine
from benchmarks.results import Section, to_json
from holdfast.errors import InvalidRequestError

SECTIONS = {
    "kernels": "checkpoint.kernels",
    "overhead": "checkpoint.overhead",
    "tracking": "checkpoint.tracking",
    "reduction": "checkpoint.reduction",
    "peers": "checkpoint.peers",
    "torchrec": "torchrec.section",
    "grid": "grid.every_step",
    "gridstudy": "grid.study",
    "growth": "grid.growth",
    "priority": "checkpoint.priority",
    "accuracy": "checkpoint.accuracy",
    "emulation": "checkpoint.emulation",
    "cluster": "cluster.overhead",
    "clusterrecovery": "cluster.recovery",
}
"""Every section of the page, in its order, and the module that measures it."""


class Measure(Protocol):
    """What a section's module offers; scratch files go into a folder of their own in ``folder``."""

    def __call__(self, *, quick: bool, folder: Path) -> Section:
        """Measure and return what was found."""
        ...


def run_all(
    *, only: tuple[str, ...] = (), quick: bool = False, out: Path | None = None
) -> dict[str, Any]:
    """Measure the sections (or ``only`` some), report progress on stderr, return JSON values.

    With ``out`` the document is written there and its pictures into ``img`` beside it; ``only``
    some sections are put into the document that is there, if there is one. Scratch checkpoints go
    to the same disk as the document, else to the current folder's.

    Raises:
        InvalidRequestError: lists the sections there are.
    """
    unknown = sorted(set(only) - set(SECTIONS))
    if unknown:
        raise InvalidRequestError("no such benchmark", given=unknown, known=list(SECTIONS))
    folder = (out.parent if out is not None else Path()).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    machine = describe_machine(folder)
    sections: list[Section] = []
    seconds: dict[str, float] = {}
    for name in SECTIONS:
        if only and name not in only:
            continue
        print(f"bench: {name} ...", file=sys.stderr, flush=True)
        started = time.perf_counter()
        section = measure_of(name)(quick=quick, folder=folder)
        seconds[name] = time.perf_counter() - started
        sections.append(section)
        _report(section, seconds[name])
    if out is not None:
        order = tuple(SECTIONS) if only and not quick else ()
        document.write(out, machine, sections, is_quick=quick, order=order)
        print(f"bench: wrote {out}", file=sys.stderr)
    found: dict[str, Any] = {
        "machine": dataclasses.asdict(machine),
        "quick": quick,
        "seconds": seconds,
        "sections": [to_json(section) for section in sections],
    }
    # Through JSON once, so that what is returned is what a file of it would give back.
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def measure_of(name: str) -> Measure:
    """The section's function; its module is imported now, since torch takes a while."""
    module = import_module(f"benchmarks.{SECTIONS[name]}")

    def measure(*, quick: bool, folder: Path) -> Section:
        with warnings.catch_warnings():
            # torch's own optimizers build sparse tensors this way
            warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)
            # one process is what is meant: the peers section says so
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            found: Section = module.measure(quick=quick, folder=folder)
        return found

    return measure


def _report(section: Section, seconds: float) -> None:
    for ratio in section.ratios:
        verdict = {True: "met", False: "MISSED", None: ""}[ratio.is_met]
        print(
            f"  {ratio.name}: {document.shown_ratio(ratio)} ({ratio.against}) "
            f"{document.shown_target(ratio)} {verdict}".rstrip(),
            file=sys.stderr,
        )
    print(f"bench: {section.name} took {seconds:.0f} s", file=sys.stderr, flush=True)
