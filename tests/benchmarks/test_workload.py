"""The rows of an interval are what they claim to be, and training them changes them alone."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.checkpoint.accuracy import restore_steps
from benchmarks.checkpoint.reduction import QUICK, watch
from benchmarks.workload import make_workload, share, table_rows, touched_ids


def test_an_interval_touches_a_quarter_of_the_rows_once_each() -> None:
    rows = table_rows(1 << 20, has_row_state=True)
    for ids in touched_ids(rows, intervals=2):
        assert share(ids, sum(rows)) == pytest.approx(0.26, abs=0.03)
        for ids_N, size in zip(ids, rows, strict=True):
            assert (np.diff(ids_N) > 0).all() and (ids_N < size).all()


@pytest.mark.parametrize("has_row_state", [False, True])
def test_training_an_interval_changes_its_rows_and_no_others(has_row_state: bool) -> None:
    work = make_workload(1 << 20, has_row_state=has_row_state)
    ids = touched_ids([table.rows for table in work.tables], intervals=1)[0]
    before = [[column.clone() for column in table.tensors()] for table in work.tables]
    work.train(ids, seed=5)
    for table, ids_N, columns in zip(work.tables, ids, before, strict=True):
        assert len(columns) == 1 + has_row_state
        for column, known in zip(table.tensors(), columns, strict=True):
            changed = np.flatnonzero((column != known).any(dim=1).numpy())
            np.testing.assert_array_equal(changed, ids_N)


def test_workload_has_the_bytes_it_was_asked_for() -> None:
    for has_row_state in (False, True):
        work = make_workload(1 << 20, has_row_state=has_row_state)
        assert work.row_bytes == 1 << 20


def test_fewer_expected_restores_never_write_more_and_tallies_add_up() -> None:
    found = watch(QUICK, has_row_state=False)
    written = [found.tallies[f"{n} restores"].average for n in (1, 3, 20, 21)]
    assert written == sorted(written) and written[-1] < found.full_bytes
    for name, tally in found.tallies.items():
        assert tally.kinds[0] == "base", name
        assert tally.kept[0] == tally.written[0], name
        assert len(tally.kept) == QUICK.intervals, name
    assert set(found.tallies["full"].kinds) == {"base"}
    # The bits are the only difference between the two bases: 2 and 8 of 64 values a row.
    rows = found.row_bytes / 256
    bases = [found.tallies[f"{n} restores"].written[0] for n in (1, 21)]
    assert bases[1] - bases[0] == pytest.approx(rows * 64 * 6 / 8, rel=0.01)


def test_restores_are_spread_evenly_and_never_at_the_end() -> None:
    assert restore_steps(420, 20) == list(range(20, 420, 20))
    assert restore_steps(10, 0) == []
