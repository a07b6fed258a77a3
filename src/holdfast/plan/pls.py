"""The portion of lost samples (PLS): met live, expected, and turned into an interval and a choice.

Partial recovery gives a lost server its last saved rows and lets the others go on. What training
since that save taught the lost rows is gone. PLS adds it up over a job, as a share of all samples
and of all servers (CPR eq. 3); accuracy falls about linearly with it.

Invariants:
- ``PlsMeter.pls`` is equation 3 to the letter: two failures of one server between two saves count
  the samples before the first one twice, so it may pass 1. ``pls_once`` counts them once and never
  does. They agree while no server fails twice between two of its saves.
- A choice is a pure function of plain numbers and comes with its reason in words.

Not here: equations 1 and 2 (overhead.py); what happens when the interval nears the MTBF
(simulate.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.plan.checks import (
    check_count,
    check_not_negative,
    check_positive,
    check_servers,
    is_number,
    is_whole,
)
from holdfast.plan.overhead import Costs, Overhead, interval_full, overhead_full, overhead_part

Kind = Literal["full", "partial"]

GAIN_MIN = 0.001  # of the training time: less is not worth any risk to accuracy


class PlsMeter:
    """Equation 3, live: told what was trained, saved and lost, it knows the PLS so far.

    >>> meter = PlsMeter(1000, servers=4)
    >>> meter.trained(100)
    >>> meter.saved()
    >>> meter.trained(200)
    >>> meter.failed([3])  # 200 of 1000 samples, on one of 4 servers
    0.05
    >>> meter.pls
    0.05
    """

    def __init__(self, samples_total: int, *, servers: int) -> None:
        check_count("samples_total", samples_total)
        check_count("servers", servers)
        self._samples_total = int(samples_total)
        self._servers = int(servers)
        self._samples = 0
        self._saved = [0] * self._servers  # S_last_chkpt of each server
        self._recovered = [0] * self._servers  # samples at its last failure
        self._lost = 0  # samples × servers, as eq. 3 counts them
        self._lost_once = 0

    @property
    def samples(self) -> int:
        """Samples trained so far."""
        return self._samples

    @property
    def pls(self) -> float:
        """The PLS so far (CPR eq. 3)."""
        return self._lost / (self._samples_total * self._servers)

    @property
    def pls_once(self) -> float:
        """The PLS so far with no sample of a server counted twice."""
        return self._lost_once / (self._samples_total * self._servers)

    def trained(self, samples: int) -> None:
        """So many more samples have been trained."""
        check_count("samples", samples)
        self._samples += int(samples)

    def saved(self, servers: Iterable[int] | None = None, *, at: int | None = None) -> None:
        """These servers (None: all) are durably saved, as they were after ``at`` samples (None:
        now); a save that became durable after a later one changes nothing."""
        at = self._samples if at is None else at
        if not is_whole(at) or not 0 <= at <= self._samples:
            raise InvalidRequestError(
                "a save is of a moment that has been trained",
                at=at,
                samples=self._samples,
                todo="give the samples trained when the snapshot was taken",
            )
        for server in range(self._servers) if servers is None else self._checked(servers):
            self._saved[server] = max(self._saved[server], int(at))

    def failed(self, servers: Iterable[int]) -> float:
        """These servers lost their rows at once and got their last saved ones; the PLS it added."""
        before = self._lost
        for server in self._checked(servers):
            saved = self._saved[server]
            self._lost += self._samples - saved
            self._lost_once += self._samples - max(saved, self._recovered[server])
            self._recovered[server] = self._samples
        return (self._lost - before) / (self._samples_total * self._servers)

    def state(self) -> dict[str, Any]:
        """Everything it knows, as plain JSON; mark the save it travels with as saved first."""
        return {
            "samples_total": self._samples_total,
            "samples": self._samples,
            "saved": list(self._saved),
            "recovered": list(self._recovered),
            "lost": self._lost,
            "lost_once": self._lost_once,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PlsMeter:
        """The meter that ``state`` was taken of.

        Raises: CorruptDataError if it is no meter's state.
        """
        whole = ("samples_total", "samples", "lost", "lost_once")
        try:
            counts = {name: _stored_count(state[name]) for name in whole}
            saved = [_stored_count(at) for at in state["saved"]]
            recovered = [_stored_count(at) for at in state["recovered"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(
                "the state of a PLS meter is damaged", found=str(error)
            ) from error
        moments = [*saved, *recovered]
        if (
            not counts["samples_total"]
            or not saved
            or len(saved) != len(recovered)
            or max(moments) > counts["samples"]
            or counts["lost_once"] > counts["lost"]
        ):
            raise CorruptDataError("the state of a PLS meter contradicts itself", state=dict(state))
        meter = cls(counts["samples_total"], servers=len(saved))
        meter._samples, meter._saved, meter._recovered = counts["samples"], saved, recovered
        meter._lost, meter._lost_once = counts["lost"], counts["lost_once"]
        return meter

    def _checked(self, servers: Iterable[int]) -> list[int]:
        chosen = list(servers)
        if not chosen or len(set(chosen)) != len(chosen):
            raise InvalidRequestError(
                "name each server once, and at least one",
                servers=chosen,
                todo="list server numbers",
            )
        for server in chosen:
            if not is_whole(server) or not 0 <= server < self._servers:
                raise InvalidRequestError(
                    "there is no such server",
                    server=server,
                    servers=self._servers,
                    todo=f"use 0 to {self._servers - 1}",
                )
        return chosen


def _stored_count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def expected_pls(interval_h: float, *, mtbf_h: float, servers: int, lost: int = 1) -> float:
    """The PLS a job is expected to end with (CPR eq. 4), ``lost`` servers gone at each failure.

    >>> round(expected_pls(44.8, mtbf_h=28, servers=8), 9)
    0.1
    """
    check_positive("interval_h", interval_h)
    check_positive("mtbf_h", mtbf_h)
    check_servers(servers, lost)
    return 0.5 * interval_h * lost / (mtbf_h * servers)


def interval_part(pls: float, *, mtbf_h: float, servers: int, lost: int = 1) -> float:
    """The longest interval whose expected PLS is ``pls`` (CPR, T_save,part).

    >>> round(interval_part(0.1, mtbf_h=28, servers=8), 9)
    44.8
    >>> round(interval_part(0.1, mtbf_h=28, servers=8, lost=4), 9)  # half of the servers at once
    11.2
    """
    check_pls(pls)
    check_positive("mtbf_h", mtbf_h)
    check_servers(servers, lost)
    return 2 * pls * mtbf_h * servers / lost


@dataclass(frozen=True, slots=True)
class RecoveryChoice:
    """How to recover and how often to save, what each way would cost, and why."""

    kind: Kind
    interval_h: float  # of the chosen kind
    full_interval_h: float
    part_interval_h: float
    full: Overhead
    part: Overhead
    expected_pls: float  # of the chosen kind
    reason: str


def choose_recovery(
    costs: Costs,
    *,
    mtbf_h: float,
    servers: int,
    pls: float,
    lost: int = 1,
    full_interval_h: float | None = None,
    gain_min: float = GAIN_MIN,
) -> RecoveryChoice:
    """Partial recovery where it saves at least ``gain_min`` of the training time, else full.

    Full recovery saves every ``full_interval_h`` (None: its cheapest interval), partial recovery
    as rarely as the target ``pls`` allows.

    >>> choice = choose_recovery(Costs(0.1, 0.05, 0.05), mtbf_h=28, servers=8, pls=0.1)
    >>> choice.kind, round(choice.interval_h, 1), f"{choice.part.total:.2%}"
    ('partial', 44.8, '0.58%')
    """
    check_not_negative("gain_min", gain_min)
    part_interval_h = interval_part(pls, mtbf_h=mtbf_h, servers=servers, lost=lost)
    if full_interval_h is None:
        full_interval_h = interval_full(costs.save_h, mtbf_h=mtbf_h)
    full = overhead_full(costs, interval_h=full_interval_h, mtbf_h=mtbf_h)
    part = overhead_part(costs, interval_h=part_interval_h, mtbf_h=mtbf_h)
    gain = full.total - part.total
    is_partial = is_worth_it(full.total, part.total, gain_min=gain_min)
    return RecoveryChoice(
        kind="partial" if is_partial else "full",
        interval_h=part_interval_h if is_partial else full_interval_h,
        full_interval_h=full_interval_h,
        part_interval_h=part_interval_h,
        full=full,
        part=part,
        expected_pls=pls if is_partial else 0.0,
        reason=(
            f"a PLS of {pls:g} allows saving every {part_interval_h:.3g} h; partial recovery then "
            f"costs {part.total:.2%} of the training time, full recovery saving every "
            f"{full_interval_h:.3g} h costs {full.total:.2%}: {_verdict(gain, gain_min)}"
        ),
    )


def is_worth_it(full: float, part: float, *, gain_min: float = GAIN_MIN) -> bool:
    """Whether partial recovery saves enough of the training time to risk accuracy for it."""
    return full > part and full - part >= gain_min


def _verdict(gain: float, gain_min: float) -> str:
    if gain <= 0:
        return "partial recovery brings no benefit, so everyone reloads"
    if gain < gain_min:
        return (
            f"a gain of {gain:.2%} is below the {gain_min:.2%} that are worth a risk to accuracy, "
            f"so everyone reloads"
        )
    return f"{gain:.2%} less, so only the lost servers reload"


def check_pls(pls: float) -> None:
    """Refuse a target PLS outside (0, 1]."""
    if not is_number(pls) or not 0 < pls <= 1:
        raise InvalidRequestError(
            "a target PLS is a share above 0 and up to 1",
            pls=pls,
            todo="use 0.1 to start with; smaller keeps more accuracy",
        )
