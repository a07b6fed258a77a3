"""Checkpoints of one process: kernels, the stall, tracking, bytes, peers, accuracy."""
