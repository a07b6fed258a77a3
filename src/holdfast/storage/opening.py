"""Open the fsspec file system behind a URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsspec.core import url_to_fs

from holdfast.errors import InvalidRequestError, UnavailableError
from holdfast.storage.base import shown
from holdfast.storage.failures import is_transient


def open_filesystem(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    Raises:
        InvalidRequestError: the scheme or an option is unknown, or a package is missing.
        UnavailableError: opening it reads something, and that failed.
    """
    try:
        fs, root = url_to_fs(url, **options)
    except ImportError as error:
        raise InvalidRequestError(
            "the package for this kind of url is not installed", url=shown(url), todo=str(error)
        ) from error
    except Exception as error:  # of any class: each kind of file system has its own
        if isinstance(error, OSError) or is_transient(error):
            raise UnavailableError(
                "cannot open this url: storage failed", url=shown(url), cause=_cause(error)
            ) from error
        raise InvalidRequestError(
            "fsspec cannot open this url", url=shown(url), cause=_cause(error)
        ) from error
    return fs, root


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {shown(str(error))[:200]}"
