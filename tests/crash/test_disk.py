"""A full disk and missing permissions: said clearly, nothing lost, and the next save works."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.storage import open_storage
from tests.conftest import fingerprint
from tests.crash.story import Plot, assert_recovers, oracle, train

PLOT = Plot("adagrad", "consecutive", base_later="consecutive", keep=9)
NOBODY = 65534


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KB; skipped where this user may not mount one."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if done.returncode:
        pytest.skip("mounting needs privileges; the file size limit is tested anyway")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk_is_reported_and_training_goes_on(small_disk: Path) -> None:
    url = small_disk / "run"
    model = PLOT.build()
    torch.manual_seed(99)
    with PLOT.checkpointer(open_storage(str(url)), model) as ck:
        train(model, range(1), ck.step)
        ck.save().result()
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as out, pytest.raises(OSError, match="space"):
            while True:
                out.write(bytes(4096))
        train(model, range(1, 2), ck.step)
        with pytest.raises(hf.UnavailableError, match=r"no room.*make room, then save again"):
            ck.save().result()
        assert hf.open(url).steps == (1,)
        assert hf.verify(open_storage(str(url))).is_sound
        train(model, range(2, 3), ck.step)
        with pytest.raises(hf.UnavailableError, match="no room"):
            ck.save().result()
        ballast.unlink()
        train(model, range(3, 4), ck.step)
        ck.save().result()
        assert ck.all_steps() == (1, 4)
        assert not list((url / ".tmp").iterdir())
    assert_recovers(open_storage(str(url)), PLOT, 4)


def in_child(act: Callable[[], None]) -> None:
    """Run something in a process of its own, because it changes the process for good."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child failed; its traceback is above"


def save_beyond_the_limit(folder: Path) -> None:
    """Without a model, hence without a thread or an optimizer that a fork would not survive."""
    storage = open_storage(str(folder))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    writer = storage.create("objects/c00000009/r0-a.hf")
    with pytest.raises(hf.UnavailableError, match="no room"):
        writer.write(np.zeros(20_000, np.uint8))
    with pytest.raises(hf.UnavailableError, match="no room"):
        storage.put_if_absent("catalog/00000009.json", bytes(20_000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    storage.put_if_absent("catalog/00000009.json", bytes(20_000))


def test_file_size_limit_is_reported_as_no_room(tmp_path: Path) -> None:
    in_child(lambda: save_beyond_the_limit(tmp_path))
    found = {item.name: item.bytes for item in open_storage(str(tmp_path)).list("")}
    assert found == {"catalog/00000009.json": 20_000}
    assert not list((tmp_path / ".tmp").iterdir())


def let_others_in(folder: Path) -> None:
    """Let other users pass through a test's folder and those it is in; not one more than needed."""
    for each in (folder, *folder.parents):
        mode = stat.S_IMODE(each.stat().st_mode)
        if mode & 0o005 == 0o005:
            return
        each.chmod(mode | 0o055)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_missing_write_permission_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    let_others_in(tmp_path)
    url = tmp_path / "run"
    model = PLOT.build()
    torch.manual_seed(99)
    with PLOT.checkpointer(open_storage(str(url)), model) as ck:
        train(model, range(1), ck.step)
        ck.save().result()
        train(model, range(1, 2), ck.step)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(hf.UnavailableError, match=r"permission denied.*write access"):
                ck.save().result()
            assert hf.open(url).steps == (1,)
        finally:
            os.seteuid(0)
        train(model, range(2, 3), ck.step)
        ck.save().result()
        assert ck.all_steps() == (1, 3)
    assert_recovers(open_storage(str(url)), PLOT, 3)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_unreadable_run_is_reported_and_the_model_untouched(tmp_path: Path) -> None:
    let_others_in(tmp_path)
    url = tmp_path / "run"
    model = PLOT.build()
    torch.manual_seed(99)
    with PLOT.checkpointer(open_storage(str(url)), model) as ck:
        train(model, range(1), ck.step)
        ck.save().result()
    for path in url.rglob("*.hf"):
        path.chmod(0o600)
    other = PLOT.build(seed=5)
    before = fingerprint(*other)
    os.seteuid(NOBODY)
    try:
        with PLOT.checkpointer(open_storage(str(url)), other) as ck:
            with pytest.raises(hf.UnavailableError, match="permission denied"):
                ck.resume()
            assert fingerprint(*other) == before
            with pytest.raises(hf.InvalidRequestError):
                ck.save()
    finally:
        os.seteuid(0)
    with PLOT.checkpointer(open_storage(str(url)), other) as ck:
        assert ck.resume() == 1
    assert fingerprint(*other) == oracle(PLOT)[1]
