"""Tries, waits and ends, without waiting; and which failures are worth another try."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.errors import ConflictError, UnavailableError
from holdfast.storage.failures import as_ours, is_absent, is_taken, is_transient
from holdfast.storage.retry import Backoff, Retrier, plan_wait

BACKOFF = Backoff(tries=5, first_s=1.0, most_s=3.0, total_s=100.0)


class Response(Exception):
    """The shape of a botocore error."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(code)
        self.response = {
            "Error": {"Code": code},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class HTTPClientError(Exception):
    """As botocore calls a request without an answer."""


class EndpointConnectionError(HTTPClientError):
    """One of its kinds."""


def caused(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


def failing(errors: list[Exception]) -> Callable[[], str]:
    def act() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    return act


class Waits:
    """A clock that moves only when someone sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def retrier(self, backoff: Backoff = BACKOFF, *, chance: float = 1.0) -> Retrier:
        return Retrier(
            backoff,
            is_transient=is_transient,
            clock=lambda: self.now,
            sleep=self.sleep,
            chance=lambda: chance,
        )


def test_waits_double_up_to_a_bound_and_end() -> None:
    waits = Waits()
    with pytest.raises(ConnectionError, match="last"):
        waits.retrier().call(failing([ConnectionError(str(n)) for n in range(4)] + [
            ConnectionError("last"), ConnectionError("never tried")
        ]))  # fmt: skip
    assert waits.slept == [1.0, 2.0, 3.0, 3.0]


def test_what_works_in_the_end_is_returned() -> None:
    waits = Waits()
    assert waits.retrier().call(failing([TimeoutError(), ConnectionError()])) == "done"
    assert waits.slept == [1.0, 2.0]


def test_a_permanent_error_is_raised_at_once() -> None:
    waits = Waits()
    with pytest.raises(PermissionError):
        waits.retrier().call(failing([PermissionError(), ConnectionError()]))
    assert waits.slept == []


def test_jitter_takes_at_most_half_of_a_wait() -> None:
    for chance in (0.0, 0.3, 0.999):
        wait = plan_wait(2, elapsed_s=0.0, backoff=BACKOFF, chance=chance)
        assert wait is not None and 1.0 <= wait < 2.0


def test_no_try_comes_after_the_time_is_over() -> None:
    waits = Waits()
    backoff = Backoff(tries=1000, first_s=1.0, most_s=10.0, total_s=25.0)
    with pytest.raises(TimeoutError):
        waits.retrier(backoff).call(failing([TimeoutError() for _ in range(1000)]))
    assert 25.0 <= waits.now < 35.0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError(errno.ECONNREFUSED, "refused"), True),
        (EndpointConnectionError(), True),
        (Response("SlowDown", 503), True),
        (Response("InternalError", 500), True),
        (Response("ConditionalRequestConflict", 409), True),
        (caused(OSError(errno.EBUSY, "busy"), Response("SlowDown", 503)), True),
        (caused(OSError(errno.EINVAL, "failed"), Response("PreconditionFailed", 412)), False),
        (caused(PermissionError(), Response("AccessDenied", 403)), False),
        (Response("NoSuchKey", 404), False),
        (FileNotFoundError(), False),
        (FileExistsError(), False),
        (OSError(errno.ENOSPC, "full"), False),
        (ValueError(), False),
        (UnavailableError("ours, tried already"), False),
        (ConflictError("ours"), False),
    ],
    ids=repr,
)
def test_only_what_may_pass_is_transient(error: Exception, expected: bool) -> None:
    assert is_transient(error) is expected


def test_what_exists_and_what_does_not_are_told_by_status_or_class() -> None:
    assert is_taken(caused(OSError(22, "failed"), Response("PreconditionFailed", 412)))
    assert is_taken(FileExistsError())
    assert not is_taken(Response("SlowDown", 503))
    assert is_absent(Response("404", 404))
    assert not is_absent(Response("PreconditionFailed", 412))


def test_a_missing_bucket_is_not_a_missing_object() -> None:
    facts: dict[str, Any] = {"doing": "create", "name": "a", "url": "s3://b/run"}
    assert "create it first" in str(as_ours(Response("NoSuchBucket", 404), **facts))
    assert "no such object" in str(as_ours(Response("NoSuchKey", 404), **facts))
