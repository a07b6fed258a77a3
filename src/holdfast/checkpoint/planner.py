"""What the next checkpoint of a run is: base or delta, in which codecs, by the run's history.

    catalog + lineage -> history -> base or delta, codecs -> SavePlan

Joins the pure deciders (checkpoint/planning/bases.py, checkpoint/planning/bits.py, strategy.py)
with what one process knows and they cannot: what it has said last, and sizes that are worked out
ahead of a stall.

Invariant: of many ranks only the one that commits plans, so that there is one opinion.

Not here: which history the model has (checkpoint/planning/lineage.py), how ranks hear of a plan
(checkpoint/ranks/agreement.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from holdfast import events
from holdfast.checkpoint.format.annotations import Annotations
from holdfast.checkpoint.format.catalog import Catalog
from holdfast.checkpoint.planning.bases import (
    BaseChoice,
    Gathered,
    Measured,
    gather,
    measure,
    plan_checkpoint,
    restore_sizes,
)
from holdfast.checkpoint.planning.codecs import CodecPlan, plan_codec, state_codec_name
from holdfast.checkpoint.planning.lineage import Lineage
from holdfast.checkpoint.planning.retention import as_keep
from holdfast.checkpoint.planning.save_plan import RunRules, SavePlan
from holdfast.checkpoint.ranks.agreement import ChangedBytes
from holdfast.checkpoint.settings import Settings
from holdfast.checkpoint.store.writer import RunWriter
from holdfast.checkpoint.strategy import Strategy
from holdfast.model.schema import TableSchema


class Planner:
    """Plans a run's checkpoints, one after the other."""

    def __init__(self, strategy: Strategy, settings: Settings, log: events.EventLog) -> None:
        self._strategy = strategy
        self._settings = settings
        self._log = log
        self.rules = RunRules(
            as_keep(settings.keep), strategy.extract is not None, settings.placement
        )
        self._codecs: CodecPlan | None = None
        self._sizes: tuple[int, tuple[int, int]] = (-1, (0, 0))

    def plan_codec(self, *, restores: int) -> CodecPlan:
        """The codecs after so many restores.

        Raises:
            InvalidRequestError: there is no such codec.
        """
        settings = self._settings
        return plan_codec(
            settings.codec if settings.codec is not None else self._strategy.codec,
            settings.state_codec,
            expected_restores=settings.restores,
            restores=restores,
            table=settings.bits_table,
        )

    def plan(
        self,
        writer: RunWriter,
        schemas: tuple[TableSchema, ...],
        changed: ChangedBytes,
        *,
        lineage: Lineage,
        is_saved: bool,
        annotations: Annotations,
    ) -> SavePlan:
        """What is saved now, and of which tables; ``changed`` is of all ranks, ``is_saved`` whether
        this very step is committed already.

        Raises:
            InvalidRequestError: the run holds checkpoints that the model does not descend from.
        """
        catalog = writer.catalog
        history = catalog if is_saved else lineage.history(catalog, url=writer.storage.url)
        if history.last is not None:
            known = history.schema_of(history.last)
            # The order of tables is another on ranks; it means nothing.
            schemas = known if set(known) == set(schemas) else schemas
        return SavePlan(
            step=lineage.step,
            choice=self._choose(history, schemas, changed=changed, lineage=lineage),
            last_base=history.last.base if history.last is not None else lineage.step,
            codecs=self._choose_codecs(history.restores, schemas),
            schemas=schemas,
            rules=self.rules,
            at=lineage.at,
            rewind_to=lineage.rewind_to,
            number=writer.next_number,
            token=secrets.token_hex(4),
            is_saved=is_saved,
            annotations=annotations,
        )

    def _choose_codecs(self, restores: int, schemas: Sequence[TableSchema]) -> CodecPlan:
        """The codecs of the next checkpoint; a change is told."""
        plan = self.plan_codec(restores=restores)
        if plan != self._codecs:
            self._codecs = plan
            self._log.emit(
                events.CodecChosen(
                    codec=plan.weights.name,
                    state_codec=state_codec_name(schemas, plan),
                    reason=plan.reason,
                )
            )
        return plan

    def _choose(
        self,
        history: Catalog,
        schemas: tuple[TableSchema, ...],
        *,
        changed: ChangedBytes,
        lineage: Lineage,
    ) -> BaseChoice:
        last = history.last
        if last is None:
            return plan_checkpoint(self._strategy.base, None)
        must_be_base = None
        if history.schema_of(last) != schemas:
            must_be_base = "the tables or their row state changed"
        placement = self._settings.placement
        if placement != (None if history.sharding is None else history.sharding.placement):
            must_be_base = "the rows are divided among other servers"
        if lineage.is_other_model:
            must_be_base = "only a part of the model was restored"
        return plan_checkpoint(
            self._strategy.base,
            history.delta_sizes(),
            must_be_base=must_be_base,
            measured=self._measure(history, is_rewinding=lineage.discards_later),
            gathered=self._gather(history, schemas, changed.since_base),
            changed_share=changed.pending / max(1, sum(t.rows * t.row_bytes for t in schemas)),
        )

    def committed(self, catalog: Catalog) -> None:
        """After a commit, in the background: what need not wait for the next stall."""
        if self._strategy.base == "recovery-time" and catalog.last is not None:
            self._sizes = (catalog.last.step, restore_sizes(catalog))

    def _gather(
        self, history: Catalog, schemas: Sequence[TableSchema], changed_bytes: int
    ) -> Gathered | None:
        if not self._strategy.has_rollups:
            return None
        return gather(
            history,
            changed_bytes=changed_bytes,
            table_bytes=sum(t.rows * t.row_bytes for t in schemas),
        )

    def _measure(self, history: Catalog, *, is_rewinding: bool) -> Measured | None:
        if self._strategy.base != "recovery-time":
            return None
        step, sizes = self._sizes
        is_known = history.last is not None and history.last.step == step
        return measure(history, sizes if is_known and not is_rewinding else None)
