"""What is saved from one sharding comes back in any other, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.torchrec.cases import OPTIMIZERS, Shards, check_restored
from tests.torchrec.pool import Pool

SAVES = (2, 4, 5)  # a base, and two that hold what changed


RUNS = [(optimizer, way) for optimizer in OPTIMIZERS for way in ("incrcp", "check-n-run")]
RUNS += [("rowwise-adagrad@FP16", "incrcp"), ("adagrad@FP16", "check-n-run")]


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def saved(
    request: pytest.FixtureRequest, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, list[list[Shards]]]:
    """A run of two ranks (or three): where, its optimizer, what the ranks held at each save."""
    optimizer, strategy = request.param
    url = str(tmp_path_factory.mktemp("run"))
    held = pool.run(
        "save",
        ranks=2 if strategy == "incrcp" else 3,
        url=url,
        optimizer=optimizer,
        layout=0,
        strategy=strategy,
        saves=SAVES,
    )
    return url, optimizer, held


@pytest.mark.parametrize(("ranks", "layout"), [(1, 3), (2, 0), (2, 2), (3, 1), (4, 2)])
def test_any_sharding_restores_into_any_other(
    pool: Pool, saved: tuple[str, str, list[list[Shards]]], ranks: int, layout: int
) -> None:
    """Another layout moves tables to other sharding types; another number of ranks, their rows."""
    url, optimizer, held = saved
    which = (ranks + layout) % 3
    restored = pool.run(
        "restore", ranks=ranks, url=url, optimizer=optimizer, layout=layout, step=SAVES[which]
    )
    assert check_restored([shards[which] for shards in held], restored) > 7_000


@pytest.mark.parametrize("optimizer", ["rowwise-adagrad", "sgd"])
def test_tables_that_pretend_to_be_on_a_device_are_saved_as_they_are(
    pool: Pool, tmp_path: Path, optimizer: str
) -> None:
    """The flow of GPUs: the restore is one into host memory."""
    url = str(tmp_path / "run")
    held = pool.run("save", ranks=2, url=url, optimizer=optimizer, layout=0,
                    strategy="check-n-run", saves=SAVES, is_away=True)  # fmt: skip
    for which, step in enumerate(SAVES):
        restored = pool.run("restore", ranks=2, url=url, optimizer=optimizer, layout=1, step=step)
        assert check_restored([shards[which] for shards in held], restored) > 7_000


def test_a_model_that_is_not_sharded_restores_what_sharded_ones_saved(
    pool: Pool, saved: tuple[str, str, list[list[Shards]]]
) -> None:
    """The plain collections have the same names; torch's optimizers take over the row state."""
    url, optimizer, held = saved
    restored = pool.run("restore_plain", ranks=1, url=url, optimizer=optimizer, step=SAVES[-1])
    assert check_restored([shards[-1] for shards in held], restored) > 7_000


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "rowwise-adagrad@FP16"])
def test_a_resumed_run_ends_as_one_that_never_stopped(
    pool: Pool, optimizer: str, tmp_path: Path
) -> None:
    """Same ranks, same sharding: every number is the same to the bit."""
    answers = pool.run(
        "resume", ranks=2, url=str(tmp_path), optimizer=optimizer, layout=1, stop=3, until=6
    )
    for once, resumed in answers:
        assert check_restored([once for once, _ in answers], [resumed]) > 3_000
        assert {name: len(parts) for name, parts in once.items()} == {
            name: len(parts) for name, parts in resumed.items()
        }


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_of_optimizers_is_saved_by_the_ones_inside(
    pool: Pool, ranks: int, tmp_path: Path
) -> None:
    """Wrappers see what their optimizer was restored to; fused ones learn at the saved rate."""
    answers = pool.run("combined", ranks=ranks, url=str(tmp_path))
    check_restored([a["saved"] for a in answers], [a["restored"] for a in answers])
    check_restored([a["once"] for a in answers], [a["resumed"] for a in answers])
    for answer in answers:
        assert answer["is_joined"] == [True] * 4
        assert answer["rates"] and set(np.float32(answer["rates"])) == {np.float32(0.025)}


def test_a_fused_rate_that_falls_at_the_checkpoint_has_fallen_after_it(
    pool: Pool, tmp_path: Path
) -> None:
    """The scheduler's rate is restored, not the one that the kernel was last trained with."""
    answers = pool.run("scheduled", ranks=2, url=str(tmp_path))
    check_restored([a["once"] for a in answers], [a["resumed"] for a in answers])
    for answer in answers:
        assert np.allclose(answer["rates"], 0.01)
