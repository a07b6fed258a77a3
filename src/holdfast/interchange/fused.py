"""Fused optimizers of TorchRec, as its ``state_dict()`` has them: by names, with its own keys.

    {"state": {"bags.embedding_bags.users.weight": {"users.momentum1": tensor}},
     "param_groups": [{"params": ["bags.embedding_bags.users.weight"], "lr": 0.1}]}

A fused optimizer is part of the kernel that holds its tables, and no optimizer of the training loop
has them. So a checkpoint keeps its state with the tables: rows as columns, the rest (``lr``, Adam's
``step``) as the table's. Here the two forms are translated into each other. Tensors are whole where
TorchRec's are sharded: DCP cuts them when it loads, a file of ``torch.save`` is cut by its reader
(docs/interchange.md).

Invariant: what ``pack`` gives ``unpack`` takes back.

Not here: which tables have a fused optimizer (handout.py), the kernels (model/torchrec/fused.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.errors import CorruptDataError

KEY = "fused_optimizer"
"""Where it lies in a file, beside ``model`` and ``optimizer``."""

_FIRST = "momentum1"  # what TorchRec calls the first state of any optimizer
_FIRSTS = {(): "sum", ("exp_avg_sq",): "exp_avg"}  # and what that is, by the others beside it


def key_of(table: str, columns: Sequence[str], column: str) -> str:
    """What TorchRec calls one of a table's row states, of which it has these.

    >>> key_of("bags.embedding_bags.users.weight", ["sum"], "sum")
    'users.momentum1'
    >>> key_of("bags.embedding_bags.users.weight", ["exp_avg", "exp_avg_sq"], "exp_avg_sq")
    'users.exp_avg_sq'
    """
    name = table.split(".")[-2] if "." in table else table
    return f"{name}.{_FIRST if column == columns[0] else column}"


def pack(
    states: Mapping[str, Mapping[str, Any]], scalars: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Row state (by table, in the order of its columns) and the rest, as one ``state_dict()``."""
    groups: dict[str, dict[str, Any]] = {}
    for table, held in scalars.items():
        group = groups.setdefault(repr(sorted(held.items())), {"params": [], **held})
        group["params"].append(table)
    return {
        "state": {
            table: {key_of(table, list(held), column): value for column, value in held.items()}
            for table, held in states.items()
        },
        "param_groups": list(groups.values()),
    }


def unpack(value: Any) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Row state by table and column, and the rest by table.

    >>> packed = pack({"t.weight": {"exp_avg": 1, "exp_avg_sq": 2}}, {"t.weight": {"lr": 0.1}})
    >>> unpack(packed)
    ({'t.weight': {'exp_avg': 1, 'exp_avg_sq': 2}}, {'t.weight': {'lr': 0.1}})

    Raises:
        CorruptDataError: it is no fused optimizer's ``state_dict()``.
    """
    if not isinstance(value, Mapping):
        raise _not_fused()
    # Without row state (SGD) a folder of DCP has no entry for it.
    found, groups = value.get("state", {}), value.get("param_groups", ())
    if not isinstance(found, Mapping) or not isinstance(groups, list | tuple):
        raise _not_fused()
    states = {table: _columns(held) for table, held in found.items()}
    scalars: dict[str, dict[str, Any]] = {}
    for group in groups:
        members = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(members, list | tuple) or not _are_texts([*members, *group]):
            raise _not_fused()
        scalars |= {
            table: {name: item for name, item in group.items() if name != "params"}
            for table in members
        }
    if not _are_texts(states):
        raise _not_fused()
    return states, scalars


def _not_fused() -> CorruptDataError:
    return CorruptDataError("not a fused optimizer's state_dict", key=KEY)


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _columns(held: Any) -> dict[str, Any]:
    """A table's row state by the names that torch's optimizers have."""
    if not isinstance(held, Mapping) or not _are_texts(held):
        raise _not_fused()
    named = {key.rsplit(".", 1)[-1]: value for key, value in held.items()}
    others = tuple(sorted(set(named) - {_FIRST}))
    first = _FIRSTS.get(others)
    if len(named) != len(held) or (_FIRST in named and first is None):
        raise _not_fused()
    found = {first if name == _FIRST else name: value for name, value in named.items()}
    if len(found) != len(named):
        raise _not_fused()
    return {str(name): found[name] for name in sorted(found, key=str)}
