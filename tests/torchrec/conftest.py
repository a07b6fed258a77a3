"""One pool of processes for all tests of TorchRec: importing it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.torchrec.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes that play the ranks."""
    made = Pool()
    yield made
    made.close()
