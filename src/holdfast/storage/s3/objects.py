"""Objects on S3 and everything that speaks its language, request by request.

An object of up to ``part_bytes`` is one PUT, a larger one a multipart upload; both show it whole or
not at all. Where the store honours ``If-None-Match: *`` (storage/probe.py finds out) the store
itself lets one writer win a name. Where it does not, a lease (storage/lease.py) decides who may
commit, and a look before each put keeps what is there.

What it costs, in requests:

    put_if_absent      1 (conditional), or 2 under a lease: look, put
    create .. close    1, + 1 look without conditions; in parts: 1 + parts + 2
    get, size, delete  1; list 1 per 1000 names

Invariants:
- No rename, and no listing but in ``list`` and ``clean``.
- At most ``parts_at_once`` + 1 parts are in memory per object being written.

Not here: requests (bucket.py), names and errors (storage/base.py, storage/failures.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

from holdfast.errors import HoldfastError, UnavailableError
from holdfast.storage.base import (
    TEMPORARY,
    StoredObject,
    StoredObjects,
    check_name,
    check_prefix,
    check_range,
    is_name,
    no_such_object,
    object_too_short,
    read_pieces,
    shown,
)
from holdfast.storage.failures import (
    as_ours,
    has_no_upload,
    is_absent,
    is_past_the_end,
    is_transient,
    name_taken,
)
from holdfast.storage.lease import NAME as LEASE
from holdfast.storage.lease import Lease, shared_lease
from holdfast.storage.opening import open_filesystem
from holdfast.storage.probe import has_conditional_put
from holdfast.storage.retry import CHANCE, Backoff, Retrier
from holdfast.storage.s3.bucket import S3Bucket
from holdfast.storage.s3.writer import S3Writer
from holdfast.storage.settings import RemoteSettings, take_settings

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Bounds what a read holds beside the caller's buffer.
_READ_BYTES_MAX = 32 << 20

# Uploads of this process that are under way: ``clean`` leaves them alone.
_under_way: set[str] = set()


class S3Storage:
    """A prefix of a bucket."""

    def __init__(
        self,
        fs: Any,
        root: str,
        *,
        url: str,
        settings: RemoteSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        chance: Callable[[], float] = CHANCE,
    ) -> None:
        self.settings = settings or RemoteSettings()
        self._url = shown(url)
        bucket, _, prefix = root.strip("/").partition("/")
        prefix = f"{prefix}/" if prefix else ""
        retrier = Retrier(
            Backoff.of(self.settings),
            is_transient=is_transient,
            clock=clock,
            sleep=sleep,
            chance=chance,
        )
        self._bucket = S3Bucket(fs, bucket, prefix, retrier=retrier)
        self._store = (fs._fs_token, bucket)
        cell = _S3Cell(self._bucket, self._url)
        self._lease = shared_lease(
            (*self._store, prefix),
            lambda: Lease(cell, self.settings, url=shown(url), clock=clock, sleep=sleep),
        )

    @classmethod
    def open(cls, url: str, options: Mapping[str, Any]) -> Self:
        """The storage at an ``s3://`` URL.

        Raises:
            InvalidRequestError: s3fs is not installed, or does not take these options.
        """
        settings, rest = take_settings(options)
        rest["config_kwargs"] = {
            "retries": {"total_max_attempts": 1},  # storage/retry.py does it, for all reasons alike
            "connect_timeout": settings.timeout_s,
            "read_timeout": settings.timeout_s,
            "max_pool_connections": 32,
            # Every segment has a checksum of ours; some servers send that of the whole object with
            # a range of it.
            "response_checksum_validation": "when_required",
            **rest.get("config_kwargs", {}),
        }
        fs, root = open_filesystem(url, rest)
        fs.retries = 1
        return cls(fs, root, url=url, settings=settings)

    def __repr__(self) -> str:
        return f"S3Storage({self.url!r})"

    @property
    def url(self) -> str:
        """The URL, without credentials."""
        return self._url

    @property
    def is_conditional(self) -> bool:
        """Whether the store refuses to create a name that exists; asked of it once."""
        return has_conditional_put(
            self._store,
            lambda name, data: self._bucket.put(name, data, is_new=True),
            self._bucket.remove,
        )

    def create(self, name: str) -> S3Writer:
        """Start a new object; the first request is sent when a part is full."""
        return S3Writer(self, check_name(name))

    def put_if_absent(self, name: str, data: bytes) -> None:
        """Create an object at once unless its name exists."""
        check_name(name)
        with self.reporting("create", name):
            if self.is_conditional:
                self._bucket.put(name, data, is_new=True)
                return
            with self._lease.held():
                self._check_absent(name)
                self._bucket.put(name, data, before=self._lease.check)
                self._lease.ours[name] = len(data)

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        """A range of an object."""
        check_range(offset, length)
        check_name(name)
        end = None if length is None else offset + length
        with self.reporting("read", name):
            if length == 0:
                data = self._at_end(name, offset)
            else:
                try:
                    data = self._bucket.get(
                        name, first=offset, last=None if end is None else end - 1
                    )
                except Exception as error:
                    if not is_past_the_end(error):
                        raise
                    data = self._at_end(name, offset if end is None else end)
        if end is not None and len(data) != end - offset:
            raise object_too_short(name, url=self.url, expected=end, found=offset + len(data))
        return data

    def get_into(self, name: str, buffer: WriteableBuffer, *, offset: int = 0) -> None:
        """A range of an object, piece by piece into the caller's memory."""
        read_pieces(self.get, name, buffer, offset=offset, most=_READ_BYTES_MAX)

    def size(self, name: str) -> int:
        """An object's length."""
        check_name(name)
        known = self._lease.ours.get(name)
        if known is not None and self._lease.is_held:
            return known
        with self.reporting("look", name):
            found = self._bucket.look(name)
        if found is None:
            raise no_such_object(name, url=self.url)
        return found

    def list(self, prefix: str) -> StoredObjects:
        """The objects under a prefix."""
        check_prefix(prefix)
        with self.reporting("list", prefix):
            found = [StoredObject(name, size) for name, size in self._bucket.names(prefix)]
        return sorted(item for item in found if is_name(item.name))

    def delete(self, name: str) -> None:
        """Remove an object."""
        check_name(name)
        self._lease.ours.pop(name, None)
        with self.reporting("delete", name):
            self._bucket.remove(name)

    def clean(self) -> None:
        """Remove probes and the unfinished uploads of everyone else.

        Whose writer is dead cannot be told from afar; one that lives fails when it closes.
        """
        with self.reporting("clean", TEMPORARY):
            for name, _ in self._bucket.names(f"{TEMPORARY}/"):
                self._bucket.remove(name)
            for name, upload in self._bucket.uploads():
                if upload not in _under_way:
                    self._bucket.abort_upload(name, upload)

    # What a writer asks for.

    def put_whole(self, name: str, data: bytes) -> None:
        """Create an object from memory; its name is its writer's own, so no lease is needed."""
        with self.reporting("close", name):
            is_new = self.is_conditional
            if not is_new:
                self._check_absent(name)
            self._bucket.put(name, data, is_new=is_new)

    def start_upload(self, name: str) -> str:
        """Begin to send an object in parts."""
        with self.reporting("create", name):
            upload = self._bucket.start_upload(name)
        _under_way.add(upload)
        return upload

    def send_part(self, name: str, upload: str, number: int, data: bytes) -> str:
        """Send one part; what the store calls it."""
        with self._of_upload("write", name):
            return self._bucket.send_part(name, upload, number, data)

    def complete_upload(self, name: str, upload: str, tags: Sequence[str], *, size: int) -> None:
        """Show an upload under its name, unless that exists."""
        with self._of_upload("close", name):
            # Also where the store would refuse: not every one that does so for a put does so here.
            self._check_absent(name)
            self._bucket.complete_upload(name, upload, tags, size=size, is_new=self.is_conditional)
        _under_way.discard(upload)

    def abort_upload(self, name: str, upload: str) -> None:
        """Forget an upload; what a failing store keeps of it, ``clean`` removes."""
        self.forget_upload(upload)
        with suppress(Exception):  # the save has failed for another reason, which is reported
            self._bucket.abort_upload(name, upload)

    def forget_upload(self, upload: str) -> None:
        """An upload is no longer anyone's."""
        _under_way.discard(upload)

    def _at_end(self, name: str, end: int) -> bytes:
        """No bytes, where an object does end there, or later."""
        found = self._bucket.look(name)
        if found is None:
            raise no_such_object(name, url=self.url)
        if found < end:
            raise object_too_short(name, url=self.url, expected=end, found=found)
        return b""

    def _check_absent(self, name: str) -> None:
        if self._bucket.look(name) is not None:
            raise name_taken(name, url=self.url)

    @contextmanager
    def _of_upload(self, doing: str, name: str) -> Iterator[None]:
        """As ``reporting``, where an upload may be gone."""
        with self.reporting(doing, name):
            try:
                yield
            except Exception as error:
                if not has_no_upload(error):
                    raise
                raise UnavailableError(
                    "the upload is gone: the store lost it, or another writer removed it",
                    object=name,
                    url=self.url,
                    todo="save again",
                ) from error

    @contextmanager
    def reporting(self, doing: str, name: str) -> Iterator[None]:
        """Turn whatever s3fs raises into one of our errors."""
        try:
            yield
        except (HoldfastError, MemoryError):
            raise
        except Exception as error:  # a foreign edge
            raise as_ours(error, doing=doing, name=name, url=self.url) from error


class _S3Cell:
    """The object that a lease is written to; it knows no storage, so that it keeps none alive."""

    def __init__(self, bucket: S3Bucket, url: str) -> None:
        self._bucket = bucket
        self._url = url

    def read(self) -> bytes | None:
        """What is there."""
        try:
            return self._bucket.get(LEASE)
        except Exception as error:
            if is_absent(error):
                return None
            raise as_ours(error, doing="read", name=LEASE, url=self._url) from error

    def write(self, data: bytes) -> None:
        """Replace it, by one request: a second try would come later than the first was allowed."""
        try:
            self._bucket.put_once(LEASE, data)
        except Exception as error:
            raise as_ours(error, doing="write", name=LEASE, url=self._url) from error

    def remove(self) -> None:
        """Leave nothing there."""
        try:
            self._bucket.remove(LEASE)
        except Exception as error:
            raise as_ours(error, doing="delete", name=LEASE, url=self._url) from error
