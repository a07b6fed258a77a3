"""Lineage: on which history a model may be saved, and on which it may not."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.format.catalog import BASE, DELTA, Catalog
from holdfast.checkpoint.planning.lineage import Lineage
from holdfast.errors import InvalidRequestError
from tests.unit.checkpoint.format.test_catalog import grown, start

URL = "memory://run"


def run_of(*steps: int) -> Catalog:
    """A run with a base and deltas at these steps."""
    catalog = start()
    for step in steps:
        catalog = grown(catalog, step, BASE if catalog.last is None else DELTA)
    return catalog


def test_a_new_run_has_no_history_and_needs_no_origin() -> None:
    assert Lineage(step=5).history(start(), url=URL).steps == ()


def test_a_model_that_descends_from_the_last_checkpoint_builds_on_all() -> None:
    lineage = Lineage()
    lineage.restored(4, discards_later=False)
    lineage.step += 1
    assert lineage.history(run_of(2, 4), url=URL).steps == (2, 4)
    lineage.committed(5)
    assert (lineage.origin(), lineage.rewind_to) == (5, None)


def test_later_checkpoints_are_given_up_only_when_asked_for_and_only_once() -> None:
    lineage = Lineage()
    lineage.restored(2, discards_later=False)
    lineage.step += 1
    with pytest.raises(InvalidRequestError, match="after the step that was restored"):
        lineage.history(run_of(2, 4), url=URL)
    lineage.restored(2, discards_later=True)
    lineage.step += 1
    assert lineage.history(run_of(2, 4), url=URL).steps == (2,)
    assert lineage.rewind_to == 2
    lineage.committed(3)
    assert lineage.rewind_to is None


@pytest.mark.parametrize(
    ("lineage", "refusal"),
    [
        (Lineage(step=9), "checkpoints here already"),
        (Lineage(step=4, at=4), "saved already"),
        (Lineage(step=2, at=2, discards_later=True), "saved already"),
    ],
)
def test_a_history_that_is_not_the_models_is_refused(lineage: Lineage, refusal: str) -> None:
    with pytest.raises(InvalidRequestError, match=refusal):
        lineage.history(run_of(2, 4), url=URL)


def test_without_a_committed_step_there_is_no_origin() -> None:
    with pytest.raises(InvalidRequestError, match="nothing is saved yet"):
        Lineage(step=3).origin()


def test_a_model_torn_by_an_error_stays_so_until_a_restore() -> None:
    lineage = Lineage()
    with lineage.torn():
        assert lineage.is_torn
    lineage.check_whole()
    with pytest.raises(OSError), lineage.torn():
        raise OSError("gone")
    with lineage.torn():  # what succeeds afterwards overwrote only a part
        pass
    with pytest.raises(InvalidRequestError, match="only in part"):
        lineage.check_whole()
    lineage.restored(4, discards_later=False)
    lineage.check_whole()
