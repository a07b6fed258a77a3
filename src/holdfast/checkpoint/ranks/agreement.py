"""What ranks agree on before they copy: which step, which tables, base or delta, which codecs.

    every rank: facts (numbers) -> all ranks;  rank 0: SavePlan -> all ranks
    where tables changed: every rank: description (which rows of which tables) -> all ranks

The tables of all ranks are merged by a pure function of all descriptions, on every rank alike. The
plan is rank 0's, which alone has the run's history: a pure function of that and of the facts.
This is the only thing ranks wait for each other for while training stands still; it is a few small
messages (docs/ranks.md has the measured time), and nobody waits for anybody's storage.

Invariants:
- All ranks copy the same step, for the same kind of checkpoint, or none does.
- Shards of all ranks make up their tables: every row is held by a rank, and exactly one saves it.

Not here: messages (ranks.py), the commit (rank_commit.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.planning.save_plan import RunRules, SavePlan
from holdfast.checkpoint.ranks.ranks import Ranks
from holdfast.errors import InvalidRequestError, UnavailableError
from holdfast.model.schema import Column, Cut, TableSchema, cuts_of
from holdfast.model.shard import Shard
from holdfast.model.tables import Table


@dataclass(frozen=True, slots=True)
class ChangedBytes:
    """What changed rows take as the model holds them: those that committed deltas hold since the
    base, and those that a delta would take now."""

    since_base: int
    pending: int


REPLICA_SPLIT_BYTES = 1 << 20  # smaller replicated tables are saved by rank 0 alone


def rows_to_save(shard: Shard, *, rank: int, ranks: int) -> range:
    """The local rows of a shard that a rank saves.

    Every rank holds the same rows of a replicated table, so each saves some of them: the stall, the
    encoding and the upload of a base are divided by the number of ranks.

    >>> [rows_to_save(Shard(1000, 1024, is_replicated=True), rank=r, ranks=3) for r in range(3)]
    [range(0, 333), range(333, 666), range(666, 1000)]
    >>> rows_to_save(Shard(10, 4, is_replicated=True), rank=1, ranks=3)
    range(0, 0)
    """
    rows = shard.local_rows
    if not shard.is_replicated:
        return range(rows)
    if 4 * rows * len(shard.floats) < REPLICA_SPLIT_BYTES:
        return range(rows if rank == 0 else 0)
    return range(rows * rank // ranks, rows * (rank + 1) // ranks)


def describe(tables: Sequence[Table]) -> bytes:
    """What a rank holds, as a message: its stored tables, and which of their rows."""
    found = []
    for table in tables:
        schema, ids = table.schema(), table.shard.ids
        found.append(
            {
                "name": schema.name,
                "rows": schema.rows,
                "columns": [[c.name, c.width, c.dtype] for c in schema.columns],
                "cut": None if schema.cut is None else dataclasses.astuple(schema.cut),
                "held": len(ids),
                "range": [ids.start, ids.stop] if isinstance(ids, range) else None,
                "is_replicated": table.shard.is_replicated,
            }
        )
    return json.dumps(found).encode()


def merge(descriptions: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[TableSchema, ...]:
    """The stored tables of all ranks, by name. Row state that exists only on some ranks counts:
    to the others, whose rows were never trained, it is zeros.

    Raises:
        InvalidRequestError: the shards do not make up a table.
    """
    holders: dict[str, list[Mapping[str, Any]]] = {}
    for description in descriptions:
        for held in description:
            holders.setdefault(held["name"], []).append(held)
    schemas = []
    for name, shards in sorted(holders.items()):
        _check_rows(name, shards, ranks=len(descriptions))
        columns: dict[str, tuple[int, str]] = {}
        for held in shards:
            for column, width, dtype in held["columns"]:
                if columns.setdefault(column, (width, dtype)) != (width, dtype):
                    raise InvalidRequestError(
                        "ranks hold a column in different widths or types",
                        table=name,
                        column=column,
                        found=sorted({columns[column], (width, dtype)}),
                        todo="build the same model and optimizer on every rank",
                    )
        weight, *state = columns.items()
        cut = shards[0]["cut"]
        schemas.append(
            TableSchema(
                name,
                shards[0]["rows"],
                tuple(Column(key, *kind) for key, kind in (weight, *sorted(state))),
                None if cut is None else Cut(*cut),
            )
        )
    cuts_of(schemas)  # refuses cuts that make up no table
    return tuple(schemas)


def _check_rows(name: str, shards: Sequence[Mapping[str, Any]], *, ranks: int) -> None:
    """Refuse shards that leave rows out, or hold some twice."""
    shapes = {(p["rows"], tuple(p["cut"] or ()), p["is_replicated"]) for p in shards}
    if len(shapes) > 1:
        raise InvalidRequestError(
            "ranks hold shards of different tables under one name",
            table=name,
            found=sorted(map(repr, shapes)),
        )
    rows = shards[0]["rows"]
    if shards[0]["is_replicated"]:
        is_whole = len(shards) == ranks and all(p["held"] == rows for p in shards)
    else:
        is_whole = sum(p["held"] for p in shards) == rows
        spans = sorted(p["range"] for p in shards if p["range"] is not None and p["held"])
        is_whole &= all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    if not is_whole:
        raise InvalidRequestError(
            "the shards of all ranks do not make up a table",
            table=name,
            rows=rows,
            held=[p["held"] for p in shards],
            todo="give every row to one rank, or declare the table replicated on all",
        )


def number_of(text: str | bytes) -> int:
    """A checksum that fits a signed number: what is equal has the same."""
    return checksum(text.encode() if isinstance(text, str) else text) >> 1


class Agreement:
    """What a rank remembers of earlier agreements, so that tables are described only when they
    change."""

    def __init__(self, ranks: Ranks, rules: str) -> None:
        """``rules``: what must be the same on every rank."""
        self.ranks = ranks
        self._rules = number_of(rules)
        self._known: list[int] = []
        self.schemas: tuple[TableSchema, ...] = ()

    def gather(
        self,
        step: int,
        tables: Sequence[Table],
        *,
        changed: ChangedBytes,
        error: Exception | None,
        has_annotations: bool = False,
    ) -> ChangedBytes:
        """Tell the others where this rank is; the bytes that changed on all ranks.

        Raises:
            HoldfastError: this rank's own ``error``, or that others cannot take part.
        """
        own = describe(tables)
        facts = self.ranks.gather_numbers(
            [
                int(error is None),
                step,
                self._rules,
                number_of(own),
                changed.since_base,
                changed.pending,
                int(has_annotations),
            ]
        )
        if error is not None:
            raise error
        failed = [rank for rank, (is_ok, *_) in enumerate(facts) if not is_ok]
        if failed:
            raise UnavailableError("ranks cannot take part in this checkpoint", ranks=failed)
        steps = [step for _, step, *_ in facts]
        if len(set(steps)) > 1:
            raise InvalidRequestError(
                "ranks save different steps",
                steps=steps,
                todo="call ck.step() on every rank after each training step",
            )
        if len({rules for _, _, rules, *_ in facts}) > 1:
            raise InvalidRequestError(
                "ranks follow different strategies",
                todo="give every rank the same strategy=, extract=, priority= and tracking=",
            )
        annotated = [bool(has_annotations) for *_, has_annotations in facts]
        if any(annotated) and not annotated[0]:
            raise InvalidRequestError(
                "metrics or metadata were given on other ranks than rank 0, whose are stored",
                ranks=[rank for rank, is_annotated in enumerate(annotated) if is_annotated],
                todo="pass metrics= and metadata= on rank 0, or on all ranks",
            )
        sums = [sum_ for _, _, _, sum_, *_ in facts]
        if sums != self._known:
            descriptions = [json.loads(data) for data in self.ranks.gather_bytes(own)]
            self.schemas = merge(descriptions)
            self._known = sums
        return ChangedBytes(
            sum(since_base for *_, since_base, _, _ in facts),
            sum(pending for *_, pending, _ in facts),
        )

    def share_plan(
        self, plan: SavePlan | None, rules: RunRules, error: BaseException | None = None
    ) -> SavePlan:
        """Rank 0's plan, on every rank (the others pass None).

        Raises:
            UnavailableError: it could not make one.
        """
        if not self.ranks.is_coordinator:
            data = self.ranks.broadcast(None)
            return SavePlan.from_bytes(data, schemas=self.schemas, rules=rules)
        if error is not None or plan is None:
            self.ranks.broadcast(json.dumps({"error": str(error) or repr(error)}).encode())
            assert error is not None
            raise error
        self.ranks.broadcast(plan.to_bytes())
        return plan
