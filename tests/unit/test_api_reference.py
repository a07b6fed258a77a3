"""The page of the API is made from the source, and is that of this source."""

from __future__ import annotations

import re

import holdfast as hf
from dev.api_reference import PAGE, SECTIONS, make_page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == make_page(), "run: python -m dev.api_reference"


def test_every_public_name_is_in_one_section() -> None:
    names = [name for section in SECTIONS.values() for name in section]
    assert sorted(names) == sorted({*hf.__all__, "open"})


def test_every_name_is_documented_and_linked() -> None:
    text = make_page()
    for name in [*hf.__all__, "open"]:
        at = text.index(f"\n### {name}\n")
        body = text[at:].split("\n### ")[1].split("\n", 1)[1]
        assert re.search(r"^[A-Z].*\.", body, re.MULTILINE), name
        assert f"(#{name.lower()})" in text
