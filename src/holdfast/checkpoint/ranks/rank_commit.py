"""One checkpoint of many ranks: each stores its part, rank 0 commits when all are durable.

    every rank:  rows -> its own object -> "stored" (segments, reader, random state)
    rank 0:      all "stored" -> dense object -> ONE catalog -> verdict
    every rank:  verdict -> the save is over

All of it happens on background threads; training goes on. Ranks show that they live as long as a
save lasts, and nobody waits for one that has gone silent.

Invariants:
- Nothing is committed unless every rank's object is durable.
- All ranks hear the same verdict, or an error that says that it is not known.
- After a verdict of failure each rank deletes its own object; what a dead rank leaves behind goes
  after the next commit.
- A rank that does not know the verdict deletes nothing: its object may be committed.

Not here: what is saved (agreement.py), messages (mailbox.py), the commit itself
(checkpoint/store/append.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.checkpoint.format import tree
from holdfast.checkpoint.format.object import ROWS, object_name
from holdfast.checkpoint.format.stored_rows import StoredRows, joined
from holdfast.checkpoint.planning.save_plan import SavePlan
from holdfast.checkpoint.ranks.mailbox import Watch
from holdfast.checkpoint.ranks.ranks import Ranks
from holdfast.checkpoint.saving.cancellation import Cancellation
from holdfast.checkpoint.saving.commit import CommitInput, Committed, commit_stored
from holdfast.checkpoint.saving.snapshot import DenseState
from holdfast.checkpoint.store.writer import FollowingWriter, RunWriter
from holdfast.errors import HoldfastError, SaveCancelledError, UnavailableError

_LENGTH_BYTES = 8
_OF_TABLES = ("row_state_shapes", "table_state")
_OF_RANKS = ("rng", "extras")


def rows_name(plan: SavePlan, rank: int) -> str:
    """What a rank's object is called."""
    return object_name(plan.number, ROWS, f"{plan.token}-{rank}")


class _Keys:
    """Where the messages of one save are."""

    def __init__(self, plan: SavePlan) -> None:
        self._of = plan.token

    def stored(self, rank: int) -> str:
        return f"{self._of}/stored/{rank}"

    def beat(self, rank: int) -> str:
        return f"{self._of}/beat/{rank}"

    @property
    def cancel(self) -> str:
        return f"{self._of}/cancel"

    @property
    def verdict(self) -> str:
        return f"{self._of}/verdict"


def _pack(part: StoredRows, own: bytes) -> bytes:
    text = json.dumps({"part": part.to_json()}).encode()
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + own


def _unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    return json.loads(data[_LENGTH_BYTES:end]), data[end:]


def _failure(error: BaseException) -> bytes:
    text = json.dumps({"error": str(error) or repr(error),
                       "is_cancelled": isinstance(error, SaveCancelledError)}).encode()  # fmt: skip
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class Follower:
    """The committer of any other rank: hands in its part, waits for the verdict."""

    def __init__(self, ranks: Ranks, plan: SavePlan, writer: FollowingWriter) -> None:
        self._ranks = ranks
        self._keys = _Keys(plan)
        self._writer = writer
        self._has_told = False
        self.rows_object: str | None = rows_name(plan, ranks.rank)

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Show that this rank lives."""
        with self._ranks.mailbox.beating(self._keys.beat(self._ranks.rank)):
            yield

    def commit(self, stored: CommitInput) -> Committed:
        """Hand in what is stored and wait for the verdict."""
        box, keys, cancellation = self._ranks.mailbox, self._keys, stored.cancellation
        own = tree.to_bytes(stored.dense.structure, stored.dense.tensors)
        names = [name for name, _ in stored.rows.objects]
        self._writer.keep(names)  # from here on they may be committed
        box.put(keys.stored(self._ranks.rank), _pack(stored.rows, own))
        self._has_told = True
        watch = Watch(box, [(0, keys.beat(0))], timeout_s=self._ranks.timeout_s)
        has_cancelled = False
        while (data := box.get(keys.verdict)) is None:
            if cancellation.is_asked and not has_cancelled:
                box.put(keys.cancel, b"")
                has_cancelled = True
            watch.check([0], what="committing; whether the checkpoint exists is not known")
        verdict = json.loads(data)
        if verdict["is_committed"]:
            written = sum(size for _, size in stored.rows.objects)
            return Committed(written, verdict["full_bytes"], stored.seconds)
        if not verdict["is_unsure"]:
            self._writer.let_go(names)
        step = stored.plan.step
        if verdict["is_cancelled"]:
            raise SaveCancelledError("a newer save took its place", step=step)
        raise UnavailableError("the checkpoint was given up", step=step, error=verdict["error"])

    def give_up(self, error: BaseException) -> None:
        """Tell rank 0 that this rank's part will not come."""
        if not self._has_told:
            self._has_told = True
            with contextlib.suppress(UnavailableError):  # then its silence tells
                self._ranks.mailbox.put(self._keys.stored(self._ranks.rank), _failure(error))


class Coordinator:
    """The committer of rank 0: waits for all parts, commits, tells the verdict."""

    def __init__(
        self, ranks: Ranks, plan: SavePlan, writer: RunWriter, *, before: SavePlan | None
    ) -> None:
        """``before``: of the save before, whose verdict every rank has heard by now."""
        self._ranks = ranks
        self._keys = _Keys(plan)
        self._before = before
        self._writer = writer
        self._names = [rows_name(plan, rank) for rank in range(ranks.size)]
        self._committed: Committed | None = None
        self._has_told = False
        self.rows_object: str | None = self._names[0]
        writer.expect(self._names[1:])

    @contextlib.contextmanager
    def taking_part(self) -> Iterator[None]:
        """Show that this rank lives."""
        with self._ranks.mailbox.beating(self._keys.beat(0)):
            yield

    def commit(self, stored: CommitInput) -> Committed:
        """Wait for what the others stored, then commit all of it at once."""
        if self._before is not None:
            forget_messages(self._ranks, self._before)
        parts, states = self._collect(stored.cancellation, stored.plan.step)
        own = tree.unflatten(stored.dense.structure, stored.dense.tensors)
        merged = DenseState(*tree.flatten(merge_dense(own, states)))
        rows = joined([stored.rows, *parts])
        self._committed = commit_stored(
            self._writer,
            dataclasses.replace(stored, rows=rows, dense=merged),
            rank_states=[_of_rank(state) for state in (own, *states)],
        )
        self._tell_commit(self._committed)
        return self._committed

    def _tell_commit(self, committed: Committed) -> None:
        self._tell({"is_committed": True, "full_bytes": committed.full_bytes})

    def _collect(self, cancellation: Cancellation, step: int) -> tuple[list[StoredRows], list[Any]]:
        box, keys, size = self._ranks.mailbox, self._keys, self._ranks.size
        others = range(1, size)
        beats = [(rank, keys.beat(rank)) for rank in others]
        watch = Watch(box, beats, timeout_s=self._ranks.timeout_s)
        found: dict[int, tuple[StoredRows, Any]] = {}
        while len(found) < size - 1:
            cancellation.check()
            if box.has(keys.cancel):
                raise SaveCancelledError("a newer save took its place", step=step)
            for rank in others:
                data = None if rank in found else box.get(keys.stored(rank))
                if data is not None:
                    found[rank] = self._parse(rank, data, step)
                    box.delete(keys.stored(rank))
            watch.check([r for r in others if r not in found], what="storing their rows")
        return [found[rank][0] for rank in others], [found[rank][1] for rank in others]

    def _parse(self, rank: int, data: bytes, step: int) -> tuple[StoredRows, Any]:
        values, state = _unpack(data)
        if values.get("is_cancelled"):
            raise SaveCancelledError("a newer save took its place", step=step)
        if "error" in values:
            raise UnavailableError("a rank could not store its rows", rank=rank,
                                   error=values["error"])  # fmt: skip
        part = StoredRows.from_json(values["part"])
        named = {name for name, _ in part.objects}
        named |= {entry.extent.object for entry in part.segments}
        if not named <= {self._names[rank]}:
            raise HoldfastError("a rank wrote other objects than it was told", rank=rank,
                                objects=sorted(named))  # fmt: skip
        return part, tree.from_bytes(state)

    def give_up(self, error: BaseException) -> None:
        """Tell everybody that nothing was committed, or that it is not known."""
        if self._committed is not None:  # what failed came after it
            self._tell_commit(self._committed)
            return
        is_unsure = self._writer.is_unsure
        if not self._has_told:
            self._writer.give_up_on(self._names[1:])
        self._tell({
            "is_committed": False,
            "is_unsure": is_unsure,
            "is_cancelled": isinstance(error, SaveCancelledError),
            "error": str(error) or repr(error),
        })  # fmt: skip

    def _tell(self, verdict: Mapping[str, Any]) -> None:
        if self._has_told:
            return
        self._has_told = True
        with contextlib.suppress(UnavailableError):  # the others will miss it, and say so
            self._ranks.mailbox.put(self._keys.verdict, json.dumps(verdict).encode())


def forget_messages(ranks: Ranks, plan: SavePlan) -> None:
    """Clean the store of a save's messages, once every rank has heard its verdict."""
    keys = _Keys(plan)
    for key in (keys.verdict, keys.cancel, *map(keys.stored, range(1, ranks.size))):
        ranks.mailbox.delete(key)
    for rank in range(ranks.size):
        ranks.mailbox.end_beat(keys.beat(rank))


def merge_dense(own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank 0's dense state, and what other ranks know of tables that it does not hold.

    >>> own = {"row_state_shapes": {"a": {}}, "table_state": {"a": {}}, "aliases": {},
    ...        "parameters": {"0": [["a", "top"]]}, "rng": 1}
    >>> more = {"row_state_shapes": {"b": {}}, "table_state": {"b": {"step": 3}}, "aliases": {},
    ...         "parameters": {"0": [["b", "top"]]}, "rng": 2}
    >>> merged = merge_dense(own, [more])
    >>> merged["table_state"], merged["parameters"], merged["rng"]
    ({'a': {}, 'b': {'step': 3}}, {'0': [['a', 'top', 'b']]}, 1)
    """
    merged = dict(own)
    for kind in _OF_TABLES:
        tables: dict[str, Any] = {}
        for state in (own, *others):
            for name, values in state[kind].items():
                # Where a shard was never trained it knows less than another of the same table.
                if name not in tables or len(values) > len(tables[name]):
                    tables[name] = values
        merged[kind] = tables
    states = (own, *others)
    merged["aliases"] = {name: of for state in states for name, of in state["aliases"].items()}
    merged["parameters"] = {
        key: _merge_groups([state["parameters"].get(key, ()) for state in states])
        for key in own["parameters"]
    }
    return merged


def _merge_groups(orders: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Parameters of an optimizer on all ranks: tables of others come after what rank 0 has."""
    return [
        list(dict.fromkeys(itertools.chain(*(order[at] for order in orders if at < len(order)))))
        for at in range(len(orders[0]))
    ]


def _of_rank(state: Mapping[str, Any]) -> bytes:
    return tree.to_bytes(*tree.flatten({kind: state[kind] for kind in _OF_RANKS}))
