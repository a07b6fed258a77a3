"""The folder: order of syncs, full and forbidden disks, strange files, vanishing folders."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import ConflictError, CorruptDataError, InvalidRequestError, NotFoundError
from holdfast.storage.folder.objects import FolderStorage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "new" / "run"


@pytest.fixture
def storage(root: Path) -> FolderStorage:
    return FolderStorage(root)


def record_system_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The real calls, noted in order with the path they act on."""
    seen: list[tuple[str, str]] = []
    fsync, link, write = os.fsync, os.link, os.write

    def path_of(fd: int) -> str:
        return str(Path(f"/proc/self/fd/{fd}").readlink())

    def noted_fsync(fd: int) -> None:
        seen.append(("sync", path_of(fd)))
        fsync(fd)

    def noted_link(src: str, dst: str, *, dst_dir_fd: int, **options: int) -> None:
        seen.append(("link", f"{path_of(dst_dir_fd)}/{dst}"))
        link(src, dst, dst_dir_fd=dst_dir_fd, **options)

    def noted_write(fd: int, data: bytes) -> int:
        seen.append(("write", path_of(fd)))
        return write(fd, data)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "link", noted_link)
    monkeypatch.setattr(os, "write", noted_write)
    return seen


@pytest.mark.parametrize("how", ["create", "put_if_absent"])
def test_data_is_synced_before_the_name_and_every_folder_after(
    how: str, storage: FolderStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = record_system_calls(monkeypatch)
    if how == "create":
        with storage.create("objects/c1/a") as writer:
            writer.write(b"x")
            writer.close()
    else:
        storage.put_if_absent("objects/c1/a", b"x")
    linked = seen.index(("link", str(root / "objects/c1/a")))
    data = [at for at, (what, path) in enumerate(seen) if "/.tmp/" in path]
    assert [seen[at][0] for at in data] == ["write", "sync"]
    assert max(data) < linked
    assert [path for _, path in seen[linked + 1 :]] == [
        str(root / "objects/c1"),
        str(root / "objects"),
        str(root),
    ]
    # The root and the folder above it were new: they are synced into what existed before.
    assert {str(root.parent), str(root.parent.parent)} <= {path for _, path in seen[:linked]}


def test_files_get_the_permissions_of_the_umask(storage: FolderStorage, root: Path) -> None:
    previous = os.umask(0o027)
    try:
        storage.put_if_absent("a", b"x")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o640


def test_short_writes_and_reads_are_continued(
    storage: FolderStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(1000)
    pread, preadv, write = os.pread, os.preadv, os.write
    monkeypatch.setattr(os, "write", lambda fd, view: write(fd, view[:7]))
    monkeypatch.setattr(os, "pread", lambda fd, count, at: pread(fd, min(count, 11), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:13]], at))
    storage.put_if_absent("a", data)
    assert (root / "a").read_bytes() == data
    assert storage.get("a", offset=5, length=900) == data[5:905]
    buffer = bytearray(900)
    storage.get_into("a", buffer, offset=5)
    assert buffer == data[5:905]


def test_an_object_past_two_gigabytes_is_read_where_asked(
    storage: FolderStorage, root: Path
) -> None:
    root.mkdir(parents=True)
    end = (1 << 32) + 5
    with (root / "sparse").open("wb") as out:
        out.seek(end)
        out.write(b"tail")
    assert storage.size("sparse") == end + 4
    assert storage.get("sparse", offset=end - 1, length=5) == b"\0tail"
    assert storage.list("")[0].bytes == end + 4


def test_a_file_cut_while_it_is_read_is_reported_as_short(
    storage: FolderStorage, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put_if_absent("a", b"0123456789")
    pread = os.pread

    def cut(fd: int, count: int, at: int) -> bytes:
        os.truncate(root / "a", 4)
        return pread(fd, count, at)

    monkeypatch.setattr(os, "pread", cut)
    with pytest.raises(CorruptDataError, match="shorter than expected"):
        storage.get("a")


def test_links_pipes_and_folders_are_not_objects(storage: FolderStorage, root: Path) -> None:
    root.mkdir(parents=True)
    secret = root.parent / "secret"
    secret.write_bytes(b"secret")
    (root / "link").symlink_to(secret)
    (root / "dangling").symlink_to(root / "nothing")
    (root / "loop").symlink_to(root.parent)
    os.mkfifo(root / "pipe")
    (root / "folder").mkdir()
    assert storage.list("") == []
    for name in ("link", "dangling", "pipe", "folder"):
        for read in (storage.get, storage.size):
            with pytest.raises(NotFoundError):
                read(name)
        with pytest.raises(ConflictError):
            storage.put_if_absent(name, b"x")
    assert secret.read_bytes() == b"secret"
    assert not (root / "nothing").exists()


def test_delete_removes_folders_it_emptied_up_to_the_root(
    storage: FolderStorage, root: Path
) -> None:
    storage.put_if_absent("objects/c1/a", b"x")
    storage.put_if_absent("objects/c2/a", b"x")
    storage.delete("objects/c1/a")
    assert sorted(path.name for path in (root / "objects").iterdir()) == ["c2"]
    storage.delete("objects/c2/a")
    assert sorted(path.name for path in root.iterdir()) == [".tmp"]


def test_creating_and_deleting_in_one_folder_at_once_loses_nothing(
    storage: FolderStorage, root: Path
) -> None:
    failures: list[BaseException] = []

    def churn(name: str) -> None:
        try:
            for index in range(60):
                storage.put_if_absent(f"objects/c1/{name}", bytes([index]))
                assert storage.get(f"objects/c1/{name}") == bytes([index])
                storage.delete(f"objects/c1/{name}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(str(index),)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert storage.list("") == []


def test_a_writer_whose_file_was_removed_cannot_close(storage: FolderStorage, root: Path) -> None:
    writer = storage.create("a")
    writer.write(b"x")
    for path in (root / ".tmp").iterdir():
        path.unlink()
    with pytest.raises(ConflictError, match="removed by another writer"):
        writer.close()
    assert storage.list("") == []


def test_an_object_cannot_be_a_folder_of_others(storage: FolderStorage) -> None:
    storage.put_if_absent("a", b"x")
    with pytest.raises(InvalidRequestError, match="not what it should be"):
        storage.put_if_absent("a/b", b"x")
    with pytest.raises(NotFoundError):
        storage.get("a/b")
    assert [item.name for item in storage.list("")] == ["a"]


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    storage = FolderStorage(tmp_path / "file")
    with pytest.raises(InvalidRequestError, match="folder"):
        storage.create("a")
    assert (tmp_path / "file").read_bytes() == b"x"


def test_an_unused_writer_does_not_keep_a_descriptor(storage: FolderStorage) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        storage.create("a")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    storage.clean()
    assert list((Path(storage.url) / ".tmp").iterdir()) == []


def run_child(program: str, *arguments: str, prefix: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [*prefix, sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FILL_THE_DISK = """
import sys
from pathlib import Path
from holdfast.errors import UnavailableError
from holdfast.storage import open_storage
exec(sys.argv[2])
storage = open_storage(sys.argv[1])
storage.put_if_absent("objects/small", b"x")
writer = storage.create("objects/big")
try:
    for _ in range(64):
        writer.write(b"x" * 65536)
    writer.close()
except UnavailableError as error:
    print(error)
left = sorted(str(p.relative_to(sys.argv[1])) for p in Path(sys.argv[1]).rglob("*") if p.is_file())
assert left == ["objects/small"], left
try:
    writer.write(b"more")
except Exception as error:
    print(type(error).__name__)
storage.put_if_absent("objects/after", b"there is room again")
"""


def test_a_file_size_limit_is_no_room_and_leaves_nothing(root: Path) -> None:
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    )
    said = run_child(FILL_THE_DISK, str(root), limit).splitlines()
    assert "no room" in said[0] and "EFBIG" in said[0] and "make room" in said[0]
    assert "objects/big" in said[0] and str(root) in said[0]
    assert said[1] == "InvalidRequestError"


@pytest.fixture
def small_disk(tmp_path: Path) -> tuple[str, ...]:
    """A command prefix that mounts 1 MB at tmp_path, in a namespace of its own."""
    mount = f"mount -t tmpfs -o size=1m tmpfs '{tmp_path}'"
    prefix = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
    if (
        not shutil.which("unshare")
        or subprocess.run([*prefix, "true"], capture_output=True).returncode
    ):
        pytest.skip("mounting needs root")
    return prefix


def test_a_full_disk_is_no_room_and_leaves_nothing(root: Path, small_disk: tuple[str, ...]) -> None:
    said = run_child(FILL_THE_DISK, str(root), "", prefix=small_disk).splitlines()
    assert "no room" in said[0] and "ENOSPC" in said[0] and "make room" in said[0]
    assert said[1] == "InvalidRequestError"


READ_ONLY = """
import os, sys
from holdfast.errors import UnavailableError
from holdfast.storage.folder.objects import FolderStorage
storage = FolderStorage(sys.argv[1])
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
assert storage.get("objects/a") == b"x"
assert [item.name for item in storage.list("")] == ["objects/a", "objects/secret"]
for act in (
    lambda: storage.create("objects/b"),
    lambda: storage.put_if_absent("objects/b", b"x"),
    lambda: storage.delete("objects/a"),
    lambda: storage.get("objects/secret"),
):
    try:
        act()
    except UnavailableError as error:
        print(error)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can reach: pytest's own is closed to others."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path
        for folder in path.rglob("*"):
            if folder.is_dir():
                folder.chmod(0o755)


def test_a_read_only_folder_can_be_read_and_names_what_is_denied(open_folder: Path) -> None:
    root = open_folder / "run"
    storage = FolderStorage(root)
    storage.put_if_absent("objects/a", b"x")
    storage.put_if_absent("objects/secret", b"x")
    (root / "objects" / "secret").chmod(0)
    for folder in (root, root / "objects", root / ".tmp"):
        folder.chmod(0o555)
    said = run_child(READ_ONLY, str(root)).splitlines()
    assert len(said) == 4
    for line in said:
        assert "permission denied" in line and str(root) in line and "access" in line


@pytest.mark.parametrize("root", ["a\0b", "a\ud800b", "~nobody-has-this-name/run"])
def test_a_root_that_no_system_can_take_is_refused(root: str) -> None:
    with pytest.raises(InvalidRequestError, match="not a path"):
        FolderStorage(root)
