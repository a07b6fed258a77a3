"""Which rows an optimizer moves in one step: what is known of the optimizers there are. Pure.

    optimizer, parameter group -> Rule: moves which rows, why, and what would make saves smaller

| moves | which rows | for example |
|---|---|---|
| gradient | rows whose gradient is not zero | SGD, Adagrad, SparseAdam |
| trained | rows that ever had a gradient: moments keep moving them | Adam, SGD with momentum |
| all | every row | weight decay |
| unknown | not known: the tracker compares rows and finds out | an optimizer of the user's own |

Invariants:
- A rule names every row that the optimizer can move, or more; never fewer.
- Only exact classes with their own ``step`` are known. A subclass, a patched ``step`` and hooks
  may do anything, so they are unknown.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

GRADIENT, TRAINED, ALL, UNKNOWN = "gradient", "trained", "all", "unknown"


@dataclass(frozen=True, slots=True)
class Rule:
    """Which rows one step moves, why, and what a user can do about the cost (empty: nothing)."""

    moves: str
    reason: str
    todo: str = ""
    writes: int = 1
    """How often a step writes to a weight; what torch counts beyond that is no optimizer's."""


# Half of the smallest number of each type, by its bytes: what is not above it is rounded to 0.
_ROUNDED_TO_ZERO = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150}
_LAZY_TODO = "use Adagrad, SGD without momentum or SparseAdam for the tables to save fewer rows"


def _moments(kind: str) -> Rule:
    return Rule(TRAINED, f"{kind} keeps moving every row that ever had a gradient", _LAZY_TODO)


def _sgd(group: Mapping[str, Any]) -> Rule:
    if group.get("momentum", 0):
        return _moments("SGD with momentum")
    return Rule(GRADIENT, "SGD moves rows with a gradient")


def _gradient_only(kind: str) -> Callable[[Mapping[str, Any]], Rule]:
    return lambda group: Rule(GRADIENT, f"{kind} moves rows with a gradient")


def _with_moments(kind: str, *, writes: int = 1) -> Callable[[Mapping[str, Any]], Rule]:
    return lambda group: replace(_moments(kind), writes=writes)


# By qualified name: TorchRec need not be installed, and torch.optim not be imported.
_KNOWN: dict[str, Callable[[Mapping[str, Any]], Rule]] = {
    "torch.optim.sgd.SGD": _sgd,
    "torch.optim.adagrad.Adagrad": _gradient_only("Adagrad"),
    "torch.optim.sparse_adam.SparseAdam": _gradient_only("SparseAdam"),
    "torchrec.optim.rowwise_adagrad.RowWiseAdagrad": _gradient_only("RowWiseAdagrad"),
    "torch.optim.adam.Adam": _with_moments("Adam"),
    "torch.optim.adamw.AdamW": _with_moments("AdamW"),
    "torch.optim.nadam.NAdam": _with_moments("NAdam", writes=2),
    "torch.optim.radam.RAdam": _with_moments("RAdam"),
    "torch.optim.rmsprop.RMSprop": _with_moments("RMSprop"),
    "torch.optim.adadelta.Adadelta": _with_moments("Adadelta"),
}


def _hooks_of(optimizer: object) -> Iterator[Mapping[int, Any]]:
    """The hooks around its step, by their handles: its own, then those of all optimizers."""
    yield getattr(optimizer, "_optimizer_step_pre_hooks", {})
    yield getattr(optimizer, "_optimizer_step_post_hooks", {})
    everywhere = sys.modules.get("torch.optim.optimizer")
    yield getattr(everywhere, "_global_optimizer_pre_hooks", {})
    yield getattr(everywhere, "_global_optimizer_post_hooks", {})


def has_hooks(optimizer: object) -> bool:
    """Whether hooks of a user run around its step: they may write anything, and clear gradients."""
    return any(not _is_own(hook) for hooks in _hooks_of(optimizer) for hook in hooks.values())


def _is_own(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return str(home).split(".")[0] == "holdfast"


def has_own_step(kind: type) -> bool:
    """Whether the class's ``step`` is the one that its library wrote, in every layer around it."""
    libraries = [_library(kind.__module__), _library("torch.optim.optimizer")]
    layer = getattr(kind, "step", None)
    while layer is not None:
        code = getattr(layer, "__code__", None)
        if code is None or not any(map(Path(code.co_filename).is_relative_to, libraries)):
            return False
        layer = getattr(layer, "__wrapped__", None)
    return True


def _library(module: str) -> str:
    """The folder of the package that a module belongs to; of a program's own module, the file."""
    home = Path(getattr(sys.modules.get(module), "__file__", None) or "/nowhere")
    depth = module.count(".")
    return str(home.parents[depth - 1] if depth else home)


class Mover:
    """An optimizer with one of its parameter groups, at one step."""

    __slots__ = ("_key", "group", "optimizer")

    def __init__(self, optimizer: Any, group: Mapping[str, Any]) -> None:
        self.optimizer = optimizer
        self.group = group
        self._key: tuple[Any, ...] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """``rule_key``, computed once for all tables of the group."""
        if self._key is None:
            self._key = rule_key(self.optimizer, self.group)
        return self._key


def rule_key(optimizer: object, group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a rule depends on; equal keys have equal rules."""
    is_set = tuple(bool(group.get(name)) for name in ("momentum", "weight_decay", "maximize"))
    eps = group.get("eps")
    eps = eps if isinstance(eps, int | float) else None
    return (*_step_key(optimizer), is_set, eps, _is_odd_rate(group))


def settings_key(optimizer: object, group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an observation of an optimizer that is not known holds for.

    A rate, a decay or a momentum that was zero while the optimizer was observed says nothing of
    what it does with another; how large it is makes no difference to which rows it moves.
    """
    settings = tuple(
        (name, _kind_of(value)) for name, value in sorted(group.items()) if name != "params"
    )
    return (*_step_key(optimizer), settings)


def _step_key(optimizer: object) -> tuple[Any, ...]:
    kind = type(optimizer)
    hooks = tuple(handle for hooks in _hooks_of(optimizer) for handle in hooks)
    return (kind, getattr(kind, "step", None), hooks)


def _kind_of(value: object) -> object:
    if isinstance(value, tuple | list):
        return tuple(map(_kind_of, value))
    if value is None or isinstance(value, str):
        return value
    return bool(value) if isinstance(value, int | float) else type(value).__qualname__


def _is_zero_eps(group: Mapping[str, Any], dtype: str) -> bool:
    """Whether eps is 0 as the optimizer adds it: what is tiny is rounded to 0."""
    eps = group.get("eps", 1)
    return isinstance(eps, int | float) and eps <= _ROUNDED_TO_ZERO.get(dtype, 0)


def _is_odd_rate(group: Mapping[str, Any]) -> bool:
    """Whether the rate times a gradient of zero may be something else than -0.0."""
    rate = group.get("lr", 0.0)
    device = getattr(rate, "device", None)
    if device is not None:  # a tensor; asking one on a GPU would wait for it
        return bool(device.type == "cpu" and not 0 <= rate.item() < math.inf)
    return isinstance(rate, int | float) and not 0 <= rate < math.inf


def rule_of(
    optimizer: object,
    group: Mapping[str, Any],
    *,
    dtype: str = "float32",
    is_sparse: bool = False,
) -> Rule:
    """Which rows a step of this optimizer moves, of parameters in this group.

    ``dtype``: what the table's numbers are. ``is_sparse``: its gradients are sparse, and the
    optimizers known here compute nothing for other rows.

    >>> class Mine: pass
    >>> rule_of(Mine(), {}).moves
    'unknown'
    """
    kind = type(optimizer)
    if has_hooks(optimizer):
        return Rule(UNKNOWN, f"{kind.__qualname__} has step hooks, which may change any row")
    known = _KNOWN.get(f"{kind.__module__}.{kind.__qualname__}")
    if known is None or not has_own_step(kind):
        return Rule(
            UNKNOWN,
            f"Holdfast does not know which rows {kind.__qualname__} moves",
        )
    if group.get("weight_decay", 0):
        return Rule(
            ALL,
            f"{kind.__qualname__} with weight_decay moves every row",
            "set weight_decay=0 for the tables' parameter group to save fewer rows",
        )
    if group.get("maximize", False):
        # It negates gradients, and 0.0 becomes -0.0: a weight of -0.0 changes its sign.
        return Rule(UNKNOWN, f"{kind.__qualname__} with maximize may turn -0.0 into 0.0")
    if not is_sparse and _is_odd_rate(group):
        return Rule(
            UNKNOWN, f"{kind.__qualname__} has a learning rate that is negative or not finite"
        )
    if not is_sparse and _is_zero_eps(group, dtype):
        return Rule(
            ALL,
            f"{kind.__qualname__} with eps=0 divides zero by zero in rows without a gradient",
            "set eps above 0; in float16 above 2^-25, or it is rounded to 0",
        )
    return known(group)
