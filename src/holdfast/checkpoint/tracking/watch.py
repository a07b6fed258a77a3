"""What is seen of one table's changes: by gradients, version counters and hashes.

    optimizer.step:  before -> did anything else write?   after -> rows with a gradient
    a save:          catch_up -> every row that may have changed since the last catch_up
    after a save:    scan -> rows of the next part that differ though nothing was seen

Invariants:
- ``catch_up`` names every row that changed, or more. Only writes that torch does not count can
  escape it, and the scan finds those within FULL_TURN_SAVES saves.
- Nothing here raises because of how a table was changed. What cannot be told apart is saved whole.
- An optimizer whose state is not saved with the table may have moments that nobody sees: of it only
  the gradient is believed.

# words_W: a bitmap of the table's rows, W words (kernels/rows/bitmap.py)
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from holdfast.checkpoint.tracking.hashes import RowHashes
from holdfast.checkpoint.tracking.marks import (
    ArrivingIds,
    DeviceMarks,
    Ids,
    Words,
    all_rows,
    arriving_ids,
    arriving_nonzero,
    host_ids,
    nonzero_rows,
)
from holdfast.checkpoint.tracking.method import COMPARE, WHOLE, Happened, choose_method
from holdfast.checkpoint.tracking.optimizers import rules
from holdfast.checkpoint.tracking.optimizers.evidence import MOST, SAVES_OBSERVED, Observations
from holdfast.checkpoint.tracking.optimizers.moments import Moments
from holdfast.checkpoint.tracking.versions import Counters, VersionCounters
from holdfast.kernels.rows import bitmap
from holdfast.model import devices
from holdfast.model.tables import Table

UNSAVED = "unsaved"  # the method of a notice: rows are found, their optimizer is not known

FULL_TURN_SAVES = 16
"""Every row is checked once within so many saves, whatever else is known of it."""

_WRITES_MAX = 99  # in one step: from here on their number says nothing
_MOST_SAVES = 2  # comparisons in a row that found most rows changed, before they are skipped
_EDIT_TODO = (
    "write to tables under torch.no_grad() instead of through .data or NumPy, or name the rows "
    "with ck.mark(table, ids)"
)


@dataclass(frozen=True, slots=True)
class Notice:
    """How a table's rows are found from now on, and why."""

    table: str
    method: str
    reason: str
    todo: str
    is_escape: bool = False
    """Rows had changed unseen; they are in the next save."""


class Steady(Protocol):
    """Steps of an optimizer that are looked at without its tables' watches
    (checkpoint/tracking/optimizers/steady.py)."""

    def end(self) -> None:
        """Bring the watches up to date, and leave the next steps to them."""


class TableWatch:
    """Finds the changed rows of one table."""

    def __init__(
        self, table: Table, span: range, *, has_hashes: bool = True, is_compared: bool = False
    ) -> None:
        """``span``: the rows this process saves. ``is_compared``: compare at every save."""
        self.table = table
        self.hashes = RowHashes(table, span) if has_hashes else None
        self._is_compared = is_compared
        self._versions = VersionCounters(table)
        self._fresh_W = bitmap.new(table.rows)  # marked since the last catch_up
        self._scratch_W: Words | None = None  # the rows of one dense gradient
        self._on_device: DeviceMarks | None = None
        self._moments = Moments(table)
        self._observed = Observations()
        self._rule: rules.Rule | None = None
        self._rules: dict[Hashable, rules.Rule] = {}
        self._moved: set[str] = set()
        self._unknown: dict[Hashable, bool] = {}  # that stepped; whether their state is saved
        self._stepping = 0  # steps that have begun and not ended: a step may call another
        self._step_writes = 0  # that torch counted since the outermost of them began
        self._is_stepped = False  # by an optimizer that is seen, with a gradient or without
        self._is_settling = True  # until dense steps were compared once after another's write
        self._has_stepped_dense = False  # since the last catch_up
        self._is_sparse = False  # the last gradient was
        self._was_written = False
        self._is_distrusted = not self._versions.is_counted
        self._has_trained = table.watch is not None  # by any optimizer, ever
        self._saves_idle = 0  # comparisons of a table that nothing trains
        self._was_compared = False  # for a reason that may come again
        self._most = 0  # comparisons in a row that found most rows changed
        self._skips = 0  # saves for which comparing is skipped
        self._is_always_whole = False  # hashes would guard nothing
        self._candidates_K = np.empty(0, np.int64)
        self._told: set[tuple[str, str]] = set()
        self.steady: Steady | None = None
        """What looks at this table's steps in the place of this watch, if something does."""
        self.notices: list[Notice] = []
        self.is_overlapped = False
        """Whether another table has some of its memory."""
        self.without_gradient_W: Words | None = None
        """Rows that changed without a gradient, by the last catch_up; None: none. Where all rows
        are taken to be safe, those that most likely changed."""

    # While training.

    def before_step(self) -> None:
        """An optimizer is about to move the table."""
        self._look_alone()
        if self._stepping == 0:
            self._step_writes = 0
        self._stepping += 1
        self._is_stepped = True
        self._note_writes()

    def _note_writes(self) -> None:
        """Notice what wrote until now, before an optimizer does."""
        if self._versions.has_changed():
            self._was_written = True
            self._versions.look()

    def note_foreign_write(self) -> None:
        """Something wrote that torch does not count for this table."""
        self._was_written = True

    def after_closure(self, mover: rules.Mover) -> None:
        """Training code has run inside a step."""
        self._look_alone()
        # An optimizer that nobody knows may have written before; its rows are compared anyway.
        if self._find_rule(mover).moves != rules.UNKNOWN:
            self._note_writes()

    def after_step(self, mover: rules.Mover) -> None:
        """An optimizer has moved the table: mark the rows of its gradient."""
        self._look_alone()
        self._stepping = max(0, self._stepping - 1)
        rule = self._rule = self._find_rule(mover)
        gradient = self.table.parameter.grad
        if gradient is not None:
            self._mark_gradient(gradient)
            self._has_trained = True
            self._is_sparse = gradient.layout == torch.sparse_coo
            self._has_stepped_dense |= not self._is_sparse
        elif self._versions.has_changed():
            self._was_written = True  # the gradient was there, and is cleared already
        writes = self._versions.weight_writes()
        self._step_writes += writes
        if rule.moves == rules.UNKNOWN:
            # One that writes more often than it did while it was observed does something else.
            writes_so_far = min(self._step_writes, _WRITES_MAX)
            settings = rules.settings_key(mover.optimizer, mover.group)
            key = (settings, self._stepping, writes_so_far)
            self._unknown[key] = self._is_saved(mover.optimizer)
            self._has_trained = True
        elif gradient is not None:
            self._moved.add(rule.moves)
            if rule.moves == rules.ALL:
                self._moments.note_decay()
            if writes > rule.writes:
                self._was_written = True  # another thread, while the optimizer stepped
        self._versions.look()

    def is_steady(self, mover: rules.Mover) -> bool:
        """Whether a step like the last one needs no look at this table by its own watch."""
        is_known = self._rule is not None and self._rule.moves in (rules.GRADIENT, rules.TRAINED)
        gradient = self.table.parameter.grad
        return (
            is_known
            and self._is_saved(mover.optimizer)
            and self._stepping == 0
            and self._versions.is_counted
            and not self._versions.has_sparse_state
            and gradient is not None
            and gradient.layout == torch.sparse_coo
            and devices.is_on_host(gradient)
        )

    @property
    def step_writes_max(self) -> int:
        """How often a step like the last one may write to the weight."""
        return 0 if self._rule is None else self._rule.writes

    @property
    def counted_tensors(self) -> list[torch.Tensor]:
        """What steps write to: the weight, then its row state."""
        return self._versions.seen_tensors

    @property
    def fresh_W(self) -> Words:
        """The set in which steps mark rows, until the next save."""
        return self._fresh_W

    def end_steady(self, seen: Counters) -> None:
        """The steps that went by without this watch have left these counters."""
        self.steady = None
        self._versions.take_over(seen)

    def _look_alone(self) -> None:
        if self.steady is not None:
            self.steady.end()

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer moves the table; it may be one that the Checkpointer was not given."""
        if not self._is_saved(optimizer):
            kind = type(optimizer).__name__
            reason = f"{kind} trains it and was not given to the Checkpointer, so is not saved"
            todo = "pass every optimizer to the Checkpointer: optimizer=[first, second]"
            self._tell(UNSAVED, reason, todo)

    def _is_saved(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its state is saved with the table: it is the table's own optimizer, or the one
        inside of it (a wrapper that has the same state, as accelerate's)."""
        own = self.table.optimizer
        return optimizer is own or (own is not None and optimizer.state is own.state)

    def note_failure(self, error: Exception) -> None:
        """Looking at the table failed: nothing is known of it, and training goes on."""
        self._was_written = True
        reason = f"tracking failed ({type(error).__name__}: {error})"
        self._tell(COMPARE, reason, "report it to Holdfast, with the optimizer and the model")

    def mark(self, ids_N: Ids) -> None:
        """These rows changed."""
        bitmap.mark(self._fresh_W, ids_N, self.table.rows)

    def mark_tensor(self, ids: torch.Tensor) -> None:
        """These rows changed; ids on a device are not waited for."""
        if devices.is_on_host(ids):
            self.mark(ids.detach().contiguous().numpy())
        else:
            self._device_marks(ids.device).mark_ids(ids)

    def mark_all(self) -> None:
        """Every row may have changed."""
        self._moved.add(rules.ALL)

    def gradient_ids(self) -> Ids | ArrivingIds:
        """The rows of the gradient as it is now, as often as it names them. Those of a table on a
        device arrive later: a step does not wait for them."""
        gradient = self.table.parameter.grad
        if gradient is None:
            return np.empty(0, np.int64)
        if gradient.layout == torch.sparse_coo:
            if not devices.is_on_host(gradient):
                return arriving_ids(gradient._indices()[0])
            return host_ids(gradient)
        if not devices.is_on_host(gradient):
            return arriving_nonzero(gradient.to_dense())
        words_W = bitmap.new(self.table.rows)
        nonzero_rows(gradient.to_dense(), words_W)
        return bitmap.ids(words_W, 0, self.table.rows)

    def _find_rule(self, mover: rules.Mover) -> rules.Rule:
        is_saved = self._is_saved(mover.optimizer)
        parameter = self.table.parameter
        gradient = parameter.grad
        is_sparse = gradient is not None and gradient.layout == torch.sparse_coo
        key = (is_saved, is_sparse, parameter.dtype, mover.key)
        if key not in self._rules:
            dtype = str(parameter.dtype).removeprefix("torch.")
            rule = rules.rule_of(mover.optimizer, mover.group, dtype=dtype, is_sparse=is_sparse)
            if rule.moves == rules.TRAINED and not is_saved:
                reason = f"{rule.reason}, and its moments are not saved"
                rule = rules.Rule(rules.UNKNOWN, reason)
            self._rules[key] = rule
        return self._rules[key]

    def _mark_gradient(self, gradient: torch.Tensor) -> None:
        if gradient.layout == torch.sparse_coo:
            if devices.is_on_host(gradient):
                self.mark(host_ids(gradient))
            else:
                self.mark_tensor(gradient._indices()[0])
        elif gradient.layout != torch.strided:
            self.mark_all()
        elif not devices.is_on_host(gradient):
            self._device_marks(gradient.device).mark_nonzero(gradient)
        elif gradient.numel():
            if self._scratch_W is None:
                self._scratch_W = bitmap.new(self.table.rows)
            nonzero_rows(gradient, self._scratch_W)
            bitmap.union_into(self._fresh_W, self._scratch_W)

    def _device_marks(self, device: torch.device) -> DeviceMarks:
        if self._on_device is None or self._on_device.device != device:
            self._collect()  # the table was moved to another device
            self._on_device = DeviceMarks(self.table.rows, device)
        return self._on_device

    def _collect(self) -> None:
        """Bring the marks on the device to the host."""
        if self._on_device is not None:
            bitmap.union_into(self._fresh_W, self._on_device.take())

    # At a save, while training stands still.

    def catch_up(self, seen_W: Words) -> Words:
        """Every row that may have changed since the last catch_up.

        ``seen_W``: rows that the next save takes anyway.
        """
        self._look_alone()
        fresh_W = self._take_fresh()
        self._look_at_writes()
        gradient_W = fresh_W.copy()
        before_W = self._moments.rows_W
        is_lost = self._moments.advance(
            fresh_W,
            has_moments=rules.TRAINED in self._moved or bool(self._unknown),
            is_known=rules.TRAINED in self._moved,
            was_written=self._was_written,
        )
        if is_lost:
            self._moved.add(rules.ALL)
        happened = self._happened()
        method = choose_method(happened)
        found_W = fresh_W
        escaped_K = np.empty(0, np.int64)
        likely_W: Words | None = None
        is_ruled = self._rule is not None and self._rule.moves == rules.ALL
        self._is_always_whole = is_ruled or (bool(self._unknown) and rules.ALL in happened.moved)
        if method.name == WHOLE:
            found_W = all_rows(self.table.rows)
            if self.hashes is not None:
                self.hashes.forget()
            self._skips = max(0, self._skips - 1)
        elif method.name == COMPARE:
            likely_W = self._likely()
            changed_W = self._compare()
            if changed_W is None:
                found_W = all_rows(self.table.rows)
            else:
                self._learn_from(changed_W, gradient_W, before_W, happened)
                found_W = fresh_W | changed_W
            self._was_compared = self._was_compared or happened.was_written
        else:
            if method.name == rules.TRAINED and self._moments.rows_W is not None:
                found_W = fresh_W | self._moments.rows_W
            escaped_K = self._find_escaped(found_W | seen_W)
            bitmap.mark(found_W, escaped_K, self.table.rows)
            if self.hashes is not None and not len(escaped_K) and not self._wants_exact():
                self.hashes.shorten()
        self._candidates_K = np.empty(0, np.int64)
        if method.is_told:
            self._tell(method.name, method.reason, method.todo)
        if len(escaped_K):
            self._is_distrusted = True
            reason = (
                f"{len(escaped_K)} rows (the first is {escaped_K[0]}) had changed by a write that "
                f"torch does not count; up to {FULL_TURN_SAVES} checkpoints before this one hold "
                "their old values"
            )
            self._tell(COMPARE, reason, _EDIT_TODO, is_escape=True)
        self._is_settling = happened.was_written or (
            self._is_settling and not self._has_stepped_dense
        )
        self._begin_interval()
        is_more = found_W is not fresh_W or len(escaped_K) > 0
        if likely_W is None:
            likely_W = found_W
        self.without_gradient_W = likely_W & ~gradient_W if is_more else None
        return found_W

    def _learn_from(
        self, changed_W: Words, gradient_W: Words, before_W: Words | None, happened: Happened
    ) -> None:
        """What a comparison says of whoever moved the table."""
        if happened.was_written:
            return  # nobody can say whose the changes are
        if self._unknown:
            rows = self.table.rows
            self._observed.add(self._unknown, changed_W, gradient_W, before_W, rows=rows)
        if happened.is_idle:
            self._saves_idle += 1
            self._is_distrusted = bool((changed_W & ~gradient_W).any())

    def _begin_interval(self) -> None:
        self._was_written = False
        self._has_stepped_dense = False
        self._stepping = 0
        self._moved.clear()
        self._unknown.clear()

    def _take_fresh(self) -> Words:
        self._collect()
        fresh_W, self._fresh_W = self._fresh_W, bitmap.new(self.table.rows)
        return fresh_W

    def _look_at_writes(self) -> None:
        is_moved = self._versions.look_at_storages()
        if self._stepping or is_moved or self._versions.has_changed():
            self._was_written = True  # a step that raised has written, too
        self._versions.look()

    def _happened(self) -> Happened:
        is_comparable = self.hashes is not None and self.hashes.is_comparable
        concluded = {self._conclude(key, is_saved) for key, is_saved in self._unknown.items()}
        return Happened(
            moved=frozenset(self._moved | concluded),
            rule=self._rule,
            was_written=self._was_written,
            is_distrusted=self._is_distrusted,
            is_shared=self._is_shared(),
            is_overlapped=self.is_overlapped,
            is_settling=self._is_settling and self._has_stepped_dense and is_comparable,
            is_idle=self._is_idle() and is_comparable,
            is_compared=self._is_compared,
            has_hashes=self.hashes is not None,
            is_mostly_changed=self._skips > 0,
        )

    def _conclude(self, key: Hashable, is_saved: bool) -> str:
        """The rule that held of an optimizer that is not known."""
        conclusion = self._observed.conclusion(key)
        # Moments that are not saved can be replaced by others without a trace.
        return rules.UNKNOWN if conclusion == rules.TRAINED and not is_saved else conclusion

    def _is_shared(self) -> bool:
        """Whether other processes may write to the table."""
        weight = self.table.weight()
        return self.table.has_parameter and devices.is_on_host(weight) and weight.is_shared()  # type: ignore[no-untyped-call]

    def _wants_exact(self) -> bool:
        """Whether rows will be compared at the next save, as far as is known."""
        is_unknown = self._rule is not None and self._rule.moves == rules.UNKNOWN
        doubts = (self._is_compared, self._is_distrusted, self._was_compared, is_unknown)
        may_settle = self._is_settling and not self._is_sparse
        places = (may_settle, self.is_overlapped, self._is_idle(), self._is_shared())
        return any(doubts) or any(places)

    def _is_idle(self) -> bool:
        """Whether nothing has trained the table yet, and nobody knows whether it stays.

        What can be trained and is in no optimizer that was seen may be moved by other means.
        """
        if self.hashes is None or self._has_trained:
            return False
        is_trained = self.table.has_parameter and self.table.parameter.requires_grad
        return (is_trained and not self._is_stepped) or self._saves_idle < SAVES_OBSERVED

    def _own_moves(self) -> str | None:
        """Which rows the optimizer moves that is saved with the table."""
        optimizer = self.table.optimizer
        groups = [] if optimizer is None or not self.table.has_parameter else optimizer.param_groups
        for group in groups:
            if any(parameter is self.table.parameter for parameter in group["params"]):
                assert optimizer is not None
                return self._find_rule(rules.Mover(optimizer, group)).moves
        return None

    def _likely(self) -> Words | None:
        """The rows whose short hash differs, before the first comparison with long ones."""
        assert self.hashes is not None
        if self.hashes.is_exact or not self.hashes.is_known:
            return None
        span = self.hashes.span
        words_W = bitmap.new(self.table.rows)
        ids_N = self.hashes.differing(np.arange(span.start, span.stop))
        bitmap.mark(words_W, ids_N, self.table.rows)
        return words_W

    def _compare(self) -> Words | None:
        """The rows whose hash differs; None where there is nothing to compare with."""
        assert self.hashes is not None
        rows, span = self.table.rows, self.hashes.span
        differs_N = self.hashes.compare_all()
        if differs_N is None:
            return None
        changed_W = bitmap.new(rows)
        bitmap.mark(changed_W, np.flatnonzero(differs_N) + span.start, rows)
        is_most = len(span) > 0 and float(differs_N.mean()) >= MOST
        self._most = self._most + 1 if is_most else 0
        if self._most >= _MOST_SAVES and not self._is_compared:
            self._most, self._skips = 0, FULL_TURN_SAVES
        return changed_W

    def _find_escaped(self, seen_W: Words) -> Ids:
        """Rows that changed though nothing was seen: looked for everywhere once there is one."""
        if self.hashes is None:
            return np.empty(0, np.int64)
        self._candidates_K = self._candidates_K[~bitmap.is_set(seen_W, self._candidates_K)]
        if len(self.hashes.differing(self._candidates_K)) == 0:
            return np.empty(0, np.int64)
        unseen_W = all_rows(self.table.rows) & ~seen_W
        span = self.hashes.span
        escaped_K = self.hashes.differing(bitmap.ids(unseen_W, span.start, span.stop))
        self.hashes.learn_all(is_exact=True)
        return escaped_K

    def _tell(self, method: str, reason: str, todo: str, *, is_escape: bool = False) -> None:
        if not is_escape and (method, reason) in self._told:
            return
        self._told.add((method, reason))
        self.notices.append(Notice(self.table.name, method, reason, todo, is_escape))

    # Between saves.

    def scan(self, seen_W: Words) -> None:
        """Look for rows that differ unseen, in the next part; training may go on meanwhile."""
        if self.hashes is None or self._is_distrusted:
            return
        candidates_K = self.hashes.scan(FULL_TURN_SAVES)
        is_seen = bitmap.is_set(seen_W, candidates_K)
        self._candidates_K = np.concatenate([self._candidates_K, candidates_K[~is_seen]])

    def begin_whole(self) -> None:
        """A save takes every row: its staged copies make all hashes known."""
        if self.hashes is not None and not self._is_always_whole:
            self.hashes.begin_whole(is_exact=self._wants_exact())

    def begin_part(self) -> None:
        """A save takes some of the marked rows: the hashes must be known, or no check follows."""
        if self.hashes is not None and not self._is_always_whole and not self.hashes.is_known:
            self.hashes.learn_all(is_exact=self._wants_exact())

    def reset(self) -> None:
        """The table was just loaded: nothing in it is new."""
        self._look_alone()
        self._take_fresh()
        self._begin_interval()
        self._moments.reset(has_moments=self._own_moves() in (rules.TRAINED, rules.UNKNOWN))
        self._observed.forget()
        self._most = self._skips = self._saves_idle = 0
        self._is_settling = True
        self._candidates_K = np.empty(0, np.int64)
        self._versions.look()
        self._versions.look_at_storages()
        if self.hashes is not None:
            self.hashes.learn_all(is_exact=self._wants_exact())

    @property
    def bytes(self) -> int:
        """Memory kept for this table."""
        words = (self._fresh_W, self._scratch_W)
        kept = sum(words_W.nbytes for words_W in words if words_W is not None)
        kept += self._moments.bytes
        kept += 0 if self._on_device is None else self._on_device.bytes
        return kept + (0 if self.hashes is None else self.hashes.bytes)
