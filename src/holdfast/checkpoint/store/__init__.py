"""Make checkpoints exist: load and commit catalogs, append a checkpoint, delete what is dead.

The only place that changes what a run holds. Data first, catalog last.
"""
