"""What every number given to the planner must be; the one place that says so.

Invariant: NaN, infinity, True and text are no numbers here, nor is what the planner cannot multiply
without leaving the range of floats.
"""

from __future__ import annotations

import math

import numpy as np

from holdfast.errors import InvalidRequestError

NUMBER_MAX = 1e30


def check_positive(name: str, value: float) -> None:
    """Refuse what is not a finite number above zero."""
    if not is_number(value) or not 0 < value <= NUMBER_MAX:
        raise InvalidRequestError(
            f"{name} must be a finite number above zero",
            **{name: value},
            todo=f"give {name} above 0, in hours",
        )


def check_not_negative(name: str, value: float) -> None:
    """Refuse what is not a finite number of zero or more."""
    if not is_number(value) or not 0 <= value <= NUMBER_MAX:
        raise InvalidRequestError(
            f"{name} must be a finite number of zero or more",
            **{name: value},
            todo=f"give {name} of 0 or more, in hours",
        )


def check_count(name: str, value: int) -> None:
    """Refuse what is not a whole number of one or more."""
    if not is_whole(value) or not 1 <= value <= NUMBER_MAX:
        raise InvalidRequestError(
            f"{name} must be a whole number of one or more",
            **{name: value},
            todo=f"give {name} of 1 or more",
        )


def check_servers(servers: int, lost: int) -> None:
    """Refuse a failure that loses no server, or more than there are."""
    check_count("servers", servers)
    check_count("lost", lost)
    if lost > servers:
        raise InvalidRequestError(
            "a failure cannot lose more servers than there are",
            lost=lost,
            servers=servers,
            todo="give lost from 1 to servers",
        )


def is_number(value: object) -> bool:
    """Whether it can be compared as a number; a NaN can, and then fails every comparison."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether it is a whole number, as a number: 8 and not 8.0."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_number(
    name: str, value: float, low: float, high: float, *, open_ends: bool = False
) -> None:
    """Refuse what is not a number from ``low`` to ``high``, or strictly between the two."""
    if is_number(value) and (low < value < high or (not open_ends and low <= value <= high)):
        return
    between = f"between {low:g} and {high:g}" if math.isfinite(high) else f"greater than {low:g}"
    raise InvalidRequestError(
        f"{name} is not a number {between}", value=value, todo=f"give {name} {between}"
    )
