"""Open the fsspec file system behind a URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsspec.core import url_to_fs

from holdfast.errors import InvalidRequestError
from holdfast.storage.base import shown


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    Raises:
        InvalidRequestError: the scheme or an option is unknown, or a package is missing.
    """
    try:
        fs, root = url_to_fs(url, **options)
    except ImportError as error:
        raise InvalidRequestError(
            "the package for this kind of url is not installed", url=shown(url), todo=str(error)
        ) from error
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(
            "fsspec cannot open this url", url=shown(url), cause=shown(str(error))
        ) from error
    return fs, root
