"""Write the golden store of format 4: tables whose numbers are not float32.

    python -m tests.golden.make_format4

A base and a delta of three tables: ``half`` (float16, its sum in float32), ``brain`` (bfloat16
throughout) and ``wide`` (float64), stored as they are; and ``coded``, a bfloat16 table in few bits.
Among their numbers are NaN with payloads, infinities, -0.0 and denormals. The base has filters
(segments of format 4), the delta none (format 3). Run once per format, by hand: the committed bytes
are what later versions must still read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from holdfast import events
from holdfast.checkpoint.format import tree
from holdfast.checkpoint.format.catalog import BASE, DELTA, CheckpointEntry, SegmentEntry
from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.format.object import DENSE, ROWS, object_name
from holdfast.checkpoint.format.segment import encode_segment
from holdfast.checkpoint.planning.bases import BaseChoice
from holdfast.checkpoint.planning.codecs import CodecPlan, column_codecs
from holdfast.checkpoint.planning.save_plan import RunRules, SavePlan
from holdfast.checkpoint.store.append import append_checkpoint
from holdfast.checkpoint.store.writer import RunWriter, store_segment
from holdfast.model.schema import Column, TableSchema
from holdfast.storage import Storage, open_storage

COUNT, WIDTH = 20, 3
BASE_STEP, DELTA_STEP = 4, 6
CHANGED = np.array([1, 2, 7])
SCHEMAS = (
    TableSchema("half", COUNT, (Column("weight", WIDTH, "float16"), Column("sum", 1))),
    TableSchema("brain", COUNT, tuple(Column(name, WIDTH, "bfloat16")
                                      for name in ("weight", "exp_avg"))),
    TableSchema("wide", COUNT, (Column("weight", WIDTH, "float64"), Column("sum", 1, "float64"))),
    TableSchema("coded", COUNT, (Column("weight", WIDTH, "bfloat16"),
                                 Column("sum", WIDTH, "float64"))),
)  # fmt: skip
WORDS = {"float32": "<u4", "float16": "<u2", "bfloat16": "<u2", "float64": "<u8"}
# How NumPy sees columns: bfloat16 as its patterns.
ARRAYS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "float64": "<f8"}


def patterns(table: int, column: int, step: int) -> np.ndarray:
    """The bits of a column at a step."""
    schema = SCHEMAS[table]
    kind = schema.columns[column]
    word = np.dtype(WORDS[kind.dtype])
    draw = np.random.default_rng([table, column])
    shape = (COUNT, kind.width)
    if schema.name == "coded":  # numbers that few bits can describe
        values = np.abs(draw.standard_normal(shape)).astype("<f4")
        if kind.dtype == "float64":
            bits = values.astype("<f8").view(word)
        else:
            bits = (values.view("<u4") >> np.uint32(16)).astype(word)
        bits[11] = np.iinfo(word).max  # NaN: stored as it is
    else:
        bits = draw.integers(0, np.iinfo(word).max, shape, dtype=word, endpoint=True)
        bits[2], bits[3] = 1, 1 << (8 * word.itemsize - 1)  # a denormal, -0.0
    if step == DELTA_STEP:
        bits[CHANGED] ^= word.type(5)
    return bits


def codecs_of(schema: TableSchema) -> CodecPlan:
    """How a table is stored."""
    if schema.name == "coded":
        return CodecPlan(parse_codec("asym8"), parse_codec("log8"), "golden")
    return CodecPlan(parse_codec("fp32"), None, "golden")


def write_store(storage: Storage) -> None:
    """The two checkpoints."""
    writer = RunWriter(storage, None, log=events.EventLog(), clock=lambda: 1_700_000_000.0)
    for step, kind in ((BASE_STEP, BASE), (DELTA_STEP, DELTA)):
        segments: list[SegmentEntry] = []
        objects: list[tuple[str, int]] = []
        with writer.new_object(ROWS, object_name(writer.next_number, ROWS, "4a")) as out:
            for table, schema in enumerate(SCHEMAS):
                parts = [np.arange(0, COUNT, 2), np.arange(1, COUNT, 2)]
                for ids in parts if kind == BASE else [CHANGED]:
                    columns = [
                        patterns(table, index, step)[ids].view(ARRAYS[column.dtype])
                        for index, column in enumerate(schema.columns)
                    ]
                    encoded = encode_segment(
                        ids, columns, column_codecs(schema, codecs_of(schema)),
                        has_filter=kind == BASE,
                    )  # fmt: skip
                    segments.append(
                        store_segment(out, encoded, table=schema.name, born=step, died=None)
                    )
            objects.append((out.name, out.close()))
        with writer.new_object(DENSE, object_name(writer.next_number, DENSE, "4b")) as out:
            state: dict[str, object] = {"model": {}, "optimizers": {}, "rng": {}, "extras": {}}
            data = tree.to_bytes(*tree.flatten(state))
            extent = out.append(DENSE, "dense", (data,), checksum(data))
            objects.append((out.name, out.close()))
        entry = CheckpointEntry(
            step=step, ordinal=0, kind=kind, base=BASE_STEP, schema=0, time=1_700_000_000.0,
            codec="fp32", state_codec="fp32", rows=sum(s.rows for s in segments),
            row_bytes=sum(s.extent.bytes for s in segments), bytes=sum(n for _, n in objects),
            full_bytes=0, stall_s=0.0, reason="golden", dense=extent,
        )  # fmt: skip
        plan = SavePlan(
            step=step, choice=BaseChoice(kind, None, "golden"), last_base=BASE_STEP,
            codecs=CodecPlan(parse_codec("fp32"), None, "golden"), schemas=SCHEMAS,
            rules=RunRules(),
        )  # fmt: skip
        append_checkpoint(writer, plan, entry, tuple(segments), tuple(objects))


if __name__ == "__main__":
    write_store(
        open_storage(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "format4"))
    )
