"""A checkpoint more in a catalog: its place, what goes with it, and what is not appended."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from holdfast import events
from holdfast.checkpoint.format.catalog import BASE, DELTA, Catalog, CheckpointEntry, SegmentEntry
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.format.object import DENSE, ROWS, Extent, object_name
from holdfast.checkpoint.planning.bases import SINCE_LAST, BaseChoice
from holdfast.checkpoint.planning.codecs import CodecPlan
from holdfast.checkpoint.planning.retention import Keep
from holdfast.checkpoint.planning.save_plan import RunRules, SavePlan
from holdfast.checkpoint.store.append import append_checkpoint, plan_append
from holdfast.checkpoint.store.writer import RunWriter
from holdfast.errors import CommitUnknownError, DataLossError, UnavailableError
from holdfast.model.schema import Column, TableSchema
from holdfast.storage import open_storage
from tests.fault import Fault, FaultyStorage, When

SCHEMAS = (TableSchema("users", 5, (Column("weight", 2),)),)
EMPTY = Catalog(run="r", number=0, writer="w")


def plan_of(step: int, *, keep: Keep | None = None, rewind_to: int | None = None) -> SavePlan:
    choice = BaseChoice(BASE, None, "") if step == 1 else BaseChoice(DELTA, SINCE_LAST, "")
    codecs = CodecPlan(parse_codec("fp32"), None, "")
    rules = RunRules(keep or Keep())
    return SavePlan(
        step=step, choice=choice, last_base=1, codecs=codecs, schemas=SCHEMAS, rules=rules,
        rewind_to=rewind_to,
    )  # fmt: skip


def dense_of(plan: SavePlan) -> str:
    return object_name(1, DENSE, f"{plan.step}")


def entry_of(plan: SavePlan) -> CheckpointEntry:
    return CheckpointEntry(
        step=plan.step, ordinal=0, kind=plan.kind, base=plan.base, schema=0, time=0.0, rows=5,
        codec="fp32", state_codec="none", row_bytes=40, bytes=600, full_bytes=40, stall_s=0.0,
        reason="", dense=Extent(dense_of(plan), 16, 4, 0),
    )  # fmt: skip


def parts_of(
    plan: SavePlan, rows: int = 5
) -> tuple[tuple[SegmentEntry, ...], tuple[tuple[str, int], ...]]:
    name = object_name(1, ROWS, f"{plan.step}")
    segment = SegmentEntry("users", plan.step, None, rows, 0, rows - 1, Extent(name, 16, 40, 0))
    return (segment,), ((name, 300), (dense_of(plan), 300))


def appended(catalog: Catalog, plan: SavePlan) -> tuple[Catalog, tuple[int, ...], tuple[int, ...]]:
    after, done = plan_append(catalog, plan, entry_of(plan), *parts_of(plan), now=0.0)
    return after, done.rewound, done.expired


def test_each_gets_the_next_place_and_the_schema_of_before() -> None:
    catalog = EMPTY
    for step in (1, 2, 3):
        catalog, rewound, expired = appended(catalog, plan_of(step))
        assert (rewound, expired) == ((), ())
    assert catalog.steps == (1, 2, 3)
    assert [entry.ordinal for entry in catalog.checkpoints] == [0, 1, 2]
    assert {entry.schema for entry in catalog.checkpoints} == {0}
    assert catalog.schemas == (SCHEMAS,)


def test_checkpoints_that_are_rewound_and_those_that_are_not_kept_are_told_apart() -> None:
    catalog = EMPTY
    for step in (1, 2, 3, 4):
        catalog, _, _ = appended(catalog, plan_of(step))
    catalog, rewound, expired = appended(catalog, plan_of(5, keep=Keep(last=2), rewind_to=2))
    assert (catalog.steps, rewound, expired) == ((2, 5), (3, 4), (1,))


def test_the_catalog_of_before_is_left_as_it_was() -> None:
    catalog, _, _ = appended(EMPTY, plan_of(1))
    before = dataclasses.replace(catalog)
    appended(catalog, plan_of(2, keep=Keep(last=1)))
    assert catalog == before


@pytest.mark.parametrize("rows", [4, 6])
def test_a_base_without_each_row_once_is_refused(tmp_path: Path, rows: int) -> None:
    writer = RunWriter(open_storage(str(tmp_path)), None, log=events.EventLog(), clock=lambda: 0.0)
    plan = plan_of(1)
    with pytest.raises(DataLossError, match="every row"):
        append_checkpoint(writer, plan, entry_of(plan), *parts_of(plan, rows))
    assert writer.catalog.steps == ()


@pytest.mark.parametrize(("when", "is_committed"), [(When.BEFORE, False), (When.AFTER, True)])
def test_an_answer_that_is_lost_says_what_may_be_committed(
    tmp_path: Path, when: When, is_committed: bool
) -> None:
    storage = open_storage(str(tmp_path))
    failing = FaultyStorage(storage, Fault.outage(1, when, is_lasting=True))
    writer = RunWriter(failing, None, log=events.EventLog(), clock=lambda: 0.0)
    plan = plan_of(1)
    with pytest.raises(UnavailableError) as caught:
        append_checkpoint(writer, plan, entry_of(plan), *parts_of(plan))
    assert isinstance(caught.value, CommitUnknownError)
    writer.storage = storage  # it answers again
    writer.settle()
    assert (caught.value.entry in writer.catalog.checkpoints) == is_committed
