"""Partial recovery (CPR): rows of servers that failed come back as they were saved last.

    failed servers -> the step the model descends from -> their rows, and no others -> PLS

All else goes on as it is, so the model is of two times at once; what that costs is counted as lost
samples (lost_samples.py).

Invariants:
- Everything is checked before anything of the model is overwritten.
- After an error on the way the model is torn (checkpoint/planning/lineage.py).

Not here: reading and decoding rows (restore.py), going back as a whole (load.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from holdfast import events
from holdfast.checkpoint.planning.lineage import Lineage
from holdfast.checkpoint.restoring import restore
from holdfast.checkpoint.restoring.lost_samples import LostSamples
from holdfast.checkpoint.store.writer import FollowingWriter, RunWriter
from holdfast.errors import InvalidRequestError
from holdfast.model.model_state import ModelState
from holdfast.model.placement import Placement


class PartialRecovery:
    """Brings back the rows of servers; without a placement there are none."""

    def __init__(
        self,
        placement: Placement | None,
        state: ModelState,
        writer: RunWriter | FollowingWriter,
        *,
        lineage: Lineage,
        lost: LostSamples,
    ) -> None:
        self._placement = placement
        self._state = state
        self._writer = writer
        self._lineage = lineage
        self._lost = lost

    def check(self, servers: Iterable[int]) -> tuple[int, ...]:
        """The servers that failed, each once.

        Raises:
            InvalidRequestError: there are no such servers.
        """
        if self._placement is None:
            raise InvalidRequestError(
                "the rows are not divided among servers", todo="pass servers= to the Checkpointer"
            )
        failed = tuple(sorted(set(servers)))
        for server in failed:
            self._placement.check_server(server)
        return failed

    def run(self, failed: tuple[int, ...]) -> restore.RestoreStats:
        """Bring back the rows of these servers and count what is lost by it; nothing may be stored
        or deleted meanwhile.

        Raises:
            InvalidRequestError: nothing is saved, or the rows of these servers are not stored
                apart.
            CorruptDataError: names what is damaged.
        """
        step = self._lineage.origin()
        started = time.perf_counter()
        storage, catalog, state = self._writer.storage, self._writer.catalog, self._state
        entry = catalog.checkpoint(step)
        if catalog.sharding is not None and catalog.sharding.placement != self._placement:
            raise InvalidRequestError(
                "the rows are stored apart by other servers",
                stored=catalog.sharding.placement,
                given=self._placement,
                todo="save once with these servers, or restore the whole model",
            )
        state.follow_model()
        state.check_schemas(catalog.schema_of(entry))
        restore.check_complete(catalog, step, failed)
        with self._lineage.torn():
            targets = {table.name: table.arrays() for table in state.tables}
            stats = restore.restore_rows(storage, catalog, step, targets, servers=failed)
            for table in state.tables:
                table.load_arrays(targets[table.name])
        self._writer.log.emit(
            events.Recovered(
                step=self._lineage.step,
                checkpoint_step=step,
                servers=failed,
                rows=stats.rows,
                bytes=stats.bytes,
                seconds=time.perf_counter() - started,
                pls=self._lost.failed(failed),
            )
        )
        return stats
