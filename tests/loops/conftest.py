"""Training programs for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.loops import (  # noqa: F401  (they fill LOOPS and ODD)
    customizing,
    optimizing,
    surprising,
    touching,
    unusual,
    writing,
)
from tests.loops.program import LOOPS, ODD, Program

# torch.compile imports modules of torch that warn.
COMPILING = "ignore:.*torch.jit.script_method.*:DeprecationWarning"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Programs that compile do not fail by torch's own warnings."""
    for item in items:
        if "tests/loops" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings(COMPILING))


@pytest.fixture
def begin() -> Iterator[Callable[[str, int], Program]]:
    """Make a program by name; what it did to the process is taken back."""
    begun: list[Program] = []

    def make(name: str, rows: int) -> Program:
        torch.manual_seed(5)
        begun.append({**LOOPS, **ODD}[name].make(rows))
        return begun[-1]

    yield make
    for program in begun:
        program.end()
