"""How long training runs until a failure: models, logs, fits, and growth with nodes."""
