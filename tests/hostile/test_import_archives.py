"""Zips that lie: a record is read where every header says it is, or the file is refused."""

from __future__ import annotations

import dataclasses
import io
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast as hf
from tests.hostile.mutators.import_check import check_import
from tests.hostile.mutators.zips import Fields, Member, build_zip, split_zip

WEIGHT = torch.arange(200.0).reshape(50, 4)
Change = Callable[[list[Member]], list[Member]]


@pytest.fixture
def members(tmp_path: Path) -> list[Member]:
    torch.save({"model": {"e.weight": WEIGHT, "top": torch.ones(3)}, "step": 5}, tmp_path / "a.pt")
    found = split_zip((tmp_path / "a.pt").read_bytes())
    (tmp_path / "a.pt").unlink()
    return found


def place(members: list[Member], name: str) -> int:
    return next(i for i, m in enumerate(members) if m.name.endswith(name.encode()))


def changed(members: list[Member], which: str, **fields: object) -> list[Member]:
    at = place(members, which)
    return [*members[:at], dataclasses.replace(members[at], **fields), *members[at + 1 :]]


def outcome(data: bytes, folder: Path) -> str:
    (folder / "x.pt").write_bytes(data)
    return check_import(folder / "x.pt", folder / "run")


@pytest.mark.parametrize("is_wide", [False, True])
def test_honest_archives_are_read_whatever_wrote_them(
    members: list[Member], is_wide: bool, tmp_path: Path
) -> None:
    assert outcome(build_zip(members, is_wide=is_wide), tmp_path) == "right"
    with zipfile.ZipFile(tmp_path / "y.pt", "w") as archive:
        for member in members:
            archive.writestr(member.name.decode(), member.data)
    assert check_import(tmp_path / "y.pt", tmp_path / "run2") == "right"


def test_archive_with_sizes_in_its_local_headers_is_read(
    members: list[Member], tmp_path: Path
) -> None:
    plain = [dataclasses.replace(member, is_described=False) for member in members]
    assert outcome(build_zip(plain), tmp_path) == "right"


@pytest.mark.parametrize("name", ["data/0", "data.pkl", "version", "byteorder", ".format_version"])
def test_compressed_record_is_refused_and_says_what_to_do(
    members: list[Member], name: str, tmp_path: Path
) -> None:
    (tmp_path / "x.pt").write_bytes(build_zip(changed(members, name, is_deflated=True)))
    with pytest.raises(hf.InvalidRequestError, match=r"compressed.*torch.save it again"):
        hf.import_checkpoint(tmp_path / "x.pt", tmp_path / "run", tables=["e.weight"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["local", "central"])
@pytest.mark.parametrize(
    ("field", "change"),
    [("method", 8), ("flags", 1), ("flags", 64), ("flags", 0x2000), ("name", -1), ("name", 4),
     ("extra", 4), ("extra", 8), ("extra", 64), ("extra", -4), ("extra", -8)],
)  # fmt: skip
def test_header_that_shifts_or_hides_a_record_is_refused(
    members: list[Member], where: str, field: str, change: int, tmp_path: Path
) -> None:
    victim = place(members, "data/0")

    def lie(at: str, index: int, fields: Fields) -> None:
        if (at, index) == (where, victim):
            fields[field] += change

    assert outcome(build_zip(members, lie=lie), tmp_path) == "refused"


@pytest.mark.parametrize("which", ["data/0", "data.pkl"])
def test_header_that_names_its_record_otherwise_is_refused(
    members: list[Member], which: str, tmp_path: Path
) -> None:
    """Readers that go by headers and those that go by the directory would see two archives."""
    name = members[place(members, which)].name
    data = build_zip(members)
    assert data.count(name) >= 2
    other = name[:-1] + b"9"
    assert outcome(data.replace(name, other, 1), tmp_path) == "refused"

    def lie(at: str, index: int, fields: Fields) -> None:
        if (at, index) == ("local", place(members, which)):
            fields["flags"] ^= 0x800

    assert outcome(build_zip(members, lie=lie), tmp_path) == "refused"


@pytest.mark.parametrize("field", ["packed", "unpacked", "header"])
@pytest.mark.parametrize("difference", [-64, -1, 1, 64, 1 << 31, 0xFFFFFFFF])
def test_directory_that_lies_about_a_record_is_refused(
    members: list[Member], field: str, difference: int, tmp_path: Path
) -> None:
    def lie(at: str, index: int, fields: Fields) -> None:
        if (at, index) == ("central", place(members, "data/0")):
            fields[field] = min(0xFFFFFFFF, fields[field] + difference)

    assert outcome(build_zip(members, lie=lie), tmp_path) == "refused"


@pytest.mark.parametrize("which", ["data/0", "data.pkl"])
def test_record_that_is_marked_as_a_folder_is_refused(
    members: list[Member], which: str, tmp_path: Path
) -> None:
    """torch.load returns memory that was never written for such a record."""

    def lie(at: str, index: int, fields: Fields) -> None:
        if (at, index) == ("central", place(members, which)):
            fields["external"] = 0x10

    assert outcome(build_zip(members, lie=lie), tmp_path) == "refused"


@pytest.mark.parametrize("by", [4, 8, 64, 800])
def test_directory_that_makes_records_overlap_is_refused(
    members: list[Member], by: int, tmp_path: Path
) -> None:
    """A record that is longer than it is takes in the header and numbers of the next."""

    def lie(at: str, index: int, fields: Fields) -> None:
        if (at, index) == ("central", place(members, "data/0")):
            fields["packed"] += by
            fields["unpacked"] += by

    assert outcome(build_zip(members, lie=lie), tmp_path) == "refused"


def test_two_directory_entries_of_one_record_are_refused(
    members: list[Member], tmp_path: Path
) -> None:
    def lie(at: str, index: int, fields: Fields) -> None:
        if at == "central" and index == place(members, "data/1"):
            fields["header"] = first["header"]
        elif at == "central" and index == place(members, "data/0"):
            first.update(fields)

    first: Fields = {}
    assert outcome(build_zip(members, lie=lie), tmp_path) == "refused"


@pytest.mark.parametrize("name", ["data/0", "data.pkl", "byteorder"])
@pytest.mark.parametrize("is_last", [False, True])
def test_record_that_is_there_twice_is_refused(
    members: list[Member], name: str, is_last: bool, tmp_path: Path
) -> None:
    other = dataclasses.replace(members[place(members, name)], data=b"\0" * 800)
    made = [*members, other] if is_last else [other, *members]
    assert outcome(build_zip(made), tmp_path) == "refused"


@pytest.mark.parametrize(
    "name", ["other/data/0", "data/0", "/data/0", "../data/0", "\\data\\0", ""]
)
def test_names_that_torch_does_not_write_are_refused(
    members: list[Member], name: str, tmp_path: Path
) -> None:
    made = changed(members, "data/0", name=name.encode())
    assert outcome(build_zip(made), tmp_path) == "refused"


@pytest.mark.parametrize(
    "fields",
    [{"here": 1}, {"count": 99}, {"size": 7}, {"start": 0}, {"disk": 1}, {"first_disk": 1},
     {"comment": 5}, {"start": 0xFFFFFFFF}],
    ids=str,
)  # fmt: skip
def test_end_that_lies_is_refused(members: list[Member], fields: Fields, tmp_path: Path) -> None:
    def lie(at: str, index: int, found: Fields) -> None:
        if at == "end":
            found |= fields

    assert outcome(build_zip(members, lie=lie), tmp_path) == "refused"


@pytest.mark.parametrize("where", ["end64", "locator"])
def test_wide_end_that_lies_is_refused(members: list[Member], where: str, tmp_path: Path) -> None:
    names = {"end64": ("length", "disk", "first_disk", "here", "count", "size", "start"),
             "locator": ("at", "disks")}  # fmt: skip
    for name in names[where]:

        def lie(at: str, index: int, found: Fields, name: str = name) -> None:
            if at == where:
                found[name] += 2

        assert outcome(build_zip(members, lie=lie, is_wide=True), tmp_path) == "refused", name


@pytest.mark.parametrize("frame", [{"comment": b"x"}, {"comment": b"x" * 65_535}, {"prefix": b"x"},
                                   {"gap": b"x"}, {"gap": b"x" * 16}])  # fmt: skip
def test_bytes_around_an_archive_are_refused(
    members: list[Member], frame: dict[str, bytes], tmp_path: Path
) -> None:
    assert outcome(build_zip(members, **frame), tmp_path) == "refused"
    assert outcome(build_zip(members) + b"\0", tmp_path) == "refused"


def test_numbers_of_another_byte_order_are_refused(members: list[Member], tmp_path: Path) -> None:
    for order in (b"big", b"", b"little ", b"\0" * 1000):
        (tmp_path / "x.pt").write_bytes(build_zip(changed(members, "byteorder", data=order)))
        with pytest.raises(hf.InvalidRequestError, match="little-endian"):
            hf.import_checkpoint(tmp_path / "x.pt", tmp_path / "run", tables=["e.weight"])


def test_archive_without_a_byte_order_is_little_endian(
    members: list[Member], tmp_path: Path
) -> None:
    """As torch wrote it before 2.1, and as torch loads it."""
    kept = [m for m in members if b"byteorder" not in m.name and b"/." not in m.name]
    assert outcome(build_zip(kept), tmp_path) == "right"


def test_programs_of_torchscript_are_refused(members: list[Member], tmp_path: Path) -> None:
    root = members[0].name.partition(b"/")[0]
    (tmp_path / "x.pt").write_bytes(
        build_zip([*members, Member(root + b"/constants.pkl", b"\x80\x02).")])
    )
    with pytest.raises(hf.InvalidRequestError, match=r"TorchScript.*state_dict"):
        hf.import_checkpoint(tmp_path / "x.pt", tmp_path / "run", tables=["e.weight"])


def test_older_formats_of_torch_are_refused_and_say_what_to_do(tmp_path: Path) -> None:
    torch.save({"e.weight": WEIGHT}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with tarfile.open(tmp_path / "y.pt", "w") as tar:
        tar.addfile(tarfile.TarInfo("storages"), io.BytesIO(b""))
    for name in "xy":
        with pytest.raises(hf.InvalidRequestError, match=r"torch.save it again"):
            hf.import_checkpoint(tmp_path / f"{name}.pt", tmp_path / "run", tables=["e.weight"])


@pytest.mark.parametrize("offset", [-1, 1, 50, 2**40, 2**62])
@pytest.mark.parametrize("part", ["at", "rows", "stride", "count"])
def test_tensor_outside_its_record_is_refused(
    members: list[Member], part: str, offset: int, tmp_path: Path
) -> None:
    """The description of the table in the pickle: BININT1 of 200, offset, shape and strides."""
    from tests.hostile.mutators.pickles import number, split

    at = place(members, "data.pkl")
    operations = split(members[at].data)
    first = next(i for i, (_, op) in enumerate(operations) if op == b"K\xc8")  # 200 numbers
    numbers = [i for i, (name, _) in enumerate(operations[first:], first) if name == "BININT1"]
    victim = {"count": numbers[0], "at": numbers[1], "rows": numbers[2], "stride": numbers[4]}[part]
    old = operations[victim][1][1]
    operations[victim] = "", number(old + offset)
    data = b"".join(op for _, op in operations)
    result = outcome(build_zip(changed(members, "data.pkl", data=data)), tmp_path)
    is_inside = (part, offset) in {("rows", -1), ("stride", -1)}
    assert result == ("right" if is_inside else "refused")


def test_fifo_or_folder_or_nothing_is_no_source(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "nothing", "nothing/at/all", "a\0b", "x" * 5000):
        with pytest.raises(hf.HoldfastError):
            hf.import_checkpoint(tmp_path / name, tmp_path / "run", tables=["e.weight"])
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(hf.HoldfastError):
        hf.import_checkpoint(tmp_path / "loop", tmp_path / "run", tables=["e.weight"])


def test_link_that_the_user_names_is_followed(members: list[Member], tmp_path: Path) -> None:
    (tmp_path / "real.pt").write_bytes(build_zip(members))
    (tmp_path / "link.pt").symlink_to("real.pt")
    hf.import_checkpoint(tmp_path / "link.pt", tmp_path / "run", tables=["e.weight"])
    assert hf.open(tmp_path / "run").read(5, "e.weight").weight.tolist() == WEIGHT.tolist()


def test_extra_fields_that_lie_about_their_length_are_refused(
    members: list[Member], tmp_path: Path
) -> None:
    for extra in (b"\1\0\xff\xff", b"x", struct.pack("<HHQ", 1, 8, 2**62), b"\1\0\0\0\1\0\0\0"):
        made = changed(members, "data/0", extra=extra)
        assert outcome(build_zip(made), tmp_path) == "refused", extra
