"""A run's writer: commits catalogs, notices when it has lost the run, deletes what is dead.

Invariants:
- Nothing is deleted before the commit that no longer names it, and nothing at all by a writer that
  lost the run to another.
- After a conflict every further commit is refused; after an unknown outcome the next commit is
  built only on what storage says.
- Saves and extraction commit in turn: each change is made to the catalog as it is then.
- An object that is being written, or waits for its commit, is not taken for a leftover.
- Claims about steps after the last checkpoint are dropped before anything is built on them.

Of many ranks one has a ``RunWriter``; the others write objects for its commits, as a
``FollowingWriter``.

Not here: what a catalog is and the atomic put (checkpoint/format/catalog.py), filling objects
(checkpoint/saving/save.py, checkpoint/grid/extract.py).
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from holdfast import events
from holdfast.checkpoint.format.catalog import Catalog, SegmentEntry
from holdfast.checkpoint.format.object import ROWS, ObjectBuilder, number_of, object_name
from holdfast.checkpoint.format.segment import EncodedSegment
from holdfast.checkpoint.store import catalogs
from holdfast.errors import ConflictError, NotFoundError, UnavailableError
from holdfast.storage.base import Storage


def store_segment(
    builder: ObjectBuilder, encoded: EncodedSegment, *, table: str, born: int, died: int | None
) -> SegmentEntry:
    """Add a segment to an object; what the catalog will say of it."""
    return SegmentEntry(
        table=table,
        born=born,
        died=died,
        rows=encoded.rows,
        first=encoded.first,
        last=encoded.last,
        extent=builder.append(ROWS, table, encoded.buffers, encoded.checksum),
    )


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
        new = Catalog(run=secrets.token_hex(8), number=0, writer=self.token)
        self.catalog = new if catalog is None else catalog.without_future()
        self._lock = threading.RLock()
        self._uncommitted: set[str] = set()
        self._doubtful: set[str] = set()
        self._fence: ConflictError | None = None
        self._has_listed = False
        self._is_unsure = False

    @property
    def next_number(self) -> int:
        """The number of the catalog to be committed next."""
        return self.catalog.number + 1

    @contextmanager
    def new_object(self, kind: str, name: str | None = None) -> Iterator[ObjectBuilder]:
        """Write an object: durable at the end of the block, or gone after an error.

        It belongs to a commit that is still to come; ``forget`` it if none comes.
        """
        with self._lock:
            name = name or object_name(self.next_number, kind, secrets.token_hex(4))
            self._uncommitted.add(name)
        builder: ObjectBuilder | None = None
        try:
            with self.storage.create(name) as out:
                builder = ObjectBuilder(name, out)
                yield builder
                if not builder.is_closed:
                    builder.close()
        except BaseException:
            if builder is not None and builder.is_closed:
                self.forget([name])
            self._uncommitted.discard(name)
            raise

    def expect(self, names: Iterable[str]) -> None:
        """Others write these objects for a commit to come: they are no leftovers until then."""
        with self._lock:
            self._uncommitted.update(names)

    def give_up_on(self, names: Iterable[str]) -> None:
        """The commit that others wrote for will not come: what they leave behind is deleted after
        the next one."""
        with self._lock:
            self._uncommitted.difference_update(set(names) - self._doubtful)
            self._has_listed = False

    @property
    def is_unsure(self) -> bool:
        """Whether a commit's outcome is not known."""
        return self._is_unsure

    def forget(self, names: Iterable[str]) -> None:
        """Delete objects that were written for a commit that will not come.

        Those of a commit that may have been carried out stay; ``settle`` finds out.
        """
        for name in names:
            if self._fence is not None or name not in self._uncommitted - self._doubtful:
                continue
            self._uncommitted.discard(name)
            try:
                self.storage.delete(name)
            except Exception as error:
                self._has_listed = False
                self.log.emit(events.CollectionFailed(error=str(error) or repr(error)))

    def update(self, change: Callable[[Catalog], Catalog | None]) -> Catalog | None:
        """Commit what ``change`` makes of the run's catalog, then delete what it no longer names.

        ``change`` returns None to leave everything as it is; the answer is what was committed.

        Raises:
            ConflictError: another writer owns the run; from then on every commit is refused.
            UnavailableError: the commit failed, or whether it did is unknown.
        """
        with self._lock:
            if self._fence is not None:
                raise self._fence
            self.settle()
            changed = change(self.catalog)
            if changed is None:
                return None
            next_ = dataclasses.replace(changed, number=self.next_number, writer=self.token)
            try:
                catalogs.commit(self.storage, next_)
                self._check_newest(next_.number)
            except ConflictError as error:
                self._fence = error
                raise
            except UnavailableError:
                self._is_unsure = True
                self._has_listed = False
                self._doubtful |= self._uncommitted & {name for name, _ in next_.objects}
                raise
            previous, self.catalog = self.catalog, next_
            self._uncommitted.difference_update(name for name, _ in next_.objects)
            self._collect(previous)
            return next_

    def note(self, change: Callable[[Catalog], Catalog]) -> None:
        """Change what the next commit will say."""
        with self._lock:
            self.catalog = change(self.catalog)

    def _check_newest(self, number: int) -> None:
        # Old catalogs are deleted, so a writer that slept through several commits of another could
        # still find its next number free. Then the one before it, its own last, is gone: they are
        # deleted in ascending order. That costs one request, and no listing; only a writer that
        # has not looked at everything since it took over, or since storage failed, lists.
        try:
            if self._has_listed:
                self.storage.size(catalogs.name_of(number - 1))
                return
            newest = catalogs.numbers(self.storage)[-1]
        except NotFoundError as error:
            raise catalogs.conflict(self.storage, number) from error
        except UnavailableError:
            # The put was confirmed; the next commit lists, and until then nothing is deleted.
            self._has_listed = False
            return
        if newest > number:
            raise catalogs.conflict(self.storage, newest)

    def settle(self) -> None:
        """After a commit whose outcome is unknown: find out what the run's catalog is now.

        Raises:
            ConflictError: another writer committed meanwhile.
        """
        if not self._is_unsure:  # without the lock: a round may hold it while it deletes
            return
        with self._lock:
            found = catalogs.load_last(self.storage)
            if found is not None and found.number != self.catalog.number:
                if found.writer != self.token:
                    self._fence = catalogs.conflict(self.storage, found.number)
                    raise self._fence
                self.catalog = found
            # Named now, or leftovers that the next commit deletes.
            self._uncommitted -= self._doubtful
            self._doubtful.clear()
            self._is_unsure = False

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
            for name in old:  # ascending, and none after a failure: _check_newest relies on it
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

        An object written for a number that is now taken by another process can never be committed.
        """
        kept = {name for name, _ in self.catalog.objects} | self._uncommitted
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


class FollowingWriter:
    """What a rank has that does not coordinate: it writes objects, and reads what is committed."""

    def __init__(
        self, storage: Storage, *, log: events.EventLog, clock: Callable[[], float]
    ) -> None:
        self.storage = storage
        self.log = log
        self.clock = clock
        self._kept: set[str] = set()

    @property
    def catalog(self) -> Catalog:
        """The run's catalog as it is now."""
        return catalogs.load_last(self.storage) or Catalog(run="", number=0, writer="")

    @contextmanager
    def new_object(self, kind: str, name: str | None = None) -> Iterator[ObjectBuilder]:
        """Write an object of the name that the coordinator gave: durable at the end of the block,
        or gone after an error."""
        assert name is not None
        with self.storage.create(name) as out:
            builder = ObjectBuilder(name, out)
            yield builder
            if not builder.is_closed:
                builder.close()

    def keep(self, names: Iterable[str]) -> None:
        """These may be committed: nobody is to delete them."""
        self._kept.update(names)

    def let_go(self, names: Iterable[str]) -> None:
        """These are not committed after all."""
        self._kept.difference_update(names)

    def forget(self, names: Iterable[str]) -> None:
        """Delete objects of a commit that did not come; what fails the coordinator does later."""
        for name in names:
            if name in self._kept:
                continue
            try:
                self.storage.delete(name)
            except Exception as error:
                self.log.emit(events.CollectionFailed(error=str(error) or repr(error)))

    def settle(self) -> None:
        """The coordinator finds out what became of a commit."""

    def note(self, change: Callable[[Catalog], Catalog]) -> None:
        """The coordinator notes it."""
