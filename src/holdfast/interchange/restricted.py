"""Read a pickle without running it: names in it become records of ours, or it is refused.

DCP's metadata and the structure of torch's files are pickles. A pickle names classes and functions
and has them called; here a name is looked up in a table that the caller gives, and what the table
holds are records that keep what they are given, plain constructors, or values. Nothing is imported.

Invariants:
- A name that is not in the table is an error, whatever else the pickle does.
- Nothing that a pickle does to a stand-in outlives its reading: they are made anew each time.
- Memory is bounded by a small multiple of the pickle's size. (The C reader's memo is not: a number
  in the pickle sizes it. So this is Python's own reader in Python.)
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import CorruptDataError

BYTES_MAX = 256 << 20

Names = Mapping[tuple[str, str], Any]
"""What a pickle may name: values, and classes as ``Record``."""


class Record:
    """Stands for an object of a class that is not ours: what it was made of, and nothing more."""

    kind = ""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.fields: dict[Any, Any] = {}
        self.state: Any = None

    def __new__(cls, *given: Any) -> Record:
        """As pickles make objects: without ``__init__``."""
        made = super().__new__(cls)
        Record.__init__(made, *given)
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.fields = state

    def get(self, field: str) -> Any:
        """A field's value.

        Raises:
            CorruptDataError: there is none.
        """
        if field not in self.fields:
            raise CorruptDataError("a pickled object lacks a field", kind=self.kind, field=field)
        return self.fields[field]


def record(kind: str) -> type[Record]:
    """A class of records of one kind."""
    return type(kind, (Record,), {"kind": kind})


def read_pickle(
    data: bytes, names: Names, *, what: str, persistent: Callable[[Any], Any] | None = None
) -> Any:
    """What a pickle describes. ``persistent`` makes something of its references to other records.

    Raises:
        CorruptDataError: it is damaged, or names what it has no business to name.
    """
    if len(data) > BYTES_MAX:
        raise CorruptDataError("a pickle is too large", what=what, bytes=len(data), most=BYTES_MAX)

    class Reader(pickle._Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = names.get((module, name))
            if found is None:
                raise CorruptDataError(
                    "a pickle names something that has no place there; it was not run",
                    what=what,
                    name=f"{module}.{name}"[:80],
                )
            return found

        def persistent_load(self, reference: Any) -> Any:
            if persistent is None:
                raise CorruptDataError("a pickle refers to records it has not", what=what)
            return persistent(reference)

        def get_extension(self, code: int) -> None:
            raise CorruptDataError("a pickle names a registered extension", what=what)

    try:
        return Reader(io.BytesIO(data)).load()
    except CorruptDataError:
        raise
    except Exception as error:  # a stranger's pickle may fail in any way
        raise CorruptDataError("not a whole pickle", what=what, detail=str(error)[:80]) from error
