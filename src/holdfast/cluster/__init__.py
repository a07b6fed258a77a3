"""Embedding servers that lose a machine and go on: processes, messages, parity, recovery."""
