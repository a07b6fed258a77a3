"""Tables of every number type: tracked, saved as deltas, restored to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast as hf
from holdfast.checkpoint.planning.codecs import column_codecs, plan_codec
from holdfast.errors import InvalidRequestError
from holdfast.model.dtypes import for_users
from holdfast.model.tables import find_tables, lose_rows
from holdfast.model.tensors import as_array
from tests.unit.checkpoint.format.error_bound import error_bound
from tests.unit.checkpoint.typed import (
    BATCH,
    DENSE,
    OTHER,
    Net,
    batches,
    bits,
    copy_of,
    sparse_optimizers,
    train,
)

STRATEGIES = ("full", "check-n-run", "incrcp", "cpr-mfu")


def check_each_row_is_of_one_step(
    found: list[torch.Tensor], copies: list[list[torch.Tensor]]
) -> None:
    """Where only hot rows are saved: each row is as the live model once had it."""
    for index, tensor in enumerate(found):
        rows = tensor.reshape(len(tensor), -1) if tensor.ndim else tensor.reshape(1, 1)
        is_known = torch.zeros(len(rows), dtype=torch.bool)
        for copy in copies:
            is_known |= (copy[index].reshape(rows.shape) == rows).all(1)
        assert is_known.all()


def run_and_compare(
    url: Path, dtype: torch.dtype, make: Callable[[Any], Any], strategy: str, *, sparse: bool
) -> hf.Run:
    """Train and save at every step; then every step restored equals a copy of the live model."""
    torch.manual_seed(3)
    model = Net(dtype, sparse=sparse)
    made = make(model)
    optimizers = made if isinstance(made, list) else [made]
    copies: dict[int, list[torch.Tensor]] = {}
    settings: dict[str, Any] = {"strategy": strategy, "codec": "fp32"}
    with hf.Checkpointer(url, model=model, optimizer=made, every=1, **settings) as ck:
        for step, batch in enumerate(batches(6), 1):
            train(model, optimizers, batch)
            ck.step()
            ck.wait()
            copies[step] = copy_of(model, optimizers)
    run = hf.open(url)
    fresh = Net(dtype, sparse=sparse)
    made = make(fresh)
    again = made if isinstance(made, list) else [made]
    with hf.Checkpointer(url, model=fresh, optimizer=made, every=100, **settings) as ck:
        for step in run.steps:
            ck.restore(step)
            if strategy != "cpr-mfu" or run.info(step).kind == "base":
                assert bits(copy_of(fresh, again)) == bits(copies[step]), step
            else:
                older = [copies[s] for s in copies if s <= step]
                check_each_row_is_of_one_step(copy_of(fresh, again), older)
    assert hf.verify(url).is_sound
    return run


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", OTHER, ids=str)
def test_every_step_returns_every_bit(
    tmp_path: Path, dtype: torch.dtype, name: str, strategy: str
) -> None:
    run = run_and_compare(tmp_path, dtype, DENSE[name], strategy, sparse=False)
    wanted = str(dtype).removeprefix("torch.")
    for table in run.tables(run.steps[-1]):
        assert table.columns[0].dtype == wanted
        if name == "mixed":
            assert [c.dtype for c in table.columns] == [wanted, "float32", "float64"]
        else:
            assert {c.dtype for c in table.columns} == {wanted}
    if name in ("sgd", "adagrad") and strategy != "full":
        deltas = [run.info(s) for s in run.steps if run.info(s).kind == "delta"]
        assert deltas
        limit = BATCH * 4 * 6  # at most all that changed since the base
        assert all(0 < info.rows <= limit for info in deltas)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", OTHER, ids=str)
def test_sparse_adam_returns_every_bit(tmp_path: Path, dtype: torch.dtype, strategy: str) -> None:
    run = run_and_compare(tmp_path, dtype, sparse_optimizers, strategy, sparse=True)
    if strategy == "incrcp":
        assert all(
            run.info(s).rows <= BATCH * 4 * 6 for s in run.steps if run.info(s).kind == "delta"
        )


@pytest.mark.parametrize("dtype", OTHER, ids=str)
def test_numbers_that_are_not_ordinary_return_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """NaN with payloads, both zeros, infinities, denormals: in weights and in row state."""
    model = Net(dtype)
    optimizer = DENSE["adam"](model)
    train(model, [optimizer], next(batches(1)))
    noise = torch.Generator().manual_seed(1)

    def spoil() -> None:
        with torch.no_grad():
            for table in find_tables(model, [optimizer]):
                for column in table.tensors():
                    raw = torch.randint(0, 256, (20 * column[0].nbytes,), generator=noise)
                    column[:20] = raw.to(torch.uint8).view(dtype).view(20, -1)

    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizer, strategy="incrcp", codec="fp32"
    ) as ck:
        copies = {}
        for step in (1, 2, 3):
            spoil()
            ck.step()
            ck.save().result()
            copies[step] = copy_of(model, [optimizer])
        for step, copy in copies.items():
            ck.restore(step)
            assert bits(copy_of(model, [optimizer])) == bits(copy)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "asym8", "adaptive4", "kmeans2-block"])
@pytest.mark.parametrize("dtype", OTHER, ids=str)
def test_every_codec_stays_within_its_bound(tmp_path: Path, dtype: torch.dtype, codec: str) -> None:
    model = Net(dtype)
    optimizer = DENSE["adagrad"](model)
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizer, strategy="incrcp", codec=codec, every=1
    ) as ck:
        for batch in batches(3):
            train(model, [optimizer], batch)
            ck.step()
            ck.wait()
        live = {t.name: [a.copy() for a in t.arrays()] for t in find_tables(model, [optimizer])}
        ck.resume()
        again = {t.name: t.arrays() for t in find_tables(model, [optimizer])}
    plan = plan_codec(codec, None, expected_restores=0, restores=0)
    run = hf.open(tmp_path)
    for schema in run.tables(3):
        used = column_codecs(schema, plan)
        for index, (old, new) in enumerate(zip(live[schema.name], again[schema.name], strict=True)):
            error = np.abs(for_users(old).astype(float) - for_users(new).astype(float))
            assert (error <= error_bound(used[index], old)[:, None]).all()
            if used[index].is_lossless:
                assert old.tobytes() == new.tobytes()
    if dtype == torch.float16 and codec == "fp16":
        assert all(c.is_lossless for c in used)


def test_deltas_of_small_types_are_small(tmp_path: Path) -> None:
    """A bf16 delta takes half of the float32 one's rows, and neither is a whole table."""
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        url = tmp_path / str(dtype)
        model = Net(dtype)
        optimizer = DENSE["adagrad"](model)
        with hf.Checkpointer(
            url, model=model, optimizer=optimizer, strategy="incrcp", codec="fp32", every=1
        ) as ck:
            for batch in batches(2):
                train(model, [optimizer], batch)
                ck.step()
                ck.wait()
        run = hf.open(url)
        entry = run.catalog.checkpoint(2)
        assert entry.kind == "delta"
        base = run.catalog.checkpoint(1)
        assert entry.row_bytes < base.row_bytes / 20
        assert run.dense(2)["model"].keys() == {"top.weight", "top.bias"}
        sizes[dtype] = base.row_bytes
    assert sizes[torch.bfloat16] < 0.6 * sizes[torch.float32]


def test_arrays_that_users_get_have_numpys_types(tmp_path: Path) -> None:
    model = Net(torch.bfloat16, torch.float64)
    optimizer = DENSE["mixed"](model)
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizer, strategy="incrcp", codec="fp32", every=1
    ) as ck:
        for batch in batches(3):
            train(model, [optimizer], batch)
            ck.step()
            ck.wait()
    run = hf.open(tmp_path)
    read = run.read(3, "users.weight", [5, 2, 5])
    wanted = model.users.weight.detach()[[5, 2, 5]].float().numpy()
    assert read.weight.dtype == np.float32 and np.array_equal(read.weight, wanted)
    assert read.state["uses"].dtype == np.float64
    assert run.read(3, "items.weight").weight.dtype == np.float64
    copy = {t.name: run.read(1, t.name).weight for t in run.tables(1)}
    for table, ids, rows in run.updates(since=1):
        copy[table][ids] = rows
    for table in run.tables(3):
        assert np.array_equal(copy[table.name], run.read(3, table.name).weight)
    patterns = np.zeros((3000, 5), np.uint16)
    run.restore_into(3, {"users.weight": [patterns]})
    assert patterns.tobytes() == as_array(model.users.weight).tobytes()
    numbers = np.zeros((3000, 5), np.float32)
    run.restore_into(3, {"users.weight": [numbers]})
    assert np.array_equal(numbers, model.users.weight.detach().float().numpy())
    with pytest.raises(InvalidRequestError, match="another type"):
        run.restore_into(3, {"users.weight": [np.zeros((3000, 5), np.float16)]})


@pytest.mark.parametrize(
    ("saved", "given"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16),
     (torch.float64, torch.float32)],
)  # fmt: skip
def test_a_model_of_another_type_is_refused(
    tmp_path: Path, saved: torch.dtype, given: torch.dtype
) -> None:
    with hf.Checkpointer(tmp_path, model=Net(saved), codec="fp32") as ck:
        ck.save()
    model = Net(given)
    before = bits(copy_of(model, []))
    with (
        hf.Checkpointer(tmp_path, model=model, codec="fp32") as ck,
        pytest.raises(InvalidRequestError, match="number type"),
    ):
        ck.resume()
    assert bits(copy_of(model, [])) == before


@pytest.mark.parametrize("strategy", ["cpr", "cpr-scar", "cpr-mfu"])
@pytest.mark.parametrize("dtype", OTHER, ids=str)
def test_rows_of_a_failed_server_come_back(
    tmp_path: Path, dtype: torch.dtype, strategy: str
) -> None:
    model = Net(dtype)
    optimizer = DENSE["adagrad"](model)
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizer, strategy=strategy, codec="fp32", every=1,
        servers=4, total_steps=100,
    ) as ck:  # fmt: skip
        for batch in batches(3):
            train(model, [optimizer], batch)
            ck.step()
            ck.wait()
        ck.save().result()
        tables = find_tables(model, [optimizer])
        placement = ck.settings.placement
        assert placement is not None
        before = [[a.copy() for a in table.arrays()] for table in tables]
        lose_rows(tables, placement, [2])
        assert np.isnan(for_users(tables[0].arrays()[0])).any()
        ck.recover([2])
        for table, arrays in zip(tables, before, strict=True):
            mine = placement.rows_of(2, table.rows)
            others = np.setdiff1d(np.arange(table.rows), mine)
            for old, new in zip(arrays, table.arrays(), strict=True):
                assert new[others].tobytes() == old[others].tobytes()
                if strategy == "cpr":
                    assert new.tobytes() == old.tobytes()
                assert not np.isnan(for_users(new)).any()


@pytest.mark.parametrize("tracking", ["auto", "hash", "lookup"])
@pytest.mark.parametrize("dtype", OTHER, ids=str)
def test_tracking_finds_the_rows_of_every_type(
    tmp_path: Path, dtype: torch.dtype, tracking: str
) -> None:
    model = Net(dtype)
    optimizer = DENSE["adagrad"](model)
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizer, strategy="incrcp", codec="fp32", every=1,
        tracking=tracking,
    ) as ck:  # fmt: skip
        for step, batch in enumerate(batches(4), 1):
            train(model, [optimizer], batch)
            if step == 3 and tracking != "lookup":  # a write that is no training
                with torch.no_grad():
                    model.users.weight[17] += 1
            ck.step()
            ck.wait()
            live = copy_of(model, [optimizer])
        rows = {s: hf.open(tmp_path).info(s) for s in ck.all_steps()}
        ck.resume()
        assert bits(copy_of(model, [optimizer])) == bits(live)
    assert any(
        info.kind == "delta" and 0 < info.rows <= 4 * 4 * BATCH + 1 for info in rows.values()
    )


def test_rows_that_a_rounded_eps_makes_nan_are_not_missed(tmp_path: Path) -> None:
    """torch's default eps is 0 in float16: Adagrad then moves rows that have no gradient."""
    model = Net(torch.float16)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with hf.Checkpointer(
        tmp_path, model=model, optimizer=optimizer, strategy="incrcp", codec="fp32"
    ) as ck:
        ck.save().result()
        train(model, [optimizer], next(batches(1)))
        ck.step()
        ck.save().result()
        live = copy_of(model, [optimizer])
        assert torch.isnan(live[0]).any()
        ck.resume()
        assert bits(copy_of(model, [optimizer])) == bits(live)
