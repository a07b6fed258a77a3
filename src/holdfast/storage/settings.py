"""How a remote store is used, beyond where it is: every default lives here.

Given as ``storage_options={"holdfast": {"part_bytes": 32 << 20, ...}}``, plain numbers, so that
they pass through files, messages and command lines like every other storage option.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InvalidRequestError

OPTION = "holdfast"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """What ``storage_options["holdfast"]`` means when it is left out."""

    part_bytes: int = 16 << 20
    """An object larger than this is sent in parts of this size."""
    parts_at_once: int = 2
    """Parts on their way beside the one being filled: what bounds memory."""
    timeout_s: float = 20.0
    """How long a request may stay without an answer (S3)."""
    tries: int = 8
    retry_s: float = 0.1
    """The first wait after a failure; each further one is twice as long."""
    retry_s_max: float = 10.0
    give_up_s: float = 120.0
    """No request is tried again after so long."""
    lease_s: float = 30.0
    """Where a lease decides who writes: for how long one is held without a sign of life."""
    settle_s: float = 2.0
    """Where a lease decides who writes: by when a request has taken effect, or never will."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise InvalidRequestError(f"{field.name} must be a positive number", value=value)
        for name in ("part_bytes", "parts_at_once", "tries"):
            if not isinstance(getattr(self, name), int):
                raise InvalidRequestError(f"{name} must be whole", value=getattr(self, name))
        if self.lease_s < 4 * self.settle_s:
            raise InvalidRequestError(
                "a lease must last longer than it takes to agree on one",
                lease_s=self.lease_s,
                settle_s=self.settle_s,
                todo="give at least four times settle_s",
            )


def take_settings(options: Mapping[str, Any]) -> tuple[RemoteSettings, dict[str, Any]]:
    """Our part of the storage options, and what is left for fsspec.

    >>> settings, rest = take_settings({"key": "k", "holdfast": {"tries": 3}})
    >>> settings.tries, rest
    (3, {'key': 'k'})

    Raises:
        InvalidRequestError: names what is unknown and lists what is known.
    """
    rest = dict(options)
    given = rest.pop(OPTION, {})
    known = [field.name for field in dataclasses.fields(RemoteSettings)]
    if not isinstance(given, Mapping) or not set(given) <= set(known):
        raise InvalidRequestError(
            f"unknown {OPTION!r} storage option", given=given, todo=f"give some of {known}"
        )
    return RemoteSettings(**given), rest
