"""Which tensors of a checkpoint go where in a model that is not the one it was taken of: pure.

    names and shapes stored + names and shapes in the model + what the user says -> Pairing

Invariants:
- A name that the user wrote and that fits nothing is refused, strict or not.
- What is paired has the same shape; a table is paired with a table of the same number type only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from holdfast.errors import InvalidRequestError

TABLE, TENSOR, VALUE = "table", "tensor", "value"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a name stands for: a table, another tensor, or a value of another type."""

    what: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    """Of a table."""

    def __str__(self) -> str:
        return f"{self.what} {list(self.shape)} {self.dtype}".strip()


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a user says of a restore into a changed model. Patterns are of the model's names."""

    is_strict: bool = True
    only: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    """From stored names to the model's."""

    @property
    def is_whole(self) -> bool:
        """Everything is wanted, under its own name."""
        return self.is_strict and self.only is None and not self.skip and not self.rename

    def is_wanted(self, name: str) -> bool:
        """Whether something is to be loaded into this name of the model."""
        is_in = self.only is None or any(fnmatchcase(name, pattern) for pattern in self.only)
        return is_in and not any(fnmatchcase(name, pattern) for pattern in self.skip)


@dataclass(frozen=True, slots=True)
class Pairing:
    """What goes where: the stored name of each name in the model; what has no counterpart."""

    stored: Mapping[str, str]
    missing: tuple[str, ...]
    """Wanted in the model, and not in the checkpoint."""
    unexpected: tuple[str, ...]
    """In the checkpoint, wanted, and not in the model; by stored names."""


def as_transfer(
    *,
    strict: bool,
    only: Sequence[str] | None,
    skip: Sequence[str],
    rename: Mapping[str, str] | None,
) -> Transfer:
    """What a user passes.

    Raises:
        InvalidRequestError: a text where a list of them is wanted.
    """
    for name, given in (("only", only), ("skip", skip)):
        is_list = not isinstance(given, str) and isinstance(given, Sequence | None)
        if not is_list or not all(isinstance(pattern, str) for pattern in given or ()):
            raise InvalidRequestError("not a list of patterns", argument=name, given=given,
                                      todo=f"pass {name}=['users.*']")  # fmt: skip
    return Transfer(
        is_strict=strict,
        only=None if only is None else tuple(only),
        skip=tuple(skip),
        rename=tuple((rename or {}).items()),
    )


def pair_names(
    transfer: Transfer,
    stored: Mapping[str, Kind],
    live: Mapping[str, Kind],
    *,
    is_part: bool = False,
) -> Pairing:
    """Which stored tensor goes into which of the model. ``is_part``: other processes hold tables
    that this one lacks.

    >>> table = Kind(TABLE, (9, 2), "float32")
    >>> pair_names(Transfer(is_strict=False, rename=(("old", "new"),)),
    ...            {"old": table, "gone": table}, {"new": table, "fresh": table})
    Pairing(stored={'new': 'old'}, missing=('fresh',), unexpected=('gone',))

    Raises:
        InvalidRequestError: names that fit nothing, or tensors of other shapes; and where the
            transfer is strict, anything without a counterpart.
    """
    _check_words(transfer, stored, live, is_part=is_part)
    renamed = dict(transfer.rename)
    source: dict[str, str] = {}
    for name in stored:
        target = renamed.get(name, name)
        if target in source:
            raise InvalidRequestError(
                "two stored names for one of the model",
                name=target,
                stored=sorted([name, source[target]]),
                todo="rename the other one, too",
            )
        source[target] = name
    wanted = [name for name in live if transfer.is_wanted(name)]
    missing = [name for name in wanted if name not in source]
    unexpected = [
        name
        for target, name in source.items()
        if target not in live
        and transfer.is_wanted(target)
        and not (is_part and stored[name].what == TABLE)
    ]
    if transfer.is_strict and (missing or unexpected):
        raise InvalidRequestError(
            "the checkpoint and the model do not have the same names",
            missing=missing,
            unexpected=unexpected,
            todo="name what is wanted by only=, skip= and rename=, or pass strict=False",
        )
    pairs = {name: source[name] for name in wanted if name in source}
    for name, found in pairs.items():
        _check_kinds(name, stored[found], live[name])
    return Pairing(pairs, tuple(missing), tuple(unexpected))


def _check_words(
    transfer: Transfer, stored: Mapping[str, Kind], live: Mapping[str, Kind], *, is_part: bool
) -> None:
    """Refuse names that fit nothing: they are mistyped."""
    for old, new in transfer.rename:
        is_elsewhere = is_part and old in stored and stored[old].what == TABLE
        if old not in stored or (new not in live and not is_elsewhere):
            raise InvalidRequestError(
                "nothing to rename",
                stored=old,
                model=new,
                lacks="the checkpoint" if old not in stored else "the model",
                names=sorted(stored if old not in stored else live)[:20],
            )
    for pattern in (*(transfer.only or ()), *transfer.skip):
        if not any(fnmatchcase(name, pattern) for name in (*live, *stored)):
            raise InvalidRequestError(
                "a pattern fits no name", pattern=pattern, names=sorted(live)[:20]
            )


def _check_kinds(name: str, stored: Kind, live: Kind) -> None:
    if stored != live:
        raise InvalidRequestError(
            "a tensor has another shape or type in the checkpoint",
            name=name,
            checkpoint=str(stored),
            model=str(live),
            todo=f"leave it as it is: restore(step, strict=False, skip=[{name!r}])",
        )
