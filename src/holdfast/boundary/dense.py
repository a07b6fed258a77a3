"""What dense state claims to be, checked against what it can be, before anything is loaded.

Dense state is a tree of dicts, lists, numbers and tensors (docs/format.md, "Dense segment"). Bytes
with the right checksum may hold any tree. What every reader relies on is checked here, once, when a
tree is read: which parts there are, what kind each is, and that the names in them fit together.

Invariants:
- A part that is there has its kind. Whether one must be there its reader says (``part_of``).
- An optimizer's state names only parameters that its order names.
- What is inside a random state, a reader or an extra is not known here: who takes it checks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from holdfast.errors import CorruptDataError
from holdfast.model.schema import TableSchema

_COUNT_MAX = 1 << 56


def check_dense(tree: Any) -> None:
    """Refuse a tree that is not the dense state of a checkpoint.

    >>> check_dense({"model": {}, "optimizers": None, "row_state_shapes": {"t": {"sum": [3, 1]}}})
    >>> check_dense({"model": []})
    Traceback (most recent call last):
    holdfast.errors.CorruptDataError: dense state is not what it should be. part='model'; ...

    Raises:
        CorruptDataError: names the part that is wrong.
    """
    _check_named(tree, "state")
    if "model" in tree:
        _check_named(tree["model"], "model")
    for part in ("extras", "pls", "rng"):
        if tree.get(part) is not None:
            _check_named(tree[part], part)
    for part, check in (
        ("aliases", _is_text),
        ("table_state", _is_named),
        ("row_state_shapes", _are_shapes),
        ("parameters", _is_order),
    ):
        if tree.get(part) is not None:
            _check_named(tree[part], part)
            for name, value in tree[part].items():
                if not check(value):
                    raise _wrong(f"{part}[{name!r:.60}]")
    if tree.get("optimizers") is not None:
        _check_named(tree["optimizers"], "optimizers")
        orders = tree.get("parameters") or {}
        for name, packed in tree["optimizers"].items():
            _check_optimizer(packed, orders.get(name), f"optimizers[{name!r:.60}]")


def check_aliases(dense: Mapping[str, Any], schemas: Sequence[TableSchema]) -> None:
    """Refuse further names of tables that do not exist, or names that something else has.

    Raises:
        CorruptDataError: names the alias.
    """
    names = {schema.whole_name for schema in schemas}
    taken = names | set(dense.get("model") or {})
    for alias, name in (dense.get("aliases") or {}).items():
        if name not in names or alias in taken:
            raise CorruptDataError("dense state has an impossible alias", alias=alias, table=name)


def check_row_state(dense: Mapping[str, Any], schemas: Sequence[TableSchema]) -> None:
    """Refuse shapes of row state that are not those of the tables' columns; none at all are fine:
    servers of a cluster know no shapes.

    Raises:
        CorruptDataError: names the table and the column.
    """
    stored = dense.get("row_state_shapes")
    if not stored:
        return
    for schema in schemas:
        for column in schema.columns[1:]:
            shape = stored.get(schema.name, {}).get(column.name)
            is_fit = shape and shape[0] == schema.rows
            if not is_fit or math.prod(shape) != schema.rows * column.width:
                raise CorruptDataError(
                    "row state has another shape than its column",
                    table=schema.name,
                    column=column.name,
                    shape=shape,
                )


def part_of(dense: Mapping[str, Any], name: str) -> Any:
    """A part of dense state that a reader cannot do without.

    Raises:
        CorruptDataError: it is not there, or None.
    """
    found = part_or_none(dense, name)
    if found is None:
        raise CorruptDataError("dense state lacks a part", part=name)
    return found


def part_or_none(dense: Mapping[str, Any], name: str) -> Any:
    """A part of dense state that a writer always mentions; None: it does not know it.

    Raises:
        CorruptDataError: it is not there.
    """
    if name not in dense:
        raise CorruptDataError("dense state lacks a part", part=name)
    return dense[name]


def _check_optimizer(packed: Any, order: Any, where: str) -> None:
    _check_named(packed, where)
    groups = packed.get("param_groups")
    if not isinstance(groups, list) or not all(map(_is_named, groups)):
        raise _wrong(f"{where}.param_groups")
    if not all(isinstance(group.get("params"), list) for group in groups):
        raise _wrong(f"{where}.param_groups")
    members = [member for group in groups for member in group["params"]]
    if "state" in packed:  # by position, as it once was
        is_known: Callable[[Any], bool] = _is_count
        state, known = packed["state"], set[Any](range(len(members)))
    else:
        is_known = _is_text
        state, known = packed.get("named"), set[Any](_texts(members))
        if order is not None and len(order) != len(groups):
            raise _wrong(f"{where}.param_groups")
        for group, own in zip(groups, order or (), strict=False):
            if not set(_texts(group["params"])) <= set(own):
                raise _wrong(f"{where}.param_groups")
        named = [name for own in order or () for name in own] or members
        if len(set(_texts(named))) != len(named):
            raise _wrong(f"{where}: a parameter is named twice")
    is_sound = all(map(is_known, members)) and isinstance(state, dict)
    if not is_sound or not all(is_known(key) and key in known for key in state):
        raise _wrong(f"{where}: state of no parameter")
    if not all(_has_like_keys(entries) for entries in state.values()):
        raise _wrong(f"{where}: state of a parameter")
    if packed.get("beside") is not None:
        _check_named(packed["beside"], f"{where}.beside")


def _texts(values: Collection[Any]) -> list[str]:
    """The texts of some values: others may not even have a hash."""
    return [value for value in values if isinstance(value, str)]


def _has_like_keys(value: Any) -> bool:
    """Whether this is a dict whose keys can be sorted."""
    return isinstance(value, dict) and (
        all(isinstance(key, str) for key in value) or all(_is_count(key) for key in value)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _COUNT_MAX


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _are_shapes(value: Any) -> bool:
    return _is_named(value) and all(
        isinstance(shape, list | tuple) and len(shape) > 0 and all(map(_is_count, shape))
        for shape in value.values()
    )


def _is_order(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(group, list) and all(isinstance(name, str) for name in group) for group in value
    )


def _check_named(value: Any, where: str) -> None:
    if not _is_named(value):
        raise _wrong(where)


def _wrong(where: str) -> CorruptDataError:
    return CorruptDataError(
        "dense state is not what it should be", part=where, todo="restore another step"
    )
