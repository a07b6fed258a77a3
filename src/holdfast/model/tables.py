"""A model's tables and their row state, found by themselves.

First thing in the flow: from a model and its optimizers to its tables, each a set of columns over
the same rows (the weights first, then the optimizer's row state). What is a table is decided here
and nowhere else; what is left is dense state (model_state.py).

A process may hold a table whole or a shard of it (shard.py). A ``Table`` is what it holds: its
rows are local, counted from 0, and only its shard knows what they are called elsewhere. A library
that shards models by itself brings tables of its own: subclasses that override some methods
(*adapters*), found by the module that ``ADAPTERS`` names for its package.

Invariants:
- Columns of a table share rows: row ``i`` of every column is one record.
- A table's ``name`` is that of the stored table, and unique in a process.

Not here: which rows changed (checkpoint/tracking/tracker.py), how rows become bytes
(checkpoint/format/codec.py).

# N rows, D floats of one column
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.errors import InvalidRequestError
from holdfast.kernels.rows import gather as row_kernels
from holdfast.model import devices
from holdfast.model.dtypes import array_dtype, as_bits, fill_nan
from holdfast.model.names import plain_name
from holdfast.model.placement import Placement
from holdfast.model.schema import DTYPE_BYTES, Column, TableSchema
from holdfast.model.shard import Shard
from holdfast.model.tensors import as_array, as_tensor, dtype_name, is_column_dtype

# Takes local rows that training has just changed; a tensor where they are on a device.
Mark = Callable[[np.ndarray | torch.Tensor], None]
ADAPTERS: dict[str, str] = {"torchrec": "holdfast.model.torchrec"}
"""By package: the module whose ``claim(model, optimizers)`` returns what it ``Claimed`` and whose
``unwrap(optimizer)`` the torch optimizers inside one of the package's, or None if it is not one. It
is asked only where the package is loaded."""


class Table:
    """What a process holds of one embedding table: a parameter and its optimizer's row state.

    Adapters override ``weight``, ``state_tensors``, ``watch``, ``settle``, ``is_current``,
    ``scalars`` and ``load_scalars``, and ``make_room`` where row state appears late.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter | None,
        modules: Sequence[nn.Module] = (),
        optimizer: torch.optim.Optimizer | None = None,
        *,
        shard: Shard | None = None,
    ) -> None:
        """``name`` is the whole table's; ``shard`` None: all of it is held."""
        if shard is None:
            assert parameter is not None
            shard = Shard(int(parameter.shape[0]), int(parameter.shape[1]))
        self.whole_name = name if shard.table is None else shard.table
        self.shard = shard
        self._parameter = parameter
        self.modules = list(modules)
        self.optimizer = optimizer
        self.rows = shard.local_rows
        """How many are held here."""
        self.width = len(shard.floats)
        self.name = shard.schema(self.whole_name).name
        if parameter is not None and tuple(parameter.shape) != (self.rows, self.width):
            raise InvalidRequestError(
                "a shard has another shape than its parameter",
                table=self.whole_name,
                shard=(self.rows, self.width),
                parameter=tuple(parameter.shape),
            )
        if parameter is not None and not is_column_dtype(parameter.dtype):
            raise InvalidRequestError(
                "a table of numbers that are not stored by rows",
                table=self.whole_name,
                dtype=str(parameter.dtype),
                known=list(DTYPE_BYTES),
                todo="leave it out of shards=: it then goes along whole",
            )

    # What adapters override.

    def weight(self) -> torch.Tensor:
        """The weights held: [rows, width], contiguous, sharing memory with the model."""
        return self.parameter.detach()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The optimizer's row state that exists now, sharing memory, by the names torch.optim has.

        [rows, ...], contiguous, sorted by name (some optimizers create it late).
        """
        if self.optimizer is None:
            return {}
        state = self.optimizer.state.get(self.parameter, {})
        return {
            key: value for key, value in sorted(state.items()) if is_row_state(value, self.rows)
        }

    @property
    def watch(self) -> Callable[[Mark], Callable[[], None]] | None:
        """How changes are heard of: called with ``mark``, answers with what ends it. None: by the
        gradient of its parameter (checkpoint/tracking/)."""
        return None

    def settle(self) -> None:
        """Have every change up to now marked, by tables that have a ``watch``: those that are told
        by a device may still be on their way."""

    def follow(self, found: Table) -> None:
        """Take over what the model has now in the place of this table, of the same shape: another
        module or weight, or an optimizer that the parameter was added to later."""
        self._parameter = found._parameter
        self.modules = found.modules
        self.optimizer = found.optimizer

    def is_current(self) -> bool:
        """Whether this is still what the model trains."""
        return all(
            module.weight is self._parameter and (_is_table(module) or self.rows == 0)
            for module in self.modules
        )

    def scalars(self) -> dict[str, Any]:
        """Optimizer state of the whole table: not rows. The same wherever a shard of it is held."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state.get(self.parameter, {})
        return {key: value for key, value in state.items() if not is_row_state(value, self.rows)}

    def load_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Take over what ``scalars`` gave. Of torch's optimizers model_state.py does it."""

    def make_room(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Have row state of these shapes, zeros where it is new. Of torch's optimizers
        model_state.py does it."""

    # What holds for every table.

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter, of tables that have one."""
        assert self._parameter is not None
        return self._parameter

    @property
    def has_parameter(self) -> bool:
        """Whether it is trained by torch's own optimizers."""
        return self._parameter is not None

    def schema(self) -> TableSchema:
        """The stored table its rows belong to, with the columns as of now."""
        state = [
            Column(key, math.prod(value.shape[1:]), dtype_name(value.dtype))
            for key, value in self.state_tensors().items()
        ]
        dtype = dtype_name(self.weight().dtype)
        return self.shard.schema(self.whole_name, tuple(state), dtype=dtype)

    def state_shapes(self) -> dict[str, list[int]]:
        """The shape of row state as if all rows were held."""
        return {
            key: [self.shard.rows, *value.shape[1:]] for key, value in self.state_tensors().items()
        }

    def tensors(self) -> list[torch.Tensor]:
        """Every column as a [rows, width] tensor that shares memory, in schema order."""
        with torch.no_grad():
            columns = [self.weight(), *self.state_tensors().values()]
            widths = [column.width for column in self.schema().columns]
            return [
                column.detach().view(self.rows, width)
                for column, width in zip(columns, widths, strict=True)
            ]

    def arrays(self) -> list[np.ndarray]:
        """Every column as an array (dtypes.py) that shares memory; a column on another device is
        copied to the host."""
        return [as_array(column) for column in self.tensors()]

    def load_arrays(self, arrays: Sequence[np.ndarray]) -> None:
        """Take over what was written into ``arrays()``; a column on the host shares it already."""
        for column, array_ND in zip(self.tensors(), arrays, strict=True):
            if not devices.is_on_host(column):
                column.copy_(as_tensor(array_ND))

    @property
    def device(self) -> devices.Device | None:
        """The device that holds it, or a column of it; None: host memory."""
        columns = [self.weight(), *self.state_tensors().values()]
        return next(filter(None, map(devices.device_of, columns)), None)

    def copy_on_device(self, rows: np.ndarray | range) -> list[devices.DeviceCopy]:
        """A copy of some rows, a column each, where they are. Waits for no device."""
        if isinstance(rows, range):
            return [devices.join([column[rows.start : rows.stop]]) for column in self.tensors()]
        return [devices.gather(column, rows) for column in self.tensors()]

    def gather(self, ids_N: np.ndarray, out: Sequence[np.ndarray]) -> None:
        """Copy some rows, every column, into the caller's arrays."""
        for column, out_ND in zip(self.tensors(), out, strict=True):
            if devices.is_on_host(column):
                row_kernels.gather(as_bits(as_array(column)), ids_N, as_bits(out_ND))
            else:
                devices.gather(column, ids_N).to_host(as_tensor(out_ND)).wait()

    def hash_rows(self, ids_N: np.ndarray | None = None) -> np.ndarray:
        """A 64-bit hash of every row with its state, or of some rows."""
        if ids_N is None:
            arrays = self.arrays()
        else:
            columns = self.schema().columns
            arrays = [np.empty((len(ids_N), c.width), array_dtype(c.dtype)) for c in columns]
            self.gather(ids_N, arrays)
        hashes_N = np.zeros(len(arrays[0]), np.uint64)
        for array_ND in arrays:
            row_kernels.hash_rows(array_ND, hashes_N)
        return hashes_N

    def gather_range(self, start: int, stop: int, out: Sequence[np.ndarray]) -> None:
        """Copy the rows ``start`` to ``stop``, every column, into the caller's arrays."""
        for column, out_ND in zip(self.tensors(), out, strict=True):
            if devices.is_on_host(column):
                np.copyto(as_bits(out_ND), as_bits(as_array(column)[start:stop]))
            else:
                devices.join([column[start:stop]]).to_host(as_tensor(out_ND)).wait()


def has_row_state_shape(shape: Sequence[int], dtype: torch.dtype, rows: int) -> bool:
    """Whether numbers of this shape and type are some for every row of a table."""
    is_by_rows = len(shape) >= 1 and shape[0] == rows and math.prod(shape) >= rows
    return is_column_dtype(dtype) and is_by_rows


def is_row_state(value: object, rows: int) -> bool:
    """Whether an optimizer's state entry holds numbers for every row of a table."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and has_row_state_shape(value.shape, value.dtype, rows)
        and value.is_contiguous()
    )


def has_table_shape(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether an embedding's weight of this shape and type is a table."""
    return is_column_dtype(dtype) and len(shape) == 2 and math.prod(shape) > 0


def _is_table(module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return False
    weight = module.weight
    return (
        isinstance(weight, nn.Parameter)
        and has_table_shape(weight.shape, weight.dtype)
        and weight.is_contiguous()
    )


@dataclass(frozen=True, slots=True)
class Loading:
    """What was wrong with a state dict: names it lacks, names it has too many, what did not fit."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Claimed:
    """What an adapter takes charge of: tables, and the names they have in ``state_dict()``.

    ``load_network`` loads a state dict without them, where the model's own loading insists on them.
    """

    tables: tuple[Table, ...] = ()
    names: frozenset[str] = frozenset()
    load_network: Callable[[nn.Module, Mapping[str, Any]], Loading] | None = None


def claim_tables(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Claimed:
    """What adapters of loaded packages take charge of."""
    found = Claimed()
    for adapter in _adapters():
        claimed: Claimed = adapter.claim(model, optimizers)
        found = Claimed(
            (*found.tables, *claimed.tables),
            found.names | claimed.names,
            claimed.load_network or found.load_network,
        )
    return found


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside one of a loaded package; itself, if there are none to find."""
    for adapter in _adapters():
        inside: list[torch.optim.Optimizer] | None = adapter.unwrap(optimizer)
        if inside is not None:
            return inside
    return [optimizer]


def _adapters() -> list[ModuleType]:
    return [import_module(home) for package, home in ADAPTERS.items() if package in sys.modules]


def find_owners(
    optimizers: Iterable[torch.optim.Optimizer],
) -> dict[int, list[torch.optim.Optimizer]]:
    """The optimizers of every parameter, by the parameter's identity."""
    owners: dict[int, list[torch.optim.Optimizer]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                known = owners.setdefault(id(parameter), [])
                if not any(optimizer is other for other in known):
                    known.append(optimizer)
    return owners


def find_tables(
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    shards: Mapping[str, Shard] | None = None,
    is_replicated: bool = False,
) -> list[Table]:
    """The model's tables in the order of its modules, each named as in the plain model's
    ``state_dict()`` (names.py).

    Two modules that share one weight are one table. Embeddings that are not contiguous, or of a
    type that no column has (schema.py), are not tables: they go along whole as dense state.
    ``shards`` says by the names of parameters which of them are parts of larger tables; the others
    are whole, and the same in every process if ``is_replicated``.

    Raises:
        InvalidRequestError: a table is in two optimizers, or there is no such parameter.
    """
    owners = find_owners(optimizers)
    left = {plain_name(name): shard for name, shard in (shards or {}).items()}
    found: dict[int, Table] = {}
    for path, module in model.named_modules():
        for kind, weight in module.named_parameters(recurse=False):
            name = plain_name(f"{path}.{kind}" if path else kind)
            shard = left.pop(name, None)
            if shard is None and not (kind == "weight" and _is_table(module)):
                continue
            if id(weight) in found:
                found[id(weight)].modules.append(module)
                continue
            if hasattr(weight, "placements"):  # a DTensor: FSDP, tensor parallelism
                raise InvalidRequestError(
                    "a table is a distributed tensor",
                    table=name,
                    todo="leave the tables out of it, or hold local tensors and declare shards=",
                )
            if len(owners.get(id(weight), ())) > 1:
                raise InvalidRequestError(
                    "a table is in two optimizers", table=name, todo="give each table one optimizer"
                )
            if shard is None:
                rows, width = weight.shape
                shard = Shard(int(rows), int(width), is_replicated=is_replicated)
            modules = [module] if isinstance(module, nn.Embedding | nn.EmbeddingBag) else []
            optimizer = next(iter(owners.get(id(weight), ())), None)
            found[id(weight)] = Table(name, weight, modules, optimizer, shard=shard)
    if left:
        raise InvalidRequestError(
            "the model has no such parameter", shards=sorted(left), todo="name them as state_dict()"
        )
    return list(found.values())


def lose_rows(tables: Iterable[Table], placement: Placement, servers: Iterable[int]) -> None:
    """What a failure does: the rows of these servers, with their state, are gone (NaN)."""
    lost = list(servers)
    for table in tables:
        arrays = table.arrays()  # not through torch, which would count it as a write of training
        for server in lost:
            ids_N = placement.rows_of(server, table.rows)
            for array_ND in arrays:
                fill_nan(array_ND, ids_N)
        table.load_arrays(arrays)
