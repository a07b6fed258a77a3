"""Folders of DCP that lie: no byte outside of the folder is read, and none is read twice."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast as hf
from tests.hostile.import_bombs import TABLE, dcp_folder, store
from tests.hostile.mutators.import_check import check_import

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FILE = "__0_0.distcp"


def refuse(folder: Path, match: str | None = None) -> None:
    url = folder.with_name("run")
    with pytest.raises(hf.HoldfastError, match=match):
        hf.import_checkpoint(folder, url, tables=["e.weight"])
    assert not url.exists()


def change(metadata: Any, name: str, **fields: Any) -> None:
    """Say something else of where an entry lies."""
    (index,) = (i for i in metadata.storage_data if i.fqn == name)
    metadata.storage_data[index] = dataclasses.replace(metadata.storage_data[index], **fields)


@pytest.mark.parametrize("name", [FILE, ".metadata"])
@pytest.mark.parametrize("is_outside", [True, False])
def test_links_in_a_folder_are_not_followed(tmp_path: Path, name: str, is_outside: bool) -> None:
    folder = tmp_path / "d"
    dcp_folder(folder)
    target = tmp_path / "secret" if is_outside else folder / "other"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)
    refuse(folder, "link|no folder")
    shutil.copytree(folder, tmp_path / "copy")  # as cp -rL does
    assert check_import(tmp_path / "copy", tmp_path / "run") == "right"


def test_linked_folder_in_a_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    metadata = dcp_folder(folder)
    (tmp_path / "elsewhere").mkdir()
    (folder / FILE).rename(tmp_path / "elsewhere" / FILE)
    (folder / "inner").symlink_to(tmp_path / "elsewhere")
    for info in metadata.storage_data.values():
        info.relative_path = f"inner/{FILE}"
    store(folder, metadata)
    refuse(folder)
    (folder / "inner").unlink()
    shutil.copytree(tmp_path / "elsewhere", folder / "inner")
    assert check_import(folder, tmp_path / "run") == "right"


def test_folder_that_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    dcp_folder(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert check_import(tmp_path / "link", tmp_path / "run") == "right"


@pytest.mark.parametrize("name", [FILE, ".metadata"])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, name: str) -> None:
    for make in (os.mkfifo, os.mkdir, lambda path: None):
        folder = tmp_path / "d"
        dcp_folder(folder)
        (folder / name).unlink()
        make(folder / name)
        refuse(folder, "missing|no folder")
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "", ".", "..", "a/../secret", f"./{FILE}", f"{FILE}/",
             "\0", "a" * 5000, "/".join(["a"] * 100), 5, None],
    ids=lambda path: repr(path)[:20],
)  # fmt: skip
def test_paths_that_lead_elsewhere_are_refused(tmp_path: Path, path: Any) -> None:
    metadata = dcp_folder(tmp_path / "d")
    (tmp_path / "secret").write_bytes((tmp_path / "d" / FILE).read_bytes())
    change(metadata, "model.e.weight", relative_path=path)
    store(tmp_path / "d", metadata)
    refuse(tmp_path / "d")


@pytest.mark.parametrize("field", ["offset", "length"])
@pytest.mark.parametrize("value", [-1, 1, 4, 64, 2**31, 2**63, 2**64, 1.5, None, "x", True])
def test_places_that_cannot_be_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    metadata = dcp_folder(tmp_path / "d")
    change(metadata, "model.e.weight", **{field: value})
    store(tmp_path / "d", metadata)
    refuse(tmp_path / "d")


def test_pieces_that_share_bytes_are_refused(tmp_path: Path) -> None:
    metadata = dcp_folder(tmp_path / "d", other=TABLE.clone())
    places = {index.fqn: info for index, info in metadata.storage_data.items()}
    other = places["other"]
    change(metadata, "model.e.weight", offset=other.offset, length=other.length)
    store(tmp_path / "d", metadata)
    refuse(tmp_path / "d", "share bytes")


@pytest.mark.parametrize(
    ("path", "said"),
    [((), "path"), (("a",) * 65, "path"), (("model", None), "path"), (("model", 1.5), "path"),
     ("model", "path"), (("model",), "one name"), (("model", "e.weight", "x"), "one name"),
     (("model", "e.weight"), "one name")],
    ids=repr,
)  # fmt: skip
def test_entries_without_a_place_of_their_own_are_refused(
    tmp_path: Path, path: Any, said: str
) -> None:
    metadata = dcp_folder(tmp_path / "d", other=torch.ones(2))
    metadata.planner_data["other"] = path
    store(tmp_path / "d", metadata)
    refuse(tmp_path / "d", said)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, "float32", None])
def test_piece_of_another_type_than_the_metadata_says_is_refused(
    tmp_path: Path, dtype: Any
) -> None:
    metadata = dcp_folder(tmp_path / "d")
    metadata.state_dict_metadata["model.e.weight"].properties.dtype = dtype
    store(tmp_path / "d", metadata)
    refuse(tmp_path / "d")


def test_metadata_with_the_wrong_things_in_it_is_refused(tmp_path: Path) -> None:
    for field in ("state_dict_metadata", "planner_data", "storage_data"):
        for value in ([], 5, "x", {1: 2}, {"a": None}, {None: None}):
            metadata = dcp_folder(tmp_path / "d")
            setattr(metadata, field, value)
            store(tmp_path / "d", metadata)
            refuse(tmp_path / "d")
            shutil.rmtree(tmp_path / "d")


def test_grids_of_pieces_are_imported_as_one_table(tmp_path: Path) -> None:
    """Pieces by rows and columns, each in a file of its own; some are views of larger tensors."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    torch.manual_seed(1)
    whole = torch.randn(60, 12)
    metadata = dcp_folder(tmp_path / "d")
    (old,) = (i for i in metadata.storage_data if i.fqn == "model.e.weight")
    info = metadata.storage_data.pop(old)
    entry = metadata.state_dict_metadata["model.e.weight"]
    entry.size, entry.chunks = whole.shape, []
    cuts = [(0, 10, 0, 12), (10, 40, 0, 5), (10, 25, 5, 12), (25, 40, 5, 12), (40, 60, 0, 1),
            (40, 60, 1, 12), (60, 60, 0, 12)]  # fmt: skip
    for number, (top, bottom, left, right) in enumerate(cuts):
        piece = whole[top:bottom, left:right]
        offsets = torch.Size((top, left))
        entry.chunks.append(ChunkStorageMetadata(offsets, piece.shape))
        name = f"piece{number}.distcp"
        torch.save(piece if number % 2 else piece.t().contiguous().t(), tmp_path / "d" / name)
        place = dataclasses.replace(info, relative_path=name, offset=0,
                                    length=(tmp_path / "d" / name).stat().st_size)  # fmt: skip
        metadata.storage_data[MetadataIndex("model.e.weight", offsets)] = place
    store(tmp_path / "d", metadata)
    assert check_import(tmp_path / "d", tmp_path / "run") == "right"
    found = hf.open(tmp_path / "run").read(0, "e.weight").weight
    assert torch.equal(torch.from_numpy(found), whole)
