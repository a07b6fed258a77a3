"""The campaign: a great number of mutated runs, each looked at in several ways, each judged.

    python -m tests.hostile.campaign --seed 7 --count 20000     # the findings, grouped by cause
    python -m tests.hostile.campaign --seed 7 --index 1234      # one input again, every operation

An input is a pure function of (seed, index). Inputs run in a child process whose memory is limited
to the documented budget; one that hangs or dies is a finding too, and the next child goes on behind
it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.hostile.campaign_child import HANG_S, run_child


@dataclass(slots=True)
class Found:
    """A kind of finding with one cause: how often, and by which inputs."""

    kind: str
    cause: str
    count: int = 0
    indexes: list[int] = field(default_factory=list)
    detail: str = ""
    told: str = ""


def judged(seed: int, start: int, stop: int, *, is_shown: bool = False) -> Iterator[dict[str, Any]]:
    """What children said of each input; one that ended a child is a finding."""
    while start < stop:
        command = [sys.executable, "-m", "tests.hostile.campaign", "--child", "--seed", str(seed),
                   "--start", str(start), "--stop", str(stop)]  # fmt: skip
        if is_shown:
            command.append("--show")
        env = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
            ) as child,
        ):
            assert child.stdout is not None
            at, is_ready = start, False
            for text in child.stdout:
                line = json.loads(text)
                is_ready |= "ready" in line
                at = line.get("at", at)
                if "index" in line:
                    yield line
            code = child.wait()
            if code == 0:
                return
            errors.seek(0)
            said = errors.read()[-3000:]
        if not is_ready:
            raise RuntimeError(f"the campaign's child did not start:\n{said}")
        kind = "hang" if "Timeout" in said else "died"
        yield {"index": at, "told": ["?"], "prey": "?", "is_open": True, "is_sound": False,
               "slowest": [HANG_S, kind], "findings": [[kind, _where(said), said]]}  # fmt: skip
        start = at + 1


def _where(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if "/holdfast/" in line]
    return lines[0][-120:] if lines else said[-80:]


def run(seed: int, start: int, count: int) -> tuple[list[Found], dict[str, Any]]:
    """The findings of a range of inputs by cause, and how it went."""
    found: dict[tuple[str, str], Found] = {}
    facts: dict[str, Any] = {"inputs": 0, "open": 0, "sound": 0, "slowest": [0.0, "", 0]}
    for line in judged(seed, start, start + count):
        facts["inputs"] += 1
        facts["open"] += line["is_open"]
        facts["sound"] += line["is_sound"]
        facts["slowest"] = max(facts["slowest"], [*line["slowest"], line["index"]])
        for kind, cause, detail in line["findings"]:
            one = found.setdefault((kind, cause), Found(kind, cause))
            one.count += 1
            one.indexes = [*one.indexes, line["index"]][:5]
            one.detail = one.detail or detail
            one.told = one.told or f"{line['prey']}: {'; '.join(line['told'])}"
    return sorted(found.values(), key=lambda one: (one.kind, -one.count)), facts


def show(seed: int, index: int) -> None:
    """One input with every operation, in words."""
    for line in judged(seed, index, index + 1, is_shown=True):
        print(f"run: {line['prey']}")
        for told in line["told"]:
            print(f"  {told}".encode("utf-8", "backslashreplace").decode())
        for outcome in line.get("outcomes", []):
            print(f"  - {outcome}".encode("utf-8", "backslashreplace").decode())
        for kind, cause, detail in line["findings"]:
            print(f"  FINDING {kind}: {cause}\n    {detail}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--stop", type=int, default=0)
    parser.add_argument("--index", type=int, default=None)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else random.randrange(2**32)
    if given.child:
        run_child(seed, given.start, given.stop, is_shown=given.show)
        return
    if given.index is not None:
        show(seed, given.index)
        return
    started = time.perf_counter()
    found, facts = run(seed, given.start, given.count)
    for one in found:
        print(f"\n[{one.kind}] {one.cause}  x{one.count}  seed {seed} indexes {one.indexes}")
        print(f"    {one.told}"[:400].encode("utf-8", "backslashreplace").decode())
        print(f"    {one.detail}"[:700].encode("utf-8", "backslashreplace").decode())
    took = time.perf_counter() - started
    print(f"\nseed {seed}: {facts}, {len(found)} causes, {took:.0f} s")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
