"""fsspec URLs: opening them, what their errors become, and that no secret is shown."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from holdfast.errors import (
    ConflictError,
    HoldfastError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from holdfast.storage import open_storage
from holdfast.storage.base import shown
from holdfast.storage.folder.objects import FolderStorage
from holdfast.storage.remote import RemoteStorage
from holdfast.storage.settings import RemoteSettings


class Backend(MemoryFileSystem):
    """A real file system in memory that raises what it is told to, at the call it is told to."""

    cachable = False

    def __init__(self, *, protocol: str = "memory") -> None:
        super().__init__(global_store=False)
        self.protocol = protocol
        self.failing: dict[str, Exception] = {}
        self.after_exists: Callable[[], None] = lambda: None

    def _fail(self, call: str) -> None:
        if call in self.failing:
            raise self.failing[call]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._fail("pipe_file")
        super().pipe_file(path, value, mode=mode, **options)

    def cat_file(self, path: str, *options: Any, **named: Any) -> bytes:
        self._fail("cat_file")
        return super().cat_file(path, *options, **named)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self._fail("info")
        return super().info(path, **options)

    def find(self, path: str, *options: Any, **named: Any) -> Any:
        self._fail("find")
        return super().find(path, *options, **named)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._fail("ls")
        return super().ls(path, detail=detail, **options)

    def exists(self, path: str, **options: Any) -> bool:
        found = super().exists(path, **options)
        self.after_exists()
        return found

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        self._fail("mv")
        super().mv(path1, path2, **options)

    def rm_file(self, path: str) -> None:
        self._fail("rm_file")
        super().rm_file(path)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._fail("open")
        return super().open(path, mode=mode, **options)


ONCE = RemoteSettings(tries=1)


def made(**options: Any) -> tuple[Backend, RemoteStorage]:
    backend = Backend(**options)
    return backend, RemoteStorage(
        backend, "/run", url="gs://user:hunter2@host/run?token=hunter2", settings=ONCE
    )


class ForeignError(Exception):
    """What a backend's own library raises: not an OSError."""


class ResponseError(Exception):
    """The shape of a botocore error."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}}


class StatusError(Exception):
    """The shape of an HTTP error."""

    def __init__(self, code: int) -> None:
        super().__init__("failed")
        self.code = code


CALLS = [
    ("open", lambda s: s.create("b")),
    ("mv", lambda s: s.put_if_absent("b", b"x")),
    ("cat_file", lambda s: s.get("a")),
    ("cat_file", lambda s: s.get("a", length=1)),
    ("cat_file", lambda s: s.get_into("a", bytearray(1))),
    ("info", lambda s: s.size("a")),
    ("find", lambda s: s.list("")),
    ("find", lambda s: s.clean()),
    ("rm_file", lambda s: s.delete("a")),
]


@pytest.mark.parametrize(("call", "act"), CALLS)
@pytest.mark.parametrize(
    "raised",
    [ForeignError("odd"), OSError(5, "i/o"), TimeoutError("slow"), PermissionError("denied")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_backend_raises_becomes_unavailable(
    call: str, act: Any, raised: Exception
) -> None:
    backend, storage = made()
    backend.pipe_file("/run/a", b"x")
    backend.failing[call] = raised
    with pytest.raises(UnavailableError) as caught:
        act(storage)
    assert caught.value.__cause__ is raised
    assert ("credentials" in str(caught.value)) == isinstance(raised, PermissionError)
    assert set(backend.store) == {"/run/a"}


class Walked(Backend):
    """Lists as most file systems do: folder by folder, leaving out those that it fails to list."""

    find = AbstractFileSystem.find


@pytest.mark.parametrize("raised", [ConnectionError("refused"), PermissionError("denied")])
def test_a_store_that_cannot_be_listed_is_not_an_empty_one(raised: Exception) -> None:
    backend = Walked()
    storage = RemoteStorage(backend, "/run", url="sftp://host/run", settings=ONCE)
    assert storage.list("") == []
    backend.pipe_file("/run/catalog/a", b"x")
    assert [item.name for item in storage.list("catalog/")] == ["catalog/a"]
    backend.failing["ls"] = raised
    with pytest.raises(UnavailableError):
        storage.list("catalog/")


@pytest.mark.parametrize("raised", [FileExistsError(), StatusError(412)])
def test_a_creation_refused_by_the_server_is_a_conflict(raised: Exception) -> None:
    backend, storage = made(protocol="gs")
    backend.failing["pipe_file"] = raised
    with pytest.raises(ConflictError):
        storage.put_if_absent("catalog/1", b"x")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("PreconditionFailed", ConflictError),
        ("412", ConflictError),
        ("409", UnavailableError),
        ("500", UnavailableError),
    ],
)
def test_a_translated_server_error_is_still_understood(
    code: str, kind: type[HoldfastError]
) -> None:
    backend, storage = made(protocol="gs")
    translated = OSError(22, "failed")
    translated.__cause__ = ResponseError(code)
    backend.failing["pipe_file"] = translated
    with pytest.raises(kind):
        storage.put_if_absent("catalog/1", b"x")


def test_a_name_taken_after_the_check_is_left_to_the_server() -> None:
    backend, storage = made(protocol="gs")

    def overtake() -> None:
        backend.after_exists = lambda: None
        backend.pipe_file("/run/catalog/1", b"winner")

    backend.after_exists = overtake
    with pytest.raises(ConflictError):
        storage.put_if_absent("catalog/1", b"loser")
    assert backend.cat_file("/run/catalog/1") == b"winner"


def test_two_threads_are_never_both_between_check_and_creation() -> None:
    backend, _ = made()
    storages = [RemoteStorage(backend, "/run", url="memory://run") for _ in range(2)]
    both_inside = threading.Barrier(2)

    def wait_for_the_other() -> None:
        # With one thread at a time nobody comes: the wait ends, and the barrier stays broken.
        with suppress(threading.BrokenBarrierError):
            both_inside.wait(0.3)

    backend.after_exists = wait_for_the_other

    def attempt(index: int) -> bool:
        try:
            storages[index].put_if_absent("catalog/1", str(index).encode())
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        won = list(pool.map(attempt, range(2)))
    assert won.count(True) == 1
    assert backend.cat_file("/run/catalog/1") == str(won.index(True)).encode()


def test_a_failed_move_leaves_no_leftover_behind() -> None:
    backend, storage = made()
    backend.failing["mv"] = OSError(5, "i/o")
    with storage.create("a") as writer:
        writer.write(b"x")
        with pytest.raises(UnavailableError):
            writer.close()
    assert backend.store == {}


def test_a_removed_upload_cannot_be_closed() -> None:
    backend, storage = made()
    other = RemoteStorage(backend, "/run", url="memory://run")
    writer = storage.create("a")
    writer.write(b"x")
    other.clean()
    with pytest.raises(ConflictError, match="removed by another writer"):
        writer.close()
    assert backend.store == {}


def test_an_upload_of_the_wrong_length_does_not_count() -> None:
    backend, storage = made()
    with storage.create("a") as writer:
        writer.write(b"0123456789")
        (unfinished,) = backend.store.values()
        unfinished.truncate(4)
        with pytest.raises(UnavailableError, match="incomplete"):
            writer.close()
    assert backend.store == {}


def test_a_failed_read_within_the_object_is_not_called_short() -> None:
    backend, storage = made()
    backend.pipe_file("/run/a", b"0123456789")
    backend.failing["cat_file"] = OSError(22, "invalid")
    with pytest.raises(UnavailableError):
        storage.get("a", offset=2, length=8)
    with pytest.raises(HoldfastError, match="shorter"):
        storage.get("a", offset=2, length=9)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@bucket/run",
        "https://host/run?signature=hunter2",
        "sftp://me:p@hunter2@host/run",
        "s3://bucket/run#hunter2",
    ],
)
def test_a_shown_url_has_no_secret(url: str) -> None:
    assert "hunter2" not in shown(url)
    assert shown(url).endswith("/run")


def test_no_secret_is_in_url_repr_or_message() -> None:
    backend, storage = made()
    backend.failing["find"] = ForeignError("GET https://me:hunter2@host/run?sig=hunter2 failed")
    with pytest.raises(UnavailableError) as caught:
        storage.list("")
    with pytest.raises(NotFoundError) as missing:
        storage.get("a")
    for text in (storage.url, repr(storage), str(caught.value), str(missing.value)):
        assert "hunter2" not in text
    assert "failed" in str(caught.value)


@pytest.mark.parametrize("url", ["nosuch://bucket/run", "", "file://otherhost/run"])
def test_a_url_that_cannot_be_opened_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError):
        open_storage(url)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("dir://x", InvalidRequestError),
        ("tar://x::file://{file}", InvalidRequestError),
        ("zip://x::file://{file}", InvalidRequestError),
        ("zip://x::file:///nowhere/at/all.zip", UnavailableError),
        ("reference://::file://{file}", InvalidRequestError),
        ("ftp://127.0.0.1:1/x", UnavailableError),
    ],
)
def test_whatever_opening_a_url_raises_becomes_ours(
    url: str, error: type[HoldfastError], tmp_path: Path
) -> None:
    (tmp_path / "odd").write_bytes(b"neither a tar nor a zip")
    with pytest.raises(error) as caught:
        open_storage(url.format(file=tmp_path / "odd")).list("")
    assert type(caught.value) is error


def test_a_missing_package_is_named() -> None:
    # An import of None fails as if the package were not installed, whether it is or not.
    program = """
import sys
sys.modules["s3fs"] = None
from holdfast.storage import open_storage
try:
    open_storage("s3://key:hunter2@bucket/run")
except ValueError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("InvalidRequestError")
    assert "s3fs" in done.stdout
    assert "hunter2" not in done.stdout


def test_a_folder_does_not_load_fsspec() -> None:
    program = """
import importlib.util, sys, types
package = types.ModuleType("holdfast")
package.__path__ = [sys.argv[1]]
sys.modules["holdfast"] = package
from holdfast.storage import open_storage
open_storage("/nowhere").list("")
print("fsspec" in sys.modules)
"""
    package = Path(sys.modules["holdfast"].__file__ or "").parent
    done = subprocess.run(
        [sys.executable, "-c", program, str(package)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "False\n"


def test_paths_and_file_urls_open_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a run"
    for url in (folder, str(folder), folder.as_uri(), f"local://{folder}", "a run", Path("a run")):
        storage = open_storage(url)
        assert isinstance(storage, FolderStorage)
        assert storage.url == str(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_storage("~/runs").url == str(tmp_path / "runs")


def test_options_go_to_fsspec_and_a_folder_takes_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no options"):
        open_storage(tmp_path, key="secret")
    own = open_storage("memory://run", global_store=False, skip_instance_cache=True)
    own.put_if_absent("a", b"x")
    assert own.get("a") == b"x"
    assert open_storage("memory://run").list("") == []


def test_names_that_no_object_of_ours_has_are_not_listed_and_keep_nobody_from_collecting() -> None:
    """The storage would refuse to delete what it had listed, and so everything that comes after."""
    storage = open_storage("memory://named-by-others")
    storage.put_if_absent("objects/c00000001/rows.hf", b"x")
    for name in ("a\\b.hf", "a\x1b.hf", ".a.hf"):
        MemoryFileSystem().pipe(f"/named-by-others/objects/c00000001/{name}", b"x")
    assert [item.name for item in storage.list("objects/")] == ["objects/c00000001/rows.hf"]
    for item in storage.list("objects/"):
        storage.delete(item.name)
    assert storage.list("objects/") == []
