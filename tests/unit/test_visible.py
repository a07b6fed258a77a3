"""Any string at all can be shown, and any value printed as JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.visible import as_json_value, visible

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # halves of surrogate pairs too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda value: st.lists(value, max_size=4) | st.dictionaries(ANY_TEXT, value, max_size=4),
    max_leaves=12,
)


@given(ANY_TEXT)
def test_what_is_shown_is_printable_and_stays_so(text: str) -> None:
    shown = visible(text)
    assert shown.isprintable()
    assert shown.encode("utf-8").decode("utf-8") == shown
    assert visible(shown) == shown


@given(ANY_TEXT.filter(str.isprintable))
def test_what_can_be_seen_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


@given(ANY_TEXT, st.integers(1, 30))
def test_no_more_is_shown_than_asked_for(text: str, most: int) -> None:
    shown = visible(text, most=most)
    assert len(shown) <= most and shown.isprintable()
    assert visible(shown, most=most) == shown


@given(ANY_TEXT)
def test_new_lines_stay_where_they_are_wanted(text: str) -> None:
    shown = visible(text, keep="\n")
    assert shown.count("\n") == text.count("\n")
    assert shown.replace("\n", "").isprintable()


@given(VALUES)
def test_every_value_becomes_json_that_every_parser_takes(value: object) -> None:
    text = json.dumps(as_json_value(value), allow_nan=False)
    json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize("text", ["é", "日本", "\U0001f600", "[/red]", "\x1b", "a\nb"])
def test_json_holds_text_as_it_is(text: str) -> None:
    assert as_json_value([text]) == [text]
