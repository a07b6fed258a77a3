"""A file or a folder that appears whole or not at all.

Written under another name beside it, made durable, renamed; after an error nothing is left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.errors import InvalidRequestError


@contextmanager
def whole_file(out: Path) -> Iterator[Path]:
    """Where to write a file that then takes the place of ``out``; fsync it before the end."""
    temporary = _beside(out)
    try:
        yield temporary
        temporary.replace(out)
        _sync_folder(out.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Where to write a folder that then takes the place of ``out``; its files are made durable."""
    temporary = _beside(out)
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    try:
        temporary.mkdir()
        yield temporary
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
        _sync_folder(temporary)
        if out.exists():
            out.rename(old)
        try:
            temporary.rename(out)
        except OSError:
            if old.exists():
                old.rename(out)
            raise
        _sync_folder(out.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_out(out: Path, *, is_forced: bool, is_folder: bool) -> None:
    """Refuse a place that cannot be written to, or that holds something.

    Raises:
        InvalidRequestError: says what to do.
    """
    kind = "folder" if is_folder else "file"
    if not out.name or not out.parent.is_dir() or (out.exists() and out.is_dir() != is_folder):
        raise InvalidRequestError(
            "cannot write there", out=str(out), todo=f"name a {kind} in a folder that exists"
        )
    if out.exists() and not is_forced:
        raise InvalidRequestError(
            f"the {kind} exists", out=str(out), todo="name another, or overwrite it with --force"
        )


def _beside(out: Path) -> Path:
    return out.with_name(f".{out.name}.{os.getpid()}.part")


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
