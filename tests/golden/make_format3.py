"""Write the golden store of format 3: what two ranks saved of a table cut by columns.

    python -m tests.golden.make_format3

A base and a delta; the table ``users`` in two cuts, each with a sum for each row, on a rank each;
``items`` whole, its rows divided among the ranks. Run once per format, by hand: the committed bytes
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
from holdfast.checkpoint.planning.codecs import CodecPlan
from holdfast.checkpoint.planning.save_plan import RunRules, SavePlan
from holdfast.checkpoint.store.append import append_checkpoint
from holdfast.checkpoint.store.writer import RunWriter, store_segment
from holdfast.model.schema import Column, TableSchema
from holdfast.model.shard import Shard
from holdfast.storage import Storage, open_storage

ROWS_OF = {"users": 12, "items": 9}
WIDTH = 6
CUT = 4  # floats of the first cut of ``users``
BASE_STEP, DELTA_STEP = 4, 6
CHANGED = np.array([1, 2, 7])


def weights(table: str, step: int) -> np.ndarray:
    """The floats of a whole table at a step."""
    rows = ROWS_OF[table]
    values = np.arange(rows * WIDTH, dtype=np.float32).reshape(rows, WIDTH) / 8
    if step == DELTA_STEP:
        values[CHANGED] += 100
    return values


def sums(part: int, step: int) -> np.ndarray:
    """What a rank has for each row of its cut of ``users``."""
    values = np.full((ROWS_OF["users"], 1), 1.0 + part, np.float32)
    if step == DELTA_STEP:
        values[CHANGED] += 2
    return values


def own_state(rank: int, step: int) -> dict[str, object]:
    """What is a rank's own."""
    return {"rng": {}, "extras": {"reader": {"at": 10 * step + rank}}}


def _cuts() -> list[TableSchema]:
    ranges = (range(CUT), range(CUT, WIDTH))
    return [Shard(12, WIDTH, columns=r).schema("users", (Column("sum", 1),)) for r in ranges]


def write_store(storage: Storage) -> None:
    """The two checkpoints."""
    writer = RunWriter(storage, None, log=events.EventLog(), clock=lambda: 1_700_000_000.0)
    cuts = _cuts()
    items = TableSchema("items", 9, (Column("weight", WIDTH),))
    fp32 = parse_codec("fp32")
    for step, kind in ((BASE_STEP, BASE), (DELTA_STEP, DELTA)):
        segments: list[SegmentEntry] = []
        objects: list[tuple[str, int]] = []
        for rank, cut in enumerate(cuts):
            with writer.new_object(
                ROWS, object_name(writer.next_number, ROWS, f"3a-{rank}")
            ) as out:
                ids = np.arange(12) if kind == BASE else CHANGED
                floats = weights("users", step)[ids, cut.start : cut.start + cut.width]
                columns = [np.ascontiguousarray(floats), sums(rank, step)[ids]]
                encoded = encode_segment(ids, columns, [fp32, fp32])
                segments.append(store_segment(out, encoded, table=cut.name, born=step, died=None))
                held = np.arange(5) if rank == 0 else np.arange(5, 9)
                ids = held if kind == BASE else np.intersect1d(CHANGED, held)
                encoded = encode_segment(ids, [weights("items", step)[ids]], [fp32])
                segments.append(store_segment(out, encoded, table="items", born=step, died=None))
                objects.append((out.name, out.close()))
        with writer.new_object(DENSE, object_name(writer.next_number, DENSE, "3b")) as out:
            states: list[dict[str, object]] = [
                {"model": {}, "optimizers": {}, **own_state(0, step)},
                *(own_state(rank, step) for rank in range(2)),
            ]
            extents = []
            for label, state in zip(("dense", "rank-0", "rank-1"), states, strict=True):
                data = tree.to_bytes(*tree.flatten(state))
                extents.append(out.append(DENSE, label, (data,), checksum(data)))
            objects.append((out.name, out.close()))
        entry = CheckpointEntry(
            step=step, ordinal=0, kind=kind, base=BASE_STEP, schema=0, time=1_700_000_000.0,
            codec="fp32", state_codec="fp32", rows=sum(s.rows for s in segments),
            row_bytes=sum(s.extent.bytes for s in segments), bytes=sum(n for _, n in objects),
            full_bytes=0, stall_s=0.0, reason="golden", dense=extents[0],
            ranks=tuple(extents[1:]),
        )  # fmt: skip
        plan = SavePlan(
            step=step, choice=BaseChoice(kind, None, "golden"), last_base=BASE_STEP,
            codecs=CodecPlan(parse_codec("fp32"), None, "golden"), schemas=(*cuts, items),
            rules=RunRules(),
        )  # fmt: skip
        append_checkpoint(writer, plan, entry, tuple(segments), tuple(objects))


if __name__ == "__main__":
    write_store(
        open_storage(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parent / "format3"))
    )
