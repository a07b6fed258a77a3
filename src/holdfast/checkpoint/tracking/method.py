"""How a table's changed rows are found at a save: chosen from what happened since the last. Pure.

| method | which rows a save takes | when |
|---|---|---|
| gradient | rows that had a gradient since | the optimizer moves no others |
| trained | rows that ever had one | moments keep moving them (Adam, momentum) |
| compare | rows whose hash differs | something else wrote, or nothing is known |
| whole | every row | every row moves, or rows cannot be told apart |
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.checkpoint.tracking.optimizers import rules
from holdfast.checkpoint.tracking.optimizers.rules import Rule

COMPARE, WHOLE = "compare", "whole"


@dataclass(frozen=True, slots=True)
class Happened:
    """What happened to a table since its rows were last looked for."""

    moved: frozenset[str]
    """Which rows optimizer steps moved: gradient, trained, all, unknown."""
    rule: Rule | None = None
    """What is known of the optimizer that stepped last."""
    was_written: bool = False
    """Something else wrote to the table; torch's version counters tell."""
    is_distrusted: bool = False
    """Rows have changed before and nothing told."""
    is_shared: bool = False
    """It is in memory that other processes share."""
    is_overlapped: bool = False
    """Another table has some of its memory."""
    is_settling: bool = False
    """The first dense steps since something else wrote: they may move rows without a gradient,
    once (a row whose state is NaN, numbers so small that a step makes them zero)."""
    is_idle: bool = False
    """No optimizer has moved it yet, and nothing says that it stays."""
    is_compared: bool = False
    """The user asked to compare rows at every save."""
    has_hashes: bool = True
    is_mostly_changed: bool = False
    """Comparing found most rows changed, several times in a row."""


@dataclass(frozen=True, slots=True)
class Method:
    """How to find the rows, why, and what a user can do to save fewer."""

    name: str
    reason: str
    todo: str = ""
    is_told: bool = True
    """Whether it is worth telling: not what happens once, or to all."""


def choose_method(happened: Happened) -> Method:
    """The cheapest method that misses no row.

    >>> choose_method(Happened(frozenset({"gradient"}))).name
    'gradient'
    >>> choose_method(Happened(frozenset({"gradient"}), was_written=True)).name
    'compare'
    >>> choose_method(Happened(frozenset({"all", "gradient"}), was_written=True)).name
    'whole'
    """
    rule = happened.rule
    is_observed = rule is not None and rule.moves == rules.UNKNOWN
    if rules.ALL in happened.moved:
        if rule is None or is_observed:
            return Method(WHOLE, "any of its rows may have changed")
        return Method(WHOLE, rule.reason, rule.todo)
    doubt = _doubt(happened)
    if doubt:
        if not happened.has_hashes:
            return Method(WHOLE, doubt, "use tracking='auto', which compares rows instead")
        if happened.is_mostly_changed:
            return Method(WHOLE, f"{doubt}, and most rows change between two saves")
        return Method(COMPARE, doubt)
    if happened.is_settling:
        reason = "the first steps since something else wrote: rows are compared once"
        return Method(COMPARE, reason, is_told=False)
    if rules.TRAINED in happened.moved:
        if rule is None or is_observed:
            return Method(rules.TRAINED, "its optimizer was seen to move rows without a gradient")
        return Method(rules.TRAINED, rule.reason, rule.todo)
    return Method(rules.GRADIENT, "" if rule is None else rule.reason, is_told=False)


def _doubt(happened: Happened) -> str:
    """Why gradients do not tell all rows that changed; empty if they do."""
    if rules.UNKNOWN in happened.moved and happened.rule is not None:
        return happened.rule.reason
    if happened.is_distrusted:
        return "rows changed before by writes that torch does not count"
    if happened.was_written:
        return "something other than its optimizer wrote to it"
    if happened.is_shared:
        return "it is in shared memory, and other processes may write to it"
    if happened.is_overlapped:
        return "another table has the same memory"
    if happened.is_compared:
        return "the user asked to compare rows"
    return "no optimizer was seen to train it" * happened.is_idle
