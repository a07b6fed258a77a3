"""Names of earlier versions: they go on working for one minor version, with a warning."""

from __future__ import annotations

import warnings


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that ``old`` is deprecated, and name what to use instead.

    The warning points at the caller of the caller, unless ``stacklevel`` says otherwise.
    """
    warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=stacklevel)
