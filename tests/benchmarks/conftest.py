"""One quick run of every section, for all tests of what they found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.run import run_all

HANG_S = 1200  # the first test to ask for it waits for every section, beside whatever else runs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of these sections time for all of them."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(HANG_S))


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What all sections found at a tiny size, and the document they were written to."""
    out = tmp_path_factory.mktemp("bench") / "docs" / "benchmarks.md"
    return run_all(quick=True, out=out), out


@pytest.fixture
def section(bench: tuple[dict[str, Any], Path], request: pytest.FixtureRequest) -> SimpleNamespace:
    """The section that a test module names as SECTION."""
    found = next(s for s in bench[0]["sections"] if s["name"] == request.module.SECTION)
    plain: SimpleNamespace = json.loads(
        json.dumps(found), object_hook=lambda each: SimpleNamespace(**each)
    )
    return plain
