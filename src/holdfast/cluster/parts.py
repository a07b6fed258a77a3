"""What pulls, pushes and flushes look like in messages: all arenas of one request in one message.

Slots of all arenas lie behind each other in one array, values in another; the meta says how many of
which arena. So a message has two or three arrays however many arenas there are.

What waits for parity travels as words, differences and gradients alike; a part says what it is.

Invariant: ``unpack`` checks that counts and arrays agree; what they name is checked by the shard.

# N rows of all arenas, K differences of all arenas
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.cluster.arenashard import Differences
from holdfast.cluster.flush import Flush, Report
from holdfast.cluster.message import Message
from holdfast.cluster.numbers import PUSHES_MAX, WORKERS_MAX, whole, worker_of
from holdfast.cluster.pushes import Entrusted, Gradients, Part
from holdfast.cluster.spec import PROPAGATIONS, ClusterSpec
from holdfast.errors import InvalidRequestError

_IDS_MAX = 1 << 28  # more than fit into a message, but for those of a byte each


def flatten(arrays: Sequence[np.ndarray], dtype: str = "f4") -> np.ndarray:
    """Arrays behind each other, as one flat one; of this type if there is none."""
    if len(arrays) == 1:
        return arrays[0].reshape(-1)
    return np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.empty(0, dtype)


def pack_slots(kind: str, wants: Sequence[tuple[int, np.ndarray]]) -> Message:
    """A request for rows: (arena, slots) each."""
    meta = {"arenas": [[arena, len(slots_N)] for arena, slots_N in wants]}
    return Message(kind, meta, (flatten([slots_N for _, slots_N in wants]).astype(np.int32),))


def push_of(message: Message) -> tuple[int, int]:
    """Whose push a message is about, and its number."""
    meta = message.meta
    return worker_of(meta["worker"]), whole(meta["number"], most=PUSHES_MAX)


def as_ids(array_N: np.ndarray) -> np.ndarray:
    """An array of a message as slots or positions."""
    if array_N.ndim != 1 or array_N.dtype.kind not in "iu":
        raise InvalidRequestError(
            "rows are named by whole numbers", dtype=str(array_N.dtype), shape=array_N.shape
        )
    if len(array_N) > _IDS_MAX:
        raise InvalidRequestError("too many rows in one message", rows=len(array_N), most=_IDS_MAX)
    return array_N.astype(np.int64)


def unpack_reports(message: Message, spec: ClusterSpec) -> dict[int, Report]:
    """What each other server knows of a lost one."""
    found = {}
    for (server, flushed), marks_GW in zip(message.meta["reports"], message.arrays, strict=True):
        if marks_GW.dtype != np.int64 or marks_GW.shape != (spec.locks, WORKERS_MAX):
            raise InvalidRequestError("marks are by range and worker", shape=marks_GW.shape)
        found[whole(server, most=spec.servers - 1)] = Report(whole(flushed), None, (), marks_GW)
    return found


def _split(kind: str, arenas: Any, slots_N: np.ndarray) -> list[tuple[int, np.ndarray]]:
    found, start = [], 0
    for arena, count in arenas:
        stop = start + whole(count)
        found.append((whole(arena), slots_N[start:stop]))
        start = stop
    if start != len(slots_N):
        raise InvalidRequestError(
            "counts and rows of a message disagree", kind=kind, rows=len(slots_N)
        )
    return found


def unpack_slots(message: Message) -> list[tuple[int, np.ndarray]]:
    """What ``pack_slots`` packed."""
    return _split(message.kind, message.meta["arenas"], as_ids(message.arrays[0]))


def pack_gradients(kind: str, meta: dict[str, Any], gradients: Sequence[Gradients]) -> Message:
    """A push."""
    arenas = [[part.arena, len(part.slots_N)] for part in gradients]
    return Message(
        kind,
        {**meta, "arenas": arenas},
        (
            flatten([part.slots_N for part in gradients]).astype(np.int32),
            flatten([part.grads_ND for part in gradients]),
        ),
    )


def unpack_gradients(message: Message, dims: Sequence[int]) -> list[Gradients]:
    """What ``pack_gradients`` packed; ``dims`` are the arenas' weights a row."""
    slots_N, flat = message.arrays
    return _gradients(message.kind, message.meta["arenas"], slots_N, flat, dims=dims)


def pack_stage(
    worker: int, number: int, by_owner: Mapping[int, Part], servers: Sequence[int] = ()
) -> Message:
    """A push to be staged: the receiver's own part, copies of others', and who has parts of it."""
    meta = {"worker": worker, "number": number, "servers": list(servers)}
    return _pack_parts("stage", meta, [({"owner": o}, part) for o, part in by_owner.items()])


def unpack_stage(message: Message, dims: Sequence[int]) -> dict[int, Part]:
    """By owner, what ``pack_stage`` packed."""
    return {owner: part for (owner,), part in _unpack_parts(message, dims, "owner")}


def pack_entrusted(kind: str, meta: Mapping[str, Any], given: Iterable[Entrusted]) -> Message:
    """One server's parts of several pushes."""
    return _pack_parts(
        kind,
        meta,
        [
            ({"worker": e.worker, "number": e.number, "servers": list(e.servers)}, e.part)
            for e in given
        ],
    )


def unpack_entrusted(message: Message, dims: Sequence[int]) -> list[Entrusted]:
    """What ``pack_entrusted`` packed."""
    servers = [tuple(whole(s) for s in each["servers"]) for each in message.meta["parts"]]
    found = _unpack_parts(message, dims, "worker", "number")
    return [
        Entrusted(worker, number, part, those)
        for ((worker, number), part), those in zip(found, servers, strict=True)
    ]


def _pack_parts(
    kind: str, meta: Mapping[str, Any], given: Iterable[tuple[dict[str, Any], Part]]
) -> Message:
    arrays: list[np.ndarray] = []
    described = []
    for numbers, part in given:
        packed = pack_gradients(kind, {}, part)
        described.append({**numbers, "arenas": packed.meta["arenas"]})
        arrays += packed.arrays
    return Message(kind, {**meta, "parts": described}, tuple(arrays))


def _unpack_parts(
    message: Message, dims: Sequence[int], *names: str
) -> list[tuple[tuple[int, ...], Part]]:
    described = message.meta["parts"]
    if len(message.arrays) != 2 * len(described):
        raise InvalidRequestError("parts and arrays of a message disagree", kind=message.kind)
    pairs = zip(message.arrays[::2], message.arrays[1::2], strict=True)
    return [
        (
            tuple(whole(each[name]) for name in names),
            _gradients(message.kind, each["arenas"], slots_N, flat, dims=dims),
        )
        for each, (slots_N, flat) in zip(described, pairs, strict=True)
    ]


def _gradients(
    kind: str, arenas: Any, slots_N: np.ndarray, flat: np.ndarray, *, dims: Sequence[int]
) -> list[Gradients]:
    slots_N = as_ids(slots_N)
    if flat.dtype != np.float32 or flat.ndim != 1:
        raise InvalidRequestError("gradients are float32, in a row", found=str(flat.dtype))
    found, start = [], 0
    for arena, part_N in _split(kind, arenas, slots_N):
        dim = dims[whole(arena, most=len(dims) - 1)]
        size = len(part_N) * dim
        found.append(Gradients(arena, part_N, flat[start : start + size].reshape(-1, dim)))
        start += size
    if start != len(flat):
        raise InvalidRequestError("gradients do not fit their rows", floats=len(flat))
    return found


def pack_flush(flush: Flush, receiver: int) -> Message:
    """A flush's part for one receiver."""
    found = flush.parts[receiver]
    used = 1 + int(np.flatnonzero(flush.marks_W >= 0).max(initial=-1))
    meta = {
        "number": flush.number,
        "frozen": list(flush.frozen),
        "receivers": list(flush.receivers),
        "arenas": [
            [part.arena, len(part.slots_K), part.diffs_KW.shape[1], part.kind] for part in found
        ],
    }
    return Message(
        "fold",
        meta,
        (
            np.stack([flush.marks_W[:used], flush.durable_W[:used]]),
            flatten([part.slots_K for part in found], "i4"),
            flatten([part.positions_K for part in found], "u1"),
            flatten([part.diffs_KW.view(np.uint32) for part in found], "u4"),
        ),
    )


def unpack_flush(message: Message, receiver: int, *, workers: int = WORKERS_MAX) -> Flush:
    """What ``pack_flush`` packed."""
    marks, slots_K, positions_K, flat = message.arrays
    if marks.dtype != np.int64 or marks.ndim != 2 or len(marks) != 2 or marks.shape[1] > workers:
        raise InvalidRequestError("marks are two numbers for each worker", shape=marks.shape)
    if flat.dtype not in (np.uint32, np.float32) or flat.ndim != 1:
        raise InvalidRequestError("differences are words, in a row", found=str(flat.dtype))
    marks_W, durable_W = np.full((2, workers), -1, np.int64)
    marks_W[: marks.shape[1]], durable_W[: marks.shape[1]] = marks
    slots_K, positions_K = as_ids(slots_K), as_ids(positions_K)
    found, start, floats = [], 0, 0
    for arena, count, width, kind in message.meta["arenas"]:
        stop, end = start + whole(count), floats + count * whole(width)
        if width < 1 or stop > len(slots_K) or end > len(flat) or kind not in PROPAGATIONS:
            raise InvalidRequestError("malformed message", kind=message.kind)
        found.append(
            Differences(
                int(arena),
                slots_K[start:stop],
                positions_K[start:stop],
                flat[floats:end].reshape(count, width),
                kind,
            )
        )
        start, floats = stop, end
    if start != len(slots_K) or len(positions_K) != start or floats != len(flat):
        raise InvalidRequestError("counts and differences of a message disagree")
    return Flush(
        number=whole(message.meta["number"]),
        marks_W=marks_W,
        frozen=tuple(whole(granule) for granule in message.meta["frozen"]),
        receivers=tuple(whole(server) for server in message.meta["receivers"]),
        parts={receiver: tuple(found)},
        durable_W=durable_W,
    )
