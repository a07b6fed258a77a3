"""What ranks promise of waiting for each other."""

from __future__ import annotations

import threading

import pytest

from holdfast.checkpoint.ranks.ranks import end_within


def test_what_never_returns_is_left_behind() -> None:
    may_end = threading.Event()
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        end_within(may_end.wait, seconds=0.01)
    may_end.set()


def test_what_fails_in_time_raises_its_own_error() -> None:
    with pytest.raises(ZeroDivisionError):
        end_within(lambda: 1 // 0, seconds=60)
