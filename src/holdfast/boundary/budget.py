"""What reading an input may cost: bounded by the size that the input really has.

    bytes on disk -> Budget (limits) -> Account (what was taken so far) -> go on, or refuse

A few kilobytes can claim terabytes: an expanded tensor, a list that names itself many times, a
segment that many tables share. Whoever acts on a claim takes its cost out of an account first.

Invariants:
- A limit is a factor times the bytes of the input, plus a constant; nothing in the input moves it.
- The cost is taken before the memory is, or the bytes are written.
- Trust lifts the limits on memory and bytes. It never lifts ``DEPTH_MAX``: what is nested deeper
  cannot be walked.

Needs nothing, not even NumPy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.errors import InvalidRequestError

MEMORY_FACTOR, MEMORY_CONSTANT_BYTES = 8, 128 << 20
WRITTEN_FACTOR, WRITTEN_CONSTANT_BYTES = 4, 64 << 20
DEPTH_MAX = 64
"""How deep values may be nested."""

_TODO = "if you know where it comes from, lift the limit: --trust, or trust=True"


@dataclass(frozen=True, slots=True)
class Budget:
    """What an input of a known size may cost.

    >>> Budget(1 << 30).memory_bytes == 8 * (1 << 30) + (128 << 20)
    True
    >>> Budget(4096).check_memory(1 << 40, claim="tensor 'm'")
    Traceback (most recent call last):
    holdfast.errors.InvalidRequestError: the input claims more memory than its size allows. ...
    >>> Budget(4096, is_trusted=True).check_memory(1 << 40, claim="tensor 'm'")
    """

    input_bytes: int
    is_trusted: bool = False

    @property
    def memory_bytes(self) -> int:
        """Memory that may be held at one time, besides buffers of a fixed size."""
        return MEMORY_FACTOR * self.input_bytes + MEMORY_CONSTANT_BYTES

    @property
    def written_bytes(self) -> int:
        """Bytes that may be written in all."""
        return WRITTEN_FACTOR * self.input_bytes + WRITTEN_CONSTANT_BYTES

    def check_memory(self, bytes_: int, *, claim: str) -> None:
        """Refuse to hold so much; ``claim`` says what of the input asks for it.

        Raises:
            InvalidRequestError: names the claim, the limit, and how to lift it.
        """
        if bytes_ > self.memory_bytes and not self.is_trusted:
            raise self._excess("memory", bytes_, self.memory_bytes, claim)

    def check_written(self, bytes_: int, *, claim: str) -> None:
        """Refuse to write so much.

        Raises:
            InvalidRequestError: names the claim, the limit, and how to lift it.
        """
        if bytes_ > self.written_bytes and not self.is_trusted:
            raise self._excess("bytes to write", bytes_, self.written_bytes, claim)

    def _excess(self, of: str, bytes_: int, limit: int, claim: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"the input claims more {of} than its size allows",
            claim=claim,
            needed_bytes=bytes_,
            limit_bytes=limit,
            input_bytes=self.input_bytes,
            todo=_TODO,
        )

    def open_account(self) -> Account:
        """An account of which nothing is taken yet."""
        return Account(self)


class Account:
    """What was taken of a budget so far. Safe from any thread.

    >>> account = Budget(4096).open_account()
    >>> account.take_memory(100 << 20, claim="tensor 'a'")
    >>> account.take_memory(100 << 20, claim="tensor 'b'")
    Traceback (most recent call last):
    holdfast.errors.InvalidRequestError: the input claims more memory than its size allows. ...
    >>> account.give_back_memory(100 << 20)
    >>> account.take_memory(100 << 20, claim="tensor 'b'")
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._memory_bytes = 0
        self._written_bytes = 0
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        """Memory that is taken now."""
        return self._memory_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes to write that were taken."""
        return self._written_bytes

    def take_memory(self, bytes_: int, *, claim: str) -> None:
        """Take memory, before it is allocated.

        Raises:
            InvalidRequestError: too much together with what is taken; then none of it is.
        """
        with self._lock:
            self.budget.check_memory(self._memory_bytes + bytes_, claim=claim)
            self._memory_bytes += bytes_

    def give_back_memory(self, bytes_: int) -> None:
        """Give memory back that was taken and is free again."""
        with self._lock:
            self._memory_bytes -= bytes_

    @contextmanager
    def holding_memory(self, bytes_: int, *, claim: str) -> Iterator[None]:
        """Take memory for the time of a block.

        Raises:
            InvalidRequestError: too much together with what is taken.
        """
        self.take_memory(bytes_, claim=claim)
        try:
            yield
        finally:
            self.give_back_memory(bytes_)

    def take_written(self, bytes_: int, *, claim: str) -> None:
        """Take bytes to write, before they are written.

        Raises:
            InvalidRequestError: too much together with what was taken; then none of it is.
        """
        with self._lock:
            self.budget.check_written(self._written_bytes + bytes_, claim=claim)
            self._written_bytes += bytes_
