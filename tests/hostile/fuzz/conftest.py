"""Little memory for every test, and a small run with a grid."""

from __future__ import annotations

import resource
import shutil
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


@pytest.fixture(scope="session")
def written_grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written once: it takes longer than most tests."""
    folder = tmp_path_factory.mktemp("grid")
    write_grid_store(open_storage(str(folder)), TABLES[:2])
    return folder


@pytest.fixture
def grid(written_grid: Path, tmp_path: Path) -> Store:
    shutil.copytree(written_grid, tmp_path, dirs_exist_ok=True)
    return Store(tmp_path)
