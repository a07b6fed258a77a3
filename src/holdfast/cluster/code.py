"""Codes: how the parity rows of a stripe are made of its data rows, and data rows of what is left.

    before XOR now  ->  fold into parity rows, times a coefficient  ->  decode what was lost

Three codes, by name. ``xor``: one parity row, the XOR of the data rows. ``rs``: any number of
parity rows, Reed-Solomon over GF(2^8); the first of them is the XOR as well. Both are on bits.
``sum`` is the papers' code, one parity row that is the float sum of the data rows, kept to be
measured beside them: every folded difference is rounded, so what it decodes drifts away from what
was lost, the further the more updates there were, and a NaN never leaves it.

A member of a stripe is named by its position: data rows are 0 to data - 1, parity rows follow.

Invariants of ``xor`` and ``rs``:
- Any ``data`` of a stripe's rows give all the others, to the last bit.
- Parity that was folded is parity that was encoded, whatever the order of differences.
- A coefficient depends on its parity row and position alone, not on how many there are of either.

Not here: which rows are a stripe (model/placement.py), the arithmetic (kernels/servers/galois.py),
which servers are asked for rows and when (decode.py, recovery.py).

# K data rows and P parity rows of a stripe, L lost rows
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.errors import DataLossError, InvalidRequestError
from holdfast.kernels.servers import galois

NAMES = ("xor", "rs", "sum")
STRIPE_ROWS_MAX = 256  # Cauchy's matrix needs a byte of its own for each

Factors = npt.NDArray[Any]  # uint8 in GF(2^8); signs as int8 for ``sum``


@dataclass(frozen=True, slots=True)
class Decode:
    """Which members of a stripe to read, and by which factors each lost one is made of them."""

    sources: tuple[int, ...]
    matrix: Factors
    """[L, K]: a line for each lost member, a column for each source."""


@dataclass(frozen=True, slots=True)
class Code:
    """A code for stripes of ``data`` and ``parity`` rows; see ``make_code``."""

    name: str
    data: int
    parity: int

    @property
    def is_exact(self) -> bool:
        """Whether what is decoded is what was lost, to the bit."""
        return self.name != "sum"

    @property
    def coefficients(self) -> Factors:
        """[P, K]: what a difference is multiplied by, for each parity row and position.

        >>> make_code("rs", 3, 2).coefficients[0]
        array([1, 1, 1], dtype=uint8)
        """
        return _coefficients(self)

    def plan_decode(self, lost: Collection[int], known: Collection[int]) -> Decode:
        """How to make lost members of a stripe, in this order, out of known ones.

        Data rows are preferred to parity rows: fewer products.

        >>> make_code("rs", 4, 2).plan_decode(lost=[3, 0], known=[5, 4, 1, 2]).sources
        (1, 2, 4, 5)

        Raises:
            DataLossError: fewer are known than the stripe has data rows.
        """
        return _plan(self, tuple(map(int, lost)), tuple(sorted(map(int, known))))


def make_code(name: str, data: int, parity: int) -> Code:
    """The code of a name, for stripes of so many data and parity rows.

    Raises:
        InvalidRequestError: there is no such code, or not for such stripes.
    """
    if name not in NAMES:
        raise InvalidRequestError("no such code", code=name, known=", ".join(NAMES))
    for value in (data, parity):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequestError(
                "a stripe has a whole number of data and of parity rows, from 1 on",
                data=data,
                parity=parity,
            )
    if name != "rs" and parity != 1:
        raise InvalidRequestError(
            "this code has one parity row", code=name, parity=parity, todo="use code='rs' for more"
        )
    if data + parity > STRIPE_ROWS_MAX:
        raise InvalidRequestError(
            f"a stripe has at most {STRIPE_ROWS_MAX} rows",
            data=data,
            parity=parity,
            todo="use stripes of fewer rows",
        )
    return Code(name, data, parity)


@lru_cache(maxsize=64)
def _coefficients(code: Code) -> Factors:
    """Cauchy's matrix 1 / (x_i + y_j), lines and columns scaled so that the first of both are ones.
    Every square part of it has an inverse, and scaling does not change that."""
    if not code.is_exact:
        return _frozen(np.ones((code.parity, code.data), np.int8))
    x_P1 = 255 - np.arange(code.parity)[:, None]
    y_K = np.arange(code.data)
    by_column_PK = galois.divide(x_P1[0] ^ y_K, x_P1 ^ y_K)
    return _frozen(galois.divide(by_column_PK, by_column_PK[:, :1]))


@lru_cache(maxsize=1024)
def _plan(code: Code, lost: tuple[int, ...], known: tuple[int, ...]) -> Decode:
    named = (*lost, *known)
    members = code.data + code.parity
    if len(set(named)) != len(named) or not all(0 <= member < members for member in named):
        raise InvalidRequestError(
            "members of a stripe are lost or known, once each",
            lost=lost,
            known=known,
            members=f"0 to {members - 1}",
        )
    if len(known) < code.data:
        raise DataLossError(
            "too little of a stripe is left to decode the rest",
            lost=lost,
            known=known,
            needed=code.data,
            todo="restore what was lost from a checkpoint",
        )
    sources = known[: code.data]
    if not code.is_exact:
        # A lost data row is parity minus the others; lost parity is the sum of all.
        signs = [-1 if code.data in sources and s != code.data else 1 for s in sources]
        return Decode(sources, _frozen(np.tile(np.array(signs, np.int8), (len(lost), 1))))
    members_XK = np.concatenate([np.eye(code.data, dtype=np.uint8), code.coefficients])
    from_sources_KK = galois.invert(members_XK[list(sources)])
    return Decode(sources, _frozen(galois.multiply(members_XK[list(lost)], from_sources_KK)))


def _frozen(factors: Factors) -> Factors:
    """Shared by all who ask: not to be written."""
    factors.flags.writeable = False
    return factors
