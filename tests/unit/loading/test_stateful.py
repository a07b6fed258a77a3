"""What may be an extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast as hf


class Mine:
    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_stateful_things_come_back(tmp_path: Path) -> None:
    for at in (7, 0):
        mine = Mine(at)
        assert isinstance(mine, hf.Stateful) and not isinstance(3, hf.Stateful)
        with hf.Checkpointer(tmp_path, model=nn.Embedding(5, 2), extras={"mine": mine}) as ck:
            if not ck.resume():
                ck.step()
    assert mine.at == 7


@pytest.mark.parametrize("item", [3, {"a": 1}, torch.ones(3)], ids=lambda item: type(item).__name__)
def test_what_is_not_stateful_is_refused(tmp_path: Path, item: Any) -> None:
    with pytest.raises(hf.InvalidRequestError, match="state_dict"):
        hf.Checkpointer(tmp_path, model=nn.Embedding(5, 2), extras={"mine": item})
