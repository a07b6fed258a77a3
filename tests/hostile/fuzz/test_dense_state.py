"""Lying dense state: refused with our error, or built."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint.format import tree
from holdfast.errors import CorruptDataError
from tests.hostile.campaign_runs import make_cut, make_prey, watch
from tests.hostile.campaign_storage import MemoryStorage
from tests.hostile.fuzz.lies import NODES, fuzz
from tests.hostile.mutators.stored_run import lay_out


def dense_bytes(structure: Any, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    return tree.to_bytes(structure, tensors or {"0": torch.arange(6.0), "1": torch.ones(2, 3)})


@given(NODES)
@fuzz
def test_lying_dense_structures_are_refused_or_built(node: Any) -> None:
    with contextlib.suppress(hf.CorruptDataError):
        tree.from_bytes(dense_bytes(node))


@pytest.mark.parametrize(
    "node",
    [
        {"sparse": ["0", "1", [2**70, 3], True]},
        {"sparse": ["0", "1", [2**62, 2**62], True]},
        {"sparse": ["0", "1", [-1], False]},
        {"sparse": ["1", "0", [3, 3], 7]},
        {"sparse": ["0", "1", "ab", True]},
        {"s": ["9"]}, {"s": []}, {"n": 0}, {"x": None}, {"b": "é"}, {"b": 5}, {"f": "1"},
        {"d": [[[], 1]]}, {"d": [[{"l": []}, 1]]}, {"d": 5}, {"l": None},
    ],
    ids=repr,
)  # fmt: skip
def test_impossible_dense_structures_are_refused(node: Any) -> None:
    with pytest.raises(hf.CorruptDataError):
        tree.from_bytes(dense_bytes(node))


def test_deeply_nested_dense_structure_is_refused() -> None:
    text = '{"l":[' * 50_000 + "]}" * 50_000
    header = json.dumps({"__metadata__": {"holdfast.tree": text}}).encode()
    with pytest.raises(hf.CorruptDataError):
        tree.from_bytes(len(header).to_bytes(8, "little") + header)


@given(st.binary(max_size=120), st.integers(0, 2**64 - 1))
@fuzz
def test_random_bytes_are_no_dense_state(data: bytes, length: int) -> None:
    good = dense_bytes({"x": "0"})
    for bad in (data, length.to_bytes(8, "little") + good[8:], good[: len(data)]):
        if bad != good:
            with pytest.raises(hf.CorruptDataError):
                tree.from_bytes(bad)


class _CountingReader:
    """Uses the states of all ranks as a reader does: without a look at what they are."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 0}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"] + 1

    def load_rank_states(self, states: Any) -> None:
        self.at = min(state["at"] + 1 for state in states)


@pytest.mark.parametrize("state", [{}, {"at": "x"}, [1], None, torch.zeros(3), 7])
def test_states_of_ranks_that_their_reader_does_not_take_are_refused(state: Any) -> None:
    (prey,) = make_prey(["ranks"])
    run = prey.run.copy()
    for _, part in run.parts("dense"):
        dense = tree.from_bytes(part.data)
        if dense.get("extras"):
            dense["extras"]["reader"] = state
            part.data = tree.to_bytes(*tree.flatten(dense))
    storage = MemoryStorage(lay_out(run).files())
    assert hf.verify(storage).is_sound
    live = dataclasses.replace(make_cut(), reader=_CountingReader())
    with watch(live, storage) as ck, pytest.raises(CorruptDataError):
        ck.resume()
