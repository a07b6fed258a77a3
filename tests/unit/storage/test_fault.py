"""The fault-injecting storage: it fails exactly where and how it was told."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import UnavailableError
from holdfast.storage import Storage, open_storage
from tests.fault import Fault, FaultyStorage, SimulatedCrash, When


def scenario(storage: Storage) -> None:
    """Every primitive at least once."""
    storage.clean()
    with storage.create("objects/a") as writer:
        writer.write(b"01234567")
        writer.write(b"89")
        writer.close()
    storage.put_if_absent("catalog/1", b"{}")
    storage.get("objects/a", offset=1, length=2)
    storage.get_into("objects/a", bytearray(3))
    storage.size("objects/a")
    storage.list("")
    aborted = storage.create("objects/b")
    aborted.abort()
    storage.delete("objects/a")


CALLS = [
    "clean", "create objects/a", "write objects/a", "write objects/a", "close objects/a",
    "put_if_absent catalog/1", "get objects/a", "get_into objects/a", "size objects/a", "list ",
    "create objects/b", "abort objects/b", "delete objects/a",
]  # fmt: skip


def visible(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.parent.name != ".tmp"
    }


def expected_after(calls_done: int) -> dict[str, bytes]:
    """What is visible once the first calls were carried out."""
    content = {}
    if 5 <= calls_done < 13:
        content["objects/a"] = b"0123456789"
    if calls_done >= 6:
        content["catalog/1"] = b"{}"
    return content


def test_without_a_plan_every_call_is_counted_and_carried_out(tmp_path: Path) -> None:
    storage = FaultyStorage(open_storage(tmp_path))
    scenario(storage)
    assert storage.calls == CALLS
    assert visible(tmp_path) == {"catalog/1": b"{}"}
    assert storage.url == str(tmp_path)


@pytest.mark.parametrize("at", range(1, len(CALLS) + 1))
@pytest.mark.parametrize("when", list(When))
def test_a_crash_at_any_call_stops_everything_there(tmp_path: Path, at: int, when: When) -> None:
    storage = FaultyStorage(open_storage(tmp_path), Fault(at, when))
    with pytest.raises(SimulatedCrash):
        scenario(storage)
    assert storage.has_crashed
    assert storage.calls == CALLS[:at]
    state = expected_after(at if when is When.AFTER else at - 1)
    assert visible(tmp_path) == state
    for act in (storage.clean, lambda: storage.list(""), lambda: storage.put_if_absent("x", b"")):
        with pytest.raises(SimulatedCrash):
            act()
    assert visible(tmp_path) == state
    open_storage(tmp_path).clean()
    assert [path for path in tmp_path.rglob("*") if path.parent.name == ".tmp"] == []


@pytest.mark.parametrize("at", range(1, len(CALLS) + 1))
@pytest.mark.parametrize("when", list(When))
def test_an_outage_at_any_call_is_passed_once(tmp_path: Path, at: int, when: When) -> None:
    storage = FaultyStorage(open_storage(tmp_path), Fault.outage(at, when))
    with pytest.raises(UnavailableError, match="injected"):
        scenario(storage)
    assert visible(tmp_path) == expected_after(at if when is When.AFTER else at - 1)
    storage.put_if_absent("later", b"x")
    assert storage.get("later") == b"x"


def test_a_crash_keeps_the_torn_bytes_unfinished(tmp_path: Path) -> None:
    storage = FaultyStorage(open_storage(tmp_path), Fault(3, When.TORN))
    with pytest.raises(SimulatedCrash):
        scenario(storage)
    (leftover,) = (tmp_path / ".tmp").iterdir()
    assert leftover.read_bytes() == b"0123"


def test_an_error_aborts_the_writer_for_good(tmp_path: Path) -> None:
    storage = FaultyStorage(open_storage(tmp_path), Fault.outage(2, When.TORN))
    writer = storage.create("a")
    with pytest.raises(UnavailableError):
        writer.write(b"0123")
    assert list((tmp_path / ".tmp").iterdir()) == []
    with pytest.raises(ValueError, match="closed or aborted"):
        writer.close()
    assert visible(tmp_path) == {}


def test_a_lost_answer_to_close_leaves_the_object(tmp_path: Path) -> None:
    storage = FaultyStorage(open_storage(tmp_path), Fault.outage(3, When.AFTER))
    with storage.create("a") as writer:
        writer.write(b"x")
        with pytest.raises(UnavailableError):
            writer.close()
    assert visible(tmp_path) == {"a": b"x"}


def test_a_lasting_outage_fails_every_later_call(tmp_path: Path) -> None:
    storage = FaultyStorage(open_storage(tmp_path), Fault.outage(2, is_lasting=True))
    storage.put_if_absent("a", b"x")
    for _ in range(3):
        with pytest.raises(UnavailableError):
            storage.get("a")
    assert len(storage.calls) == 4


def test_several_faults_hit_their_own_calls(tmp_path: Path) -> None:
    storage = FaultyStorage(open_storage(tmp_path), Fault.outage(1), Fault(3))
    with pytest.raises(UnavailableError):
        storage.list("")
    assert storage.list("") == []
    with pytest.raises(SimulatedCrash):
        storage.list("")


def test_no_handler_of_ordinary_errors_survives_a_crash(tmp_path: Path) -> None:
    storage = FaultyStorage(open_storage(tmp_path), Fault(1))
    with pytest.raises(SimulatedCrash):
        try:
            storage.list("")
        except Exception:
            pytest.fail("a dead process handled an error")


def test_faults_wrap_any_storage() -> None:
    inner = open_storage("memory://faults", global_store=False, skip_instance_cache=True)
    storage = FaultyStorage(inner, Fault(4))
    with pytest.raises(SimulatedCrash):
        scenario(storage)
    assert inner.list("") == []
    inner.clean()
    scenario(inner)
    assert [item.name for item in inner.list("")] == ["catalog/1"]
