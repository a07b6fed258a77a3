"""Bytes from one connection to another, without the interpreter: a gate must not slow its process.

Shapes: buffer_B  B bytes, for what is on its way; moved_1  how many bytes were passed on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from holdfast.kernels.compiling import kernel

Bytes = npt.NDArray[np.uint8]
Counts = npt.NDArray[np.int64]

_TRIES = 16  # a signal interrupts a call; a connection that failed fails again
# Numba's own types are untyped.
_call: Any = types.intp(types.int32, types.intp, types.uintp, types.int32)
_recv: Any = types.ExternalFunction("recv", _call)
_send: Any = types.ExternalFunction("send", _call)


@kernel()
def relay(source: int, target: int, buffer_B: Bytes, moved_1: Counts, flags: int) -> None:
    """Pass on what a socket receives to another, until one of them ends; both must block.

    ``flags`` are those of ``send``; ``moved_1`` counts while the bytes move.
    """
    address = buffer_B.ctypes.data
    failed = 0
    while failed < _TRIES:
        found = _recv(np.int32(source), address, np.uintp(buffer_B.size), np.int32(0))
        if found == 0:
            return
        if found < 0:
            failed += 1
            continue
        failed = 0
        sent = 0
        while sent < found and failed < _TRIES:
            taken = _send(np.int32(target), address + sent, np.uintp(found - sent), np.int32(flags))
            if taken > 0:
                sent += taken
                failed = 0
            else:
                failed += 1
        moved_1[0] += sent
