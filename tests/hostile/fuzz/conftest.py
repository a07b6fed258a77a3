"""Little memory for every test, and a small run with a grid."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.storage import open_storage
from tests.golden.make_format2 import TABLES, write_grid_store
from tests.hostile.fuzz.lies import Store


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """A lying count must not cost memory: an allocation of gigabytes fails the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture
def grid(tmp_path: Path) -> Store:
    write_grid_store(open_storage(str(tmp_path)), TABLES[:2])
    return Store(tmp_path)
