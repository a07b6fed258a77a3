"""What a backend's failure means: there is none such, it exists, it may pass, or it will not.

Backends raise the classes of their own libraries, sometimes translated into builtin ones, with the
original as the cause. They are told apart by what all have in common (a status, a code, the names
of their classes), so that no library must be imported to read its errors.

Invariant: a failure is called transient only when it says so; everything else is final.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from holdfast.errors import (
    ConflictError,
    HoldfastError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from holdfast.storage.base import no_such_object, shown

_TAKEN = {"412", "PreconditionFailed"}
_TRANSIENT = {"408", "409", "429", "500", "502", "503", "504"}
_TRANSIENT |= {"ConditionalRequestConflict", "InternalError", "InternalServerError", "SlowDown"}
_TRANSIENT |= {"OperationAborted", "RequestTimeout", "ServiceUnavailable", "Throttling"}
_TRANSIENT |= {"RequestTimeoutException", "ThrottlingException", "TooManyRequests"}
_UNKNOWN_TO_STORE = {"501", "NotImplemented", "InvalidArgument", "400"}
_DENIED = {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}
_TRANSIENT_CLASSES = {
    "ConnectionError", "TimeoutError",  # builtin, and everything derived from them
    "HTTPClientError", "ResponseParserError",  # botocore: no answer, or half of one
    "ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError",  # aiohttp
    "IncompleteRead", "IncompleteReadError", "TransportError", "FSTimeoutError",
}  # fmt: skip
_TRANSIENT_ERRNO = {
    errno.EAGAIN, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH,
    errno.EINTR, errno.ENETUNREACH, errno.EPIPE, errno.EREMOTEIO, errno.ETIMEDOUT,
}  # fmt: skip


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later.

    >>> is_transient(ConnectionResetError()), is_transient(PermissionError())
    (True, False)
    """
    if isinstance(error, HoldfastError | FileExistsError | FileNotFoundError | PermissionError):
        return False
    for each in _chain(error):
        said = set(_codes(each))
        if said & (_DENIED | _TAKEN):
            return False
        if said:
            return bool(said & _TRANSIENT)
        if {cls.__name__ for cls in type(each).__mro__} & _TRANSIENT_CLASSES:
            return True
        if isinstance(each, OSError) and each.errno in _TRANSIENT_ERRNO:
            return True
    return False


def is_taken(error: BaseException) -> bool:
    """Whether the store refused to create a name because it exists."""
    return isinstance(error, ConflictError | FileExistsError) or _says(error, _TAKEN)


def is_absent(error: BaseException) -> bool:
    """Whether what was asked for does not exist.

    >>> is_absent(FileNotFoundError()), is_absent(OSError(5, "i/o"))
    (True, False)
    """
    absent = (NotFoundError, FileNotFoundError, IsADirectoryError, NotADirectoryError)
    return isinstance(error, absent) or _says(
        error, {"404", "NoSuchKey", "NoSuchUpload", "NoSuchBucket"}
    )


def has_no_upload(error: BaseException) -> bool:
    """Whether the store does not know the multipart upload that a request was about."""
    return _says(error, {"NoSuchUpload"})


def is_past_the_end(error: BaseException) -> bool:
    """Whether a range was asked for that the object does not have."""
    return _says(error, {"416", "InvalidRange"})


def is_not_offered(error: BaseException) -> bool:
    """Whether the store does not know how to do what was asked."""
    return isinstance(error, NotImplementedError | TypeError) or _says(error, _UNKNOWN_TO_STORE)


def as_ours(error: BaseException, *, doing: str, name: str, url: str) -> HoldfastError:
    """What the failure of a request about an object means to the caller."""
    if isinstance(error, HoldfastError):
        return error
    if _says(error, {"NoSuchBucket"}):
        return InvalidRequestError("the bucket does not exist", url=url, todo="create it first")
    if is_absent(error):
        return no_such_object(name, url=url)
    if is_taken(error):
        return name_taken(name, url=url)
    is_denied = isinstance(error, PermissionError) or _says(error, _DENIED)
    todo = "check the credentials and their rights" if is_denied else "retry"
    return UnavailableError(
        f"cannot {doing}: {'permission denied' if is_denied else 'storage failed'}",
        object=name,
        url=url,
        cause=f"{type(error).__name__}: {shown(str(error))[:200]}",
        todo=todo,
    )


def name_taken(name: str, *, url: str) -> ConflictError:
    """The error for a name that exists."""
    return ConflictError(
        "the object exists already", object=name, url=url, todo="another writer may own the run"
    )


def _says(error: BaseException, codes: set[str]) -> bool:
    return any(codes.intersection(_codes(each)) for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what caused it, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__


def _codes(error: BaseException) -> Iterator[str]:
    """The statuses and codes an error carries, in any of the libraries' ways."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code"))
        yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    for name in ("code", "status_code", "status", "error_code"):
        value = getattr(error, name, None)
        if isinstance(value, int | str) and not isinstance(value, bool):
            yield str(value)
