"""Which tables TorchRec has sharded in a model, and what this rank holds of each.

    model -> sharded collections -> kernels of this rank -> one table for each shard

Names are those of ``state_dict()``, which are also those of the collection before it was sharded:
``bags.embedding_bags.users.weight``. A rank that holds nothing of a table has no ``Table`` for it,
but its name is claimed all the same.

Invariant: every table of a sharded collection is claimed or refused; none is saved as dense state.

Not here: what the kernels hold (fused.py, dense.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.batched_embedding_kernel import (
    BatchedDenseEmbedding,
    BatchedDenseEmbeddingBag,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
)
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    ShardedEmbeddingTable,
)
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import DataType

from holdfast.errors import InvalidRequestError
from holdfast.model.names import plain_name
from holdfast.model.shard import Shard
from holdfast.model.tables import Claimed, Loading, Table
from holdfast.model.torchrec.dense import DenseKernelTable
from holdfast.model.torchrec.fused import KNOWN, FusedTable, Kernel

_FUSED = (BatchedFusedEmbedding, BatchedFusedEmbeddingBag)
_DENSE = (BatchedDenseEmbedding, BatchedDenseEmbeddingBag)
_KERNELS = (EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value)
_NUMBERS = (DataType.FP32, DataType.FP16, DataType.BF16)
_HOMES = {ShardedEmbeddingBagCollection: "embedding_bags", ShardedEmbeddingCollection: "embeddings"}


def claim(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Claimed:
    """The tables that TorchRec has sharded.

    Raises:
        InvalidRequestError: a table's kernel, numbers or optimizer are not supported.
    """
    owners = {
        id(parameter): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    tables: list[Table] = []
    names: set[str] = set()
    for path, collection in sharded_collections(model):
        home = _HOMES[type(collection)]
        prefix = plain_name(f"{path}.{home}." if path else f"{home}.")
        for name, sharding in collection.module_sharding_plan.items():
            names.add(f"{prefix}{name}.weight")
            _check_kernel(f"{prefix}{name}.weight", sharding.compute_kernel)
        for kernel in _kernels_of(collection):
            tables += _tables_of(kernel, prefix, getattr(collection, home), owners)
    return Claimed(tuple(tables), frozenset(names), load_network if names else None)


def sharded_collections(
    module: nn.Module, path: str = ""
) -> Iterator[tuple[str, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection]]:
    """The sharded collections of a model, by the path they have in ``state_dict()``.

    Raises:
        InvalidRequestError: TorchRec has sharded a module of another kind.
    """
    if type(module) in _HOMES:
        yield path, module
        return
    if isinstance(module, ShardedModule):
        raise InvalidRequestError(
            "a sharded module of this kind is not supported",
            module=path,
            type=type(module).__name__,
            known=[kind.__name__ for kind in _HOMES],
        )
    for name, child in _children(module, path):
        yield from sharded_collections(child, name)


def load_network(model: nn.Module, state: Mapping[str, Any]) -> Loading:
    """Load a state dict that lacks the sharded tables: TorchRec's own loading insists on them."""
    loading = Loading()
    _load_outside(model, "", dict(state), loading)
    known = set(model.state_dict())
    loading.unexpected.extend(name for name in state if name not in known)
    return loading


def _load_outside(module: nn.Module, path: str, state: dict[str, Any], loading: Loading) -> None:
    """Load into every module that is not a sharded collection."""
    if type(module) in _HOMES:
        return
    prefix = f"{path}." if path else ""
    module._load_from_state_dict(state, prefix, {}, True, loading.missing, [], loading.errors)
    for name, child in _children(module, path):
        _load_outside(child, name, state, loading)


def _children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """A module's parts, by their paths in ``state_dict()``: wrappers leave no trace there."""
    if isinstance(module, DistributedModelParallel | DistributedDataParallel):
        yield path, module.module
    else:
        for name, child in module.named_children():
            yield f"{path}.{name}" if path else name, child


def _check_kernel(name: str, kernel: str) -> None:
    if kernel not in _KERNELS:
        raise InvalidRequestError(
            "a table's compute kernel is not supported: its rows may be in a cache or on disk",
            table=name,
            kernel=kernel,
            known=list(_KERNELS),
            todo="shard it with compute_kernel='fused'",
        )


def _kernels_of(collection: Any) -> Iterator[BaseEmbedding]:
    # TorchRec keeps them out of named_modules(), so that names stay as without sharding.
    lookups: list[nn.Module] = collection._lookups
    for lookup in lookups:
        yield from (part for part in lookup.modules() if isinstance(part, BaseEmbedding))


def _tables_of(
    kernel: BaseEmbedding, prefix: str, homes: nn.ModuleDict, owners: dict[int, Any]
) -> Iterator[Table]:
    """This rank's shards in one kernel."""
    fused: Kernel | None = None
    for index, config in enumerate(kernel.config.embedding_tables):
        name = f"{prefix}{config.name}.weight"
        _check_numbers(name, config)
        shard = _shard_of(config)
        if type(kernel) in _FUSED:
            if fused is None:
                _check_optimizer(name, kernel)
                fused = Kernel(kernel.emb_module, kernel.fused_optimizer.param_groups)
            yield FusedTable(name, fused, index, shard=shard)
        elif type(kernel) in _DENSE:
            home = homes[config.name]
            yield DenseKernelTable(name, home, owners.get(id(home.weight)), shard=shard)
        else:
            raise InvalidRequestError(
                "a table's kernel is not supported", table=name, kernel=type(kernel).__name__
            )


def _shard_of(config: ShardedEmbeddingTable) -> Shard:
    local = config.local_metadata
    if local is None:  # data-parallel: every rank has it all
        return Shard(config.num_embeddings, config.embedding_dim, is_replicated=True)
    (row, column), (rows, columns) = local.shard_offsets, local.shard_sizes
    return Shard(
        config.num_embeddings,
        config.embedding_dim,
        range(row, row + rows),
        range(column, column + columns),
    )


def _check_numbers(name: str, config: ShardedEmbeddingTable) -> None:
    if config.data_type not in _NUMBERS:
        raise InvalidRequestError(
            "a sharded table is of numbers that are not stored by rows",
            table=name,
            type=config.data_type.value,
            known=[known.value for known in _NUMBERS],
            todo="train in one of these; the codec makes what is stored small",
        )


def _check_optimizer(name: str, kernel: BaseEmbedding) -> None:
    module = kernel.emb_module
    known = KNOWN.get(module.optimizer)
    states = module.get_optimizer_state() if known is not None else []
    if known is None or any(set(state) != set(known) for state in states):
        raise InvalidRequestError(
            "a table's fused optimizer is not supported: its row state is not known",
            table=name,
            optimizer=module.optimizer.value,
            state=sorted(states[0]) if states else None,
            known=[kind.value for kind in KNOWN],
        )
