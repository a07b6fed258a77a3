"""A small training loop: from a recipe to a model, its optimizers, its reader, and steps.

    Recipe -> make_training -> Training -> train (steps) -> evaluate (AUC on held-out samples)

The recipe is everything that must be the same for a resumed run to be the same run; it goes into
every checkpoint beside the reader's state.

Invariants:
- The same recipe gives the same model and the same samples in every process.
- Held-out samples are never trained on: the click stream's own, or every tenth batch of files.
- A step is whole: a stop is asked for between steps, never inside one.

Not here: checkpoints (the caller's ``after_step`` takes them), options and printing (cli/).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import nn

from holdfast import events
from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.loading.granted_loader import GrantedLoader
from holdfast.recsys.auc import auc
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.data.clicks import ClickStream
from holdfast.recsys.data.criteo import criteo_reader, day_files
from holdfast.recsys.data.parquet import parquet_reader
from holdfast.recsys.data.reader import FileReader
from holdfast.recsys.data.skew import Skew, expected_touched, skew_for_touched
from holdfast.recsys.data.vocabulary import HashedIds
from holdfast.recsys.models.layers import split_parameters
from holdfast.recsys.models.presets import CRITEO_KAGGLE_ROWS, ModelKind, make_model, scaled_rows

CLICKS, CRITEO, PARQUET = "clicks", "criteo", "parquet"
DATA_KINDS = (CLICKS, CRITEO, PARQUET)
OPTIMIZERS = ("sgd", "adagrad", "sparse-adam")

# measured: what the small DLRM learns the click stream well with, in a few hundred steps
_TABLE_RATES = {"sgd": 0.5, "adagrad": 0.05, "sparse-adam": 0.003}
_DENSE_RATE = 2e-3

_HELD_OUT_SAMPLES = 32_768
_HELD_OUT_BATCH = 2048
_HELD_OUT_EVERY = 10  # of files: the tenth batch of every ten
_TOUCHED = 0.26  # Check-N-Run section 4.1: of a model's rows, in one interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a run is made of; a run goes on only with the recipe it was started with."""

    model: ModelKind = "dlrm"
    preset: str = "small"
    rows: int = 500_000
    batch_size: int = 1024
    optimizer: str = "adagrad"
    seed: int = 0
    data: str = CLICKS
    touched: float | None = None
    """Share of the rows an interval touches; None: as in production, where that is reachable."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.batch_size < 1 or self.seed < 0:
            raise InvalidRequestError(
                "a recipe's number is out of range",
                rows=self.rows,
                batch_size=self.batch_size,
                seed=self.seed,
            )
        if self.optimizer not in OPTIMIZERS:
            raise InvalidRequestError(
                "unknown optimizer", optimizer=self.optimizer, known=list(OPTIMIZERS)
            )
        if self.data not in DATA_KINDS:
            raise InvalidRequestError("unknown data", data=self.data, known=list(DATA_KINDS))

    @property
    def table_rows(self) -> tuple[int, ...]:
        """The rows of each table, in the proportions of Criteo's."""
        return scaled_rows(CRITEO_KAGGLE_ROWS, total_rows=self.rows)


class Plan:
    """A recipe and the skew that was chosen for it, as a checkpoint keeps them.

    The skew is kept because it follows from the checkpoint interval of the first start; a run that
    is resumed with another interval must still see the same samples.
    """

    def __init__(self, recipe: Recipe, skew: Skew) -> None:
        self.recipe = recipe
        self.skew = skew

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"recipe": dataclasses.asdict(self.recipe), "skew": dataclasses.asdict(self.skew)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a checkpoint is of this recipe.

        Raises:
            InvalidRequestError: names what differs, as it was and as it is.
        """
        saved = parse_plan(state)
        check_same(saved.recipe, self.recipe)
        self.skew = saved.skew


def parse_plan(state: Mapping[str, Any]) -> Plan:
    """The plan that ``state_dict`` described.

    Raises:
        InvalidRequestError: it is not one.
    """
    try:
        return Plan(Recipe(**state["recipe"]), Skew(**state["skew"]))
    except (KeyError, TypeError) as error:
        raise InvalidRequestError("the checkpoint holds no training recipe") from error


def check_same(saved: Recipe, given: Recipe) -> None:
    """Refuse to go on with another recipe than the run was started with.

    Raises:
        InvalidRequestError: names what differs, as it was and as it is.
    """
    was, now = dataclasses.asdict(saved), dataclasses.asdict(given)
    differing = {name: was[name] for name in was if was[name] != now[name]}
    if differing:
        raise InvalidRequestError(
            "the run was started with other settings",
            started_with=differing,
            given={name: now[name] for name in differing},
            todo="give the settings it was started with, or another url for a new run",
        )


def choose_skew(recipe: Recipe, *, interval: int) -> Skew:
    """How unevenly rows are looked up, so that an interval of steps touches the wished share.

    Without a wish: Check-N-Run's 26 %, or half of what so short an interval can reach at all.
    """
    rows, draws = recipe.table_rows, recipe.batch_size * interval
    if recipe.touched is not None:
        # ten intervals touch about twice the rows of one, as in production
        after_ten = 2 * recipe.touched if recipe.touched <= 0.4 else None
        return _search_skew(rows, draws, recipe.touched, after_ten)
    touched = min(_TOUCHED, expected_touched(rows, Skew(0), draws=draws) / 2)
    try:
        return _search_skew(rows, draws, touched, 2 * touched)
    except InvalidRequestError:
        return Skew()


@functools.cache  # the search takes seconds
def _search_skew(
    rows: tuple[int, ...], draws: int, touched: float, after_ten: float | None
) -> Skew:
    return skew_for_touched(
        rows, batch_size=draws, batches=1, touched=touched, touched_after_ten=after_ten
    )


class Reader(Protocol):
    """Batches for ever, with a position that can be saved."""

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Training:
    """A model ready to be trained: what a checkpointer watches and what a loop runs."""

    plan: Plan
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    reader: Reader
    heldout: Callable[[], Iterable[Batch]]
    best_auc: Callable[[], float | None]
    """What a perfect model reaches on the held-out samples, where that can be known."""


def make_training(
    plan: Plan, *, files: Sequence[str | Path] = (), workers: int = 0, steps: int
) -> Training:
    """Build the model and open the data; ``workers`` prefetch the click stream.

    Raises:
        NotFoundError: a file is missing.
        InvalidRequestError: the recipe does not fit together.
    """
    recipe = plan.recipe
    torch.manual_seed(recipe.seed)
    table_rows = recipe.table_rows
    model = make_model(recipe.preset, table_rows, kind=recipe.model)
    tables, dense = split_parameters(model)
    optimizers = [
        _table_optimizer(recipe.optimizer, tables),
        torch.optim.Adam(dense, lr=_DENSE_RATE),
    ]
    if recipe.data != CLICKS:
        source = _files(recipe, files)
        return Training(
            plan,
            model,
            optimizers,
            _FileBatches(source()),
            lambda: _heldout_of(source(), recipe.batch_size),
            lambda: None,
        )
    stream = ClickStream(table_rows, batch_size=recipe.batch_size, seed=recipe.seed, skew=plan.skew)
    # batches of its own size: the samples, and so the AUC, do not depend on the training's
    heldout = ClickStream(
        table_rows, batch_size=_HELD_OUT_BATCH, seed=recipe.seed, skew=plan.skew
    ).heldout(_HELD_OUT_SAMPLES // _HELD_OUT_BATCH)
    loader = GrantedLoader(stream, batches=steps, num_workers=workers)
    return Training(
        plan,
        model,
        optimizers,
        loader,
        lambda: (heldout[index] for index in range(len(heldout))),
        lambda: _teacher_auc(heldout),
    )


def _table_optimizer(name: str, tables: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate = _TABLE_RATES[name]
    if name == "sgd":
        return torch.optim.SGD(tables, lr=rate)
    if name == "adagrad":
        return torch.optim.Adagrad(tables, lr=rate)
    return torch.optim.SparseAdam(tables, lr=rate)


def _files(recipe: Recipe, given: Sequence[str | Path]) -> Callable[[], FileReader]:
    paths: list[Path] = []
    for path in map(Path, given):
        if not path.is_dir():
            paths.append(path)
        elif recipe.data == CRITEO:
            paths += day_files(path)
        else:
            found = sorted(path.glob("*.parquet"))
            if not found:
                raise NotFoundError("no Parquet files", folder=str(path), todo="expect *.parquet")
            paths += found
    ids = HashedIds(recipe.table_rows)
    open_reader = criteo_reader if recipe.data == CRITEO else parquet_reader
    open_reader(paths, batch_size=recipe.batch_size, ids=ids)  # a bad path is refused now
    return lambda: open_reader(paths, batch_size=recipe.batch_size, ids=ids)


class _FileBatches:
    """The training batches of files, epoch after epoch, without the held-out ones."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._index = 0  # of the next batch in its epoch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            has_any = self._index > 0
            for batch in self._reader:
                index, self._index = self._index, self._index + 1
                if index % _HELD_OUT_EVERY != _HELD_OUT_EVERY - 1:
                    has_any = True
                    yield batch
            if not has_any:
                raise InvalidRequestError("the files hold no samples")
            self._index = 0

    def state_dict(self) -> dict[str, Any]:
        return {"reader": self._reader.state_dict(), "index": self._index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            index, inner = int(state["index"]), state["reader"]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError("not a reader's state", saved=dict(state)) from error
        self._reader.load_state_dict(inner)
        self._index = index


def _heldout_of(reader: FileReader, batch_size: int) -> Iterator[Batch]:
    chosen = itertools.islice(reader, _HELD_OUT_EVERY - 1, None, _HELD_OUT_EVERY)
    return itertools.islice(chosen, max(1, _HELD_OUT_SAMPLES // batch_size))


def _teacher_auc(heldout: ClickStream) -> float | None:
    batches = range(len(heldout))
    labels = np.concatenate([heldout[index].labels.numpy() for index in batches])
    return _auc_or_none(labels, np.concatenate([heldout.probability(i) for i in batches]))


def train(
    training: Training,
    *,
    start: int,
    steps: int,
    after_step: Callable[[], object],
    emit: Callable[[events.Event], None],
    report_every: int = 1,
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Take the steps after ``start`` up to ``steps``; the number of the last one taken.

    ``after_step`` is called after each; ``emit`` gets the mean loss of every ``report_every``
    steps. Ends early, between two steps, once ``should_stop``.
    """
    model, optimizers = training.model, training.optimizers
    model.train()
    began = time.perf_counter()
    samples, losses = 0, []
    step = start
    batches = iter(training.reader)
    while step < steps and not should_stop():
        try:
            batch = next(batches)
        except StopIteration:
            break
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        samples += len(batch)
        losses.append(loss.item())
        after_step()
        if step % report_every == 0 or step == steps:
            emit(
                events.TrainProgress(
                    step=step,
                    steps_total=steps,
                    samples=samples,
                    loss=float(np.mean(losses)),
                    seconds=time.perf_counter() - began,
                )
            )
            losses.clear()
    return step


def evaluate(model: nn.Module, batches: Iterable[Batch]) -> float | None:
    """The model's AUC on these samples; None where they do not hold both classes."""
    was_training = model.training
    model.eval()
    labels, scores = [], []
    with torch.no_grad():
        for batch in batches:
            labels.append(batch.labels.numpy())
            scores.append(cast(torch.Tensor, model(batch)).numpy())
    model.train(was_training)
    if not labels:
        return None
    return _auc_or_none(np.concatenate(labels), np.concatenate(scores))


def _auc_or_none(labels_N: np.ndarray, scores_N: np.ndarray) -> float | None:
    if labels_N.min() == labels_N.max():
        return None
    return auc(labels_N, scores_N)
