"""The Checkpointer: what a training loop holds. Three lines make a run survive.

    ck = Checkpointer(url, model=model, optimizer=opt, every=1000)
    step = ck.resume()
    ...; ck.step()

It joins the parts: the tracker sees changes, the plan decides, the snapshot copies (the only
stall), a ``Save`` stores in the background, and its outcome is settled on the training thread.
Where many ranks train, each has one: they agree before they copy (agreement.py), and rank 0 commits
for all (joint.py).

Invariants:
- Two saves never overlap: the running one is waited for or cancelled first.
- A background failure is raised at the next ``step``, ``save`` or ``close``, exactly once.
- The rows of a save that did not commit are in the next one.
- A model that was restored only in part is never saved; of many ranks none is, if one was.

Not here: what changed (changed.py), base or delta (planner.py).
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from holdfast import events
from holdfast.checkpoint import commit as catalogs
from holdfast.checkpoint import restore as restores
from holdfast.checkpoint.agreement import Agreement, Decision
from holdfast.checkpoint.alone import Alone
from holdfast.checkpoint.catalog import BASE, Catalog, Recovery
from holdfast.checkpoint.changed import Changed
from holdfast.checkpoint.extractor import Extractor
from holdfast.checkpoint.grid import as_extract
from holdfast.checkpoint.joint import Coordinator, Follower
from holdfast.checkpoint.load import load_checkpoint, prepare_servers
from holdfast.checkpoint.lost import LostSamples
from holdfast.checkpoint.order import make_order
from holdfast.checkpoint.planner import Planner
from holdfast.checkpoint.ranks import Ranks, find_ranks
from holdfast.checkpoint.reader import READER, check_stateful
from holdfast.checkpoint.retention import as_keep
from holdfast.checkpoint.run import as_ids
from holdfast.checkpoint.save import Committer, Save
from holdfast.checkpoint.schedule import Pls, Schedule
from holdfast.checkpoint.settings import CANCEL, Settings, make_settings, open_log
from holdfast.checkpoint.shares import share_of
from holdfast.checkpoint.snapshot import take_dense, take_rows
from holdfast.checkpoint.staging import StagingPool, default_bytes_max
from holdfast.checkpoint.strategy import as_strategy
from holdfast.checkpoint.warm import warm_kernels
from holdfast.checkpoint.writer import FollowingWriter, RunWriter
from holdfast.errors import HoldfastError, InvalidRequestError, UnavailableError
from holdfast.modelstate import ModelState
from holdfast.pieces import Piece
from holdfast.schema import TableSchema
from holdfast.storage import as_storage
from holdfast.storage.base import Storage
from holdfast.tables import Table


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
        pieces: Mapping[str, Piece] | None = None,
        **settings: Any,
    ) -> None:
        """Watch a model; nothing is written before the first save.

        ``extras`` are other things with ``state_dict`` and ``load_state_dict`` that go along (a
        scheduler, a scaler, metrics). ``pieces`` says by the names of parameters which of them are
        parts of larger tables. ``settings`` are the fields of ``Settings``. Where several ranks
        train (torch.distributed), all make theirs together.
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
        self._ranks = find_ranks(self.settings.ranks, timeout_s=self.settings.ranks_timeout_s)
        same = repr((self._strategy, self.settings.tracking))
        self._agreement = None if self._ranks is None else Agreement(self._ranks, same)
        self._decision: Decision | None = None
        _check_ranks(self._ranks, self.settings)
        self._state = ModelState(
            model, optimizer, pieces=pieces, is_replicated=self._ranks is not None
        )
        self._extras = dict(extras or {})
        if reader is not None:
            self._extras[READER] = reader
        for name, item in self._extras.items():
            check_stateful(name, item)
        self._reader = reader
        self._log = open_log(self.settings)
        self._planner = Planner(self._strategy, self.settings, self._log)
        codecs = self._planner.plan_codec(restores=0)  # a bad one is refused here, not at a save
        self._storage = as_storage(url, self.settings.storage_options)
        found = catalogs.load_last(self._storage)
        self._commits = self._ranks is None or self._ranks.is_coordinator
        log, clock = self._log, self.settings.clock
        self._run_writer = (
            RunWriter(self._storage, found, log=log, clock=clock) if self._commits else None
        )
        self._writer = self._run_writer or FollowingWriter(self._storage, log=log, clock=clock)
        self._extractor = Extractor(
            self._run_writer, self._strategy.extract if self._commits else None
        )
        self._changed = Changed(
            self._state,
            self._strategy,
            tracking=self.settings.tracking,
            shares=_shares(self._state.tables, self._ranks),
            placement=self._placement,
        )
        hot = self._strategy.priority
        self._schedule = Schedule(
            self.settings.every, clock=self.settings.clock, part=1.0 if hot is None else hot.r
        )
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
        self._step = 0
        self._at: int | None = None  # the committed step the model descends from
        self._discard_later = False
        self._is_torn = False
        self._is_closed = False
        self._lost = LostSamples(
            self.settings.make_meter(), saves_a_round=1 if hot is None else hot.saves_a_round
        )
        has_grid = self._strategy.extract is not None
        seconds = warm_kernels(codecs, has_grid=has_grid, has_priority=hot is not None)
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
        self._exit_report = functools.partial(_report_at_exit, weakref.ref(self))
        atexit.register(self._exit_report)
        self._schedule.start(self._step)
        self._grant()

    # What a training loop calls.

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
        step = self._load(None, discard_later=False)
        if step is None:
            return 0
        writer = self._run_writer
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
        self._finish_running()
        with self._extractor.stopped():
            catalog = self._same_catalog()
            if step is None and catalog.last is None:
                return None
            wanted = catalog.last.step if step is None and catalog.last is not None else step
            assert wanted is not None
            # Until all ranks are done nobody deletes what others read.
            self._all_together(
                lambda: self._restore(catalog, wanted, discard_later=discard_later),
                doing="restore the checkpoint",
            )
        return wanted

    def _same_catalog(self) -> Catalog:
        """The catalog to load from: the coordinator's."""
        ranks, writer = self._ranks, self._run_writer
        if ranks is None or writer is None:
            number = -1 if ranks is None else int(ranks.broadcast(None))
            if ranks is not None and number < 0:
                raise UnavailableError("rank 0 could not find the run's catalog")
            if ranks is not None and number > 0:
                return catalogs.load(self._storage, number)
            self._settle_commit()
            return self._writer.catalog
        number = -1
        try:
            self._settle_commit()
            number = writer.catalog.number
        finally:
            ranks.broadcast(str(number).encode())
        return writer.catalog

    def _all_together(self, act: Callable[[], object], *, doing: str) -> None:
        """Do something on every rank; raises on all where one fails."""
        error: Exception | None = None
        try:
            act()
        except Exception as caught:
            if self._ranks is None:
                raise
            error = caught
        if self._ranks is not None:
            was_torn, self._is_torn = self._is_torn, True
            self._ranks.check_all(error, doing)
            self._is_torn = was_torn

    def _restore(self, catalog: Catalog, step: int, *, discard_later: bool) -> None:
        entry = catalog.checkpoint(step)
        schemas = catalog.schema_of(entry)
        self._state.check_parameters()
        self._state.check_schemas(schemas, is_part=self._ranks is not None)
        self._is_torn = True
        self._last_save = None  # the same step may come again, with other values
        started = time.perf_counter()
        loaded = load_checkpoint(
            self._storage,
            catalog,
            entry,
            self._state,
            self._extras,
            wants_changed=self._changed.wants_restored,
            rank=0 if self._ranks is None else self._ranks.rank,
            ranks=1 if self._ranks is None else self._ranks.size,
        )
        self._step = step
        self._at = step
        self._lost.load(loaded.pls)
        self._is_torn = False
        self._discard_later = discard_later
        self._changed.restored(loaded.changed)
        self._schedule.start(step)
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
                restores=catalog.restores + 1,
            )
        )
        self._grant()

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
            if self._ranks is None or not is_due:  # else in save(), where the other ranks hear it
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
        is_again = last is not None and last.step == self._step
        # Of many ranks none can know how far the others are: they agree first.
        is_known = self._ranks is None and (last is None or not last.is_done or not last.error)
        if last is not None and is_again and is_known:
            return last
        failure: HoldfastError | None = None
        try:
            self._finish_running(cancel=self.settings.on_busy == CANCEL and not is_again)
        except HoldfastError as error:
            if self._ranks is None:
                raise
            failure = error  # the others wait for this rank: they hear of it
        decision, schemas = self._agree(failure)
        if decision.is_saved:
            assert last is not None
            last.confirm()
            return last
        self._log.emit(
            events.SaveStarted(
                step=self._step, checkpoint=decision.plan.kind, reason=decision.plan.reason
            )
        )
        committer = self._make_committer(decision)
        try:
            selections = self._changed.select(decision.plan)
            stored = {schema.name: schema for schema in schemas}
            own = [stored[table.name] for table in self._state.tables]
            order = make_order(
                decision.plan,
                base=decision.base,
                schemas=schemas,
                codecs=decision.codecs,
                selections=list(zip(own, selections, strict=True)),
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
                    committer=committer,
                    pool=self._pool,
                    encoders=self._encoders,
                    depth=self._threads + 1,
                    on_commit=self._on_commit,
                )
                dense = take_dense(
                    self._state,
                    self._extras,
                    pls=self._lost.state_when_saved(),
                    is_follower=not self._commits,
                )
                take_rows(
                    self._state.tables,
                    own,
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
            else:
                committer.give_up(error)
            self._settle_running()
            raise
        self._log.emit(
            events.SaveStaged(
                step=self._step, rows=order.rows, bytes=order.staged_bytes, stall_s=stall_s
            )
        )
        return save

    def mark(self, table: str, ids: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Declare rows changed that were changed by hand, not by training; ids are global.

        Raises:
            InvalidRequestError: no such table, or ids outside it.
        """
        held = [found for found in self._state.tables if found.whole_name == table]
        if not held:
            known = sorted({found.whole_name for found in self._state.tables})
            raise InvalidRequestError("no such table", table=table, tables=known)
        if isinstance(ids, torch.Tensor):
            ids = ids.detach().cpu().numpy().reshape(-1)
        for found in held:
            local_N = found.piece.local_of(as_ids(ids, found.schema()))
            self._changed.mark(found.name, local_N[local_N >= 0])

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
        self._close(is_orderly=True)

    def _close(self, *, is_orderly: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._finish_running()
        finally:
            self._extractor.wait()
            atexit.unregister(self._exit_report)
            self._changed.close()
            if self._ranks is not None:
                self._ranks.farewell(is_orderly=is_orderly)
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
            self._close(is_orderly=error is None)
        except HoldfastError as failure:
            if error is None:  # the body's own error comes first
                raise
            error.add_note(f"holdfast: the last save failed too: {failure}")

    # How it decides.

    def _agree(
        self, failure: HoldfastError | None = None
    ) -> tuple[Decision, tuple[TableSchema, ...]]:
        """What is saved now, and of which tables; on many ranks the same everywhere.

        A rank with a ``failure`` takes no part, and then none does.
        """
        if self._agreement is None:
            self._settle_commit()
            self._check_model()
            schemas = self._state.schemas()
            return self._decide(schemas, self._changed.since_base_bytes() or 0)
        error: Exception | None = failure
        try:
            self._settle_commit()
            self._check_model()
        except HoldfastError as caught:
            error = error or caught
        size = self._agreement.gather(
            self._step,
            self._state.tables,
            changed_bytes=self._changed.since_base_bytes() or 0,
            error=error,
        )
        schemas = self._agreement.schemas
        decision: Decision | None = None
        refusal: Exception | None = None
        if self._commits:
            try:
                decision, schemas = self._decide(schemas, size)
            except Exception as caught:
                refusal = caught
        decision = self._agreement.decide(decision, refusal)
        if not self._commits and decision.at != self._at:
            self._at = decision.at  # a commit whose answer was lost
        return decision, schemas

    def _check_model(self) -> None:
        self._state.check_parameters()
        self._changed.check()

    def _decide(
        self, schemas: tuple[TableSchema, ...], changed_bytes: int
    ) -> tuple[Decision, tuple[TableSchema, ...]]:
        """What is saved now, on the run's history; only the process that commits knows it."""
        writer = self._run_writer
        assert writer is not None
        last = self._last_save
        is_saved = last is not None and last.step == self._step == self._at
        history = writer.catalog if is_saved else self._history()
        if history.last is not None:
            known = history.schema_of(history.last)
            # The order of tables is another on ranks; it means nothing.
            schemas = known if set(known) == set(schemas) else schemas
        decision = Decision(
            plan=self._planner.plan(
                history,
                schemas,
                changed_bytes=changed_bytes,
                is_rewinding=self._discard_later,
            ),
            codecs=self._planner.choose_codecs(history.restores, schemas),
            base=history.last.base if history.last is not None else self._step,
            at=self._at,
            number=writer.next_number,
            token=secrets.token_hex(4),
            is_saved=is_saved,
        )
        return decision, schemas

    def _make_committer(self, decision: Decision) -> Committer:
        if self._run_writer is not None:
            if self._ranks is None:
                return Alone(self._run_writer)
            before, self._decision = self._decision, decision
            return Coordinator(self._ranks, decision, self._run_writer, before=before)
        assert self._ranks is not None and isinstance(self._writer, FollowingWriter)
        return Follower(self._ranks, decision, self._writer)

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

    def _on_commit(self) -> None:
        """After a commit, on the save's own thread: what need not wait for the next stall."""
        if self._run_writer is not None:
            self._planner.committed(self._run_writer.catalog)
        self._extractor.wake()

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
        is_committed = save is not None and save.is_committed
        if save is not None and is_committed:
            self._move_to(save)
        self._changed.settle(
            is_committed=is_committed, kind=BASE if save is None else save.order.kind
        )

    def _settle_commit(self) -> None:
        """A commit whose answer was lost: if it was carried out, the model descends from it."""
        self._writer.settle()
        last = self._last_save
        if last is None or last.error is None or last.entry is None or self._run_writer is None:
            return
        if last.entry in self._run_writer.catalog.checkpoints:
            self._move_to(last)

    def _move_to(self, save: Save) -> None:
        """The model descends from a save that is committed."""
        if save.step != self._at:
            self._lost.saved(self._step - save.step, is_base=save.order.kind == BASE)
            if save.order.kind == BASE:
                self._changed.based()
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


def _shares(tables: Iterable[Table], ranks: Ranks | None) -> dict[str, range]:
    """Which rows of each table this process saves, where it does not save all it holds."""
    if ranks is None:
        return {}
    return {t.name: share_of(t.piece, rank=ranks.rank, ranks=ranks.size) for t in tables}


def _check_ranks(ranks: Ranks | None, settings: Settings) -> None:
    """Refuse settings that many ranks could not agree on."""
    if ranks is None:
        return
    if isinstance(settings.every, Pls) or settings.placement is not None:
        raise InvalidRequestError(
            "servers= and every=Pls(...) are for one process; of many ranks each would count for "
            "itself",
            ranks=ranks.size,
            todo="give every= as a number of steps, and leave servers= out",
        )


def _report_at_exit(reference: weakref.ref[Checkpointer]) -> None:
    """Nothing is swallowed: a last save that failed after the last ``step()`` is printed."""
    checkpointer = reference()
    save = None if checkpointer is None else checkpointer._running
    if save is not None and save.error is not None and not save.is_reported:
        print(f"holdfast: the last save failed: {save.error}", file=sys.stderr)
