"""A TorchRec training behind TrainPipelineSparseDist with falling learning rates, to be killed.

torchrun ... pipelined.py --url URL --steps STEPS [--pause STEP ...]

The pipeline reads two batches ahead of the one it trains. The rates of all optimizers, the fused
ones too, fall at every second checkpoint. Reading draws from the global generators. At each
``--pause`` rank 0 prints that it waits to be killed, the first time that a run gets there.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist, sharding_plan
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper as DataParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import holdfast as hf
from holdfast import events

ROWS = {"user": 500, "item": 300, "shop": 40}
SAMPLES, BATCH = 192, 8  # 12 batches an epoch on 2 ranks: epochs end between checkpoints, too
EVERY = 5


class Clicks(Dataset[Any]):
    """A sample's numbers change whenever it is read; its ids do not."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        ids = torch.stack([torch.randint(rows, (2,), generator=draw) for rows in ROWS.values()])
        return torch.rand(8), ids, float(index % 2)


def collate(samples: list[Any]) -> Batch:
    """Samples as TorchRec's own batch."""
    numbers, ids, clicks = zip(*samples, strict=True)
    features = KeyedJaggedTensor(
        [*ROWS],
        torch.stack(ids).transpose(0, 1).reshape(-1),
        lengths=torch.full((len(ROWS) * len(samples),), 2),
    )
    return Batch(torch.stack(numbers), features, torch.tensor(clicks))


def make_model() -> DistributedModelParallel:
    """DLRM with a loss; tables sharded by rows, by columns and whole."""
    ranks = dist.get_world_size()
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name, embedding_dim=8, num_embeddings=rows, feature_names=[name]
            )
            for name, rows in ROWS.items()
        ]
    )
    ways = {
        "user": sharding_plan.row_wise(compute_kernel="fused"),
        "item": sharding_plan.column_wise(ranks=[0, ranks - 1], compute_kernel="fused"),
        "shop": sharding_plan.table_wise(rank=ranks - 1, compute_kernel="fused"),
    }
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharder = EmbeddingBagCollectionSharder(fused)
    divided = sharding_plan.construct_module_sharding_plan(bags, ways, sharder, ranks, ranks, "cpu")
    dlrm = DLRM(bags, 8, dense_arch_layer_sizes=[16, 8], over_arch_layer_sizes=[16, 1])
    return DistributedModelParallel(
        DLRMTrain(dlrm),
        device=torch.device("cpu"),
        plan=ShardingPlan({"model.sparse_arch.embedding_bag_collection": divided}),
        sharders=[sharder],
        data_parallel_wrapper=DataParallel(static_graph=False, find_unused_parameters=True),
    )


def train(url: str, steps: int, pause: Sequence[int] = ()) -> dict[str, Any]:
    """Train ``steps`` steps in all; the rates in the end, and how far the pipeline read ahead."""
    torch.manual_seed(dist.get_rank())
    model = make_model()
    dense = {
        name: p for name, p in model.named_parameters() if not hasattr(p, "_in_backward_optimizers")
    }
    wrapped = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.05))
    optimizer = CombinedOptimizer([model.fused_optimizer, wrapped])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * EVERY, gamma=0.5)
    dataset = Clicks()
    loader = DataLoader(
        dataset, batch_size=BATCH, sampler=DistributedSampler(dataset), collate_fn=collate
    )
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    found: list[int] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.ReadAhead):
            found.append(event.batches)

    with hf.Checkpointer(
        url, model=model, optimizer=optimizer, extras={"schedule": schedule}, every=EVERY,
        codec="fp32", events=note,
    ) as ck:  # fmt: skip
        ck.resume()
        batches = ck.epochs(loader, -(-steps * BATCH * dist.get_world_size() // SAMPLES))
        while ck.current_step < steps:
            pipeline.progress(batches)
            schedule.step()
            ck.step()
            if dist.get_rank() == 0 and ck.current_step in pause:
                ck.wait()
                wait_once(Path(f"{url}.paused-{ck.current_step}"))
    return {"rates": [group["lr"] for group in optimizer.param_groups], "ahead": found}


def wait_once(mark: Path) -> None:
    """Wait to be killed, unless an earlier process has."""
    if not mark.exists():
        mark.touch()
        print("paused", flush=True)
        time.sleep(3600)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause", type=int, nargs="*", default=[])
    dist.init_process_group("gloo")
    print(f"result {dist.get_rank()} {train(**vars(parser.parse_args()))}", flush=True)
