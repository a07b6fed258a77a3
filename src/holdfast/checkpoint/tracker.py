"""Which rows may have changed: one bit a row, marked when the optimizer moves them.

    lookup -> gradient -> optimizer.step -> mark -> cursor.peek / cursor.advance -> selection

Two trackers with one interface. ``LookupTracker`` marks the rows that training looked up, at the
moment the optimizer applies their gradient; it costs a bit a row and next to no time, and holds for
optimizers that move only rows with a gradient. ``HashTracker`` compares a hash of every row with
the one before; it costs 8 bytes a row and a pass over the tables at each checkpoint, and holds for
any optimizer.

Rows are counted as a process holds them (tables.py). Of a table that is replicated in many
processes, rows that only others looked up change too; there gradients tell, and lookups do not.

Invariants:
- A row that changed is never missed: rows are marked in excess, never in want.
- Every cursor sees every mark once, however the other cursors advance.
- What a failed save had taken is given back before the next one is planned.
- A row that changed since the base is in ``SinceBase`` or still before the cursor.

Not here: which of the changed rows to save (selection.py); for which models marking lookups is not
enough (unseen.py).

# words_W: a bitmap of a table's rows, W words (kernels/bitmap.py)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from holdfast.checkpoint.unseen import check_lookups_suffice
from holdfast.errors import InvalidRequestError
from holdfast.kernels import bitmap
from holdfast.tables import Table

Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]  # or int32: the kernels take both
Marks = dict[str, Words]

LOOKUP, HASH = "lookup", "hash"

# Lookups between two optimizer steps (gradient accumulation) before they are merged into one set.
_LOOKUPS_MAX = 64


class Cursor(Protocol):
    """One reader's place in the stream of changes."""

    def peek(self) -> Marks:
        """The rows that changed since this cursor last advanced."""
        ...

    def advance(self) -> Marks:
        """``peek``, and start afresh from now."""
        ...

    def give_back(self, marks: Mapping[str, Words]) -> None:
        """Count these rows as changed again (a save that took them failed, or a restore)."""
        ...


class Tracker(Protocol):
    """Sees changes and hands out cursors."""

    def cursor(self) -> Cursor:
        """A new reader that starts now."""
        ...

    def mark(self, table: str, ids_N: Ids) -> None:
        """Declare rows changed."""
        ...

    def reset(self) -> None:
        """Forget every change: the tables were just loaded. Cursors then start from here."""
        ...

    def close(self) -> None:
        """Stop watching the model."""
        ...


class LookupTracker:
    """Marks the rows whose gradient an optimizer has just applied.

    Sparse gradients name their rows. For dense gradients the lookups since the last step are
    remembered by a forward hook; a gradient that no lookup explains (a compiled model, a
    functional call) is searched for rows that are not zero.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = list(tables)
        self._rows = {table.name: table.rows for table in self._tables}
        self._live: Marks = {name: bitmap.new(rows) for name, rows in self._rows.items()}
        self._pending: dict[LookupCursor, Marks] = {}
        self._looked_up: dict[str, list[Ids]] = {table.name: [] for table in self._tables}
        self._lock = threading.Lock()
        self._listeners: list[Callable[[str, Ids], None]] = []
        self._hooks: list[RemovableHandle] = []
        self._endings: list[Callable[[], None]] = []
        for table in self._tables:
            if table.watch is not None:  # it knows better what changes its rows
                self._endings.append(table.watch(functools.partial(self.mark, table.name)))
                continue
            for module in table.modules:
                if getattr(module, "max_norm", None) is not None:
                    self._hooks.append(_watch(module, _Marker(self, table.name)))
                # Of a replicated table other processes look up rows too: only the gradient, which
                # they share, tells of them.
                is_noted = not table.piece.is_replicated
                if is_noted and not all(module.sparse for module in table.modules):
                    self._hooks.append(_watch(module, _Noter(self, table.name)))
        self._trained = [table for table in self._tables if table.watch is None]
        for optimizer in _unique(table.optimizer for table in self._trained):
            self._hooks.append(optimizer.register_step_post_hook(_Stepped(self)))

    def cursor(self) -> LookupCursor:
        """A new reader that starts now."""
        with self._lock:
            if self._pending:
                self._fold()
            cursor = LookupCursor(self)
            self._pending[cursor] = {}
        return cursor

    def mark(self, table: str, ids_N: Ids) -> None:
        """Declare rows changed."""
        with self._lock:
            bitmap.mark(self._live[table], ids_N, self._rows[table])
            for hear in self._listeners:
                hear(table, ids_N)

    def listen(self, hear: Callable[[str, Ids], None]) -> None:
        """Tell of every mark: the table and the ids, as often as they were looked up."""
        with self._lock:
            self._listeners.append(hear)

    def note_lookup(self, table: str, ids_N: Ids) -> None:
        """Remember rows that the next optimizer step will change, if it has a dense gradient."""
        with self._lock:
            noted = self._looked_up[table]
            noted.append(ids_N)
            if len(noted) > _LOOKUPS_MAX:
                noted[:] = [np.unique(np.concatenate(noted))]

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark what an optimizer has just changed."""
        for table in self._trained:
            gradient = table.parameter.grad
            if table.optimizer is not optimizer or gradient is None:
                continue
            if gradient.is_sparse:
                self.mark(table.name, _host_ids(gradient._indices()[0]))
                continue
            with self._lock:
                noted, self._looked_up[table.name] = self._looked_up[table.name], []
            if not noted:
                noted = [_host_ids(gradient.count_nonzero(dim=1).nonzero())]
            for ids_N in noted:
                self.mark(table.name, ids_N)

    def reset(self) -> None:
        """Forget every change, for every cursor."""
        with self._lock:
            self._clear_live()
            for pending in self._pending.values():
                pending.clear()

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for end in self._endings:
            end()
        self._endings.clear()

    @property
    def bytes(self) -> int:
        """Memory of the bitmaps."""
        marks = [self._live, *self._pending.values()]
        return sum(words.nbytes for part in marks for words in part.values())

    def _peek(self, cursor: LookupCursor) -> Marks:
        with self._lock:
            return self._seen_by(cursor)

    def _advance(self, cursor: LookupCursor) -> Marks:
        with self._lock:
            seen = self._seen_by(cursor)
            self._pending[cursor] = {}
            self._fold(skip=cursor)
        return seen

    def _seen_by(self, cursor: LookupCursor) -> Marks:
        seen = {name: words.copy() for name, words in self._live.items()}
        _union(seen, self._pending[cursor])
        return seen

    def _give_back(self, cursor: LookupCursor, marks: Mapping[str, Words]) -> None:
        with self._lock:
            _union(self._pending[cursor], marks)

    def _fold(self, skip: LookupCursor | None = None) -> None:
        # Only cursors that did not advance now keep a bitmap of their own: with one cursor the
        # cost stays one bit a row.
        for cursor, pending in self._pending.items():
            if cursor is not skip:
                _union(pending, self._live)
        self._clear_live()

    def _clear_live(self) -> None:
        for words_W in self._live.values():
            words_W[:] = 0


class LookupCursor:
    """A reader of a ``LookupTracker``."""

    def __init__(self, tracker: LookupTracker) -> None:
        self._tracker = tracker

    def peek(self) -> Marks:
        """The rows that changed since this cursor last advanced."""
        return self._tracker._peek(self)

    def advance(self) -> Marks:
        """``peek``, and start afresh from now."""
        return self._tracker._advance(self)

    def give_back(self, marks: Mapping[str, Words]) -> None:
        """Count these rows as changed again."""
        self._tracker._give_back(self, marks)


def _union(into: Marks, marks: Mapping[str, Words]) -> None:
    for name, words_W in marks.items():
        if name in into:
            bitmap.union_into(into[name], words_W)
        else:
            into[name] = words_W.copy()


class SinceBase:
    """The rows that committed deltas hold since the base; with a cursor's, all that changed."""

    def __init__(self, changed: Marks | None = None) -> None:
        self._marks: Marks = {} if changed is None else changed
        self.rows: dict[str, int] = {}
        """How many they are, by table."""
        self._count()

    def add(self, marks: Mapping[str, Words]) -> None:
        """A delta with these rows was committed."""
        _union(self._marks, marks)
        self._count()

    def joined(self, marks: Mapping[str, Words]) -> Marks:
        """They and these: what a floor holds."""
        both = {name: words_W.copy() for name, words_W in self._marks.items()}
        _union(both, marks)
        return both

    def _count(self) -> None:
        self.rows = {name: int(bitmap.count(words_W)) for name, words_W in self._marks.items()}


def _unique(
    optimizers: Iterable[torch.optim.Optimizer | None],
) -> Iterable[torch.optim.Optimizer]:
    return {id(item): item for item in optimizers if item is not None}.values()


def _host_ids(ids: torch.Tensor) -> Ids:
    found: Ids = ids.detach().cpu().contiguous().view(-1).numpy()
    return found


class _Hook:
    """A hook that a copied or pickled model carries along without effect."""

    def __init__(self, tracker: LookupTracker | None, table: str = "") -> None:
        self.tracker = tracker
        self.table = table

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self.table)


class _Marker(_Hook):
    def __call__(self, ids: torch.Tensor) -> None:
        if self.tracker is not None:
            self.tracker.mark(self.table, _host_ids(ids))


class _Noter(_Hook):
    def __call__(self, ids: torch.Tensor) -> None:
        if self.tracker is not None:
            self.tracker.note_lookup(self.table, _host_ids(ids))


class _Stepped(_Hook):
    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.tracker is not None:
            self.tracker.note_step(optimizer)


class _AfterForward:
    """Passes on the ids of every lookup that can change rows.

    In training mode that is the forward pass. In eval mode rows change only if a backward pass
    follows after all (fine-tuning with dropout off), so the note waits for it. ``max_norm``
    rewrites rows in any forward pass.
    """

    def __init__(self, note: _Hook) -> None:
        self.note: Any = note

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        ids = args[0] if args else kwargs["input"]
        if isinstance(self.note, _Marker) or (module.training and torch.is_grad_enabled()):
            self.note(ids)
        elif isinstance(output, torch.Tensor) and output.requires_grad:
            note = self.note
            output.register_hook(lambda _gradient: note(ids))  # type: ignore[no-untyped-call]


def _watch(module: nn.Module, note: _Hook) -> RemovableHandle:
    return module.register_forward_hook(_AfterForward(note), with_kwargs=True)


class HashTracker:
    """Finds changed rows by comparing row hashes; forward passes are not watched."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = list(tables)
        self._cursors: list[HashCursor] = []

    def cursor(self) -> HashCursor:
        """A new reader that starts now."""
        cursor = HashCursor(self._tables)
        self._cursors.append(cursor)
        return cursor

    def mark(self, table: str, ids_N: Ids) -> None:
        """Nothing to do: a row that changes is seen by its hash."""

    def reset(self) -> None:
        """Take the tables as they are now as every cursor's start."""
        for cursor in self._cursors:
            cursor.reset()

    def close(self) -> None:
        """Nothing is watched."""


class HashCursor:
    """A reader of a ``HashTracker``: the hashes as of its last advance."""

    def __init__(self, tables: list[Table]) -> None:
        self._tables = tables
        self._given_back: Marks = {}
        self._hashes = self._hash_now()

    def _hash_now(self) -> dict[str, npt.NDArray[np.uint64]]:
        return {table.name: table.hash_rows() for table in self._tables}

    def _compare(self, hashes: Mapping[str, npt.NDArray[np.uint64]]) -> Marks:
        seen: Marks = {}
        for table in self._tables:
            words_W = bitmap.new(table.rows)
            changed = np.flatnonzero(hashes[table.name] != self._hashes[table.name])
            bitmap.mark(words_W, changed, table.rows)
            seen[table.name] = words_W
        _union(seen, self._given_back)
        return seen

    def peek(self) -> Marks:
        """The rows that changed since this cursor last advanced."""
        return self._compare(self._hash_now())

    def advance(self) -> Marks:
        """``peek``, and start afresh from now."""
        hashes = self._hash_now()
        seen = self._compare(hashes)
        self._hashes = hashes
        self._given_back = {}
        return seen

    def give_back(self, marks: Mapping[str, Words]) -> None:
        """Count these rows as changed again."""
        _union(self._given_back, marks)

    def reset(self) -> None:
        """Start afresh from the tables as they are now."""
        self._hashes = self._hash_now()
        self._given_back = {}


def make_tracker(tracking: str, tables: list[Table], model: nn.Module) -> Tracker:
    """The tracker a user asked for, if it holds for this model.

    Raises:
        InvalidRequestError: lookups would miss changes; says what to do.
    """
    if tracking == HASH:
        return HashTracker(tables)
    if tracking != LOOKUP:
        raise InvalidRequestError("unknown tracking", tracking=tracking, known=[LOOKUP, HASH])
    check_lookups_suffice(tables, model)
    return LookupTracker(tables)
