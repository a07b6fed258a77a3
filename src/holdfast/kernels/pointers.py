"""Arrays inside a kernel from their addresses: one call works on many arrays of any sizes.

Invariant: the caller keeps every array alive during the call, and its address, type and size are
right. A kernel cannot check them.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

# Numba's own code generation is untyped.
cgutils: Any = _cgutils
carray: Any = numba.carray  # type: ignore[attr-defined]


def _as_pointer(typingctx: Any, address: Any) -> Any:
    """A number as a pointer."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


as_pointer: Any = intrinsic(_as_pointer)
