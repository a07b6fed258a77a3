"""Dense state that is not what it should be is refused where it is read."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from holdfast.boundary.dense import (
    check_aliases,
    check_dense,
    check_row_state,
    part_of,
    part_or_none,
)
from holdfast.errors import CorruptDataError
from holdfast.model.schema import Column, TableSchema

SCHEMAS = [TableSchema("users", 5, (Column("weight", 4), Column("sum", 1)))]
GOOD: dict[str, Any] = {
    "model": {"top.bias": 1.5},
    "optimizers": {
        "0": {
            "named": {"top.bias": {"step": 3, "sum": 0.5}},
            "param_groups": [{"lr": 0.1, "params": ["top.bias"]}],
            "beside": {"k": 7},
        }
    },
    "parameters": {"0": [["users", "top.bias"]]},
    "row_state_shapes": {"users": {"sum": [5, 1]}},
    "table_state": {"users": {"step": 3}},
    "aliases": {"also.users": "users"},
    "rng": {"torch": 1},
    "extras": {"reader": [1, 2]},
    "pls": {"lost": 0.0},
}


def test_what_a_checkpoint_holds_is_accepted() -> None:
    check_dense(GOOD)
    check_aliases(GOOD, SCHEMAS)
    check_row_state(GOOD, SCHEMAS)
    check_row_state({"row_state_shapes": {}}, SCHEMAS)
    check_dense({"rng": None, "extras": None})  # what another rank has of its own
    check_dense({**GOOD, "optimizers": None})
    by_position = {"state": {1: {"step": 3}}, "param_groups": [{"params": [0, 1]}]}
    check_dense({"model": {}, "optimizers": {"0": by_position}})


LIES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "model is a list": (("model",), []),
    "a model's name is a number": (("model", 7), 1.0),
    "optimizers are a list": (("optimizers",), [1]),
    "an optimizer is text": (("optimizers", "0"), "adam"),
    "state is a list": (("optimizers", "0", "named"), []),
    "state is none": (("optimizers", "0", "named"), None),
    "state of nobody": (("optimizers", "0", "named", "nobody"), {}),
    "state of a number": (("optimizers", "0", "named", 3), {}),
    "a parameter's state is a number": (("optimizers", "0", "named", "top.bias"), 3),
    "keys that cannot be sorted": (("optimizers", "0", "named", "top.bias", 3), 1),
    "groups are a dict": (("optimizers", "0", "param_groups"), {}),
    "a group is a number": (("optimizers", "0", "param_groups", 0), 3),
    "a group without parameters": (("optimizers", "0", "param_groups", 0), {"lr": 1}),
    "a parameter that is a list": (("optimizers", "0", "param_groups", 0, "params"), [[]]),
    "a parameter of no order": (("optimizers", "0", "param_groups", 0, "params"), ["x"]),
    "a parameter twice": (("parameters", "0"), [["users", "top.bias", "users"]]),
    "more groups than there are": (("parameters", "0"), [["users", "top.bias"], []]),
    "an order that is text": (("parameters", "0"), "users"),
    "an order of numbers": (("parameters", "0"), [[1]]),
    "beside is a list": (("optimizers", "0", "beside"), []),
    "shapes are a list": (("row_state_shapes",), []),
    "a shape of text": (("row_state_shapes", "users", "sum"), "5"),
    "a shape of nothing": (("row_state_shapes", "users", "sum"), []),
    "a shape below zero": (("row_state_shapes", "users", "sum"), [-1, 2**56 - 1]),
    "a shape beyond all": (("row_state_shapes", "users", "sum"), [2**56]),
    "a shape of truth": (("row_state_shapes", "users", "sum"), [True, 5]),
    "a table's state is a number": (("table_state", "users"), 3),
    "an alias of a number": (("aliases", "also.users"), 3),
    "random state is a number": (("rng",), 3),
    "extras are a list": (("extras",), [1]),
    "lost samples are text": (("pls",), "all"),
}


def lying(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(GOOD)
    at: Any = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return made


@pytest.mark.parametrize("lie", LIES)
def test_what_no_checkpoint_holds_is_refused(lie: str) -> None:
    with pytest.raises(CorruptDataError):
        check_dense(lying(*LIES[lie]))


@pytest.mark.parametrize("tree", [None, 3, "x", [], {1: 2}, [{}]])
def test_what_is_no_dict_is_refused(tree: Any) -> None:
    with pytest.raises(CorruptDataError):
        check_dense(tree)


@pytest.mark.parametrize(
    "lie",
    [
        (("row_state_shapes", "users"), {}),
        (("row_state_shapes", "users", "sum"), [4, 1]),
        (("row_state_shapes", "users", "sum"), [5, 2]),
        (("aliases", "also.users"), "nobody"),
    ],
)
def test_what_contradicts_the_tables_is_refused(lie: tuple[tuple[Any, ...], Any]) -> None:
    tree = lying(*lie)
    check_dense(tree)
    with pytest.raises(CorruptDataError):
        check_aliases(tree, SCHEMAS)
        check_row_state(tree, SCHEMAS)


def test_a_part_that_is_missing_is_named() -> None:
    assert part_or_none({"rng": None}, "rng") is None
    for given in ({}, {"model": None}):
        with pytest.raises(CorruptDataError, match="'model'"):
            part_of(given, "model")
    with pytest.raises(CorruptDataError, match="'rng'"):
        part_or_none({}, "rng")
