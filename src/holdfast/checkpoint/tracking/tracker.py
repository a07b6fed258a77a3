"""Which rows may have changed, of all tables: what optimizers, writes and comparisons tell.

    optimizer.step -> watch of each table -> catch_up (at a save) -> cursors -> selection

One tracker with three settings. ``auto`` holds for every training loop. ``lookup`` keeps nothing
but one bit a row, and is refused where gradients do not tell all. ``hash`` compares every row at
every save.

Rows are counted as a process holds them (model/tables.py). Of a table that is replicated in many
processes, all see the same gradient.

Invariants:
- A row that changed is never missed: rows are marked in excess, never in want.
- Every cursor sees every mark once, however the other cursors advance.
- What a failed save had taken is given back before the next one is planned.

# words_W: a bitmap of a table's rows, W words (kernels/rows/bitmap.py)
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from holdfast.checkpoint.tracking.marks import (
    ArrivingIds,
    Ids,
    Marks,
    Words,
    all_rows,
    arriving_ids,
    union,
)
from holdfast.checkpoint.tracking.optimizers import rules, steps
from holdfast.checkpoint.tracking.optimizers.owned import Owned, find_overlaps
from holdfast.checkpoint.tracking.watch import Notice, TableWatch
from holdfast.errors import InvalidRequestError
from holdfast.kernels.rows import bitmap
from holdfast.model.tables import Table

AUTO: Final = "auto"
LOOKUP: Final = "lookup"
HASH: Final = "hash"
TRACKING = (AUTO, LOOKUP, HASH)

Hear = Callable[[str, Ids], None]


class Tracker:
    """Sees changes of a model's tables and hands out cursors."""

    def __init__(
        self,
        tables: Iterable[Table],
        *,
        tracking: str = AUTO,
        spans: Mapping[str, range] | None = None,
    ) -> None:
        """``spans``: by table, the rows that this process saves, where others save the rest.

        Raises:
            InvalidRequestError: no such setting, or ``lookup`` would miss rows.
        """
        if tracking not in TRACKING:
            raise InvalidRequestError("unknown tracking", tracking=tracking, known=list(TRACKING))
        self._tables = list(tables)
        if tracking == LOOKUP:
            check_gradients_suffice(self._tables)
        self._watches = {
            table.name: TableWatch(
                table,
                (spans or {}).get(table.name, range(table.rows)),
                has_hashes=tracking != LOOKUP,
                is_compared=tracking == HASH,
            )
            for table in self._tables
        }
        self._live: Marks = {table.name: bitmap.new(table.rows) for table in self._tables}
        self._pending: dict[Cursor, Marks] = {}
        self._lock = threading.RLock()
        self._listeners: list[Hear] = []
        self._arriving: deque[tuple[str, ArrivingIds]] = deque()
        # By identity: an optimizer may compare by value, and have no hash.
        self._owned: dict[int, tuple[weakref.ref[torch.optim.Optimizer], Owned]] = {}
        self._is_flushing = _is_flushing()
        self._ends: list[Callable[[], None]] = []
        if self._tables:
            self._watch_tables()

    def _watch_tables(self) -> None:
        for watch in self._watches.values():
            table = watch.table
            if table.watch is not None:  # its library tells which rows it changes
                self._ends.append(table.watch(_Marker(self, table.name).mark))
        # Of every optimizer in the process: one that was not given moves tables just the same.
        steps.add_listener(self)

    # While training.

    def mark(self, table: str, ids: Ids | torch.Tensor) -> None:
        """Declare rows changed; a tensor of ids may be on a device, and is not waited for."""
        with self._lock:
            if isinstance(ids, np.ndarray):
                self._watches[table].mark(ids)
                self._tell(table, ids)
                return
            self._watches[table].mark_tensor(ids)
            if self._listeners:
                self._tell(table, arriving_ids(ids))

    def mark_all(self) -> None:
        """Declare every row of every table changed."""
        with self._lock:
            for watch in self._watches.values():
                watch.mark_all()

    def listen(self, hear: Hear) -> None:
        """Tell of every row that changed, the table and the ids: at each step as often as the
        gradient names it, and at a save the rows that changed without a gradient."""
        with self._lock:
            self._listeners.append(hear)

    def _tell(self, table: str, ids_N: Ids | ArrivingIds) -> None:
        """Tell listeners of rows: at once, or when they have arrived from a device."""
        if isinstance(ids_N, ArrivingIds):
            self._arriving.append((table, ids_N))
            self._tell_arrived()
            return
        for hear in self._listeners:
            hear(table, ids_N)

    def _tell_arrived(self, *, all_of_them: bool = False) -> None:
        """Tell of rows that have arrived, in their order; ``all_of_them``: wait for the rest."""
        while self._arriving and (all_of_them or self._arriving[0][1].is_here()):
            table, arriving = self._arriving.popleft()
            self._tell(table, arriving.ids())

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: notice what wrote to its tables since."""
        with self._lock:
            owned = self._owned_by(optimizer)
            with contextlib.suppress(Exception):  # then the watches look, and tell what fails
                owned.begin_step()
            for watch, _ in owned.tables(optimizer):
                try:
                    watch.before_step()
                except Exception as error:
                    watch.note_failure(error)

    def after_closure(self, optimizer: torch.optim.Optimizer) -> None:
        """Training code has run inside a step: notice what it wrote."""
        with self._lock:
            owned = self._owned_by(optimizer)
            owned.end_steady()
            for watch, mover in owned.tables(optimizer):
                try:
                    watch.after_closure(mover)
                except Exception as error:
                    watch.note_failure(error)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: mark the rows it moved."""
        with self._lock:
            owned = self._owned_by(optimizer)
            marked: list[TableWatch] = []
            with contextlib.suppress(Exception):  # then the watches look, and tell what fails
                marked = owned.end_step(optimizer)
            if self._listeners:
                for watch in marked:
                    with _going_on(watch):
                        self._tell(watch.table.name, watch.gradient_ids())
            for watch, mover in owned.tables(optimizer):
                try:
                    watch.after_step(mover)
                    if self._listeners:
                        self._tell(watch.table.name, watch.gradient_ids())
                except Exception as error:
                    watch.note_failure(error)
            with contextlib.suppress(Exception):
                owned.settle(optimizer)
            for watch in owned.overlapped:
                watch.note_foreign_write()

    def after_compiled_steps(self) -> None:
        """Optimizers have stepped inside compiled code, which does not say what it moves."""
        with self._lock:
            for watch in self._stepped_by_torch():
                watch.note_foreign_write()

    def _stepped_by_torch(self) -> list[TableWatch]:
        """The tables that torch's optimizers move, and not a library of their own."""
        return [
            watch
            for watch in self._watches.values()
            if watch.table.has_parameter and watch.table.watch is None
        ]

    def _owned_by(self, optimizer: torch.optim.Optimizer) -> Owned:
        """The tables among an optimizer's parameters; none where they cannot be found out."""
        known, owned = self._owned.get(id(optimizer), (None, None))
        try:
            is_known = known is not None and known() is optimizer
            if owned is None or not is_known or not owned.is_current(optimizer):
                if owned is not None:
                    owned.end_steady()
                owned = Owned(optimizer.param_groups, self._stepped_by_torch())
                self._owned[id(optimizer)] = (weakref.ref(optimizer), owned)
                for watch, _ in owned.tables(optimizer):
                    watch.note_optimizer(optimizer)
        except Exception as error:
            for watch in self._stepped_by_torch():
                watch.note_failure(error)
            return Owned([], [])
        return owned

    def _forget_owned(self) -> None:
        for _, owned in self._owned.values():
            owned.end_steady()
        self._owned.clear()

    # At a save.

    def cursor(self) -> Cursor:
        """A new reader that starts now."""
        with self._lock:
            if self._pending:
                self._find_changes(next(iter(self._pending)))
                self._fold()
            cursor = Cursor(self)
            self._pending[cursor] = {}
        return cursor

    def catch_up(self, cursor: Cursor) -> list[Notice]:
        """Find every change up to now, for all cursors to see; what there is to tell of it.

        ``cursor``: the one whose rows are saved.
        """
        notices: list[Notice] = []
        steps.tell_compiled_steps()
        with self._lock:
            self._note_flushing()
            self._find_changes(cursor)
            for watch in self._watches.values():
                notices += watch.notices
                watch.notices.clear()
        return notices

    def _find_changes(self, cursor: Cursor) -> None:
        pending = self._pending[cursor]
        self._settle()
        self._forget_owned()  # a table may have another parameter now
        find_overlaps(self._stepped_by_torch())
        for name, watch in self._watches.items():
            live_W = self._live[name]
            seen_W = live_W | pending[name] if name in pending else live_W
            found_W = all_rows(watch.table.rows)
            with _going_on(watch):
                found_W = watch.catch_up(seen_W)
            bitmap.union_into(live_W, found_W)
            if self._listeners and watch.without_gradient_W is not None:
                # They changed, so they must be able to become hot.
                self._tell(name, bitmap.ids(watch.without_gradient_W, 0, watch.table.rows))

    def _settle(self) -> None:
        """Wait for what devices have not told yet."""
        for watch in self._watches.values():
            with _going_on(watch):
                watch.table.settle()
        self._tell_arrived(all_of_them=True)

    def _note_flushing(self) -> None:
        """Notice ``torch.set_flush_denormal``: from then on a dense step rounds tiny numbers of
        any row to zero."""
        is_flushing = _is_flushing()
        if is_flushing != self._is_flushing:
            self._is_flushing = is_flushing
            for watch in self._watches.values():
                watch.note_foreign_write()

    def begin_save(self, table: str, *, is_whole: bool) -> None:
        """A save is about to copy every row of a table, or some of those that are marked."""
        watch = self._watches[table]
        with _going_on(watch):
            if is_whole:
                watch.begin_whole()
            else:
                watch.begin_part()

    def learn(
        self,
        table: str,
        ids_N: Ids | range,
        names: Sequence[str],
        columns: Sequence[np.ndarray],
    ) -> None:
        """These rows were copied for a save, with these values by the names of their columns."""
        watch = self._watches.get(table)
        if watch is not None and watch.hashes is not None:
            with _going_on(watch):
                watch.hashes.learn(ids_N, names, columns)

    def scan(self, cursor: Cursor) -> None:
        """Check the next part of the rows, in the background, after a save."""
        for name, watch in self._watches.items():
            with self._lock:
                seen_W = self._seen_by(cursor)[name]
            with _going_on(watch):
                watch.scan(seen_W)

    def end_save(self, *, is_committed: bool) -> None:
        """A save is over: rows that it had copied are known as saved, or not."""
        for watch in self._watches.values():
            if watch.hashes is not None:
                watch.hashes.end_save(is_committed=is_committed)

    def reset(self) -> None:
        """Forget every change, for every cursor: the tables were just loaded."""
        with self._lock:
            self._settle()
            for watch in self._watches.values():
                watch.reset()
            self._clear_live()
            for pending in self._pending.values():
                pending.clear()

    def close(self) -> None:
        """Stop watching the model."""
        steps.remove_listener(self)
        with self._lock:
            self._forget_owned()
        for end in self._ends:
            end()
        self._ends.clear()

    @property
    def bytes(self) -> int:
        """Memory that tracking keeps."""
        marks = [self._live, *self._pending.values()]
        kept = sum(words_W.nbytes for part in marks for words_W in part.values())
        return kept + sum(watch.bytes for watch in self._watches.values())

    # What cursors call.

    def _peek(self, cursor: Cursor) -> Marks:
        with self._lock:
            return self._seen_by(cursor)

    def _advance(self, cursor: Cursor) -> Marks:
        with self._lock:
            seen = self._seen_by(cursor)
            self._pending[cursor] = {}
            self._fold(skip=cursor)
        return seen

    def _seen_by(self, cursor: Cursor) -> Marks:
        seen = {name: words_W.copy() for name, words_W in self._live.items()}
        union(seen, self._pending[cursor])
        return seen

    def _give_back(self, cursor: Cursor, marks: Mapping[str, Words]) -> None:
        with self._lock:
            union(self._pending[cursor], marks)

    def _fold(self, skip: Cursor | None = None) -> None:
        # Only cursors that did not advance now keep a bitmap of their own: with one cursor the
        # cost stays one bit a row.
        for cursor, pending in self._pending.items():
            if cursor is not skip:
                union(pending, self._live)
        self._clear_live()

    def _clear_live(self) -> None:
        for words_W in self._live.values():
            words_W[:] = 0


class Cursor:
    """One reader's place in the stream of changes."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def peek(self) -> Marks:
        """The rows that the tracker caught up with since this cursor last advanced."""
        return self._tracker._peek(self)

    def advance(self) -> Marks:
        """``peek``, and start afresh from there."""
        return self._tracker._advance(self)

    def give_back(self, marks: Mapping[str, Words]) -> None:
        """Count these rows as changed again (a save that took them failed, or a restore)."""
        self._tracker._give_back(self, marks)


@contextlib.contextmanager
def _going_on(*watches: TableWatch) -> Iterator[None]:
    """Whatever fails here, training goes on: the tables are compared, and the failure told."""
    try:
        yield
    except Exception as error:
        for watch in watches:
            watch.note_failure(error)


def _is_flushing() -> bool:
    """Whether this thread's arithmetic rounds tiny numbers to zero."""
    return bool(torch.tensor(1e-40, dtype=torch.float32, device="cpu").mul_(1.0) == 0)


class _Marker:
    """What a table's own library calls; does not keep the tracker alive."""

    def __init__(self, tracker: Tracker, table: str) -> None:
        self._tracker = weakref.ref(tracker)
        self._table = table

    def mark(self, ids: Ids | torch.Tensor) -> None:
        """Rows that the library has just changed."""
        tracker = self._tracker()
        if tracker is not None:
            tracker.mark(self._table, ids)


def check_gradients_suffice(tables: Iterable[Table]) -> None:
    """Refuse ``lookup`` where rows move that have no gradient.

    Raises:
        InvalidRequestError: names the tables and why, and what to do.
    """
    reasons = []
    for table in tables:
        if any(getattr(module, "max_norm", None) is not None for module in table.modules):
            reasons.append(f"{table.name}: max_norm rewrites rows when they are looked up")
        if table.watch is not None or table.optimizer is None:
            continue
        for group in table.optimizer.param_groups:
            if any(parameter is table.parameter for parameter in group["params"]):
                rule = rules.rule_of(
                    table.optimizer,
                    group,
                    dtype=str(table.parameter.dtype).removeprefix("torch."),
                    is_sparse=any(getattr(module, "sparse", False) for module in table.modules),
                )
                if rule.moves != rules.GRADIENT:
                    reasons.append(f"{table.name}: {rule.reason}")
    if reasons:
        shown = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" * (len(reasons) > 3))
        raise InvalidRequestError(
            f"tracking='lookup' would miss rows that change ({shown})",
            todo="leave tracking out: tracking='auto' handles every optimizer",
        )
