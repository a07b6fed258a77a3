"""Which rows a checkpoint saves first: counters, changes, and a sub-sampled set of used rows.

A selection that may save only r·N of N rows asks one of three (CPR section 4.2):

    MFU    count() at every step -> top(counters, r·N) -> clear() the counters of the saved rows
    SCAR   changes() from a copy of the saved rows -> top(changes, r·N)
    SSU    sample() at every step -> listed() -> reset()

``top`` does not sort. It guesses from a few thousand values an interval that has the k-th largest,
counts the values above it and, by class, those in it, and goes on inside the one class that has the
k-th, until it knows the smallest value to take: a few passes over N numbers, at the speed of memory
(a guess that misses costs passes, never a wrong row). Of rows with the same value the lower ids are
taken.

The list of SSU is not kept as numbers of rows but as a set of bits, as in bitmap.py, that never has
more than ``capacity`` members. 4·r bytes a row (table 1 of the paper) are 32·r bits; one bit a row
is less for every r above 1/32, has no duplicates by nature, is in order, and is a selection as it
stands. When more rows were used than fit, as many as are too many are discarded at random, all
members (the new ones too) with equal chance: rows that are used often come back, rows used once do
not. Of every ``period`` ids in a row one is sampled, at a random place among them: where a table is
asked for one id per data point, that is the paper's every second data point (period 2), and no
rhythm in the ids (bags of two, batches of two readers) can hide a row for ever.

Invariants:
- Ids are checked before anything is written: a bad one raises IndexError and changes nothing.
- A row whose counter or change is 0 is never chosen: fewer than k rows may come back.
- A set of SSU never has more than ``capacity`` members after a call, and only rows used since the
  last reset. The same seed and the same calls give the same set.

Not here: which tables and which r (the caller's); locking, as in bitmap.py.

Shapes: counters_N  accesses of N rows; values_N  counters or changes; keys_N  their bits; ids_K  K
row ids; now_ND, saved_ND  tables of N rows, D floats; words_W  a set of rows, a bit a row;
state_S  what SSU remembers between calls (see ``new_state``); keys_G  the G keys of a guess;
counts_C  the keys in each of C classes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast.kernels.compiling import helper, kernel
from holdfast.kernels.rows import bitmap
from holdfast.kernels.rows.bitmap import popcount, trailing_zeros
from holdfast.kernels.rows.gather import check_ids

Counters = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint32] | npt.NDArray[np.int32]
State = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint32] | npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

COUNTER_BYTES = 4
_STATE_WORDS = 4
_ONE = np.uint64(1)


def mfu_bytes(rows: int) -> int:
    """Memory that MFU keeps for a table: a counter a row.

    >>> mfu_bytes(1_000_000) / (1_000_000 * 64), mfu_bytes(1_000_000) / (1_000_000 * 512)
    (0.0625, 0.0078125)
    """
    return COUNTER_BYTES * rows


def ssu_bytes(rows: int) -> int:
    """Memory that SSU keeps for a table, for any r: a bit a row and four words of state.

    A quarter of the paper's list of r·N numbers at r = 0.125, and no less than a bit a row where r
    is below 1/32.

    >>> ssu_bytes(1_000_000)
    125032
    >>> round(ssu_bytes(1_000_000) / (1_000_000 * 64), 5), 0.125 * 4 / 64
    (0.00195, 0.0078125)
    """
    return 8 * (-(-rows // 64) + _STATE_WORDS)


def scar_bytes(rows: int, row_bytes: int) -> int:
    """Memory that SCAR keeps for a table: a copy of it, as it was saved.

    The changes, four bytes a row, are there only while a selection is made.

    >>> scar_bytes(1_000_000, 64) / (1_000_000 * 64)
    1.0
    """
    return rows * row_bytes


def top_bytes(rows: int, k: int) -> int:
    """Memory that ``top`` takes while it runs, besides the values: a bit a row, classes, k ids.

    >>> top_bytes(1_000_000, 125_000)
    1288840
    """
    return 8 * (-(-rows // 64) + 2 * _GUESS_KEYS + (1 << _CLASS_BITS) + min(k, rows))


# MFU: a counter a row.

_FULL = np.uint32(0xFFFFFFFF)


@kernel()
def count(counters_N: Counters, ids_K: Ids) -> None:
    """Add one access for each id, repeated ids included; a full counter stays full."""
    if not check_ids(ids_K, counters_N.size):
        raise IndexError("a row id is outside the table")
    for i in range(ids_K.size):
        row = np.uint64(ids_K[i])
        seen = counters_N[row]
        counters_N[row] = seen + np.uint32(seen != _FULL)


@kernel()
def clear(counters_N: Counters, ids_K: Ids) -> None:
    """Start the counters of rows again: they have been saved."""
    if not check_ids(ids_K, counters_N.size):
        raise IndexError("a row id is outside the table")
    for i in range(ids_K.size):
        counters_N[np.uint64(ids_K[i])] = np.uint32(0)


# SCAR: how far each row is from its saved values.


@helper()
def _is_same(now_D: Floats, saved_D: Floats) -> bool:
    """Whether two rows show the same numbers, a NaN being the same as a NaN."""
    for d in range(now_D.size):
        a, b = now_D[d], saved_D[d]
        if a != b and not (np.isnan(a) and np.isnan(b)):
            return False
    return True


# Sums may be taken in any order, so that they use the whole width of the machine; NaN and infinity
# keep their meaning.
@kernel(fastmath={"reassoc", "contract"})
def changes(now_ND: Floats, saved_ND: Floats, out_N: Floats) -> None:
    """Write the L2 norm of the change of each row since it was saved.

    The norm, not its square: the square of a small float32 is 0 and that of a large one infinity.
    Any two rows of different numbers have a norm above 0. A row that became, or stopped being, NaN
    or infinite has the norm infinity, and so comes first; one that was saved so has not changed.
    """
    count, width = now_ND.shape
    if saved_ND.shape != now_ND.shape or out_N.size != count:
        raise ValueError("the tables and the norms are not of the same rows")
    for i in range(count):
        total = 0.0
        for d in range(width):
            change = np.float64(now_ND[i, d] - saved_ND[i, d])
            total += change * change
        if np.isfinite(total):
            out_N[i] = np.sqrt(total)
        elif _is_same(now_ND[i], saved_ND[i]):
            out_N[i] = np.float32(0.0)
        else:
            out_N[i] = np.float32(np.inf)


# The k largest.

# Keys looked at to guess where the k-th largest lies, and the classes an interval is cut into.
_GUESS_KEYS = 8192
_CLASS_BITS = 12
_KEY_MAX = 0xFFFFFFFF


@helper()
def _masks(keys_N: Keys, w: int, lo: int, hi: int) -> tuple[np.uint64, np.uint64]:
    """Which keys of a word of 64 rows are above ``hi``, and which in [lo, hi]."""
    first = w * 64
    above = np.uint64(0)
    inside = np.uint64(0)
    for bit in range(min(64, keys_N.size - first)):
        key = np.int64(keys_N[first + bit])
        above |= np.uint64(key > hi) << np.uint64(bit)
        inside |= np.uint64((key >= lo) & (key <= hi)) << np.uint64(bit)
    return above, inside


@helper()
def _guess(keys_N: Keys, k: int) -> tuple[int, int]:
    """An interval of keys that most likely has the k-th largest, from a few of them."""
    stride = (keys_N.size // _GUESS_KEYS) | 1
    seen = (keys_N.size + stride - 1) // stride
    keys_G = np.empty(seen, np.int64)
    for i in range(seen):
        keys_G[i] = np.int64(keys_N[i * stride])
    keys_G.sort()
    share = min(k / keys_N.size, 1.0)
    place = seen * (1.0 - share)
    margin = 1.0 + 4.0 * np.sqrt(seen * share * (1.0 - share)) if stride > 1 else 1.0
    low, high = int(place - margin), int(place + margin)
    lo = int(keys_G[low]) if low > 0 else 1
    hi = int(keys_G[high]) if high < seen else _KEY_MAX
    return max(lo, 1), max(hi, 1)


@helper()
def _count_classes(keys_N: Keys, lo: int, hi: int, shift: int, counts_C: Ids) -> tuple[int, int]:
    """How many keys are above ``hi`` and how many in [lo, hi], these also by class of 2**shift."""
    counts_C[:] = 0
    over = 0
    within = 0
    for w in range((keys_N.size + 63) >> 6):
        above, inside = _masks(keys_N, w, lo, hi)
        over += int(np.int64(popcount(above)))
        within += int(np.int64(popcount(inside)))
        if lo < hi:
            while inside:
                row = w * 64 + np.int64(trailing_zeros(inside))
                counts_C[(np.int64(keys_N[row]) - lo) >> shift] += 1
                inside &= inside - _ONE
    if lo == hi:
        counts_C[0] = within
    return over, within


@kernel()
def _find(keys_N: Keys, k: int) -> tuple[int, int]:
    """The smallest key to take, and how many rows that have exactly it; needs a key and k >= 1.

    The guess makes the intervals small, never the answer wrong: where it missed, the k-th largest
    is known to be on one side of it.
    """
    lo, hi = _guess(keys_N, k)
    counts_C = np.empty(1 << _CLASS_BITS, np.int64)
    while True:
        shift = 0
        while (hi - lo) >> shift >> _CLASS_BITS:
            shift += 1
        over, within = _count_classes(keys_N, lo, hi, shift, counts_C)
        need = k - over
        if need <= 0:
            lo, hi = hi + 1, _KEY_MAX
        elif within < need and lo > 1:
            lo, hi = 1, lo - 1
        elif within < need:
            return 1, keys_N.size
        else:
            part = (hi - lo) >> shift
            while counts_C[part] < need:
                need -= int(counts_C[part])
                part -= 1
            lo += part << shift
            if shift == 0:
                return lo, need
            hi = min(hi, lo + (1 << shift) - 1)


@kernel()
def _take(keys_N: Keys, least: int, ties: int, words_W: Words) -> None:
    """Mark the rows above the key ``least``, and the first ``ties`` that have exactly it."""
    for w in range(words_W.size):
        above, equal = _masks(keys_N, w, least, least)
        there = int(np.int64(popcount(equal)))
        if there > ties:
            kept = np.uint64(0)
            for _ in range(ties):
                kept |= equal & (~equal + _ONE)
                equal &= equal - _ONE
            equal = kept
            there = ties
        ties -= there
        words_W[w] = above | equal


def _keys(values_N: Values) -> Keys:
    """Whole numbers in the order of the values that are above 0; a copy only if one is NaN."""
    if values_N.dtype == np.uint32:
        return values_N.view(np.uint32)
    if np.isnan(values_N.max()):
        values_N = np.where(np.isnan(values_N), np.float32(np.inf), values_N)
    # The bits of a float above 0 are in the order of the floats, and negative for all others.
    return values_N.view(np.int32)


def top_set(values_N: Values, k: int) -> Words:
    """The set of rows with the k largest values: fewer if fewer values are above 0.

    Values are uint32 or float32; NaN counts as infinity.

    >>> top_set(np.array([3, 0, 9, 3], np.uint32), 2)
    array([5], dtype=uint64)
    """
    if k < 0:
        raise ValueError("the number of rows to choose is negative")
    if values_N.ndim != 1 or values_N.dtype not in (np.uint32, np.float32):
        raise TypeError("values are one uint32 or float32 a row")
    words_W = bitmap.new(values_N.size)
    if k > 0 and values_N.size > 0:
        keys_N = _keys(values_N)
        least, ties = _find(keys_N, min(k, values_N.size))
        _take(keys_N, least, ties, words_W)
    return words_W


def top(values_N: Values, k: int) -> Ids:
    """The rows with the k largest values, ascending: the members of ``top_set``.

    >>> top(np.array([0.5, 0.0, 2.0, 0.5], np.float32), 2)
    array([0, 2])
    >>> top(np.array([0.5, 0.0, 2.0, 0.5], np.float32), 4)
    array([0, 2, 3])
    """
    ids_K: Ids = bitmap.ids(top_set(values_N, k), 0, values_N.size)
    return ids_K


# SSU: a set of used rows that stays small.

_RANDOM, _LISTED, _SKIP, _REST = 0, 1, 2, 3
_S6, _S12, _S25, _S27, _S32 = (np.uint64(n) for n in (6, 12, 25, 27, 32))
_STAR = np.uint64(2685821657736338717)
_LOW6 = np.uint64(63)
# A call is taken in pieces of a sixteenth of the capacity, with discards after each: a row used
# often then comes back before the end. Pieces of half the capacity lose a tenth of the accesses
# that a set covers, pieces of one id win nothing.
_PIECE_IDS_MIN = 64


def new_state(seed: int) -> State:
    """What SSU remembers besides its set: xorshift state, members, ids to pass, rest of a period.

    >>> new_state(7).nbytes, bool((new_state(7) == new_state(7)).all())
    (32, True)
    """
    state_S = np.zeros(_STATE_WORDS, np.uint64)
    # Seeds that are close must not start close; a xorshift never leaves 0.
    wrap = (1 << 64) - 1
    mixed = ((seed & wrap) + 0x9E3779B97F4A7C15) & wrap
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & wrap
    state_S[_RANDOM] = (mixed ^ (mixed >> 31)) or 1
    return state_S


@helper()
def _next(x: np.uint64) -> np.uint64:
    """The next state of a xorshift of 64 bits."""
    x ^= x >> _S12
    x ^= x << _S25
    return x ^ (x >> _S27)


@helper()
def _below(x: np.uint64, end: np.uint64) -> np.uint64:
    """A number in [0, end) from a state: the high half of its product with a constant, scaled."""
    return (((x * _STAR) >> _S32) * end) >> _S32


@helper()
def _probe(words_W: Words, x: np.uint64, over: int, tries: int) -> tuple[np.uint64, int]:
    """Discard ``over`` members found by guessing places, all with equal chance.

    Returns the next state and how many are left to discard after ``tries`` guesses.
    """
    size = np.uint64(words_W.size)
    while over > 0 and tries > 0:
        x = _next(x)
        tries -= 1
        w = _below(x, size)
        bit = _ONE << ((x >> _S6) & _LOW6)
        if words_W[w] & bit:
            words_W[w] ^= bit
            over -= 1
    return x, over


@helper()
def _sweep(words_W: Words, x: np.uint64, capacity: int) -> tuple[np.uint64, int]:
    """Discard what is over ``capacity`` in one pass over the set, all members with equal chance.

    Each member goes with the chance (still to discard) / (still to come). Returns the next state
    and how many members stay.
    """
    members = bitmap.count(words_W)
    over = members - capacity
    stay = min(members, capacity)
    for w in range(words_W.size):
        word = words_W[w]
        while word:
            bit = word & (~word + _ONE)
            word ^= bit
            x = _next(x)
            if np.int64(_below(x, np.uint64(members))) < over:
                words_W[w] ^= bit
                over -= 1
            members -= 1
    return x, stay


@kernel()
def sample(
    words_W: Words, state_S: State, ids_K: Ids, rows: int, capacity: int, period: int
) -> None:
    """Take one id of every ``period`` into the set; discard at random what is over ``capacity``.

    The work is O(ids) for a given r = capacity / rows: a discard guesses about 1 / r places, and
    where a pass over the set is less work than all the guesses, it makes that pass.
    """
    if rows < 0 or rows > 1 << 32 or words_W.size != (rows + 63) >> 6:
        raise ValueError("the set is not over that number of rows")
    if state_S.size != 4 or capacity < 0 or period < 1 or period > 1 << 31:
        raise ValueError("a capacity is at least 0, a period at least 1, a state four words")
    if not check_ids(ids_K, rows):
        raise IndexError("a row id is outside the table")
    x = state_S[_RANDOM]
    members = int(np.int64(state_S[_LISTED]))
    at = int(np.int64(state_S[_SKIP]))
    rest = int(np.int64(state_S[_REST]))
    if at < 0 or rest < 0 or members < 0:
        raise ValueError("the state is not one of new_state")
    piece = max(_PIECE_IDS_MIN, min(capacity, rows) >> 4) * period
    # Also without ids: the capacity may be smaller than at the last call.
    for start in range(0, max(ids_K.size, 1), piece):
        end = min(start + piece, ids_K.size)
        while at < end:
            row = np.uint64(ids_K[at])
            word = words_W[row >> _S6]
            bit = _ONE << (row & _LOW6)
            members += int(word & bit == np.uint64(0))
            words_W[row >> _S6] = word | bit
            x = _next(x)
            place = int(np.int64(_below(x, np.uint64(period))))
            at += 1 + rest + place
            rest = period - 1 - place
        over = members - capacity
        if over > 0:
            guesses = float(over) * rows / members
            if guesses < members + words_W.size:
                # Guesses that miss for much longer than they should end in a pass.
                x, over = _probe(words_W, x, over, 64 + 4 * int(guesses))
                members = capacity + over
            if over > 0:
                x, members = _sweep(words_W, x, capacity)
    state_S[_RANDOM] = x
    state_S[_LISTED] = np.uint64(members)
    state_S[_SKIP] = np.uint64(at - ids_K.size)
    state_S[_REST] = np.uint64(rest)


def listed(words_W: Words, rows: int) -> Ids:
    """The rows of the set, ascending.

    >>> words_W, state_S = bitmap.new(100), new_state(1)
    >>> sample(words_W, state_S, np.array([70, 3, 70]), 100, 12, 1)
    >>> listed(words_W, 100)
    array([ 3, 70])
    """
    ids_K: Ids = bitmap.ids(words_W, 0, rows)
    return ids_K


def reset(words_W: Words, state_S: State) -> None:
    """Empty the set: its rows have been saved. The random numbers go on where they are."""
    words_W[:] = 0
    state_S[_LISTED] = 0


def relist(
    words_W: Words, state_S: State, back_W: Words, rows: int, capacity: int, period: int
) -> None:
    """Take a set that ``reset`` emptied into the set again: it was not saved after all.

    As at every call of ``sample``, what is then over ``capacity`` is discarded at random, rows of
    both sets with equal chance.

    >>> words_W, state_S = bitmap.new(100), new_state(1)
    >>> sample(words_W, state_S, np.array([70, 3]), 100, 12, 1)
    >>> back_W = words_W.copy()
    >>> reset(words_W, state_S)
    >>> sample(words_W, state_S, np.array([3, 9]), 100, 12, 1)
    >>> relist(words_W, state_S, back_W, 100, 12, 1)
    >>> listed(words_W, 100)
    array([ 3,  9, 70])
    """
    bitmap.union_into(words_W, back_W)
    state_S[_LISTED] = bitmap.count(words_W)
    sample(words_W, state_S, np.empty(0, np.int64), rows, capacity, period)
