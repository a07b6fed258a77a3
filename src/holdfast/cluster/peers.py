"""Streams to the servers of a view: opened when first needed, all of one epoch.

Invariant: a stream of another epoch or of another process is never used.

Not here: what to do when a server does not answer (client.py, server.py): the error says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from holdfast.cluster.message import Message
from holdfast.cluster.pushes import BARRED
from holdfast.cluster.view import View
from holdfast.cluster.wire import Stream
from holdfast.errors import (
    ConflictError,
    HoldfastError,
    InvalidRequestError,
    UnavailableError,
)

Failures = dict[int, HoldfastError]


class Peers:
    """One caller's streams to all servers; used by one thread at a time."""

    def __init__(self, name: str, token: str, *, deadline_s: float = 30.0) -> None:
        self._name = name
        self._token = token
        self._deadline_s = deadline_s
        self._view: View | None = None
        self._streams: dict[int, Stream] = {}

    def enter(self, view: View) -> None:
        """Speak in this view from now on, unless a newer one was entered: a thread that was slow
        must not take the streams of all back to an epoch in which nobody listens any more."""
        if self._view is not None and view.version <= self._view.version:
            return
        if self._view is None or view.epoch != self._view.epoch:
            self.close()
        self._view = view

    @property
    def view(self) -> View:
        """The view that is spoken in."""
        assert self._view is not None
        return self._view

    def ask_all(self, messages: Mapping[int, Message]) -> tuple[dict[int, Message], Failures]:
        """Send to several servers at once, then wait for all of them.

        Returns the answers, and for servers that are gone or have moved on to another epoch why.

        Raises:
            HoldfastError: what a server answered instead, after all have answered.
        """
        answers: dict[int, Message] = {}
        failures: Failures = {}
        raised: HoldfastError | None = None
        asked = []
        for server, message in messages.items():
            try:
                self._stream(server).send(message)
                asked.append(server)
            except (UnavailableError, ConflictError) as error:
                failures[server] = self._failed(server, error)
        for server in asked:
            try:
                answers[server] = self._streams[server].receive()
            except HoldfastError as error:
                if is_passing(error):
                    failures[server] = self._failed(server, error)
                else:
                    raised = raised or error
        if raised is not None:
            raise raised
        return answers, failures

    def ask(self, server: int, message: Message) -> Message:
        """Ask one server.

        Raises:
            UnavailableError: it is gone.
            ConflictError: it is in another epoch.
        """
        try:
            return self._stream(server).ask(message)
        except (UnavailableError, ConflictError) as error:
            raise self._failed(server, error) from error

    def ask_in_order(self, server: int, messages: Sequence[Message]) -> list[Message]:
        """Ask one server several things, all sent before the first answer; raises as ``ask``, or
        what it answered instead."""
        try:
            stream = self._stream(server)
            for message in messages:
                stream.send(message)
            return [stream.receive() for _ in messages]
        except HoldfastError as error:  # answers that nobody waits for may follow
            raise self._failed(server, error) from error

    def _stream(self, server: int) -> Stream:
        stream = self._streams.get(server)
        if stream is None or not stream.is_open:
            stream = self._streams[server] = self._open(self.view.addresses[server])
        return stream

    def _open(self, address: str) -> Stream:
        try:
            return Stream(
                address,
                token=self._token,
                name=self._name,
                epoch=self.view.epoch,
                deadline_s=self._deadline_s,
            )
        except InvalidRequestError as error:
            # It does not know our token: the server is gone, and another cluster has its port.
            raise UnavailableError("somebody else listens here", address=address) from error

    def _failed(self, server: int, error: HoldfastError) -> HoldfastError:
        stream = self._streams.pop(server, None)
        if stream is not None:
            stream.close()
        return error

    def close(self) -> None:
        """End all streams."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


class PipedPeers(Peers):
    """Streams on which the next questions may be under way before the last are answered."""

    def send_all(self, messages: Mapping[int, Message]) -> None:
        """Ask peers, and do not wait.

        Raises:
            ConflictError: one is gone, or knows of other members.
        """
        for server, message in messages.items():
            try:
                self._stream(server).send(message)
            except (UnavailableError, ConflictError) as error:
                raise changed({server: self._failed(server, error)}) from error

    def receive_all(self, servers: Iterable[int]) -> Iterator[tuple[int, Message]]:
        """The answers to the oldest questions that have none yet, one by one; raises likewise."""
        for server in servers:
            try:
                yield server, self._streams[server].receive()
            except (UnavailableError, ConflictError) as error:
                raise changed({server: self._failed(server, error)}) from error


def is_passing(error: HoldfastError) -> bool:
    """Whether it helps to learn of the new members and ask again: a server is gone, or moved on.
    Whoever was itself taken for lost is not heard any more."""
    is_barred = error.facts.get("kind") == BARRED
    return isinstance(error, UnavailableError | ConflictError) and not is_barred


def changed(failures: Failures) -> ConflictError:
    """What is raised where nothing is left to do but to learn of the new members."""
    return ConflictError("the cluster has changed", servers=sorted(failures))
