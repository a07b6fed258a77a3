"""A sharded TorchRec model, saved by its ranks and by torch.distributed.checkpoint."""
