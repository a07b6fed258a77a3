"""What a user may say of a checkpoint, and what is refused before anything is stored."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.annotations import (
    METADATA_BYTES_MAX,
    METRICS_MAX,
    Annotations,
    as_annotations,
    check_annotations,
)
from holdfast.errors import InvalidRequestError

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.integers(-(2**63), 2**63 - 1),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1, max_size=9), NUMBERS, max_size=9),
       st.dictionaries(st.text(max_size=9), VALUES, max_size=4))  # fmt: skip
def test_what_is_said_comes_back_equal(metrics: dict[str, float], metadata: dict[str, Any]) -> None:
    said, left_out = as_annotations(metrics, metadata)
    assert (dict(said.metrics), said.metadata_dict(), left_out) == (metrics, metadata, [])
    assert Annotations.from_json(dict(said.metrics), said.metadata_dict()) == said
    assert bool(said) == bool(metrics or metadata)


def test_a_metric_may_be_any_number_of_one_element() -> None:
    given = {"a": torch.tensor(0.5), "b": np.float32(2), "c": 3, "d": torch.ones(1, 1)}
    assert as_annotations(given, None)[0].metrics == (("a", 0.5), ("b", 2), ("c", 3), ("d", 1))


def test_numbers_that_are_not_finite_are_left_out_and_named() -> None:
    said, left_out = as_annotations({"a": math.nan, "b": -math.inf, "c": 1.0}, None)
    assert (said.metrics, left_out) == ((("c", 1.0),), ["a", "b"])


@pytest.mark.parametrize(
    ("metrics", "metadata"),
    [
        ({"auc": "0.8"}, None),
        ({"auc": None}, None),
        ({"auc": torch.ones(2)}, None),
        ({"auc": {}}, None),
        ({3: 0.8}, None),
        ({"": 0.8}, None),
        ({"x" * 129: 0.8}, None),
        ({"\ud800": 0.8}, None),
        ({f"m{i}": 0.0 for i in range(METRICS_MAX + 1)}, None),
        ([("auc", 0.8)], None),
        (None, {"x": np.float32(1)}),
        (None, {"x": Ellipsis}),
        (None, {"x": math.nan}),
        (None, {"x": [math.inf]}),
        (None, {"x": 1 << 63}),
        (None, {"x": {3: "key"}}),
        (None, {"x": "\ud800"}),
        (None, {"x": "y" * METADATA_BYTES_MAX}),
        (None, "text"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_what_cannot_be_stored_is_refused(metrics: Any, metadata: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"metric|metadata"):
        as_annotations(metrics, metadata)


def test_metadata_that_contains_itself_is_refused() -> None:
    metadata: dict[str, Any] = {}
    metadata["x"] = metadata
    with pytest.raises(InvalidRequestError, match="nested"):
        as_annotations(None, metadata)


def test_newer_words_replace_older_ones_of_the_same_name() -> None:
    older = as_annotations({"auc": 0.7, "loss": 1}, {"a": 1, "b": {"c": 2}})[0]
    joined = older.updated(as_annotations({"auc": 0.8}, {"b": 3})[0])
    assert dict(joined.metrics) == {"auc": 0.8, "loss": 1}
    assert joined.metadata_dict() == {"a": 1, "b": 3}
    many = as_annotations({f"m{i}": 0.0 for i in range(METRICS_MAX)}, None)[0]
    with pytest.raises(InvalidRequestError, match=str(METRICS_MAX)):
        older.updated(many)


@pytest.mark.parametrize(
    "lie",
    [
        Annotations((("b", 1.0), ("a", 1.0))),
        Annotations((("a", 1.0), ("a", 2.0))),
        Annotations((("a", math.nan),)),
        Annotations(metadata="{"),
    ],
)
def test_values_that_no_writer_makes_are_refused(lie: Annotations) -> None:
    with pytest.raises((ValueError, TypeError)):
        check_annotations(lie)
