"""What ``Checkpointer.save`` returns: wait, done, result, cancel, stats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.deprecation import warn_renamed
from holdfast.errors import SaveCancelledError

if TYPE_CHECKING:
    from holdfast.checkpoint.saving.running import RunningSave


@dataclass(frozen=True, slots=True)
class SaveStats:
    """What a save cost; a field is zero until its phase is over."""

    step: int
    kind: str
    is_rollup: bool = False
    rows: int = 0
    staged_bytes: int = 0
    bytes: int = 0
    full_bytes: int = 0
    stall_s: float = 0.0
    encode_s: float = 0.0
    store_s: float = 0.0
    durable_s: float = 0.0

    @property
    def is_floor(self) -> bool:
        """Deprecated: ``is_rollup``."""
        warn_renamed("SaveStats.is_floor", "is_rollup")
        return self.is_rollup


class PendingSave:
    """A checkpoint that was taken, and is being stored in the background."""

    def __init__(self, save: RunningSave) -> None:
        """Made by ``Checkpointer.save``."""
        self._save = save

    def __repr__(self) -> str:
        return f"<PendingSave of step {self.step}, {'over' if self.done() else 'running'}>"

    @property
    def step(self) -> int:
        """The step this save is of."""
        return self._save.step

    @property
    def stats(self) -> SaveStats:
        """What it has cost so far."""
        return self._save.stats

    def done(self) -> bool:
        """Whether the save is over: committed, cancelled or failed."""
        return self._save.join(0)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is durable.

        Raises:
            TimeoutError: not within ``timeout`` seconds; the save goes on.
            SaveCancelledError: a newer save took its place.
            HoldfastError: what made the save fail.
        """
        if not self._save.join(timeout):
            raise TimeoutError(f"checkpoint of step {self.step} is not durable yet")
        if self._save.error is not None:
            self._save.is_reported = True
            raise self._save.error

    def result(self, timeout: float | None = None) -> SaveStats:
        """Wait until the checkpoint is durable; what it cost. Raises as ``wait`` does."""
        self.wait(timeout)
        return self.stats

    def cancel(self) -> bool:
        """Give up unless the commit has begun; returns when that is settled: whether it was."""
        self._save.cancellation.ask()
        self._save.join()
        return isinstance(self._save.error, SaveCancelledError)

    # Names of 0.4.

    def staged(self) -> None:
        """Deprecated: ``save()`` returns when the snapshot is in memory."""
        warn_renamed("staged() of a save", "nothing: save() returns when the snapshot is in memory")

    def durable(self, timeout: float | None = None) -> SaveStats:
        """Deprecated: ``result``."""
        warn_renamed("durable() of a save", "result()")
        return self.result(timeout)

    @property
    def is_done(self) -> bool:
        """Deprecated: ``done()``."""
        warn_renamed("is_done of a save", "done()")
        return self.done()

    @property
    def has_failed(self) -> bool:
        """Deprecated: ``wait`` raises what failed."""
        warn_renamed("has_failed of a save", "wait(), which raises what failed")
        return self.done() and self._save.error is not None
