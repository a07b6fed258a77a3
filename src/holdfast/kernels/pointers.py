"""Arrays inside a kernel from their addresses: one call works on many arrays of any sizes.

Numba's own ``carray`` does the same, but compiles the message of an error with it, for every type
and number of dimensions: a second and a half.

Invariant: the caller keeps every array alive during the call, and its address, type and size are
right. A kernel cannot check them.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic
from numba.np import arrayobj as _arrayobj

# Numba's own code generation is untyped.
cgutils: Any = _cgutils
arrayobj: Any = _arrayobj


def _array_at(typingctx: Any, address: Any, shape: Any, dtype: Any) -> Any:
    """The C-contiguous array of a shape (a tuple) and type whose first number is at an address."""
    array_type = types.Array(dtype.dtype, len(shape), "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given = cgutils.unpack_tuple(builder, args[1])
        lengths = [
            context.cast(builder, length, each, types.intp)
            for length, each in zip(given, signature.args[1], strict=True)
        ]
        size = context.get_constant(types.intp, context.get_abi_sizeof(
            context.get_data_type(array_type.dtype)
        ))  # fmt: skip
        strides = [size]
        for length in reversed(lengths[1:]):
            strides.insert(0, builder.mul(strides[0], length))
        array = arrayobj.make_array(array_type)(context, builder)
        arrayobj.populate_array(
            array,
            data=builder.inttoptr(args[0], array.data.type),
            shape=cgutils.pack_array(builder, lengths),
            strides=cgutils.pack_array(builder, strides),
            itemsize=size,
            meminfo=None,
        )
        return array._getvalue()

    return array_type(types.int64, shape, dtype), codegen


array_at: Any = intrinsic(_array_at)
