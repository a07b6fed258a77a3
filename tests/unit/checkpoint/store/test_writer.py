"""A run's writer: two who commit in turn, outcomes that are unknown, objects nobody names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from holdfast import events
from holdfast.checkpoint.format.catalog import Catalog, CheckpointEntry
from holdfast.checkpoint.format.object import DENSE
from holdfast.checkpoint.store import catalogs
from holdfast.checkpoint.store.writer import RunWriter
from holdfast.errors import ConflictError, UnavailableError
from holdfast.storage import Storage, open_storage
from tests.fault import Fault, FaultyStorage, When


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def writer_on(storage: Storage, heard: list[events.Event] | None = None) -> RunWriter:
    sinks = [] if heard is None else [heard.append]
    return RunWriter(
        storage, catalogs.load_last(storage), log=events.EventLog(sinks), clock=lambda: 0.0
    )


def write(writer: RunWriter, text: bytes = b"dense") -> tuple[str, int]:
    with writer.new_object(DENSE) as builder:
        builder.append(DENSE, "dense", (text,), 0)
        return builder.name, builder.close()


def with_object(catalog: Catalog, item: tuple[str, int]) -> Catalog:
    """The catalog and one more checkpoint, whose dense state is the object."""
    last = catalog.last
    step = 1 if last is None else last.step + 1
    extent = catalogs.Extent(item[0], 16, 5, 0)
    entry = CheckpointEntry(
        step=step, ordinal=0, kind="base", base=step, schema=0, time=0.0, codec="", rows=0,
        state_codec="", row_bytes=0, bytes=0, full_bytes=0, stall_s=0.0, reason="", dense=extent,
    )  # fmt: skip
    grown = dataclasses.replace(catalog, schemas=((),))
    return grown.with_checkpoint(entry, (), (item,), replaces_since=None)


def found(storage: Storage) -> set[str]:
    return {item.name for item in storage.list("objects/")}


def test_change_is_made_to_what_the_other_committed(storage: Storage) -> None:
    writer = writer_on(storage)
    mine, other = write(writer), write(writer)
    first = writer.update(lambda now: with_object(now, mine))
    assert first is not None and first.number == 1
    second = writer.update(lambda now: with_object(now, other))
    assert second is not None
    assert second.objects == (mine, other)
    assert second.steps == (1, 2)
    assert catalogs.load_last(storage) == second


def test_change_that_returns_nothing_commits_nothing(storage: Storage) -> None:
    writer = writer_on(storage)
    assert writer.update(lambda now: None) is None
    assert catalogs.numbers(storage) == []


def test_object_that_waits_for_its_commit_is_not_collected(storage: Storage) -> None:
    old = writer_on(storage)
    leftover = write(old)  # its process ends before the commit
    writer = writer_on(storage)
    waiting = write(writer)
    with writer.new_object(DENSE) as open_:
        open_.append(DENSE, "dense", (b"dense",), 0)
        mine = write(writer)
        # the first commit of a process lists everything there is
        writer.update(lambda now: with_object(now, mine))
        assert found(storage) >= {waiting[0], mine[0]}
        assert leftover[0] not in found(storage)
        size = open_.close()
    writer.update(lambda now: with_object(with_object(now, waiting), (open_.name, size)))
    assert found(storage) == {waiting[0], mine[0], open_.name}


def test_forgotten_objects_are_deleted_and_named_ones_stay(storage: Storage) -> None:
    writer = writer_on(storage)
    mine, other = write(writer), write(writer)
    writer.update(lambda now: with_object(now, mine))
    writer.forget([mine[0], other[0], "objects/c00000001/dense-unknown.hf"])
    assert found(storage) == {mine[0]}


def test_forgetting_that_fails_is_told_and_made_up_for(storage: Storage) -> None:
    heard: list[events.Event] = []
    faulty = FaultyStorage(storage)
    writer = writer_on(faulty, heard)
    mine, other = write(writer), write(writer)
    writer.update(lambda now: with_object(now, mine))
    faulty._plan = (Fault.outage(len(faulty.calls) + 1),)
    writer.forget([other[0]])
    assert [type(event) for event in heard] == [events.CollectionFailed]
    assert found(storage) == {mine[0], other[0]}
    third = write(writer)
    writer.update(lambda now: with_object(now, third))
    assert found(storage) == {mine[0], third[0]}


def lose_the_answer(faulty: FaultyStorage, when: When) -> None:
    """The next commit's answer is lost, and so is a look at what became of it."""
    at = len(faulty.calls) + 1
    faulty._plan = (Fault.outage(at, when), Fault.outage(at + 1))


@pytest.mark.parametrize("when", [When.BEFORE, When.AFTER], ids=lambda when: when.value)
def test_after_an_unknown_outcome_the_next_change_builds_on_what_is_there(
    storage: Storage, when: When
) -> None:
    faulty = FaultyStorage(storage)
    writer = writer_on(faulty)
    first, second, third = write(writer), write(writer), write(writer)
    writer.update(lambda now: with_object(now, first))
    lose_the_answer(faulty, when)
    with pytest.raises(UnavailableError):
        writer.update(lambda now: with_object(now, second))
    writer.forget([second[0]])  # whoever wrote it gives up: but it may be named
    assert second[0] in found(storage)
    seen: list[Catalog] = []

    def change(now: Catalog) -> Catalog:
        seen.append(now)
        return with_object(now, third)

    writer.update(change)
    is_done = when is When.AFTER
    assert seen[0].steps == ((1, 2) if is_done else (1,))
    assert found(storage) == {first[0], third[0]} | ({second[0]} if is_done else set())
    assert writer.catalog == catalogs.load_last(storage)


def test_settle_finds_another_writer(storage: Storage) -> None:
    faulty = FaultyStorage(storage)
    writer = writer_on(faulty)
    first = write(writer)
    writer.update(lambda now: with_object(now, first))
    second = write(writer)
    lose_the_answer(faulty, When.BEFORE)
    with pytest.raises(UnavailableError):
        writer.update(lambda now: with_object(now, second))
    other = writer_on(storage)
    theirs = write(other)
    other.update(lambda now: with_object(now, theirs))
    with pytest.raises(ConflictError):
        writer.settle()
    with pytest.raises(ConflictError):
        writer.update(lambda now: now)
    writer.forget([second[0]])  # a writer that lost the run deletes nothing
    assert second[0] not in {name for name, _ in other.catalog.objects}
    assert theirs[0] in found(storage)


def test_object_whose_block_fails_is_gone_and_not_waited_for(storage: Storage) -> None:
    writer = writer_on(storage)
    with pytest.raises(RuntimeError, match="mine"), writer.new_object(DENSE) as builder:
        builder.append(DENSE, "dense", (b"dense",), 0)
        raise RuntimeError("mine")
    assert found(storage) == set()
    assert writer._uncommitted == set()


def test_object_closed_before_its_block_fails_can_be_forgotten(storage: Storage) -> None:
    """A bundle may be whole when the next one fails: it must not stay behind."""
    writer = writer_on(storage)
    with pytest.raises(RuntimeError, match="mine"), writer.new_object(DENSE) as builder:
        builder.append(DENSE, "dense", (b"dense",), 0)
        builder.close()
        raise RuntimeError("mine")
    writer.forget([builder.name])
    assert found(storage) == set()


def test_note_is_part_of_the_next_commit_only(storage: Storage) -> None:
    writer = writer_on(storage)
    mine = write(writer)
    writer.update(lambda now: with_object(now, mine))
    writer.note(lambda now: dataclasses.replace(now, restores=7))
    last = catalogs.load_last(storage)
    assert last is not None and last.restores == 0
    writer.update(lambda now: now)
    last = catalogs.load_last(storage)
    assert last is not None and last.restores == 7
