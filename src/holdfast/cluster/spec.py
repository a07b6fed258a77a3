"""What a cluster is to hold: its tables, where their rows lie, how they are coded. Plain values.

    ClusterSpec -> JSON -> every server and worker: all compute the same places from it

Invariants:
- ``from_json(to_json(spec)) == spec``; what arrives is checked like what a user writes.
- Every table is placed over the same servers; networks are a table too, coded with one data row a
  stripe, which is replication.

Not here: where servers run (engine.py, view.py), rows themselves (shard.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from holdfast.cluster.arena import Arena, plan_arenas
from holdfast.cluster.code import make_code
from holdfast.cluster.hot import HotTable, check_hot
from holdfast.errors import InvalidRequestError
from holdfast.kernels.compiling import read_only
from holdfast.kernels.servers import optimizers
from holdfast.model.placement import Placement

OPTIMIZERS = {
    "sgd": optimizers.SGD,
    "momentum": optimizers.MOMENTUM,
    "adagrad": optimizers.ADAGRAD,
    "rowwise-adagrad": optimizers.ROWWISE_ADAGRAD,
    "adam": optimizers.ADAM,
}
CODES = ("none", "xor", "rs", "sum")
DIFFERENCE, GRADIENT = "difference", "gradient"
PROPAGATIONS = (DIFFERENCE, GRADIENT)
LOCKS_MAX = 4096
_TABLE_ROWS_MAX = 1 << 40
_WIDTH_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How servers apply gradients to rows."""

    name: str = "adagrad"
    lr: float = 0.01
    momentum: float = 0.9
    """Of ``momentum``; Adam's beta1."""
    beta2: float = 0.999
    eps: float = 1e-10
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in OPTIMIZERS:
            raise InvalidRequestError(
                "unknown optimizer", optimizer=self.name, known=list(OPTIMIZERS)
            )
        for name in ("lr", "momentum", "beta2", "eps", "weight_decay"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < float("inf"):
                raise InvalidRequestError(
                    f"an optimizer's {name} is a number from 0 on", **{name: value}
                )

    @property
    def kind(self) -> int:
        """The kernels' number of it."""
        return OPTIMIZERS[self.name]

    @property
    def hyper_H(self) -> np.ndarray:
        """Its numbers as the kernels take them."""
        return read_only(
            np.array([self.lr, self.momentum, self.beta2, self.eps, self.weight_decay], np.float32)
        )


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table: its rows, and how they are placed, coded, started and trained."""

    name: str
    rows: int
    dim: int
    placement: Placement
    code: str = "xor"
    optimizer: Optimizer = field(default_factory=Optimizer)
    seed: int = 0
    bound: float = 0.0
    """First weights are uniform in [-bound, bound)."""
    is_held: bool = False
    """Workers hold all its weights, and supply them to a server that lost them; state is lost."""
    propagation: str = DIFFERENCE
    """What servers tell parity: how records changed, or the gradients, so that parity servers
    repeat the optimizer's steps. That is for copies, one data row a stripe, where gradients are
    narrower than records; and for the code ``sum``, to compare: parity servers then keep the state
    of all their data rows, and a server that is lost cannot be recovered."""

    def __post_init__(self) -> None:
        for name, most in (("rows", _TABLE_ROWS_MAX), ("dim", _WIDTH_MAX)):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not 1 <= value <= most:
                raise InvalidRequestError(
                    f"a table's {name} are a whole number from 1 on",
                    table=self.name,
                    **{name: value},
                )
        if not isinstance(self.name, str) or not self.name:
            raise InvalidRequestError("a table's name is a text", name=self.name)
        if self.code not in CODES:
            raise InvalidRequestError("unknown code", code=self.code, known=list(CODES))
        is_seed = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not is_seed or not 0 <= self.seed < 1 << 63:
            raise InvalidRequestError("a seed is a whole number from 0 on", seed=self.seed)
        is_number = isinstance(self.bound, int | float) and not isinstance(self.bound, bool)
        if not is_number or not 0 <= self.bound < float("inf"):
            raise InvalidRequestError(
                "first weights are bounded by a number from 0 on", bound=self.bound
            )
        if (self.code == "none") != (self.placement.parity == 0):
            raise InvalidRequestError(
                "a code needs parity rows, and parity rows a code",
                code=self.code,
                parity=self.placement.parity,
                todo="use parity=0 with code 'none', or at least one parity row",
            )
        if self.code != "none":
            make_code(self.code, self.placement.data, self.placement.parity)  # refuses nonsense
        _check_propagation(self)

    @property
    def width(self) -> int:
        """Floats of a row's record: weights and optimizer state."""
        return self.dim + optimizers.state_floats(self.optimizer.kind, self.dim)

    @property
    def stripes(self) -> int:
        """How many stripes its rows form."""
        return self.placement.stripes(self.rows)

    @property
    def losses_max(self) -> int:
        """How many servers may be lost at once without losing a row of it."""
        if self.is_held:
            return self.placement.servers
        return 0 if self.keeps_states else self.placement.parity

    @property
    def keeps_states(self) -> bool:
        """Whether parity servers keep the optimizer state of the rows of their stripes."""
        return self.propagation == GRADIENT and self.code == "sum"


def _check_propagation(table: TableSpec) -> None:
    """Refuse gradients where parity servers could not follow them."""
    if table.propagation not in PROPAGATIONS:
        raise InvalidRequestError(
            "unknown propagation", propagation=table.propagation, known=list(PROPAGATIONS)
        )
    if table.propagation == DIFFERENCE:
        return
    facts = {"table": table.name, "code": table.code}
    todo = "use propagation='difference'"
    if table.code == "none":
        raise InvalidRequestError("no parity to pass gradients on to", **facts, todo=todo)
    if table.code == "sum":
        if table.optimizer.weight_decay > 0:
            raise InvalidRequestError(
                "with weight decay a step depends on weights, which a parity server has not",
                **facts,
                weight_decay=table.optimizer.weight_decay,
                todo=todo,
            )
        return
    code = make_code(table.code, table.placement.data, table.placement.parity)
    if table.placement.data != 1 or not (code.coefficients == 1).all():
        raise InvalidRequestError(
            "only copies of a row can follow its gradients",
            **facts,
            data=table.placement.data,
            todo=f"{todo}, or stripes of one data row",
        )


@dataclass(frozen=True)
class ClusterSpec:
    """The tables of a cluster, and how finely recovery locks them."""

    tables: tuple[TableSpec, ...]
    locks: int = 10
    """Ranges that recovery freezes one after the other."""
    waiting_rows: int = 1 << 16
    """Differences of so many rows of an arena, or so many gradients, may wait at a server before
    updates do."""
    hot: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Ids of rows, by table, that are copied instead of coded; see hot.py and choosehot.py."""

    def __post_init__(self) -> None:
        if not self.tables:
            raise InvalidRequestError("a cluster needs at least one table")
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise InvalidRequestError("two tables have the same name", tables=names)
        if len({table.placement.servers for table in self.tables}) != 1:
            raise InvalidRequestError("all tables lie on the same servers")
        for name, most in (("locks", LOCKS_MAX), ("waiting_rows", 1 << 40)):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not 1 <= value <= most:
                raise InvalidRequestError(
                    f"a cluster's {name} are a whole number from 1 on", **{name: value}, most=most
                )
        object.__setattr__(self, "hot", check_hot(self.tables, self.hot))

    @property
    def servers(self) -> int:
        """How many servers hold the tables."""
        return self.tables[0].placement.servers

    @cached_property
    def parity(self) -> int:
        """How many servers may be lost at once without losing a row."""
        return min(table.losses_max for table in self.tables)

    @cached_property
    def parity_max(self) -> int:
        """Parity rows of a stripe, where it has the most."""
        return max(table.placement.parity for table in self.tables)

    def can_decode(self, lacking: Collection[int]) -> bool:
        """Whether every row of servers that lack something can be decoded without them: in no group
        of a table are there more of them than parities.

        >>> apart = TableSpec("users", 9, 2, Placement(6, data=2, parity=1, groups=2))
        >>> spec = ClusterSpec((apart,))
        >>> spec.can_decode({0, 3}), spec.can_decode({0, 1})
        (True, False)
        """
        return all(
            sum(server in around for server in lacking) <= table.losses_max
            for table in self.tables
            for around in table.placement.group_servers()
        )

    @cached_property
    def witnesses(self) -> tuple[tuple[int, ...], ...]:
        """For each server those that keep copies of its parts of pushes, as many as its losses that
        can be decoded: with it and all of them lost, rows would be gone anyway."""
        coded = [table for table in self.tables if not table.is_held]
        tightest = min(coded or self.tables, key=lambda table: table.losses_max)
        count = tightest.losses_max if coded else 0
        return tuple(
            tuple(around[(at + 1 + turn) % len(around)] for turn in range(count))
            for around in tightest.placement.group_servers()
            for at in range(len(around))
        )

    @cached_property
    def index(self) -> dict[str, int]:
        """Where in ``tables`` a name is."""
        return {table.name: at for at, table in enumerate(self.tables)}

    @cached_property
    def arenas(self) -> tuple[Arena, ...]:
        """The tables as servers hold them, hot rows among them."""
        return plan_arenas(self.tables, self.hot_tables.values())

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """How many weights a row has, by arena."""
        return tuple(arena.dim for arena in self.arenas)

    @cached_property
    def hot_tables(self) -> dict[str, HotTable]:
        """The hot rows of tables that have some."""
        return {
            name: HotTable(self.tables[self.index[name]], ids) for name, ids in self.hot.items()
        }

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """In which of the arenas a table is, and where it starts there; those of hot rows too."""
        return {
            placed.table.name: (index, placed.start)
            for index, arena in enumerate(self.arenas)
            for placed in arena.tables
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values for a message."""
        return {
            "locks": self.locks,
            "waiting_rows": self.waiting_rows,
            "hot": {name: list(ids) for name, ids in self.hot.items()},
            "tables": [
                {
                    "name": t.name,
                    "rows": t.rows,
                    "dim": t.dim,
                    "placement": {
                        "servers": t.placement.servers,
                        "data": t.placement.data,
                        "parity": t.placement.parity,
                        "groups": t.placement.groups,
                    },
                    "code": t.code,
                    "optimizer": {name: getattr(t.optimizer, name) for name in Optimizer.__slots__},
                    "seed": t.seed,
                    "bound": t.bound,
                    "is_held": t.is_held,
                    "propagation": t.propagation,
                }
                for t in self.tables
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ClusterSpec:
        """What ``to_json`` wrote.

        Raises:
            InvalidRequestError: it is not a cluster's description.
        """
        try:
            tables = tuple(
                TableSpec(**{**table, "placement": Placement(**table["placement"]),
                             "optimizer": Optimizer(**table["optimizer"])})
                for table in value["tables"]
            )  # fmt: skip
            return cls(
                tables,
                locks=value["locks"],
                waiting_rows=value["waiting_rows"],
                hot=value.get("hot", {}),
            )
        except (KeyError, TypeError) as error:
            raise InvalidRequestError("not a cluster's description") from error


def granules_of(stripes_N: np.ndarray, *, stripes: int, locks: int) -> np.ndarray:
    """The range, of those that recovery locks one by one, in which each stripe lies.

    >>> granules_of(np.arange(5), stripes=5, locks=2)
    array([0, 0, 0, 1, 1])
    """
    granules_N: np.ndarray = stripes_N * locks // stripes
    return granules_N


def granule_stripes(granule: int, *, stripes: int, locks: int) -> range:
    """The stripes of one range.

    >>> granule_stripes(1, stripes=5, locks=2)
    range(3, 5)
    """
    first = -(-granule * stripes // locks)
    return range(first, -(-(granule + 1) * stripes // locks))
