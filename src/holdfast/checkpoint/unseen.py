"""Rows that change unseen: what would escape a tracker of lookups is refused, what does is caught.

Marking lookups holds only where nothing else moves rows. ``check_lookups_suffice`` knows the
optimizers and modules there are; the canary catches the rest at the next save.

Invariant: a doubt is an error that says what to do, never a silent miss.

# words_W: a bitmap of a table's rows, W words (kernels/bitmap.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.kernels import bitmap
from holdfast.tables import Table, moves_unseen


class Canary:
    """A few rows of each table, hashed: tells when rows change that nobody looked up.

    The checks of ``find_unseen_movers`` know the optimizers there are; the canary catches the rest
    (a weight edited by hand, a regularizer, an optimizer swapped later) at the next save.
    """

    ROWS = 512

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = list(tables)
        self._ids = {
            table.name: np.unique(
                np.linspace(0, table.rows - 1, min(self.ROWS, table.rows)).astype(np.int64)
            )
            for table in self._tables
        }
        self._hashes: dict[str, tuple[int, npt.NDArray[np.uint64]]] = {}
        self.reset()

    def reset(self) -> None:
        """Take the rows as they are now as known."""
        for table in self._tables:
            self._remember(table)

    def _remember(self, table: Table) -> None:
        hashes = table.hash_rows(self._ids[table.name])
        self._hashes[table.name] = (len(table.schema().columns), hashes)

    def check(self, marks: Mapping[str, npt.NDArray[np.uint64]]) -> None:
        """Compare the rows that are not marked with what they were.

        Raises:
            InvalidRequestError: names the table and a row that changed without being looked up.
        """
        for table in self._tables:
            columns, known = self._hashes[table.name]
            if columns != len(table.schema().columns):
                continue  # row state appeared since: the next checkpoint is a base anyway
            ids_N = self._ids[table.name]
            changed = table.hash_rows(ids_N) != known
            escaped = ids_N[changed & ~bitmap.is_set(marks[table.name], ids_N)]
            if escaped.size:
                raise InvalidRequestError(
                    "rows changed that training never looked up",
                    table=table.name,
                    row=int(escaped[0]),
                    found=int(escaped.size),
                    sampled=int(ids_N.size),
                    todo="declare them with ck.mark(table, ids), or pass tracking='hash'",
                )


def find_unseen_movers(tables: Iterable[Table], all_parameters: nn.Module) -> list[str]:
    """Why marking lookups would miss changes, one sentence for each table concerned."""
    owners: dict[int, list[str]] = {}
    for path, module in all_parameters.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                owners.setdefault(id(parameter), []).append(f"{path}.{name}")
    reasons = []
    for table in tables:
        if table.watch is not None:
            reason = table.unseen_mover()
            if reason is not None:
                reasons.append(f"{table.name}: {reason}")
            continue
        if not table.parameter.requires_grad:
            continue
        reason = moves_unseen(table.optimizer, table.parameter) or _foreign_forward(table)
        shared = owners.get(id(table.parameter))
        if reason is None and shared:
            reason = f"its weight is shared with {shared[0]}, which changes rows without a lookup"
        if reason is not None:
            reasons.append(f"{table.name}: {reason}")
    return reasons


def _foreign_forward(table: Table) -> str | None:
    known = (nn.Embedding.forward, nn.EmbeddingBag.forward)
    if table.piece.is_replicated:
        return None  # not lookups are noted but gradients
    if all(module.sparse for module in table.modules):
        return None  # sparse gradients name their rows, whatever forward does
    if all(type(module).forward in known for module in table.modules):
        return None
    return "its module has a forward() of its own, which may look up other rows than it is given"


def check_lookups_suffice(tables: list[Table], model: nn.Module) -> None:
    """Refuse to track lookups where rows move without one.

    Raises:
        InvalidRequestError: names the tables and why, and what to do.
    """
    reasons = find_unseen_movers(tables, model)
    if reasons:
        shown = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" * (len(reasons) > 3))
        raise InvalidRequestError(
            f"tracking lookups would miss rows that change ({shown})",
            todo="pass tracking='hash' to compare row hashes instead, or use SGD without momentum "
            "and weight decay, Adagrad or SparseAdam for the tables",
        )
