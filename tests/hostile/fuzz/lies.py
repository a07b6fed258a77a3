"""Lies with a correct checksum: what the tests of every parser share.

Values that no parser expects, the frames that make bytes look genuine, and a small run to lie to.
Every mutation is followed by a repair of the checksums around it, so that it is the parser that is
tested and not the checksum.
"""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast.checkpoint.format.checksum import as_hex, checksum
from holdfast.checkpoint.format.object import Extent
from holdfast.checkpoint.format.segment import CHUNK, PLAIN, Segment, header_bytes
from holdfast.checkpoint.restoring.restore import restore_rows
from holdfast.checkpoint.store import catalogs
from holdfast.model.dtypes import array_dtype, for_users
from holdfast.model.schema import TableSchema
from holdfast.storage import open_storage
from tests.golden.make_format1 import TABLE_ROWS

SEED = 20240613
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    39,
    40,
    41,
    255,
    2**31,
    2**32 - 1,
    2**40,
    2**56,
    2**62,
    2**63,
    2**64 - 1,
)
COUNTS = (
    *NUMBERS,
    -1,
    2**70,
    10**400,
    1.5,
    float("inf"),
    float("nan"),
    True,
    None,
    "x",
    "16",
    [],
    {},
    [[]],
)
fuzz = settings(max_examples=300, deadline=None, derandomize=True)

# JSON that is nearly the structure of dense state, and no catalog.
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4), st.sampled_from(["0", "1", "2"]),
)  # fmt: skip
TAGS = st.sampled_from(["d", "l", "t", "x", "n", "s", "b", "f", "sparse", "", "z"])
NODES = st.recursive(
    LEAVES,
    lambda node: st.one_of(
        st.lists(node, max_size=4),
        st.dictionaries(TAGS, node, max_size=2),
        st.tuples(TAGS, node).map(lambda pair: {pair[0]: pair[1]}),
    ),
    max_leaves=12,
)


def format_of(data: bytes | bytearray) -> int:
    """The format of a segment, as its header has it."""
    number = int.from_bytes(data[4:6], "little")
    return number if number in (PLAIN, CHUNK, PLAIN + 2, CHUNK + 2) else PLAIN


def repaired(data: bytearray) -> bytes:
    """The segment with the header's checksum made right."""
    end = header_bytes(data[7], format_=format_of(data)) if len(data) > 7 else 0
    if 8 <= end <= len(data):
        struct.pack_into("<Q", data, end - 8, checksum(memoryview(data)[: end - 8]))
    return bytes(data)


def framed(footer: bytes, body: bytes = bytes(64)) -> bytes:
    """An object with this footer, its checksum right."""
    head = struct.pack("<8sII", b"HOLDFAST", 1, 0)
    return head + body + footer + struct.pack("<QQ8s", len(footer), checksum(footer), b"TSAFDLOH")


def as_catalog(body: Any) -> bytes:
    """A catalog with this body, its checksum right."""
    text = json.dumps(body, separators=(",", ":")).encode()
    format_ = body.get("format") if isinstance(body, dict) else None
    number = format_ if format_ in (1, 2, 3, 4) else 2
    return f"holdfast-catalog {number:d} {as_hex(checksum(text))}\n".encode() + text + b"\n"


class Store:
    """A small run whose newest catalog is replaced by lies."""

    def __init__(self, path: Path) -> None:
        self.path = path
        run = hf.open(path)
        self.catalog = path / catalogs.name_of(run.catalog.number)
        self.good = self.catalog.read_bytes()
        self.rows = {
            row.tobytes()
            for step in run.steps
            for table in run.tables(step)
            for row in run.read(step, table.name).weight
        }
        # With a grid, lies can bring back rows of steps that nobody can restore any more.
        self.rows |= {
            row.tobytes()
            for s in run.catalog.segments
            for row in for_users(self.segment(s.extent).decode(0))
        }

    def segment(self, extent: Extent) -> Segment:
        """A stored segment, wherever it lies."""
        data = (self.path / extent.object).read_bytes()
        part = data[extent.offset : extent.offset + extent.bytes]
        return Segment(memoryview(part), where="here")

    def body(self) -> dict[str, Any]:
        """The good catalog as JSON, to lie in."""
        body: dict[str, Any] = json.loads(self.good.split(b"\n")[1])
        return body


def use(store: Store, body: Any) -> None:
    """Do with a lying store whatever a reader does; only our errors may come out."""
    try:
        data = as_catalog(body)
    except (ValueError, TypeError):
        return
    store.catalog.write_bytes(data)
    look_at(store)


def look_at(store: Store) -> None:
    """Verify, open, read and restore everything that the store claims to have."""
    storage = open_storage(str(store.path))
    with contextlib.suppress(hf.HoldfastError):
        hf.verify(storage)
    try:
        run = hf.open(store.path)
    except hf.HoldfastError:
        return
    for step in run.steps:
        for schema in run.tables(step):
            with contextlib.suppress(hf.HoldfastError):
                weight = run.read(step, schema.name).weight
                # A liar may exchange rows, but memory that nobody wrote is never handed out.
                assert all(row.tobytes() in store.rows for row in weight), (step, schema.name)
            if schema.rows == TABLE_ROWS:
                with contextlib.suppress(hf.HoldfastError):
                    run.read(step, schema.name, [3, 7])
                restore_guarded(run, step, schema)
        with contextlib.suppress(hf.HoldfastError):
            run.dense(step)
        with contextlib.suppress(hf.HoldfastError):
            run.dead_rows(step)
        with contextlib.suppress(hf.HoldfastError):
            list(run.updates(since=step))


def restore_guarded(run: hf.Run, step: int, schema: TableSchema) -> None:
    """Restore a table that has other memory right before and after it."""
    guarded = [np.full((schema.rows + 2, c.width), 7, array_dtype(c.dtype)) for c in schema.columns]
    targets = [whole[1:-1] for whole in guarded]
    with contextlib.suppress(hf.HoldfastError):
        restore_rows(run.storage, run.catalog, step, {schema.name: targets}, threads=1)
    for whole in guarded:
        assert (whole[[0, -1]] == 7).all()
