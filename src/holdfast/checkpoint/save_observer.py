"""What a Checkpointer learns from its saves, in their own threads.

    a part was copied -> hashes of its rows;  a commit -> sizes for the next plan, a check of some
    rows, a round of extraction

Invariant: nothing here is needed for the commit that has just been made.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.checkpoint.changed import Changed
from holdfast.checkpoint.grid.extractor import Extractor
from holdfast.checkpoint.planner import Planner
from holdfast.checkpoint.saving.snapshot import StagedPart
from holdfast.checkpoint.store.writer import RunWriter


@dataclass(frozen=True, slots=True)
class LearnFromSaves:
    """The parts of a Checkpointer that learn; ``writer`` is None on ranks that do not commit."""

    writer: RunWriter | None
    planner: Planner
    changed: Changed
    extractor: Extractor

    def see_part(self, staged: StagedPart) -> None:
        """Remember what the rows look like that were copied."""
        self.changed.learn(staged)

    def see_commit(self) -> None:
        """Prepare the next plan, look for changes that nobody saw, and extract."""
        if self.writer is not None:
            self.planner.committed(self.writer.catalog)
        self.changed.scan()
        self.extractor.wake()
