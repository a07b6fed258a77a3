"""Strategies: named points in one space of choices, each choice also free to be made by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.checkpoint.baseline import SINCE_LAST, check_policy, deltas_since
from holdfast.checkpoint.bitwidth import MAX_BITS, PAPER_TABLE, BitsFor, choose_bits
from holdfast.checkpoint.codec import Codec, fit_codec, parse_codec
from holdfast.checkpoint.grid import Extract
from holdfast.checkpoint.priority import MFU, SCAR, SSU, Priority
from holdfast.errors import InvalidRequestError
from holdfast.schema import TableSchema

# Row state that is never negative, by the names torch.optim gives it.
_NON_NEGATIVE = frozenset({"sum", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf"})


@dataclass(frozen=True, slots=True)
class Strategy:
    """When a base is taken, which rows are saved, how they are stored, whether they become a grid.

    ``codec`` None: by expected restores, lossless without those. ``extract`` None: increments stay
    as they are. ``priority`` None: every changed row is saved. ``floors`` None: where bases are
    taken by recovery time, a grid is made and every changed row is saved.
    """

    name: str
    base: str
    codec: str | None
    extract: Extract | None = None
    priority: Priority | None = None
    floors: bool | None = None

    @property
    def has_floors(self) -> bool:
        """Whether increments are gathered into floors from time to time."""
        if self.floors is not None:
            return self.floors
        is_gridded = self.base == "recovery-time" and self.extract is not None
        return is_gridded and self.priority is None

    def __post_init__(self) -> None:
        check_policy(self.base)
        if self.extract is not None and deltas_since(self.base) != SINCE_LAST:
            raise InvalidRequestError(
                "a grid is made of increments: rows changed since the last checkpoint",
                base=self.base,
                todo="use base='consecutive' or base='recovery-time', or leave extract out",
            )
        if self.priority is not None and deltas_since(self.base) != SINCE_LAST:
            raise InvalidRequestError(
                "hot rows are saved first where each checkpoint adds to the last",
                base=self.base,
                todo="use base='consecutive' or base='recovery-time', or leave priority out",
            )
        if self.floors and deltas_since(self.base) != SINCE_LAST:
            raise InvalidRequestError(
                "a floor gathers increments: rows changed since the last checkpoint",
                base=self.base,
                todo="use base='consecutive' or base='recovery-time', or leave floors out",
            )
        if self.floors and self.priority is not None:
            raise InvalidRequestError(
                "a floor holds every changed row, and with a priority not every one is saved",
                todo="leave floors or priority out",
            )


STRATEGIES = {
    "full": Strategy("full", base="full", codec="fp32"),
    "check-n-run": Strategy("check-n-run", base="intermittent", codec=None),
    "incrcp": Strategy("incrcp", base="recovery-time", codec="fp32", extract=Extract()),
    "cpr": Strategy("cpr", base="full", codec="fp32"),
    **{
        f"cpr-{by}": Strategy(
            f"cpr-{by}",
            base="recovery-time",
            codec="fp32",
            extract=Extract(),
            priority=Priority(by=by),
        )
        for by in (MFU, SSU, SCAR)
    },
}


def as_strategy(strategy: str | Strategy) -> Strategy:
    """A strategy by name, or the user's own.

    Raises:
        InvalidRequestError: lists the names there are.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise InvalidRequestError("unknown strategy", strategy=strategy, known=list(STRATEGIES))
    return STRATEGIES[strategy]


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
