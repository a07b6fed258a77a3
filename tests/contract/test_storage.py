"""One contract, every storage. What is stored is looked at behind the storage's back."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from holdfast.errors import (
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
)
from holdfast.storage import Storage, StoredObject, open_storage
from holdfast.storage.remote import RemoteStorage
from holdfast.storage.settings import RemoteSettings
from tests.s3servers import BUCKET, QUICK, Server


class Upload(AbstractBufferedFile):
    """A multipart upload: parts stay with the upload until the last one completes it."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)
        return True

    def discard(self) -> None:
        self.parts = []
        self.buffer = io.BytesIO()


class Bucket(AbstractFileSystem):
    """An object store in memory that fsspec streams to: whole objects, conditional creation."""

    protocol = ("gs", "bucket")
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self._creating = threading.Lock()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":
            return Upload(self, path, mode, **{**options, "block_size": 1 << 16})
        return io.BytesIO(self.cat_file(path))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        with self._creating:
            if mode == "create" and path in self.objects:
                raise FileExistsError(path)
            self.objects[path] = value

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        if start and start >= len(self.objects[path]):
            raise OSError(22, "the requested range is not satisfiable")
        return self.objects[path][start:end]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def find(self, path: str, maxdepth: Any = None, withdirs: bool = False, **options: Any) -> Any:
        names = sorted(n for n in self.objects if n == path or n.startswith(f"{path}/"))
        return {n: self.info(n) for n in names} if options.get("detail") else names

    def _rm(self, path: str) -> None:
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)


@dataclass(frozen=True, slots=True)
class Place:
    """A storage, a second one opened on the same place, and the truth of what lies there."""

    storage: Storage
    again: Callable[[], Storage]
    everything: Callable[[], dict[str, bytes]]
    put: Callable[[str, bytes], None]

    def visible(self) -> dict[str, bytes]:
        return {n: d for n, d in self.everything().items() if not n.startswith(".tmp/")}

    def unfinished(self) -> list[str]:
        return [name for name in self.everything() if name.startswith(".tmp/")]


def folder_place(root: Path, url: str | Path) -> Place:
    def everything() -> dict[str, bytes]:
        files = (path for path in root.rglob("*") if path.is_file())
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}

    def put(name: str, data: bytes) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    return Place(open_storage(url), lambda: open_storage(url), everything, put)


def memory_place() -> Place:
    fs = fsspec.filesystem("memory")
    root = f"/contract-{uuid.uuid4().hex}"
    url = f"memory:/{root}"

    def everything() -> dict[str, bytes]:
        files = {n: f.getvalue() for n, f in fs.store.items() if n.startswith(f"{root}/")}
        return {name[len(root) + 1 :]: data for name, data in files.items()}

    def put(name: str, data: bytes) -> None:
        fs.pipe_file(f"{root}/{name}", data)

    return Place(open_storage(url), lambda: open_storage(url), everything, put)


def local_place(root: Path) -> Place:
    """fsspec's own files, reached as if they were far away; a lease decides who writes."""
    seen = folder_place(root, root)

    def again() -> Storage:
        settings = RemoteSettings(**QUICK)
        fs = fsspec.filesystem("file")
        return RemoteStorage(fs, str(root), url=f"fsspec+file://{root}", settings=settings)

    return Place(again(), again, lambda: without_lease(seen.everything()), seen.put)


def s3_place(server: Server) -> Place:
    root = f"contract/{uuid.uuid4().hex}/a run/"

    def again() -> Storage:
        return open_storage(f"s3://{BUCKET}/{root}", **server.options(part_bytes=5 << 20))

    def everything() -> dict[str, bytes]:
        found = server.everything(root)
        unfinished = {f".tmp/{key[len(root) :]}": b"" for key in server.uploads(root)}
        return without_lease(found) | unfinished

    return Place(again(), again, everything, lambda name, data: server.put(root + name, data))


def without_lease(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in found.items() if name != ".lease"}


def bucket_place() -> Place:
    fs = Bucket()

    def again() -> Storage:
        return RemoteStorage(fs, "bucket/run", url="gs://bucket/run")

    def put(name: str, data: bytes) -> None:
        fs.objects[f"bucket/run/{name}"] = data

    return Place(
        again(),
        again,
        lambda: {n.removeprefix("bucket/run/"): d for n, d in fs.objects.items()},
        put,
    )


@pytest.fixture(
    params=["folder", "path", "file-url", "fsspec-file", "memory", "bucket", "rclone", "moto"]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    root = tmp_path / "a run" / "deep"
    places: dict[str, Callable[[], Place]] = {
        "folder": lambda: folder_place(root, str(root)),
        "path": lambda: folder_place(root, root),
        "file-url": lambda: folder_place(root, root.as_uri()),
        "memory": memory_place,
        "fsspec-file": lambda: local_place(root),
        "bucket": bucket_place,
        "rclone": lambda: s3_place(request.getfixturevalue("rclone")),
        "moto": lambda: s3_place(request.getfixturevalue("moto")),
    }
    made = places[request.param]()
    yield made
    if request.param == "memory":
        fs = fsspec.filesystem("memory")
        fs.rm(made.storage.url, recursive=True) if fs.exists(made.storage.url) else None


def write(storage: Storage, name: str, data: bytes) -> None:
    with storage.create(name) as writer:
        writer.write(data)
        writer.close()


class TestCreate:
    def test_object_is_invisible_before_close_and_whole_after(self, place: Place) -> None:
        writer = place.storage.create("objects/a.hf")
        writer.write(b"first ")
        writer.write(b"x" * 200_000)
        assert place.visible() == {}
        assert place.storage.list("") == []
        with pytest.raises(NotFoundError):
            place.again().get("objects/a.hf")
        writer.close()
        assert place.everything() == {"objects/a.hf": b"first " + b"x" * 200_000}
        assert writer.bytes == 200_006

    def test_abort_leaves_nothing(self, place: Place) -> None:
        writer = place.storage.create("objects/a.hf")
        writer.write(b"x" * 200_000)
        writer.abort()
        writer.abort()
        assert place.everything() == {}

    def test_leaving_the_block_by_an_error_or_without_close_aborts(self, place: Place) -> None:
        with pytest.raises(KeyError), place.storage.create("a") as writer:
            writer.write(b"x" * 200_000)
            raise KeyError
        with place.storage.create("b") as writer:
            writer.write(b"y")
        assert place.everything() == {}

    def test_a_finished_writer_takes_no_more(self, place: Place) -> None:
        closed, aborted = place.storage.create("a"), place.storage.create("b")
        closed.write(b"1")
        closed.close()
        aborted.abort()
        for writer in (closed, aborted):
            with pytest.raises(InvalidRequestError, match="closed or aborted"):
                writer.write(b"2")
            with pytest.raises(InvalidRequestError, match="closed or aborted"):
                writer.close()
        closed.abort()
        assert place.everything() == {"a": b"1"}

    def test_an_existing_name_is_a_conflict_and_stays(self, place: Place) -> None:
        place.put("objects/a", b"old")
        with (
            pytest.raises(ConflictError, match="exists") as caught,
            place.storage.create("objects/a") as writer,
        ):
            writer.write(b"new" * 100_000)
            writer.close()
        assert caught.value.facts["object"] == "objects/a"
        assert place.everything() == {"objects/a": b"old"}

    def test_of_two_writers_of_a_name_the_first_to_close_stays(self, place: Place) -> None:
        first, second = place.storage.create("a"), place.again().create("a")
        first.write(b"first")
        second.write(b"second")
        second.close()
        with pytest.raises(ConflictError):
            first.close()
        assert place.everything() == {"a": b"second"}

    def test_an_empty_object_exists(self, place: Place) -> None:
        write(place.storage, "empty", b"")
        assert place.everything() == {"empty": b""}
        assert place.storage.size("empty") == 0
        assert place.storage.get("empty") == b""
        place.storage.get_into("empty", bytearray())

    def test_every_contiguous_buffer_is_written_as_its_bytes(self, place: Place) -> None:
        rows = np.arange(12, dtype=np.float32).reshape(3, 4)
        with place.storage.create("a") as writer:
            for data in (rows, bytearray(b"bc"), memoryview(b"defg")[1:3], rows[:0], b""):
                writer.write(data)
            with pytest.raises(InvalidRequestError, match="contiguous"):
                writer.write(rows[:, ::2])
            writer.close()
        assert place.everything() == {"a": rows.tobytes() + b"bc" + b"ef"}

    def test_a_buffer_may_be_reused_after_write(self, place: Place) -> None:
        buffer = bytearray(b"one")
        with place.storage.create("a") as writer:
            writer.write(buffer)
            buffer[:] = b"two"
            writer.write(buffer)
            writer.close()
        assert place.everything() == {"a": b"onetwo"}

    def test_a_large_object_of_many_parts_is_intact(self, place: Place) -> None:
        rng = np.random.default_rng(7)
        parts = [rng.bytes(int(size)) for size in rng.integers(0, 70_000, 300)]
        parts.append(rng.bytes(40 << 20))
        with place.storage.create("big") as writer:
            for part in parts:
                writer.write(part)
            writer.close()
        whole = b"".join(parts)
        assert place.everything()["big"] == whole
        assert place.storage.size("big") == writer.bytes == len(whole)
        back = bytearray(len(whole) - 11)
        place.storage.get_into("big", back, offset=11)
        assert back == whole[11:]

    def test_writers_of_many_threads_do_not_mix(self, place: Place) -> None:
        def one(index: int) -> None:
            with place.storage.create(f"objects/{index % 3}/{index}") as writer:
                for _ in range(20):
                    writer.write(bytes([index]) * 997)
                writer.close()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(24)))
        assert place.everything() == {
            f"objects/{i % 3}/{i}": bytes([i]) * 997 * 20 for i in range(24)
        }


class TestPutIfAbsent:
    def test_creates_the_object(self, place: Place) -> None:
        place.storage.put_if_absent("catalog/1.json", b"{}")
        place.storage.put_if_absent("catalog/2.json", b"")
        assert place.everything() == {"catalog/1.json": b"{}", "catalog/2.json": b""}

    def test_the_loser_changes_nothing(self, place: Place) -> None:
        place.put("catalog/1.json", b"winner")
        with pytest.raises(ConflictError, match="exists"):
            place.storage.put_if_absent("catalog/1.json", b"loser")
        assert place.everything() == {"catalog/1.json": b"winner"}

    def test_of_eight_threads_exactly_one_wins(self, place: Place) -> None:
        storages = [place.again() for _ in range(8)]
        for round_ in range(10):
            start = threading.Barrier(8)

            def attempt(
                index: int, name: str = f"catalog/{round_}", start: threading.Barrier = start
            ) -> bool:
                start.wait()
                try:
                    storages[index].put_if_absent(name, bytes([index]) * 10_000)
                except ConflictError:
                    return False
                return True

            with ThreadPoolExecutor(8) as pool:
                won = list(pool.map(attempt, range(8)))
            assert won.count(True) == 1
            assert place.visible()[f"catalog/{round_}"] == bytes([won.index(True)]) * 10_000
        assert place.unfinished() == []


class TestGet:
    CASES: ClassVar = [(0, None), (0, 0), (0, 1), (3, 4), (9, 1), (10, 0), (10, None), (4, None)]

    @pytest.mark.parametrize(("offset", "length"), CASES)
    def test_a_range_is_exactly_the_bytes_asked_for(
        self, place: Place, offset: int, length: int | None
    ) -> None:
        place.put("a", b"0123456789")
        end = None if length is None else offset + length
        expected = b"0123456789"[offset:end]
        assert place.storage.get("a", offset=offset, length=length) == expected
        buffer = bytearray(len(expected))
        place.storage.get_into("a", memoryview(buffer), offset=offset)
        assert buffer == expected

    @pytest.mark.parametrize(
        ("offset", "length"), [(0, 11), (10, 1), (11, None), (11, 0), (50, 3), (5, 1 << 50)]
    )
    def test_an_object_too_short_is_corrupt_and_named(
        self, place: Place, offset: int, length: int | None
    ) -> None:
        place.put("objects/a", b"0123456789")
        with pytest.raises(CorruptDataError, match="shorter") as caught:
            place.storage.get("objects/a", offset=offset, length=length)
        assert caught.value.facts["object"] == "objects/a"
        if length is not None and length < 100:
            with pytest.raises(CorruptDataError, match="shorter"):
                place.storage.get_into("objects/a", bytearray(length), offset=offset)

    def test_get_into_fills_arrays_in_place(self, place: Place) -> None:
        rows = np.random.default_rng(1).random((50, 16), np.float32)
        place.put("a", b"head" + rows.tobytes())
        target = np.zeros((52, 16), np.float32)
        place.storage.get_into("a", target[1:51], offset=4)
        assert np.array_equal(target[1:51], rows)
        assert not target[0].any()
        assert not target[51].any()

    def test_get_into_refuses_memory_it_cannot_fill(self, place: Place) -> None:
        place.put("a", b"0123456789")
        with pytest.raises(InvalidRequestError, match="writable"):
            place.storage.get_into("a", b"0123")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="contiguous"):
            place.storage.get_into("a", np.zeros(8, np.uint8)[::2])

    def test_what_does_not_exist_is_not_found(self, place: Place) -> None:
        for _ in range(2):  # first with no root at all, then beside an object
            for name in ("a", "objects", "objects/b", "objects/a/b"):
                for read in (
                    lambda n: place.storage.get(n),
                    lambda n: place.storage.get(n, length=0),
                    lambda n: place.storage.get(n, offset=2, length=2),
                    lambda n: place.storage.get_into(n, bytearray(2)),
                    lambda n: place.storage.get_into(n, bytearray()),
                    place.storage.size,
                ):
                    with pytest.raises(NotFoundError):
                        read(name)
            place.put("objects/a", b"x")

    @pytest.mark.parametrize(("offset", "length"), [(-1, None), (0, -1), (-5, 3)])
    def test_a_negative_range_is_refused(
        self, place: Place, offset: int, length: int | None
    ) -> None:
        place.put("a", b"0123456789")
        with pytest.raises(InvalidRequestError, match="range"):
            place.storage.get("a", offset=offset, length=length)


class TestList:
    def test_no_root_lists_nothing(self, place: Place) -> None:
        assert place.storage.list("") == []
        assert place.storage.list("objects/") == []
        assert place.everything() == {}

    def test_objects_are_sorted_by_name_with_their_sizes(self, place: Place) -> None:
        names = ["objects/c2/a", "objects/c10/a", "objects/c1", "catalog/2", "catalog/1", "z"]
        for index, name in enumerate(names):
            place.put(name, b"x" * index)
        expected = sorted(StoredObject(name, index) for index, name in enumerate(names))
        assert place.storage.list("") == expected
        for prefix in ("objects/", "objects/c1", "objects/c10/", "cat", "catalog/1", "nothing"):
            assert place.storage.list(prefix) == [
                item for item in expected if item.name.startswith(prefix)
            ]

    def test_unfinished_and_hidden_files_are_not_listed(self, place: Place) -> None:
        writer = place.storage.create("objects/a")
        writer.write(b"x")
        place.put(".tmp/0123.part", b"leftover")
        place.put("objects/.hidden", b"x")
        place.put("objects/b", b"x")
        assert place.storage.list("") == [StoredObject("objects/b", 1)]
        writer.abort()

    def test_a_new_object_is_listed_at_once(self, place: Place) -> None:
        for index in range(5):
            place.again().put_if_absent(f"catalog/{index}", b"")
            assert len(place.storage.list("catalog/")) == index + 1
        place.again().delete("catalog/3")
        assert [item.name[-1] for item in place.storage.list("catalog/")] == ["0", "1", "2", "4"]


class TestDelete:
    def test_removes_one_object_and_absence_is_fine(self, place: Place) -> None:
        place.put("objects/c1/a", b"1")
        place.put("objects/c1/b", b"2")
        for _ in range(2):
            place.storage.delete("objects/c1/a")
            assert place.everything() == {"objects/c1/b": b"2"}
        place.storage.delete("objects/c1/b")
        place.storage.delete("objects/c1/b/c")
        place.storage.delete("never/was")
        assert place.everything() == {}

    def test_a_deleted_name_can_be_created_again(self, place: Place) -> None:
        for data in (b"1", b"22"):
            place.storage.put_if_absent("objects/c1/a", data)
            assert place.storage.get("objects/c1/a") == data
            place.storage.delete("objects/c1/a")


class TestClean:
    def test_removes_leftovers_and_nothing_else(self, place: Place) -> None:
        place.storage.clean()
        place.put("objects/a", b"x")
        place.put(".tmp/0123.part", b"leftover")
        place.storage.clean()
        assert place.everything() == {"objects/a": b"x"}

    def test_a_live_writer_of_the_same_storage_is_left_alone(self, place: Place) -> None:
        with place.storage.create("a") as writer:
            writer.write(b"1")
            place.storage.clean()
            writer.write(b"2")
            writer.close()
        assert place.everything() == {"a": b"12"}

    def test_a_writer_forgotten_without_close_leaves_nothing_after_clean(
        self, place: Place
    ) -> None:
        writer = place.storage.create("a")
        writer.write(b"x" * 200_000)
        del writer
        assert place.visible() == {}
        place.storage.clean()
        assert place.everything() == {}


class TestNames:
    BAD: ClassVar = [
        "", "/", "/etc/passwd", "..", "../a", "a/../b", "a/..", ".", "./a", "a//b", "a/", "a\\b",
        "a\0b", "a\nb", ".hidden", "a/.hidden", ".tmp/a", "a\ud800",
    ]  # fmt: skip

    @pytest.mark.parametrize("name", BAD)
    def test_a_name_that_could_escape_or_hide_is_refused(self, place: Place, name: str) -> None:
        for act in (
            place.storage.create,
            place.storage.get,
            place.storage.size,
            place.storage.delete,
            lambda n: place.storage.put_if_absent(n, b"x"),
            lambda n: place.storage.get_into(n, bytearray(1)),
        ):
            with pytest.raises(InvalidRequestError, match="not an object name"):
                act(name)
        assert place.everything() == {}

    @pytest.mark.parametrize("prefix", ["/", "/a", "../", "a/../", "a//", ".tmp/", "a\\", "a\0"])
    def test_a_prefix_that_could_escape_or_hide_is_refused(self, place: Place, prefix: str) -> None:
        with pytest.raises(InvalidRequestError, match="not an object name"):
            place.storage.list(prefix)

    def test_unusual_but_plain_names_work(self, place: Place) -> None:
        for name in ("a b", "ä/ö", "x" * 200, "a.b..c", "p%20c", "-r", "50%"):
            place.storage.put_if_absent(name, name.encode())
            assert place.storage.get(name) == name.encode()
            assert place.everything()[name] == name.encode()


PUT_IN_A_CHILD = """
import json, sys
from holdfast.errors import ConflictError
from holdfast.storage import open_storage
storage = open_storage(sys.argv[1], **json.loads(sys.argv[4]))
me = sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
won = []
for round_ in range(int(sys.argv[3])):
    try:
        storage.put_if_absent(f"catalog/{round_}", me.encode() * 5000)
        won.append(str(round_))
    except ConflictError:
        pass
print(" ".join(won))
"""


def win_in_processes(
    url: str, options: dict[str, Any], *, processes: int, rounds: int
) -> list[int]:
    """Let processes put the same names; who won each, after checking that exactly one did."""
    more = [str(rounds), json.dumps(options)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PUT_IN_A_CHILD, url, str(index), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    won = [child.communicate(timeout=280)[0].split() for child in children]
    winners = {int(name): index for index, names in enumerate(won) for name in names}
    assert sorted(int(name) for names in won for name in names) == list(range(rounds))
    return [winners[round_] for round_ in range(rounds)]


def test_of_four_processes_exactly_one_wins_each_name(tmp_path: Path) -> None:
    winners = win_in_processes(str(tmp_path / "run"), {}, processes=4, rounds=30)
    for round_, index in enumerate(winners):
        path = tmp_path / "run" / "catalog" / str(round_)
        assert path.read_bytes() == str(index).encode() * 5000
    assert list((tmp_path / "run" / ".tmp").iterdir()) == []


# A process that is refused waits for a sign of life of the one that holds the lease.
@pytest.mark.parametrize(("kind", "rounds"), [("moto", 20), ("rclone", 2)])
def test_of_three_processes_exactly_one_wins_each_name_of_a_bucket(
    request: pytest.FixtureRequest, kind: str, rounds: int
) -> None:
    server: Server = request.getfixturevalue(kind)
    root = f"contract/{uuid.uuid4().hex}/"
    # Three processes that start at once are slow to answer each other.
    options = server.options(settle_s=0.8, lease_s=5.0)
    winners = win_in_processes(f"s3://{BUCKET}/{root}", options, processes=3, rounds=rounds)
    found = without_lease(server.everything(root))
    assert found == {
        f"catalog/{round_}": str(index).encode() * 5000 for round_, index in enumerate(winners)
    }


WRITE_IN_A_CHILD = """
import sys, time
from holdfast.storage import open_storage
writer = open_storage(sys.argv[1]).create("objects/a")
writer.write(b"x" * 1_000_000)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_killed_writer_leaves_nothing_visible_and_clean_removes_the_rest(tmp_path: Path) -> None:
    place = folder_place(tmp_path / "run", tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", WRITE_IN_A_CHILD, str(tmp_path / "run")], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        place.storage.clean()
        assert len(place.unfinished()) == 1, "the work of a live process was removed"
        os.kill(child.pid, signal.SIGKILL)
    assert place.visible() == {}
    assert len(place.unfinished()) == 1
    place.storage.put_if_absent("objects/a", b"successor")
    place.storage.clean()
    assert place.everything() == {"objects/a": b"successor"}
