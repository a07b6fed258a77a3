"""The chunk grid (IncrCP): every step, a thousand checkpoints, what each of its parts is worth."""
