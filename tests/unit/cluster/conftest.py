"""Real processes for tests of what goes between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cluster.engine import LocalEngine
from tests.cluster.roles import MODULE


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    """Starts the roles of tests/cluster/roles.py."""
    monkeypatch.chdir(Path(__file__).parents[3])
    with LocalEngine(logs=tmp_path / "logs", module=MODULE) as engine:
        yield engine
