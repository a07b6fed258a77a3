"""A new object on its way to S3: one request, or parts that are sent while the next is filled.

Invariants:
- Nothing is visible before ``close``; what is not closed is aborted, or left to ``clean``.
- At most ``parts_at_once`` parts are on their way, and one is being filled.
- An error of a part that is on its way reaches the next call.

Not here: requests, and sending them again (objects.py).
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from holdfast.errors import InvalidRequestError
from holdfast.storage.base import AbortingWriter, as_view
from holdfast.storage.settings import RemoteSettings

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# The store takes 10,000 parts. The first half is of one size, as some stores ask for (80 GB of 16
# MiB); after that the size doubles every 500, so that no object is too large.
_EVEN_PARTS, _PARTS_PER_DOUBLING = 5000, 500


def plan_part_bytes(number: int, *, part_bytes: int) -> int:
    """How large a part is, numbered from 1.

    >>> [plan_part_bytes(n, part_bytes=16) for n in (1, 5000, 5001, 5500, 5501, 10_000)]
    [16, 16, 32, 32, 64, 16384]
    """
    if number <= _EVEN_PARTS:
        return part_bytes
    return part_bytes << ((number - _EVEN_PARTS - 1) // _PARTS_PER_DOUBLING + 1)


class Uploads(Protocol):
    """What a writer asks of its storage."""

    @property
    def settings(self) -> RemoteSettings: ...
    def put_whole(self, name: str, data: bytes) -> None: ...
    def start_upload(self, name: str) -> str: ...
    def send_part(self, name: str, upload: str, number: int, data: bytes) -> str: ...
    def complete_upload(
        self, name: str, upload: str, tags: Sequence[str], *, size: int
    ) -> None: ...
    def abort_upload(self, name: str, upload: str) -> None: ...
    def forget_upload(self, upload: str) -> None: ...


class S3Writer(AbortingWriter):
    """A new object while it is written."""

    def __init__(self, storage: Uploads, name: str) -> None:
        self._storage = storage
        self._name = name
        self._bytes = 0
        self._buffer = io.BytesIO()
        self._upload: str | None = None
        self._senders: ThreadPoolExecutor | None = None
        self._sending: deque[Future[str]] = deque()
        self._tags: list[str] = []
        self._is_done = False

    @property
    def bytes(self) -> int:
        """How many bytes were written."""
        return self._bytes

    def write(self, data: ReadableBuffer) -> None:
        """Append a buffer; waits while too many parts are on their way."""
        self._check_open()
        view = as_view(data)
        with self._aborting():
            while view.nbytes:
                room = self._part_bytes() - self._buffer.tell()
                part = view[:room]
                self._buffer.write(part)
                self._bytes += part.nbytes
                view = view[part.nbytes :]
                # What fills one part exactly may still be all: sent whole, by one request.
                if view.nbytes:
                    self._send()

    def close(self) -> None:
        """Finish the upload and show it under its name."""
        self._check_open()
        with self._aborting():
            if self._upload is None:
                self._storage.put_whole(self._name, self._buffer.getvalue())
            else:
                self._send()
                while self._sending:
                    self._tags.append(self._sending.popleft().result())
                self._storage.complete_upload(
                    self._name, self._upload, self._tags, size=self._bytes
                )
            self._end()

    def abort(self) -> None:
        """Stop the upload."""
        if self._is_done:
            return
        self._end()
        if self._upload is not None:
            self._storage.abort_upload(self._name, self._upload)

    def __del__(self) -> None:
        # Like a killed process: the upload stays unfinished, and is anyone's to clean.
        if not getattr(self, "_is_done", True) and self._upload is not None:
            self._storage.forget_upload(self._upload)
            if self._senders is not None:
                self._senders.shutdown(wait=False, cancel_futures=True)

    def _part_bytes(self) -> int:
        number = len(self._tags) + len(self._sending) + 1
        return plan_part_bytes(number, part_bytes=self._storage.settings.part_bytes)

    def _send(self) -> None:
        """Put the filled part on its way, and begin the next."""
        settings = self._storage.settings
        if self._upload is None:
            self._upload = self._storage.start_upload(self._name)
            self._senders = ThreadPoolExecutor(settings.parts_at_once, "holdfast-upload")
        assert self._senders is not None
        while len(self._sending) >= settings.parts_at_once:
            self._tags.append(self._sending.popleft().result())
        number = len(self._tags) + len(self._sending) + 1
        send = self._storage.send_part
        data = self._buffer.getvalue()
        self._sending.append(self._senders.submit(send, self._name, self._upload, number, data))
        self._buffer = io.BytesIO()

    def _end(self) -> None:
        """Let go of memory and threads; parts that wait are not sent any more."""
        self._is_done = True
        self._buffer = io.BytesIO()
        self._sending.clear()
        if self._senders is not None:
            self._senders.shutdown(wait=False, cancel_futures=True)

    def _check_open(self) -> None:
        if self._is_done:
            raise InvalidRequestError("the writer was closed or aborted", object=self._name)
