"""Where checkpoints live: a folder, or any URL that fsspec can open.

``open_storage`` is the only door; everything behind it keeps the one contract of base.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from holdfast.errors import InvalidRequestError
from holdfast.storage.base import ObjectWriter, Storage, StoredObject

__all__ = ["ObjectWriter", "Storage", "StoredObject", "open_storage"]

_FOLDER_SCHEMES = ("file", "local")


def open_storage(url: str | Path, **storage_options: Any) -> Storage:
    """The storage at a path, a ``file://`` URL or any other fsspec URL; nothing is touched yet.

    ``storage_options`` (credentials, endpoints) go to fsspec as they are; a folder takes none.

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
    from holdfast.storage.folder import FolderStorage

    return FolderStorage(url)
