"""One checkpoint of a cluster in the making: copied at one moment, stored by all, committed.

    prepare -> pause batches -> snapshot everywhere (the only stall) -> go on
            -> store everywhere -> ONE catalog that names all objects

Invariants:
- No batch is out while servers copy, and no server changes between the first and the last copy.
- Nothing is committed unless every server has stored its part.
- Nothing is written for an attempt that ended once the next has begun; that one deletes it.

Not here: when, which rows and which codec (checkpoints.py), a server's part (keeper.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast import events
from holdfast.checkpoint.format import tree
from holdfast.checkpoint.format.catalog import CheckpointEntry, SegmentEntry
from holdfast.checkpoint.format.checksum import checksum
from holdfast.checkpoint.format.codec import parse_codec
from holdfast.checkpoint.format.object import DENSE, ROWS, object_name
from holdfast.checkpoint.format.stored_rows import entry_from_json
from holdfast.checkpoint.planning.bases import BaseChoice
from holdfast.checkpoint.planning.codecs import CodecPlan, column_codecs, state_codec_name
from holdfast.checkpoint.planning.retention import Keep
from holdfast.checkpoint.planning.save_plan import RunRules, SavePlan
from holdfast.checkpoint.selecting.priority import Priority, large_tables
from holdfast.checkpoint.store.append import append_checkpoint
from holdfast.checkpoint.store.writer import RunWriter
from holdfast.cluster.cluster import Cluster
from holdfast.cluster.dense import NAME as NETWORKS
from holdfast.cluster.message import Message
from holdfast.cluster.spec import ClusterSpec
from holdfast.cluster.store import (
    STEP,
    Codecs,
    Place,
    codecs_to_json,
    schema_of,
    sharding_of,
)
from holdfast.cluster.stored_state import EXTRA, layout_of
from holdfast.cluster.uses import PriorityOrder
from holdfast.errors import HoldfastError, InvalidRequestError, UnavailableError
from holdfast.model.placement import Placement

_TICK_S = 0.2


@dataclass(frozen=True, slots=True)
class _Copied:
    """What servers have in memory: a checkpoint that may still come to nothing."""

    plan: SavePlan
    extra: Mapping[str, Any]
    rows: int
    bytes: int
    stall_s: float
    started: float


class Attempts:
    """Tries to save a cluster; what every attempt has in common."""

    def __init__(
        self,
        cluster: Cluster,
        writer: RunWriter,
        place: Place,
        *,
        keep: Keep,
        patience_s: float,
        is_wanted: Callable[[], bool],
        priority: Priority | None = None,
    ) -> None:
        """``is_wanted`` turns false when servers are lost and the attempt is to end; ``priority``
        None: every changed row is saved."""
        self.timeline = secrets.token_hex(8)  # numbers of workers and pushes are of this driver
        self.schemas = tuple(schema_of(table) for table in cluster.spec.tables)
        self._cluster = cluster
        self._coordinator = cluster.coordinator
        self._spec: ClusterSpec = cluster.spec
        self._writer = writer
        self._place = place
        self._keep = keep
        self._patience_s = patience_s
        self._is_wanted = is_wanted
        self._priority = None if priority is None else order_for(priority, cluster.spec).to_json()
        self._has_failed = False
        self.committing: int | None = None
        """The step of the last commit that was tried; its answer may have been lost."""

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt was given up."""
        return self._has_failed

    def save(
        self,
        step: int | None,
        choice: BaseChoice,
        codecs: CodecPlan,
        *,
        committed: int | None,
        timeout_s: float,
    ) -> CheckpointEntry | None:
        """Make a checkpoint; None if nothing was trained since the last one, ``committed``.

        Raises:
            HoldfastError: it was given up, and nothing has changed.
        """
        try:
            self._wait_steady(timeout_s)
            copied = self._copy(step, choice, codecs, committed)
            return None if copied is None else self._store(copied)
        except BaseException:
            self._has_failed = True
            raise

    def _wait_steady(self, timeout_s: float) -> None:
        ends_at = time.monotonic() + timeout_s
        while not self._coordinator.is_steady:
            self._check_wanted()
            self._coordinator.check()
            if time.monotonic() > ends_at:
                raise UnavailableError("servers lack rows, and are not saved without them")
            time.sleep(_TICK_S)

    def _check_wanted(self) -> None:
        if not self._is_wanted():
            raise UnavailableError("the checkpoint was given up: servers were lost")

    def _everybody(self, kind: str, meta: Mapping[str, Any]) -> dict[int, Message]:
        return {server: Message(kind, dict(meta)) for server in range(self._spec.servers)}

    def _ask(self, messages: Mapping[int, Message]) -> dict[int, Message]:
        """Ask servers; one that cannot answer ends this checkpoint."""
        self._check_wanted()
        try:
            return self._coordinator.ask_all(messages)
        except HoldfastError as error:
            raise UnavailableError(
                "the checkpoint was given up: not every server could take part", error=str(error)
            ) from error

    def codecs(self, plan: CodecPlan) -> Codecs:
        """The codec of each column of each table; networks and counts are never rounded."""
        whole = parse_codec("fp32")
        return {
            schema.name: [
                whole if column.name == STEP or schema.name == NETWORKS else codec
                for column, codec in zip(schema.columns, column_codecs(schema, plan), strict=True)
            ]
            for schema in self.schemas
        }

    def _copy(
        self, step: int | None, choice: BaseChoice, codecs: CodecPlan, committed: int | None
    ) -> _Copied | None:
        """Have every server copy its rows at one moment; None: this step is saved already."""
        coordinator = self._coordinator
        ready = {"codecs": codecs_to_json(self.codecs(codecs)), "priority": self._priority}
        self._ask(self._everybody("prepare", ready))
        self._clean()
        started = time.perf_counter()
        try:
            is_quiet = coordinator.crew.pause(self._patience_s, is_wanted=self._is_wanted)
            self._check_wanted()
            if not is_quiet:
                raise UnavailableError("batches that are out were not done in time",
                                       waited_s=self._patience_s)  # fmt: skip
            step, batches = self._moment(step)
            if committed is not None and step <= committed:
                return None
            epoch = coordinator.view.epoch
            meta = {
                "step": step,
                "kind": choice.kind,
                "since": choice.since,
                "committed": committed,
                "priority": self._priority,
            }
            self._cluster.log.emit(
                events.SaveStarted(step=step, checkpoint=choice.kind, reason=choice.reason)
            )
            answers = self._ask(self._everybody("snapshot", meta))
            if coordinator.view.epoch != epoch:
                raise UnavailableError("the checkpoint was given up: the members changed")
        finally:
            coordinator.crew.resume()
        stall_s = time.perf_counter() - started
        rows = sum(int(answer.meta["rows"]) for answer in answers.values())
        size = sum(int(answer.meta["bytes"]) for answer in answers.values())
        self._cluster.log.emit(events.SaveStaged(step=step, rows=rows, bytes=size, stall_s=stall_s))
        applied = [_known(answers[server].arrays[0]) for server in sorted(answers)]
        extra = {
            "timeline": self.timeline,
            "layout": layout_of(self._spec),
            "batches": batches,
            "applied": applied,
        }
        last = self._writer.catalog.last
        plan = SavePlan(
            step=step,
            choice=choice,
            last_base=step if last is None else last.base,
            codecs=codecs,
            schemas=self.schemas,
            rules=RunRules(self._keep, placement=_common_placement(self._spec)),
            number=self._writer.next_number,
            token=secrets.token_hex(4),
        )
        return _Copied(plan, extra, rows, size, stall_s, started)

    def _moment(self, step: int | None) -> tuple[int, Mapping[str, Any] | None]:
        """How many batches are done, and which."""
        leases = self._coordinator.leases
        if leases is None:
            if step is None:
                raise InvalidRequestError(
                    "nothing is trained here yet", todo="say which step it is: save(step=0)"
                )
            return step, None
        return leases.done_up_to if step is None else step, leases.state()

    def _clean(self) -> None:
        """Delete what attempts that were given up have written; nobody writes to it any more."""
        if not self._has_failed:
            return
        storage, catalog = self._writer.storage, self._writer.catalog
        named = {name for name, _ in catalog.objects}
        folder = object_name(self._writer.next_number, ROWS, "").rpartition("/")[0]
        for item in storage.list(f"{folder}/"):
            if item.name not in named:
                storage.delete(item.name)
        self._has_failed = False

    def _store(self, copied: _Copied) -> CheckpointEntry:
        plan = copied.plan
        codecs = codecs_to_json(self.codecs(plan.codecs))
        meta = {"step": plan.step, "place": self._place.to_json(), "codecs": codecs}
        names = {
            server: object_name(plan.number, ROWS, f"{plan.token}-{server}")
            for server in range(self._spec.servers)
        }
        self._ask({s: Message("store", {**meta, "name": name}) for s, name in names.items()})
        stored = self._wait_for_jobs()
        segments: list[SegmentEntry] = []
        objects: list[tuple[str, int]] = []
        for server, name in names.items():
            segments += [entry_from_json(value) for value in stored[server]["segments"]]
            if stored[server]["segments"]:
                objects.append((name, int(stored[server]["bytes"])))
        with self._writer.new_object(DENSE) as builder:
            data = tree.to_bytes(*tree.flatten(_dense(copied.extra)))
            dense = builder.append(DENSE, "dense", (data,), checksum(data))
            objects.append((builder.name, builder.close()))
        entry = CheckpointEntry(
            step=plan.step,
            ordinal=0,
            kind=plan.kind,
            base=plan.base,
            schema=0,
            time=self._writer.clock(),
            codec=plan.codecs.weights.name,
            state_codec=state_codec_name(self.schemas, plan.codecs),
            rows=copied.rows,
            row_bytes=sum(segment.extent.bytes for segment in segments),
            bytes=sum(size for _, size in objects),
            full_bytes=sum(t.rows * t.row_bytes for t in self.schemas) + len(data),
            stall_s=copied.stall_s,
            reason=plan.choice.reason,
            dense=dense,
            build_s=time.perf_counter() - copied.started,
        )
        return self._commit(copied, entry, tuple(segments), tuple(objects))

    def _wait_for_jobs(self) -> dict[int, Mapping[str, Any]]:
        stored: dict[int, Mapping[str, Any]] = {}
        waiting = set(range(self._spec.servers))
        while waiting:
            answers = self._ask({server: Message("job") for server in sorted(waiting)})
            for server, answer in answers.items():
                if "error" in answer.meta:
                    raise UnavailableError(
                        "a server could not store its rows",
                        server=server,
                        error=answer.meta["error"],
                    )
                if answer.meta["is_over"]:
                    stored[server] = answer.meta
                    waiting.discard(server)
        return stored

    def _commit(
        self,
        copied: _Copied,
        entry: CheckpointEntry,
        segments: tuple[SegmentEntry, ...],
        objects: tuple[tuple[str, int], ...],
    ) -> CheckpointEntry:
        self._check_wanted()
        self.committing = entry.step
        appended = append_checkpoint(self._writer, copied.plan, entry, segments, objects)
        appended.emit(self._cluster.log, durable_s=time.perf_counter() - copied.started)
        return appended.entry


def order_for(rules: Priority, spec: ClusterSpec) -> PriorityOrder:
    """What servers are told of a priority: it is for the largest tables, and never for networks.

    >>> from holdfast.cluster.spec import TableSpec
    >>> sizes = {"users": 999, "genders": 3, NETWORKS: 500}
    >>> tables = [TableSpec(name, rows, 4, Placement(3), "none") for name, rows in sizes.items()]
    >>> order_for(Priority(by="mfu"), ClusterSpec(tuple(tables))).tables
    ('users',)
    """
    rows = {table.name: table.rows for table in spec.tables if table.name != NETWORKS}
    return PriorityOrder(rules, tuple(large_tables(rows, rules.share)))


def _known(applied_W: Any) -> list[int]:
    """Numbers of pushes up to the last worker that pushed."""
    numbers = [int(number) for number in applied_W]
    while numbers and numbers[-1] < 0:
        numbers.pop()
    return numbers


def _common_placement(spec: ClusterSpec) -> Placement | None:
    """What a catalog says of all tables alike: None where they are placed differently, as
    networks are. Servers know their own tables' and need no word of the catalog."""
    placements = {sharding_of(table.placement) for table in spec.tables}
    found = placements.pop()
    return found if not placements and found.groups == 1 else None


def _dense(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but rows, with the parts that every checkpoint has; networks are rows here."""
    return {
        "model": {},
        "optimizers": {},
        "row_state_shapes": {},
        "rng": {},
        "extras": {EXTRA: dict(extra)},
    }
