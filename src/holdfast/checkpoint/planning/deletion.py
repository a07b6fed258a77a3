"""Which catalog is left when a user deletes checkpoints: a pure decision.

A checkpoint's rows may be read by later ones: those bytes stay until no kept step reads them, as
when retention drops a checkpoint. Where the newest checkpoints go, training went back to the newest
that is left: what died after it is alive again.

Invariants:
- What every kept step restores stays the same.
- A run that has checkpoints keeps one, and a model in training keeps the one it was saved as last.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.checkpoint.format.catalog import Catalog
from holdfast.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Deletion:
    """What a deletion leaves, and what it frees."""

    steps: tuple[int, ...]
    catalog: Catalog
    freed_bytes: int
    shared_bytes: int
    """Rows that were stored with the deleted steps and that kept ones read: they stay."""
    readers: tuple[int, ...]
    """The kept steps that read those."""


def plan_deletion(
    catalog: Catalog, steps: Collection[int], *, descends_from: int | None = None
) -> Deletion:
    """What is left without some steps; ``descends_from``: the step that a model in training was
    saved as last, because its next delta is built on that.

    Raises:
        NotFoundError: no such step; lists those that exist.
        InvalidRequestError: a step is needed, or none would be left.
    """
    unwanted = {catalog.checkpoint(step).step for step in steps}
    kept = frozenset(catalog.steps) - unwanted
    if descends_from in unwanted:
        raise InvalidRequestError(
            "the model in training was saved as this step last: its next checkpoint builds on it",
            step=descends_from,
            todo="delete it after the next save",
        )
    if not unwanted or not kept:
        raise InvalidRequestError(
            "give steps to delete, and leave at least one",
            given=sorted(unwanted),
            steps=list(catalog.steps),
            todo="to delete a whole run, delete its folder",
        )
    after = catalog.rewound(max(kept)).keeping(kept)
    objects = dict(after.objects)
    born = [segment for segment in after.segments if segment.born in unwanted]
    return Deletion(
        steps=tuple(sorted(unwanted)),
        catalog=after,
        freed_bytes=sum(size for name, size in catalog.objects if name not in objects),
        shared_bytes=sum(segment.extent.bytes for segment in born),
        readers=tuple(step for step in after.steps if any(s.is_alive(step) for s in born)),
    )
