"""Read a pickle without running it: an own reader of the few operations that describe values.

A pickle is a program: it names classes and functions and has them called. Here a name is looked up
in a table that the caller gives, and only a ``Maker`` of that table is ever called. Python's own
readers are not used: one sizes its memo by a number in the pickle, both make room for as many bytes
as a pickle says, hash whatever it makes a key, and copy whatever it passes on.

Invariants:
- Nothing is imported and no attribute is looked up by a name of the pickle.
- A name that is not in the table is an error, whatever else the pickle does.
- Memory is taken out of an account, which the size of the input bounds.
- Time is linear in the pickle: keys are plain, numbers are short.
- Nothing that a pickle does outlives its reading.

Not here: what torch's pickles may name (names.py), how deep values are nested (nested.py).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

from holdfast.boundary.budget import Account
from holdfast.errors import CorruptDataError, HoldfastError

Names = Mapping[tuple[str, str], Any]
"""What a pickle may name: a ``Maker`` for a class or a function, or a value."""

_NUMBER_BYTES_MAX = 255
_ODD_KEYS_MAX = 10_000  # keys whose hashes somebody may have chosen to collide
_NAME_BYTES_MAX = 300
_RESERVED_BYTES = 1 << 20  # memory is taken by this much at a time
# Bytes that things take, as CPython has them, with the room that growing containers waste.
_SLOT, _CONTAINER, _SET, _PAIR, _MEMO, _NUMBER, _MADE = 9, 80, 256, 110, 110, 36, 200
_NO_FIELDS: Mapping[Any, Any] = MappingProxyType({})


class UnknownNameError(CorruptDataError):
    """A pickle names something that it has no business to name."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Stands for a class or a function: what it makes of the values it is given.

    ``make`` gets the account first: it takes memory for what it makes of shared values.
    """

    name: str
    make: Callable[..., Any]
    bytes: int = _MADE
    """Memory that what it makes takes, besides what it takes out of the account itself."""


class Record:
    """Stands for an object of a class that is not ours: what it was made of, and nothing more."""

    __slots__ = ("fields", "given", "kind", "state")

    def __init__(self, kind: str, *given: Any) -> None:
        self.kind = kind
        self.given = given
        self.state: Any = None
        self.fields: Mapping[Any, Any] = _NO_FIELDS

    def set_state(self, state: Any) -> None:
        """Take what a pickle says that the object holds."""
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


def record(kind: str) -> Maker:
    """A class of which records are kept."""
    return Maker(kind, lambda account, *given: Record(kind, *given))


def read_pickle(
    data: bytes,
    names: Names,
    *,
    what: str,
    account: Account,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """What a pickle describes. ``persistent`` makes something of its references to other records.

    Raises:
        UnknownNameError: it names something that is not in the table.
        CorruptDataError: it is damaged.
        InvalidRequestError: it takes more memory than the input's size allows.
    """
    reader = _Reader(data, names, what, account, persistent)
    try:
        return reader.load()
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise CorruptDataError("not a whole pickle", what=what, at=reader.at) from error
    finally:
        account.give_back_memory(reader.spare_bytes)


def is_plain_key(value: Any) -> bool:
    """Whether a value may be a key: hashing it takes no longer than reading it did."""
    kind = type(value)
    return kind in _KEY_TYPES or (
        kind is tuple and len(value) <= 8 and all(type(item) in _KEY_TYPES for item in value)
    )


_KEY_TYPES = frozenset((str, int, bool, float, bytes, type(None)))


def has_own_hash(value: Any) -> bool:
    """Whether nobody can choose many such keys to have one hash."""
    kind = type(value)
    return kind is str or (kind is int and -(1 << 53) < value < 1 << 53)


class _Reader:
    """The machine a pickle is a program for: a stack, marks in it, and a memo."""

    def __init__(
        self,
        data: bytes,
        names: Names,
        what: str,
        account: Account,
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.at = 0
        self._data = data
        self._names = names
        self._what = what
        self._account = account
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._odd_keys = 0
        self._left = 0  # bytes of memory that were taken and are not used yet

    @property
    def spare_bytes(self) -> int:
        """Memory that was taken and is free once the reader is gone."""
        return self._left + _MEMO * len(self._memo)

    def load(self) -> Any:
        data, operations = self._data, _OPERATIONS
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self._pop()
            operation = operations.get(code)
            if operation is None:
                self._fail("a pickle has an operation that is not read", code)
            operation(self)

    def _fail(self, message: str, found: object = None) -> NoReturn:
        raise CorruptDataError(message, what=self._what, at=self.at, found=found)

    def _take(self, bytes_: int) -> None:
        """Take memory for what is about to be made."""
        self._left -= bytes_
        if self._left < 0:
            more = _RESERVED_BYTES - self._left
            self._account.take_memory(more, claim=f"values of {self._what}")
            self._left += more

    # The program's bytes.

    def _read(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self._data):
            raise IndexError
        found = self._data[self.at : end]
        self.at = end
        return found

    def _number(self, width: int, *, signed: bool = False) -> int:
        return int.from_bytes(self._read(width), "little", signed=signed)

    def _line(self) -> str:
        end = self._data.find(b"\n", self.at, self.at + _NAME_BYTES_MAX)
        if end < 0:
            raise IndexError
        found = self._data[self.at : end]
        self.at = end + 1
        return found.decode()

    # The stack.

    def _push(self, value: Any, bytes_: int = 0) -> None:
        self._take(_SLOT + bytes_)
        self._stack.append(value)

    def _pop(self) -> Any:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise IndexError
        return self._stack.pop()

    def _top(self) -> Any:
        if self._marks and len(self._stack) <= self._marks[-1]:
            raise IndexError
        return self._stack[-1]

    def _pop_marked(self) -> list[Any]:
        mark = self._marks.pop()
        found = self._stack[mark:]
        del self._stack[mark:]
        return found

    # Operations.

    def _none(self) -> None:
        self._push(None)

    def _true(self) -> None:
        self._push(True)

    def _false(self) -> None:
        self._push(False)

    def _int1(self) -> None:
        self._push(self._number(1))

    def _int2(self) -> None:
        self._push(self._number(2), _NUMBER)

    def _int4(self) -> None:
        self._push(self._number(4, signed=True), _NUMBER)

    def _long1(self) -> None:
        self._long(1)

    def _long4(self) -> None:
        self._long(4)

    def _long(self, width: int) -> None:
        count = self._number(width)
        if count > _NUMBER_BYTES_MAX:  # Python refuses to print longer ones, and so to store them
            self._fail("a pickle holds a number of too many digits", count)
        self._push(self._number(count, signed=True), _NUMBER + count)

    def _float(self) -> None:
        self._push(struct.unpack(">d", self._read(8))[0], _NUMBER)

    def _text(self, width: int) -> None:
        count = self._number(width)
        text = self._read(count).decode("utf-8", "surrogatepass")
        self._push(text, sys.getsizeof(text))

    def _text1(self) -> None:
        self._text(1)

    def _text4(self) -> None:
        self._text(4)

    def _text8(self) -> None:
        self._text(8)

    def _bytes(self, width: int) -> None:
        count = self._number(width)
        self._push(self._read(count), sys.getsizeof(b"") + count)

    def _bytes1(self) -> None:
        self._bytes(1)

    def _bytes4(self) -> None:
        self._bytes(4)

    def _bytes8(self) -> None:
        self._bytes(8)

    def _mark(self) -> None:
        self._take(_SLOT + _NUMBER)
        self._marks.append(len(self._stack))

    def _drop(self) -> None:
        self._pop()

    def _drop_marked(self) -> None:
        self._pop_marked()

    def _again(self) -> None:
        self._push(self._top())

    def _put1(self) -> None:
        self._put(self._number(1))

    def _put4(self) -> None:
        self._put(self._number(4))

    def _memoize(self) -> None:
        self._put(len(self._memo))

    def _put(self, place: int) -> None:
        self._take(_MEMO)
        self._memo[place] = self._top()

    def _get1(self) -> None:
        self._get(self._number(1))

    def _get4(self) -> None:
        self._get(self._number(4))

    def _get(self, place: int) -> None:
        if place not in self._memo:
            self._fail("a pickle asks for what it has not kept")
        self._push(self._memo[place])

    def _empty_tuple(self) -> None:
        self._push(())

    def _tuple(self) -> None:
        self._push_tuple(tuple(self._pop_marked()))

    def _tuple1(self) -> None:
        self._push_tuple((self._pop(),))

    def _tuple2(self) -> None:
        last, first = self._pop(), self._pop()
        self._push_tuple((first, last))

    def _tuple3(self) -> None:
        last, middle, first = self._pop(), self._pop(), self._pop()
        self._push_tuple((first, middle, last))

    def _push_tuple(self, value: tuple[Any, ...]) -> None:
        self._push(value, _CONTAINER + _SLOT * len(value))

    def _empty_list(self) -> None:
        self._push([], _CONTAINER)

    def _append(self) -> None:
        self._extend([self._pop()])

    def _appends(self) -> None:
        self._extend(self._pop_marked())

    def _extend(self, items: list[Any]) -> None:
        into = self._top()
        if type(into) is not list:
            self._fail("a pickle adds to what is no list")
        self._take(_SLOT * len(items))
        into.extend(items)

    def _empty_dict(self) -> None:
        self._push({}, _CONTAINER)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self._pop_marked())

    def _update(self, items: list[Any]) -> None:
        into = self._top()
        if type(into) is not dict or len(items) % 2:
            self._fail("a pickle adds to what is no dict")
        self._take(_PAIR * (len(items) // 2))
        for index in range(0, len(items), 2):
            self._check_key(items[index])
            into[items[index]] = items[index + 1]

    def _empty_set(self) -> None:
        self._push(set(), _SET)

    def _add_items(self) -> None:
        items = self._pop_marked()
        into = self._top()
        if type(into) is not set:
            self._fail("a pickle adds to what is no set")
        self._take(_PAIR * len(items))
        for item in items:
            self._check_key(item)
            into.add(item)

    def _frozen_set(self) -> None:
        items = self._pop_marked()
        for item in items:
            self._check_key(item)
        self._push(frozenset(items), _SET + _PAIR * len(items))

    def _check_key(self, key: Any) -> None:
        if has_own_hash(key) or type(key) is Record:
            return
        self._odd_keys += 1
        if not is_plain_key(key) or self._odd_keys > _ODD_KEYS_MAX:
            self._fail("a pickle has a key that is not plain", type(key).__name__)

    def _global(self) -> None:
        self._push_name(self._line(), self._line())

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            self._fail("a pickle has no name where one belongs")
        self._push_name(module, name)

    def _push_name(self, module: str, name: str) -> None:
        if (module, name) not in self._names:
            raise UnknownNameError(
                "a pickle names something that has no place there; it was not run",
                what=self._what,
                name=f"{module}.{name}"[:80],
            )
        self._push(self._names[module, name])

    def _reduce(self) -> None:
        given, maker = self._pop(), self._pop()
        self._call(maker, given)

    def _new_object(self) -> None:
        given, maker = self._pop(), self._pop()
        self._call(maker, given)

    def _new_object_ex(self) -> None:
        named, given, maker = self._pop(), self._pop(), self._pop()
        if type(named) is not dict or named:
            self._fail("a pickle calls with names of arguments")
        self._call(maker, given)

    def _call(self, maker: Any, given: Any) -> None:
        if type(maker) is not Maker or type(given) is not tuple:
            self._fail("a pickle calls what cannot be called")
        try:
            made = maker.make(self._account, *given)
        except HoldfastError:
            raise
        except (TypeError, ValueError, LookupError, OverflowError) as error:
            raise CorruptDataError(
                "a pickle describes something in an unknown way", what=self._what, kind=maker.name
            ) from error
        self._push(made, maker.bytes)

    def _build(self) -> None:
        state, into = self._pop(), self._top()
        if isinstance(into, Record):
            into.set_state(state)
        elif type(into) is not dict:  # what an OrderedDict has besides its items is not kept
            self._fail("a pickle tries to change something that cannot be changed")

    def _refer(self) -> None:
        reference = self._pop()
        if self._persistent is None:
            self._fail("a pickle refers to records it has not")
        self._push(self._persistent(reference), _MADE)

    def _protocol(self) -> None:
        self._read(1)

    def _frame(self) -> None:
        if self._number(8) > len(self._data) - self.at:
            raise IndexError


_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Reader], None]] = {
    ord("("): _Reader._mark, ord("0"): _Reader._drop, ord("1"): _Reader._drop_marked,
    ord("2"): _Reader._again, ord("N"): _Reader._none, 0x88: _Reader._true, 0x89: _Reader._false,
    ord("K"): _Reader._int1, ord("M"): _Reader._int2, ord("J"): _Reader._int4,
    0x8A: _Reader._long1, 0x8B: _Reader._long4, ord("G"): _Reader._float,
    0x8C: _Reader._text1, ord("X"): _Reader._text4, 0x8D: _Reader._text8,
    ord("U"): _Reader._text1, ord("T"): _Reader._text4,  # text of Python 2
    ord("C"): _Reader._bytes1, ord("B"): _Reader._bytes4, 0x8E: _Reader._bytes8,
    0x96: _Reader._bytes8,
    ord("q"): _Reader._put1, ord("r"): _Reader._put4, 0x94: _Reader._memoize,
    ord("h"): _Reader._get1, ord("j"): _Reader._get4,
    ord(")"): _Reader._empty_tuple, ord("t"): _Reader._tuple, 0x85: _Reader._tuple1,
    0x86: _Reader._tuple2, 0x87: _Reader._tuple3,
    ord("]"): _Reader._empty_list, ord("a"): _Reader._append, ord("e"): _Reader._appends,
    ord("}"): _Reader._empty_dict, ord("s"): _Reader._set_item, ord("u"): _Reader._set_items,
    0x8F: _Reader._empty_set, 0x90: _Reader._add_items, 0x91: _Reader._frozen_set,
    ord("c"): _Reader._global, 0x93: _Reader._stack_global, ord("R"): _Reader._reduce,
    0x81: _Reader._new_object, 0x92: _Reader._new_object_ex, ord("b"): _Reader._build,
    ord("Q"): _Reader._refer, 0x80: _Reader._protocol, 0x95: _Reader._frame,
}  # fmt: skip
