"""What the ranks that save one model do as one, on the training thread; one process is one of one.

    save:     every rank's facts -> rank 0's plan -> a committer for it, on every rank
    restore:  rank 0's catalog -> every rank loads its part -> all could, or all raise

Invariants:
- All ranks go through the same exchanges in the same order; an error on one is held back until the
  others can hear of it. A process by itself raises it at once.
- One process, rank 0, has the ``RunWriter``: it alone decides and commits.

Not here: messages (ranks.py), what is agreed on (agreement.py), the commits
(checkpoint/saving/commit.py,
rank_commit.py).
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast import events
from holdfast.checkpoint.format.catalog import Catalog
from holdfast.checkpoint.planning.save_plan import RunRules, SavePlan
from holdfast.checkpoint.ranks.agreement import Agreement, ChangedBytes, number_of
from holdfast.checkpoint.ranks.rank_commit import Coordinator, Follower
from holdfast.checkpoint.ranks.ranks import Ranks
from holdfast.checkpoint.saving.commit import Alone, Committer
from holdfast.checkpoint.store import catalogs
from holdfast.checkpoint.store.writer import FollowingWriter, RunWriter
from holdfast.errors import InvalidRequestError, UnavailableError
from holdfast.model.model_state import ModelState
from holdfast.model.schema import TableSchema
from holdfast.storage.base import Storage


class Together:
    """One process's part in what all of them do; ``ranks`` None: there are no others."""

    def __init__(
        self,
        ranks: Ranks | None,
        storage: Storage,
        found: Catalog | None,
        *,
        rules: str,
        log: events.EventLog,
        clock: Callable[[], float],
    ) -> None:
        """``found``: the run's catalog; ``rules``: what must be the same on every rank."""
        self._ranks = ranks
        self._storage = storage
        self._agreement = None if ranks is None else Agreement(ranks, rules)
        self._before: SavePlan | None = None
        self.run_writer: RunWriter | None = None
        self.writer: RunWriter | FollowingWriter
        if ranks is None or ranks.is_coordinator:
            self.writer = self.run_writer = RunWriter(storage, found, log=log, clock=clock)
        else:
            self.writer = FollowingWriter(storage, log=log, clock=clock)

    @property
    def is_many(self) -> bool:
        """Whether there are other ranks."""
        return self._ranks is not None

    @property
    def commits(self) -> bool:
        """Whether this process decides and commits."""
        return self.run_writer is not None

    @property
    def rank(self) -> int:
        """Which of the ranks this is."""
        return 0 if self._ranks is None else self._ranks.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return 1 if self._ranks is None else self._ranks.size

    def hold_back(self, error: Exception) -> Exception:
        """An error that the others wait to hear of, to be passed to the next exchange; where there
        are none it is raised."""
        if self._ranks is None:
            raise error
        return error

    def attempt(self, act: Callable[[], object]) -> Exception | None:
        """Do one's part of something; the error it ended with, held back for ``check_all``."""
        try:
            act()
        except Exception as error:
            return self.hold_back(error)
        return None

    def check_all(self, error: Exception | None, doing: str) -> None:
        """Wait until all have done their parts.

        Raises:
            HoldfastError: this rank's own ``error``, or one that names the ranks that failed.
        """
        if self._ranks is not None:
            self._ranks.check_all(error, doing)

    def check_same(self, wish: str, doing: str) -> None:
        """Refuse, on all ranks, what they do not all ask for alike.

        Raises:
            InvalidRequestError: others ask for something else.
        """
        if self._ranks is None:
            return
        wishes = [number for (number,) in self._ranks.gather_numbers([number_of(wish)])]
        if len(set(wishes)) > 1:
            raise InvalidRequestError(
                f"ranks do not all {doing}",
                rank=self.rank,
                wish=wish,
                todo="call it with the same arguments on all ranks",
            )

    def same_catalog(self, settle: Callable[[], None]) -> Catalog:
        """The catalog to load from, the same on all ranks: rank 0's, once it has settled what
        became of its last commit."""
        writer = self.run_writer
        if writer is None:
            return self._told_catalog()
        number = -1
        try:
            settle()
            number = writer.catalog.number
        finally:
            if self._ranks is not None:
                self._ranks.broadcast(str(number).encode())
        return writer.catalog

    def _told_catalog(self) -> Catalog:
        assert self._ranks is not None
        number = int(self._ranks.broadcast(None))
        if number < 0:
            raise UnavailableError("rank 0 could not find the run's catalog")
        return catalogs.load(self._storage, number) if number > 0 else self.writer.catalog

    def agree(
        self,
        step: int,
        state: ModelState,
        *,
        changed: ChangedBytes,
        error: Exception | None,
        rules: RunRules,
        has_annotations: bool = False,
        plan: Callable[[RunWriter, tuple[TableSchema, ...], ChangedBytes], SavePlan],
    ) -> SavePlan:
        """What is saved now; the same everywhere, or nothing anywhere.

        ``plan`` is asked where the run is known, with the tables and the changed bytes of all
        ranks. ``rules`` are the same on all of them. ``has_annotations``: this rank was given some;
        those of rank 0 are stored.

        Raises:
            HoldfastError: this rank's own ``error``, or others cannot take part, or nothing can be
                saved now.
        """
        writer = self.run_writer
        if self._agreement is None:
            assert writer is not None
            return plan(writer, state.schemas(), changed)
        of_all = self._agreement.gather(step, state.tables, changed=changed, error=error,
                                        has_annotations=has_annotations)  # fmt: skip
        made: SavePlan | None = None
        refusal: Exception | None = None
        if writer is not None:
            try:
                made = plan(writer, self._agreement.schemas, of_all)
            except Exception as caught:
                refusal = caught
        return self._agreement.share_plan(made, rules, refusal)

    def share(self, number: int) -> int:
        """Rank 0's number, on every rank; the others pass any.

        Raises:
            UnavailableError: a rank is lost.
        """
        if self._ranks is None:
            return number
        return int(self._ranks.broadcast(str(number).encode() if self.commits else None))

    def make_committer(self, plan: SavePlan) -> Committer:
        """What commits this process's part of a save."""
        if self._ranks is None:
            assert self.run_writer is not None
            return Alone(self.run_writer)
        if self.run_writer is None:
            assert isinstance(self.writer, FollowingWriter)
            return Follower(self._ranks, plan, self.writer)
        before, self._before = self._before, plan
        return Coordinator(self._ranks, plan, self.run_writer, before=before)

    def leave(self, *, is_orderly: bool) -> None:
        """This process takes no further part."""
        if self._ranks is not None:
            self._ranks.farewell(is_orderly=is_orderly)
