"""Delete checkpoints: one commit without them, then the objects that nobody needs any more."""

from __future__ import annotations

import time
from collections.abc import Collection

from holdfast import events
from holdfast.checkpoint.format.catalog import Catalog
from holdfast.checkpoint.planning.deletion import Deletion, plan_deletion
from holdfast.checkpoint.store import catalogs
from holdfast.checkpoint.store.writer import RunWriter
from holdfast.errors import NotFoundError
from holdfast.storage.base import Storage


def delete_checkpoints(
    writer: RunWriter, steps: Collection[int], *, descends_from: int | None = None
) -> Deletion:
    """Commit a catalog without these steps; what other steps read stays.

    Raises:
        NotFoundError: no such step.
        InvalidRequestError: a step is needed, or none would be left.
        ConflictError: another writer owns the run.
    """
    deletion: Deletion | None = None

    def change(current: Catalog) -> Catalog:
        nonlocal deletion
        deletion = plan_deletion(current, steps, descends_from=descends_from)
        return deletion.catalog

    writer.update(change)
    assert deletion is not None
    writer.log.emit(events.CheckpointsDropped(steps=deletion.steps, reason="deleted"))
    return deletion


def delete_from_run(storage: Storage, steps: Collection[int]) -> Catalog:
    """Take over a run that nobody trains, and delete these steps of it; the catalog afterwards.

    Raises:
        NotFoundError: no such run or step.
    """
    found = catalogs.load_last(storage)
    if found is None:
        raise NotFoundError("the run is gone", url=storage.url)
    writer = RunWriter(storage, found, log=events.EventLog(clock=time.time), clock=time.time)
    delete_checkpoints(writer, steps)
    return writer.catalog
