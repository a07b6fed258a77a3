"""The commands themselves, on a mutated run in a folder, beside files that are not the run's.

A part of the run may be a link that leads out of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import holdfast as hf
from holdfast.cli.main import run as run_command
from tests.hostile.campaign_reading import Seen, Target, has_controls

CANARY = b"none of its business"


def command(target: Target) -> list[Seen]:
    """One command on a folder: an exit code, words fit for a terminal, and nothing else touched."""
    folder = target.out / "run"
    outside = target.out / "outside"
    outside.mkdir()
    (outside / "canary").write_bytes(CANARY)
    for name, data in target.storage.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    link = _link(target, folder, outside) if target.rng.random() < 0.25 else None
    before = _snapshot(outside)
    arguments = _arguments(target, str(folder))
    is_json = target.rng.random() < 0.5
    code, said, told = _run([*arguments, *(["--json"] if is_json else [])])
    if code not in (0, 1, 2):
        target.notes.append(f"exit code {code}")
    if has_controls(told) or (has_controls(said) and not is_json):
        target.notes.append(f"control characters on the terminal: {arguments[0]}")
    if is_json:
        json.loads(said)
    is_sound = arguments[0] == "verify" and code == 0
    if is_sound and not hf.verify(target.storage).is_sound:
        target.notes.append("verify says one thing of a folder and another of its bytes")
    if link is not None and is_sound:
        target.notes.append(f"verify follows a link out of the run: {link}")
    if _snapshot(outside) != before:
        target.notes.append("a file outside the run was changed")
    return []


def _arguments(target: Target, url: str) -> list[str]:
    rng = target.rng
    steps = (target.opened.steps if target.opened else ()) or (1,)
    match rng.randrange(6):
        case 0 | 1:
            return ["verify", url]
        case 2:
            return ["inspect", url, *(["--all"] if rng.random() < 0.5 else [])]
        case 3:
            return ["inspect", "--grid", url]
        case 4:
            return ["diff", url, str(rng.choice(steps)), str(rng.choice(steps))]
        case _:
            kind = rng.choice(("safetensors", "torch", "dcp"))
            out = str(target.out / "exported")
            return ["restore", url, "--out", out, "--format", kind]


def _run(arguments: list[str]) -> tuple[int, str, str]:
    """A command's exit code and what it wrote, as bytes that a terminal can take."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(arguments)
    return code, *(stream.buffer.getvalue().decode() for stream in (out, err))


def _link(target: Target, folder: Path, outside: Path) -> str | None:
    """Move a file or a folder of the run out of it, and leave a link in its place."""
    inside = [p for p in folder.rglob("*") if "objects" in p.parts or "catalog" in p.parts]
    path = target.rng.choice(sorted(inside))
    shutil.move(path, outside / "moved")
    path.symlink_to(outside / "moved")
    return path.relative_to(folder).as_posix()


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
