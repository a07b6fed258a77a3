"""What the model in memory descends from, and so what the next checkpoint may be built on.

    restore -> at a step -> train on -> save -> commit -> at the step that was saved

A checkpoint is a delta of others only if training went from them to where it is now. Whoever opens
a run that has checkpoints must therefore say how the model relates to them: by restoring one, and
by giving up those that came after it.

Invariants:
- Nothing is saved on a history that the model does not descend from.
- A model that was overwritten only in part descends from nothing, and is never saved.

Not here: what became of a save (checkpoint/succession.py), base or delta (checkpoint/planner.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.checkpoint.format.catalog import Catalog
from holdfast.errors import InvalidRequestError


@dataclass(slots=True)
class Lineage:
    """Where training is, and the committed step it came from (``at``; None: from no checkpoint).

    ``discards_later``: the checkpoints after that step are given up with the next save.
    ``is_other_model``: not all of the model is as of that step, so the next save is a base.
    """

    step: int = 0
    at: int | None = None
    discards_later: bool = False
    is_torn: bool = False
    is_other_model: bool = False

    @property
    def rewind_to(self) -> int | None:
        """The step after which everything is let go with the next save, if it is to be."""
        return self.at if self.discards_later else None

    def restored(self, step: int, *, discards_later: bool, is_other_model: bool = False) -> None:
        """The model is whole, as of a committed step; or as far as the two have in common."""
        self.step = self.at = step
        self.discards_later = discards_later
        self.is_torn = False
        self.is_other_model = is_other_model

    def committed(self, step: int) -> None:
        """The state that the model had at a step is committed."""
        self.at = step
        self.discards_later = self.is_other_model = False

    @contextmanager
    def torn(self) -> Iterator[None]:
        """While the model is partly overwritten; after an error it stays so until a restore."""
        was_torn, self.is_torn = self.is_torn, True
        yield
        self.is_torn = was_torn

    def check_whole(self) -> None:
        """Refuse to save a model that is partly overwritten.

        Raises:
            InvalidRequestError: says what to do.
        """
        if self.is_torn:
            raise InvalidRequestError(
                "the model is restored only in part and will not be saved",
                todo="restore a step that is sound, or start the process again",
            )

    def origin(self) -> int:
        """The committed step that the model descends from.

        Raises:
            InvalidRequestError: there is none.
        """
        if self.at is None:
            raise InvalidRequestError(
                "nothing is saved yet that the model descends from",
                todo="save first, or call ck.resume()",
            )
        return self.at

    def history(self, catalog: Catalog, *, url: str) -> Catalog:
        """The catalog the next save builds on: the run's, without what is given up.

        >>> Lineage(step=3).history(Catalog(run="r", number=0, writer="w"), url="here").steps
        ()

        Raises:
            InvalidRequestError: it holds checkpoints that the model does not descend from.
        """
        last = catalog.last
        if last is None:
            return catalog
        if self.at is None:
            raise InvalidRequestError(
                "there are checkpoints here already",
                url=url,
                last_step=last.step,
                todo="call ck.resume() first, or give a new url",
            )
        if last.step > self.at:
            if not self.discards_later:
                raise InvalidRequestError(
                    "there are checkpoints after the step that was restored",
                    restored=self.at,
                    last_step=last.step,
                    todo="pass discard_later=True to ck.restore() to drop them, or give a new url",
                )
            catalog = catalog.rewound(self.at)
            last = catalog.last
        if last is not None and last.step >= self.step:
            raise InvalidRequestError(
                "this step is saved already",
                step=self.step,
                last_step=last.step,
                todo="call ck.step() after each training step",
            )
        return catalog
