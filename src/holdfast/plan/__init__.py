"""When to save and how to recover: models of failures and costs. No torch, no engine."""
