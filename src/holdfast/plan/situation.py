"""A situation: a model, its training and its cluster in plain numbers, and what follows from them.

Invariants:
- Rates are a server's; bytes and rows are the whole model's, divided evenly among the servers.
- Rows that t hours change are ``changed_per_hour`` · t^``changed_growth`` of all, at most all: few
  rows are hot, so twice the time changes less than twice the rows.

Not here: what strategies make of it (advise.py), measuring it (cli/).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InvalidRequestError
from holdfast.plan.checks import (
    check_count,
    check_not_negative,
    check_number,
    check_positive,
    check_servers,
    is_number,
)
from holdfast.plan.pls import check_pls

SECONDS_AN_HOUR = 3600.0


# What each number means: for the tables of `holdfast plan`.
MEANINGS = {
    "rows": "rows of all tables",
    "row_bytes": "of a row with its optimizer state",
    "mtbf_h": "hours between two failures",
    "servers": "servers that hold the tables",
    "lost": "servers that go at each failure",
    "dense_bytes": "of the networks",
    "changed_per_hour": "share of the rows that an hour changes",
    "changed_growth": "t hours change that share times t to this power",
    "updates_per_s": "rows that all workers update in a second",
    "job_h": "hours that a job trains",
    "reschedule_h": "hours until a machine is replaced",
    "copy_bytes_s": "a server copies in memory",
    "write_bytes_s": "a server writes to storage",
    "read_bytes_s": "a server reads from storage",
    "network_bytes_s": "a server receives",
    "memory_headroom": "memory that may be added, as a share of the model's",
    "pls": "portion of lost samples that is tolerated",
    "bits": "of a weight in checkpoints; 32 is every bit (--expected-restores)",
    "r": "share of the rows that cpr-mfu, -ssu and -scar save at a time",
    "coded": "data rows of a stripe, k",
    "parity": "coded rows of a stripe, r",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What must be known to compare strategies; the defaults are a mid-sized cluster's.

    ``lost``: servers that go at each failure. ``updates_per_s``: rows that all workers together
    update in a second. ``memory_headroom``: memory that may be added, as a share of the model's.
    ``bits``: of a weight in checkpoints; 32 is every bit. ``coded`` and ``parity``: rows of a
    stripe, and its coded rows.
    """

    rows: int
    row_bytes: int
    mtbf_h: float
    servers: int = 8
    lost: int = 1
    dense_bytes: int = 0
    changed_per_hour: float = 0.15
    changed_growth: float = 0.3
    updates_per_s: float = 0.0
    job_h: float = 56.0
    reschedule_h: float = 0.0
    copy_bytes_s: float = 4e9
    write_bytes_s: float = 1e9
    read_bytes_s: float = 1e9
    network_bytes_s: float = 3e9
    memory_headroom: float = 0.5
    pls: float = 0.1
    bits: int = 32
    r: float = 0.125
    coded: int = 4
    parity: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "row_bytes", "bits", "coded", "parity"):
            check_count(name, getattr(self, name))
        for name in ("mtbf_h", "job_h", "copy_bytes_s", "write_bytes_s", "read_bytes_s",
                     "network_bytes_s", "changed_growth"):  # fmt: skip
            check_positive(name, getattr(self, name))
        for name in ("dense_bytes", "updates_per_s", "reschedule_h", "memory_headroom"):
            check_not_negative(name, getattr(self, name))
        check_servers(self.servers, self.lost)
        check_number("changed_per_hour", self.changed_per_hour, 0, 1)
        check_number("changed_growth", self.changed_growth, 0, 1)
        check_pls(self.pls)
        if not is_number(self.r) or not 0 < self.r <= 1:
            raise InvalidRequestError("r is a share of the rows", r=self.r, todo="0.125 is usual")

    @property
    def table_bytes(self) -> int:
        """All rows with their state."""
        return self.rows * self.row_bytes

    @property
    def model_bytes(self) -> int:
        """Rows and networks."""
        return self.table_bytes + self.dense_bytes

    def changed(self, hours: float) -> float:
        """The share of rows that so many hours change."""
        return min(1.0, self.changed_per_hour * float(hours**self.changed_growth))

    def copy_h(self, size: float) -> float:
        """Hours for all servers to copy so many bytes in memory, each its part."""
        return size / self.servers / self.copy_bytes_s / SECONDS_AN_HOUR

    def write_h(self, size: float) -> float:
        """Hours for all servers to write so many bytes, each its part."""
        return size / self.servers / self.write_bytes_s / SECONDS_AN_HOUR

    def read_h(self, size: float, *, servers: int | None = None) -> float:
        """Hours to read so many bytes, spread over so many servers (None: all)."""
        return size / (servers or self.servers) / self.read_bytes_s / SECONDS_AN_HOUR

    def network_h(self, size: float, *, servers: int) -> float:
        """Hours for so many servers to receive so many bytes."""
        return size / servers / self.network_bytes_s / SECONDS_AN_HOUR


def make_situation(given: Mapping[str, Any]) -> Situation:
    """A situation from names and numbers.

    Raises:
        InvalidRequestError: names what is missing or unknown, and lists what is known.
    """
    known = {field.name: field for field in dataclasses.fields(Situation)}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InvalidRequestError("unknown number", given=unknown, known=list(known))
    missing = [
        name
        for name, field in known.items()
        if field.default is dataclasses.MISSING and name not in given
    ]
    if missing:
        raise InvalidRequestError(
            "a plan needs more numbers", missing=missing, todo=f"give {', '.join(missing)}"
        )
    return Situation(**given)
