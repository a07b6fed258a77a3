"""Requests to one bucket of S3, under one prefix: sent, sent again where that may help, answered.

s3fs is used for what it is good at (credentials, sessions, signatures, one event loop); its caches,
its retries and its own multipart files are left aside, so that what is asked for here is what goes
over the wire.

Invariants:
- A request is sent again only after a failure that may pass.
- A creation whose answer was lost is settled by reading back: repeated, it does not conflict with
  itself.

Not here: what an error means to the caller (objects.py); waiting (storage/retry.py).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fsspec.asyn import sync

from holdfast.storage.failures import has_no_upload, is_absent, is_not_offered, is_taken
from holdfast.storage.retry import Retrier

# Only if nothing has the name; where a store honours it.
_IF_NEW = {"IfNoneMatch": "*"}


class S3Bucket:
    """A bucket; names are relative to the prefix. What s3fs raises is not translated."""

    def __init__(self, fs: Any, bucket: str, prefix: str, *, retrier: Retrier) -> None:
        self._fs = fs
        self._bucket = bucket
        self._prefix = prefix
        self._retrier = retrier

    def put(
        self,
        name: str,
        data: bytes,
        *,
        is_new: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Store an object; ``before`` is called before each try."""

        def attempt() -> None:
            before()
            try:
                self.put_once(name, data, is_new=is_new)
            except Exception as error:
                # Perhaps by an earlier try that was not answered. There may have been one even at
                # the first: the HTTP client itself repeats a PUT on a connection that was closed.
                if not is_taken(error) or self._get_once(name) != data:
                    raise

        self._retrier.call(attempt)

    def put_once(self, name: str, data: bytes, *, is_new: bool = False) -> None:
        """Store an object by one request."""
        self._once("put_object", name, Body=io.BytesIO(data), **(_IF_NEW if is_new else {}))

    def get(self, name: str, *, first: int = 0, last: int | None = None) -> bytes:
        """The bytes from ``first`` to ``last``, which is included, as far as there are any."""
        is_whole = first == 0 and last is None
        wanted = {} if is_whole else {"Range": f"bytes={first}-{'' if last is None else last}"}
        return self._retrier.call(lambda: self._get_once(name, **wanted))

    def look(self, name: str) -> int | None:
        """The length of an object; None where there is none."""
        try:
            return int(self._call("head_object", name)["ContentLength"])
        except Exception as error:
            if is_absent(error):
                return None
            raise

    def remove(self, name: str) -> None:
        """Delete an object, if there is one."""
        self._call("delete_object", name)

    def names(self, prefix: str) -> Iterator[tuple[str, int]]:
        """The objects whose names start like this, and their lengths; a request per 1000."""
        more: dict[str, Any] = {}
        while True:
            page = self._send("list_objects_v2", Prefix=self._prefix + prefix, **more)
            for item in page.get("Contents", ()):
                yield item["Key"][len(self._prefix) :], int(item["Size"])
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    # Uploads in parts.

    def start_upload(self, name: str) -> str:
        """Begin an upload."""
        return str(self._call("create_multipart_upload", name)["UploadId"])

    def send_part(self, name: str, upload: str, number: int, data: bytes) -> str:
        """Send one part; what the store calls it."""

        def attempt() -> Any:
            return self._once(
                "upload_part", name, UploadId=upload, PartNumber=number, Body=io.BytesIO(data)
            )

        return str(self._retrier.call(attempt)["ETag"])

    def complete_upload(
        self, name: str, upload: str, tags: Sequence[str], *, size: int, is_new: bool
    ) -> None:
        """Show an upload under its name, which must have been free when it was last looked at."""
        parts = [{"PartNumber": n, "ETag": tag} for n, tag in enumerate(tags, start=1)]
        condition = _IF_NEW if is_new else {}
        tries = 0

        def attempt() -> None:
            nonlocal tries
            tries += 1
            try:
                self._once(
                    "complete_multipart_upload",
                    name,
                    UploadId=upload,
                    MultipartUpload={"Parts": parts},
                    **condition,
                )
            except Exception as error:
                # The name was free before the first try, and what is there now is as long as ours.
                is_settled = tries > 1 and (is_taken(error) or is_absent(error))
                if not is_settled or self.look(name) != size:
                    raise

        self._retrier.call(attempt)

    def abort_upload(self, name: str, upload: str) -> None:
        """Forget an upload, if the store has it."""
        try:
            self._call("abort_multipart_upload", name, UploadId=upload)
        except Exception as error:
            if not is_absent(error):
                raise

    def uploads(self) -> Iterator[tuple[str, str]]:
        """The uploads that are not complete: their names and ids; none where a store cannot say."""
        more: dict[str, Any] = {}
        while True:
            try:
                page = self._send("list_multipart_uploads", Prefix=self._prefix, **more)
            except Exception as error:
                # Not known to the store, and left to its own expiry; or a way to say none.
                if is_not_offered(error) or has_no_upload(error):
                    return
                raise
            for item in page.get("Uploads", ()):
                if item["Key"].startswith(self._prefix):
                    yield item["Key"][len(self._prefix) :], item["UploadId"]
            if not page.get("IsTruncated"):
                return
            more = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def _call(self, method: str, name: str, **arguments: Any) -> Any:
        return self._send(method, Key=self._prefix + name, **arguments)

    def _send(self, method: str, **arguments: Any) -> Any:
        return self._retrier.call(
            lambda: self._fs.call_s3(method, Bucket=self._bucket, **arguments)
        )

    def _once(self, method: str, name: str, **arguments: Any) -> Any:
        return self._fs.call_s3(method, Bucket=self._bucket, Key=self._prefix + name, **arguments)

    def _get_once(self, name: str, **arguments: Any) -> bytes:
        async def get() -> bytes:
            key = self._prefix + name
            answer = await self._fs._call_s3(
                "get_object", Bucket=self._bucket, Key=key, **arguments
            )
            try:
                # To the end, so that a connection that was cut shows.
                return bytes(await answer["Body"].read())
            finally:
                answer["Body"].close()

        return bytes(sync(self._fs.loop, get))
