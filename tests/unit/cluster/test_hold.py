"""A freeze that is kept: one for many uses, of one epoch, and never for long."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from holdfast.cluster.hold import Hold
from holdfast.cluster.view import View
from holdfast.errors import ConflictError

VIEW = View(3, ("a", "b"), version=1)


class Freezes:
    """Stands for servers: what is frozen now, and was."""

    def __init__(self) -> None:
        self.frozen: list[str] = []
        self.made: list[tuple[str, int, list[int]]] = []
        self.is_thawed = threading.Event()

    @contextlib.contextmanager
    def __call__(self, view: View, granules: Sequence[int]) -> Iterator[tuple[str, object]]:
        ticket = f"t{len(self.made)}"
        self.made.append((ticket, view.epoch, list(granules)))
        self.frozen.append(ticket)
        try:
            yield ticket, {}
        finally:
            self.frozen.remove(ticket)
            self.is_thawed.set()


def make_hold(**seconds: float) -> tuple[Hold, Freezes]:
    freezes = Freezes()
    freezer: Any = type("Freezer", (), {"frozen": staticmethod(freezes)})()
    return Hold(freezer, 4, **seconds), freezes


def use(hold: Hold, freezes: Freezes, view: View = VIEW) -> str:
    with hold.using(view) as ticket:
        assert freezes.frozen == [ticket]
        return ticket


def test_uses_in_a_row_share_one_freeze_of_all_ranges() -> None:
    hold, freezes = make_hold(most_s=100, idle_s=100)
    assert {use(hold, freezes) for _ in range(5)} == {"t0"}
    assert freezes.made == [("t0", 3, [0, 1, 2, 3])]
    hold.close()
    assert freezes.frozen == []


@pytest.mark.parametrize(
    "seconds", [{"most_s": 0.01, "idle_s": 100}, {"most_s": 100, "idle_s": 0.01}]
)
def test_it_is_thawed_in_time(seconds: dict[str, float]) -> None:
    hold, freezes = make_hold(**seconds)
    use(hold, freezes)
    assert freezes.is_thawed.wait(30)
    assert use(hold, freezes) == "t1"
    hold.close()


def test_it_is_not_thawed_in_the_midst_of_a_use() -> None:
    hold, freezes = make_hold(most_s=0.0, idle_s=0.0)
    with hold.using(VIEW) as ticket:
        assert not freezes.is_thawed.wait(0.1)
        assert freezes.frozen == [ticket]
    assert freezes.is_thawed.wait(30)
    hold.close()


def test_another_epoch_has_a_freeze_of_its_own() -> None:
    hold, freezes = make_hold(most_s=100, idle_s=100)
    use(hold, freezes)
    use(hold, freezes, dataclasses.replace(VIEW, epoch=4))
    assert [(ticket, epoch) for ticket, epoch, _ in freezes.made] == [("t0", 3), ("t1", 4)]
    hold.close()


def test_a_use_that_fails_ends_the_freeze() -> None:
    hold, freezes = make_hold(most_s=100, idle_s=100)
    with pytest.raises(ConflictError), hold.using(VIEW):
        raise ConflictError("not frozen any more")
    assert freezes.frozen == []
    assert use(hold, freezes) == "t1"
    hold.close()


def test_nothing_is_frozen_after_close() -> None:
    hold, freezes = make_hold()
    use(hold, freezes)
    hold.close()
    with pytest.raises(ConflictError), hold.using(VIEW):
        pass
    assert freezes.frozen == [] and len(freezes.made) == 1
