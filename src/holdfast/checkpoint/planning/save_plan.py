"""The plan of a save: everything that is decided before a row is copied.

    history, settings, changed bytes -> SavePlan -> snapshot, store, commit

Invariants:
- A plan is plain values and never changes; what becomes of it is a value of its own.
- On several ranks all carry out the same plan: rank 0 makes it and sends it as bytes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from holdfast.checkpoint.format.annotations import Annotations
from holdfast.checkpoint.format.catalog import BASE
from holdfast.checkpoint.format.codec import Codec
from holdfast.checkpoint.planning.bases import SINCE_BASE, BaseChoice
from holdfast.checkpoint.planning.codecs import CodecPlan
from holdfast.checkpoint.planning.retention import Keep
from holdfast.errors import UnavailableError
from holdfast.model.placement import Placement
from holdfast.model.schema import TableSchema


@dataclass(frozen=True, slots=True)
class RunRules:
    """What holds for every checkpoint of a run, by its settings."""

    keep: Keep = dataclasses.field(default_factory=Keep)
    has_grid: bool = False
    placement: Placement | None = None
    """Rows of each server are stored apart; None: the rows are not divided among servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """What one checkpoint holds, how it is stored, and what it replaces."""

    step: int
    choice: BaseChoice
    last_base: int
    """The step of the run's last base; ``step`` where there is none."""
    codecs: CodecPlan
    schemas: tuple[TableSchema, ...]
    """All tables, with those that only other ranks hold."""
    rules: RunRules
    at: int | None = None
    """The committed step that the model descends from."""
    rewind_to: int | None = None
    """All checkpoints after this step are dropped, because training went on from there."""
    number: int = 0
    """Of the catalog that objects are written for."""
    token: str = ""
    """A part of the names of all objects that ranks write for this save."""
    is_saved: bool = False
    """This step is committed already: only its annotations are added."""
    annotations: Annotations = dataclasses.field(default_factory=Annotations)
    """What the user says of it."""

    @property
    def kind(self) -> str:
        """Base or delta."""
        return self.choice.kind

    @property
    def base(self) -> int:
        """The step of the base that a restore begins with."""
        return self.step if self.kind == BASE else self.last_base

    @property
    def replaces_since(self) -> int | None:
        """The step since which this checkpoint holds every changed row; None: only since the last
        checkpoint, or it is a base."""
        return self.last_base if self.choice.since == SINCE_BASE else None

    def to_bytes(self) -> bytes:
        """What rank 0 tells the other ranks; tables and rules they know."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("choice", "codecs", "schemas", "rules", "annotations")
        }
        values["annotations"] = dataclasses.astuple(self.annotations)
        values["choice"] = dataclasses.asdict(self.choice)
        values["codecs"] = dataclasses.asdict(self.codecs)
        return json.dumps(values).encode()

    @classmethod
    def from_bytes(
        cls, data: bytes, *, schemas: tuple[TableSchema, ...], rules: RunRules
    ) -> SavePlan:
        """What ``to_bytes`` wrote, with what this rank knows.

        Raises:
            UnavailableError: rank 0 could not decide.
        """
        values = json.loads(data)
        if "error" in values:
            raise UnavailableError("rank 0 could not begin a checkpoint", error=values["error"])
        codecs = values.pop("codecs")
        metrics, metadata = values.pop("annotations")
        state = codecs["state"]
        return cls(
            choice=BaseChoice(**values.pop("choice")),
            codecs=CodecPlan(
                Codec(**codecs["weights"]),
                None if state is None else Codec(**state),
                codecs["reason"],
            ),
            schemas=schemas,
            rules=rules,
            annotations=Annotations(tuple(map(tuple, metrics)), metadata),
            **values,
        )
