"""A rank that trains under torchrun until it is ended; it prints the step that it ended at."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from tests.ranks.cases import _checkpointer
from tests.ranks.held import Training


def main(url: str) -> None:
    """Train for ever."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = Training("row", rank, ranks)
    ck = _checkpointer(url, training, dist.group.WORLD, every=50)
    try:
        with ck:
            ck.resume()
            while True:
                training.train([ck.current_step + 1])
                dist.all_reduce(torch.ones(1))
                time.sleep(0.002)
                ck.step()
                if ck.current_step == 1:
                    print("training", flush=True)
    finally:
        print(ck.current_step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
