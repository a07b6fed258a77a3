"""Links, pipes and other things planted below a run: nothing outside it is ever touched.

Every operation of a folder meets every kind of thing at every place of a path, and then folders
that are exchanged for links while the operations run. What lies outside is looked at behind the
storage's back: names, bytes, permissions, times, inodes and numbers of links.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.storage.folder.objects import FolderStorage

SECRET = b"a secret of another folder"
OBJECT = "objects/c1/a"
CATALOG = "catalog/1"
STORED = {OBJECT: b"an object", "objects/c1/b": b"another", "objects/c2/a": b"x", CATALOG: b"{}"}
LEFTOVER = ".tmp/0123.part"

# Where something is planted, and which names lead through it.
PLACES = {
    "objects": [OBJECT, "objects/c1/b", "objects/c2/a"],
    "objects/c1": [OBJECT, "objects/c1/b"],
    OBJECT: [OBJECT],
    "catalog": [CATALOG],
    CATALOG: [CATALOG],
    ".tmp": [],
    LEFTOVER: [],
}


def link_to(target: Callable[[Path], str]) -> Callable[[Path, Path], None]:
    return lambda place, outside: place.symlink_to(target(outside))


def chained_link(place: Path, outside: Path) -> None:
    """A link to a link of the same run to the outside."""
    second = place.parent / "second"
    second.symlink_to(outside)
    place.symlink_to("second")


def bound_socket(place: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        here = Path.cwd()
        os.chdir(place.parent)  # an address has a hundred characters at most
        try:
            end.bind(place.name)
        finally:
            os.chdir(here)


def device(place: Path, outside: Path) -> None:
    try:
        os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # zeros without end
    except PermissionError:
        pytest.skip("a device needs root")


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "link-to-folder": link_to(str),
    "relative-link": lambda place, outside: place.symlink_to(
        os.path.relpath(outside, place.parent)
    ),
    "link-to-file": link_to(lambda outside: str(outside / "a")),
    "link-with-a-slash": link_to(lambda outside: f"{outside}/./"),
    "link-chain": chained_link,
    "dangling": link_to(lambda outside: str(outside / "nothing")),
    "loop": lambda place, outside: place.symlink_to(place.name),
    "parent": lambda place, outside: place.symlink_to(".."),
    "pipe": lambda place, outside: os.mkfifo(place),
    "socket": bound_socket,
    "device": device,
    "file": lambda place, outside: place.touch(),
    "folder": lambda place, outside: place.mkdir(),
}


new = itertools.count()


def put(storage: FolderStorage, name: str) -> None:
    storage.put_if_absent(f"{name}-new{next(new)}", b"new data")


def create(storage: FolderStorage, name: str) -> None:
    with storage.create(f"{name}-new{next(new)}") as writer:
        writer.write(b"new data")
        writer.close()


def overwrite(storage: FolderStorage, name: str) -> None:
    with storage.create(name) as writer:
        writer.write(b"new data")
        writer.close()


def get_into(storage: FolderStorage, name: str) -> bytes:
    buffer = bytearray(4)
    storage.get_into(name, buffer)
    return bytes(buffer)


def listed(prefix: str) -> Callable[[FolderStorage, str], bytes]:
    return lambda storage, name: repr(storage.list(prefix)).encode()


READS: dict[str, Callable[[FolderStorage, str], object]] = {
    "get": lambda storage, name: storage.get(name),
    "get-range": lambda storage, name: storage.get(name, offset=1, length=3),
    "get_into": get_into,
    "size": lambda storage, name: storage.size(name),
}
LISTS = {f"list-{p or 'all'}": listed(p) for p in ("", "objects/", "objects/c1/", "objects/c", "c")}
WRITES: dict[str, Callable[[FolderStorage, str], object]] = {
    "put_if_absent": put,
    "put-over": lambda storage, name: storage.put_if_absent(name, b"new data"),
    "create": create,
    "create-over": overwrite,
}
OTHERS: dict[str, Callable[[FolderStorage, str], object]] = {
    "delete": lambda storage, name: storage.delete(name),
    "clean": lambda storage, name: storage.clean(),
}
OPERATIONS = {**READS, **LISTS, **WRITES, **OTHERS}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fingerprint(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything about a folder that an operation could change."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        s = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(s.st_mode) else b""
        found[str(path)] = (s.st_mode, s.st_ino, s.st_nlink, s.st_size, s.st_mtime_ns, data)
    return found


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Whatever a link could lead to: the same names as in the run, leftovers, empty folders."""
    folder = tmp_path / "outside"
    for name in ("a", "b", "1", "c1/a", "c1/b", "c2/a", "0123.part", ".tmp/0123.part", "deep/x"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(SECRET)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def storage(tmp_path: Path) -> FolderStorage:
    made = FolderStorage(tmp_path / "run")
    for name, data in STORED.items():
        made.put_if_absent(name, data)
    (tmp_path / "run" / LEFTOVER).write_bytes(b"left by a dead writer")
    return made


def plant(storage: FolderStorage, place: str, kind: str, outside: Path) -> None:
    """Put something in the place of what lies there."""
    path = Path(storage.url) / place
    path.rename(path.parent / f"{path.name}-aside")
    KINDS[kind](path, outside)


@pytest.fixture(autouse=True)
def no_descriptor_stays() -> Iterator[None]:
    before = names_in(Path("/proc/self/fd"))
    yield
    assert names_in(Path("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_outside_is_touched_through_what_was_planted(
    place: str, kind: str, tmp_path: Path, outside: Path, storage: FolderStorage
) -> None:
    plant(storage, place, kind, outside)
    before = fingerprint(outside)
    above = names_in(tmp_path)
    for name in (OBJECT, CATALOG):
        for operation, act in OPERATIONS.items():
            try:
                answer = act(storage, name)
            except hf.HoldfastError:
                answer = None
            if isinstance(answer, bytes):
                assert SECRET[:4] not in answer and SECRET[1:4] not in answer, operation
                assert b"deep" not in answer and b"empty" not in answer, operation
            assert fingerprint(outside) == before, operation
            assert names_in(tmp_path) == above, operation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["objects", "objects/c1", "catalog", OBJECT, CATALOG])
def test_what_was_planted_is_missing_to_readers_and_refused_to_writers(
    place: str, kind: str, outside: Path, storage: FolderStorage
) -> None:
    plant(storage, place, kind, outside)
    is_object = place in STORED
    for name in PLACES[place]:
        if is_object and kind == "file":
            assert storage.get(name) == b""
        else:
            for read in READS.values():
                with pytest.raises(hf.NotFoundError, match="no such object"):
                    read(storage, name)
            assert name not in {item.name for item in storage.list("")}
        if is_object:
            for write in ("put-over", "create-over"):
                with pytest.raises(hf.ConflictError, match="exists"):
                    WRITES[write](storage, name)
        elif kind != "folder":
            for write in WRITES.values():
                with pytest.raises(hf.InvalidRequestError, match="not what it should be") as caught:
                    write(storage, name)
                assert caught.value.facts["part"] == Path(place).name
                assert "links below the url are not followed" in caught.value.todo
            storage.delete(name)
    assert names_in(Path(storage.url) / ".tmp") == [Path(LEFTOVER).name]
    for name in set(STORED) - set(PLACES[place]):  # the rest of the run is as it was
        assert storage.get(name) == STORED[name]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "folder"])
def test_a_linked_folder_for_temporary_files_stops_writers_and_no_reader(
    kind: str, outside: Path, storage: FolderStorage
) -> None:
    plant(storage, ".tmp", kind, outside)
    for name, data in STORED.items():
        assert storage.get(name) == data
    assert {item.name for item in storage.list("")} == set(STORED)
    with pytest.raises(hf.InvalidRequestError, match=r"part='\.tmp'"):
        storage.create("objects/c3/a")
    with pytest.raises(hf.InvalidRequestError, match=r"part='\.tmp'"):
        storage.put_if_absent("objects/c3/a", b"x")
    with pytest.raises(hf.InvalidRequestError, match=r"part='\.tmp'"):
        storage.clean()
    storage.delete(OBJECT)
    assert OBJECT not in {item.name for item in storage.list("")}


@pytest.mark.parametrize("ending", ["close", "abort"])
def test_a_folder_for_temporary_files_that_becomes_a_link_ends_the_writer(
    ending: str, outside: Path, storage: FolderStorage
) -> None:
    writer = storage.create("objects/c3/a")
    writer.write(b"x")
    (unfinished,) = (p.name for p in (Path(storage.url) / ".tmp").iterdir() if len(p.name) > 20)
    (outside / unfinished).write_bytes(SECRET)
    before = fingerprint(outside)
    plant(storage, ".tmp", "link-to-folder", outside)
    if ending == "abort":
        writer.abort()
    else:
        with pytest.raises(hf.InvalidRequestError, match=r"part='\.tmp'"):
            writer.close()
    assert fingerprint(outside) == before
    assert {item.name for item in storage.list("")} == set(STORED)


def test_the_root_itself_may_be_reached_through_links(
    tmp_path: Path, storage: FolderStorage
) -> None:
    (tmp_path / "by-link").symlink_to("run")
    (tmp_path / "above").symlink_to(".")
    linked = FolderStorage(tmp_path / "above" / "by-link")
    for name, data in STORED.items():
        assert linked.get(name) == data
    linked.put_if_absent("objects/c3/a", b"new data")
    assert storage.get("objects/c3/a") == b"new data"
    linked.delete("objects/c3/a")
    linked.clean()
    assert linked.list("") == storage.list("")
    assert names_in(tmp_path / "run" / ".tmp") == []


def test_a_tree_without_end_is_listed_only_as_deep_as_names_go(storage: FolderStorage) -> None:
    deepest = "/".join("f" * 64)
    storage.put_if_absent(f"{deepest}/a", b"x")
    at = os.open(f"{storage.url}/{deepest}", os.O_RDONLY)
    for _ in range(3000):  # past the longest path, the recursion limit and the open files
        os.mkdir("f", dir_fd=at)
        os.close(os.open("f/a", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        below = os.open("f", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    names = {item.name for item in storage.list("")}
    assert names == {*STORED, f"{deepest}/a"}
    for name in names:
        storage.size(name)
    with pytest.raises(hf.InvalidRequestError, match="too long"):
        storage.list(f"{deepest}/f/a/")
    for act in (storage.get, storage.create, storage.delete):
        with pytest.raises(hf.InvalidRequestError, match="too long"):
            act(f"{deepest}/f/a")
    # Deeper than Python, and pytest after it, could go.
    subprocess.run(["rm", "-rf", storage.url], check=True)


def test_files_that_no_object_can_be_named_like_are_not_listed(storage: FolderStorage) -> None:
    folder = os.fsencode(storage.url) + b"/objects/c1/"
    for name in (b"new\nline", b"\x1b[2J", b"not\xffutf8", b"back\\slash", b".hidden"):
        with open(folder + name, "wb"):  # noqa: PTH123 - a name in bytes
            pass
    assert {item.name for item in storage.list("")} == set(STORED)


def exchange(one: Path, other: Path) -> None:
    """Two names for each other, at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        pytest.skip("no renameat2")
    if libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2):
        raise OSError(ctypes.get_errno(), "renameat2")


@pytest.mark.parametrize("place", ["objects", "objects/c1", "catalog", ".tmp", OBJECT])
def test_a_part_that_is_exchanged_for_a_link_all_the_time_leads_nowhere(
    place: str, tmp_path: Path, outside: Path, storage: FolderStorage
) -> None:
    before = fingerprint(outside)
    link, path = tmp_path / "link", Path(storage.url) / place
    link.symlink_to(outside / "a" if place == OBJECT else outside)
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    rng = random.Random(seed)
    ended = threading.Event()
    swaps = 0

    def swap() -> None:
        nonlocal swaps
        while not ended.is_set():
            try:
                exchange(path, link)
                swaps += 1
            except FileNotFoundError:  # deleted, or emptied and deleted
                plant_again()
            time.sleep(0)

    def plant_again() -> None:
        gone, other = (path, link) if not os.path.lexists(path) else (link, path)
        with contextlib.suppress(OSError):
            if not other.is_symlink():
                gone.symlink_to(outside / "a" if place == OBJECT else outside)
            elif place == OBJECT:
                gone.write_bytes(b"an object")
            else:
                gone.mkdir()

    thread = threading.Thread(target=swap)
    thread.start()
    done: dict[str, int] = {}
    try:
        # Reads are quick and many; a write waits for the disk.
        acts = {**{k: (v, 400) for k, v in (READS | LISTS).items()},
                **{k: (v, 40) for k, v in (WRITES | OTHERS).items()}}  # fmt: skip
        todo = [name for name, (_, times) in acts.items() for _ in range(times)]
        rng.shuffle(todo)
        for name in todo:
            act, _ = acts[name]
            for about in (OBJECT, CATALOG):
                try:
                    answer = act(storage, about)
                except hf.HoldfastError:
                    continue
                done[name] = done.get(name, 0) + 1
                if isinstance(answer, bytes):
                    assert SECRET[:4] not in answer and SECRET[1:4] not in answer, name
                    assert b"deep" not in answer, name
    finally:
        ended.set()
        thread.join()
    assert fingerprint(outside) == before
    assert swaps > 100
    print(f"{swaps} exchanges; done {done}")


@pytest.mark.parametrize("place", ["objects", "objects/c00000001", "catalog"])
def test_a_run_with_a_linked_folder_is_not_read_through_it(place: str, tmp_path: Path) -> None:
    golden = Path(__file__).parent.parent / "golden" / "format2"
    run, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(golden, run)
    shutil.move(run / place, outside)
    (run / place).symlink_to(outside)
    before = fingerprint(outside)
    if place == "catalog":
        for use in (hf.open, hf.verify):
            with pytest.raises(hf.NotFoundError, match="no run here"):
                use(run)
    else:
        opened = hf.open(run)
        step = opened.steps[-1] if place == "objects" else opened.steps[0]
        for table in opened.tables(step):
            with pytest.raises(hf.NotFoundError, match="links below the url are not followed"):
                opened.read(step, table.name)
        damages = hf.verify(run).damages
        assert damages and all("no such object" in damage.error for damage in damages)
    assert fingerprint(outside) == before
