from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cluster.spec import (
    CODES,
    DIFFERENCE,
    LOCKS_MAX,
    OPTIMIZERS,
    PROPAGATIONS,
    ClusterSpec,
    Optimizer,
    TableSpec,
    granule_stripes,
    granules_of,
)
from holdfast.errors import InvalidRequestError
from holdfast.model.placement import Placement

NUMBERS = st.floats(0, 1e30) | st.integers(0, 100)
COUNTS = st.integers(1, 40)


@st.composite
def placements(draw: st.DrawFn, servers: int) -> Placement:
    groups = draw(st.sampled_from([g for g in range(1, servers + 1) if servers % g == 0]))
    parity = draw(st.integers(0, min(3, servers // groups - 1)))
    data = draw(st.integers(1, servers // groups - parity))
    return Placement(servers, data=data, parity=parity, groups=groups)


@st.composite
def specs(draw: st.DrawFn) -> ClusterSpec:
    servers = draw(st.integers(1, 12))
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4, unique=True))
    tables = []
    for name in names:
        placement = draw(placements(servers))
        codes = {0: ("none",), 1: ("xor", "rs", "sum")}.get(placement.parity, ("rs",))
        code = draw(st.sampled_from(codes))
        optimizer = Optimizer(
            draw(st.sampled_from(list(OPTIMIZERS))), *(draw(NUMBERS) for _ in range(5))
        )
        is_copied = placement.data == 1 and code in ("xor", "rs")
        is_summed = code == "sum" and optimizer.weight_decay == 0
        told = PROPAGATIONS if is_copied or is_summed else (DIFFERENCE,)
        tables.append(
            TableSpec(
                name,
                draw(st.integers(1, 1 << 40)),
                draw(st.integers(1, 1 << 16)),
                placement,
                code,
                optimizer,
                seed=draw(st.integers(0, 1 << 62)),
                bound=draw(st.floats(0, 1)),
                is_held=draw(st.booleans()),
                propagation=draw(st.sampled_from(told)),
            )
        )
    locks, waiting_rows = draw(st.integers(1, LOCKS_MAX)), draw(st.integers(1, 1 << 40))
    return ClusterSpec(tuple(tables), locks=locks, waiting_rows=waiting_rows)


@settings(deadline=None)
@given(specs())
def test_a_spec_travels_as_json_and_comes_back_the_same(spec: ClusterSpec) -> None:
    assert ClusterSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@settings(deadline=None)
@given(specs())
def test_a_record_holds_the_weights_and_what_the_optimizer_needs(spec: ClusterSpec) -> None:
    for table in spec.tables:
        state = {"sgd": 0, "momentum": table.dim, "adagrad": table.dim, "rowwise-adagrad": 1}
        if table.optimizer.name != "adam":
            assert table.width == table.dim + state[table.optimizer.name]
        else:
            assert table.width > 3 * table.dim  # two moments and a count
        assert table.optimizer.hyper_H.dtype == np.float32


def test_a_cluster_survives_what_its_least_coded_table_does() -> None:
    one, two, none = (Placement(5, data=2, parity=p) for p in (1, 2, 0))
    tables = (TableSpec("a", 9, 2, one), TableSpec("b", 9, 2, two, "rs"))
    held = TableSpec("c", 9, 2, none, "none", is_held=True)
    assert ClusterSpec(tables).parity == 1
    assert ClusterSpec((*tables[1:], held)).parity == 2
    assert ClusterSpec((held,)).parity == 5
    assert ClusterSpec((TableSpec("c", 9, 2, none, "none"), *tables)).parity == 0
    assert ClusterSpec((*tables, held)).parity_max == 2
    assert ClusterSpec((*tables, held)).index == {"a": 0, "b": 1, "c": 2}


def test_sums_of_gradients_survive_no_loss() -> None:
    told = table(code="sum", propagation="gradient")
    assert told.keeps_states and told.losses_max == 0
    assert ClusterSpec((table(name="a"), told)).parity == 0
    copied = table(placement=Placement(5, data=1, parity=2), code="rs", propagation="gradient")
    assert not copied.keeps_states and ClusterSpec((copied,)).parity == 2


# Absurd settings.

PLACED = Placement(5, data=4, parity=1)


def table(**changes: Any) -> TableSpec:
    chosen: dict[str, Any] = {"name": "users", "rows": 9, "dim": 2, "placement": PLACED}
    return TableSpec(**{**chosen, **changes})


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"servers": 5, "data": 4, "parity": 2}, r"servers=5 data=4 parity=2; have at least"),
        ({"servers": 1, "data": 1, "parity": 1}, r"servers=1 data=1 parity=1"),
        ({"servers": 1, "data": 0, "parity": 1}, r"a stripe's rows need a server each"),
        ({"servers": 6, "data": 3, "parity": 1, "groups": 2}, r"groups=2 .* in a group"),
        ({"servers": 5, "groups": 2}, r"groups are of the same size\. servers=5 groups=2"),
        ({"servers": 0}, r"servers=0"),
        ({"servers": 2.0}, r"servers=2\.0"),
        ({"servers": 3, "parity": -1}, r"parity=-1"),
    ],
)
def test_stripes_that_do_not_fit_their_servers_are_refused(
    chosen: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        Placement(**chosen)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "7", float("nan"), 1 << 60])
@pytest.mark.parametrize("name", ["rows", "dim"])
def test_tables_without_rows_or_width_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} are a whole number") as refused:
        table(**{name: value})
    assert refused.value.facts["table"] == "users"


@pytest.mark.parametrize("name", ["adamw", "", "SGD", "none"])
def test_an_unknown_optimizer_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="unknown optimizer") as refused:
        Optimizer(name)
    assert refused.value.facts == {"optimizer": name, "known": list(OPTIMIZERS)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, -1, None, "0.1", True])
@pytest.mark.parametrize("name", ["lr", "momentum", "beta2", "eps", "weight_decay"])
def test_hyperparameters_are_numbers_from_zero_on(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} is a number from 0 on"):
        Optimizer("adam", **{name: value})


def test_an_unknown_code_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidRequestError, match="unknown code") as refused:
        table(code="raid")
    assert refused.value.facts["known"] == list(CODES)


@pytest.mark.parametrize("code", ["xor", "rs", "sum"])
def test_a_code_without_parity_is_refused(code: str) -> None:
    with pytest.raises(InvalidRequestError, match="a code needs parity rows"):
        table(code=code, placement=Placement(5))


def test_parity_without_a_code_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="parity rows a code"):
        table(code="none")


@pytest.mark.parametrize("locks", [0, -1, LOCKS_MAX + 1])
def test_a_number_of_locks_that_is_absurd_is_refused(locks: int) -> None:
    with pytest.raises(InvalidRequestError, match="locks are a whole number"):
        ClusterSpec((table(),), locks=locks)


@pytest.mark.parametrize("waiting_rows", [0, -5])
def test_at_least_one_row_can_wait(waiting_rows: int) -> None:
    with pytest.raises(InvalidRequestError, match="waiting_rows are a whole number"):
        ClusterSpec((table(),), waiting_rows=waiting_rows)


def test_tables_have_names_of_their_own_and_the_same_servers() -> None:
    with pytest.raises(InvalidRequestError, match="two tables have the same name"):
        ClusterSpec((table(), table()))
    with pytest.raises(InvalidRequestError, match="at least one table"):
        ClusterSpec(())
    with pytest.raises(InvalidRequestError, match="all tables lie on the same servers"):
        ClusterSpec((table(), table(name="ads", placement=Placement(6, data=4, parity=1))))


GOOD = ClusterSpec((table(),)).to_json()


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"tables": []},
        {"tables": None, "locks": 1, "waiting_rows": 1},
        {**GOOD, "tables": []},
        {**GOOD, "tables": [{}]},
        {**GOOD, "tables": [7]},
        {**GOOD, "tables": ["users"]},
        {**GOOD, "locks": "3"},
        {**GOOD, "locks": None},
        {**GOOD, "locks": 0},
        {**GOOD, "waiting_rows": None},
        *(
            {**GOOD, "tables": [{**GOOD["tables"][0], **change}]}
            for change in (
                {"placement": 5},
                {"placement": {"servers": 1, "data": 1, "parity": 1}},
                {"placement": {"servers": 5, "copies": 2}},
                {"optimizer": {"name": "adamw"}},
                {"optimizer": {"name": "sgd", "lr": "fast"}},
                {"optimizer": {"name": "sgd", "warmup": 3}},
                {"optimizer": None},
                {"rows": "9"},
                {"dim": None},
                {"code": "none"},
                {"extra": 1},
            )
        ),
    ],
)
def test_what_is_not_a_spec_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        ClusterSpec.from_json(value)


# Ranges.


@settings(deadline=None)
@given(stripes=st.integers(1, 300), locks=st.integers(1, 40))
def test_ranges_cover_every_stripe_once_and_agree(stripes: int, locks: int) -> None:
    granules_N = granules_of(np.arange(stripes), stripes=stripes, locks=locks)
    covered = []
    for granule in range(locks):
        found = granule_stripes(granule, stripes=stripes, locks=locks)
        assert list(found) == np.flatnonzero(granules_N == granule).tolist()
        covered += list(found)
    assert covered == list(range(stripes))
    sizes = np.bincount(granules_N, minlength=locks)
    assert sizes.max() - sizes.min() <= 1


@settings(deadline=None)
@given(stripes=st.integers(1 << 30, 1 << 40), locks=st.integers(1, LOCKS_MAX), picks=st.data())
def test_ranges_of_the_largest_tables_agree_too(
    stripes: int, locks: int, picks: st.DataObject
) -> None:
    granule = picks.draw(st.integers(0, locks - 1))
    found = granule_stripes(granule, stripes=stripes, locks=locks)
    around = np.clip([found.start - 1, found.start, found.stop - 1, found.stop], 0, stripes - 1)
    is_inside = [stripe in found for stripe in around.tolist()]
    granules = granules_of(around, stripes=stripes, locks=locks)
    assert (granules == granule).tolist() == is_inside


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, r"only copies of a row can follow its gradients\. .*data=4; use propagation="),
        ({"code": "rs"}, "only copies of a row"),
        ({"code": "none", "placement": Placement(5)}, "no parity to pass gradients on to"),
        (
            {"code": "sum", "optimizer": Optimizer("sgd", weight_decay=0.1)},
            r"a step depends on weights.*weight_decay=0\.1",
        ),
        ({"propagation": "both"}, r"unknown propagation\. propagation='both'"),
        ({"propagation": None}, "unknown propagation"),
    ],
)
def test_gradients_that_parity_could_not_follow_are_refused(
    changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        table(**{"propagation": "gradient", **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": Placement(5, data=1, parity=1)},
        {"placement": Placement(5, data=1, parity=3), "code": "rs"},
        {"placement": Placement(5, data=1, parity=1), "code": "rs"},
        {"code": "sum"},
    ],
)
def test_copies_and_sums_can_follow_gradients(changes: dict[str, Any]) -> None:
    assert table(propagation="gradient", **changes).propagation == "gradient"
