"""What lost workers had pushed: made whole at all servers, or undone, whoever is lost with them.

    a worker is lost:  bar it -> who has what of its pushes -> decide -> give, commit, drop
    a server is lost:  its place is taken -> witnesses give it what it had and parity may lack
                       -> servers give copies to the new witness

Workers that live send their own pushes again (client.py). They may take their time, and be lost, or
others be lost, before they do: so servers that are new are given those pushes too; what is known to
have happened they apply, the rest is staged.

Invariants:
- A push of a lost worker happens at all its servers or at none; what was decided stays decided.
- A part of a push is at parity, or at its server and all its witnesses, soon after any loss.

Not here: the decision (commit.py), parts and copies (pushes.py), who is lost (coordinator.py: its
membership thread uses this). Everything here raises GoneError when a server does not answer, and
can be done again then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from holdfast.cluster import parts
from holdfast.cluster.commit import Held, choose_commits
from holdfast.cluster.members import Members
from holdfast.cluster.message import Message
from holdfast.cluster.pushes import Entrusted, slices
from holdfast.cluster.spec import ClusterSpec


class Resolution:
    """Carries out what becomes of lost workers' pushes."""

    def __init__(
        self, spec: ClusterSpec, members: Members, *, has_rounds: Callable[[], bool]
    ) -> None:
        """``has_rounds``: workers that have staged wait for their turn to commit."""
        self._spec, self._members, self._has_rounds = spec, members, has_rounds
        self._last: dict[int, int] = {}  # of each lost worker, the last push that happened
        self._lacking_parts: set[int] = set()
        self._lacking_copies: set[int] = set()

    def replaced(self, servers: Iterable[int]) -> None:
        """Servers took lost ones' places, and have nothing of what those had of pushes."""
        for server in servers:
            self._lacking_parts.add(server)
            self._lacking_copies.add(server)

    def loaded(self, server: int) -> None:
        """A server took a lost one's place with rows of the past: pushes since are not for it."""
        self._lacking_parts.discard(server)
        self._lacking_copies.add(server)

    @property
    def is_handed_on(self) -> bool:
        """Whether no server lacks what those before them had."""
        return not (self._lacking_parts or self._lacking_copies)

    def resolve(self, worker: int) -> int:
        """Decide of a lost worker's pushes, everywhere; the last that happened."""
        held = self._ask_held("bar", worker)
        commits = choose_commits(held, at_least=self._last.get(worker, -1))
        self._last[worker] = commits.last
        for server, witnesses in commits.given.items():
            given: list[Entrusted] = []
            for witness, numbers in witnesses.items():
                found = self._ask(witness, "copies", server, [worker])
                given += [each for each in found if each.number in numbers]
            self._tell(server, "inherit", {}, sorted(given, key=lambda each: each.number))
        meta = {"worker": worker, "last": commits.last, "is_lost": True}
        self._members.ask_each(self._members.members, Message("resolve", meta))
        self._entrust(self._members.members, [worker])
        return commits.last

    def hand_on(self) -> None:
        """Give servers that are new in their place what those before them had."""
        for server in sorted(self._lacking_parts):
            self._give(server)
        self._entrust(self._lacking_copies, None)
        self._lacking_parts.clear()
        self._lacking_copies.clear()

    def _give(self, server: int) -> None:
        """Have a server stage what its witnesses have of it, and apply it if its worker is lost."""
        found: dict[tuple[int, int], Entrusted] = {}
        for witness in self._spec.witnesses[server]:
            for each in self._ask(witness, "copies", server, None):
                found[each.worker, each.number] = each
        self._tell(server, "inherit", {}, [found[key] for key in sorted(found)])
        for worker in sorted({worker for worker, _ in found}):
            last = self._last.get(worker)
            if last is None:
                held = self._ask_held("held", worker)
                last = choose_commits(held, is_counting_staged=not self._has_rounds()).last
            meta = {"worker": worker, "last": last, "is_lost": worker in self._last}
            self._members.ask(server, Message("resolve", meta))

    def _ask_held(self, kind: str, worker: int) -> dict[int, Held]:
        answers = self._members.ask_each(self._members.members, Message(kind, {"worker": worker}))
        return {server: Held.from_json(answer.meta) for server, answer in answers.items()}

    def _entrust(self, witnesses: Collection[int], workers: Collection[int] | None) -> None:
        """Have witnesses keep copies of what servers have and parity may lack."""
        for owner, others in enumerate(self._spec.witnesses):
            wanted = set(others).intersection(witnesses)
            found = self._ask(owner, "owed", owner, workers) if wanted else []
            for witness in sorted(wanted):
                self._tell(witness, "entrust", {"owner": owner}, found)

    def _ask(
        self, server: int, kind: str, owner: int, workers: Collection[int] | None
    ) -> list[Entrusted]:
        meta = {"owner": owner, "workers": None if workers is None else sorted(workers)}
        found: list[Entrusted] = []
        has_more = True
        while has_more:
            after = [found[-1].worker, found[-1].number] if found else [-1, -1]
            answer = self._members.ask(server, Message(kind, {**meta, "after": after}))
            found += parts.unpack_entrusted(answer, self._spec.dims)
            has_more = bool(answer.meta["has_more"])
        return found

    def _tell(self, server: int, kind: str, meta: dict[str, int], given: list[Entrusted]) -> None:
        for some in slices(given):
            self._members.ask(server, parts.pack_entrusted(kind, meta, some))
