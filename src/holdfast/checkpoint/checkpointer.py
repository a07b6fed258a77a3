"""The Checkpointer: what a training loop holds. Three lines make a run survive.

    ck = Checkpointer(url, model=model, optimizer=opt, every=1000)
    step = ck.resume()
    ...; ck.step()

It makes the parts and joins them: saver.py takes checkpoints, restorer.py loads them, succession.py
settles on the training thread what a save in the background came to. Where many ranks train, each
has one, and they act as one (checkpoint/ranks/together.py).

Invariant: a background failure is raised at the next ``step``, ``save`` or ``close``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
import torch

from holdfast import events
from holdfast.checkpoint.changed import Changed
from holdfast.checkpoint.grid.extractor import Extractor
from holdfast.checkpoint.planner import Planner
from holdfast.checkpoint.planning.best import Mode, rank_by_metric
from holdfast.checkpoint.planning.lineage import Lineage
from holdfast.checkpoint.planning.schedule import Schedule
from holdfast.checkpoint.planning.transfer import as_transfer
from holdfast.checkpoint.preempting.preemption import Preemption
from holdfast.checkpoint.ranks.agreement import rows_to_save
from holdfast.checkpoint.ranks.ranks import find_ranks
from holdfast.checkpoint.ranks.together import Together
from holdfast.checkpoint.restorer import Restorer
from holdfast.checkpoint.restoring import restore as restores
from holdfast.checkpoint.restoring.lost_samples import LostSamples
from holdfast.checkpoint.restoring.partial import PartialRecovery
from holdfast.checkpoint.saver import Saver
from holdfast.checkpoint.saving.pending import PendingSave
from holdfast.checkpoint.saving.staging import default_bytes_max
from holdfast.checkpoint.saving.workbench import Workbench
from holdfast.checkpoint.settings import CANCEL, SettingsKeywords, make_settings, open_log
from holdfast.checkpoint.store import catalogs
from holdfast.checkpoint.store.delete import delete_checkpoints
from holdfast.checkpoint.succession import Succession
from holdfast.checkpoint.tracking.optimizers.waiting import WaitingGradients
from holdfast.checkpoint.warm import warm_kernels
from holdfast.deprecation import warn_renamed
from holdfast.errors import HoldfastError, InvalidRequestError
from holdfast.loading.extras import TrainingState
from holdfast.loading.generators import Generator, as_kept
from holdfast.loading.reader_slot import ReaderSlot
from holdfast.loading.stateful import Stateful, check_stateful
from holdfast.model.model_state import ModelState
from holdfast.model.shard import Shard
from holdfast.storage import as_storage
from holdfast.storage.base import Storage


class Checkpointer:
    """Saves and restores one training process's model."""

    def __init__(
        self,
        url: str | os.PathLike[str] | Storage,
        *,
        model: torch.nn.Module,
        optimizer: Any = None,
        reader: Any = None,
        extras: Mapping[str, Stateful | Generator] | None = None,
        shards: Mapping[str, Shard] | None = None,
        pieces: Mapping[str, Shard] | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> None:
        """Watch a model; nothing is written before the first save.

        ``extras`` go along with the model: a scheduler, a scaler, anything ``Stateful``, and random
        generators. ``shards`` says by the names of parameters which of them are parts of larger
        tables. ``settings`` are the fields of ``Settings``. Where several ranks train
        (torch.distributed), all make theirs together.
        ``pieces`` is the deprecated name of ``shards``.
        """
        if pieces is not None:
            warn_renamed("Checkpointer(pieces=)", "shards=")
            shards = pieces
        self.settings = make_settings(settings)
        self._strategy = self.settings.make_strategy()
        placement = self.settings.placement
        ranks = find_ranks(self.settings.ranks, timeout_s=self.settings.ranks_timeout_s)
        if ranks is not None:
            self.settings.check_ranks(ranks.size)
        self._state = ModelState(model, optimizer, shards=shards, is_replicated=ranks is not None)
        self._extras = {name: as_kept(item) for name, item in (extras or {}).items()}
        for name, item in self._extras.items():
            check_stateful(name, item)
        self._log = open_log(self.settings)
        training = TrainingState(
            self._extras, optimizers=self._state.optimizers.values(), model=self._state.model
        )
        self._reader = ReaderSlot(reader, self._log, carried=self._extras, training=training)
        self._planner = Planner(self._strategy, self.settings, self._log)
        codecs = self._planner.plan_codec(restores=0)  # a bad one is refused here, not at a save
        self._storage = as_storage(url, self.settings.storage_options)
        found = catalogs.load_last(self._storage)
        self._together = Together(
            ranks,
            self._storage,
            found,
            rules=repr((self._strategy, self.settings.tracking)),
            log=self._log,
            clock=self.settings.clock,
        )
        self._writer = self._together.writer
        self._extractor = Extractor(
            self._together.run_writer, self._strategy.extract if self._together.commits else None
        )
        self._changed = Changed(
            self._state,
            self._strategy,
            tracking=self.settings.tracking,
            saved_rows={
                table.name: rows_to_save(
                    table.shard, rank=self._together.rank, ranks=self._together.size
                )
                for table in self._state.tables
            },
            placement=placement,
        )
        hot = self._strategy.priority
        self._schedule = Schedule(
            self.settings.interval_of(hot),
            clock=self.settings.clock,
            grant=getattr(reader, "grant", None),
            share=self._together.share if self._together.is_many else None,
        )
        full_bytes = self._state.full_bytes()
        self._bench = Workbench(
            bytes_max=self.settings.staging_bytes_max
            or default_bytes_max(full_bytes, len(self._state.tables)),
            threads=self.settings.threads or restores.default_threads(),
        )
        self._is_closed = False
        self._restore_stats: restores.RestoreStats | None = None
        self._waiting = WaitingGradients(self._state.optimizers.values(), self._log)
        self._lost = LostSamples(
            self.settings.make_meter(), saves_a_round=1 if hot is None else hot.saves_a_round
        )
        self._lineage = Lineage()
        self._saves = Succession(
            self._lineage, self._writer, changed=self._changed, lost=self._lost
        )
        self._saver = Saver(
            state=self._state,
            extras=self._extras,
            reader=self._reader,
            planner=self._planner,
            changed=self._changed,
            lineage=self._lineage,
            lost=self._lost,
            saves=self._saves,
            together=self._together,
            extractor=self._extractor,
            bench=self._bench,
            waiting=self._waiting,
            log=self._log,
            may_cancel=self.settings.on_busy == CANCEL,
        )
        self._restorer = Restorer(
            storage=self._storage,
            state=self._state,
            extras=self._extras,
            reader=self._reader,
            changed=self._changed,
            lineage=self._lineage,
            lost=self._lost,
            saves=self._saves,
            together=self._together,
            extractor=self._extractor,
            schedule=self._schedule,
            log=self._log,
        )
        self._partial = PartialRecovery(
            placement, self._state, self._writer, lineage=self._lineage, lost=self._lost
        )
        seconds = warm_kernels(
            codecs,
            has_grid=self._planner.rules.has_grid,
            has_priority=hot is not None,
            has_restore=found is not None,
            dtypes={column.dtype for schema in self._state.schemas() for column in schema.columns},
        )
        self._log.emit(events.KernelsCompiled(seconds=seconds))
        last = None if found is None else found.last
        self._log.emit(
            events.RunOpened(
                url=self._storage.url,
                strategy=self._strategy.name,
                tables=len(self._state.tables),
                rows=sum(table.rows for table in self._state.tables),
                row_bytes=full_bytes,
                last_step=last.step if last else None,
            )
        )
        self._schedule.start(self._lineage.step)
        self._preemption = Preemption(
            self.settings.preempt_signals,
            deadline_s=self.settings.preempt_deadline_s,
            lineage=self._lineage,
            durable=self._saves.durable_step,
            log=self._log,
            ranks=ranks,
        )

    # What a training loop calls.

    @property
    def current_step(self) -> int:
        """How many steps training has taken in this run."""
        return self._lineage.step

    def all_steps(self) -> tuple[int, ...]:
        """The steps that are saved and can be restored, ascending."""
        return self._writer.catalog.steps

    def latest_step(self) -> int | None:
        """The last step that is saved; None for a new run."""
        return max(self.all_steps(), default=None)

    def best_step(self, metric: str, *, mode: Mode = "max") -> int | None:
        """The saved step with the best metric, by ``save(metrics=)``; None where no step has it."""
        ranked = rank_by_metric(self._writer.catalog.checkpoints, metric, mode)
        return ranked[0].step if ranked else None

    @property
    def world_size(self) -> int:
        """How many ranks save this run together; 1 without torch.distributed."""
        return self._together.size

    def resume(self) -> int:
        """Load the last committed checkpoint and take over the run; 0 for a new run.

        Raises:
            ConflictError: another writer is committing to this run.
            CorruptDataError: the checkpoint is damaged; ``restore`` an older step instead.
            InvalidRequestError: it is of another model.
        """
        self._check_open()
        restored = self._restorer.load(None)
        if restored is None:
            return 0
        self._restore_stats = restored.stats
        self._restorer.take_over()
        return restored.step

    def restore(
        self,
        step: int,
        *,
        discard_later: bool = False,
        strict: bool = True,
        only: Sequence[str] | None = None,
        skip: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
    ) -> int:
        """Load the checkpoint of a step into the model, the optimizer and the reader.

        To train on from an older step, pass ``discard_later``: the next save then drops the
        checkpoints after ``step``.

        Into a model that changed: with ``strict=False`` names that the model or the checkpoint
        lacks are left as they are, and reported by ``restore_stats``. ``rename`` leads from stored
        names to the model's. ``skip`` and ``only`` are patterns of names (``"users.*"``); with
        ``only`` the reader, extras, rates and random state stay as they are. Optimizer state goes
        with its parameter. The next save is a base.

        Raises:
            NotFoundError: lists the steps that exist.
            InvalidRequestError: a table or another tensor has another shape in the checkpoint.
            CorruptDataError: names what is damaged; the model is then unusable until another
                restore succeeds, and is not saved.
        """
        self._check_open()
        transfer = as_transfer(strict=strict, only=only, skip=skip, rename=rename)
        restored = self._restorer.load(step, discard_later=discard_later, transfer=transfer)
        assert restored is not None
        self._restore_stats = restored.stats
        return restored.step

    @property
    def restore_stats(self) -> restores.RestoreStats | None:
        """What the last restore or resume took, and names without a counterpart."""
        return self._restore_stats

    def recover(self, servers: Iterable[int]) -> restores.RestoreStats:
        """Bring back the rows of servers that failed, each as it was saved last; all else goes on.

        What training did to those rows since is lost, and only that (``pls``).

        Raises:
            InvalidRequestError: no such server, or their rows are not stored apart.
            CorruptDataError: names what is damaged; the model is then unusable until another
                restore succeeds, and is not saved.
        """
        self._check_open()
        failed = self._partial.check(servers)
        self._saves.finish()
        with self._extractor.stopped():
            self._saves.settle_commit()
            return self._partial.run(failed)

    @property
    def pls(self) -> float | None:
        """The portion of lost samples so far (CPR); None without ``total_steps`` and servers."""
        return self._lost.pls

    def epochs(
        self, loader: Iterable[Any], count: int, *, batches_per_step: int | None = None
    ) -> Iterator[Any]:
        """The batches of ``count`` epochs of any loader, without those that are trained already.

            for batch in ck.epochs(loader, 5):
                ...
                ck.step()

        After ``resume`` it goes on behind the batch that was trained last, also where something
        reads ahead. A loader without ``state_dict`` reads the epoch's trained batches again to get
        there. Calls ``set_epoch`` of samplers and data sets that have it. ``batches_per_step``:
        how many batches a step trains, where it is not to be found out (docs/readers.md).

        Raises:
            InvalidRequestError: another loader than before, or an iterator instead of one.
        """
        self._check_open()
        return self._reader.epochs(loader, count, batches_per_step=batches_per_step)

    @property
    def epoch(self) -> int:
        """The epoch that is trained, from 0, of ``reader`` or ``epochs``."""
        return self._reader.epoch

    def step(
        self,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> PendingSave | None:
        """Count one training step; save when one is due, or when the process is to end. Call it
        after ``optimizer.step()``.

        ``metrics`` and ``metadata`` are of this step: stored with it (``save``) if it is saved.

        Raises:
            HoldfastError: a background save failed since the last call.
            SystemExit: a signal asked the process to end, and this step is saved.
        """
        self._check_open()
        self._lineage.step += 1
        self._saver.annotate_step(metrics, metadata)
        self._lost.trained()
        self._reader.trained()
        self._waiting.counted()
        is_due = self._schedule.is_due(self._lineage.step)
        try:
            if self._preemption.is_due(self._lineage.step):
                return self._preemption.answer(self._saver.save_after_running)
            # Of many ranks one that saves now tells its failure there, where the others hear of it.
            if not is_due or not self._together.is_many:
                self._saves.report()
            return self.save() if is_due else None
        finally:
            if is_due:
                self._schedule.saved(self._lineage.step)

    def save(
        self,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> PendingSave:
        """Take a checkpoint now; returns when the snapshot is in memory.

        ``metrics`` (names and numbers) and ``metadata`` (a small dict of JSON values) are stored in
        the catalog: ``best_step``, ``hf.Keep(best=)``, ``Run.info`` and ``inspect`` read them. Of
        many ranks those of rank 0 are stored.

        A step that is saved already is not saved again: its save is returned, once metrics and
        metadata, if there are any, are added to its checkpoint.

        Raises:
            HoldfastError: an earlier save failed, or this one cannot start.
        """
        self._check_open()
        return self._saver.save(metrics=metrics, metadata=metadata)

    def delete(self, *steps: int) -> None:
        """Delete checkpoints; rows that other checkpoints read stay, so all of these restore as
        before. Waits for the running save. Of many ranks rank 0 deletes, and it must be asked.

        Raises:
            NotFoundError: no such step; lists those that exist.
            InvalidRequestError: the model was saved as this step last, or none would be left.
        """
        self._check_open()
        self._saves.finish()
        with self._extractor.stopped():
            if self._together.run_writer is not None:
                self._saves.settle_commit()
                delete_checkpoints(self._together.run_writer, steps, descends_from=self._lineage.at)

    def preempt(self, deadline_s: float | None = None) -> None:
        """The process will end soon: have the running step saved at once, on all ranks.

        The next ``step()`` saves, waits until that is durable (``deadline_s`` at most; default
        ``preempt_deadline_s``) and emits ``Preempted``. Then training goes on, unless the loop asks
        ``is_preempted``. Of many ranks one call is enough. May be called from any thread, and in a
        signal handler.
        """
        self._check_open()
        self._preemption.ask(deadline_s)

    @property
    def is_preempted(self) -> bool:
        """Whether a notice that the process will end was answered; on all ranks at one step."""
        return self._preemption.is_preempted

    def mark(self, table: str, ids: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Declare rows changed that were changed by hand, not by training; ids are global.

        Raises:
            InvalidRequestError: no such table, or ids outside it.
        """
        self._changed.mark(table, ids)

    def wait(self) -> None:
        """Wait until no save is running and the grid is worked off.

        Raises:
            HoldfastError: the save failed.
        """
        self._saves.finish()
        self._extractor.wait()

    def close(self) -> None:
        """Wait for the running save and the grid, let go of the model.

        Raises:
            HoldfastError: the running save failed.
        """
        self._close(is_orderly=True)

    def _close(self, *, is_orderly: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._saves.finish()
        finally:
            self._extractor.wait()
            self._saves.close()
            self._changed.close()
            self._waiting.close()
            self._preemption.leave()
            self._together.leave(is_orderly=is_orderly)
            self._bench.close()
            # Its workers should not live as long as a forgotten checkpointer.
            self._extras.clear()
            self._reader.close()
            self._schedule.close()
            self._preemption.close()  # last: it may end the process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            try:
                if error is None:
                    self._save_last()
            finally:
                self._close(is_orderly=error is None)
        except HoldfastError as failure:
            if error is None:  # the body's own error comes first
                raise
            error.add_note(f"holdfast: the last save failed too: {failure}")

    def _save_last(self) -> None:
        """Save the step that training ended with, unless it was only restored."""
        is_wanted = self.settings.save_last and not self._is_closed and not self._lineage.is_torn
        if is_wanted and self._lineage.step > 0 and not self._saves.is_as_restored:
            self.save()

    # Names of 0.4.

    @property
    def steps(self) -> tuple[int, ...]:
        """Deprecated: ``all_steps()``."""
        warn_renamed("Checkpointer.steps", "all_steps()")
        return self.all_steps()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequestError("the checkpointer is closed", todo="make a new one")
