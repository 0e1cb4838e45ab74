from __future__ import annotations

import re
from decimal import Decimal

import pytest

from atom.runtime.requests.schemas.number_ranges import integers, numbers, scientific

ENDS = [0, 1, 5, 9, 10, 11, 19, 99, 100, 101, 120, 199, 255, 899, 999, 1000, 1001]


@pytest.mark.parametrize("low", ENDS)
def test_integers_are_those_between_the_ends(low: int):
    for high in [None, *(end for end in ENDS if end >= low)]:
        pattern = re.compile(integers(low, high))
        for number in range(1300):
            assert bool(pattern.fullmatch(str(number))) == (number >= low and (high is None or number <= high))
        assert bool(pattern.fullmatch("123456789")) == (high is None)
        assert not pattern.fullmatch("0123") and not pattern.fullmatch("")


def test_large_integers_are_exact():
    low, high = 9007199254740993, 18446744073709551615
    pattern = re.compile(integers(low, high))
    for number in (low - 1, low, low + 1, 10**16 - 1, 10**16, 10**18, high - 1, high, high + 1):
        assert bool(pattern.fullmatch(str(number))) == (low <= number <= high)
    assert integers(low, low) == str(low)
    assert len(integers(0, 17976931348623157 * 10**292)) < 2000, "zeros at the end are counted, not nested"


@pytest.mark.parametrize("open_low", [False, True])
@pytest.mark.parametrize("open_high", [False, True])
def test_numbers_have_fractions(open_low: bool, open_high: bool):
    for low, high in [(3, 12), (9, 10), (100, None), (0, 1)]:
        pattern = re.compile(numbers(low, high, open_low=open_low, open_high=open_high))
        for whole in (0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 99, 100, 101):
            for fraction in ("", ".0", ".5", ".001"):
                number = Decimal(f"{whole}{fraction}")
                is_low = number < low or (open_low and number == low)
                is_high = high is not None and (number > high or (open_high and number == high))
                assert bool(pattern.fullmatch(f"{whole}{fraction}")) == (not is_low and not is_high)


def test_numbers_with_an_exponent_are_less_than_the_limit():
    pattern = re.compile(scientific(34 * 10**37))
    for text in ("1e0", "9.99e37", "1e+5", "1e-7", "2E12"):
        assert pattern.fullmatch(text)
    for text in ("1e38", "9e99", "0e1", "12e1", "1e400"):
        assert not pattern.fullmatch(text)
