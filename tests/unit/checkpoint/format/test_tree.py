"""State trees survive storage exactly, and hostile trees fail as ours."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format import tree
from holdfast.errors import CorruptDataError, InvalidRequestError

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.integers() | st.text() | st.tuples(st.integers()), inner, max_size=4)
    ),
    max_leaves=20,
)


def round_trip(value: object) -> object:
    return tree.from_bytes(tree.to_bytes(*tree.flatten(value)))


@given(trees)
def test_any_tree_of_plain_values_comes_back_equal(value: object) -> None:
    back = round_trip(value)
    assert back == value
    assert repr(back) == repr(value)


def test_tensors_arrays_and_random_states_come_back_bit_for_bit() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 2, 2]]), torch.ones(3, 2), (4, 2), check_invariants=True
    )
    value = {
        "half": torch.randn(3, 2).half(),
        "bf16": torch.randn(2).bfloat16(),
        "strided": torch.arange(12).view(3, 4).t(),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(3),
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "number": np.float32(0.1),
        "nan": math.nan,
        "inf": -math.inf,
        "sparse": sparse,
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    back = round_trip(value)
    assert isinstance(back, dict)
    for name in ("half", "bf16", "strided", "empty", "scalar"):
        assert torch.equal(back[name], value[name]) and back[name].dtype == value[name].dtype
    assert np.array_equal(back["array"], value["array"]) and back["array"].dtype == np.uint32
    assert back["number"] == value["number"] and type(back["number"]) is np.float32
    assert math.isnan(back["nan"]) and back["inf"] == -math.inf
    assert torch.equal(back["sparse"].to_dense(), sparse.to_dense())
    assert back["sparse"]._nnz() == 3 and not back["sparse"].is_coalesced()
    assert back["python"] == value["python"]
    assert np.array_equal(back["numpy"][1], value["numpy"][1])


def test_value_that_cannot_be_stored_is_refused_with_its_path() -> None:
    with pytest.raises(InvalidRequestError, match=r"state\['a'\]\[1\].*object"):
        tree.flatten({"a": [1, object()]})
    with pytest.raises(InvalidRequestError, match="dtype"):
        tree.flatten(np.array(["x"]))


@pytest.mark.parametrize(
    "structure",
    [
        {"x": "7"},
        {"zz": 1},
        {"d": [[1]]},
        {"l": 5},
        {"b": "!!"},
        {"x": ["0"], "l": []},
        [1, 2],
        {"f": "huge"},
        {"d": [[{"l": []}, 1]]},
        {"sparse": ["0", "0", [1], True]},
    ],
)
def test_impossible_structure_is_refused(structure: object) -> None:
    with pytest.raises(CorruptDataError):
        tree.unflatten(structure, {"0": torch.ones(2)})


def test_structure_nested_without_end_is_refused() -> None:
    deep = '{"l":[' * 50_000 + "]}" * 50_000
    with pytest.raises((CorruptDataError, RecursionError)):
        tree.unflatten(json.loads(deep), {})


@given(st.binary(max_size=200))
def test_bytes_that_are_no_dense_segment_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptDataError):
        tree.from_bytes(data)
