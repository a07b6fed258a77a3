"""A run that is stopped and resumed trains the same batches to the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from holdfast.errors import HoldfastWarning, InvalidRequestError
from holdfast.loading.resumable_reader import ResumableReader
from tests.unit.loading.readerjob import (
    BATCHES,
    EPOCHS,
    Plain,
    Run,
    Stopped,
    in_thread,
    make_loader,
    read_ahead,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*")

Between = Callable[[Iterable[Any]], Iterator[Any]]
KINDS = [
    "plain", "plain-own", "plain-workers", "persistent", "ordered", "lazy", "stream",
    "stream-workers", "stateful", "stateful-own", "stateful-workers", "stateful-persistent",
    "stateful-stream", "stateful-stream-workers", "granted", "iterable", "list",
]  # fmt: skip
# Before the first epoch ends, at its last batch, at the first of the next, in the last one.
STOPS = (1, 5, BATCHES, BATCHES + 1, 2 * BATCHES + 4)
TOTAL = EPOCHS * BATCHES


def run_once(
    folder: Path, kind: str, between: Between = iter, *, accumulate: int = 1, **given: Any
) -> tuple[list[Any], str]:
    """Uninterrupted, with as many checkpoints."""
    run = Run(folder / "once", seed=1, every=1)
    with run.ck:
        batches = between(run.ck.epochs(make_loader(kind), EPOCHS, **given))
        run.train(batches, stop=None, accumulate=accumulate)
    return run.seen, run.digest()


def run_stopped(
    folder: Path, kind: str, stops: Iterable[int], between: Between = iter, *,
    accumulate: int = 1, **given: Any,
) -> tuple[list[Any], str]:  # fmt: skip
    """Stopped after some steps, each time resumed with other seeds; and to the end."""
    seen: list[Any] = []
    for number, stop in enumerate([*stops, None]):
        run = Run(folder / "stopped", seed=10 + number if number else 1, every=1)
        with run.ck, contextlib.suppress(Stopped):
            assert run.ck.resume() == (0 if not number else [*stops][number - 1])
            batches = between(run.ck.epochs(make_loader(kind), EPOCHS, **given))
            with contextlib.closing(batches) if hasattr(batches, "close") else nothing():
                run.train(batches, stop=stop, accumulate=accumulate)
        seen += run.seen
    return seen, run.digest()


nothing = contextlib.nullcontext


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_go_on_at_the_batch_behind_the_last_trained(kind: str, tmp_path: Path) -> None:
    once = run_once(tmp_path, kind)
    assert [epoch for epoch, _ in once[0]] == [n // BATCHES for n in range(TOTAL)]
    assert run_stopped(tmp_path, kind, STOPS) == once


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "kind", ["plain", "plain-own", "plain-workers", "stateful-own", "stateful-workers", "iterable",
             "granted", "stream"],
)  # fmt: skip
def test_batches_that_a_generator_read_ahead_are_read_again(
    kind: str, depth: int, tmp_path: Path
) -> None:
    between = read_ahead(depth)
    once = run_once(tmp_path, kind, between)
    assert len(once[0]) == TOTAL
    assert run_stopped(tmp_path, kind, STOPS, between) == once


@pytest.mark.parametrize("kind", ["list", "quiet", "granted"])
def test_batches_that_a_thread_read_ahead_are_read_again(kind: str, tmp_path: Path) -> None:
    once = run_once(tmp_path, kind, in_thread)
    assert len(once[0]) == TOTAL
    found = run_stopped(tmp_path, kind, STOPS, in_thread)
    if kind == "granted":  # augments from the global generators, in the thread
        once, found = (
            ([row[::4] for _, row in seen], "")  # type: ignore[misc]
            for seen, _ in (once, found)
        )
    assert found == once


@pytest.mark.parametrize("stop", range(BATCHES - 3, BATCHES + 2))
def test_a_thread_that_reads_into_the_next_epoch_reads_it_in_the_same_order(
    stop: int, tmp_path: Path
) -> None:
    """The order is drawn from the global generators, and training draws nothing."""

    def train(run: Run, stop: int | None) -> list[Any]:
        run.model.top[0] = torch.nn.Identity()
        loader: Any = DataLoader(Plain(), batch_size=4, shuffle=True)
        batches = in_thread(run.ck.epochs(loader, EPOCHS))
        with contextlib.closing(batches), contextlib.suppress(Stopped):  # type: ignore[type-var]
            run.train(batches, stop=stop)
        return [row for _, row in run.seen]

    once = Run(tmp_path / "once", seed=1)
    with once.ck:
        whole = train(once, None)
    first = Run(tmp_path / "stopped", seed=1)
    with first.ck:
        begun = train(first, stop)
    rest = Run(tmp_path / "stopped", seed=2)
    with rest.ck:
        assert rest.ck.resume() == stop
        assert begun + train(rest, None) == whole


@pytest.mark.parametrize("kind", ["plain", "stateful", "list"])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_all_batches_of_an_accumulated_step_were_trained(
    kind: str, accumulate: int, tmp_path: Path
) -> None:
    once = run_once(tmp_path, kind, accumulate=accumulate)
    assert len(once[0]) == TOTAL
    assert run_stopped(tmp_path, kind, (2, 5, 7), accumulate=accumulate) == once


def test_accumulation_behind_a_generator_that_reads_ahead(tmp_path: Path) -> None:
    between = read_ahead(2)
    once = run_once(tmp_path, "plain", between, accumulate=2)
    assert run_stopped(tmp_path, "plain", (2, 5, 7), between, accumulate=2) == once
    given = {"batches_per_step": 2}
    (tmp_path / "given").mkdir()
    assert (
        run_stopped(tmp_path / "given", "plain", (1, 5, 7), between, accumulate=2, **given) == once
    )


def test_a_save_after_the_only_step_of_many_batches_warns(tmp_path: Path) -> None:
    run = Run(tmp_path, seed=1)
    with run.ck, pytest.warns(HoldfastWarning, match="batches_per_step="):
        batches = run.ck.epochs(make_loader("list"), 1)
        run.model(torch.cat([next(batches), next(batches)])).backward()  # read ahead, or both?
        run.step(None)
        run.ck.save()


def test_a_finished_run_has_no_batches_left(tmp_path: Path) -> None:
    run_once(tmp_path, "plain")
    run = Run(tmp_path / "once", seed=3)
    with run.ck:
        assert run.ck.resume() == TOTAL
        assert list(run.ck.epochs(make_loader("plain"), EPOCHS)) == []


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    run_once(tmp_path, "plain")
    run = Run(tmp_path / "once", seed=3)
    with run.ck:
        run.ck.resume()
        assert len(list(run.ck.epochs(make_loader("plain"), EPOCHS + 1))) == BATCHES


def test_a_restore_in_the_middle_of_the_loop_takes_the_loop_back(tmp_path: Path) -> None:
    run = Run(tmp_path, seed=1, every=1)
    with run.ck:
        has_restored = False
        for batch in run.ck.epochs(make_loader("plain"), EPOCHS):
            if run.ck.current_step == 13 and not has_restored:
                has_restored = True
                run.ck.restore(4, discard_later=True)
                continue
            run.train([batch], stop=None)
    first, second = run.seen[4:13], run.seen[13:]
    assert second[: len(first)] == first
    assert len(second) == TOTAL - 4


# A DataLoader that is iterated by others.


def run_followed(folder: Path, kind: str, stop: int | None, **given: Any) -> Run:
    """The loop of the README, for several epochs."""
    seed = 1 if not folder.exists() else 5
    torch.manual_seed(seed)
    loader = make_loader(kind)
    run = Run(folder, seed=seed, every=1, reader=loader)
    with run.ck, contextlib.suppress(Stopped):
        run.ck.resume()
        for _ in range(run.ck.epoch, EPOCHS):
            run.train(loader, stop=stop, **given)
    return run


@pytest.mark.parametrize(
    "kind", ["plain", "plain-own", "plain-workers", "stateful", "stateful-workers", "stream"]
)
def test_a_data_loader_given_as_reader_goes_on_where_others_iterate_it(
    kind: str, tmp_path: Path
) -> None:
    once = run_followed(tmp_path / "once", kind, None)
    assert len(once.seen) == TOTAL
    seen = []
    for stop in (*STOPS, None):
        run = run_followed(tmp_path / "stopped", kind, stop)
        seen += run.seen
    assert (seen, run.digest()) == (once.seen, once.digest())


def test_looking_at_a_batch_and_evaluating_moves_nothing(tmp_path: Path) -> None:
    """Neither before training nor in the middle of an epoch, before and behind a step."""

    def train(folder: Path, stop: int | None) -> list[Any]:
        loader = make_loader("quiet")
        run = Run(folder, seed=1, every=1, reader=loader)
        with run.ck, contextlib.suppress(Stopped):
            run.ck.resume()
            epoch = run.ck.epoch
            next(iter(loader))
            list(loader)
            assert run.ck.epoch == epoch
            for _ in range(run.ck.epoch, EPOCHS):
                for batch in loader:
                    if run.ck.current_step == 3:
                        list(loader)
                    run.train([batch], stop=stop)
                    if run.ck.current_step == 5:
                        list(loader)
        return run.seen

    once = train(tmp_path / "once", None)
    assert len(once) == TOTAL
    seen = train(tmp_path / "stopped", 7)
    assert seen == once[:7]
    assert seen + train(tmp_path / "stopped", None) == once


def test_a_loop_that_always_begins_at_its_first_epoch_skips_what_is_trained(
    tmp_path: Path,
) -> None:
    """As trainers with a fit() of their own have it."""

    def fit(folder: Path, stop: int | None) -> Run:
        loader = make_loader("plain")
        reader = ResumableReader(loader, skips_trained=True)
        reader.intercept()
        run = Run(folder, seed=1 if not folder.exists() else 5, every=1, reader=reader)
        with run.ck, contextlib.suppress(Stopped):
            run.ck.resume()
            for _ in range(EPOCHS):
                run.train(loader, stop=stop)
        return run

    once = fit(tmp_path / "once", None)
    seen = []
    for stop in (*STOPS, None):
        run = fit(tmp_path / "stopped", stop)
        seen += run.seen
    assert (seen, run.digest()) == (once.seen, once.digest())


def test_a_loader_is_itself_again_after_the_checkpointer_is_closed(tmp_path: Path) -> None:
    loader = make_loader("plain")
    run = Run(tmp_path, seed=1, reader=loader)
    assert type(loader) is not DataLoader and isinstance(loader, DataLoader)
    other = type(loader)(loader.dataset, batch_size=2)
    assert len(list(other)) == 2 * BATCHES  # one of the same class is not followed
    run.ck.close()
    assert type(loader) is DataLoader


# States of older checkpoints, and what is refused.


@pytest.mark.parametrize("kind", ["stateful", "granted"])
def test_the_state_that_a_loader_itself_gave_still_places_it(kind: str) -> None:
    torch.manual_seed(1)
    loader = make_loader(kind)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    rest = [batch[:, 0].tolist() for batch in batches]
    torch.manual_seed(1)
    reader = ResumableReader(make_loader(kind))
    reader.load_state_dict(state)
    torch.manual_seed(9)
    drawn = torch.get_rng_state()
    found = iter(reader)
    first = next(found)
    if kind == "granted":
        assert reader.batch == 4
    assert [first[:, 0].tolist(), *(batch[:, 0].tolist() for batch in found)] == rest
    assert len(rest) == BATCHES - 4
    torch.set_rng_state(drawn)


def test_a_run_without_a_readers_place_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path, seed=1)
    with run.ck:
        for _ in range(3):
            run.ck.step()
        run.ck.save()
    run = Run(tmp_path, seed=1)
    with run.ck, pytest.warns(HoldfastWarning, match="does not say where its loader stood"):
        run.ck.resume()
        run.ck.epochs(make_loader("list"), 1)


def test_a_place_that_no_loader_takes_is_told(tmp_path: Path) -> None:
    run_stopped(tmp_path, "list", (4,))
    run = Run(tmp_path / "stopped", seed=1)
    with run.ck, pytest.warns(HoldfastWarning, match="no loader was named"):
        run.ck.resume()
        run.ck.step()


def test_what_cannot_be_placed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"ck\.epochs"):
        Run(tmp_path / "a", seed=1, reader=[1, 2])
    run = Run(tmp_path / "b", seed=1)
    with run.ck:
        with pytest.raises(InvalidRequestError, match="used up once"):
            run.ck.epochs(iter([1]), 1)
        with pytest.raises(InvalidRequestError, match="at least one batch"):
            run.ck.epochs([1], 1, batches_per_step=0)


def test_a_loader_that_has_become_shorter_is_refused(tmp_path: Path) -> None:
    run_stopped(tmp_path, "list", (4,))
    run = Run(tmp_path / "stopped", seed=1)
    with run.ck, pytest.raises(InvalidRequestError, match="fewer batches"):
        run.ck.restore(4)
        next(run.ck.epochs([1, 2], EPOCHS))


def test_samplers_are_told_their_epoch(tmp_path: Path) -> None:
    dataset = make_loader("quiet").dataset
    sampler: Any = torch.utils.data.DistributedSampler(dataset, num_replicas=2, rank=1)
    loader: Any = DataLoader(dataset, batch_size=4, sampler=sampler)
    expected = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        expected += [batch.tolist() for batch in loader]
    run = Run(tmp_path, seed=1)
    with run.ck:
        assert [batch.tolist() for batch in run.ck.epochs(loader, 2)] == expected
