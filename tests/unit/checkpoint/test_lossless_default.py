"""Three lines lose no bit of the model: what approximates is asked for by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast as hf
from holdfast.checkpoint.strategy import STRATEGIES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_restores_every_bit_by_default(
    tmp_path: Path, strategy: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    model = nn.Embedding(200, 8, sparse=True, dtype=dtype)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with hf.Checkpointer(tmp_path, model=model, optimizer=optimizer, strategy=strategy) as ck:
        for ids in ([1, 5, 9], [5, 100, 150]):
            optimizer.zero_grad()
            model(torch.tensor(ids)).pow(2).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            ck.step()
            ck.save().result()
        saved = model.weight.detach().clone()
        accumulated = optimizer.state[model.weight]["sum"].clone()
        with torch.no_grad():
            model.weight.zero_()
        ck.restore(2)
        if strategy in ("full", "cpr", "check-n-run", "incrcp"):  # the others save hot rows first
            assert torch.equal(model.weight, saved)
            assert torch.equal(optimizer.state[model.weight]["sum"], accumulated)
    run = hf.open(tmp_path)
    for step in run.steps:
        entry = run.catalog.checkpoint(step)
        assert {entry.codec, entry.state_codec} <= {"fp32", "raw16", "raw64", "none"}
