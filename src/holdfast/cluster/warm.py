"""Compile or load every kernel a server uses, before it says that it is ready.

A kernel that is compiled in the middle of training would look like a hang: to workers, and to the
pulse, since compiling holds the interpreter.

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
from holdfast.kernels.servers.relay import relay
from holdfast.model.placement import Placement


def warm_kernels() -> None:
    """Do once, on a few rows, everything that is done to rows."""
    coded, copied, alone = (
        Placement(3, data=2, parity=1),
        Placement(3, data=1, parity=1),
        Placement(3),
    )
    told = (
        ("coded", coded, "xor", DIFFERENCE),
        ("copied", copied, "xor", GRADIENT),
        ("summed", coded, "sum", DIFFERENCE),
        ("repeated", coded, "sum", GRADIENT),
        ("alone", alone, "none", DIFFERENCE),
    )
    tables = tuple(
        TableSpec(name, 12, 4, placement, code, Optimizer("adagrad"), bound=0.1, propagation=how)
        for name, placement, code, how in told
    )
    shards = [Shard(ClusterSpec(tables, locks=2), server, epoch=1) for server in range(3)]
    for shard in shards:
        shard.begin()
    first, *others = shards
    slots_N = np.arange(4)
    grads_ND = np.ones((4, 4), np.float32)
    grads_ND.flags.writeable = False  # as what comes in a message
    first.assign([Gradients(0, slots_N, grads_ND)])
    first.push(0, 0, [Gradients(arena, slots_N, grads_ND) for arena in range(len(tables))])
    first.pull([(0, slots_N)])
    flush = first.begin_flush()
    assert flush is not None
    for shard in others:
        if shard.server in flush.receivers:
            shard.fold(0, flush, epoch=1)
    first.end_flush()
    first.freeze("warm", [0, 1], epoch=1)
    first.fetch("warm", 0, slots_N, np.arange(2))
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
    arena = first.arenas[0]
    assert arena.code is not None
    sources = decode.plan_rows(arena, slots_N, lacks_rows=[0], lacks_parities=[0])
    out_NW = np.zeros((4, arena.spec.width), np.float32)
    records_FW = np.zeros((len(sources.rows_F), arena.spec.width), np.float32)
    records_FW.flags.writeable = False
    fold_rows(arena.code, out_NW, sources.rows_F, records_FW, sources.coefficients_F)
    warm_relay()


def warm_relay() -> None:
    """The kernel that carries connections from other machines (gate.py)."""
    outer, source = socket.socketpair()
    with outer, source:
        outer.shutdown(socket.SHUT_WR)
        relay(source.fileno(), source.fileno(), np.empty(1, np.uint8), np.zeros(1, np.int64), 0)
