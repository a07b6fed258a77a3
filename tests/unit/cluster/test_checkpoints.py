"""What a cluster's checkpoints can be told, and what leases do for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.cluster.checkpoints import ClusterCheckpointer
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.clustersave import _common_placement, _known
from holdfast.cluster.leases import Leases
from holdfast.cluster.spec import ClusterSpec, Optimizer, TableSpec
from holdfast.cluster.stored_state import layout_of
from holdfast.errors import InvalidRequestError
from holdfast.model.placement import Placement
from tests.cluster.threads import ThreadEngine

SPEC = ClusterSpec((TableSpec("users", 20, 4, Placement(3), "none", Optimizer("adam")),))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    found = Cluster(SPEC, engine=ThreadEngine())
    yield found
    found.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "often"}, "unknown strategy"),
        ({"recovery": "some"}, "unknown recovery"),
        ({"every_batches": 0}, "positive number"),
        ({"codec": "zip"}, "codec"),
        ({"keep": -1}, "retention"),
    ],
)
def test_settings_that_cannot_be_are_refused_at_once(
    cluster: Cluster, settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        ClusterCheckpointer(cluster, tmp_path, **settings)
    assert cluster.coordinator.second is None


@pytest.mark.parametrize(
    ("strategy", "recovery", "is_partial"),
    [
        ("cpr", None, True),
        ("full", None, False),
        ("check-n-run", None, False),
        ("cpr", "full", False),
        ("full", "partial", True),
    ],
)
def test_who_goes_back_follows_from_the_strategy_unless_it_is_said(
    cluster: Cluster, strategy: str, recovery: str | None, is_partial: bool, tmp_path: Path
) -> None:
    with ClusterCheckpointer(cluster, tmp_path, strategy=strategy, recovery=recovery) as layer:
        assert layer.is_partial == is_partial
        assert cluster.coordinator.second is layer
    assert cluster.coordinator.second is None


def test_without_batches_a_checkpoint_must_be_told_its_step(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.start()
    with ClusterCheckpointer(cluster, tmp_path, strategy="full") as layer:
        with pytest.raises(InvalidRequestError, match="save\\(step=0\\)"):
            layer.save()
        entry = layer.save(step=0)
        assert layer.save(step=0) == entry  # nothing was trained since
        assert layer.steps == (0,)
        assert layer.resume() == 0


def test_counts_of_steps_and_networks_are_stored_whole_whatever_the_codec(
    cluster: Cluster, tmp_path: Path
) -> None:
    from holdfast.cluster.dense import NAME

    networks = dataclasses.replace(SPEC.tables[0], name=NAME)
    cluster.spec = ClusterSpec((*SPEC.tables, networks))
    with ClusterCheckpointer(cluster, tmp_path, strategy="full", codec="adaptive4") as layer:
        codecs = layer._attempts.codecs(layer._plan_codec(restores=0))
    assert [codec.name for codec in codecs["users"]] == ["adaptive4", "bf16", "log4", "fp32"]
    assert {codec.name for codec in codecs[NAME]} == {"fp32"}


def test_the_pls_is_what_lost_servers_missed_of_all_batches(
    cluster: Cluster, tmp_path: Path
) -> None:
    with ClusterCheckpointer(cluster, tmp_path, strategy="cpr") as layer:
        layer._at = 100
        assert layer.lost([1], 130, 1000) == pytest.approx(30 / 1000 / 3)
        assert layer.lost([0, 1], 110, 1000) == pytest.approx(2 * 10 / 1000 / 3)
        assert layer.lost([0], 100, 1000) == 0
        assert layer.pls == pytest.approx(50 / 3000)


def test_a_catalog_is_told_a_placement_only_where_all_tables_have_it() -> None:
    (users,) = SPEC.tables
    coded = dataclasses.replace(users, placement=Placement(3, data=2, parity=1), code="xor")
    copied = dataclasses.replace(coded, name="n", placement=Placement(3, data=1, parity=1))
    other = dataclasses.replace(users, name="n", placement=Placement(3, data=1))
    grouped = dataclasses.replace(
        users, placement=Placement(6, data=2, parity=1, groups=2), code="xor"
    )
    assert _common_placement(ClusterSpec((users, other))) == Placement(3)
    assert _common_placement(ClusterSpec((coded,))) == coded.placement
    assert _common_placement(ClusterSpec((coded, copied))) is None
    assert _common_placement(ClusterSpec((grouped,))) is None
    assert layout_of(ClusterSpec((grouped,))) == {"users": [6, 2, 1, 2]}


def test_numbers_of_pushes_end_with_the_last_worker_that_pushed() -> None:
    assert _known([4, -1, 0, -1, -1]) == [4, -1, 0]
    assert _known([-1]) == []


# Leases.


def test_paused_leases_give_nothing_and_are_quiet_when_all_that_is_out_is_done() -> None:
    leases = Leases(range(5))
    leases.next(0)
    leases.pause()
    assert leases.next(1) is None and not leases.is_quiet
    leases.done(0, 0)
    assert leases.is_quiet and leases.next(0) is None
    leases.resume()
    found = leases.next(0)
    assert found is not None and found.batch == 1


def test_a_round_that_was_begun_is_finished_before_a_pause() -> None:
    leases = Leases(range(5), round_batches=2)
    assert leases.next(0) is not None
    leases.pause()
    assert not leases.is_quiet
    assert leases.next(1) is not None  # else the first could never commit
    for worker in (0, 1):
        leases.stage(worker)
    for worker in (0, 1):
        assert leases.may_commit(worker)
        leases.done(worker, 0)
    assert leases.is_quiet
    assert leases.next(0) is None


def test_leases_go_back_to_what_was_done_with_batches_that_were_given_back() -> None:
    leases = Leases(range(10, 16))
    for worker in (0, 1, 2):
        leases.next(worker)
    leases.done(0, 0)
    leases.done(2, 0)
    leases.lost(1, committed=-1)
    state = leases.state()
    assert leases.done_up_to == 12
    leases.next(0)
    leases.done(0, 1)
    leases.next(0)
    leases.rewind(state)
    assert leases.finished == 2
    again = [leases.next(worker).batch for worker in (3, 4, 5, 6)]
    assert again == [11, 13, 14, 15]
    assert leases.next(7) is None


def test_a_run_at_the_url_is_refused_before_it_is_resumed(cluster: Cluster, tmp_path: Path) -> None:
    cluster.start()
    with ClusterCheckpointer(cluster, tmp_path, strategy="full") as layer:
        layer.save(step=3)
    with (
        ClusterCheckpointer(cluster, tmp_path, strategy="full") as layer,
        pytest.raises(InvalidRequestError, match="resume"),
    ):
        layer.save(step=4)
    assert hf.open(tmp_path).steps == (3,)
