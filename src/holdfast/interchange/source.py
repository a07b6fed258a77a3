"""What a foreign checkpoint holds, in one form: a model's tensors, optimizers, a step.

    a tree of stored tensors and values -> which part is the model, which the optimizers -> Source

Invariants:
- Nothing is guessed between two parts that could both be meant; the error names them.
- Names of what may be stored are text, numbers of parameters are numbers: others are refused here.

Not here: reading files (torchfile.py, dcpfolder.py), which tensors are tables (adopt.py).
"""

from __future__ import annotations

import dataclasses
import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from holdfast.boundary.budget import Account
from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.interchange.archive.tensors import StoredTensor
from holdfast.interchange.fused import KEY as FUSED_KEY
from holdfast.interchange.fused import unpack
from holdfast.model.names import plain_name

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module")
OPTIMIZER_KEYS = (
    "optimizer", "optimizers", "optimizer_state_dict", "optimizer_states", "optim"
)  # fmt: skip
PARAMETER_NAMES = "parameter_names"
STEP_KEYS = ("step", "global_step")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_NAME_MAX = 4096


@dataclass(frozen=True, slots=True)
class PackedOptimizer:
    """An optimizer's ``state_dict``: state by parameter number, groups, and names if known."""

    state: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    names: tuple[str | None, ...] | None

    @property
    def parameters(self) -> int:
        """How many parameters it has."""
        return sum(len(group["params"]) for group in self.groups)


@dataclass(frozen=True, slots=True)
class Source:
    """A foreign checkpoint."""

    path: str
    format: str
    model: Mapping[str, Any]
    optimizers: Mapping[str, PackedOptimizer] | None
    """None: it holds none."""
    step: int | None
    account: Account
    """What reading it has cost, and may still cost."""
    fused: tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Mapping[str, Any]]] | None = None
    """Of fused optimizers (fused.py): row state by table and column, the rest by table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which parts of a foreign checkpoint are meant; None: found by their usual names."""

    model_key: str | None = None
    optimizer_key: str | None = None
    strip_prefix: str = ""
    """What to leave out at the beginning of names, like ``module.``."""
    weights_only: bool = False
    """Leave optimizer state out."""


def find_parts(tree: Any, choice: Choice, *, account: Account, path: str, format: str) -> Source:
    """A foreign checkpoint's model, optimizers and step, by their usual names or by those given.

    Raises:
        InvalidRequestError: it is not clear which part is the model, or there is none.
        CorruptDataError: an optimizer is not what ``state_dict()`` gives, or a name is no text.
    """
    if not isinstance(tree, Mapping) or not all(isinstance(key, str) for key in tree):
        raise InvalidRequestError(
            "this is no checkpoint of a model", path=path, type=type(tree).__name__,
            todo="save a state_dict, or a dict with one under 'model'",
        )  # fmt: skip
    if choice.model_key is None and _is_state_dict(tree):
        model = _renamed(tree, choice.strip_prefix)
        return Source(path, format, model, None, None, account)
    model_key = _choose_key(tree, choice.model_key, MODEL_KEYS, what="model")
    if model_key is None or not _is_state_dict(tree[model_key]):
        raise InvalidRequestError(
            "no state_dict of a model found", path=path, keys=shortened(sorted(tree)),
            todo="name it: model_key=, or --model-key",
        )  # fmt: skip
    optimizers = None
    if not choice.weights_only:
        key = _choose_key(tree, choice.optimizer_key, OPTIMIZER_KEYS, what="optimizer")
        if key is not None:
            optimizers = _optimizers(tree[key], key, choice.strip_prefix)
            optimizers = _with_names(optimizers, tree.get(PARAMETER_NAMES))
    model = _renamed(tree[model_key], choice.strip_prefix)
    fused = None
    if not choice.weights_only and FUSED_KEY in tree:
        states, scalars = unpack(tree[FUSED_KEY])
        prefix = choice.strip_prefix
        fused = _renamed(states, prefix), _renamed(scalars, prefix)
    return Source(path, format, model, optimizers, _find_step(tree), account, fused)


def shortened(names: Iterable[str]) -> list[str]:
    """The first of some names of a stranger's, for a message.

    >>> shortened(["a", "b" * 500])[1] == "b" * 80
    True
    """
    return [name[:80] for name in itertools.islice(names, 20)]


def check_text(name: Any, *, what: str) -> str:
    """A name that can be stored and shown.

    Raises:
        CorruptDataError: it is no text, or holds half a character or a control character.
    """
    if not isinstance(name, str) or len(name) > _NAME_MAX:
        raise CorruptDataError(f"the name of {what} is no text, or too long",
                               type=type(name).__name__)  # fmt: skip
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in name if not " " <= c <= "~"):
        raise CorruptDataError(f"the name of {what} holds characters that are no text",
                               name=ascii(name)[:80])  # fmt: skip
    return name


def _find_step(tree: Mapping[str, Any]) -> int | None:
    for key in STEP_KEYS:
        step = tree.get(key)
        if isinstance(step, StoredTensor) and not step.shape and step.dtype in _INTEGERS:
            step = step.whole().item()
        if type(step) is int and step >= 0:
            return step
    return None


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(name, str) for name in value)
        and any(isinstance(item, StoredTensor) for item in value.values())
        and not any(isinstance(item, Mapping) for item in value.values())
    )


def _choose_key(
    tree: Mapping[str, Any], given: str | None, usual: Sequence[str], *, what: str
) -> str | None:
    if given is not None:
        if given not in tree:
            keys = shortened(sorted(tree))
            raise InvalidRequestError(f"no such {what} key", key=given, keys=keys)
        return given
    found = [key for key in usual if key in tree]
    if len(found) > 1:
        raise InvalidRequestError(
            f"more than one key could be the {what}", keys=found,
            todo=f"name it: {what}_key=, or --{what}-key",
        )  # fmt: skip
    return found[0] if found else None


def _renamed(model: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in model.items():
        new = _plain(name, prefix)
        if new in made:
            raise InvalidRequestError(
                "two tensors have one name without the prefix and torch.compile's", name=new[:80],
                prefix=prefix,
                todo="leave the prefix out",
            )  # fmt: skip
        made[new] = value
    return made


def _plain(name: Any, prefix: str) -> str:
    return plain_name(check_text(name, what="a tensor").removeprefix(prefix))


def _optimizers(value: Any, key: str, prefix: str) -> dict[str, PackedOptimizer]:
    """One optimizer, a list or a dict of them, named as a Checkpointer would name them."""
    if isinstance(value, Mapping) and "param_groups" in value:
        items: Iterator[tuple[Any, Any]] = iter([("0", value)])
    elif isinstance(value, list | tuple):
        items = ((str(index), item) for index, item in enumerate(value))
    elif isinstance(value, Mapping):
        items = ((str(k) if type(k) is int else k, item) for k, item in value.items())
    else:
        raise CorruptDataError("not an optimizer's state_dict", key=key)
    found: dict[str, PackedOptimizer] = {}
    for name, item in items:
        if check_text(name, what="an optimizer") in found:
            raise CorruptDataError("two optimizers have one name", key=key, name=name[:80])
        found[name] = _packed(item, f"{key}[{name[:80]}]", prefix)
    return found


def _with_names(optimizers: dict[str, PackedOptimizer], told: Any) -> dict[str, PackedOptimizer]:
    """With names of parameters that the file has beside its optimizers, as our own have."""
    made = dict(optimizers)
    for key, packed in optimizers.items():
        names = told.get(key) if isinstance(told, Mapping) else None
        if packed.names is not None or not isinstance(names, list | tuple):
            continue
        is_fit = len(names) == packed.parameters
        if is_fit and all(name is None or isinstance(name, str) for name in names):
            checked = [None if n is None else check_text(n, what="a parameter") for n in names]
            made[key] = dataclasses.replace(packed, names=tuple(checked))
    return made


def _packed(value: Any, where: str, prefix: str) -> PackedOptimizer:
    """An optimizer as ``state_dict()`` has it, or with names for numbers, as DCP's helpers do."""

    def refuse() -> NoReturn:
        raise CorruptDataError("not an optimizer's state_dict", where=where)

    found = value.get("param_groups") if isinstance(value, Mapping) else None
    state = value.get("state", {}) if isinstance(value, Mapping) else None
    if not isinstance(found, list | tuple) or not isinstance(state, Mapping):
        refuse()
    order: list[int | str] = []
    named: list[Any] = []
    groups: list[dict[str, Any]] = []
    for group in found:
        members = group.get("params") if isinstance(group, Mapping) else None
        names = group.get("param_names", ()) if isinstance(group, Mapping) else ()
        if not isinstance(members, list | tuple) or not isinstance(names, list | tuple):
            refuse()
        for name in group:
            check_text(name, what="an optimizer's setting")
        groups.append({**group, "params": list(range(len(order), len(order) + len(members)))})
        order += members
        named += names
    if not all(type(parameter) is int or type(parameter) is str for parameter in order):
        refuse()
    number = {parameter: index for index, parameter in enumerate(order)}
    if len(number) != len(order) or not all(
        type(parameter) in (int, str) and parameter in number for parameter in state
    ):
        raise CorruptDataError("an optimizer's state and groups do not fit", where=where)
    if len(named) != len(order) and all(isinstance(parameter, str) for parameter in order):
        named = list(order)
    if named and len(named) != len(order):
        raise CorruptDataError("an optimizer names other parameters than it has", where=where)
    packed: dict[int, dict[str, Any]] = {}
    for parameter, entries in state.items():
        if not isinstance(entries, Mapping):
            refuse()
        packed[number[parameter]] = {
            check_text(name, what="an optimizer's state"): entry for name, entry in entries.items()
        }
    plain = tuple(_plain(name, prefix) for name in named) if named else None
    return PackedOptimizer(packed, groups, plain)
