"""``holdfast warmup``: compile the kernels now, as when the image of a container is built.

Not in commands/, which is full: it is no command that reads or writes a run.
"""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli.output import Json, print_json


def warmup(
    *,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Also those of embedding servers.")
    ] = False,
    is_json: Json = False,
) -> None:
    """Compile all kernels now and keep them: the first training then starts at once.

    They are kept for this kind of processor, in NUMBA_CACHE_DIR, or beside Holdfast's modules, or
    in a folder of this user.
    """
    from holdfast.checkpoint.warm import warm_all
    from holdfast.kernels import compiling

    warm_all()
    if cluster:
        from holdfast.cluster.warm import warm_kernels, warm_sum

        warm_kernels()
        warm_sum()
    found = compiling.compiled()
    folder = None if found.folder is None else str(found.folder)
    if is_json:
        print_json({"compiled": found.kernels, "seconds": found.seconds, "folder": folder})
        return
    if not found.kernels:
        print("all kernels were compiled before")
    else:
        print(f"compiled {found.kernels} kernels in {found.seconds:.1f} s")
    if folder is None:
        print("no folder can be written to; set NUMBA_CACHE_DIR to one, or each process compiles")
    else:
        print(f"kept in {folder}")
