"""The second layer: when a whole cluster is saved, and what it goes back to. Runs in the driver.

    tick -> plan: base or delta, codec -> an attempt in the background (clustersave.py)
    hold -> the last checkpoint -> the coordinator brings servers back to it -> release

What comes out is an ordinary run: it can be inspected, verified and read like one process's.

Invariants:
- One attempt at a time. One that is given up changes nothing; its rows are in the next.
- While the cluster goes back to a checkpoint nothing is saved or deleted.

Not here: how one is made (clustersave.py), a server's part (keeper.py, store.py, changes.py), who
is lost and what then (coordinator.py).
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from holdfast import events
from holdfast.checkpoint.format.catalog import BASE, Catalog, CheckpointEntry
from holdfast.checkpoint.format.codec import Codec
from holdfast.checkpoint.planning.bases import (
    BaseChoice,
    check_policy,
    measure,
    plan_checkpoint,
)
from holdfast.checkpoint.planning.codecs import CodecPlan, plan_codec
from holdfast.checkpoint.planning.retention import Keep, as_keep
from holdfast.checkpoint.restoring import fetch
from holdfast.checkpoint.restoring.lost_samples import Rounds
from holdfast.checkpoint.store import catalogs
from holdfast.checkpoint.store.writer import RunWriter
from holdfast.checkpoint.strategy import Strategy, as_strategy
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.clustersave import Attempts
from holdfast.cluster.fallback import Restore
from holdfast.cluster.leases import Leases
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.store import Loading, Place
from holdfast.cluster.stored_state import read_state
from holdfast.errors import ConflictError, HoldfastError, InvalidRequestError
from holdfast.plan.pls import PlsMeter

PARTIAL, FULL = "partial", "full"
_AGAIN_S = 1.0  # after an attempt that was given up


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSettings:
    """How a cluster is saved, and what it does when more is lost than parity makes up for.

    ``strategy``: ``cpr-mfu``, ``cpr-ssu`` and ``cpr-scar`` save the hottest r·N rows of large
    tables, 1/r times within ``every_batches``: as many rows in that time as ``cpr``, and no larger
    a PLS (``Priority.save_every``). ``recovery`` None: ``cpr`` and these give lost servers their
    last saved rows and let the others go on (partial); with the other strategies everybody goes
    back (full).
    """

    strategy: str | Strategy = "check-n-run"
    every_batches: int | None = None
    codec: str | Codec | None = None
    state_codec: str | Codec | None = None
    keep: Keep | int | None = 2
    recovery: str | None = None
    expected_restores: float | None = None
    patience_s: float = 30.0
    """How long batches that are out are waited for before a checkpoint is given up."""
    storage_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.recovery not in (None, PARTIAL, FULL):
            raise InvalidRequestError(
                "unknown recovery", recovery=self.recovery, known=[PARTIAL, FULL]
            )
        every = self.every_batches
        if every is not None and (isinstance(every, bool) or every < 1):
            raise InvalidRequestError(
                "checkpoints are a positive number of batches apart", every_batches=every
            )


class ClusterCheckpointer:
    """Saves a cluster while it trains, and is what it falls back to."""

    def __init__(self, cluster: Cluster, url: str | os.PathLike[str], **settings: Any) -> None:
        """``settings`` are the fields of ``LayerSettings``. Nothing is written before the first
        save; call ``save(step=0)`` before training to have something to go back to at once.

        Raises:
            InvalidRequestError: a setting cannot be.
        """
        self.settings = LayerSettings(**settings)
        self.strategy = _checked(as_strategy(self.settings.strategy))
        self._every = self.settings.every_batches
        hot = self.strategy.priority
        if hot is not None and self._every is not None:
            hot = hot.within(self._every)
            self.strategy = dataclasses.replace(self.strategy, priority=hot)
            self._every = hot.save_every(self._every)
        recovery = self.settings.recovery
        is_cpr = self.strategy.name.startswith("cpr")
        self.is_partial = recovery == PARTIAL or (recovery is None and is_cpr)
        self.pls = 0.0
        self._plan_codec(restores=0)  # a bad codec is refused here, not at the first save
        self._cluster = cluster
        self._coordinator = cluster.coordinator
        self._spec: ClusterSpec = cluster.spec
        self._place = Place(os.fspath(url), dict(self.settings.storage_options))
        storage = self._place.open()
        self._writer = RunWriter(
            storage, catalogs.load_last(storage), log=cluster.log, clock=self.settings.clock
        )
        self._at: int | None = None  # the committed step the cluster descends from
        self._rounds = Rounds(1 if hot is None else hot.saves_a_round)
        self._behind = 0  # batches before that step which count as lost with a server's rows
        self._must_be_base: str | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._turn = threading.Lock()  # of a save, or of going back
        self._is_held = threading.Event()
        self._tried_s = -_AGAIN_S
        self._thread: threading.Thread | None = None
        self._failure: HoldfastError | None = None
        self._attempts = Attempts(
            cluster,
            self._writer,
            self._place,
            keep=as_keep(self.settings.keep),
            patience_s=self.settings.patience_s,
            is_wanted=lambda: not self._is_held.is_set(),
            priority=hot,
        )
        self._coordinator.second = self

    # What a driver calls.

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that can be restored, ascending; a step is a number of batches done."""
        return self._writer.catalog.steps

    def save(self, step: int | None = None, *, timeout_s: float = 600.0) -> CheckpointEntry:
        """Take a checkpoint now; returns when it is durable.

        ``step`` is needed where nothing was trained yet, and where batches are not leased; then
        nobody may push meanwhile. A step that is saved already is not saved again.

        Raises:
            UnavailableError: a server was lost meanwhile, or batches were not done in time.
            HoldfastError: storage failed, or another writer owns the run.
        """
        self.wait()
        with self._turn:
            return self._save(step, timeout_s)

    def resume(self) -> int | None:
        """Bring the whole cluster to the last checkpoint at the url; None if there is none.

        The next training goes on after the batches that were done then.
        """
        restore = self.hold()
        try:
            if restore is None:
                return None
            self._coordinator.go_back(restore)
            self._at, self._behind = restore.loading.step, 0
            self._resumed = restore.batches
        finally:
            self.release(is_restored=restore is not None)
        return self._at

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            HoldfastError: another writer owns the run.
        """
        thread = self._thread
        if thread is not None:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Give up a save under way; the cluster has no second layer any more."""
        self._is_held.set()
        if self._thread is not None:
            self._thread.join()
        if self._coordinator.second is self:
            self._coordinator.second = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the cluster calls.

    def begin(self, leases: Leases) -> None:
        """Training begins: after ``resume``, with what was not done yet."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            leases.rewind(resumed)

    def tick(self, leases: Leases) -> None:
        """Begin to save, in the background, if it is time.

        Raises:
            HoldfastError: another writer owns the run.
        """
        if self._failure is not None:
            raise self._failure
        every = self._every
        is_busy = self._thread is not None and self._thread.is_alive()
        if every is None or is_busy or leases.is_over or self._is_held.is_set():
            return
        if leases.done_up_to - (self._at or 0) < every or not self._coordinator.is_steady:
            return
        if time.monotonic() - self._tried_s < _AGAIN_S and self._attempts.has_failed:
            return
        self._tried_s = time.monotonic()
        self._thread = threading.Thread(
            target=self._save_quietly, name="holdfast-second-layer", daemon=True
        )
        self._thread.start()

    def hold(self) -> Restore | None:
        """Give up what is being saved, save nothing more; the last checkpoint, if there is one."""
        self._is_held.set()
        self._turn.acquire()
        try:
            return self._plan_restore()
        except BaseException:
            self.release(is_restored=False)
            raise

    def release(self, *, is_restored: bool) -> None:
        """Save again; whether the cluster went back to the last checkpoint."""
        if is_restored:
            self._writer.note(lambda now: now.with_restore())  # the next commit will say so
        self._is_held.clear()
        self._turn.release()

    def lost(self, servers: Collection[int], batches: int, batches_total: int) -> float | None:
        """Some servers have rows of the past, the others those of now: the PLS it added. Where hot
        rows are saved first, 1/r saves count as one of everything."""
        passed = max(0, batches - (self._at or 0) + self._behind)
        if batches_total < 1 or passed == 0:
            return 0.0
        meter = PlsMeter(batches_total, servers=self._spec.servers)
        meter.trained(passed)
        added = meter.failed(sorted(servers))
        self.pls += added
        return added

    # Going back.

    def _plan_restore(self) -> Restore | None:
        self._writer.settle()
        catalog = self._writer.catalog
        last = catalog.last
        if last is None:
            return None
        fetch.check_objects(self._writer.storage, catalog, [last.dense])
        dense = fetch.read_dense(self._writer.storage, last.dense)
        stored = read_state(dense, self._spec, where=last.dense.describe())
        is_ours = stored.timeline == self._attempts.timeline
        applied = stored.applied if is_ours else ((),) * self._spec.servers
        if not stored.is_apart:
            self._must_be_base = "the rows are divided among other servers"
            applied = ((),) * self._spec.servers
        loading = Loading(
            self._place,
            catalog=catalog.number,
            step=last.step,
            is_apart=stored.is_apart,
            wants_held=not self.is_partial,
        )
        return Restore(loading, self.is_partial, applied, stored.batches)

    # Saving.

    def _save_quietly(self) -> None:
        """A save in the background: one that is given up is told, and tried again later."""
        with self._turn:
            try:
                self._save(None, self.settings.patience_s)
            except ConflictError as error:
                self._failure = error
            except Exception as error:  # a thread's edge; training goes on
                text = str(error) or repr(error)
                self._cluster.log.emit(events.SaveFailed(step=self._at or 0, error=text))

    def _save(self, step: int | None, timeout_s: float) -> CheckpointEntry:
        self._writer.settle()
        history = self._history()
        saved = self._attempts.save(
            step,
            self._plan(history),
            self._plan_codec(restores=history.restores),
            committed=self._at,
            timeout_s=timeout_s,
        )
        if saved is None:
            assert history.last is not None
            return history.last
        self._move_to(saved)
        self._must_be_base = None
        return saved

    def _move_to(self, saved: CheckpointEntry) -> None:
        """The cluster descends from a checkpoint that was just committed."""
        if saved.step == self._at:
            return
        if self._rounds.saved(is_base=saved.kind == BASE):
            self._behind = 0
        else:
            self._behind += saved.step - (self._at or 0)
        self._at = saved.step

    def _history(self) -> Catalog:
        catalog = self._writer.catalog
        last = catalog.last
        if last is not None and last.step == self._attempts.committing:
            self._move_to(last)  # also where the answer to its commit was lost
        if last is not None and last.step != self._at:
            raise InvalidRequestError(
                "there are checkpoints here already",
                url=self._writer.storage.url,
                last_step=last.step,
                todo="call resume() first, or give a new url",
            )
        return catalog

    def _plan(self, history: Catalog) -> BaseChoice:
        must_be_base = self._must_be_base
        last = history.last
        if last is not None and history.schema_of(last) != self._attempts.schemas:
            must_be_base = "the tables are others"
        return plan_checkpoint(
            self.strategy.base,
            history.delta_sizes() if last is not None else None,
            must_be_base=must_be_base,
            measured=measure(history) if self.strategy.base == "recovery-time" else None,
        )

    def _plan_codec(self, *, restores: int) -> CodecPlan:
        settings = self.settings
        return plan_codec(
            settings.codec if settings.codec is not None else self.strategy.codec,
            settings.state_codec,
            expected_restores=settings.expected_restores,
            restores=restores,
        )


def _checked(strategy: Strategy) -> Strategy:
    """A strategy as a cluster can follow it: without a grid."""
    check_policy(strategy.base)
    return dataclasses.replace(strategy, extract=None, rollups=None)
