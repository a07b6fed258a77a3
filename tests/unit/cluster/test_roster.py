from __future__ import annotations

import threading
import time

from holdfast.cluster.roster import Starting

PAST_S = 50.0


def test_time_to_compile_counts_against_no_deadline() -> None:
    starting, ready = Starting(), threading.Event()
    late = time.monotonic() - PAST_S
    assert not starting.wait(ready, late)
    starting.tell(10.0)
    assert not starting.wait(ready, late)  # late by more than it compiled
    starting.tell(100_000.0)
    threading.Timer(0.1, ready.set).start()
    assert starting.wait(ready, late)


def test_a_process_that_is_ready_was_in_time() -> None:
    ready = threading.Event()
    ready.set()
    assert Starting().wait(ready, time.monotonic() - PAST_S)
