"""Every tensor of a model and its optimizers is a table's column or dense state, never both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.model.model_state import ModelState
from holdfast.model.shard import Shard
from holdfast.model.tables import find_tables
from tests.conftest import TinyModel, make_optimizers, train_steps


def leaves(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in leaves(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in leaves(item)]
    return []


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "sparse-adam", "momentum"])
def test_no_number_is_saved_twice_or_left_out(kind: str) -> None:
    model = TinyModel()
    optimizers = make_optimizers(model, kind)
    train_steps(model, optimizers, range(3))
    state = ModelState(model, optimizers)
    dense = leaves(state.dense()) + leaves(state.tables_dense())
    columns = [tensor for table in state.tables for tensor in table.tensors()]
    pointers = [t.data_ptr() for t in dense + columns if t.layout == torch.strided and t.numel()]
    assert len(pointers) == len(set(pointers))
    everything = [
        *model.state_dict().values(),
        *(t for o in optimizers for t in leaves(o.state_dict()["state"])),
    ]
    assert sum(t.numel() for t in everything) == sum(t.numel() for t in dense + columns)


def test_columns_follow_the_optimizer() -> None:
    expected = {
        "sgd": ["weight"],
        "adagrad": ["weight", "sum"],
        "sparse-adam": ["weight", "exp_avg", "exp_avg_sq"],
        "momentum": ["weight"],  # with sparse gradients the buffer is sparse: dense state
    }
    for kind, names in expected.items():
        model = TinyModel()
        optimizers = make_optimizers(model, kind)
        train_steps(model, optimizers, range(1))
        schema = ModelState(model, optimizers).schemas()[0]
        assert [column.name for column in schema.columns] == names
    model = TinyModel(sparse=False)
    optimizers = make_optimizers(model, "momentum")
    train_steps(model, optimizers, range(1))
    columns = ModelState(model, optimizers).schemas()[0].columns
    assert [column.name for column in columns] == ["weight", "momentum_buffer"]


def test_state_that_is_one_number_a_row_is_a_column_of_width_one() -> None:
    model = nn.Embedding(30, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["row_sum"] = torch.rand(30)
    state = ModelState(model, optimizer)
    assert [c.width for c in state.schemas()[0].columns] == [4, 1]
    dense, schemas = {**state.dense(), **state.tables_dense()}, state.schemas()
    fresh = ModelState(nn.Embedding(30, 4), None)
    fresh.optimizers = {"0": torch.optim.SGD(fresh.model.parameters(), lr=0.1)}
    fresh = ModelState(fresh.model, fresh.optimizers)
    fresh.load_dense(dense, schemas)
    assert fresh.schemas() == schemas
    assert fresh.tables[0].state_tensors()["row_sum"].shape == (30,)


def test_embeddings_of_every_float_type_are_tables() -> None:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
    model = nn.ModuleList(nn.Embedding(10, 4, dtype=dtype) for dtype in dtypes)
    state = ModelState(model)
    assert [f"torch.{s.columns[0].dtype}" for s in state.schemas()] == list(map(str, dtypes))
    assert [s.row_bytes for s in state.schemas()] == [16, 8, 8, 32]
    assert not state.dense()["model"]


def test_embeddings_of_other_types_go_along_as_dense_state() -> None:
    model = nn.ModuleDict({"small": nn.Embedding(10, 4), "full": nn.Embedding(10, 4)})
    weight = torch.zeros(10, 4).to(torch.float8_e4m3fn)
    model["small"].weight = nn.Parameter(weight, requires_grad=False)
    state = ModelState(model)
    assert [table.name for table in state.tables] == ["full.weight"]
    assert set(state.dense()["model"]) == {"small.weight"}
    with pytest.raises(InvalidRequestError, match="float8"):
        ModelState(model, shards={"small.weight": Shard(10, 4)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float32])
def test_rows_of_every_type_are_copied_bit_for_bit(dtype: torch.dtype) -> None:
    module = nn.Embedding(40, 3, dtype=dtype)
    noise = torch.randint(0, 256, (40 * 3 * dtype.itemsize,), dtype=torch.uint8)
    module.weight.data = noise.view(dtype).view(40, 3)  # NaN with payloads among them
    (table,) = find_tables(module)
    bits = noise.view(40, -1).numpy()
    ids = np.array([3, 4, 39])
    out = [np.empty((3, 3), table.arrays()[0].dtype)]
    table.gather(ids, out)
    assert out[0].tobytes() == bits[ids].tobytes()
    table.gather_range(7, 10, out)
    assert out[0].tobytes() == bits[7:10].tobytes()
    hashes = table.hash_rows()
    assert np.array_equal(table.hash_rows(ids), hashes[ids])
    table.arrays()[0].view(np.uint8)[5, 1] ^= 1  # shares memory
    assert np.flatnonzero(table.hash_rows() != hashes).tolist() == [5]


def test_tables_are_named_as_in_state_dict() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.ModuleDict({"deep": nn.EmbeddingBag(4, 2)}))
    assert [table.name for table in find_tables(model)] == ["0.weight", "1.deep.weight"]
    assert {table.name for table in find_tables(model)} <= set(model.state_dict())


@pytest.mark.parametrize("wrong", [5, "adam", [nn.Linear(1, 1)]])
def test_what_is_no_optimizer_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match="optimizer"):
        ModelState(TinyModel(), wrong)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="model"):
        ModelState("model")  # type: ignore[arg-type]
