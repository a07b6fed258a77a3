"""What ``torch.save`` writes is read as torch reads it: every kind of value, view and type."""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.boundary.budget import Budget
from holdfast.interchange.archive import tensors
from holdfast.interchange.archive.files import InputFile, find_file, whole
from holdfast.interchange.archive.names import Opaque, PickledArray
from holdfast.interchange.archive.nested import measure
from holdfast.interchange.archive.pickles import Record
from holdfast.interchange.archive.structure import read_structure
from holdfast.interchange.archive.tensors import StoredTensor
from tests.conftest import SEED

PROTOCOLS = (2, 3, 4, 5)
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def read(value: Any, path: Path, protocol: int = 2) -> Any:
    torch.save(value, path, pickle_protocol=protocol)
    file = find_file(path)
    return loaded(read_structure(whole(file), Budget(file.bytes).open_account()))


def loaded(value: Any) -> Any:
    """With numbers for what is stored."""
    if isinstance(value, StoredTensor):
        return value.whole()
    if isinstance(value, PickledArray):
        return value.array()
    if isinstance(value, dict):
        return {key: loaded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(loaded(item) for item in value)
    return value


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = tensor.detach().resolve_neg().contiguous()
    return plain.dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).tolist()


def are_same(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and bits(one) == bits(other)
    if isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(other, dict):
        return list(one) == list(other) and all(are_same(one[key], other[key]) for key in other)
    if isinstance(other, list | tuple):
        is_alike = type(one) is (tuple if isinstance(other, tuple) else list)
        return is_alike and len(one) == len(other) and all(map(are_same, one, other))
    if isinstance(other, frozenset):  # protocol 2 has only a call of it, as of a set
        return one == other
    return type(one) is type(other) and one == other


VALUES: list[Any] = [
    None, True, False, 0, 1, 255, 256, 65_535, 65_536, -1, 2**31, -(2**31), 2**63, 1 << 2000, 0.5,
    float("inf"), -0.0, "", "text", "größe", "\U0001f600", "x" * 300, b"", b"\0\xff", b"x" * 300,
    [], (), {}, [1, [2, [3]]], (1, (2,)), (1, 2, 3, 4), {"a": {"b": {"c": 1}}},
    {1: 2, None: 3, 1.5: 4, b"x": 5, (1, "a"): 6}, collections.OrderedDict(b=1, a=2),
    collections.Counter("abca"), 1 + 2j, {1, 2}, frozenset({1}), torch.Size((2, 3)),
    np.float64(1.5), np.float32(0.1), np.int64(-7), np.bool_(True), np.float16(2.0),
    np.arange(6.0).reshape(2, 3), np.arange(6, dtype=np.int16).reshape(2, 3).T, np.array(5),
    np.zeros((0, 3)), np.array([True, False]),
]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_values_are_read_as_they_are(protocol: int, tmp_path: Path) -> None:
    for index, value in enumerate(VALUES):
        found = read({"x": value, "y": [value, value]}, tmp_path / f"{index}.pt", protocol)
        assert are_same(found, {"x": value, "y": [value, value]}), value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numbers_of_every_type_keep_every_bit(
    dtype: torch.dtype, protocol: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (24 * dtype.itemsize,))
    value = raw.to(torch.uint8).view(dtype)
    views = [value, value.reshape(4, 6), value.reshape(4, 6).t(), value[5:17], value[::3], value[7],
             value[:0], value.reshape(2, 3, 4).permute(2, 0, 1), value[2:3].expand(5),
             value.reshape(4, 6)[:, 1:3], value.as_strided((3, 3), (1, 1)),
             torch.nn.Parameter(value, requires_grad=False)]  # fmt: skip
    assert are_same(read(views, tmp_path / "a.pt", protocol), views)


def test_every_view_is_read_alike_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random views, read whole and by rows, with spans so short that all ways of reading are
    taken: a view is right whole and by rows, and no byte of it is read much more than once. One
    whose numbers lie over each other is refused beyond a span."""
    draw = random.Random(SEED)
    base = torch.arange(5000, dtype=torch.int32)
    taken = 0
    read_into = InputFile.read_into

    def counting(file: InputFile, buffer: np.ndarray, offset: int) -> None:
        nonlocal taken
        taken += len(buffer)
        read_into(file, buffer, offset)

    monkeypatch.setattr(InputFile, "read_into", counting)
    for number in range(150):
        monkeypatch.setattr(tensors, "_SPAN_BYTES", draw.choice((4, 16, 64, 1000, 1 << 22)))
        shape = [draw.randrange(1, 7) for _ in range(draw.randrange(1, 5))]
        stride = [draw.choice((0, 1, 2, 3, 7, 50, 300)) for _ in shape]
        offset = draw.randrange(100)
        view = base.as_strided(shape, stride, offset)
        torch.save(view, tmp_path / f"{number}.pt")
        file = find_file(tmp_path / f"{number}.pt")
        steps = sorted((step, n) for step, n in zip(stride, shape, strict=True) if n > 1 and step)
        spans = [sum((n - 1) * step for step, n in steps[:at]) for at in range(len(steps) + 1)]
        is_apart = all(step > span for (step, _), span in zip(steps, spans, strict=False))
        if not is_apart and 4 * (spans[-1] + 1) > tensors._SPAN_BYTES:
            with pytest.raises(hf.InvalidRequestError, match="lie over each other"):
                read_structure(whole(file), Budget(file.bytes).open_account())
            continue
        found = read_structure(whole(file), Budget(file.bytes).open_account())
        taken = 0
        assert torch.equal(found.whole(), view), (SEED, number)
        assert taken <= 4 * (spans[-1] + 1), (SEED, number)
        start = draw.randrange(shape[0])
        stop = draw.randrange(start, shape[0]) + 1
        width = int(np.prod(shape[1:]))
        out = np.full((stop - start, width), -1, np.int32)
        found.rows_into(start, stop, out)
        assert (out == view[start:stop].reshape(stop - start, -1).numpy()).all(), (SEED, number)


def test_lazy_views_are_what_torch_says_they_are(tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        value = torch._neg_view(torch.tensor([1.5, -2.0, 0.0, float("inf")], dtype=dtype))
        assert value.is_neg()
        assert are_same(read(value, tmp_path / "a.pt"), value)
    assert isinstance(read(torch.ones(2, dtype=torch.complex64).conj(), tmp_path / "a.pt"), Opaque)


def test_modules_states_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = model.state_dict()
    assert hasattr(state, "_metadata")
    found = read(state, tmp_path / "a.pt")
    again = torch.load(tmp_path / "a.pt", weights_only=True)
    assert are_same(found, dict(again))
    tagged = torch.nn.Parameter(torch.ones(2))
    tagged.note = "x"  # type: ignore[attr-defined]
    subclassed = torch.ones(3).as_subclass(torch.nn.Parameter)
    assert are_same(read([tagged, subclassed], tmp_path / "b.pt"), [tagged, subclassed])


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantize")
def test_what_cannot_be_imported_is_kept_apart(tmp_path: Path) -> None:
    values = [
        torch.ones(2, device="meta"), torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), torch.device("cpu"),
        np.datetime64("2020-01-01"), np.str_("x"), slice(1, 2), range(3),
    ]  # fmt: skip
    found = read(values, tmp_path / "a.pt")
    assert all(isinstance(each, Opaque) for each in found), found
    records = read(
        [argparse.Namespace(a=1), Path("/x"), datetime.timedelta(1), datetime.datetime.now()],
        tmp_path / "b.pt",
    )
    assert all(isinstance(each, Record) for each in records)
    containers = read(
        [collections.defaultdict(list, a=[1]), collections.deque([1, 2], 5)], tmp_path / "c.pt"
    )
    assert containers == [{"a": [1]}, [1, 2]]


def test_tensors_share_records_and_objects_stay_shared(tmp_path: Path) -> None:
    base, shared = torch.arange(10.0), [1, 2]
    path = tmp_path / "a.pt"
    torch.save([base, base[2:], base.view(2, 5), shared, shared], path)
    file = find_file(path)
    found = read_structure(whole(file), Budget(file.bytes).open_account())
    assert found[3] is found[4]
    assert are_same(loaded(found[:3]), [base, base[2:], base.view(2, 5)])


def test_archive_inside_a_file_is_read_where_it_lies(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.arange(7.0)}, buffer)
    (tmp_path / "a").write_bytes(b"before" + buffer.getvalue() + b"after")
    file = find_file(tmp_path / "a")
    window = whole(file).part(6, len(buffer.getvalue()))
    found = read_structure(window, Budget(file.bytes).open_account())
    assert torch.equal(found["a"].whole(), torch.arange(7.0))


def test_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100_000)}, tmp_path / "a")
    file = find_file(tmp_path / "a")
    found = read_structure(whole(file), Budget(file.bytes).open_account())
    with (tmp_path / "a").open("r+b") as out:
        out.truncate(5000)
    with pytest.raises(hf.CorruptDataError, match="cut off"):
        found["a"].whole()
    (tmp_path / "a").unlink()
    with pytest.raises(hf.NotFoundError):
        found["a"].whole()


def test_measure_counts_shared_values_as_often_as_they_are_named() -> None:
    shared: Any = ["ab"]
    for _ in range(100):
        assert measure(shared, what="x").values >= 2
        if measure(shared, what="x").depth == 50:
            break
        shared = [shared, shared]
    found = measure(shared, what="x")
    assert found.depth == 50 and found.values == 3 * 2**49 - 1 and found.bytes == 2**50
