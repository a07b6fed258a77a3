"""A small TorchRec model, sharded as a test asks for, and what it holds, read without Holdfast.

Twelve tables: a plain, a weighted and a sequence collection of four each, one of every sharding
type (cases.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from holdfast.model.torchrec.claim import sharded_collections
from tests.torchrec.cases import (
    COLLECTIONS,
    COLUMN,
    REPLICATED,
    ROW,
    ROWS,
    TABLE,
    WIDTH,
    Shards,
    type_of,
)

BATCH = 6

_FUSED = {
    "rowwise-adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}
# Which ranks hold the cuts of a table's columns; a fused kernel may hold several of one table.
_CUTS = {
    "fused": {1: [0, 0], 2: [0, 1], 3: [0, 1, 2, 0], 4: [0, 1, 2, 3]},
    "dense": {1: [0], 2: [0, 1], 3: [2, 0], 4: [0, 1, 2, 3]},
}


class Model(nn.Module):
    """Bags, weighted bags and sequences over the same kinds of features, and a small network."""

    def __init__(self, numbers: DataType = DataType.FP32) -> None:
        super().__init__()
        cpu = torch.device("cpu")
        bags = [
            [
                EmbeddingBagConfig(
                    name=f"{kind}{index}",
                    embedding_dim=WIDTH,
                    num_embeddings=rows,
                    feature_names=_features(kind, index),
                    data_type=numbers,
                )
                for index, rows in enumerate(ROWS)
            ]
            for kind in "bw"
        ]
        sequences = [
            EmbeddingConfig(
                name=f"s{index}",
                embedding_dim=WIDTH,
                num_embeddings=rows,
                feature_names=_features("s", index),
                data_type=numbers,
            )
            for index, rows in enumerate(ROWS)
        ]
        self.bags = EmbeddingBagCollection(tables=bags[0], device=cpu)
        self.weighted = EmbeddingBagCollection(tables=bags[1], device=cpu, is_weighted=True)
        self.sequences = EmbeddingCollection(tables=sequences, device=cpu)
        self.norm = nn.BatchNorm1d(_FLOATS)
        self.top = nn.Linear(_FLOATS, 1)

    def forward(self, batch: dict[str, KeyedJaggedTensor]) -> torch.Tensor:
        """Scores of a batch."""
        parts = [self.bags(batch["b"]).values(), self.weighted(batch["w"]).values()]
        for jagged in self.sequences(batch["s"]).values():
            sums = [
                row.sum(0, keepdim=True)
                for row in torch.split(jagged.values(), jagged.lengths().tolist())
            ]
            parts.append(torch.cat(sums))
        scores: torch.Tensor = self.top(self.norm(torch.cat(parts, 1))).squeeze(1)
        return scores


def _features(kind: str, index: int) -> list[str]:
    """The second table of each collection serves two features; one feature is looked up in two."""
    more = {("b", 3): ["b0f"], (kind, 1): [f"{kind}1g"]}
    return [f"{kind}{index}f", *more.get((kind, index), [])]


_FLOATS = WIDTH * sum(len(_features(kind, index)) for kind in "bws" for index in range(len(ROWS)))


def make_batch(
    step: int, *, sample: int = 0, single: Collection[int] = ()
) -> dict[str, KeyedJaggedTensor]:
    """A batch with empty bags, repeated ids and weights; rank ``sample`` of a step has its own.

    Sequences of the tables ``single`` have one id each: fbgemm's dense kernel adds up longer ones
    on CPUs, where it should not, so TorchRec cannot train them.
    """
    draw = np.random.default_rng([step, sample])
    batch = {}
    for kind in "bws":
        keys, values, lengths = [], [], []
        for index, rows in enumerate(ROWS):
            for key in _features(kind, index):
                if key in keys:
                    continue
                keys.append(key)
                counts = draw.integers(0, 4, BATCH)
                if kind == "s" and index in single:
                    counts[:] = 1
                lengths.append(counts)
                values.append(draw.integers(0, rows, counts.sum()))
        ids = torch.from_numpy(np.concatenate(values))
        weights = torch.from_numpy(draw.uniform(0.5, 2, len(ids)).astype(np.float32))
        batch[kind] = KeyedJaggedTensor(
            keys=keys,
            values=ids,
            lengths=torch.from_numpy(np.concatenate(lengths)),
            weights=weights if kind == "w" else None,
        )
    return batch


def numbers_of(optimizer: str) -> tuple[str, DataType]:
    """The optimizer and the numbers that a name like ``sgd@FP16`` stands for."""
    kind, _, numbers = optimizer.partition("@")
    return kind, DataType(numbers or "FP32")


class Trainer:
    """A model sharded over the current process group, and its torch optimizers."""

    def __init__(self, *, optimizer: str, layout: int = 0, seed: int = 5) -> None:
        torch.manual_seed(seed)
        optimizer, numbers = numbers_of(optimizer)
        is_dense = optimizer == "adam"  # fbgemm has no fused Adam on CPUs
        self.tracking = "hash" if is_dense else "lookup"
        self.model = shard(
            Model(numbers), layout, "dense" if is_dense else "fused", _FUSED.get(optimizer)
        )
        self.optimizers = make_optimizers(self.model, optimizer)
        kinds = [type_of("sequences", index, layout) for index in range(len(ROWS))]
        self._single = [i for i, kind in enumerate(kinds) if is_dense or kind == REPLICATED]

    def evaluate(self, step: int) -> torch.Tensor:
        """Scores of a batch, without training on it."""
        with torch.no_grad():
            scores: torch.Tensor = self.model(
                make_batch(step, sample=dist.get_rank(), single=self._single)
            )
        return scores

    def train(self, steps: range, *, after: Callable[[int], object] = lambda step: None) -> None:
        """Train on batches that depend on the step and the rank alone."""
        for step in steps:
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
            scores = self.model(make_batch(step, sample=dist.get_rank(), single=self._single))
            target = (torch.arange(BATCH) % 2).float()
            nn.functional.binary_cross_entropy_with_logits(scores, target).backward()
            for optimizer in self.optimizers.values():
                optimizer.step()
            after(step)


def shard(
    model: Model, layout: int, kernel: str, fused: EmbOptimType | None
) -> DistributedModelParallel:
    """The model over the current process group.

    With the dense kernel sequences are never row-wise: see ``make_batch``.
    """
    ranks = dist.get_world_size()
    params = {} if fused is None else {"optimizer": fused, "learning_rate": 0.1}
    bags, sequences = (
        EmbeddingBagCollectionSharder(fused_params=dict(params)),
        EmbeddingCollectionSharder(fused_params=dict(params)),
    )
    plan = ShardingPlan({})
    for name in COLLECTIONS:
        sharder = sequences if name == "sequences" else bags
        ways = {}
        for index in range(len(ROWS)):
            way = type_of(name, index, layout)
            if way == ROW and name == "sequences" and kernel == "dense":
                way = TABLE
            ways[f"{name[0]}{index}"] = {
                TABLE: table_wise(rank=(index + 1) % ranks, compute_kernel=kernel),
                ROW: row_wise(compute_kernel=kernel),
                COLUMN: column_wise(ranks=_CUTS[kernel][ranks], compute_kernel=kernel),
                REPLICATED: data_parallel(),
            }[way]
        plan.plan[name] = construct_module_sharding_plan(
            getattr(model, name),
            ways,
            sharder=sharder,
            local_size=ranks,
            world_size=ranks,
            device_type="cpu",
        )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[bags, sequences],
    )


def make_optimizers(model: nn.Module, kind: str) -> dict[str, torch.optim.Optimizer]:
    """Torch optimizers for what is not fused: of tables, as the fused one would; of the rest."""
    # A small eps is zero in fp16, and rows without a gradient become 0 / 0.
    eps = 1e-3 if any(p.dtype == torch.float16 for p in model.parameters()) else 1e-8
    made: dict[str, Any] = {
        "rowwise-adagrad": lambda group: RowWiseAdagrad(group, lr=0.1, eps=eps),
        "adagrad": lambda group: torch.optim.Adagrad(group, lr=0.1, eps=eps),
        "sgd": lambda group: torch.optim.SGD(group, lr=0.1),
        "adam": lambda group: torch.optim.Adam(group, lr=0.01),
    }
    left = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not hasattr(parameter, "_in_backward_optimizers")
    }
    tables = [parameter for name, parameter in left.items() if "embedding" in name]
    rest = [parameter for name, parameter in left.items() if "embedding" not in name]
    return {"tables": made[kind](tables), "rest": torch.optim.Adam(rest, lr=0.01)}


class Local:
    """What this rank holds of the tables, with the row state, read from the kernels themselves.

    By table: shards (first row, first column, arrays by column name). Row state is named as torch
    does. Numbers of other types come as the same numbers in float32.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.shards: Shards = {}
        model, optimizer = trainer.model, trainer.optimizers["tables"]
        fused = model.fused_optimizer.state_dict()["state"]
        named = dict(model.named_parameters())
        for name, value in model.state_dict().items():
            if "embedding" not in name:
                continue
            if not isinstance(value, ShardedTensor):
                arrays = {
                    "weight": value.detach().float().numpy(),
                    **torch_state(optimizer, named[name]),
                }
                self.shards[name] = [(0, 0, arrays)]
                continue
            self.shards[name] = []
            for index, shard in enumerate(value.local_shards()):
                row, column = shard.metadata.shard_offsets
                arrays = {"weight": shard.tensor.detach().float().numpy()}
                for key, state in fused.get(name, {}).items():
                    assert key.endswith(".momentum1")
                    arrays["sum"] = state.local_shards()[index].tensor.float().numpy()
                arrays |= torch_state(optimizer, named[name])
                self.shards[name].append((row, column, arrays))

    def copy(self) -> Shards:
        """The shards as of now."""
        return {
            name: [(r, c, {k: a.copy() for k, a in arrays.items()}) for r, c, arrays in shards]
            for name, shards in self.shards.items()
        }


def torch_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, np.ndarray]:
    """The row state that a torch optimizer has of a parameter."""
    state = optimizer.state.get(parameter, {})
    return {
        key: value.float().numpy()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim
    }


def make_plain_shards(model: Model, optimizers: dict[str, torch.optim.Optimizer]) -> Shards:
    """The shards of a model that is not sharded: all of it."""
    return {
        name: [
            (0, 0, {"weight": p.detach().float().numpy(), **torch_state(optimizers["tables"], p)}),
        ]
        for name, p in model.named_parameters()
        if "embedding" in name
    }


def unsupported_bags() -> dict[str, DistributedModelParallel]:
    """Sharded collections, each with something that Holdfast refuses."""
    moves_all = EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD
    return {
        "int8": _as_int8(
            _shard_bags(DataType.FP32, {}, table_wise(rank=0, compute_kernel="fused"))
        ),
        "cached": _shard_bags(
            DataType.FP32, {}, table_wise(rank=0, compute_kernel="fused_uvm_caching")
        ),
        "optimizer": _shard_bags(
            DataType.FP32, {"optimizer": moves_all}, table_wise(rank=0, compute_kernel="fused")
        ),
        "two dense cuts": _shard_bags(
            DataType.FP32, {}, column_wise(ranks=[0, 0], compute_kernel="dense")
        ),
    }


def _as_int8(model: DistributedModelParallel) -> DistributedModelParallel:
    """As if the kernels held integers; TorchRec does not train such tables yet."""
    for _, collection in sharded_collections(model):
        for lookup in collection._lookups:
            for part in lookup.modules():
                for table in (
                    part.config.embedding_tables if isinstance(part, BaseEmbedding) else ()
                ):
                    table.data_type = DataType.INT8
    return model


def _shard_bags(numbers: DataType, fused: dict[str, Any], way: Any) -> DistributedModelParallel:
    config = EmbeddingBagConfig(
        name="t", embedding_dim=WIDTH, num_embeddings=9, feature_names=["f"], data_type=numbers
    )
    bags = EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
    sharder = EmbeddingBagCollectionSharder(fused_params=dict(fused))
    plan = construct_module_sharding_plan(bags, {"t": way}, sharder, 1, 1, "cpu")
    return DistributedModelParallel(
        nn.ModuleDict({"bags": bags}),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"bags": plan}),
        sharders=[sharder],
    )
