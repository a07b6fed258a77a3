"""Compile or load every kernel a server uses, before it says that it is ready.

A kernel that is compiled in the middle of training would look like a hang: to workers, and to the
pulse, since compiling holds the interpreter. One process of a host compiles; the others load.

# N rows of a request
"""

from __future__ import annotations

import socket

import numpy as np

from holdfast.cluster import decode, slab
from holdfast.cluster.arenashard import fold_rows
from holdfast.cluster.pushes import Gradients
from holdfast.cluster.shard import Shard
from holdfast.cluster.spec import DIFFERENCE, GRADIENT, ClusterSpec, Optimizer, TableSpec
from holdfast.kernels.compiling import run_all
from holdfast.kernels.servers.relay import relay
from holdfast.model.placement import Placement


def warm_kernels() -> float:
    """Do once, on a few rows, everything that is done to rows; the seconds it took to compile."""
    return _warm(("xor", DIFFERENCE, 2), ("xor", GRADIENT, 1), ("none", DIFFERENCE, 0))


def warm_sum() -> float:
    """The same, of tables whose parity is a sum of floats: for comparison only, so not always."""
    return _warm(("sum", DIFFERENCE, 2), ("sum", GRADIENT, 2))


def _warm(*told: tuple[str, str, int]) -> float:
    """Tables of a code, what parity is told, and the data rows of a stripe (0: no stripes)."""
    tables = tuple(
        TableSpec(
            f"table-{index}",
            12,
            4,
            Placement(3, data=data, parity=1) if data else Placement(3),
            code,
            Optimizer("adagrad"),
            bound=0.1,
            propagation=how,
        )
        for index, (code, how, data) in enumerate(told)
    )
    rehearsal = _Rehearsal(tables)
    steps = [rehearsal.begin, rehearsal.push, rehearsal.flush]
    if told[0][0] == "xor":
        steps += [rehearsal.freeze, rehearsal.rebuild, rehearsal.decode, warm_relay]
    return run_all(steps)


class _Rehearsal:
    """Three servers in one process, and what is done to their rows, in this order."""

    def __init__(self, tables: tuple[TableSpec, ...]) -> None:
        self._tables = tables
        self._slots_N = np.arange(4)
        self._shards: list[Shard] = []

    def begin(self) -> None:
        """First values, and their parity."""
        spec = ClusterSpec(self._tables, locks=2)
        self._shards = [Shard(spec, server, epoch=1) for server in range(3)]
        for shard in self._shards:
            shard.begin()

    def push(self) -> None:
        """Gradients in, rows out."""
        slots_N, grads_ND = self._slots_N, np.ones((4, 4), np.float32)
        grads_ND.flags.writeable = False  # as what comes in a message
        first = self._shards[0]
        first.assign([Gradients(0, slots_N, grads_ND)])
        first.push(0, 0, [Gradients(at, slots_N, grads_ND) for at in range(len(self._tables))])
        first.pull([(0, slots_N)])

    def flush(self) -> None:
        """Differences to parity."""
        first, *others = self._shards
        flush = first.begin_flush()
        assert flush is not None
        for shard in others:
            if shard.server in flush.receivers:
                shard.fold(0, flush, epoch=1)
        first.end_flush()

    def freeze(self) -> None:
        """What is given to another server's recovery, row by row."""
        first = self._shards[0]
        first.freeze("warm", [0, 1], epoch=1)
        first.fetch("warm", 0, self._slots_N, np.arange(2))

    def rebuild(self) -> None:
        """The same in bulk."""
        first, *others = self._shards
        spans = range(first.arenas[0].spec.stripes)
        (block,) = slab.plan_blocks(others[0].arenas[0], spans, block_bytes=1 << 20)
        slabs = {}
        for shard in (first, others[1]):
            shard.freeze("slab", [0, 1], epoch=1)
            slabs[shard.server] = np.empty(shard.slab_shape(0, 1, spans), np.float32)
            shard.pack_slab("slab", 0, 1, spans, slabs[shard.server])
        found_NW = np.empty((2, first.arenas[0].spec.width), np.float32)
        first.arenas[0].copy_known(0, 2, np.arange(1), found_NW)  # as where not all is wanted
        others[0].install_block(block, slabs)

    def decode(self) -> None:
        """Lost rows, on demand."""
        arena = self._shards[0].arenas[0]
        assert arena.code is not None
        sources = decode.plan_rows(arena, self._slots_N, lacks_rows=[0], lacks_parities=[0])
        out_NW = np.zeros((4, arena.spec.width), np.float32)
        records_FW = np.zeros((len(sources.rows_F), arena.spec.width), np.float32)
        records_FW.flags.writeable = False
        fold_rows(arena.code, out_NW, sources.rows_F, records_FW, sources.coefficients_F)


def warm_relay() -> None:
    """The kernel that carries connections from other machines (gate.py)."""
    outer, source = socket.socketpair()
    with outer, source:
        outer.shutdown(socket.SHUT_WR)
        relay(source.fileno(), source.fileno(), np.empty(1, np.uint8), np.zeros(1, np.int64), 0)
