"""Several ranks (torch.distributed) write one checkpoint: agree, store apart, commit as one."""
