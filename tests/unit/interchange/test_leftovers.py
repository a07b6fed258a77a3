"""An import that fails, at any moment and for any reason, leaves nothing and touches nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast import events
from holdfast.interchange.wholeness import whole_folder
from holdfast.storage import open_storage
from tests.fault import Fault, FaultyStorage, When
from tests.hostile.import_bombs import optimizer, save

TABLES = ["e.weight"]


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    save(tmp_path / "in" / "a.pt", model={"top": torch.ones(3)}, step=4)
    return tmp_path / "in" / "a.pt"


def test_export_that_cannot_take_its_place_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith(".part"):
            raise OSError("something else is there")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="something else"), whole_folder(out) as temporary:
        (temporary / "new").write_text("y")
    assert tree(tmp_path) == ["out", "out/mine"]


def test_failure_of_any_storage_call_leaves_nothing(source: Path, tmp_path: Path) -> None:
    whole = FaultyStorage(open_storage(str(tmp_path / "whole")))
    hf.import_checkpoint(source, whole, tables=TABLES)  # type: ignore[arg-type]
    assert len(whole.calls) > 10
    before = tree(tmp_path)
    for when in When:
        for at in range(1, len(whole.calls) + 1):
            url = tmp_path / "new" / "deep" / "run"
            storage = FaultyStorage(open_storage(str(url)), Fault.outage(at, when))
            try:
                hf.import_checkpoint(source, storage, tables=TABLES)  # type: ignore[arg-type]
            except hf.HoldfastError:
                assert tree(tmp_path) == before, (at, when, storage.calls[at - 1])
                continue
            # An answer that was lost and asked for again: the run is whole.
            assert hf.verify(url).is_sound
            subprocess.run(["rm", "-r", str(tmp_path / "new")], check=True)


def test_what_was_in_the_folder_stays(source: Path, tmp_path: Path) -> None:
    url = tmp_path / "run"
    url.mkdir()
    (url / "notes.txt").write_text("mine")
    before = tree(url)
    for at in range(1, 30):
        storage = FaultyStorage(open_storage(str(url)), Fault.outage(at, is_lasting=at > 15))
        try:
            hf.import_checkpoint(source, storage, tables=TABLES)  # type: ignore[arg-type]
        except hf.HoldfastError:
            if at <= 15:  # an outage that lasts lets nobody delete
                assert tree(url) == before, at
        else:
            break
    assert (url / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_while_rows_are_stored_leaves_nothing(
    error: type[BaseException], source: Path, tmp_path: Path
) -> None:
    def interrupt(event: events.Event) -> None:
        if isinstance(event, events.SaveProgress):
            raise error

    before = tree(tmp_path)
    with pytest.raises(error):
        hf.import_checkpoint(
            source, tmp_path / "run", tables=TABLES, events=events.EventLog([interrupt])
        )
    assert tree(tmp_path) == before


def test_run_of_another_that_appears_meanwhile_is_not_touched(source: Path, tmp_path: Path) -> None:
    url = tmp_path / "run"
    save(tmp_path / "other.pt", model={"e.weight": torch.full((7, 2), 5.0)}, step=9)

    def overtake(event: events.Event) -> None:
        if isinstance(event, events.SaveProgress) and not url.joinpath("catalog").exists():
            hf.import_checkpoint(tmp_path / "other.pt", url, tables=TABLES)

    with pytest.raises(hf.ConflictError):
        hf.import_checkpoint(source, url, tables=TABLES, events=events.EventLog([overtake]))
    assert hf.verify(url).is_sound
    assert hf.open(url).read(9, "e.weight").weight.tolist() == [[5.0, 5.0]] * 7


def test_what_no_reader_opens_is_removed_again(source: Path, tmp_path: Path) -> None:
    """A disk that changes a byte between the commit and the look at what was written."""
    before = tree(tmp_path)
    url = tmp_path / "run"

    def damage(event: events.Event) -> None:
        if isinstance(event, events.SaveDurable):
            (path,) = (url / "objects").rglob("dense*")
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.chmod(0o644)
            path.write_bytes(data)

    with pytest.raises(hf.InvalidRequestError, match="read back"):
        hf.import_checkpoint(source, url, tables=TABLES, events=events.EventLog([damage]))
    assert tree(tmp_path) == before


def test_more_text_than_a_checkpoint_can_hold_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.pt", optimizer=optimizer(x="x" * (100 << 20)))
    for trust, said in ((False, "size allows"), (True, "more values")):
        with pytest.raises(hf.InvalidRequestError, match=said):
            hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=TABLES, trust=trust)
    assert tree(tmp_path) == ["a.pt"]


# Below 128 MB Python cannot start a thread, and waits for ever for the one that it began to start.
STARVED = """
import os, resource, sys
from pathlib import Path
import torch
import holdfast as hf

torch.set_num_threads(1)
folder = Path(sys.argv[1])
hf.import_checkpoint(folder / "small.pt", folder / "again", tables=["*"])
for room in range(128, 628, 50):
    child = os.fork()
    if child == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (room << 20),) * 2)
        try:
            hf.import_checkpoint(folder / "a.pt", folder / f"run{room}", tables=["e.weight"])
            said = "done"
        except BaseException as error:
            said = type(error).__name__
        print(room, said, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited by rlimit")
def test_too_little_memory_leaves_a_whole_run_or_nothing(tmp_path: Path) -> None:
    torch.save({"e.weight": torch.ones(10, 4)}, tmp_path / "small.pt")
    # Rows of 32 MB, each in a buffer of its own. (Dense state is encoded by safetensors, whose
    # allocator ends the process.)
    torch.save({"e.weight": torch.ones(3, 8_000_000)}, tmp_path / "a.pt")
    # In a process of its own: one that has compiled kernels has memory left over from that.
    hf.import_checkpoint(tmp_path / "small.pt", tmp_path / "warm", tables=["*"])
    command = [sys.executable, "-c", STARVED, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=200)
    outcomes = dict(line.split() for line in found.stdout.splitlines())
    assert len(outcomes) == 10, found.stderr[-1000:]
    assert set(outcomes.values()) == {"done", "UnavailableError"}, outcomes
    kept = {"small.pt", "a.pt", "warm", "again"}
    for path in tmp_path.iterdir():
        if path.name not in kept:
            assert outcomes[path.name.removeprefix("run")] == "done", path
            assert hf.verify(path).is_sound


CODE = """
import sys, holdfast as hf
from holdfast.interchange.importer import import_checkpoint
import torch, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
print("ready", flush=True)
try:
    import_checkpoint(sys.argv[1], sys.argv[2], tables=["e.weight"])
    print("done")
except KeyboardInterrupt:
    print("interrupted")
"""


def test_interrupt_from_the_keyboard_leaves_a_whole_run_or_nothing(tmp_path: Path) -> None:
    torch.save({"e.weight": torch.ones(300_000, 32)}, tmp_path / "a.pt")  # 38 MB
    url = tmp_path / "new" / "run"
    for tenths in (0, 1, 2, 4):
        child = subprocess.Popen(
            [sys.executable, "-c", CODE, str(tmp_path / "a.pt"), str(url)],
            stdout=subprocess.PIPE, text=True, env={**os.environ},
        )  # fmt: skip
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(tenths / 10)
        child.send_signal(signal.SIGINT)
        said, _ = child.communicate()
        if "done" in said:
            assert hf.verify(url).is_sound
            subprocess.run(["rm", "-r", str(tmp_path / "new")], check=True)
        else:
            assert tree(tmp_path) == ["a.pt"], said
