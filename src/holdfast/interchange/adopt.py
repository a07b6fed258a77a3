"""What a foreign checkpoint becomes: tables of rows with their state, and dense state.

Which tensors are tables is model/tables.py's rule: embeddings, and optimizer state that has numbers
for every row goes with the rows. A live model says which weights are embeddings; a file
does not, so there they are named.

    Source + names of tables (+ names of the optimizers' parameters) -> Adopted

Invariants:
- Nothing is read here but shapes; the decision is complete before anything is written.
- State goes to a table only if it is certain whose it is: by name, by the live optimizer, or
  because no other tensor of the model has a shape it fits.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import InvalidRequestError, NotFoundError
from holdfast.interchange.archive.tensors import StoredTensor
from holdfast.interchange.source import PackedOptimizer, Source, shortened
from holdfast.model.model_state import ModelState, is_unnamed, unnamed
from holdfast.model.schema import DTYPE_BYTES, WEIGHT, Column, TableSchema
from holdfast.model.tables import has_row_state_shape, has_table_shape
from holdfast.model.tensors import dtype_name


@dataclass(frozen=True, slots=True)
class Naming:
    """What is known of a model beyond its file: its tables, and its optimizers' parameters."""

    tables: tuple[str, ...]
    aliases: Mapping[str, str]
    """Further names of tables."""
    parameters: Mapping[str, Sequence[str | None]] | None
    """By optimizer, in its order; None: as far as the file says."""


@dataclass(frozen=True, slots=True)
class AdoptedTable:
    """A table of a foreign checkpoint: its columns lie in files."""

    schema: TableSchema
    columns: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True)
class Adopted:
    """All of a foreign checkpoint, divided."""

    tables: tuple[AdoptedTable, ...]
    dense: Mapping[str, Any]
    """As ``ModelState`` has it; tensors still stored, None for what is not known."""


def name_by_model(state: ModelState) -> Naming:
    """What a live model and its optimizers say."""
    tables = tuple(table.whole_name for table in state.tables)
    parameters = {
        key: [None if is_unnamed(name) else name for group in order for name in group]
        for key, order in state.parameter_names().items()
    }
    return Naming(tables, state.aliases(), parameters or None)


def name_by_patterns(
    source: Source, patterns: Sequence[str] | None, parameters: Sequence[str] | None
) -> Naming:
    """What a user says: which tensors are tables, and the names of the optimizers' parameters.

    Raises:
        InvalidRequestError: nothing was said and there are tensors that may be tables; or the
            parameters named are not as many as the optimizers have.
        NotFoundError: a pattern meets no tensor.
    """
    may_be = {name: t for name, t in source.model.items() if _may_be_table(t)}
    if patterns is None and may_be:
        largest = sorted(may_be, key=lambda name: -may_be[name].bytes)
        raise InvalidRequestError(
            "which tensors are embedding tables",
            shapes={n[:80]: may_be[n].shape for n in largest[:12]},
            todo="name them: tables=, or --table (repeatable, * is anything); "
            "or pass model= to hf.import_checkpoint",
        )  # fmt: skip
    tables: dict[str, None] = {}
    for pattern in patterns or ():
        met = [name for name in source.model if fnmatch.fnmatchcase(name, pattern)]
        if not met:
            raise NotFoundError("no such tensor", table=pattern, tensors=shortened(may_be))
        tables |= dict.fromkeys(met)
    return Naming(tuple(tables), {}, _share_out(source, parameters))


def _may_be_table(value: Any) -> bool:
    return isinstance(value, StoredTensor) and has_table_shape(value.shape, value.dtype)


def _share_out(
    source: Source, parameters: Sequence[str] | None
) -> dict[str, Sequence[str | None]] | None:
    if parameters is None:
        return None
    unknown = [name for name in parameters if name not in source.model]
    counts = {key: packed.parameters for key, packed in (source.optimizers or {}).items()}
    if unknown or len(parameters) != sum(counts.values()):
        raise InvalidRequestError(
            "the optimizers have other parameters than were named", optimizers=counts,
            named=len(parameters), unknown=unknown[:5],
            todo="name all of them in their order, of one optimizer after the other",
        )  # fmt: skip
    left = list(parameters)
    return {key: [left.pop(0) for _ in range(count)] for key, count in counts.items()}


def adopt(source: Source, naming: Naming) -> Adopted:
    """Divide a foreign checkpoint into tables and dense state.

    Raises:
        NotFoundError: the file lacks a table.
        InvalidRequestError: a table is not of rows of floats, two tables are one by their names,
            or it is not certain whose an optimizer's state is.
    """
    source = _split_joined(source, naming)
    columns: dict[str, dict[str, StoredTensor]] = {}
    for name in naming.tables:
        weight = source.model.get(name)
        if weight is None:
            raise NotFoundError(
                "the file lacks a table of the model", table=name, path=source.path,
                tensors=shortened(source.model),
            )  # fmt: skip
        if not _may_be_table(weight):
            raise InvalidRequestError(
                "a table is a tensor of rows of floats", table=name[:80],
                found=_describe(weight), known=list(DTYPE_BYTES),
                todo="convert it to one of these types first, or do not name it",
            )  # fmt: skip
        columns[name] = {WEIGHT: weight}
    known = _parameters(source, naming)
    table_state: dict[str, dict[str, Any]] = {name: {} for name in columns}
    optimizers: dict[str, Any] | None = None
    if source.optimizers is not None:
        optimizers = {
            key: _divide(packed, known[key], columns, table_state)
            for key, packed in source.optimizers.items()
        }
    if source.fused is not None:
        optimizers = {} if optimizers is None else optimizers
        _add_fused(*source.fused, columns, table_state)
    skipped = {*columns, *naming.aliases}
    dense = {
        "model": {name: value for name, value in source.model.items() if name not in skipped},
        "optimizers": optimizers,
        "row_state_shapes": {
            name: {key: list(t.shape) for key, t in found.items() if key != WEIGHT}
            for name, found in columns.items()
        },
        "table_state": table_state,
        "aliases": dict(naming.aliases),
        "parameters": {
            key: [[known[key][index] for index in group["params"]] for group in packed.groups]
            for key, packed in (source.optimizers or {}).items()
        },
        "rng": None,
        "extras": None,
    }
    return Adopted(tuple(_table(name, found) for name, found in columns.items()), dense)


def _describe(value: Any) -> str:
    if isinstance(value, StoredTensor):
        return f"{value.dtype} {list(value.shape)}"
    return type(value).__name__


def _table(name: str, found: Mapping[str, StoredTensor]) -> AdoptedTable:
    """Columns in the order of a live table: the weights, then state by name."""
    rows = found[WEIGHT].shape[0]
    order = [WEIGHT, *sorted(key for key in found if key != WEIGHT)]
    columns = (
        Column(key, math.prod(found[key].shape) // rows, dtype_name(found[key].dtype))
        for key in order
    )
    schema = TableSchema(name, rows, tuple(columns))
    return AdoptedTable(schema, tuple(found[key] for key in order))


def _divide(
    packed: PackedOptimizer,
    names: Sequence[str],
    columns: dict[str, dict[str, StoredTensor]],
    table_state: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """An optimizer's dense state; of tables, row state is added to ``columns``, and what is not of
    rows to ``table_state``."""
    named: dict[str, dict[str, Any]] = {}
    for index, entries in packed.state.items():
        name = names[index]
        if name not in columns:
            named[name] = dict(entries)
            continue
        for key, value in entries.items():
            is_of_rows = _is_row_state(value, columns[name][WEIGHT].shape[0])
            into = columns[name] if is_of_rows else table_state[name]
            if key in into:
                raise InvalidRequestError(
                    "a table's state has a name that is taken", table=name[:80], state=key[:80],
                    todo="give each table one optimizer",
                )  # fmt: skip
            into[key] = value
    groups = [
        {**group, "params": [names[i] for i in group["params"] if names[i] not in columns]}
        for group in packed.groups
    ]
    return {"named": named, "param_groups": groups}


def _add_fused(
    states: Mapping[str, Mapping[str, Any]],
    scalars: Mapping[str, Mapping[str, Any]],
    columns: dict[str, dict[str, StoredTensor]],
    table_state: dict[str, dict[str, Any]],
) -> None:
    """What fused optimizers hold of tables: row state to ``columns``, the rest to ``table_state``.

    Raises:
        NotFoundError: they are of tables that were not named.
        InvalidRequestError: state is not of a table's rows, or another optimizer has it too.
    """
    for name in {**states, **scalars}:
        if name not in columns:
            raise NotFoundError(
                "a fused optimizer holds a table that is not among those named", table=name[:80],
                tables=shortened(columns), todo="name it too: tables=, or --table",
            )  # fmt: skip
        rows = columns[name][WEIGHT].shape[0]
        for key, value in states.get(name, {}).items():
            if not _is_row_state(value, rows) or key in columns[name]:
                raise InvalidRequestError(
                    "a fused optimizer's state is not of its table's rows, or there twice",
                    table=name[:80], state=key[:80], found=_describe(value),
                )  # fmt: skip
            columns[name][key] = value if len(value.shape) > 1 else value.as_column()
        table_state[name] |= scalars.get(name, {})


def _is_row_state(value: Any, rows: int) -> bool:
    return isinstance(value, StoredTensor) and has_row_state_shape(value.shape, value.dtype, rows)


def _split_joined(source: Source, naming: Naming) -> Source:
    """DCP keeps several optimizers as one, by names: each live one gets its own parameters back."""
    given, optimizers = naming.parameters, source.optimizers or {}
    if given is None or len(given) < 2 or len(optimizers) != 1:
        return source
    (packed,) = optimizers.values()
    if packed.names is None or {n for names in given.values() for n in names} != {*packed.names}:
        return source
    made: dict[str, PackedOptimizer] = {}
    for key, names in given.items():
        number = {name: index for index, name in enumerate(names) if name is not None}
        groups = []
        for group in packed.groups:
            members = [packed.names[index] for index in group["params"]]
            if members and members[0] in number and set(members) <= set(number):
                groups.append({**group, "params": [number[name] for name in members]})
        places = [(number.get(packed.names[i] or ""), held) for i, held in packed.state.items()]
        state = {index: held for index, held in places if index is not None}
        made[key] = PackedOptimizer(state, groups, tuple(names))
    if any(each.parameters != len(given[key]) for key, each in made.items()):
        return source  # groups that no live optimizer has: refused as other optimizers
    return dataclasses.replace(source, optimizers=made)


def _parameters(source: Source, naming: Naming) -> dict[str, list[str]]:
    """A name for each of the optimizers' parameters, in their order; where none is certain, one
    that says its place."""
    found: dict[str, list[str]] = {}
    optimizers = source.optimizers or {}
    given = naming.parameters
    if given is not None and source.optimizers is not None and set(given) != set(optimizers):
        raise InvalidRequestError(
            "the file was saved with other optimizers", file=shortened(sorted(optimizers)),
            given=sorted(given), todo="pass the same optimizers in the same order",
        )  # fmt: skip
    for key, packed in optimizers.items():
        if given is not None:
            names: Sequence[str | None] = given[key]
        elif packed.names is not None:
            names = [name if name in source.model else None for name in packed.names]
        else:
            names = _names_by_shape(key, packed, source.model, set(naming.tables))
        if len(names) != packed.parameters:
            raise InvalidRequestError(
                "an optimizer has other parameters than in the file", optimizer=key,
                file=packed.parameters, given=len(names),
            )  # fmt: skip
        found[key] = [
            unnamed(index) if name is None else naming.aliases.get(name, name)
            for index, name in enumerate(names)
        ]
        if len(set(found[key])) != len(names):
            twice = [name for name, count in Counter(found[key]).most_common(6) if count > 1]
            raise InvalidRequestError(
                "two parameters of an optimizer have one name", optimizer=key[:80],
                names=shortened(twice),
                todo="pass model= and optimizer= to hf.import_checkpoint",
            )  # fmt: skip
    return found


def _names_by_shape(
    key: str, packed: PackedOptimizer, model: Mapping[str, Any], tables: set[str]
) -> list[str | None]:
    """Whose the state of a parameter without a name is, where only one tensor fits it."""
    names: list[str | None] = [None] * packed.parameters
    owners = _Owners(model, tables)
    taken: set[str] = set()
    for index, entries in packed.state.items():
        shapes = {v.shape for v in entries.values() if isinstance(v, StoredTensor) and v.shape}
        fitting, has_table = owners.find(shapes)
        if len(fitting) == 1 and fitting[0] not in taken:
            names[index] = fitting[0]
            taken.add(fitting[0])
        elif has_table:
            raise InvalidRequestError(
                "it is not certain whose an optimizer's state is", optimizer=key[:80],
                parameter=index, could_be=shortened(fitting[:6]),
                todo="pass model= and optimizer= to hf.import_checkpoint, or name the optimizers' "
                "parameters in their order with --param",
            )  # fmt: skip
    return names


class _Owners:
    """Tensors of a model, found by the shapes of state that can be theirs: state of their own
    shape, or of a number a row. No search compares: a file may have many tensors and much state.

    >>> owners = _Owners({}, set())
    >>> owners.add("users", (5, 2)); owners.add("items", (5, 3))
    >>> owners.find({(5, 2), (5,)})[0], owners.find({(5,)})[0], owners.find({(5, 2), (5, 3)})[0]
    (['users'], ['users', 'items'], [])
    """

    def __init__(self, model: Mapping[str, Any], tables: set[str]) -> None:
        self._tables = tables
        self._found: dict[tuple[int, ...] | int, list[str]] = {}
        self._of_tables: set[tuple[int, ...] | int] = set()
        for name, weight in model.items():
            if isinstance(weight, StoredTensor) and weight.shape:
                self.add(name, weight.shape)

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor that state may belong to."""
        for key in (shape, shape[0]):
            self._found.setdefault(key, []).append(name)
            if name in self._tables:
                self._of_tables.add(key)

    def find(self, shapes: set[tuple[int, ...]]) -> tuple[list[str], bool]:
        """The tensors that all these shapes fit, and whether a table is among them."""
        rows = {shape[0] for shape in shapes}
        whole = {shape for shape in shapes if math.prod(shape) != shape[0]}
        if len(rows) != 1 or len(whole) > 1:
            return [], False
        key = next(iter(whole), None) or next(iter(rows))
        return self._found.get(key, []), key in self._of_tables
