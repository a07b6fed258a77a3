"""The Checkpointer: what a training loop holds. Three lines make a run survive.

    ck = Checkpointer(url, model=model, optimizer=opt, every=1000)
    step = ck.resume()
    ...; ck.step()

It joins the parts: the tracker sees changes, the plan decides, the snapshot copies (the only
stall), a ``Save`` stores in the background, and its outcome is settled on the training thread.
Where many ranks train, each has one, and they act as one.

Invariants:
- A background failure is raised at the next ``step``, ``save`` or ``close``.
- Nothing is copied before it is decided, on all ranks alike, that this step is saved.
- However a call ends, what it had claimed or stopped is given back, and goes on.

Not here: what the model descends from (checkpoint/planning/lineage.py), what a save's end means
(succession.py), what ranks do as one (checkpoint/ranks/together.py), what changed
(checkpoint/changed.py), base or delta (checkpoint/planner.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np
import torch

from holdfast import events
from holdfast.checkpoint.changed import Changed
from holdfast.checkpoint.format.catalog import Catalog, RestoreTiming
from holdfast.checkpoint.grid.extractor import Extractor
from holdfast.checkpoint.planner import Planner
from holdfast.checkpoint.planning.lineage import Lineage
from holdfast.checkpoint.planning.save_plan import SavePlan
from holdfast.checkpoint.planning.schedule import Schedule
from holdfast.checkpoint.preempting.preemption import Preemption
from holdfast.checkpoint.ranks.agreement import ChangedBytes, rows_to_save
from holdfast.checkpoint.ranks.ranks import find_ranks
from holdfast.checkpoint.ranks.together import Together
from holdfast.checkpoint.restoring import restore as restores
from holdfast.checkpoint.restoring.load import load_checkpoint
from holdfast.checkpoint.restoring.lost_samples import LostSamples
from holdfast.checkpoint.restoring.partial import PartialRecovery
from holdfast.checkpoint.save_observer import LearnFromSaves
from holdfast.checkpoint.saving.pending import PendingSave
from holdfast.checkpoint.saving.save import begin_save
from holdfast.checkpoint.saving.snapshot import take_dense, take_rows
from holdfast.checkpoint.saving.staging import default_bytes_max
from holdfast.checkpoint.saving.workbench import Workbench
from holdfast.checkpoint.settings import CANCEL, SettingsKeywords, make_settings, open_log
from holdfast.checkpoint.store import catalogs
from holdfast.checkpoint.succession import Succession
from holdfast.checkpoint.tracking.notices import tell_tracking
from holdfast.checkpoint.warm import warm_kernels
from holdfast.deprecation import warn_renamed
from holdfast.errors import HoldfastError, InvalidRequestError
from holdfast.loading.generators import as_kept
from holdfast.loading.rate_schedulers import has_lost_scheduler, tell_lost_scheduler
from holdfast.loading.reader_slot import ReaderSlot
from holdfast.loading.stateful import READER, check_stateful
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
        extras: Mapping[str, Any] | None = None,
        shards: Mapping[str, Shard] | None = None,
        pieces: Mapping[str, Shard] | None = None,
        **settings: Unpack[SettingsKeywords],
    ) -> None:
        """Watch a model; nothing is written before the first save.

        ``extras`` are other things with ``state_dict`` and ``load_state_dict`` that go along (a
        scheduler, a scaler, metrics), and random generators. ``shards`` says by the names of
        parameters which of them are parts of larger tables. ``settings`` are the fields of
        ``Settings``. Where several ranks train (torch.distributed), all make theirs together.
        ``pieces`` is the deprecated name of ``shards``.
        """
        if pieces is not None:
            warn_renamed("Checkpointer(pieces=)", "shards=")
            shards = pieces
        self.settings = make_settings(settings)
        self._strategy = self.settings.make_strategy()
        self._placement = self.settings.placement
        ranks = find_ranks(self.settings.ranks, timeout_s=self.settings.ranks_timeout_s)
        if ranks is not None:
            self.settings.check_ranks(ranks.size)
        self._state = ModelState(model, optimizer, shards=shards, is_replicated=ranks is not None)
        self._extras = {name: as_kept(item) for name, item in (extras or {}).items()}
        for name, item in self._extras.items():
            check_stateful(name, item)
        self._log = open_log(self.settings)
        self._reader = ReaderSlot(reader, self._log, carried=self._extras)
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
            placement=self._placement,
        )
        self._observer = LearnFromSaves(
            self._together.run_writer, self._planner, self._changed, self._extractor
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
        self._has_told_scheduler = False
        self._lost = LostSamples(
            self.settings.make_meter(), saves_a_round=1 if hot is None else hot.saves_a_round
        )
        self._lineage = Lineage()
        self._saves = Succession(
            self._lineage, self._writer, changed=self._changed, lost=self._lost
        )
        self._partial = PartialRecovery(
            self._placement, self._state, self._writer, lineage=self._lineage, lost=self._lost
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
    def steps(self) -> tuple[int, ...]:
        """The steps that can be restored, ascending."""
        return self._writer.catalog.steps

    @property
    def current_step(self) -> int:
        """How many steps this run has taken."""
        return self._lineage.step

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
        step = self._load(None, discard_later=False)
        if step is None:
            return 0
        writer = self._together.run_writer
        self._all_together(
            lambda: None if writer is None else writer.update(lambda catalog: catalog),
            doing="take over the run",
        )
        self._extractor.wake()
        return step

    def restore(self, step: int, *, discard_later: bool = False) -> int:
        """Load the checkpoint of a step into the model, the optimizer and the reader.

        To train on from an older step, pass ``discard_later``: the next save then drops the
        checkpoints after ``step``.

        Raises:
            NotFoundError: lists the steps that exist.
            CorruptDataError: names what is damaged; the model is then unusable until another
                restore succeeds, and is not saved.
        """
        loaded = self._load(step, discard_later=discard_later)
        assert loaded is not None
        return loaded

    def _load(self, step: int | None, *, discard_later: bool) -> int | None:
        """Load a step, or the last one; None where there is none."""
        self._check_open()
        self._saves.finish()
        with self._extractor.stopped():
            catalog = self._together.same_catalog(self._saves.settle_commit)
            wanted = max(catalog.steps, default=None) if step is None else step
            if wanted is None:
                return None
            # Until all ranks are done nobody deletes what others read.
            self._all_together(
                lambda: self._restore(catalog, wanted, discard_later=discard_later),
                doing="restore the checkpoint",
            )
        return wanted

    def _all_together(self, act: Callable[[], object], *, doing: str) -> None:
        """Do something on every rank; raises on all where one fails."""
        error = self._together.attempt(act)
        with self._lineage.torn():  # until all are known to have succeeded
            self._together.check_all(error, doing)

    def _restore(self, catalog: Catalog, step: int, *, discard_later: bool) -> None:
        entry = catalog.checkpoint(step)
        schemas = catalog.schema_of(entry)
        self._state.follow_model()
        self._state.check_schemas(schemas, is_part=self._together.is_many, may_be_dense=True)
        self._lineage.is_torn = True
        self._saves.forget_last()
        started = time.perf_counter()
        loaded = load_checkpoint(
            self._storage,
            catalog,
            entry,
            self._state,
            self._carried(),
            wants_changed=self._changed.wants_restored,
            rank=self._together.rank,
            ranks=self._together.size,
            late_reader=self._reader,
        )
        self._reader.loaded(step)
        self._lost.load(loaded.pls)
        self._lineage.restored(step, discards_later=discard_later)
        self._changed.restored(loaded.changed)
        stats = loaded.stats
        timing = RestoreTiming(stats.base_bytes, stats.base_s, stats.delta_bytes, stats.delta_s)
        self._writer.note(lambda catalog: catalog.with_restore(timing))
        self._log.emit(
            events.Restored(
                step=step,
                rows=stats.rows,
                bytes=stats.bytes + loaded.dense_bytes,
                seconds=time.perf_counter() - started,
                restores=catalog.restores + 1,
            )
        )
        self._schedule.start(step)

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
                ...; ck.step()

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

    def step(self) -> PendingSave | None:
        """Count one training step; save when one is due, or when the process is to end. Call it
        after ``optimizer.step()``.

        Raises:
            HoldfastError: a background save failed since the last call.
            SystemExit: a signal asked the process to end, and this step is saved.
        """
        self._check_open()
        self._lineage.step += 1
        self._lost.trained()
        self._reader.trained()
        is_due = self._schedule.is_due(self._lineage.step)
        try:
            if self._preemption.is_due(self._lineage.step):
                return self._preemption.answer(self._save_after_running)
            # Of many ranks one that saves now tells its failure there, where the others hear of it.
            if not is_due or not self._together.is_many:
                self._saves.report()
            return self.save() if is_due else None
        finally:
            if is_due:
                self._schedule.saved(self._lineage.step)

    def save(self) -> PendingSave:
        """Take a checkpoint now; returns when the snapshot is in memory.

        A step that is saved already is not saved again: its save is returned.

        Raises:
            HoldfastError: an earlier save failed, or this one cannot start.
        """
        self._check_open()
        self._lineage.check_whole()
        started = time.perf_counter()
        again = self._saves.of_this_step()
        # Of many ranks none can know how far the others are: they agree first.
        if again is not None and not again.has_error and not self._together.is_many:
            return again.handle
        failure: Exception | None = None
        try:
            self._saves.finish(cancel=self.settings.on_busy == CANCEL and again is None)
        except HoldfastError as error:
            failure = self._together.hold_back(error)
        plan = self._plan_save(failure)
        if plan.is_saved:
            assert again is not None
            again.confirm()
            return again.handle
        self._log.emit(
            events.SaveStarted(step=plan.step, checkpoint=plan.kind, reason=plan.choice.reason)
        )
        return self._carry_out(plan, started)

    def _carry_out(self, plan: SavePlan, started: float) -> PendingSave:
        """Copy the rows of a plan, and leave the rest to a thread."""
        committer = self._together.make_committer(plan)
        try:
            stored = {schema.name: schema for schema in plan.schemas}
            schemas = [stored[table.name] for table in self._state.tables]
            selections = self._changed.select(plan.choice)
            with self._extractor.paused():
                save = self._saves.begin(
                    begin_save(
                        plan,
                        list(zip(schemas, selections, strict=True)),
                        writer=self._writer,
                        committer=committer,
                        bench=self._bench,
                        observer=self._observer,
                    )
                )
                dense = take_dense(
                    self._state,
                    self._carried(),
                    bench=self._bench,
                    pls=self._lost.state_when_saved(),
                    is_follower=not self._together.commits,
                )
                rows = save.copies.parts
                take_rows(self._state.tables, schemas, selections, bench=self._bench, out=rows)
                stall_s = time.perf_counter() - started
                save.complete(dense, stall_s=stall_s)
        except BaseException as error:
            # Also an interrupt: what was claimed is given back, and nothing is left waiting.
            if self._saves.running is None:
                committer.give_up(error)
            self._saves.abandon(error)
            raise
        self._log.emit(
            events.SaveStaged(
                step=plan.step, rows=save.copies.rows, bytes=save.copies.bytes, stall_s=stall_s
            )
        )
        return save.handle

    def _save_after_running(self) -> PendingSave:
        """Save when the process is to end: one that runs is waited for, and made up for if it
        failed (an event says so)."""
        with contextlib.suppress(HoldfastError):
            self._saves.finish()
        return self.save()

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
            self._preemption.leave()
            self._together.leave(is_orderly=is_orderly)
            self._bench.close()
            # Its workers should not live as long as a forgotten checkpointer.
            self._extras = {}
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

    # How it decides.

    def _plan_save(self, failure: Exception | None = None) -> SavePlan:
        """What is saved now; on many ranks the same everywhere.

        A rank with a ``failure`` takes no part, and then none does.
        """
        error = failure
        try:
            self._saves.settle_commit()
            self._state.follow_model()
            tell_tracking(self._changed.catch_up(), self._log)
            self._tell_lost_scheduler()
        except HoldfastError as caught:
            error = error or self._together.hold_back(caught)
        plan = self._together.agree(
            self._lineage.step,
            self._state,
            changed=ChangedBytes(
                self._changed.since_base_bytes() or 0, self._changed.pending_bytes()
            ),
            error=error,
            rules=self._planner.rules,
            plan=functools.partial(
                self._planner.plan, lineage=self._lineage, is_saved=self._saves.is_saved
            ),
        )
        self._lineage.at = plan.at  # another where the answer to rank 0's commit was lost
        return plan

    def _tell_lost_scheduler(self) -> None:
        """Once, and early: a run that was resumed cannot find its rates again."""
        optimizers = self._state.optimizers.values()
        if not self._has_told_scheduler and has_lost_scheduler(optimizers, self._extras):
            self._has_told_scheduler = True
            tell_lost_scheduler(self._log)

    def _carried(self) -> dict[str, Any]:
        """What goes along with the model: extras, and the reader once there is one."""
        return {**self._extras, **({READER: self._reader} if self._reader.is_used else {})}

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequestError("the checkpointer is closed", todo="make a new one")
