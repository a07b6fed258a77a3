"""Where checkpoints live: a folder, or any URL that fsspec can open.

``open_storage`` is the only door; everything behind it keeps the one contract of base.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from holdfast.errors import InvalidRequestError
from holdfast.storage.base import ObjectWriter, Storage, StoredObject

__all__ = ["ObjectWriter", "Storage", "StoredObject", "as_storage", "open_storage"]

_FOLDER_SCHEMES = ("file", "local")
_S3_SCHEMES = ("s3", "s3a")


def open_storage(url: str | Path, **storage_options: Any) -> Storage:
    """The storage at a path, a ``file://`` URL or any other fsspec URL; nothing is touched yet.

    ``storage_options`` (credentials, endpoints) go to fsspec as they are, but for ``holdfast``,
    whose value is ours (settings.py); a folder takes none.

    >>> open_storage("file:///tmp/my%20run").url
    '/tmp/my run'

    Raises:
        InvalidRequestError: the URL is empty, its scheme unknown, or its package not installed.
    """
    if isinstance(url, str):
        if not url:
            raise InvalidRequestError("the storage url is empty", todo="give a folder or a URL")
        parts = urlsplit(url)
        if "://" in url and parts.scheme not in _FOLDER_SCHEMES:
            # fsspec costs tens of milliseconds to import, and a folder does not need it.
            if parts.scheme in _S3_SCHEMES:
                from holdfast.storage.s3.objects import S3Storage

                return S3Storage.open(url, storage_options)
            from holdfast.storage.remote import RemoteStorage

            return RemoteStorage.open(url, storage_options)
        if "://" in url:
            if parts.netloc not in ("", "localhost"):
                raise InvalidRequestError(
                    "a file url names a folder of this machine",
                    host=parts.netloc,
                    todo="write three slashes: file:///folder",
                )
            url = unquote(parts.path)
    if storage_options:
        raise InvalidRequestError("a folder takes no options", options=sorted(storage_options))
    from holdfast.storage.folder.objects import FolderStorage

    return FolderStorage(url)


def as_storage(
    place: str | os.PathLike[str] | Storage, options: Mapping[str, Any] | None = None
) -> Storage:
    """The storage at a place that is named by a URL, or a storage itself."""
    if isinstance(place, str | os.PathLike):
        return open_storage(os.fspath(place), **dict(options or {}))
    if options:
        raise InvalidRequestError("an open storage takes no options", options=sorted(options))
    return place
