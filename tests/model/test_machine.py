"""Random lives of a run against a plain dict of what every step's model was.

Train, save, fail, cancel, resume, go back, change retention, read; extract with any threshold and
any stage, fail or die while extracting, begin a new base or a rollup; whatever the order, every
step that is kept reads exactly as it was when it was saved.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import threading
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import nn

import holdfast as hf
from holdfast.checkpoint.grid.round_plan import plan_round
from holdfast.checkpoint.planning import bases
from holdfast.checkpoint.saving import snapshot
from holdfast.checkpoint.store import catalogs
from holdfast.storage import open_storage
from holdfast.storage.base import ObjectWriter, Storage

ROWS = {"left.weight": 11, "right.weight": 70}
NO_STAGES = hf.Extract(0.1, by_range=False, by_filter=False, by_ratio=False)
STRATEGIES = (  # when a base is taken, extraction, rollups
    *((base, None, False) for base in ("full", "one-shot", "consecutive", "intermittent")),
    *(("recovery-time", hf.Extract(threshold), False) for threshold in (None, 0.0, 0.2, 0.6, 1.0)),
    ("consecutive", hf.Extract(0.0, bundles=False), False),
    ("consecutive", hf.Extract(0.3, by_filter=False), False),
    ("consecutive", NO_STAGES, False),
)
ROLLED_UP = (
    *(("recovery-time", hf.Extract(threshold), True) for threshold in (None, 0.0, 0.2, 1.0)),
    ("consecutive", None, True),
    ("consecutive", hf.Extract(0.0, bundles=False), True),
    ("consecutive", NO_STAGES, True),
)
OFTEN = (1e-9, 1)  # a rollup after every increment; else as everywhere
ROLLUPS = (OFTEN, OFTEN, (bases.ROLLUP_PAYS_AT, bases.ROLLUP_REPLACES_MIN))
PICKS = st.integers(0, len(STRATEGIES + ROLLED_UP) * len(ROLLED_UP) - 1)
KEEPS = (None, 1, 2, hf.Keep(last=1, every=2))


class Pair(nn.Module):
    """Two tables and one dense number."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Embedding(ROWS["left.weight"], 2, sparse=True)
        self.right = nn.Embedding(ROWS["right.weight"], 3, sparse=True)
        self.scale = nn.Parameter(torch.ones(1))


SERVERS = (None, hf.Placement(3), hf.Placement(5, data=3, parity=1))


class Shaky:
    """A storage that can be told to fail once: at a write, at a commit, or after a commit.

    It can also hold back the next object, so that a save is still running when another comes; and
    it can fail, or break for good, at a call that extraction makes.
    """

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.fails_at: str | None = None
        self.fails_extraction_at: str | None = None
        self.breaks_after: int | None = None
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _fail(self, at: str) -> None:
        if threading.current_thread().name == "holdfast-extract":
            if self.fails_extraction_at == at:
                self.fails_extraction_at = None
                raise hf.UnavailableError(f"told to fail in extraction: {at}")
            if self.breaks_after is not None:
                self.breaks_after -= 1
        elif self.fails_at == at:
            self.fails_at = None
            raise hf.UnavailableError(f"told to fail: {at}")
        if self.breaks_after is not None and self.breaks_after < 0:
            raise hf.UnavailableError("broken")

    def create(self, name: str) -> ObjectWriter:
        self.gate.wait()
        self._fail("create")
        return self._inner.create(name)

    def put_if_absent(self, name: str, data: bytes) -> None:
        self._fail("commit")
        self._inner.put_if_absent(name, data)
        if threading.current_thread().name == "holdfast-extract":
            if self.fails_extraction_at == "unknown":
                self.fails_extraction_at = "reading back"
                raise hf.UnavailableError("the answer was lost")
        elif self.fails_at == "unknown":
            self.fails_at = "reading back"
            raise hf.UnavailableError("the answer was lost")

    def get(self, name: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self._fail("reading back")
        return self._inner.get(name, offset=offset, length=length)

    def delete(self, name: str) -> None:
        self._fail("delete")
        self._inner.delete(name)


State = dict[str, tuple[np.ndarray, np.ndarray]]


class RunMachine(RuleBasedStateMachine):
    """The machine; ``saved`` is the oracle: what each committed step was.

    ``at`` is the committed step the model descends from; a commit drops what lies beyond it.
    """

    strategies = STRATEGIES + ROLLED_UP

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.storage = Shaky(open_storage(self.folder))
        self.saved: dict[int, State] = {}
        self.at = -1
        self.part_bytes = snapshot.BUFFER_BYTES
        self.rollups = bases.ROLLUP_PAYS_AT, bases.ROLLUP_REPLACES_MIN
        self.ck: hf.Checkpointer | None = None

    @initialize(
        pick=PICKS,
        rollups=st.sampled_from(ROLLUPS),
        keep=st.sampled_from(KEEPS),
        servers=st.sampled_from(SERVERS),
        seed=st.integers(0, 9),
        part_bytes=st.sampled_from([100, 8 << 20]),
    )
    def begin(
        self, pick: int, rollups: Any, keep: Any, servers: Any, seed: int, part_bytes: int
    ) -> None:
        self.how = self.strategies[pick % len(self.strategies)]
        bases.ROLLUP_PAYS_AT, bases.ROLLUP_REPLACES_MIN = rollups
        self.keep = keep
        self.servers = servers
        # Small parts: a table's rows of one birth then lie in several segments.
        self.part_bytes = snapshot.BUFFER_BYTES
        snapshot.BUFFER_BYTES = part_bytes
        torch.manual_seed(seed)
        self.open_process()

    def open_process(self) -> None:
        self.model = Pair()
        self.optimizer = torch.optim.Adagrad(
            [self.model.left.weight, self.model.right.weight, self.model.scale], lr=0.1
        )
        self.ck = hf.Checkpointer(
            self.storage,  # type: ignore[arg-type]
            model=self.model,
            optimizer=self.optimizer,
            strategy=hf.Strategy(
                "mine", base=self.how[0], codec="fp32", extract=self.how[1], rollups=self.how[2]
            ),
            keep=self.keep,
            servers=self.servers,
            threads=1,
            on_busy="cancel",
        )
        self.ck.resume()
        self.pin_times()

    def pin_times(self, *, next_is_base: bool = False) -> None:
        """Make what the recovery-time policy measures depend on bytes alone."""
        slow = (catalogs.RestoreTiming(1, 1.0, 1, 1e18),)

        def pinned(catalog: catalogs.Catalog) -> catalogs.Catalog:
            growth = tuple(dataclasses.replace(item, build_s=1e9) for item in catalog.growth)
            return dataclasses.replace(
                catalog, growth=growth, restore_timings=slow if next_is_base else ()
            )

        self.ck._writer.note(pinned)

    def state_now(self) -> State:
        state = self.optimizer.state
        return {
            f"{name}.weight": (
                module.weight.detach().numpy().copy(),
                state[module.weight]["sum"].numpy().copy(),
            )
            for name, module in (("left", self.model.left), ("right", self.model.right))
        }

    @rule(seed=st.integers(0, 10**6), rows=st.integers(1, 12), steps=st.integers(1, 3))
    def train(self, seed: int, rows: int, steps: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            self.optimizer.zero_grad()
            left = self.model.left(torch.randint(0, 11, (rows,), generator=draw))
            right = self.model.right(torch.randint(0, 70, (rows,), generator=draw))
            (left.sum() * self.model.scale + (right**2).sum()).sum().backward()
            self.optimizer.step()
            self.ck.step()

    def is_new_step(self) -> bool:
        return self.ck is not None and self.ck.current_step > self.at

    def committed(self, step: int, state: State) -> None:
        for later in [known for known in self.saved if known > self.at]:
            del self.saved[later]
        self.saved[step] = state
        self.at = step

    @rule(seed=st.integers(0, 10**6), rows=st.integers(1, 30))
    def train_one_table_only(self, seed: int, rows: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.optimizer.zero_grad()
        self.model.right(torch.randint(0, 70, (rows,), generator=draw)).sum().backward()
        self.optimizer.step()
        self.ck.step()

    @rule()
    def a_step_that_changes_nothing(self) -> None:
        self.ck.step()

    @precondition(is_new_step)
    @rule(next_is_base=st.sampled_from([False, False, True]))
    def save(self, next_is_base: bool) -> None:
        self.save_now(next_is_base=next_is_base)
        if self.how[1] is not None:
            self.ck.wait()
            assert plan_round(hf.open(self.folder).catalog) is None  # nothing waits

    def save_now(self, *, next_is_base: bool = False) -> None:
        self.pin_times(next_is_base=next_is_base)
        self.ck.save().result()
        self.pin_times()
        self.committed(self.ck.current_step, self.state_now())
        assert self.ck.all_steps()[-1] == self.at

    @rule(seed=st.integers(0, 10**6), rows=st.integers(1, 12), times=st.integers(2, 6))
    def train_and_save_again_and_again(self, seed: int, rows: int, times: int) -> None:
        for at in range(times):
            self.train(seed + at, rows, 1)
            if self.is_new_step():
                self.save_now()

    @precondition(is_new_step)
    @rule(how=st.sampled_from(["create", "commit", "unknown", "delete", "reading back"]))
    def save_while_extraction_fails(self, how: str) -> None:
        self.storage.fails_extraction_at = how
        self.save_now()
        self.ck.wait()
        self.storage.fails_extraction_at = None
        self.ck._extractor.wake()  # as the next save would

    @precondition(is_new_step)
    @rule(calls=st.integers(0, 40))
    def die_while_extracting(self, calls: int) -> None:
        self.storage.breaks_after = calls
        with contextlib.suppress(hf.UnavailableError):  # after the commit only housekeeping is left
            self.save_now()
        with contextlib.suppress(hf.HoldfastError):
            self.ck.close()
        self.storage = Shaky(open_storage(self.folder))
        self.open_process()
        assert self.ck.current_step == self.at
        self.assert_model_is(self.at)

    @precondition(is_new_step)
    @rule(how=st.sampled_from(["create", "commit", "unknown", "delete"]))
    def save_with_an_outage(self, how: str) -> None:
        self.storage.fails_at = how
        try:
            self.ck.save().result()
            assert how == "delete"  # housekeeping: the commit stands
        except hf.UnavailableError:
            assert how != "delete"
        self.storage.fails_at = None
        if how in ("unknown", "delete"):
            self.committed(self.ck.current_step, self.state_now())

    @precondition(is_new_step)
    @rule(seed=st.integers(0, 10**6))
    def save_cancelled_by_the_next(self, seed: int) -> None:
        step, state = self.ck.current_step, self.state_now()
        self.storage.gate.clear()
        first = self.ck.save()
        self.train(seed, 3, 1)
        threading.Timer(0.002, self.storage.gate.set).start()
        second = self.ck.save()
        with contextlib.suppress(hf.HoldfastError):
            first.result()
            self.committed(step, state)
        second.result()
        self.committed(self.ck.current_step, self.state_now())

    @rule(
        pick=PICKS,
        keep=st.sampled_from(KEEPS),
        servers=st.sampled_from(SERVERS),
    )
    def restart(self, pick: int, keep: Any, servers: Any) -> None:
        """A new process, maybe with other settings, resumes what is committed."""
        self.ck.close()
        self.how = self.strategies[pick % len(self.strategies)]
        self.keep, self.servers = keep, servers
        self.open_process()
        if self.saved:
            self.at = self.ck.current_step
            assert self.at == self.ck.all_steps()[-1] == max(self.saved)
            self.assert_model_is(self.at)

    @precondition(lambda self: self.ck is not None and len(self.ck.all_steps()) > 0)
    @rule(pick=st.integers(0, 50))
    def go_back(self, pick: int) -> None:
        steps = hf.open(self.folder).steps
        step = steps[pick % len(steps)]
        self.ck.restore(step, discard_later=True)
        self.pin_times()
        self.at = step
        self.assert_model_is(step)

    @precondition(lambda self: self.ck is not None and self.servers is not None and self.at >= 0)
    @rule(pick=st.integers(0, 10))
    def lose_a_server(self, pick: int) -> None:
        """Its rows are as they were saved last, and no others change."""
        server = pick % self.servers.servers
        before = self.state_now()
        try:
            self.ck.recover([server])
        except hf.InvalidRequestError:
            catalog = hf.open(self.folder).catalog
            sharding = catalog.sharding
            is_apart = sharding is not None and sharding.placement == self.servers
            assert not is_apart or sharding.since > catalog.checkpoint(self.at).base
            return
        for table, columns in self.state_now().items():
            lost_N = self.servers.rows_of(server, len(columns[0]))
            for found, now, old in zip(
                columns, before[table], self.saved[self.at][table], strict=True
            ):
                now[lost_N] = old[lost_N]
                assert found.tobytes() == now.tobytes(), (server, table)

    def assert_model_is(self, step: int) -> None:
        for table, columns in self.state_now().items():
            for found, expected in zip(columns, self.saved[step][table], strict=True):
                assert found.tobytes() == expected.tobytes(), (step, table)

    @rule(pick=st.integers(0, 50), rows=st.lists(st.integers(0, 10), max_size=5))
    def read_some_rows(self, pick: int, rows: list[int]) -> None:
        if not self.ck.all_steps():
            return
        run = hf.open(self.folder)
        step = run.steps[pick % len(run.steps)]
        for table, (weight, state) in self.saved[step].items():
            found = run.read(step, table, rows)
            assert found.weight.tobytes() == weight[rows].tobytes()
            assert found.state["sum"].tobytes() == state[rows].tobytes()

    @invariant()
    def every_kept_step_reads_exactly(self) -> None:
        if self.ck is None:
            return
        self.ck.wait()
        try:
            run = hf.open(self.folder)
        except hf.NotFoundError:
            return
        assert run.steps[-1] == max(self.saved)
        for step in run.steps:
            for table, (weight, state) in self.saved[step].items():
                found = run.read(step, table)
                assert found.weight.tobytes() == weight.tobytes(), (step, table)
                assert found.state["sum"].tobytes() == state.tobytes(), (step, table)

    @invariant()
    def nothing_below_a_rollup_lives_on_and_none_is_cut_up(self) -> None:
        if self.ck is None or not self.ck.all_steps():
            return
        self.ck.wait()
        catalog = hf.open(self.folder).catalog
        for entry in catalog.checkpoints:
            rollup = catalog.rollup_of(entry)
            for segment in catalog.alive(entry.step):
                assert segment.born == entry.base or segment.born >= rollup
                if segment.born == rollup:
                    assert "/rows-" in segment.extent.object

    def teardown(self) -> None:
        bases.ROLLUP_PAYS_AT, bases.ROLLUP_REPLACES_MIN = self.rollups
        snapshot.BUFFER_BYTES = self.part_bytes
        self.storage.gate.set()
        self.storage.fails_at = None
        if self.ck is not None:
            with contextlib.suppress(hf.HoldfastError):
                self.ck.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class RolledUpMachine(RunMachine):
    """Every process takes rollups, most of them often."""

    strategies = ROLLED_UP


many = settings(max_examples=40, stateful_step_count=20, deadline=None, derandomize=True)
TestRuns = RunMachine.TestCase
TestRuns.settings = many
TestRolledUpRuns = RolledUpMachine.TestCase
TestRolledUpRuns.settings = settings(many, max_examples=20)
