"""Every tensor of a model and its optimizers is a table's column or dense state, never both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.modelstate import ModelState
from holdfast.tables import find_tables
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


def test_embeddings_that_are_not_fp32_go_along_as_dense_state() -> None:
    model = nn.ModuleDict({"small": nn.Embedding(10, 4).half(), "full": nn.Embedding(10, 4)})
    state = ModelState(model)
    assert [table.name for table in state.tables] == ["full.weight"]
    assert set(state.dense()["model"]) == {"small.weight"}


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
