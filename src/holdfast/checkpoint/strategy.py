"""Strategies: named points in one space of choices, each choice also free to be made by itself."""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from holdfast.checkpoint.grid.decide import Extract
from holdfast.checkpoint.planning.bases import SINCE_LAST, check_policy, deltas_since
from holdfast.checkpoint.selecting.priority import MFU, SCAR, SSU, Priority
from holdfast.deprecation import warn_renamed
from holdfast.errors import InvalidRequestError, unknown_name


@dataclass(frozen=True, slots=True)
class Strategy:
    """When a base is taken, which rows are saved, how they are stored, whether they become a grid.

    ``codec`` None: by expected restores, lossless without those. ``extract`` None: increments stay
    as they are. ``priority`` None: every changed row is saved. ``rollups`` None: where bases are
    taken by recovery time, a grid is made and every changed row is saved.
    """

    name: str
    base: str
    codec: str | None
    extract: Extract | None = None
    priority: Priority | None = None
    rollups: bool | None = None
    floors: InitVar[bool | None] = None
    """Deprecated: ``rollups``."""

    @property
    def has_rollups(self) -> bool:
        """Whether increments are gathered into rollups from time to time."""
        if self.rollups is not None:
            return self.rollups
        is_gridded = self.base == "recovery-time" and self.extract is not None
        return is_gridded and self.priority is None

    def __post_init__(self, floors: bool | None) -> None:
        if floors is not None:
            warn_renamed("Strategy(floors=)", "rollups=", stacklevel=4)
            object.__setattr__(self, "rollups", floors)
        check_policy(self.base)
        if self.extract is not None and deltas_since(self.base) != SINCE_LAST:
            raise InvalidRequestError(
                "a grid is made of increments: rows changed since the last checkpoint",
                base=self.base,
                todo="use base='consecutive' or base='recovery-time', or leave extract out",
            )
        if self.priority is not None and deltas_since(self.base) != SINCE_LAST:
            raise InvalidRequestError(
                "hot rows are saved first where each checkpoint adds to the last",
                base=self.base,
                todo="use base='consecutive' or base='recovery-time', or leave priority out",
            )
        if self.rollups and deltas_since(self.base) != SINCE_LAST:
            raise InvalidRequestError(
                "a rollup gathers increments: rows changed since the last checkpoint",
                base=self.base,
                todo="use base='consecutive' or base='recovery-time', or leave rollups out",
            )
        if self.rollups and self.priority is not None:
            raise InvalidRequestError(
                "a rollup holds every changed row, and with a priority not every one is saved",
                todo="leave rollups or priority out",
            )


STRATEGIES = {
    "full": Strategy("full", base="full", codec="fp32"),
    "check-n-run": Strategy("check-n-run", base="intermittent", codec=None),
    "incrcp": Strategy("incrcp", base="recovery-time", codec="fp32", extract=Extract()),
    "cpr": Strategy("cpr", base="full", codec="fp32"),
    **{
        f"cpr-{by}": Strategy(
            f"cpr-{by}",
            base="recovery-time",
            codec="fp32",
            extract=Extract(),
            priority=Priority(by=by),
        )
        for by in (MFU, SSU, SCAR)
    },
}


def as_strategy(strategy: str | Strategy) -> Strategy:
    """A strategy by name, or the user's own.

    Raises:
        InvalidRequestError: lists the names there are.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise unknown_name("strategy", strategy, STRATEGIES)
    return STRATEGIES[strategy]
