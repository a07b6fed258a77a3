"""A run's writer: commits catalogs, notices when it has lost the run, deletes what is dead.

Invariants:
- Nothing is deleted before the commit that no longer names it, and nothing at all by a writer that
  lost the run to another.
- After a conflict every further commit is refused; after an unknown outcome the next commit is
  built only on what storage says.

Not here: what a catalog is and the atomic put (catalog.py), filling objects (save.py).
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable

from holdfast import events
from holdfast.checkpoint import catalog as catalogs
from holdfast.checkpoint.catalog import Catalog
from holdfast.checkpoint.object import number_of
from holdfast.errors import ConflictError, UnavailableError
from holdfast.storage.base import Storage


class RunWriter:
    """Owns a run's catalog for one training process."""

    def __init__(
        self,
        storage: Storage,
        catalog: Catalog | None,
        *,
        log: events.EventLog,
        clock: Callable[[], float],
    ) -> None:
        self.storage = storage
        self.log = log
        self.clock = clock
        self.token = secrets.token_hex(8)
        self.catalog = catalog or Catalog(run=secrets.token_hex(8), number=0, writer=self.token)
        self._fence: ConflictError | None = None
        self._has_listed = False
        self._is_unsure = False

    @property
    def next_number(self) -> int:
        """The number of the catalog to be committed next."""
        return self.catalog.number + 1

    def commit(self, catalog: Catalog) -> None:
        """Commit the next catalog, then delete what it no longer names.

        Raises:
            ConflictError: another writer owns the run; from then on every commit is refused.
            UnavailableError: the commit failed, or whether it did is unknown.
        """
        if self._fence is not None:
            raise self._fence
        next_ = dataclasses.replace(catalog, number=self.next_number, writer=self.token)
        try:
            catalogs.commit(self.storage, next_)
            self._check_newest(next_.number)
        except ConflictError as error:
            self._fence = error
            raise
        except UnavailableError:
            self._is_unsure = True
            self._has_listed = False
            raise
        previous, self.catalog = self.catalog, next_
        self._collect(previous)

    def _check_newest(self, number: int) -> None:
        # Old catalogs are deleted, so a writer that slept through several commits of another could
        # still find its next number free. It then finds higher ones, and has lost the run.
        try:
            newest = catalogs.numbers(self.storage)[-1]
        except UnavailableError:
            # The put was confirmed; the next commit asks again, and until then nothing is deleted.
            self._has_listed = False
            return
        if newest > number:
            raise catalogs.conflict(self.storage, newest)

    def settle(self) -> bool:
        """After a commit whose outcome is unknown: find out; True if it was carried out after all.

        Raises:
            ConflictError: another writer committed meanwhile.
        """
        if not self._is_unsure:
            return False
        found = catalogs.load_last(self.storage)
        was_carried_out = found is not None and found.number != self.catalog.number
        if found is not None and was_carried_out:
            if found.writer != self.token:
                self._fence = catalogs.conflict(self.storage, found.number)
                raise self._fence
            self.catalog = found
        self._is_unsure = False
        return was_carried_out

    def _collect(self, previous: Catalog) -> None:
        """Delete what no checkpoint needs; a failure here costs space, never data."""
        try:
            if self._has_listed:
                kept = {name for name, _ in self.catalog.objects}
                dead = [(name, size) for name, size in previous.objects if name not in kept]
                old = [catalogs.name_of(self.catalog.number - 2)]
            else:
                dead, old = self._leftovers()
                self.storage.clean()
                self._has_listed = True
            for name, _ in dead:
                self.storage.delete(name)
            for name in old:
                self.storage.delete(name)
        except Exception as error:  # the commit stands, whatever a storage raises here
            self._has_listed = False  # list everything again after the next commit
            self.log.emit(events.CollectionFailed(error=str(error) or repr(error)))
            return
        if dead:
            total = sum(size for _, size in dead)
            self.log.emit(events.ObjectsDeleted(objects=len(dead), bytes=total))

    def _leftovers(self) -> tuple[list[tuple[str, int]], list[str]]:
        """What earlier writers left behind: objects of commits that never came, old catalogs.

        An object written for a number that is now taken can never be committed.
        """
        kept = {name for name, _ in self.catalog.objects}
        dead = []
        for item in self.storage.list("objects/"):
            number = number_of(item.name)
            if item.name not in kept and number is not None and number <= self.catalog.number:
                dead.append((item.name, item.bytes))
        old = [
            catalogs.name_of(number)
            for number in catalogs.numbers(self.storage)
            if number < self.catalog.number - 1
        ]
        return dead, old
