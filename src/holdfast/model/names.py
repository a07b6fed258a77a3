"""What parameters and tables are called: as in the plain model, whatever is wrapped around it.

``torch.compile`` puts a module into another one, under the name ``_orig_mod``, and every name in
``state_dict()`` shows it. Names are taken out of a live model here and put back when it is loaded
(model_state.py), so that compiled and plain models load each other's checkpoints. Earlier versions
stored the names as they were: readers take them through here too (``plain_dense`` for dense state).

Invariant: a plain name stays as it is.

Needs nothing, not even NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

COMPILED = "_orig_mod"  # torch.compile's name for the module inside


def plain_name(name: str) -> str:
    """A name as the model has it without ``torch.compile``.

    >>> plain_name("_orig_mod.users.weight"), plain_name("net._orig_mod.0.bias"), plain_name("net")
    ('users.weight', 'net.0.bias', 'net')
    """
    if COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILED)


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Plain names, by name; where two would become one, all stay as they are.

    >>> plain_names(["_orig_mod.a", "b"]), plain_names(["_orig_mod.a", "a"])
    ({'_orig_mod.a': 'a', 'b': 'b'}, {'_orig_mod.a': '_orig_mod.a', 'a': 'a'})
    """
    found = {name: plain_name(name) for name in names}
    return found if len(set(found.values())) == len(found) else {name: name for name in found}


def plain_dense(dense: Any) -> Any:
    """A checkpoint's dense state (docs/format.md) with plain names.

    What has another structure than it should is left alone: its reader will say what is wrong.
    """
    if not isinstance(dense, Mapping):
        return dense
    found = dict(dense)
    for part in ("model", "row_state_shapes", "table_state"):
        if isinstance(found.get(part), Mapping):
            found[part] = _plain_keys(found[part])
    if isinstance(found.get("aliases"), Mapping):
        aliases = _plain_keys(found["aliases"])
        found["aliases"] = {name: _plain_value(table) for name, table in aliases.items()}
    for part, plain in (("optimizers", _plain_optimizer), ("parameters", _plain_value)):
        if isinstance(found.get(part), Mapping):
            found[part] = {name: plain(value) for name, value in found[part].items()}
    return found


def _plain_keys(named: Mapping[Any, Any]) -> dict[Any, Any]:
    texts = plain_names(name for name in named if isinstance(name, str))
    return {texts.get(name, name): value for name, value in named.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, str):
        return plain_name(value)
    if isinstance(value, list | tuple):
        return type(value)(_plain_value(item) for item in value)
    return value


def _plain_optimizer(packed: Any) -> Any:
    if not isinstance(packed, Mapping):
        return packed
    found = dict(packed)
    if isinstance(found.get("named"), Mapping):
        found["named"] = _plain_keys(found["named"])
    if isinstance(found.get("param_groups"), list):
        found["param_groups"] = [
            {**group, "params": _plain_value(group["params"])}
            if isinstance(group, Mapping) and "params" in group
            else group
            for group in found["param_groups"]
        ]
    return found
