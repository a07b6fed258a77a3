"""A rule is trusted only if it could have failed and did not."""

from __future__ import annotations

import numpy as np

from holdfast.checkpoint.tracking.optimizers import rules
from holdfast.checkpoint.tracking.optimizers.evidence import (
    SAVES_OBSERVED,
    Evidence,
    Observations,
    Words,
)
from holdfast.kernels.rows import bitmap

ROWS = 100


def rows(*ids: int) -> Words:
    words_W = bitmap.new(ROWS)
    bitmap.mark(words_W, np.array(ids, np.int64), ROWS)
    return words_W


def observe(changed: Words, gradient: Words, before: Words, *, saves: int) -> Evidence:
    evidence = Evidence()
    for _ in range(saves):
        evidence = evidence.add(changed, gradient, before, rows=ROWS)
    return evidence


def test_gradients_are_trusted_once_rows_trained_before_have_stayed() -> None:
    evidence = observe(rows(1, 2), rows(1, 2), rows(5), saves=SAVES_OBSERVED)
    assert evidence.conclusion == rules.GRADIENT


def test_nothing_is_trusted_before_enough_saves() -> None:
    evidence = observe(rows(1, 2), rows(1, 2), rows(5), saves=SAVES_OBSERVED - 1)
    assert evidence.conclusion == rules.UNKNOWN


def test_without_idle_rows_moments_could_hide_so_trained_rows_are_taken() -> None:
    # Every row trained before has a gradient again: whether moments move it cannot show.
    evidence = observe(rows(1, 2), rows(1, 2), rows(1), saves=5)
    assert evidence.conclusion == rules.TRAINED


def test_rows_that_move_without_a_gradient_are_moments() -> None:
    evidence = observe(rows(1, 2, 5), rows(1, 2), rows(5, 6), saves=5)
    assert evidence.conclusion == rules.TRAINED


def test_a_rule_broken_once_is_never_trusted() -> None:
    evidence = observe(rows(1, 77), rows(1), rows(5), saves=1)
    for _ in range(50):
        evidence = evidence.add(rows(1), rows(1), rows(5), rows=ROWS)
    assert evidence.conclusion == rules.UNKNOWN


def test_most_rows_changed_every_time_means_all() -> None:
    evidence = observe(rows(*range(90)), rows(1), rows(5), saves=SAVES_OBSERVED)
    assert evidence.conclusion == rules.ALL


def test_a_save_in_which_nothing_changed_says_nothing() -> None:
    assert observe(rows(), rows(1), rows(5), saves=9) == Evidence()


def test_what_was_seen_of_one_optimizer_is_not_believed_of_another() -> None:
    observed = Observations()
    changed_W, none_W = bitmap.new(64), bitmap.new(64)
    bitmap.mark(changed_W, np.array([1, 2]), 64)
    before_W = bitmap.new(64)
    bitmap.mark(before_W, np.array([9]), 64)
    for _ in range(SAVES_OBSERVED):
        observed.add(["first"], changed_W, changed_W, before_W, rows=64)
    assert observed.conclusion("first") == rules.GRADIENT
    assert observed.conclusion("second") == rules.UNKNOWN
    observed.add(["first", "second"], changed_W, none_W, None, rows=64)  # rows escaped both
    assert observed.conclusion("first") == rules.UNKNOWN
