"""Small codes as bits: 8, 4, 3 or 2 bits a code, each row starting on a byte.

A row of D codes fills ``packed_width(D, bits)`` bytes, first code in the lowest bits. Codes travel
between here and the quantizers in a tile, one byte a code, whose rows are padded with zeros to
``padded_width(D, bits)`` so that a tile packs as one run of whole words, whatever D is.

Invariants:
- ``unpack_tile`` after ``pack_tile`` returns the codes, for every width.
- Neither touches a byte outside the arrays it was given, for any content.

Shapes: codes_TP  T rows of codes, one byte each, padded to P columns; packed_TB  T rows of B packed
bytes; codes_K, packed_K  the same as one run. All C-contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import helper, kernel

Array = npt.NDArray[Any]

_U16_4 = np.uint16(4)
_U16_LOW = np.uint16(0x0F0F)
_U32_6 = np.uint32(6)
_U32_12 = np.uint32(12)
_U32_PAIRS = np.uint32(0x000F000F)
_U32_CODES = np.uint32(0x03030303)
_M6 = np.uint64(0x003F003F003F003F)
_M12 = np.uint64(0x00000FFF00000FFF)
_M24 = np.uint64(0x0000000000FFFFFF)
_M3 = np.uint64(0x0707070707070707)
_S5, _S10, _S20 = np.uint64(5), np.uint64(10), np.uint64(20)
_S8, _S16 = np.uint64(8), np.uint64(16)


def packed_width(width: int, bits: int) -> int:
    """Bytes that a row of codes fills.

    >>> packed_width(13, 3)
    5
    """
    return (width * bits + 7) // 8


@kernel()
def padded_width(width: int, bits: int) -> int:
    """Columns of a tile that holds rows of this width: whole words of codes.

    >>> padded_width(13, 3), padded_width(13, 4)
    (16, 14)
    """
    group = 8 if bits == 3 else 8 // bits
    return (width + group - 1) // group * group


@helper()
def _copy(from_K: Array, to_K: Array) -> Any:
    for k in range(to_K.size):
        to_K[k] = from_K[k]


@helper()
def _pack_4(codes_K: Array, packed_K: Array) -> Any:
    pairs_K = codes_K.view(np.uint16)
    for k in range(packed_K.size):
        v = pairs_K[k]
        packed_K[k] = np.uint8(v | (v >> _U16_4))


@helper()
def _unpack_4(packed_K: Array, codes_K: Array) -> Any:
    pairs_K = codes_K.view(np.uint16)
    for k in range(packed_K.size):
        v = np.uint16(packed_K[k])
        pairs_K[k] = (v | (v << _U16_4)) & _U16_LOW


@helper()
def _pack_2(codes_K: Array, packed_K: Array) -> Any:
    quads_K = codes_K.view(np.uint32)
    for k in range(packed_K.size):
        v = quads_K[k]
        v = np.uint32((v | (v >> _U32_6)) & _U32_PAIRS)
        packed_K[k] = np.uint8(v | (v >> _U32_12))


@helper()
def _unpack_2(packed_K: Array, codes_K: Array) -> Any:
    quads_K = codes_K.view(np.uint32)
    for k in range(packed_K.size):
        v = np.uint32(packed_K[k])
        v = np.uint32((v | (v << _U32_12)) & _U32_PAIRS)
        quads_K[k] = (v | (v << _U32_6)) & _U32_CODES


@helper()
def _squeeze_3(v: Any) -> Any:
    v = (v | (v >> _S5)) & _M6
    v = (v | (v >> _S10)) & _M12
    return (v | (v >> _S20)) & _M24


@helper()
def _spread_3(v: Any) -> Any:
    v = (v | (v << _S20)) & _M12
    v = (v | (v << _S10)) & _M6
    return (v | (v << _S5)) & _M3


@helper()
def _pack_3(codes_K: Array, packed_K: Array) -> Any:
    octets_K = codes_K.view(np.uint64)
    for k in range(octets_K.size):
        v = _squeeze_3(octets_K[k])
        packed_K[3 * k] = np.uint8(v)
        packed_K[3 * k + 1] = np.uint8(v >> _S8)
        packed_K[3 * k + 2] = np.uint8(v >> _S16)


@helper()
def _unpack_3(packed_K: Array, codes_K: Array) -> Any:
    octets_K = codes_K.view(np.uint64)
    for k in range(octets_K.size):
        v = np.uint64(packed_K[3 * k])
        v |= np.uint64(packed_K[3 * k + 1]) << _S8
        v |= np.uint64(packed_K[3 * k + 2]) << _S16
        octets_K[k] = _spread_3(v)


@helper()
def _pack_3_ragged(codes_TP: Array, packed_TB: Array) -> Any:
    """Rows whose last group of eight codes fills one or two bytes only."""
    octets_K = codes_TP.reshape(codes_TP.size).view(np.uint64)
    groups = codes_TP.shape[1] // 8
    for i in range(codes_TP.shape[0]):
        packed_B = packed_TB[i]
        for b in range(packed_B.size):
            v = _squeeze_3(octets_K[i * groups + b // 3])
            packed_B[b] = np.uint8(v >> np.uint64(8 * (b % 3)))


@helper()
def _unpack_3_ragged(packed_TB: Array, codes_TP: Array) -> Any:
    octets_K = codes_TP.reshape(codes_TP.size).view(np.uint64)
    groups = codes_TP.shape[1] // 8
    for i in range(codes_TP.shape[0]):
        packed_B = packed_TB[i]
        for g in range(groups):
            v = np.uint64(0)
            for b in range(3 * g, min(3 * g + 3, packed_B.size)):
                v |= np.uint64(packed_B[b]) << np.uint64(8 * (b - 3 * g))
            octets_K[i * groups + g] = _spread_3(v)


@kernel()
def pack_tile(codes_TP: Array, bits: Any, packed_TB: Array) -> Any:
    """Pack a tile of codes, each below 2**bits; the padding must be zero."""
    if bits == 4:
        _pack_4(codes_TP.reshape(codes_TP.size), packed_TB.reshape(packed_TB.size))
    elif bits == 2:
        _pack_2(codes_TP.reshape(codes_TP.size), packed_TB.reshape(packed_TB.size))
    elif bits == 3:
        if 8 * packed_TB.shape[1] == 3 * codes_TP.shape[1]:
            _pack_3(codes_TP.reshape(codes_TP.size), packed_TB.reshape(packed_TB.size))
        else:
            _pack_3_ragged(codes_TP, packed_TB)
    else:
        _copy(codes_TP.reshape(codes_TP.size), packed_TB.reshape(packed_TB.size))


@kernel()
def unpack_tile(packed_TB: Array, bits: Any, codes_TP: Array) -> Any:
    """Unpack a tile of codes; bits past a row's last code land in the padding."""
    if bits == 4:
        _unpack_4(packed_TB.reshape(packed_TB.size), codes_TP.reshape(codes_TP.size))
    elif bits == 2:
        _unpack_2(packed_TB.reshape(packed_TB.size), codes_TP.reshape(codes_TP.size))
    elif bits == 3:
        if 8 * packed_TB.shape[1] == 3 * codes_TP.shape[1]:
            _unpack_3(packed_TB.reshape(packed_TB.size), codes_TP.reshape(codes_TP.size))
        else:
            _unpack_3_ragged(packed_TB, codes_TP)
    else:
        _copy(packed_TB.reshape(packed_TB.size), codes_TP.reshape(codes_TP.size))
