"""The pure decisions: base or delta, how many bits, what to keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.checkpoint.format.catalog import CheckpointEntry
from holdfast.checkpoint.format.object import Extent
from holdfast.checkpoint.planning.bases import plan_checkpoint
from holdfast.checkpoint.planning.bits import BitsFor, FailureEstimate, choose_bits
from holdfast.checkpoint.planning.codecs import plan_codec
from holdfast.checkpoint.planning.retention import Keep, choose_kept
from holdfast.errors import InvalidRequestError


def entry(ordinal: int, *, time: float = 0.0) -> CheckpointEntry:
    return CheckpointEntry(
        step=100 * ordinal, ordinal=ordinal, kind="base", base=100 * ordinal, schema=0, time=time,
        codec="fp32", state_codec="fp32", rows=1, row_bytes=1, bytes=1, full_bytes=1, stall_s=0.0,
        reason="", dense=Extent("o", 0, 1, 0),
    )  # fmt: skip


def test_intermittent_takes_the_base_where_the_paper_does() -> None:
    # Figure 8: a quarter of the model at first, about a half after ten intervals.
    sizes = [0.25, 0.32, 0.37, 0.41, 0.44, 0.46, 0.48, 0.50, 0.51, 0.52]
    taken = [plan_checkpoint("intermittent", sizes[:i]).kind for i in range(len(sizes))]
    first = taken.index("base")
    assert taken[:first] == ["delta"] * first
    assert 7 <= first <= 9


@pytest.mark.parametrize(
    ("policy", "kind", "since"),
    [
        ("full", "base", None),
        ("one-shot", "delta", "base"),
        ("consecutive", "delta", "last"),
        ("intermittent", "delta", "base"),
    ],
)
def test_policies_differ_as_their_table_says(policy: str, kind: str, since: str | None) -> None:
    plan = plan_checkpoint(policy, [0.2])
    assert (plan.kind, plan.since) == (kind, since)
    assert plan_checkpoint(policy, None).kind == "base"
    forced = plan_checkpoint(policy, [0.2], must_be_base="because")
    assert (forced.kind, forced.reason) == ("base", "because")


def test_one_shot_never_takes_another_base() -> None:
    assert plan_checkpoint("one-shot", [1.0] * 50).kind == "delta"


def test_more_expected_restores_never_choose_fewer_bits() -> None:
    bits = [choose_bits(n / 2).bits for n in range(100)]
    assert bits == sorted(bits)
    assert set(bits) == {2, 3, 4, 8}


def test_bits_table_can_be_replaced() -> None:
    table = (BitsFor(5, 3), BitsFor(2, 2))
    assert [choose_bits(n, table=table).bits for n in (1, 2, 3, 5, 6)] == [2, 2, 3, 3, 8]


def test_failures_beyond_the_estimate_fall_back_to_8_bits() -> None:
    assert choose_bits(3, restores=3).bits == 3
    assert choose_bits(3, restores=4).bits == 8
    plan = plan_codec(None, None, expected_restores=1, restores=9)
    assert plan.weights.name == "asym8"
    assert "9 restores so far" in plan.reason


@pytest.mark.parametrize("field", ["training_h", "nodes", "failures_per_node_day"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True])
def test_nonsense_estimates_are_refused(field: str, value: float) -> None:
    good = {"training_h": 1.0, "nodes": 1, "failures_per_node_day": 0.5}
    with pytest.raises(InvalidRequestError, match=field):
        FailureEstimate(**{**good, field: value})  # type: ignore[arg-type]


def test_without_rules_everything_stays() -> None:
    entries = [entry(i) for i in range(5)]
    assert choose_kept(entries, Keep(), now=1e12) == {0, 100, 200, 300, 400}


def test_rules_add_up_and_the_last_always_stays() -> None:
    entries = [entry(i, time=i * 86_400.0) for i in range(10)]
    now = 9 * 86_400.0
    assert choose_kept(entries, Keep(last=2), now=now) == {800, 900}
    assert choose_kept(entries, Keep(every=4), now=now) == {0, 400, 800, 900}
    assert choose_kept(entries, Keep(days=2.0), now=now) == {700, 800, 900}
    assert choose_kept(entries, Keep(days=0.5), now=now + 1e9) == {900}
    assert choose_kept(entries, Keep(last=1, every=5, days=1), now=now) == {0, 500, 800, 900}
    assert choose_kept([], Keep(last=1), now=now) == frozenset()


@pytest.mark.parametrize("rule", ["last", "every", "days"])
@pytest.mark.parametrize("value", [0, -3, True])
def test_rules_must_be_positive(rule: str, value: int) -> None:
    with pytest.raises(InvalidRequestError, match=rule):
        Keep(**{rule: value})


ROWS, WIDTH = 4000, 32


def train_rows(model: nn.Embedding, optimizer: torch.optim.Optimizer, rows: range) -> None:
    """Change these rows."""
    optimizer.zero_grad()
    model(torch.tensor(rows)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("keep", [None, 1])
def test_after_a_fall_back_to_8_bits_deltas_are_compared_with_the_base_in_the_same_bytes(
    keep: int | None, tmp_path: Path
) -> None:
    """A quarter of the rows is a quarter of a base, whatever either is stored in."""

    def start() -> tuple[hf.Checkpointer, nn.Embedding, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Embedding(ROWS, WIDTH, sparse=True)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        ck = hf.Checkpointer(
            tmp_path, model=model, optimizer=optimizer, keep=keep,
            strategy=hf.Strategy("check-n-run", base="intermittent", codec=None),
            expected_restores=1,
        )  # fmt: skip
        return ck, model, optimizer

    ck, model, optimizer = start()
    with ck:
        ck.save().result(timeout=60)
        train_rows(model, optimizer, range(ROWS // 4))
        ck.step()
        ck.save().result(timeout=60)
    for _ in range(2):
        ck, model, optimizer = start()
        with ck:
            ck.resume()
    ck, model, optimizer = start()
    with ck:
        ck.resume()
        for step in range(2, 5):
            train_rows(model, optimizer, range(ROWS // 4))
            ck.step()
            ck.save().result(timeout=60)
            catalog = hf.open(tmp_path).catalog
            assert catalog.last is not None and catalog.last.codec == "asym8"
            actual = catalog.last.row_bytes / catalog.growth[0].row_bytes
            assert actual > 0.7  # what was taken for the delta's size: 8 bits over 2
            sizes = catalog.delta_sizes()
            assert sizes is not None
            assert sizes == pytest.approx([0.25] * step, rel=0.06)
            assert catalog.last.kind == "delta", catalog.last.reason
            # F_c = 1 + sum, I_c = (i + 1) * last: with the bytes as they are, a base too early.
            assert 1 + sum(sizes) > (len(sizes) + 1) * sizes[-1]
