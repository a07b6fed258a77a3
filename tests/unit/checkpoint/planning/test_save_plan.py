from __future__ import annotations

import pytest

from holdfast.checkpoint.format.annotations import Annotations
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.planning.bases import BaseChoice
from holdfast.checkpoint.planning.codecs import CodecPlan
from holdfast.checkpoint.planning.retention import Keep
from holdfast.checkpoint.planning.save_plan import RunRules, SavePlan
from holdfast.errors import UnavailableError
from holdfast.model.placement import Placement
from holdfast.model.schema import Column, TableSchema

SCHEMAS = (TableSchema("users", 5, (Column("weight", 8),)),)
RULES = RunRules(Keep(last=3), has_grid=True, placement=Placement(2))


def make_plan(choice: BaseChoice, **values: int | str | bool | None) -> SavePlan:
    codecs = CodecPlan(parse_codec("adaptive4"), parse_codec("bf16"), "chosen")
    given = {"last_base": 3, **values}
    return SavePlan(step=9, choice=choice, codecs=codecs, schemas=SCHEMAS, rules=RULES, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [None, "bf16"])
def test_a_plan_is_the_same_on_the_other_side(state: str | None) -> None:
    codecs = CodecPlan(parse_codec("adaptive4"), None if state is None else parse_codec(state), "x")
    plan = SavePlan(
        step=9, choice=BaseChoice("delta", "base", "because", is_rollup=True), last_base=3,
        codecs=codecs, schemas=SCHEMAS, rules=RULES, at=7, rewind_to=7, number=12, token="ab",
        is_saved=True, annotations=Annotations((("auc", 0.1), ("loss", 2.0)), '{"a":1}'),
    )  # fmt: skip
    assert SavePlan.from_bytes(plan.to_bytes(), schemas=SCHEMAS, rules=RULES) == plan


def test_a_rank_that_cannot_plan_is_told_with_its_error() -> None:
    with pytest.raises(UnavailableError, match="no history"):
        SavePlan.from_bytes(b'{"error": "no history"}', schemas=SCHEMAS, rules=RULES)


@pytest.mark.parametrize(
    ("choice", "base", "replaces_since"),
    [
        (BaseChoice("base", None, ""), 9, None),
        (BaseChoice("delta", "last", ""), 3, None),
        (BaseChoice("delta", "base", ""), 3, 3),
    ],
)
def test_what_a_checkpoint_is_built_on_and_replaces(
    choice: BaseChoice, base: int, replaces_since: int | None
) -> None:
    plan = make_plan(choice)
    assert (plan.kind, plan.base, plan.replaces_since) == (choice.kind, base, replaces_since)
