from __future__ import annotations

import queue

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.checkpoint.saving import snapshot
from holdfast.checkpoint.saving.snapshot import PartQueue, StagedPart, take_rows
from holdfast.checkpoint.saving.workbench import Workbench
from holdfast.checkpoint.selecting.selection import Selection
from holdfast.kernels.rows import bitmap
from holdfast.model.devices import BlockingDevice
from holdfast.model.tables import Table, find_tables

ROWS = {"a": 700, "b": 300, "c": 500}
MARKED = {name: range(3, rows, 2) for name, rows in ROWS.items()}


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "BUFFER_BYTES", 1 << 10)


def staged(tables: list[Table], selections: list[Selection], threads: int) -> list[StagedPart]:
    parts: PartQueue = queue.SimpleQueue()
    with Workbench(bytes_max=1 << 30, threads=threads) as bench:
        schemas = [table.schema() for table in tables]
        take_rows(tables, schemas, selections, bench=bench, out=parts)
        parts.put(None)
        return [copy.result() for copy in iter(parts.get, None)]


def some(table: Table) -> Selection:
    words_W = bitmap.new(table.rows)
    bitmap.mark(words_W, np.array(MARKED[table.name[0]]), table.rows)
    return Selection(table.rows, words_W)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("on_device", [(), ("a.weight",), ("a.weight", "b.weight")])
def test_parts_come_by_tables_and_rows_those_of_a_device_last(
    monkeypatch: pytest.MonkeyPatch, threads: int, is_marked: bool, on_device: tuple[str, ...]
) -> None:
    model = nn.ModuleDict({name: nn.Embedding(rows, 8) for name, rows in ROWS.items()})
    tables = find_tables(model, [])
    device = BlockingDevice(torch.device("cpu"))
    monkeypatch.setattr(
        Table, "device", property(lambda self: device if self.name in on_device else None)
    )
    selections = [some(table) if is_marked else Selection(table.rows) for table in tables]
    parts = staged(tables, selections, threads)
    # `sorted` keeps the model's order within each of the two.
    names = sorted((table.name for table in tables), key=lambda name: name in on_device)
    of_rows = {
        table.name: list(MARKED[table.name[0]] if is_marked else range(table.rows))
        for table in tables
    }
    told = [(part.schema.name, row) for part in parts for row in part.ids().tolist()]
    assert told == [(name, row) for name in names for row in of_rows[name]]
    assert len(parts) > 2 * len(ROWS)
    for part in parts:
        weight_ND = dict(model.named_parameters())[part.schema.name].detach().numpy()
        assert np.array_equal(part.columns[0], weight_ND[part.ids()])
