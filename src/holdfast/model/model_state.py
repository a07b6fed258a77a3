"""A live model with its optimizers: its tables, and everything else, which is dense state.

    model, optimizers -> tables (rows) + dense (network, optimizer scalars, groups)

Invariants:
- A tensor belongs to exactly one of the two: no tensor is saved twice, none is left out.
- Dense state goes by names, never by positions: it fits a process that holds other tables. Names
  are those of the plain model, without DDP and ``torch.compile`` (names.py). A parameter that is
  none of the model's is called by its place (``#3``).
- Where many processes train, dense state is the same in all, but for the ``tables_dense`` of tables
  that only some hold.

Not here: what is a table (tables.py), rows (checkpoint/).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import CorruptDataError, InvalidRequestError
from holdfast.model.names import plain_name
from holdfast.model.schema import TableSchema, cuts_of, holds, state_shape, whole_schema
from holdfast.model.shard import Shard
from holdfast.model.tables import (
    Loading,
    Table,
    claim_tables,
    find_owners,
    find_tables,
    unwrap_optimizer,
)
from holdfast.model.tensors import TORCH_DTYPES, dtype_name

Shapes = Mapping[str, Mapping[str, Sequence[int]]]
Order = Sequence[Sequence[str]]  # of an optimizer's parameters, by group: their names


def unnamed(place: int) -> str:
    """What a parameter is called that has no name."""
    return f"#{place}"


def is_unnamed(name: str) -> bool:
    """Whether a parameter's name says only its place.

    >>> is_unnamed(unnamed(3)), is_unnamed("top.weight")
    (True, False)
    """
    return name.startswith("#")


def names_by_place(stored: Order, live: Order) -> dict[str, str]:
    """Names for what a checkpoint has none for, where all others are in the places they have here.

    >>> names_by_place([["a", "#1"]], [["a", "b"]]), names_by_place([["a", "#1"]], [["b", "a"]])
    ({'#1': 'b'}, {})
    """
    if [len(group) for group in stored] != [len(group) for group in live]:
        return {}
    pairs = [p for a, b in zip(stored, live, strict=True) for p in zip(a, b, strict=True)]
    if any(a != b and not is_unnamed(a) for a, b in pairs):
        return {}
    return {a: b for a, b in pairs if is_unnamed(a)}


def as_optimizers(optimizer: Any) -> dict[str, torch.optim.Optimizer]:
    """One optimizer, several, or a mapping of them, each under a stable name."""
    if optimizer is None:
        return {}
    named: dict[str, Any]
    if isinstance(optimizer, Mapping):
        named = {str(name): item for name, item in optimizer.items()}
    elif isinstance(optimizer, Sequence):
        named = {str(index): item for index, item in enumerate(optimizer)}
    else:
        named = {"0": optimizer}
    for name, item in named.items():
        if not isinstance(item, torch.optim.Optimizer):
            raise InvalidRequestError(
                "not an optimizer",
                name=name,
                type=type(item).__name__,
                todo="pass a torch.optim.Optimizer, a list of them or a dict of them",
            )
    found: dict[str, torch.optim.Optimizer] = {}
    for name, item in named.items():
        inside = unwrap_optimizer(item)
        for index, part in enumerate(inside):
            found[name if len(inside) == 1 else f"{name}.{index}"] = part
    for name, part in found.items():
        _check_optimizer_state(name, part)
    return found


def _check_optimizer_state(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse, before training begins, an optimizer whose state no save can take apart.

    Raises:
        InvalidRequestError: says what to pass instead.
    """
    try:
        packed = optimizer.state_dict()
        missing = sorted({"state", "param_groups"} - set(packed))
        detail = f"it lacks {missing}" if missing else ""
    except Exception as error:  # the user's own code
        detail = f"it raises {type(error).__name__}: {str(error)[:200]}"
    if detail:
        raise InvalidRequestError(
            "an optimizer's state_dict() is not one of torch.optim",
            name=name,
            type=type(optimizer).__name__,
            detail=detail,
            todo="pass the torch.optim.Optimizer inside of it as optimizer=, and what is around "
            "it as extras={'around': it}",
        )


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside of DDP and ``torch.compile``, whichever is around which."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "torch._dynamo" in sys.modules and isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def _check_names(model: nn.Module) -> None:
    """Refuse a model in which two tensors have one plain name (names.py).

    Raises:
        InvalidRequestError: names both.
    """
    seen: dict[str, str] = {}
    for name in itertools.chain(
        (name for name, _ in model.named_parameters(remove_duplicate=False)),
        (name for name, _ in model.named_buffers(remove_duplicate=False)),
    ):
        other = seen.setdefault(plain_name(name), name)
        if other != name:
            raise InvalidRequestError(
                "two tensors have one name where torch.compile's wrappers are left out",
                names=[other, name],
                todo="rename the attribute '_orig_mod', which is torch.compile's",
            )


def _load_network(model: nn.Module, state: Mapping[str, Any]) -> Loading:
    """Load a state dict as the model does."""
    try:
        result = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        return Loading(errors=[str(error)])
    return Loading(list(result.missing_keys), list(result.unexpected_keys))


def in_state_order(state: Mapping[int | str, Any]) -> dict[int | str, Any]:
    """An optimizer's packed state by the places of parameters, then by names of its own.

    >>> in_state_order({"k": 7, 2: {}, 0: {}})
    {0: {}, 2: {}, 'k': 7}
    """
    return dict(sorted(state.items(), key=lambda item: (isinstance(item[0], str), item[0])))


def _keep_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[int | str, Any]) -> None:
    """Give state the type back that it was saved in: torch casts it to the parameter's, and so
    rounds the float32 moments of a bfloat16 weight."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in state.items():
        if isinstance(index, str):
            continue
        held = optimizer.state.get(parameters[index], {})
        for key, value in entries.items():
            now = held.get(key)
            if key == "step" or not isinstance(value, torch.Tensor):
                continue
            if isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                held[key] = value.to(now.device)


def _kinds_of(tables: Mapping[str, Table]) -> dict[str, tuple[Any, ...]]:
    """What a table must keep to be the same one, by name."""
    return {
        name: (table.rows, table.width, table.parameter.dtype)  # as of when it was found
        for name, table in tables.items()
    }


class ModelState:
    """A live model with its optimizers: what a snapshot reads and a restore writes."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        shards: Mapping[str, Shard] | None = None,
        is_replicated: bool = False,
    ) -> None:
        """``shards``: which parameters are parts of larger tables; ``is_replicated``: the other
        tables are the same in every process."""
        if not isinstance(model, nn.Module):
            raise InvalidRequestError(
                "not a model", type=type(model).__name__, todo="pass a torch.nn.Module"
            )
        model = unwrap_model(model)  # so that others can load what is saved
        _check_names(model)
        self.model = model
        self.optimizers = as_optimizers(optimizer)
        self._shards = dict(shards or {})
        self._is_replicated = is_replicated
        self._claimed = claim_tables(model, list(self.optimizers.values()))
        self.load_network = self._claimed.load_network or _load_network
        self._take_tables(self._find_tables())
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise InvalidRequestError(
                "two shards of a table hold the same floats in one process",
                tables=sorted({name for name in names if names.count(name) > 1}),
                todo="give each process one shard of each range of columns",
            )

    def _find_tables(self) -> list[Table]:
        """The model's tables as they are now, but for those of adapters."""
        return find_tables(
            self.model,
            self.optimizers.values(),
            shards=self._shards,
            is_replicated=self._is_replicated,
        )

    def _take_tables(self, found: list[Table]) -> None:
        """These are the tables, besides those of adapters; what is left is dense state."""
        self._found = found
        self.tables = [*self._claimed.tables, *found]
        self._by_id = {id(table.parameter): table for table in self.tables if table.has_parameter}
        self._table_names = self._claimed.names | {
            plain_name(name)
            for name, parameter in self.model.named_parameters(remove_duplicate=False)
            if id(parameter) in self._by_id
        }
        self._not_dense = self._table_names | {table.whole_name for table in self.tables}

    def aliases(self) -> dict[str, str]:
        """Further names of tables in ``state_dict()``, where modules share one."""
        found: dict[str, str] = {}
        seen: set[int] = set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            table = self._by_id.get(id(parameter))
            if table is not None and id(parameter) in seen:
                found[plain_name(name)] = table.whole_name
            seen.add(id(parameter))
        return found

    def parameter_names(self) -> dict[str, list[list[str]]]:
        """The names of each optimizer's parameters, tables among them, by group in its order."""
        return {
            # Several shards of a table are one parameter of the whole model.
            key: [list(dict.fromkeys(group)) for group in self.names_in(optimizer)]
            for key, optimizer in self.optimizers.items()
        }

    def schemas(self) -> tuple[TableSchema, ...]:
        """The stored tables that rows held here belong to, as of now."""
        return tuple(table.schema() for table in self.tables)

    def follow_model(self) -> None:
        """Look at the model again: modules and weights that were replaced, parameters added to
        optimizers, tables that grew, came or went.

        Where a table has another shape or type, ``tables`` are other objects afterwards.

        Raises:
            InvalidRequestError: the memory of a library's own table was replaced, or tables that
                many processes hold are others.
        """
        owners = find_owners(self.optimizers.values())
        for table in self._claimed.tables:
            if table.has_parameter and table.optimizer is None:
                table.optimizer = next(iter(owners.get(id(table.parameter), ())), None)
            if not table.is_current():
                raise InvalidRequestError(
                    "a table's weight was replaced by a tensor of another kind",
                    table=table.name,
                    todo="make a new Checkpointer, with a new url, after the model is complete",
                )
        found = self._find_tables()
        now = {table.name: table for table in found}
        known = {table.name: table for table in self._found}
        if _kinds_of(known) == _kinds_of(now):
            for name, table in known.items():
                table.follow(now[name])
            self._take_tables(self._found)
            return
        if self._shards or self._is_replicated:
            raise InvalidRequestError(
                "a table's weight was replaced by a tensor of another kind",
                tables=sorted(known.keys() | now.keys()),
                todo="make new Checkpointers, on all ranks, after the model is complete",
            )
        self._take_tables(found)

    def full_bytes(self) -> int:
        """What all rows held here take, with their state."""
        return sum(table.rows * table.schema().row_bytes for table in self.tables)

    # Out.

    def dense(self) -> dict[str, Any]:
        """Everything that is not of a table: other parameters, buffers, optimizer state, groups."""
        model = {
            plain_name(name): value
            for name, value in self.model.state_dict().items()
            if plain_name(name) not in self._table_names
        }
        optimizers = {name: self._dense_of(opt) for name, opt in self.optimizers.items()}
        return {"model": model, "optimizers": optimizers}

    def tables_dense(self) -> dict[str, Any]:
        """What is known of the tables held here besides their rows.

        Raises:
            InvalidRequestError: a shard has state that is neither rows nor of the whole table.
        """
        for table in self.tables:
            scalars = {} if table.shard.is_whole else table.scalars()
            large = [k for k, v in scalars.items() if isinstance(v, torch.Tensor) and v.numel() > 1]
            if large:
                raise InvalidRequestError(
                    "a shard of a table has optimizer state that is not by rows",
                    table=table.name,
                    state=large,
                    todo="use an optimizer whose state has a row for each row of the table",
                )
        return {
            "row_state_shapes": {table.name: table.state_shapes() for table in self.tables},
            "table_state": {table.whole_name: table.scalars() for table in self.tables},
            "aliases": self.aliases(),
            "parameters": self.parameter_names(),
        }

    def _dense_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        packed = optimizer.state_dict()
        names = [name for group in self.names_in(optimizer) for name in group]
        state = {
            names[index]: entries
            for index, entries in packed["state"].items()
            if isinstance(index, int) and names[index] not in self._not_dense
        }
        # What it keeps under names of its own, and not for a parameter (MADGRAD's "k").
        beside = {key: held for key, held in packed["state"].items() if isinstance(key, str)}
        groups = [
            {**group, "params": self._dense_names(names[index] for index in group["params"])}
            for group in packed["param_groups"]
        ]
        packed_beside = {"beside": beside} if beside else {}
        return {"named": state, "param_groups": groups, **packed_beside}

    def names_in(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """A name for each parameter of an optimizer, by group, in its order."""
        known = {id(p): plain_name(name) for name, p in self.model.named_parameters()}
        known |= {address: table.whole_name for address, table in self._by_id.items()}
        place = itertools.count()
        return [
            [known.get(id(p), unnamed(at)) for p, at in zip(group["params"], place, strict=False)]
            for group in optimizer.param_groups
        ]

    def _dense_names(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self._not_dense]

    # In.

    def check_schemas(
        self, stored: Sequence[TableSchema], *, is_part: bool = False, may_be_dense: bool = False
    ) -> None:
        """Refuse a checkpoint of another model before anything is written.

        ``is_part``: other processes hold what this one lacks. ``may_be_dense``: tables that are not
        float32 may be lacking; once they were dense state, and ``load_dense`` looks for them there.

        Raises:
            InvalidRequestError: names the first table that differs.
        """
        todo = "build the model as it was when the checkpoint was taken"
        live: dict[str, Table] = {table.whole_name: table for table in self.tables}
        for name, cuts in cuts_of(stored).items():
            table = live.pop(name, None)
            if table is None:
                if is_part:
                    continue
                raise InvalidRequestError(
                    "the checkpoint has a table that the model lacks", table=name, todo=todo
                )
            schema = whole_schema(cuts)
            shape, own = (schema.rows, schema.width), (table.shard.rows, table.shard.width)
            if shape != own:
                raise InvalidRequestError(
                    "a table has another shape in the checkpoint",
                    table=name,
                    checkpoint=shape,
                    model=own,
                    todo=todo,
                )
            dtype, own_dtype = schema.columns[0].dtype, dtype_name(table.weight().dtype)
            if dtype != own_dtype:
                raise InvalidRequestError(
                    "a table has another number type in the checkpoint",
                    table=name,
                    checkpoint=dtype,
                    model=own_dtype,
                    todo=todo,
                )
        if may_be_dense:
            live = {n: t for n, t in live.items() if t.weight().dtype == torch.float32}
        if live:
            raise InvalidRequestError(
                "the model has tables that the checkpoint lacks", tables=sorted(live), todo=todo
            )

    def load_dense(self, dense: Mapping[str, Any], schemas: Sequence[TableSchema]) -> None:
        """Load dense state and make room for every table's row state as the schemas say.

        Its structure is known to be sound (boundary/dense.py).

        Where the checkpoint knows no optimizers (None), those there are stay as they are.

        Raises:
            InvalidRequestError: the model's or an optimizer's structure differs.
        """
        stored = dense["optimizers"]
        missing = set() if stored is None else set(stored) ^ set(self.optimizers)
        if missing:
            raise InvalidRequestError(
                "the checkpoint was taken with other optimizers",
                checkpoint=sorted(stored),
                given=sorted(self.optimizers),
                todo="pass the same optimizers in the same order",
            )
        live = {plain_name(name): name for name in self.model.state_dict()}
        network = {live.get(name, name): value for name, value in dense["model"].items()}
        loading = self.load_network(self.model, network)
        in_rows = self._table_names - self._check_dense_tables(dense["model"], schemas)
        absent = [name for name in map(plain_name, loading.missing) if name not in in_rows]
        if absent or loading.unexpected or loading.errors:
            raise InvalidRequestError(
                "the checkpoint's dense state does not fit the model",
                missing=absent,
                unexpected=loading.unexpected,
                detail="; ".join(loading.errors),
            )
        shapes, dtypes = self.own_shapes(dense["row_state_shapes"], schemas)
        if stored is None:
            return
        scalars = dense.get("table_state", {})
        orders = dense.get("parameters", {})
        for table in self.tables:
            if not table.has_parameter:
                table.make_room(shapes[table.name])
                self._check_dtypes(table, dtypes[table.name])
                table.load_scalars(scalars.get(table.whole_name, {}))
        for name, optimizer in self.optimizers.items():
            state, groups = self._by_position(optimizer, stored[name], orders.get(name, ()))
            self.load_optimizer(optimizer, state, groups, shapes, dtypes, scalars)

    def _check_dense_tables(
        self, model: Mapping[str, Any], schemas: Sequence[TableSchema]
    ) -> set[str]:
        """The names of tables here that the checkpoint has no rows of: it must have them as dense
        state, in the type they have here.

        Raises:
            InvalidRequestError: it has them in another type.
        """
        stored = cuts_of(schemas)
        lacking = {id(t.parameter): t.parameter for t in self.tables
                   if t.has_parameter and t.whole_name not in stored}  # fmt: skip
        found: set[str] = set()
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) not in lacking:
                continue
            name = plain_name(name)
            found.add(name)
            value = model.get(name)
            if isinstance(value, torch.Tensor) and value.dtype != parameter.dtype:
                raise InvalidRequestError(
                    "a table has another number type in the checkpoint",
                    table=name,
                    checkpoint=str(value.dtype),
                    model=str(parameter.dtype),
                    todo="build the model as it was when the checkpoint was taken",
                )
        return found

    def _check_dtypes(self, table: Table, stored: Mapping[str, str]) -> None:
        """Refuse row state that does not fit the room that a table made for it by itself."""
        own = {column.name: column.dtype for column in table.schema().columns[1:]}
        if not all(holds(own[name], dtype) for name, dtype in stored.items()):
            raise InvalidRequestError(
                "a table's row state has numbers in the checkpoint that do not fit here",
                table=table.whole_name,
                checkpoint=dict(stored),
                model=own,
                todo="shard the model with the fused optimizer it was trained with",
            )

    def own_shapes(
        self, stored: Shapes, schemas: Sequence[TableSchema]
    ) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
        """The shapes of row state held here, by table: as stored, for the rows and floats held;
        and the types.

        Raises:
            CorruptDataError: the shape of a column that holds row state is not there.
        """
        cuts = cuts_of(schemas)
        found: dict[str, Any] = {}
        dtypes: dict[str, dict[str, str]] = {}
        for table in self.tables:
            found[table.name] = {}
            dtypes[table.name] = {}
            if table.whole_name not in cuts:
                continue  # dense state
            parts = cuts[table.whole_name]
            for index, column in list(enumerate(parts[0].columns))[1:]:
                shape = stored.get(parts[0].name, {}).get(column.name)
                if shape is None:
                    part = f"row_state_shapes[{parts[0].name!r:.60}]"
                    raise CorruptDataError("dense state lacks a part", part=part)
                rest = state_shape(parts, index, shape, width=table.width)
                found[table.name][column.name] = [table.rows, *rest]
                dtypes[table.name][column.name] = column.dtype
        return found, dtypes

    def load_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[int | str, Any],
        groups: list[dict[str, Any]],
        shapes: Shapes,
        dtypes: Mapping[str, Mapping[str, str]],
        scalars: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Give an optimizer packed state: ``state`` of its parameters by position, of tables the
        ``scalars`` and room for row state of these ``shapes``.

        Raises:
            InvalidRequestError: it does not take it.
        """
        for index, table in self._tables_by_index(optimizer).items():
            existing = table.state_tensors()
            # Row state of another kind of optimizer may come without what this one keeps beside it.
            own = table.scalars() if shapes.get(table.name) else {}
            entries = {**own, **state.get(index, {}), **scalars.get(table.whole_name, {})}
            for key, shape in shapes.get(table.name, {}).items():
                tensor = existing.get(key)
                dtype = TORCH_DTYPES[dtypes[table.name][key]]
                if tensor is None or (tensor.numel(), tensor.dtype) != (math.prod(shape), dtype):
                    tensor = torch.zeros(*shape, dtype=dtype, device=table.parameter.device)
                entries[key] = tensor
            if entries:
                state[index] = entries
        try:
            ordered = in_state_order(state)
            optimizer.load_state_dict({"state": ordered, "param_groups": groups})
        except ValueError as error:
            raise InvalidRequestError(
                "the checkpoint's optimizer does not fit this one", detail=str(error)
            ) from error
        _keep_dtypes(optimizer, state)

    def _by_position(
        self, optimizer: torch.optim.Optimizer, packed: Mapping[str, Any], order: Order
    ) -> tuple[dict[int | str, Any], list[dict[str, Any]]]:
        """Stored optimizer state as this optimizer counts its parameters.

        ``order``: all its parameters as it had them. Before dense state went by names it was stored
        by positions.
        """
        if "state" in packed:
            stored = {index: dict(entries) for index, entries in packed["state"].items()}
            return stored, packed["param_groups"]
        live = self.names_in(optimizer)
        told = names_by_place(order, live)
        saved = [
            self._dense_names(told.get(name, name) for name in group["params"])
            for group in packed["param_groups"]
        ]
        own = [self._dense_names(group) for group in live]
        if own != saved:
            raise InvalidRequestError(
                "the checkpoint's optimizer does not fit this one", checkpoint=saved, given=own,
                todo="give it the same parameters in the same groups",
            )  # fmt: skip
        mine = optimizer.state_dict()["param_groups"]
        groups = [
            {**group, "params": now["params"]}
            for group, now in zip(packed["param_groups"], mine, strict=True)
        ]
        at = {name: index for index, name in enumerate(itertools.chain(*live))}
        state = {at[told.get(name, name)]: dict(held) for name, held in packed["named"].items()}
        return {**state, **packed.get("beside", {})}, groups

    def _tables_by_index(self, optimizer: torch.optim.Optimizer) -> dict[int, Table]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return {
            index: self._by_id[id(parameter)]
            for index, parameter in enumerate(parameters)
            if id(parameter) in self._by_id
        }
