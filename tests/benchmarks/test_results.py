"""Targets are judged by the numbers, in the sense they are meant."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.document import put_sections, render, shown_ratio, shown_target
from benchmarks.machine import Machine
from benchmarks.results import AT_LEAST, AT_MOST, TIMES_LESS, Ratio, Section, to_json

RATIO = Ratio(name="copying", ours=6.0, peer=8.0, against="a copy", unit="GB/s", target=0.5)
MACHINE = Machine("a processor", 2, 24.0, "Linux", "ext4 on a disk", (("torch", "2.13"),))


@pytest.mark.parametrize(
    ("sense", "target", "is_met"),
    [
        (AT_LEAST, 0.75, True),
        (AT_LEAST, 0.76, False),
        (AT_MOST, 0.75, True),
        (AT_MOST, 0.74, False),
        (TIMES_LESS, 1.3, True),
        (TIMES_LESS, 1.4, False),
        (AT_LEAST, None, None),
    ],
)
def test_target_is_judged_in_its_sense(sense, target, is_met) -> None:  # type: ignore[no-untyped-def]
    assert dataclasses.replace(RATIO, sense=sense, target=target).is_met is is_met


def test_nothing_measured_on_our_side_is_not_a_division_by_zero() -> None:
    assert dataclasses.replace(RATIO, ours=0.0, sense=TIMES_LESS).ratio == float("inf")


def test_json_spells_out_quotient_and_verdict() -> None:
    section = Section(name="s", title="T", text="x", ratios=(RATIO,))
    (found,) = to_json(section)["ratios"]
    assert (found["ratio"], found["is_met"], found["against"]) == (0.75, True, "a copy")


def test_missed_target_is_shown_as_missed_in_summary_and_section() -> None:
    missed = dataclasses.replace(RATIO, name="slow copying", target=0.9)
    section = Section(name="s", title="A title", text="x", ratios=(RATIO, missed))
    text = render(MACHINE, [section])
    assert "1 of 2 targets are met." in text
    lines = [line for line in text.splitlines() if "slow copying" in line]
    assert len(lines) == 2 and all("**no**" in line for line in lines)


def test_shares_are_shown_as_per_cent_and_savings_as_times_less() -> None:
    share = dataclasses.replace(RATIO, ours=0.1, peer=20.0, target=0.01, sense=AT_MOST)
    assert (shown_ratio(share), shown_target(share)) == ("0.50 %", "at most 1 %")
    saving = dataclasses.replace(RATIO, ours=10.0, peer=170.0, target=17.0, sense=TIMES_LESS)
    assert (shown_ratio(saving), shown_target(saving)) == ("17.0× less", "at least 17× less")
    costing = dataclasses.replace(saving, ours=340.0)
    assert shown_ratio(costing) == "2.00× more" and not costing.is_met


ORDER = ("first", "second", "third")


def section(name: str, **fields) -> Section:  # type: ignore[no-untyped-def]
    return Section(name=name, title=f"The {name} one", text=f"about {name}", **fields)


def test_a_section_measured_again_replaces_only_itself() -> None:
    missed = dataclasses.replace(RATIO, target=0.9)
    parts = [section("first", ratios=(RATIO,)), section("third", ratios=(missed, RATIO))]
    page = render(MACHINE, parts).replace("are met.\n", "are met.\n\nA note by hand.\n")
    assert "2 of 3 targets are met." in page
    again = section("first", ratios=(dataclasses.replace(missed, name="copying anew"),))
    new = put_sections(page, MACHINE, [again], order=ORDER)
    assert "1 of 3 targets are met." in new and "A note by hand." in new
    assert new.count("## The first one") == 1 and new.count("| copying anew |") == 2
    rest = page.partition("## The third one")[2]
    assert new.partition("## The third one")[2] == rest
    assert "torch 2.13" in new.partition("## The first one")[2].partition("## ")[0]


def test_a_new_section_goes_where_the_order_has_it() -> None:
    page = render(MACHINE, [section("first", ratios=(RATIO,)), section("third", ratios=(RATIO,))])
    new = put_sections(page, MACHINE, [section("second", ratios=(RATIO,))], order=ORDER)
    headings = [line for line in new.splitlines() if line.startswith("## ")]
    assert headings == ["## Targets", *(f"## The {name} one" for name in ORDER)]
    summary = new.partition("## Targets")[2].partition("\n## ")[0]
    told = [line for line in summary.splitlines() if line.startswith("| [")]
    assert [line.split("]")[0].removeprefix("| [") for line in told] == list(ORDER)
    assert "3 of 3 targets are met." in summary
    assert put_sections(new, MACHINE, [section("second", ratios=(RATIO,))], order=ORDER) == new
