"""Load a step into a live model, on all ranks, and move what depends on it there.

    settle what runs -> the same catalog on all ranks -> load_checkpoint -> lineage, what changed

Invariants:
- A model that was overwritten in part is not saved until a restore has succeeded, on all ranks.
- Until all ranks are done nothing is deleted that others read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast import events
from holdfast.checkpoint.changed import Changed
from holdfast.checkpoint.format.catalog import Catalog, RestoreTiming
from holdfast.checkpoint.grid.extractor import Extractor
from holdfast.checkpoint.planning.lineage import Lineage
from holdfast.checkpoint.planning.schedule import Schedule
from holdfast.checkpoint.planning.transfer import Transfer
from holdfast.checkpoint.ranks.together import Together
from holdfast.checkpoint.restoring.load import load_checkpoint
from holdfast.checkpoint.restoring.lost_samples import LostSamples
from holdfast.checkpoint.restoring.restore import RestoreStats
from holdfast.checkpoint.succession import Succession
from holdfast.loading.reader_slot import ReaderSlot
from holdfast.loading.stateful import carried
from holdfast.model.model_state import ModelState
from holdfast.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Restored:
    """The step that was loaded, and what that took."""

    step: int
    stats: RestoreStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Restorer:
    """Restores the checkpoints of a run into one training process."""

    storage: Storage
    state: ModelState
    extras: Mapping[str, Any]
    reader: ReaderSlot
    changed: Changed
    lineage: Lineage
    lost: LostSamples
    saves: Succession
    together: Together
    extractor: Extractor
    schedule: Schedule
    log: events.EventLog

    def load(
        self, step: int | None, *, discard_later: bool = False, transfer: Transfer | None = None
    ) -> Restored | None:
        """Load a step, or the last one; None where there is none. ``transfer``: into a model that
        is not the one it was taken of.

        Raises:
            NotFoundError: lists the steps that exist.
            CorruptDataError: names what is damaged; the model is then unusable until another
                restore succeeds, and is not saved.
        """
        transfer = transfer or Transfer()
        self.saves.finish()
        self.together.check_same(repr((step, discard_later, transfer)), "restore the same")
        done: list[RestoreStats] = []
        with self.extractor.stopped():
            catalog = self.together.same_catalog(self.saves.settle_commit)
            wanted = max(catalog.steps, default=None) if step is None else step
            if wanted is None:
                return None
            # Until all ranks are done nobody deletes what others read.
            self._all_together(
                lambda: done.append(
                    self._restore(catalog, wanted, discard_later=discard_later, transfer=transfer)
                ),
                doing="restore the checkpoint",
            )
        return Restored(wanted, done[0])

    def take_over(self) -> None:
        """Become the run's writer: another one's next commit is refused.

        Raises:
            ConflictError: another writer is committing to this run.
        """
        writer = self.together.run_writer
        self._all_together(
            lambda: None if writer is None else writer.update(lambda catalog: catalog),
            doing="take over the run",
        )
        self.extractor.wake()

    def _all_together(self, act: Callable[[], object], *, doing: str) -> None:
        """Do something on every rank; raises on all where one fails."""
        error = self.together.attempt(act)
        with self.lineage.torn():  # until all are known to have succeeded
            self.together.check_all(error, doing)

    def _restore(
        self, catalog: Catalog, step: int, *, discard_later: bool, transfer: Transfer
    ) -> RestoreStats:
        entry = catalog.checkpoint(step)
        schemas = catalog.schema_of(entry)
        self.state.follow_model()
        if transfer.is_whole:
            self.state.check_schemas(schemas, is_part=self.together.is_many, may_be_dense=True)
        self.lineage.is_torn = True
        self.saves.forget_last()
        started = time.perf_counter()
        loaded = load_checkpoint(
            self.storage,
            catalog,
            entry,
            self.state,
            carried(self.extras, self.reader),
            wants_changed=self.changed.wants_restored,
            rank=self.together.rank,
            ranks=self.together.size,
            late_reader=self.reader,
            transfer=transfer,
        )
        if transfer.only is None:
            self.reader.loaded(step)
        self.lost.load(loaded.pls)
        self.lineage.restored(
            step, discards_later=discard_later, is_other_model=not transfer.is_whole
        )
        self.changed.restored(loaded.changed)
        stats = loaded.stats
        timing = RestoreTiming(stats.base_bytes, stats.base_s, stats.delta_bytes, stats.delta_s)
        self.together.writer.note(lambda catalog: catalog.with_restore(timing))
        self.log.emit(
            events.Restored(
                step=step,
                rows=stats.rows,
                bytes=stats.bytes + loaded.dense_bytes,
                seconds=time.perf_counter() - started,
                restores=catalog.restores + 1,
            )
        )
        self.schedule.start(step)
        return stats
