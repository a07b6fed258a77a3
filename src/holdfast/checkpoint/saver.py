"""Save a live model: agree on a plan, copy its rows, leave the rest to a thread.

    what changed -> SavePlan (of many ranks rank 0's) -> snapshot (the stall) -> PendingSave

Also what is learned from a save, in its own threads: hashes of the rows that were copied; after a
commit sizes for the next plan, a check of some rows, a round of extraction.

Invariants:
- Nothing is copied before it is decided, on all ranks alike, that this step is saved.
- An error on one of many ranks is held back until the others can hear of it.
- However a call ends, what it had claimed or stopped is given back, and goes on.
"""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast import events
from holdfast.checkpoint.changed import Changed
from holdfast.checkpoint.format.annotations import Annotations, as_annotations
from holdfast.checkpoint.grid.extractor import Extractor
from holdfast.checkpoint.planner import Planner
from holdfast.checkpoint.planning.lineage import Lineage
from holdfast.checkpoint.planning.save_plan import SavePlan
from holdfast.checkpoint.ranks.agreement import ChangedBytes
from holdfast.checkpoint.ranks.together import Together
from holdfast.checkpoint.restoring.lost_samples import LostSamples
from holdfast.checkpoint.saving.pending import PendingSave
from holdfast.checkpoint.saving.save import begin_save
from holdfast.checkpoint.saving.snapshot import StagedPart, take_dense, take_rows
from holdfast.checkpoint.saving.workbench import Workbench
from holdfast.checkpoint.store.writer import RunWriter
from holdfast.checkpoint.succession import Succession
from holdfast.checkpoint.tracking.notices import tell_tracking
from holdfast.checkpoint.tracking.optimizers.waiting import WaitingGradients
from holdfast.errors import HoldfastError, HoldfastWarning
from holdfast.loading.extras import has_lost_scheduler, tell_lost_scheduler
from holdfast.loading.reader_slot import ReaderSlot
from holdfast.loading.stateful import carried
from holdfast.model.model_state import ModelState


@dataclass(frozen=True, slots=True)
class LearnFromSaves:
    """The parts of a Checkpointer that learn; ``writer`` is None on ranks that do not commit."""

    writer: RunWriter | None
    planner: Planner
    changed: Changed
    extractor: Extractor

    def see_part(self, staged: StagedPart) -> None:
        """Remember what the rows look like that were copied."""
        self.changed.learn(staged)

    def see_commit(self) -> None:
        """Prepare the next plan, look for changes that nobody saw, and extract."""
        if self.writer is not None:
            self.planner.committed(self.writer.catalog)
        self.changed.scan()
        self.extractor.wake()


@dataclass(slots=True, kw_only=True)
class Saver:
    """Takes the checkpoints of one training process."""

    state: ModelState
    extras: Mapping[str, Any]
    reader: ReaderSlot
    planner: Planner
    changed: Changed
    lineage: Lineage
    lost: LostSamples
    saves: Succession
    together: Together
    extractor: Extractor
    bench: Workbench
    waiting: WaitingGradients
    log: events.EventLog
    may_cancel: bool
    """A save that still runs is cancelled for the next one."""
    _of_step: tuple[int, Mapping[str, Any] | None, Mapping[str, Any] | None] = (-1, None, None)
    _has_told_scheduler: bool = False
    _plans: int = 0

    def annotate_step(
        self, metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None
    ) -> None:
        """A step begins to count: this is said of it, should it be saved."""
        self._of_step = (self.lineage.step, metrics, metadata)

    def save(
        self,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> PendingSave:
        """Take a checkpoint now; returns when the snapshot is in memory.

        Of a step that is saved already the annotations alone are committed.

        Raises:
            HoldfastError: an earlier save failed, or this one cannot start.
        """
        self.lineage.check_whole()
        started = time.perf_counter()
        failure: Exception | None = None
        annotations = Annotations()
        try:
            annotations = self._take_annotations(metrics, metadata)
        except HoldfastError as error:
            failure = self.together.hold_back(error)
        again = self.saves.of_this_step()
        is_again = again is not None and not again.has_error and not annotations
        # Of many ranks none can know how far the others are: they agree first.
        if again is not None and is_again and not self.together.is_many:
            return again.handle
        try:
            self.saves.finish(cancel=self.may_cancel and again is None)
        except HoldfastError as error:
            failure = failure or self.together.hold_back(error)
        plan = self._plan(annotations, failure)
        if plan.is_saved:
            assert again is not None
            again.confirm()
            if plan.annotations:
                self._annotate(plan)
            return again.handle
        self.log.emit(
            events.SaveStarted(step=plan.step, checkpoint=plan.kind, reason=plan.choice.reason)
        )
        return self._carry_out(plan, started)

    def save_after_running(self) -> PendingSave:
        """Save when the process is to end: one that runs is waited for, and made up for if it
        failed (an event says so)."""
        with contextlib.suppress(HoldfastError):
            self.saves.finish()
        return self.save()

    def _take_annotations(
        self, metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None
    ) -> Annotations:
        """What is said of this checkpoint, by ``step`` and by ``save``."""
        (step, *of_step), self._of_step = self._of_step, (-1, None, None)
        # Training may have gone back since to a step that this is not of.
        earlier, left_out = as_annotations(
            *(of_step if step == self.lineage.step else (None, None))
        )
        now, more_left_out = as_annotations(metrics, metadata)
        left_out += more_left_out
        if left_out:
            # A filter may turn warnings into errors; training goes on all the same.
            with contextlib.suppress(HoldfastWarning):
                warnings.warn(
                    f"metrics that are no finite numbers are not stored: {', '.join(left_out)}",
                    HoldfastWarning,
                    stacklevel=2,
                )
        return earlier.updated(now) if earlier else now

    def _annotate(self, plan: SavePlan) -> None:
        """Commit what is said of a checkpoint that exists; all ranks hear whether it worked."""
        writer = self.together.run_writer

        def commit() -> None:
            if writer is not None:
                writer.update(lambda catalog: catalog.annotated(plan.step, plan.annotations))

        self.together.check_all(self.together.attempt(commit), "store metrics and metadata")

    def _plan(self, annotations: Annotations, failure: Exception | None = None) -> SavePlan:
        """What is saved now; on many ranks the same everywhere.

        A rank with a ``failure`` takes no part, and then none does.
        """
        error = failure
        try:
            self.saves.settle_commit()
            self.state.follow_model()
            tell_tracking(self.changed.catch_up(), self.log)
            self.waiting.tell()
            self._tell_lost_scheduler()
        except HoldfastError as caught:
            error = error or self.together.hold_back(caught)
        plan = self.together.agree(
            self.lineage.step,
            self.state,
            changed=ChangedBytes(
                self.changed.since_base_bytes() or 0, self.changed.pending_bytes()
            ),
            error=error,
            rules=self.planner.rules,
            has_annotations=bool(annotations),
            plan=functools.partial(
                self.planner.plan,
                lineage=self.lineage,
                is_saved=self.saves.is_saved,
                annotations=annotations,
            ),
        )
        self.lineage.at = plan.at  # another where the answer to rank 0's commit was lost
        return plan

    def _tell_lost_scheduler(self) -> None:
        """Once, and early: a run that was resumed cannot find its rates again."""
        self._plans += 1
        if self._has_told_scheduler:
            return
        is_thorough = self._plans & (self._plans - 1) == 0  # ever more rarely: it takes time
        optimizers = self.state.optimizers.values()
        if has_lost_scheduler(optimizers, self.extras, is_thorough=is_thorough):
            self._has_told_scheduler = True
            tell_lost_scheduler(self.log)

    def _carry_out(self, plan: SavePlan, started: float) -> PendingSave:
        """Copy the rows of a plan, and leave the rest to a thread."""
        committer = self.together.make_committer(plan)
        writer = self.together.run_writer
        observer = LearnFromSaves(writer, self.planner, self.changed, self.extractor)
        try:
            stored = {schema.name: schema for schema in plan.schemas}
            schemas = [stored[table.name] for table in self.state.tables]
            selections = self.changed.select(plan.choice)
            with self.extractor.paused():
                save = self.saves.begin(
                    begin_save(
                        plan,
                        list(zip(schemas, selections, strict=True)),
                        writer=self.together.writer,
                        committer=committer,
                        bench=self.bench,
                        observer=observer,
                    )
                )
                dense = take_dense(
                    self.state,
                    carried(self.extras, self.reader),
                    bench=self.bench,
                    pls=self.lost.state_when_saved(),
                    is_follower=not self.together.commits,
                )
                rows = save.copies.parts
                take_rows(self.state.tables, schemas, selections, bench=self.bench, out=rows)
                stall_s = time.perf_counter() - started
                save.complete(dense, stall_s=stall_s)
        except BaseException as error:
            # Also an interrupt: what was claimed is given back, and nothing is left waiting.
            if self.saves.running is None:
                committer.give_up(error)
            self.saves.abandon(error)
            raise
        self.log.emit(
            events.SaveStaged(
                step=plan.step, rows=save.copies.rows, bytes=save.copies.bytes, stall_s=stall_s
            )
        )
        return save.handle
