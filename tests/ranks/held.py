"""A model whose tables lie on ranks in different ways, trained by gradients that depend on the step
and the place alone: whoever holds a float changes it by the same amount."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast as hf
from holdfast.model.dtypes import fill_nan
from holdfast.model.tensors import as_array

TABLES = {"users.weight": (61, 8), "items.weight": (40, 6), "tags.weight": (5, 4)}
LAYOUTS = ("row", "column", "table", "replicated", "grid")

Whole = dict[str, dict[str, np.ndarray]]  # by table and column


def _split(count: int, parts: int) -> list[range]:
    return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def shards_of(layout: str, rank: int, ranks: int) -> dict[str, hf.Shard]:
    """What a rank holds, by the names of its parameters."""
    found: dict[str, hf.Shard] = {}

    def add(table: str, **kwargs: Any) -> None:
        name = f"{table.split('.')[0]}_{len(found)}.weight"
        found[name] = hf.Shard(*TABLES[table], table=table, **kwargs)

    users, items, tags = TABLES
    match layout:
        case "row":
            add(users, row_ids=_split(61, ranks)[rank])
            add(items, row_ids=np.arange(rank, 40, ranks))
            add(tags, is_replicated=ranks > 1)
        case "column":
            add(users, columns=_split(8, ranks)[rank])
            add(items, columns=_split(6, ranks)[ranks - 1 - rank])
            if rank == ranks - 1:
                add(tags)
        case "table":
            for table, owner in ((users, 0), (items, ranks - 1), (tags, ranks // 2)):
                if rank == owner:
                    add(table)
        case "replicated":
            for table in TABLES:
                add(table, is_replicated=ranks > 1)
        case "grid":  # rows by two, columns by the rest; a rank may hold two cuts of one table
            halves = _split(61, 2)
            cuts = _split(8, 3)
            cells = [(rows, columns) for rows in halves for columns in cuts]
            for rows, columns in cells[rank::ranks]:
                if not any(p.columns == columns and p.table == users for p in found.values()):
                    add(users, row_ids=rows, columns=columns)
                else:  # the other half of the same cut: one shard
                    name = next(n for n, p in found.items() if p.columns == columns)
                    found[name] = hf.Shard(61, 8, range(61), columns, table=users)
            add(items, row_ids=_split(40, ranks)[rank])
            add(tags, is_replicated=ranks > 1)
    return found


class Model(nn.Module):
    """Shards, and a network that every rank has."""

    def __init__(self, shards: Mapping[str, hf.Shard], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shard in shards.items():
            module = nn.Embedding(max(1, shard.local_rows), len(shard.floats), sparse=True)
            weight = torch.zeros(shard.local_rows, len(shard.floats), dtype=dtype)
            module.weight = nn.Parameter(weight)
            self.add_module(name.split(".")[0], module)
        self.top = nn.Linear(3, 2)


class RowwiseAdagrad(torch.optim.Optimizer):
    """One sum a row: the mean of its squared gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply sparse or dense gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.to_dense() if p.grad.is_sparse else p.grad
                if p.ndim < 2 or p.shape[0] == 2:  # the network
                    p -= group["lr"] * grad
                    continue
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros(p.shape[0])
                state["sum"] += (grad**2).mean(1)
                p -= group["lr"] * grad / (state["sum"].sqrt() + 1e-10)[:, None]


def rows_at(table: str, step: int) -> np.ndarray:
    """The rows of a table that a step changes."""
    rows = TABLES[table][0]
    rng = np.random.default_rng([step, rows])
    return np.unique(rng.integers(0, rows, 1 + rows // 6))


def gradient(table: str, step: int) -> np.ndarray:
    """What a step does to every float of a table (rows that it does not change: nothing)."""
    rows, width = TABLES[table]
    rng = np.random.default_rng([step, rows, width])
    return rng.standard_normal((rows, width)).astype(np.float32)


class Training:
    """One rank's part of the training; ``adagrad@bfloat16`` has tables of that type."""

    def __init__(self, layout: str, rank: int, ranks: int, *, optimizer: str = "adagrad") -> None:
        torch.manual_seed(5)
        self.shards = shards_of(layout, rank, ranks)
        optimizer, _, dtype = optimizer.partition("@")
        self.model = Model(self.shards, getattr(torch, dtype or "float32"))
        make: Any = {"adagrad": torch.optim.Adagrad, "sparse-adam": None, "rowwise": RowwiseAdagrad}
        self.optimizer: torch.optim.Optimizer = make[optimizer](self.model.parameters(), lr=0.1)
        self.step_ = 0

    def parameter(self, name: str) -> nn.Parameter:
        """The parameter of a shard."""
        return self.model.get_parameter(name)

    def train(self, steps: Iterable[int]) -> None:
        """Change what these steps change."""
        for step in steps:
            for name, shard in self.shards.items():
                assert shard.table is not None
                ids = rows_at(shard.table, step)
                local = shard.local_of(ids)
                values = gradient(shard.table, step)[ids[local >= 0]]
                values = np.ascontiguousarray(values[:, shard.floats.start : shard.floats.stop])
                parameter = self.parameter(name)
                parameter.grad = torch.sparse_coo_tensor(
                    torch.from_numpy(local[local >= 0][None]),
                    torch.from_numpy(values).to(parameter.dtype),
                    parameter.shape,
                    check_invariants=True,
                ).coalesce()
            for parameter in self.model.top.parameters():
                parameter.grad = torch.full_like(parameter, float(step))
            self.optimizer.step()

    def held(self) -> dict[str, tuple[hf.Shard, dict[str, np.ndarray]]]:
        """Everything this rank holds, by parameter."""
        found = {}
        for name, shard in self.shards.items():
            parameter = self.parameter(name)
            columns = {"weight": as_array(parameter).copy()}
            state = self.optimizer.state.get(parameter, {})
            if "sum" in state:
                columns["sum"] = as_array(state["sum"]).copy()
            found[name] = (shard, columns)
        return found

    def network(self) -> np.ndarray:
        """The part that every rank has alike."""
        return self.model.top.weight.detach().numpy().copy()


def assemble(held: Iterable[Mapping[str, tuple[hf.Shard, dict[str, np.ndarray]]]]) -> Whole:
    """Whole tables of the shards of all ranks; NaN where nobody holds anything."""
    whole: Whole = {}
    for one in held:
        for shard, columns in one.values():
            assert shard.table is not None
            into = whole.setdefault(shard.table, {})
            for name, values in columns.items():
                if values.ndim == 1:
                    continue
                if name not in into:
                    into[name] = np.zeros(TABLES[shard.table], values.dtype)
                    fill_nan(into[name], np.arange(len(into[name])))
                full = into[name]
                ids = np.asarray(shard.ids)
                full[ids, shard.floats.start : shard.floats.stop] = values
    return whole


def expected(step: int, *, optimizer: str = "adagrad") -> Whole:
    """What an undisturbed training in one process has after so many steps."""
    training = Training("replicated", 0, 1, optimizer=optimizer)
    training.train(range(1, step + 1))
    return assemble([training.held()])
