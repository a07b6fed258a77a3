"""The Checkpointer: what a training loop holds. Three lines make a run survive.

    ck = Checkpointer(url, model=model, optimizer=opt, every=1000)
    step = ck.resume()
    ...; ck.step()

It joins the parts: the tracker sees changes, the plan decides, the snapshot copies (the only
stall), a ``Save`` stores in the background, and its outcome is settled on the training thread.

Invariants:
- Two saves never overlap: the running one is waited for or cancelled first.
- A background failure is raised at the next ``step``, ``save`` or ``close``, exactly once.
- The rows of a save that did not commit are in the next one.
- A model that was restored only in part is never saved.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from holdfast import events
from holdfast.checkpoint import commit as catalogs
from holdfast.checkpoint import restore as restores
from holdfast.checkpoint.baseline import (
    SINCE_BASE,
    CheckpointPlan,
    Gathered,
    Measured,
    deltas_since,
    gather,
    measure,
    plan_checkpoint,
    restore_sizes,
)
from holdfast.checkpoint.catalog import BASE, Catalog, Recovery
from holdfast.checkpoint.chooser import make_chooser
from holdfast.checkpoint.extractor import Extractor
from holdfast.checkpoint.grid import as_extract
from holdfast.checkpoint.load import load_checkpoint, prepare_servers
from holdfast.checkpoint.lost import LostSamples
from holdfast.checkpoint.reader import check_stateful
from holdfast.checkpoint.retention import as_keep
from holdfast.checkpoint.run import as_ids
from holdfast.checkpoint.save import Save, make_order, state_codec_name
from holdfast.checkpoint.schedule import Schedule
from holdfast.checkpoint.selection import Selection
from holdfast.checkpoint.settings import CANCEL, make_settings, open_log
from holdfast.checkpoint.snapshot import take_dense, take_rows
from holdfast.checkpoint.staging import StagingPool, default_bytes_max
from holdfast.checkpoint.strategy import CodecPlan, as_strategy, plan_codec
from holdfast.checkpoint.tracker import LOOKUP, Marks, SinceBase, make_tracker
from holdfast.checkpoint.unseen import Canary, check_lookups_suffice
from holdfast.checkpoint.warm import warm_kernels
from holdfast.checkpoint.writer import RunWriter
from holdfast.errors import HoldfastError, InvalidRequestError
from holdfast.schema import TableSchema
from holdfast.storage import open_storage
from holdfast.storage.base import Storage
from holdfast.tables import ModelState

READER = "reader"


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
        **settings: Any,
    ) -> None:
        """Watch a model; nothing is written before the first save.

        ``extras`` are other things with ``state_dict`` and ``load_state_dict`` that go along (a
        scheduler, a scaler, metrics). ``settings`` are the fields of ``Settings``.
        """
        self.settings = make_settings(settings)
        self._strategy = as_strategy(self.settings.strategy)
        if self.settings.extract is not None:
            rules = as_extract(self.settings.extract)
            self._strategy = dataclasses.replace(self._strategy, extract=rules)
        if self.settings.priority is not None:
            self._strategy = dataclasses.replace(self._strategy, priority=self.settings.priority)
        self._keep = as_keep(self.settings.keep)
        self._placement = self.settings.placement
        self._state = ModelState(model, optimizer)
        self._extras = dict(extras or {})
        if reader is not None:
            self._extras[READER] = reader
        for name, item in self._extras.items():
            check_stateful(name, item)
        self._reader = reader
        self._plan_codec(restores=0)  # a bad codec is refused here, not at the first save
        self._log = open_log(self.settings)
        self._storage = _as_storage(url, self.settings.storage_options)
        self._writer = RunWriter(
            self._storage,
            catalogs.load_last(self._storage),
            log=self._log,
            clock=self.settings.clock,
        )
        self._extractor = Extractor(self._writer, self._strategy.extract)
        self._is_tracking_lookups = self.settings.tracking == LOOKUP and self._has_deltas
        tables = self._state.tables if self._has_deltas else []
        self._tracker = make_tracker(self.settings.tracking, tables, model)
        self._cursor = self._tracker.cursor()
        hot = self._strategy.priority
        self._chooser = (
            None if hot is None else make_chooser(hot, self._state.tables, self._tracker)
        )
        self._schedule = Schedule(
            self.settings.every, clock=self.settings.clock, part=1.0 if hot is None else hot.r
        )
        self._canary = Canary(tables if self._is_tracking_lookups else [])
        full_bytes = self._state.full_bytes()
        self._pool = StagingPool(
            self.settings.staging_bytes_max
            or default_bytes_max(full_bytes, len(self._state.tables))
        )
        self._threads = self.settings.threads or restores.default_threads()
        self._copiers = ThreadPoolExecutor(self._threads, "holdfast-copy")
        self._encoders = ThreadPoolExecutor(self._threads, "holdfast-encode")
        self._last_save: Save | None = None
        self._running: Save | None = None
        self._claim: Marks | None = None
        self._since_base = SinceBase() if self._strategy.has_floors else None
        self._step = 0
        self._at: int | None = None  # the committed step the model descends from
        self._discard_later = False
        self._is_torn = False
        self._is_closed = False
        self._lost = LostSamples(
            self.settings.make_meter(), saves_a_round=1 if hot is None else hot.saves_a_round
        )
        self._codecs: CodecPlan | None = None
        self._sizes: tuple[int, tuple[int, int]] = (-1, (0, 0))
        has_grid = self._strategy.extract is not None
        seconds = warm_kernels(
            self._plan_codec(restores=0), has_grid=has_grid, has_priority=hot is not None
        )
        self._log.emit(events.KernelsCompiled(seconds=seconds))
        last = self._writer.catalog.last
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
        self._exit_report = functools.partial(_report_at_exit, weakref.ref(self))
        atexit.register(self._exit_report)
        self._schedule.start(self._step)
        self._grant()

    # What a training loop calls.

    @property
    def _has_deltas(self) -> bool:
        return deltas_since(self._strategy.base) is not None

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be restored, ascending."""
        return self._writer.catalog.steps

    @property
    def current_step(self) -> int:
        """How many steps this run has taken."""
        return self._step

    def resume(self) -> int:
        """Load the last committed checkpoint and take over the run; 0 for a new run.

        Raises:
            ConflictError: another writer is committing to this run.
            CorruptDataError: the checkpoint is damaged; ``restore`` an older step instead.
            InvalidRequestError: it is of another model.
        """
        self._check_open()
        self._finish_running()
        self._settle_commit()
        last = self._writer.catalog.last
        if last is None:
            return 0
        step = self.restore(last.step)
        self._writer.update(lambda catalog: catalog)
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
        self._check_open()
        self._finish_running()
        with self._extractor.stopped():
            return self._restore(step, discard_later=discard_later)

    def _restore(self, step: int, *, discard_later: bool) -> int:
        self._settle_commit()
        catalog = self._writer.catalog
        entry = catalog.checkpoint(step)
        schemas = catalog.schema_of(entry)
        self._state.check_parameters()
        self._state.check_schemas(schemas)
        self._is_torn = True
        self._last_save = None  # the same step may come again, with other values
        started = time.perf_counter()
        is_since_base = deltas_since(self._strategy.base) == SINCE_BASE
        loaded = load_checkpoint(
            self._storage,
            catalog,
            entry,
            self._state,
            self._extras,
            wants_changed=is_since_base or self._since_base is not None,
        )
        self._step = step
        self._at = step
        self._lost.load(loaded.pls)
        self._is_torn = False
        self._discard_later = discard_later
        self._tracker.reset()
        self._canary.reset()
        if self._chooser is not None:
            self._chooser.reset()
        self._schedule.start(step)
        if is_since_base:
            self._cursor.give_back(loaded.changed)
        if self._since_base is not None:
            self._since_base = SinceBase(loaded.changed)
        stats = loaded.stats
        recovery = Recovery(stats.base_bytes, stats.base_s, stats.delta_bytes, stats.delta_s)
        self._writer.note(
            lambda now: dataclasses.replace(
                now, restores=now.restores + 1, recoveries=(*now.recoveries, recovery)[-2:]
            )
        )
        self._log.emit(
            events.Restored(
                step=step,
                rows=stats.rows,
                bytes=stats.bytes + loaded.dense_bytes,
                seconds=time.perf_counter() - started,
                restores=self._writer.catalog.restores,
            )
        )
        self._grant()
        return step

    def recover(self, servers: Iterable[int]) -> restores.RestoreStats:
        """Bring back the rows of servers that failed, each as it was saved last; all else goes on.

        What training did to those rows since is lost, and only that (``pls``).

        Raises:
            InvalidRequestError: no such server, or their rows are not stored apart.
            CorruptDataError: names what is damaged; the model is then unusable until another
                restore succeeds, and is not saved.
        """
        self._check_open()
        placement = self._placement
        if placement is None:
            raise InvalidRequestError(
                "the rows are not divided among servers", todo="pass servers= to the Checkpointer"
            )
        failed = tuple(sorted(set(servers)))
        for server in failed:
            placement.check_server(server)
        self._finish_running()
        with self._extractor.stopped():
            self._settle_commit()
            saved = self._at
            if saved is None:
                raise InvalidRequestError(
                    "nothing is saved yet that the model descends from",
                    todo="save first, or call ck.resume()",
                )
            started = time.perf_counter()
            catalog = self._writer.catalog
            recovery = prepare_servers(
                self._storage, catalog, catalog.checkpoint(saved), self._state, placement, failed
            )
            was_torn, self._is_torn = self._is_torn, True
            stats = recovery()
            self._is_torn = was_torn
        self._log.emit(
            events.Recovered(
                step=self._step,
                checkpoint_step=saved,
                servers=failed,
                rows=stats.rows,
                bytes=stats.bytes,
                seconds=time.perf_counter() - started,
                pls=self._lost.failed(failed),
            )
        )
        return stats

    @property
    def pls(self) -> float | None:
        """The portion of lost samples so far (CPR); None without ``total_steps`` and servers."""
        return self._lost.pls

    def step(self) -> Save | None:
        """Count one training step; save when one is due. Call it after ``optimizer.step()``.

        Raises:
            HoldfastError: a background save failed since the last call.
        """
        self._check_open()
        self._step += 1
        self._lost.trained()
        was_known = self._schedule.steps_left(self._step) is not None
        is_due = self._schedule.is_due(self._step)
        try:
            self._report_finished()
            return self.save() if is_due else None
        finally:
            if is_due:
                self._schedule.saved(self._step)
            if is_due or not was_known:
                self._grant()

    def save(self) -> Save:
        """Take a checkpoint now; returns when the snapshot is in memory.

        A step that is saved already is not saved again: its save is returned.

        Raises:
            HoldfastError: an earlier save failed, or this one cannot start.
        """
        self._check_open()
        if self._is_torn:
            raise InvalidRequestError(
                "the model is restored only in part and will not be saved",
                todo="restore a step that is sound, or start the process again",
            )
        started = time.perf_counter()
        last = self._last_save
        if last is not None and last.step == self._step and (not last.is_done or not last.error):
            return last
        self._finish_running(cancel=self.settings.on_busy == CANCEL)
        self._settle_commit()
        if last is not None and last.step == self._step == self._at:
            last.confirm()
            return last
        history = self._history()
        self._state.check_parameters()
        if self._is_tracking_lookups:
            check_lookups_suffice(self._state.tables, self._state.model)
        schemas = self._state.schemas()
        plan = self._plan(history, schemas)
        codecs = self._choose_codecs(history.restores, schemas)
        self._log.emit(
            events.SaveStarted(step=self._step, checkpoint=plan.kind, reason=plan.reason)
        )
        try:
            selections = self._select(plan)
            order = make_order(
                plan,
                history=history,
                schemas=schemas,
                codecs=codecs,
                selections=selections,
                step=self._step,
                keep=self._keep,
                rewind_to=self._at if self._discard_later else None,
                has_grid=self._strategy.extract is not None,
                placement=self._placement,
            )
            with self._extractor.paused():
                save = self._running = self._last_save = Save(
                    order,
                    self._writer,
                    pool=self._pool,
                    encoders=self._encoders,
                    depth=self._threads + 1,
                    on_commit=self._on_commit,
                )
                dense = take_dense(self._state, self._extras, pls=self._lost.state_when_saved())
                take_rows(
                    self._state.tables,
                    schemas,
                    selections,
                    pool=self._pool,
                    threads=self._copiers,
                    out=save.parts,
                )
                stall_s = time.perf_counter() - started
                save.finish_staging(dense, stall_s)
        except BaseException as error:
            # Also an interrupt: what was claimed is given back, and nothing is left waiting.
            if self._running is not None:
                self._running.abandon(error)
            self._settle_running()
            raise
        self._log.emit(
            events.SaveStaged(
                step=self._step, rows=order.rows, bytes=order.staged_bytes, stall_s=stall_s
            )
        )
        return save

    def mark(self, table: str, ids: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Declare rows changed that were changed by hand, not by training.

        Raises:
            InvalidRequestError: no such table, or ids outside it.
        """
        schemas = {schema.name: schema for schema in self._state.schemas()}
        if table not in schemas:
            raise InvalidRequestError("no such table", table=table, tables=sorted(schemas))
        if isinstance(ids, torch.Tensor):
            ids = ids.detach().cpu().numpy().reshape(-1)
        ids_N = as_ids(ids, schemas[table])
        if self._has_deltas:
            self._tracker.mark(table, ids_N)

    def wait(self) -> None:
        """Wait until no save is running and the grid is worked off.

        Raises:
            HoldfastError: the save failed.
        """
        self._finish_running()
        self._extractor.wait()

    def close(self) -> None:
        """Wait for the running save and the grid, let go of the model.

        Raises:
            HoldfastError: the running save failed.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._finish_running()
        finally:
            self._extractor.wait()
            atexit.unregister(self._exit_report)
            self._tracker.close()
            self._copiers.shutdown()
            self._encoders.shutdown()
            # Its workers should not live as long as a forgotten checkpointer.
            self._reader, self._extras = None, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except HoldfastError as failure:
            if error is None:  # the body's own error comes first
                raise
            error.add_note(f"holdfast: the last save failed too: {failure}")

    # How it decides.

    def _plan_codec(self, *, restores: int) -> CodecPlan:
        return plan_codec(
            self.settings.codec if self.settings.codec is not None else self._strategy.codec,
            self.settings.state_codec,
            expected_restores=self.settings.restores,
            restores=restores,
            table=self.settings.bits_table,
        )

    def _choose_codecs(self, restores: int, schemas: Sequence[TableSchema]) -> CodecPlan:
        plan = self._plan_codec(restores=restores)
        if plan != self._codecs:
            self._codecs = plan
            self._log.emit(
                events.CodecChosen(
                    codec=plan.weights.name,
                    state_codec=state_codec_name(schemas, plan),
                    reason=plan.reason,
                )
            )
        return plan

    def _history(self) -> Catalog:
        """The catalog the next save builds on.

        Raises:
            InvalidRequestError: it holds checkpoints that the model does not descend from.
        """
        catalog = self._writer.catalog
        last = catalog.last
        if last is None:
            return catalog
        if self._at is None:
            raise InvalidRequestError(
                "there are checkpoints here already",
                url=self._storage.url,
                last_step=last.step,
                todo="call ck.resume() first, or give a new url",
            )
        if last.step > self._at:
            if not self._discard_later:
                raise InvalidRequestError(
                    "there are checkpoints after the step that was restored",
                    restored=self._at,
                    last_step=last.step,
                    todo="pass discard_later=True to ck.restore() to drop them, or give a new url",
                )
            catalog = catalog.rewound(self._at)
            last = catalog.last
        if last is not None and last.step >= self._step:
            raise InvalidRequestError(
                "this step is saved already",
                step=self._step,
                last_step=last.step,
                todo="call ck.step() after each training step",
            )
        return catalog

    def _plan(self, history: Catalog, schemas: tuple[TableSchema, ...]) -> CheckpointPlan:
        last = history.last
        if last is None:
            return plan_checkpoint(self._strategy.base, None)
        must_be_base = None
        if history.schema_of(last) != schemas:
            must_be_base = "the tables' columns changed (row state appeared)"
        if self._placement != (None if history.shards is None else history.shards.placement):
            must_be_base = "the rows are divided among other servers"
        return plan_checkpoint(
            self._strategy.base,
            history.delta_sizes(),
            must_be_base=must_be_base,
            measured=self._measure(history),
            gathered=self._gather(history, schemas),
        )

    def _gather(self, history: Catalog, schemas: Sequence[TableSchema]) -> Gathered | None:
        if self._since_base is None:
            return None
        rows = self._since_base.rows
        return gather(
            history,
            changed_bytes=sum(rows.get(t.name, 0) * t.row_bytes for t in schemas),
            table_bytes=sum(t.rows * t.row_bytes for t in schemas),
        )

    def _measure(self, history: Catalog) -> Measured | None:
        if self._strategy.base != "recovery-time":
            return None
        step, sizes = self._sizes
        is_known = history.last is not None and history.last.step == step
        return measure(history, sizes if is_known and not self._discard_later else None)

    def _on_commit(self) -> None:
        """After a commit, on the save's own thread: what need not wait for the next stall."""
        catalog = self._writer.catalog
        if self._strategy.base == "recovery-time" and catalog.last is not None:
            self._sizes = (catalog.last.step, restore_sizes(catalog))
        self._extractor.wake()

    def _select(self, plan: CheckpointPlan) -> list[Selection]:
        tables = self._state.tables
        is_differential = plan.since == SINCE_BASE and not plan.is_floor
        if is_differential:
            marks = self._cursor.peek()
        else:
            marks = self._claim = self._cursor.advance()
        if plan.kind == BASE:
            self._canary.reset()
            if self._chooser is not None:
                self._chooser.saved(None)
            return [Selection(table.rows, placement=self._placement) for table in tables]
        self._canary.check(marks)
        if not is_differential:
            self._canary.reset()
        if self._chooser is not None:
            marks, later = self._chooser.choose(marks)
            self._claim = marks
            self._cursor.give_back(later)
            self._chooser.saved(marks)
        if plan.is_floor and self._since_base is not None:
            marks = self._since_base.joined(marks)
        return [Selection(table.rows, marks[table.name], self._placement) for table in tables]

    # How it settles what happened in the background.

    def _finish_running(self, *, cancel: bool = False) -> None:
        """Wait for the running save or cancel it, and raise its failure."""
        if self._running is None:
            return
        if cancel:
            self._running.cancel()
        else:
            self._running.wait()
        self._report_finished()

    def _report_finished(self) -> None:
        save = self._running
        if save is None or not save.is_done:
            return
        self._settle_running()
        if save.error is not None and not save.is_reported:
            save.is_reported = True
            raise save.error

    def _settle_running(self) -> None:
        """Draw the conclusions of a save that is over: the one place where lineage moves on."""
        save, self._running = self._running, None
        claim, self._claim = self._claim, None
        if save is not None and save.is_committed:
            self._move_to(save)
            if self._since_base is not None and claim is not None and save.order.kind != BASE:
                self._since_base.add(claim)
        elif claim is not None:
            self._cursor.give_back(claim)
            if self._chooser is not None:
                self._chooser.give_back(claim)

    def _settle_commit(self) -> None:
        """A commit whose answer was lost: if it was carried out, the model descends from it."""
        self._writer.settle()
        last = self._last_save
        if last is None or last.error is None or last.entry is None:
            return
        if last.entry in self._writer.catalog.checkpoints:
            self._move_to(last)

    def _move_to(self, save: Save) -> None:
        """The model descends from a save that is committed."""
        if save.step != self._at:
            self._lost.saved(self._step - save.step, is_base=save.order.kind == BASE)
            if self._since_base is not None and save.order.kind == BASE:
                self._since_base = SinceBase()
        self._at = save.step
        self._discard_later = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequestError("the checkpointer is closed", todo="make a new one")

    def _grant(self) -> None:
        """Tell the reader how many batches to read until the next checkpoint."""
        grant = getattr(self._reader, "grant", None)
        left = self._schedule.steps_left(self._step)
        if grant is not None and left is not None:
            grant(left)


def _report_at_exit(reference: weakref.ref[Checkpointer]) -> None:
    """Nothing is swallowed: a last save that failed after the last ``step()`` is printed."""
    checkpointer = reference()
    save = None if checkpointer is None else checkpointer._running
    if save is not None and save.error is not None and not save.is_reported:
        print(f"holdfast: the last save failed: {save.error}", file=sys.stderr)


def _as_storage(
    url: str | os.PathLike[str] | Storage, options: Mapping[str, Any] | None
) -> Storage:
    if isinstance(url, str | os.PathLike):
        return open_storage(os.fspath(url), **dict(options or {}))
    return url
