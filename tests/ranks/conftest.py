"""One pool of processes for all tests of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.pool import Pool, open_pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes, started once."""
    with open_pool() as opened:
        yield opened
