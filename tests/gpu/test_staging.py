"""A snapshot of tables on a device: copied there, brought to the host behind training."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

import holdfast as hf
from holdfast.checkpoint.saving.device_staging import DeviceRoom
from holdfast.checkpoint.saving.workbench import Workbench
from holdfast.model import devices
from tests.gpu.model import Training, check_network, check_rows
from tests.gpu.pretend import GARBAGE, PretendDevice, spoil


def begin(tmp_path: Path, training: Training, **settings: object) -> hf.Checkpointer:
    chosen = {"strategy": "check-n-run", "codec": "fp32", "save_last": False, **settings}
    return hf.Checkpointer(
        tmp_path / "run", model=training.model, optimizer=training.optimizers, **chosen
    )


def rooms(ck: hf.Checkpointer) -> list[DeviceRoom]:
    bench: Workbench = ck._bench
    return list(bench._rooms.values())


def test_a_save_returns_before_anything_has_left_the_device(
    tmp_path: Path, device: PretendDevice
) -> None:
    training = Training("cpu")
    with begin(tmp_path, training, strategy="full") as ck:
        for step in range(1, 7):
            training.step(step)
            ck.step()
            if step % 3 == 0:
                rows, network = training.rows(), training.network()
                device.gate.clear()
                save = ck.save()
                assert not save.done()
                training.spoil()  # the next step, before the copy has left
                device.gate.set()
                save.result()
                run = hf.open(tmp_path / "run")
                check_rows(run, step, rows)
                check_network(run, step, network)


def test_rows_of_a_delta_are_those_of_the_snapshot(tmp_path: Path, device: PretendDevice) -> None:
    training = Training("cpu")
    with begin(tmp_path, training) as ck:
        training.step(1)
        ck.step()
        ck.save().result()
        for step in (2, 3):
            training.step(step)
            ck.step()
        rows, network = training.rows(), training.network()
        device.gate.clear()
        save = ck.save()
        training.step(4)
        training.step(5)
        device.gate.set()
        stats = save.result()
    assert stats.kind == "delta" and 0 < stats.rows < 700
    run = hf.open(tmp_path / "run")
    check_rows(run, 3, rows)
    check_network(run, 3, network)


def test_buffers_are_pinned_and_used_again(
    tmp_path: Path, device: PretendDevice, small_buffers: int
) -> None:
    training = Training("cpu")
    with begin(tmp_path, training, strategy="full") as ck:
        ck.save().result()
        first = device.pinned
        assert first >= training.model.users.weight.nbytes
        training.step(1)
        ck.step()
        ck.save().result()
    # Networks have memory of their own each time, and the ends of tables too.
    assert device.pinned - first < first / 2


@pytest.mark.parametrize("free_bytes", [0, 100_000, 1 << 40])
def test_copies_on_the_device_are_bounded(
    tmp_path: Path,
    device: PretendDevice,
    small_buffers: int,
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
) -> None:
    out: list[int] = []
    reserve = DeviceRoom.reserve

    def watched(room: DeviceRoom, size: int) -> None:
        reserve(room, size)
        out.append(room._out)

    monkeypatch.setattr(DeviceRoom, "reserve", watched)
    device.free = free_bytes
    training = Training("cpu")
    training.step(1)
    with begin(tmp_path, training) as ck:
        rows = training.rows()
        stats = ck.save().result()
        assert [room._out for room in rooms(ck)] == [0]
    assert stats.staged_bytes > 8 * small_buffers
    assert small_buffers <= max(out) <= max(2 * small_buffers, free_bytes // 2)
    check_rows(hf.open(tmp_path / "run"), 0, rows)


def test_training_waits_only_where_the_device_has_no_room(
    tmp_path: Path, device: PretendDevice, small_buffers: int
) -> None:
    training = Training("cpu")
    device.free = 0
    saved = threading.Event()
    with begin(tmp_path, training) as ck:
        device.gate.clear()

        def save() -> None:
            ck.save()
            saved.set()

        thread = threading.Thread(target=save)
        thread.start()
        while device.fetches == 0:
            assert not saved.wait(0.01)
        device.gate.set()
        thread.join()
        assert saved.is_set()
        ck.wait()
    assert hf.open(tmp_path / "run").steps == (0,)


def test_a_host_pool_smaller_than_a_part_of_the_selection_is_enough(
    tmp_path: Path, device: PretendDevice, small_buffers: int
) -> None:
    training = Training("cpu")
    training.step(1)
    rows = training.rows()
    with begin(tmp_path, training, staging_bytes_max=1, threads=2) as ck:
        ck.save().result()
    check_rows(hf.open(tmp_path / "run"), 0, rows)


@pytest.mark.parametrize("away", ["users", "items"])
@pytest.mark.parametrize("pool", [1, 40_000, None])
def test_tables_here_and_there_are_saved_together(
    tmp_path: Path,
    device: PretendDevice,
    small_buffers: int,
    monkeypatch: pytest.MonkeyPatch,
    away: str,
    pool: int | None,
) -> None:
    training = Training("cpu")
    training.step(1)
    weight = getattr(training.model, away).weight
    of_device = {weight.data_ptr(), training.tables.state[weight]["sum"].data_ptr()}
    monkeypatch.setattr(devices, "is_on_host", lambda tensor: tensor.data_ptr() not in of_device)
    with begin(tmp_path, training, staging_bytes_max=pool, threads=2) as ck:
        rows = training.rows()
        device.gate.clear()
        save = ck.save()
        training.spoil()
        device.gate.set()
        save.result()
    assert device.fetches > 1
    check_rows(hf.open(tmp_path / "run"), 0, rows)


def test_a_column_in_host_memory_goes_along_with_one_on_the_device(
    tmp_path: Path, device: PretendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training("cpu")
    training.step(1)
    here = training.tables.state[training.model.users.weight]["sum"].data_ptr()
    monkeypatch.setattr(devices, "is_on_host", lambda tensor: tensor.data_ptr() == here)
    with begin(tmp_path, training) as ck:
        rows = training.rows()
        save = ck.save()
        training.spoil()
        save.result()
    check_rows(hf.open(tmp_path / "run"), 0, rows)


def test_a_copy_that_fails_fails_the_save_and_the_next_holds_its_rows(
    tmp_path: Path, device: PretendDevice, small_buffers: int
) -> None:
    training = Training("cpu")
    with begin(tmp_path, training, staging_bytes_max=4 * small_buffers) as ck:
        ck.save().result()
        for step in (1, 2):
            training.step(step)
            ck.step()

        def fail() -> None:
            raise RuntimeError("the device is lost")

        device.on_fetch = fail
        save = ck.save()
        with pytest.raises(RuntimeError, match="the device is lost"):
            save.result()
        device.on_fetch = lambda: None
        (room,) = rooms(ck)
        assert room._out == 0
        assert ck._bench.pool._out == 0
        training.step(3)
        ck.step()
        rows = training.rows()
        ck.save().result()
    check_rows(hf.open(tmp_path / "run"), 3, rows)


def test_a_device_out_of_memory_is_tried_again_when_copies_have_left(
    tmp_path: Path, device: PretendDevice, small_buffers: int
) -> None:
    training = Training("cpu")
    training.step(1)
    failures = [0]

    def exhaust() -> None:
        (room,) = rooms(ck) or [None]
        if room is not None and room._out > 3 * small_buffers and failures[0] < 4:
            failures[0] += 1
            device.gate.set()
            raise torch.cuda.OutOfMemoryError("out of memory")

    with begin(tmp_path, training) as ck:
        rows = training.rows()
        device.gate.clear()
        device.on_copy = exhaust
        ck.save().result()
        assert failures[0] > 0
    check_rows(hf.open(tmp_path / "run"), 0, rows)


def test_a_newer_save_cancels_one_whose_copies_have_not_left(
    tmp_path: Path, device: PretendDevice, small_buffers: int
) -> None:
    training = Training("cpu")
    with begin(tmp_path, training, on_busy="cancel") as ck:
        training.step(1)
        ck.step()
        device.gate.clear()
        ck.save()
        cancellation = ck._saves.running.cancellation
        training.step(2)
        ck.step()

        def open_the_gate() -> None:
            while not cancellation.is_asked:
                time.sleep(0.01)
            device.gate.set()

        opener = threading.Thread(target=open_the_gate)
        opener.start()
        rows = training.rows()
        ck.save().result()
        opener.join()
        (room,) = rooms(ck)
        assert room._out == 0
    run = hf.open(tmp_path / "run")
    assert run.steps == (2,)
    check_rows(run, 2, rows)


def test_the_pretended_device_shows_garbage_to_those_who_do_not_wait(device: PretendDevice) -> None:
    table = torch.arange(8.0)
    copy = devices.join([table])
    table.zero_()
    found, arrival = copy.to_new_host()
    assert (found.view(torch.uint8) == GARBAGE).all()
    arrival.wait()
    assert found.tolist() == list(range(8))
    early = device.ready()
    late = device.join([table])
    into = spoil(torch.empty(8))
    device.copy_to_host(late, into, early).wait()
    assert (into.view(torch.uint8) == GARBAGE).all()
