"""Numbers as people read them: sizes, shares, durations, ages, counts."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(count: float) -> str:
    """A number of bytes.

    >>> [size(n) for n in (0, 999, 1000, 64_000_000, 1.25e12)]
    ['0 B', '999 B', '1.0 kB', '64.0 MB', '1.2 TB']
    """
    value, unit = float(count), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def share(part: float, whole: float) -> str:
    """A part of a whole in per cent.

    >>> share(1, 16), share(3, 2), share(1, 100_000), share(1, 0)
    ('6.2 %', '150 %', '0.0 %', '–')
    """
    if not whole:
        return "–"
    percent = 100.0 * part / whole
    return f"{percent:.0f} %" if percent >= 99.95 else f"{percent:.1f} %"


def count(number: int) -> str:
    """A whole number with its thousands apart.

    >>> count(1234567)
    '1,234,567'
    """
    return f"{number:,}"


def counted(number: int, one: str, many: str | None = None) -> str:
    """A number and its noun.

    >>> counted(1, "step"), counted(2000, "step"), counted(2, "delta", "deltas")
    ('1 step', '2,000 steps', '2 deltas')
    """
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def duration(seconds: float) -> str:
    """A span of time.

    >>> [duration(s) for s in (0.00004, 0.0123, 1.5, 75, 7300)]
    ['0.0 ms', '12.3 ms', '1.50 s', '1 min 15 s', '2 h 1 min']
    """
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def age(seconds: float) -> str:
    """How long ago, coarsely; a clock that went backwards is now.

    >>> [age(s) for s in (-1, 12, 300, 7200, 200_000)]
    ['0 s', '12 s', '5 min', '2 h', '2 d']
    """
    whole = max(0, int(seconds))
    for length, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if whole >= length:
            return f"{whole // length} {unit}"
    return f"{whole} s"
