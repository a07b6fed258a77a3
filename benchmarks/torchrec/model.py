"""The TorchRec model that is saved in the benchmark: every sharding type, a fused optimizer.

A gigabyte of rows of 64 floats with row-wise Adagrad: one table divided by rows, one cut by
columns, one whole on each of two ranks, and a small one that every rank has.

Not here: who saves it and how that is timed (ranks.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

WIDTH = 64
TABLES = ("rows", "columns", "first", "second", "everywhere")
_LOOKUP_ROWS = 1 << 16


class Model(nn.Module):
    """Bags and a small network."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, embedding_dim=WIDTH, num_embeddings=count, feature_names=[name]
            )
            for name, count in zip(TABLES, rows, strict=True)
        ]
        self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("cpu"))
        self.top = nn.Sequential(nn.Linear(WIDTH * len(TABLES), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Scores of a batch."""
        scores: torch.Tensor = self.top(self.bags(features).values())
        return scores


class Sharded:
    """The model over the current process group, its optimizer, and training that changes rows."""

    def __init__(self, rows: list[int], *, cuts: int = 2) -> None:
        """``cuts``: into how many parts columns are cut."""
        torch.manual_seed(1)
        self.rows = rows
        ranks = dist.get_world_size()
        model = Model(rows)
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
        sharder = EmbeddingBagCollectionSharder(fused_params=fused)
        ways = {
            "rows": row_wise(compute_kernel="fused"),
            "columns": column_wise(
                ranks=[cut % ranks for cut in range(cuts)], compute_kernel="fused"
            ),
            "first": table_wise(rank=0, compute_kernel="fused"),
            "second": table_wise(rank=ranks - 1, compute_kernel="fused"),
            "everywhere": data_parallel(),
        }
        plan = construct_module_sharding_plan(model.bags, ways, sharder, ranks, ranks, "cpu")
        self.model = DistributedModelParallel(
            model,
            device=torch.device("cpu"),
            plan=ShardingPlan({"bags": plan}),
            sharders=[sharder],
        )
        rest = [p for p in self.model.parameters() if not hasattr(p, "_in_backward_optimizers")]
        self.optimizer = torch.optim.Adagrad(rest, lr=0.01)

    def train(self, *, share: float, seed: int) -> None:
        """Look up so many of the rows of each table once, this rank's part of them, and learn."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        draw = np.random.default_rng(seed)
        chosen = [
            draw.choice(count, round(share * count), replace=False)[rank::ranks]
            for count in self.rows
        ]
        steps = max(1, -(-max(len(ids) for ids in chosen) // _LOOKUP_ROWS))
        for step in range(steps):
            parts = [np.array_split(ids, steps)[step] for ids in chosen]
            bags = 1024
            lengths = [_lengths(len(part), bags) for part in parts]
            features = KeyedJaggedTensor(
                keys=list(TABLES),
                values=torch.from_numpy(np.concatenate(parts)),
                lengths=torch.from_numpy(np.concatenate(lengths)),
            )
            self.optimizer.zero_grad()
            self.model(features).sum().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """What torch.distributed.checkpoint saves, and loads into in place."""
        return {
            "model": self.model.state_dict(),
            "fused": self.model.fused_optimizer.state_dict(),
            "optimizer": {str(i): s for i, s in self.optimizer.state_dict()["state"].items()},
        }

    def probe(self) -> list[torch.Tensor]:
        """A few rows of every shard with their state, as views."""
        shards = [
            *self.model.state_dict().values(),
            *(
                value
                for state in self.model.fused_optimizer.state_dict()["state"].values()
                for value in state.values()
            ),
        ]
        found = []
        for value in shards:
            shards = (
                [s.tensor for s in value.local_shards()] if hasattr(value, "local_shards") else []
            )
            found += [shard[:: max(1, len(shard) // 64)] for shard in shards if len(shard)]
        return found

    @property
    def bytes(self) -> int:
        """Rows and their state, over all ranks: one number a row, of cuts one a row and cut."""
        return sum(4 * count * (WIDTH + 1) for count in self.rows)


def _lengths(ids: int, bags: int) -> np.ndarray:
    lengths = np.full(bags, ids // bags, np.int64)
    lengths[: ids % bags] += 1
    return lengths
