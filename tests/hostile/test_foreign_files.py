"""Files of other programs that lie, are cut off or try to run something: refused, never run."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import holdfast as hf
from holdfast.boundary.budget import Budget
from holdfast.interchange.archive.pickles import Maker, Names, read_pickle, record
from tests.conftest import SEED

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


def torch_file(path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {"e.weight": torch.randn(50, 4), "top.weight": torch.randn(3)}
    torch.save({"model": tensors, "step": 5}, path)
    return path


def dcp_folder(path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {"e.weight": torch.randn(50, 4), "top.weight": torch.randn(3)}
    dcp.save({"model": tensors, "step": 5}, checkpoint_id=path, no_dist=True)
    return path


def attempt(source: Path, url: Path) -> bool:
    """Import; whether it was refused, and then left nothing."""
    try:
        hf.import_checkpoint(source, url, tables=["e.weight"])
    except hf.HoldfastError:
        assert not url.exists()
        return True
    return False


def test_torch_file_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"model": {"e.weight": torch.ones(2, 2)}, "x": Bomb(tmp_path / "b")},
               tmp_path / "a.pt")  # fmt: skip
    with pytest.raises(hf.InvalidRequestError, match="not run") as caught:
        hf.import_checkpoint(tmp_path / "a.pt", tmp_path / "run", tables=["*"])
    assert "weights_only=False" not in str(caught.value)  # torch's own advice
    assert not (tmp_path / "b").exists() and not (tmp_path / "run").exists()


def test_dcp_metadata_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "d")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data["x"] = Bomb(tmp_path / "b")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(hf.CorruptDataError, match="not run"):
        hf.import_checkpoint(folder, tmp_path / "run", tables=["*"])
    assert not (tmp_path / "b").exists() and not (tmp_path / "run").exists()


def test_dcp_piece_or_value_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    for name in ("model.top.weight", "step"):
        folder = dcp_folder(tmp_path / name)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        (place,) = (p for p in metadata.storage_data if p.fqn == name)
        buffer = io.BytesIO()
        torch.save(Bomb(tmp_path / "b"), buffer)
        (folder / "evil.distcp").write_bytes(buffer.getvalue())
        info = metadata.storage_data[place]
        info.relative_path, info.offset = "evil.distcp", 0
        info.length = len(buffer.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(hf.CorruptDataError, match="not run"):
            hf.import_checkpoint(folder, tmp_path / "run", tables=["e.weight"])
        assert not (tmp_path / "b").exists()


def read(data: bytes, names: Names) -> object:
    return read_pickle(data, names, what="test", account=Budget(len(data)).open_account())


@pytest.mark.parametrize("name", ["builtins.eval", "os.system", "torch.load", "builtins.getattr",
                                  "torch.distributed.checkpoint.metadata.os",
                                  "holdfast.interchange.archive.pickles.struct"])  # fmt: skip
def test_no_name_but_those_of_the_table_is_looked_up(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    data = b"\x80\x04" + b"".join(
        b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, attribute)
    ) + b"\x93."  # fmt: skip
    with pytest.raises(hf.CorruptDataError, match="no place"):
        read(data, {("torch", "Size"): Maker("Size", lambda account, sizes: tuple(sizes))})


@pytest.mark.parametrize("data", [
    b"", b".", b"\x80\x04", b"\x80\x04N", b"(", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x80\x02r\xff\xff\xff\x7f.",  # a memo that a C reader would make room for
    b"\x80\x04\x82\x01.",  # an extension
    b"\x80\x04Nb.", b"\x80\x04]}K\x01K\x01sb.", b"\x80\x04K\x01K\x02R.",
])  # fmt: skip
def test_broken_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(hf.CorruptDataError):
        read(data, {})


def test_stand_ins_cannot_be_changed_for_the_next_reader() -> None:
    """A pickle that sets attributes of a class: the next reading knows nothing of it."""
    names = {("a", "B"): record("B")}
    data = b"\x80\x02ca\nB\n(NX\x04\x00\x00\x00nameX\x01\x00\x00\x00xstb."
    with pytest.raises(hf.CorruptDataError):
        read(data, names)
    assert names["a", "B"].name == "B"


def test_every_cut_of_a_torch_file_is_refused(tmp_path: Path) -> None:
    data = torch_file(tmp_path / "a.pt").read_bytes()
    for size in range(0, len(data) - 1, 97):
        (tmp_path / "cut.pt").write_bytes(data[:size])
        assert attempt(tmp_path / "cut.pt", tmp_path / "run"), size


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_every_cut_of_a_dcp_file_is_refused(tmp_path: Path, name: str) -> None:
    path = dcp_folder(tmp_path / "d") / name
    data = path.read_bytes()
    for size in range(0, len(data) - 1, 61):
        path.write_bytes(data[:size])
        assert attempt(tmp_path / "d", tmp_path / "run"), size
    path.unlink()
    assert attempt(tmp_path / "d", tmp_path / "run")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "a.pt"])
def test_flipped_bytes_are_refused_or_change_numbers_only(tmp_path: Path, name: str) -> None:
    draw = random.Random(SEED)
    source = torch_file(tmp_path / "a.pt") if name == "a.pt" else dcp_folder(tmp_path / "d")
    path = source if name == "a.pt" else source / name
    data = path.read_bytes()
    for count in range(120):
        flipped = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            flipped[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(flipped)
        url = tmp_path / f"run{count}"
        if not attempt(source, url):
            assert hf.open(url).read(hf.open(url).steps[0], "e.weight").weight.shape[1] > 0, SEED


def test_pieces_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "d")
    (folder / "__0_0.distcp").rename(tmp_path / "secret")
    for path in ("../secret", str(tmp_path / "secret")):
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = path
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(hf.CorruptDataError, match="outside"):
            hf.import_checkpoint(folder, tmp_path / "run", tables=["*"])


def test_pieces_that_overlap_or_leave_something_out_are_refused(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "d")
    for sizes in ([(50, 4), (50, 4)], [(49, 4)], [(51, 4)], [], [(50, 2), (25, 4)]):
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        entry = metadata.state_dict_metadata["model.e.weight"]
        chunk = entry.chunks[0]
        entry.chunks = [type(chunk)(chunk.offsets, torch.Size(size)) for size in sizes]
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(hf.CorruptDataError, match="cover"):
            hf.import_checkpoint(folder, tmp_path / "run", tables=["*"])
        (folder / ".metadata").unlink()
        folder.joinpath("__0_0.distcp").unlink()
        folder.rmdir()
        dcp_folder(folder)


def test_tensor_that_reaches_beyond_its_record_is_refused(tmp_path: Path) -> None:
    """A structure that says 50 x 4 numbers over a record of fewer."""
    source = torch_file(tmp_path / "a.pt")
    for name in ("a.pt", "d"):
        if name == "a.pt":
            changed = _with_record(source.read_bytes(), b"short")
            (tmp_path / "b.pt").write_bytes(changed)
            assert attempt(tmp_path / "b.pt", tmp_path / "run")


def _with_record(data: bytes, content: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            is_numbers = info.filename.endswith("data/0")
            new.writestr(info.filename, content if is_numbers else old.read(info))
    return out.getvalue()


def test_zip_that_lies_about_where_a_record_is_is_refused(tmp_path: Path) -> None:
    folder = dcp_folder(tmp_path / "d")
    path = folder / "__0_0.distcp"
    data = path.read_bytes()
    for value in (0xFFFFFFFE, len(data) + 5):
        flipped = data.replace(struct.pack("<I", 50 * 4 * 4), struct.pack("<I", value))
        assert flipped != data
        path.write_bytes(flipped)
        assert attempt(folder, tmp_path / "run")
