"""A worker's session: tables that live on servers, as torch modules, and batches to train.

    for batch in session.batches():          a lease of the coordinator
        session.prefetch({table: ids})       all rows of the step, and the networks, in one pull
        loss(model(batch)).backward()        modules look into what was pulled
        optimizer.step()                     one push: every row's gradient, and the networks'

Workers go on at their own pace: between its pull and its push others may have changed its rows.

Invariants:
- A row that was looked up is pushed once a step, its gradients added up; a row that was announced
  and not looked up, or only as padding, is not pushed.
- What was pulled is used until the next step or the next announcement, and no longer.
- Nothing is pulled for gradients under ``torch.no_grad``: evaluating leaves nothing behind.
- A batch is reported done after its push has returned.

Not here: where rows are and what happens when servers are lost (client.py), the process around it
(workerprocess.py), networks as rows (dense.py).

# N ids of a lookup, U different ones, D weights of a row
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from holdfast.cluster import dense
from holdfast.cluster.client import Client
from holdfast.cluster.dense import Dense
from holdfast.cluster.message import Message
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.view import View
from holdfast.cluster.wire import Stream
from holdfast.errors import InvalidRequestError

_WAIT_S = 0.005
_DEADLINE_S = 30.0

Mode = Literal["sum", "mean"]
Ids = torch.Tensor | np.ndarray
AskLease = Callable[[int | None], Message]
"""Reports a push as done, if one is given, and asks for the next batch."""


class _Pulled:
    """Rows of one table as they were pulled, and which of them were looked up."""

    def __init__(self, name: str, ids_U: np.ndarray, rows_UD: np.ndarray) -> None:
        self.name = name
        self._ids_U = ids_U
        self._is_used_U = np.zeros(len(ids_U), bool)
        self.rows = torch.from_numpy(rows_UD).requires_grad_(torch.is_grad_enabled())

    def locate(self, ids_N: np.ndarray) -> np.ndarray | None:
        """Where ids are among these; None if one is not."""
        if len(self._ids_U) == 0:
            return ids_N if len(ids_N) == 0 else None
        places_N = np.searchsorted(self._ids_U, ids_N)
        np.minimum(places_N, len(self._ids_U) - 1, out=places_N)
        return places_N if np.array_equal(self._ids_U[places_N], ids_N) else None

    def use(self, places_N: np.ndarray) -> None:
        """These were looked up, and shall be trained."""
        self._is_used_U[places_N] = True

    def gradients(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Ids and gradients of the rows that were looked up."""
        gradient = self.rows.grad
        if gradient is None or not self._is_used_U.any():
            return None
        grads_UD = gradient.numpy()
        if self._is_used_U.all():
            return self._ids_U, grads_UD
        return self._ids_U[self._is_used_U], grads_UD[self._is_used_U]

    def forget(self) -> None:
        """As if nothing had been looked up."""
        self.rows.grad = None
        self._is_used_U[:] = False


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A table's rows for one forward: ``rows[places]`` are those asked for."""

    rows: torch.Tensor
    places: torch.Tensor
    padding: int | None


class Session:
    """What a training function is given in a worker; used by one thread."""

    def __init__(self, client: Client, *, ask_lease: AskLease | None = None) -> None:
        """Without ``ask_lease`` it can evaluate, but has no batches to train."""
        self.client = client
        self.is_over = False
        self._ask_lease = ask_lease
        self._announced: dict[str, _Pulled] = {}
        self._pulled: list[_Pulled] = []
        self._dense: Dense | None = None
        self._is_dense_stale = self._is_dense_held = False
        self._number: int | None = None
        self._control: Stream | None = None

    @classmethod
    def connect(
        cls,
        spec: ClusterSpec,
        *,
        coordinator: str,
        worker: int,
        token: str,
        two_phase: bool,
        is_synchronous: bool = False,
    ) -> Session:
        """Take part as this worker; the coordinator says where servers are and what to train."""
        control = Stream(
            coordinator,
            token=token,
            name=f"worker-{worker}",
            epoch=None,
            deadline_s=_DEADLINE_S,
        )

        def get_view(after: int | None) -> View:
            return View.from_json(control.ask(Message("view", {"after": after})).meta["view"])

        def ask_lease(done: int | None) -> Message:
            return control.ask(Message("lease", {"worker": worker, "done": done}))

        def wait_turn() -> None:
            while control.ask(Message("turn", {"worker": worker})).kind != "turn":
                pass  # the coordinator has waited a while for us

        client = Client(
            spec,
            worker=worker,
            token=token,
            get_view=get_view,
            two_phase=two_phase,
            wait_turn=wait_turn if is_synchronous else None,
        )
        session = cls(client, ask_lease=ask_lease)
        session._control = control
        return session

    def close(self) -> None:
        """End all streams."""
        self.client.close()
        if self._control is not None:
            self._control.close()

    # What a model is built of.

    def embedding_bag(
        self,
        name: str,
        mode: Mode = "sum",
        *,
        padding_idx: int | None = None,
        include_last_offset: bool = False,
    ) -> EmbeddingBag:
        """A table in the place of an ``nn.EmbeddingBag``."""
        return EmbeddingBag(self, name, mode, padding_idx, include_last_offset)

    def embedding(self, name: str, *, padding_idx: int | None = None) -> Embedding:
        """A table in the place of an ``nn.Embedding``."""
        return Embedding(self, name, padding_idx)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """What sends gradients to servers; from now on the model's networks are theirs too."""
        self._dense = Dense(model)
        table = self.client.spec.tables[self._index(dense.NAME)]
        if (table.rows, table.dim) != (self._dense.rows, dense.DIM):
            raise InvalidRequestError(
                "the model's networks are not those of the cluster",
                rows=self._dense.rows,
                cluster_rows=table.rows,
                todo="build the same model in the driver and in every worker",
            )
        self._is_dense_stale, self._is_dense_held = True, table.is_held
        model.register_forward_pre_hook(lambda *_: self._freshen())
        return Optimizer(self, self._dense)

    def first_dense(self, model: nn.Module) -> None:
        """Give servers the first values of the networks; once, before workers start."""
        values_RD = Dense(model).read()
        self.client.assign({dense.NAME: (np.arange(len(values_RD)), values_RD)})

    # A step.

    def prefetch(self, wants: Mapping[str, Ids]) -> None:
        """Announce the ids of the next lookups: all tables, and the networks, are one pull."""
        ids = {name: np.unique(_as_ids(found)) for name, found in wants.items()}
        rows = self._pull(ids)
        self._announced = {name: _Pulled(name, ids[name], rows[name]) for name in ids}
        if torch.is_grad_enabled():
            self._pulled += self._announced.values()

    def look_up(self, name: str, ids: torch.Tensor, padding_idx: int | None) -> _Lookup:
        """The rows for one forward of a table: announced ones, or pulled now."""
        ids_N = _as_ids(ids)
        pulled, places_N = self._find(name, ids_N)
        is_training = torch.is_grad_enabled()
        padding = None
        if padding_idx is not None:
            is_padding_N = ids_N == padding_idx
            if is_padding_N.any():
                padding = int(places_N[is_padding_N.argmax()])
            if is_training:
                pulled.use(places_N[~is_padding_N])
        elif is_training:
            pulled.use(places_N)
        places = torch.from_numpy(places_N).view(ids.shape).to(ids.device)
        return _Lookup(pulled.rows.to(ids.device), places, padding)

    def _find(self, name: str, ids_N: np.ndarray) -> tuple[_Pulled, np.ndarray]:
        announced = self._announced.get(name)
        if announced is not None and (announced.rows.requires_grad or not torch.is_grad_enabled()):
            places_N = announced.locate(ids_N)
            if places_N is not None:
                return announced, places_N
        ids_U, places_N = np.unique(ids_N, return_inverse=True)
        pulled = _Pulled(name, ids_U, self._pull({name: ids_U})[name])
        if torch.is_grad_enabled():
            self._pulled.append(pulled)
        return pulled, places_N

    def _pull(self, ids: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Rows, and with them the networks if they are old."""
        wants = dict(ids)
        if self._dense is not None and self._is_dense_stale:
            wants[dense.NAME] = np.arange(self._dense.rows)
        found = self.client.pull(wants)
        if self._dense is not None and self._is_dense_stale:
            values_RD = found.pop(dense.NAME)
            self._dense.write(values_RD)
            self._is_dense_stale = False
            if self._is_dense_held and self._ask_lease is not None:
                self.client.hold(dense.NAME, values_RD)
        return found

    def _freshen(self) -> None:
        """Before a forward: the networks are as of after the last step, or later."""
        if self._is_dense_stale:
            self._pull({})

    def forget(self) -> None:
        """Forget gradients of rows; what was announced stays."""
        self._pulled = [pulled for pulled in self._pulled if pulled in self._announced.values()]
        for pulled in self._pulled:
            pulled.forget()

    def push(self, dense_gradients: tuple[np.ndarray, np.ndarray]) -> None:
        """Send the gradients of a step; rows pulled for it are used no more."""
        if self._number is None:
            raise InvalidRequestError(
                "a step belongs to a batch, and a batch has one step",
                todo="take one step for each of session.batches()",
            )
        gradients = _added_up(self._pulled)
        if len(dense_gradients[0]):
            gradients[dense.NAME] = dense_gradients
        number, self._number = self._number, None
        self._pulled, self._announced = [], {}
        if gradients:
            self.client.push(number, gradients)
            self._is_dense_stale = True

    # Batches.

    def batches(self) -> Iterator[int]:
        """Numbers of batches to train, until all are done by somebody.

        Asking for the next one reports the one before as done, whether a step was taken or not.
        """
        if self._ask_lease is None:
            raise InvalidRequestError("this session has no batches: it was not started as a worker")
        done: int | None = None
        while True:
            answer = self._ask_lease(done)
            done = None
            if answer.kind == "over":
                break
            if answer.kind == "wait":
                time.sleep(_WAIT_S)
                continue
            number = self._number = int(answer.meta["number"])
            yield int(answer.meta["batch"])
            self._number = None
            done = number
        self.is_over = True
        self.client.drain()

    def _index(self, name: str) -> int:
        index = self.client.spec.index
        if name not in index:
            raise InvalidRequestError("no such table", table=name, tables=list(index))
        return index[name]

    def table_dim(self, name: str) -> int:
        """The width of a table's rows.

        Raises:
            InvalidRequestError: there is no such table.
        """
        return self.client.spec.tables[self._index(name)].dim


class EmbeddingBag(nn.Module):
    """Stands where an ``nn.EmbeddingBag`` would; its rows are on servers."""

    def __init__(
        self,
        session: Session,
        name: str,
        mode: Mode,
        padding_idx: int | None,
        include_last_offset: bool,
    ) -> None:
        super().__init__()
        if mode not in ("sum", "mean"):
            raise InvalidRequestError("a bag is a sum or a mean", mode=mode)
        self.embedding_dim = session.table_dim(name)
        self.name, self.mode, self.padding_idx = name, mode, padding_idx
        self.include_last_offset = include_last_offset
        self._look_up = functools.partial(session.look_up, name, padding_idx=padding_idx)

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The sum or mean of the rows of each bag, as [bags, D]."""
        if input.dim() == 2 and input.shape[1] == 0:  # torch refuses bags that are all empty
            return torch.zeros(len(input), self.embedding_dim, device=input.device)
        found = self._look_up(input)
        return functional.embedding_bag(
            found.places,
            found.rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=found.padding,
        )

    def extra_repr(self) -> str:
        """For ``repr``."""
        return f"{self.name!r}, {self.embedding_dim}, mode={self.mode!r}"


class Embedding(nn.Module):
    """Stands where an ``nn.Embedding`` would; its rows are on servers."""

    def __init__(self, session: Session, name: str, padding_idx: int | None) -> None:
        super().__init__()
        self.embedding_dim = session.table_dim(name)
        self.name, self.padding_idx = name, padding_idx
        self._look_up = functools.partial(session.look_up, name, padding_idx=padding_idx)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The row of each id, as the input's shape and D."""
        found = self._look_up(input)
        return functional.embedding(found.places, found.rows, padding_idx=found.padding)

    def extra_repr(self) -> str:
        """For ``repr``."""
        return f"{self.name!r}, {self.embedding_dim}"


class Optimizer:
    """Stands where a torch optimizer would; servers apply theirs to what it sends."""

    def __init__(self, session: Session, networks: Dense) -> None:
        self._session, self._networks = session, networks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self._networks.zero_grad()
        self._session.forget()

    def step(self, closure: Any = None) -> None:
        """Push the gradients of this batch; they are forgotten here."""
        if closure is not None:
            raise InvalidRequestError("servers take one step a batch: no closure")
        self._session.push(self._networks.gradients())
        self._networks.zero_grad()


def _as_ids(ids: Ids) -> np.ndarray:
    if isinstance(ids, torch.Tensor):
        ids = ids.detach().cpu().numpy()
    if ids.dtype.kind not in "iu":
        raise InvalidRequestError("ids are whole numbers", dtype=str(ids.dtype))
    return ids.reshape(-1).astype(np.int64, copy=False)


def _added_up(pulled: list[_Pulled]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For each table the ids that were looked up, each once, and the sum of their gradients."""
    by_table: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for each in pulled:
        found = each.gradients()
        if found is not None:
            by_table.setdefault(each.name, []).append(found)
    gradients = {}
    for name, parts in by_table.items():
        ids_U, grads_UD = parts[0]
        if len(parts) > 1:
            ids_U, places_N = np.unique(np.concatenate([p[0] for p in parts]), return_inverse=True)
            grads_ND = np.concatenate([p[1] for p in parts])
            grads_UD = np.zeros((len(ids_U), grads_ND.shape[1]), np.float32)
            np.add.at(grads_UD, places_N, grads_ND)
        gradients[name] = (ids_U, grads_UD)
    return gradients
