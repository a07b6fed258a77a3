"""The staging pool: bounded, reused, and never a place to wait for a writer that is gone."""

from __future__ import annotations

import threading

import pytest

from holdfast.checkpoint.saving.staging import (
    BUFFER_BYTES,
    Buffer,
    StagingPool,
    default_bytes_max,
    ordinary,
)


def waiting_acquire(pool: StagingPool, size: int) -> tuple[threading.Thread, list[object]]:
    got: list[object] = []

    def acquire() -> None:
        try:
            got.append(pool.acquire(size))
        except RuntimeError as error:
            got.append(error)

    thread = threading.Thread(target=acquire)
    thread.start()
    return thread, got


def test_one_buffer_is_granted_however_small_the_pool() -> None:
    pool = StagingPool(1)
    assert pool.acquire(100).nbytes >= 100


def test_acquire_waits_for_a_release_when_the_pool_is_exhausted() -> None:
    pool = StagingPool(1000)
    starved = threading.Event()
    pool.begin(starved.set)
    first = pool.acquire(900)
    assert not starved.is_set()
    thread, got = waiting_acquire(pool, 200)
    assert starved.wait(10)
    assert not got
    pool.release(first)
    thread.join(10)
    assert len(got) == 1
    assert pool.bytes_held == 200


def test_failed_writer_wakes_the_snapshot_with_its_error() -> None:
    pool = StagingPool(1000)
    held = pool.acquire(1000)
    thread, got = waiting_acquire(pool, 10)
    failure = RuntimeError("disk")
    pool.fail(failure)
    thread.join(10)
    assert got == [failure]
    with pytest.raises(RuntimeError, match="disk"):
        pool.acquire(1)
    pool.release(held)
    pool.begin(lambda: None)
    assert pool.acquire(10).nbytes == 10


def test_buffers_are_used_again_and_trimmed_to_what_the_next_may_need() -> None:
    pool = StagingPool(8 * BUFFER_BYTES)
    pool.begin(lambda: None)
    buffers = [pool.acquire(BUFFER_BYTES) for _ in range(4)]
    addresses = {buffer.ctypes.data for buffer in buffers}
    for buffer in buffers:
        pool.release(buffer)
    pool.trim()
    pool.begin(lambda: None)
    again = pool.acquire(BUFFER_BYTES - 5)
    assert again.ctypes.data in addresses
    pool.release(again)
    assert pool.bytes_held == 4 * BUFFER_BYTES
    pool.trim()
    assert BUFFER_BYTES <= pool.bytes_held < 4 * BUFFER_BYTES


def test_default_bound_is_positive_and_no_more_than_a_base_needs() -> None:
    assert default_bytes_max(0, tables=0) == 2 * BUFFER_BYTES
    assert default_bytes_max(1 << 60, tables=0) < 1 << 60


def test_buffers_of_two_kinds_of_memory_are_kept_apart() -> None:
    pool = StagingPool(8 * BUFFER_BYTES)
    pool.begin(lambda: None)
    made: list[int] = []

    def pinned(size: int) -> Buffer:
        made.append(size)
        return ordinary(size)

    first = pool.acquire(BUFFER_BYTES, pinned)
    second = pool.acquire(BUFFER_BYTES)
    addresses = first.ctypes.data, second.ctypes.data
    pool.release(second)
    pool.release(first)
    assert pool.acquire(BUFFER_BYTES, pinned).ctypes.data == addresses[0]
    assert pool.acquire(BUFFER_BYTES).ctypes.data == addresses[1]
    assert made == [BUFFER_BYTES]
