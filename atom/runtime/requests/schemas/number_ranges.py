"""Write regular expressions for numbers within exact bounds.

    integers(9007199254740993, 9007199254740993)     # "9007199254740993"
    integers(5, 120)                                 # "(?:[5-9]|[1-9][0-9]|1(?:[0-1][0-9]|20))"
    numbers(2**53, 10**30, open_high=True)           # with fractions

llguidance reads bounds as float64. These are for bounds beyond 2^53, where a float64 skips integers.
"""

from __future__ import annotations

FRACTION = r"(?:\.[0-9]+)?"


def integers(low: int, high: int | None) -> str:
    """Regular expression of the integers from low >= 0 to high; None: no end."""
    first = len(str(low))
    if high is None:
        return either([*_of_length(low, 10**first - 1), f"[1-9][0-9]{{{first},}}"])
    last = len(str(high))
    if first == last:
        return either(_of_length(low, high))
    middle = [f"[1-9][0-9]{{{first},{last - 2}}}"] if last - first > 1 else []
    return either([*_of_length(low, 10**first - 1), *middle, *_of_length(10 ** (last - 1), high)])


def numbers(low: int, high: int | None, *, open_low: bool = False, open_high: bool = False) -> str:
    """Regular expression of the numbers from low >= 0 to high, in decimals without an exponent."""
    parts = [rf"{low}\.[0-9]*[1-9][0-9]*"] if open_low and low != high else []
    start = low + 1 if open_low else low
    if high is None:
        return either([*parts, integers(start, None) + FRACTION])
    if start < high:
        parts.append(integers(start, high - 1) + FRACTION)
    if not open_high and start <= high:
        parts.append(rf"{high}(?:\.0+)?")
    return either(parts)


def scientific(limit: int) -> str:
    """Regular expression of numbers above 0 with an exponent that are less than limit, which is 10 or more."""
    return rf"[1-9]{FRACTION}[eE](?:\+?{integers(0, len(str(limit)) - 2)}|-[0-9]{{1,2}})"


def either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


def _of_length(low: int, high: int) -> list[str]:
    """The integers from low to high, which have the same number of digits."""
    return _between(str(low), str(high))


def _between(low: str, high: str) -> list[str]:
    if not low.strip("0") and not high.strip("9"):
        return [_digits(len(low))]
    if low[0] == high[0]:
        return [low[0] + either(_between(low[1:], high[1:]))] if low[1:] else [low]
    if not low[1:]:
        return [f"[{low}-{high}]"]
    rest = len(low) - 1
    start, end = int(low[0]), int(high[0])
    parts = []
    if low[1:].strip("0"):
        parts.append(low[0] + either(_between(low[1:], "9" * rest)))
        start += 1
    if high[1:].strip("9"):
        end -= 1
    if start <= end:
        parts.append(f"[{start}-{end}]" + _digits(rest))
    if high[1:].strip("9"):
        parts.append(high[0] + either(_between("0" * rest, high[1:])))
    return parts


def _digits(count: int) -> str:
    return "[0-9]" if count == 1 else f"[0-9]{{{count}}}" if count else ""
