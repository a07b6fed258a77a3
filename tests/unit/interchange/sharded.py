"""A folder of DCP whose 2-D tensors lie in two pieces, as two ranks write it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

__all__ = ["BytesStorageMetadata", "LoadPlanner", "save_sharded"]


class _Planner(SavePlanner):
    def __init__(self, data: dict[MetadataIndex, torch.Tensor]) -> None:
        self.data = data

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.data[write_item.index]

    def set_up_planner(self, *args: object, **kwargs: object) -> None: ...
    def create_local_plan(self) -> SavePlan: ...
    def create_global_plan(self, all_plans: list[SavePlan]) -> object: ...
    def finish_plan(self, new_plan: SavePlan) -> SavePlan: ...


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write with DCP's own writer, one file for each of two ranks."""
    writer = FileSystemWriter(folder)
    plans: list[SavePlan] = []
    data: dict[MetadataIndex, torch.Tensor] = {}
    described = {}
    for name, tensor in tensors.items():
        half = tensor.shape[0] // 2 if tensor.ndim == 2 else tensor.shape[0]
        parts = [(0, tensor[:half]), (half, tensor[half:])] if tensor.ndim == 2 else [(0, tensor)]
        chunks = []
        for rank, (start, part) in enumerate(parts):
            offsets = torch.Size((start, *(0,) * (tensor.ndim - 1)))
            chunk = ChunkStorageMetadata(offsets, part.shape)
            chunks.append(chunk)
            index = MetadataIndex(name, offsets)
            data[index] = part.clone()
            item = WriteItem(
                index, WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(part), tensor.shape
                ),
            )  # fmt: skip
            while len(plans) <= rank:
                plans.append(SavePlan([]))
            plans[rank].items.append(item)
        described[name] = TensorStorageMetadata(
            TensorProperties.create_from_tensor(tensor), tensor.shape, chunks
        )
    results = []
    writer.set_up_storage_writer(True)
    prepared = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    for plan in prepared:
        future = writer.write_data(plan, _Planner(data))
        results.append(future.wait())
    planned = {name: tuple(name.split(".", 1)) for name in tensors}
    writer.finish(Metadata(described, planner_data=planned), results)
