"""Find out whether a store refuses to create a name that exists, by trying it.

What a store promises and what a server does are two things: a proxy or an older version may take
the condition and ignore it, and then two writers both believe that they were first. So the first
process that writes puts one small object twice. This costs three to six requests, once.

Invariants:
- Nothing of the probe stays; what a probe that was killed leaves lies under ``.tmp/``, where
  ``clean`` removes it.
- A store is believed not to refuse only when it did not twice: in between, another process that
  takes over may have cleaned the first of the two objects away.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable

from holdfast.storage.base import TEMPORARY
from holdfast.storage.failures import is_not_offered, is_taken

_found: dict[tuple[object, ...], bool] = {}
_looking = threading.Lock()


def has_conditional_put(
    key: tuple[object, ...],
    put_new: Callable[[str, bytes], None],
    remove: Callable[[str], None],
) -> bool:
    """Whether ``put_new`` fails for a name that exists; asked once per process and place.

    Errors that say nothing about it (no answer, no rights) are the caller's.
    """
    with _looking:
        if key not in _found:
            _found[key] = _refuses(put_new, remove) or _refuses(put_new, remove)
        return _found[key]


def _refuses(put_new: Callable[[str, bytes], None], remove: Callable[[str], None]) -> bool:
    name = f"{TEMPORARY}/probe-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        try:
            put_new(name, b"first")
        except Exception as error:
            if is_not_offered(error):
                return False
            raise
        try:
            put_new(name, b"second")
        except Exception as error:
            if is_taken(error):
                return True
            raise
        return False
    finally:
        remove(name)
