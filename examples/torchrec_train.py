"""Train a small recommendation model, sharded by TorchRec, that survives `kill -9`.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # or restarted ranks look for the dead ones
    torchrun --standalone --nproc-per-node 2 --max-restarts 9 examples/torchrec_train.py

Kill any of its processes: torchrun starts all again, and they train on from the last checkpoint as
if nothing had happened. With another --nproc-per-node the tables are divided anew.
"""

import argparse

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel, sharding_plan
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper as DataParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM

import holdfast as hf

ROWS = {"user": 5000, "item": 3000, "shop": 400, "city": 60}


def make_model() -> DistributedModelParallel:
    """DLRM with one table of each sharding type; the tables' optimizer is fused into backward."""
    ranks = dist.get_world_size()
    bags = EmbeddingBagCollection(tables=[
        EmbeddingBagConfig(name=name, embedding_dim=16, num_embeddings=rows, feature_names=[name])
        for name, rows in ROWS.items()])  # fmt: skip
    ways = {
        "user": sharding_plan.row_wise(compute_kernel="fused"),
        "item": sharding_plan.column_wise(ranks=[0, ranks - 1], compute_kernel="fused"),
        "shop": sharding_plan.table_wise(rank=ranks - 1, compute_kernel="fused"),
        "city": sharding_plan.data_parallel()}  # fmt: skip
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    divided = sharding_plan.construct_module_sharding_plan(bags, ways, sharder, ranks, ranks, "cpu")
    plan = ShardingPlan({"sparse_arch.embedding_bag_collection": divided})
    model = DLRM(bags, 8, dense_arch_layer_sizes=[32, 16], over_arch_layer_sizes=[32, 1])
    network = DataParallel(static_graph=False, find_unused_parameters=True)  # docs/ranks.md
    return DistributedModelParallel(model, plan=plan, sharders=[sharder],
                                    data_parallel_wrapper=network)  # fmt: skip


def make_batch(step: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """This rank's share of a step: numbers, ids (two of each kind), clicks."""
    draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    ids = [(rows * torch.rand(64, generator=draw) ** 3).long() for rows in ROWS.values()]
    features = KeyedJaggedTensor([*ROWS], torch.cat(ids), lengths=torch.full((4 * 32,), 2))
    return torch.rand(32, 8, generator=draw), features, ids[0][::2] % 2.0


def train(url: str, steps: int) -> None:
    """Train from the last checkpoint, or from the beginning, up to ``steps``."""
    torch.manual_seed(0)
    model = make_model()
    rest = [p for p in model.parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer = torch.optim.Adagrad(rest, lr=0.05)
    with hf.Checkpointer(url, model=model, optimizer=optimizer, every=10) as ck:
        for step in range(ck.resume(), steps):
            numbers, features, clicks = make_batch(step)
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(model(numbers, features)[:, 0], clicks)
            loss.backward()  # updates the sharded tables, too
            optimizer.step()
            ck.step()
            if dist.get_rank() == 0 and step % 10 == 9:
                print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="runs/torchrec")
    parser.add_argument("--steps", type=int, default=300)
    dist.init_process_group("gloo")
    train(**vars(parser.parse_args()))
