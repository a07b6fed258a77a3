"""Which codec each column of a table is stored with: said by the user, or chosen. Pure.

    codec=, state_codec=, expected restores -> CodecPlan -> a codec for each column

Invariant: without a codec or expected restores every bit of the model is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint.format.codec import Codec, fit_codec, parse_codec
from holdfast.checkpoint.planning.bits import MAX_BITS, PAPER_TABLE, BitsFor, choose_bits
from holdfast.model.schema import TableSchema

# Row state that is never negative, by the names torch.optim gives it.
_NON_NEGATIVE = frozenset({"sum", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf"})


@dataclass(frozen=True, slots=True)
class CodecPlan:
    """How the next checkpoint stores weights and row state, and why."""

    weights: Codec
    state: Codec | None
    reason: str

    def for_column(self, index: int, *, is_non_negative: bool) -> Codec:
        """The codec of a column: the weights are column 0, row state follows."""
        if index == 0:
            return self.weights
        if self.state is not None:
            return self.state
        return default_state_codec(self.weights, is_non_negative=is_non_negative)


def default_state_codec(weights: Codec, *, is_non_negative: bool) -> Codec:
    """How row state is stored when the user does not say.

    Lossless with lossless weights. Otherwise state that is never negative (Adagrad's sum, Adam's
    second moment) goes through ``log``, whose error is relative: a small accumulator stays small
    and never becomes zero, so no step size explodes after a restore. Signed state (momentum, first
    moment) can be too small for fp16 scales and goes through bf16. docs/benchmarks.md has the
    measured effect on training and on size.
    """
    if weights.is_lossless:
        return parse_codec("fp32")
    if is_non_negative and weights.bits <= MAX_BITS:
        return parse_codec(f"log{weights.bits}")
    return parse_codec("bf16")


def column_codecs(schema: TableSchema, plan: CodecPlan) -> list[Codec]:
    """The codec of each column of a table, as its type asks for (``fit_codec``)."""
    return [
        fit_codec(
            plan.for_column(index, is_non_negative=column.name in _NON_NEGATIVE), column.dtype
        )
        for index, column in enumerate(schema.columns)
    ]


def state_codec_name(schemas: Sequence[TableSchema], plan: CodecPlan) -> str:
    """How row state is stored, for people: every codec in use, or none where there is no state."""
    names = {codec.name for schema in schemas for codec in column_codecs(schema, plan)[1:]}
    return "+".join(sorted(names)) or "none"


def plan_codec(
    codec: str | Codec | None,
    state_codec: str | Codec | None,
    *,
    expected_restores: float | None,
    restores: int,
    table: Sequence[BitsFor] = PAPER_TABLE,
) -> CodecPlan:
    """The codecs of the next checkpoint.

    ``codec`` None: few bits, chosen from the expected restores. Without those every bit of the
    model is stored.

    >>> plan_codec(None, None, expected_restores=None, restores=0).weights.name
    'fp32'
    """
    state = None if state_codec is None else parse_codec(state_codec)
    if codec is not None:
        return CodecPlan(parse_codec(codec), state, "set by the user")
    if expected_restores is None:
        return CodecPlan(parse_codec("fp32"), state, "lossless: no expected restores were given")
    choice = choose_bits(expected_restores, restores=restores, table=table)
    kind = "asym" if choice.bits >= MAX_BITS else "adaptive"
    return CodecPlan(parse_codec(f"{kind}{choice.bits}"), state, choice.reason)
