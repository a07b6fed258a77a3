"""Every mutator of a run, entered in the registry by being imported."""

from tests.hostile.mutators import (  # noqa: F401
    catalogs,
    deletion_vectors,
    dense_trees,
    objects,
    segments,
    whole_runs,
)
from tests.hostile.mutators.registry import MUTATORS, mutate

__all__ = ["MUTATORS", "mutate"]
