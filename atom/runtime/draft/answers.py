"""Keep the tokens of the latest answers, to be looked up by their suffixes.

    answers = Answers(max_answers=10_000)
    answers.add([5, 6, 7, 8], salt=b"")
    answers.find(array("i", [1, 5, 6]), salt=b"")       # 2, the index, [place of the 7], 0
    answers.find(array("i", [1, 5, 6]), salt=b"other")  # None: requests of another salt share nothing

The oldest answers are overwritten. A salt has a number, which is in each of its tokens: those of others never match.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from atom.runtime.draft.suffix_index import BREAK, SuffixIndex

MAX_TOKENS = 1 << 20  # of all answers, in 40 MB
TOKEN_BITS = 20  # the number of its salt comes before these bits of a token, low enough to be hashed


class Match(NamedTuple):
    """Where the last tokens of a sequence stood earlier."""

    length: int  # the number of these tokens
    origin: SuffixIndex
    places: list[int]  # after them, the latest first
    offset: int = 0  # of the tokens there


class Answers:
    """A bounded number of answers, and of their tokens."""

    def __init__(self, max_answers: int, max_tokens: int = MAX_TOKENS) -> None:
        """max_tokens: rounded up to a power of two"""
        self._max_answers = max_answers
        self._index = SuffixIndex(max_tokens - 1 if max_answers else 0, "q")
        self._kept: deque[tuple[int, bytes]] = deque()  # the places where they begin, and their salts
        self._numbers: dict[bytes, int] = {}  # by salt
        self._counts: Counter[bytes] = Counter()  # answers by salt
        self._unused = count()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes

    def find(self, suffix: array[int], salt: bytes) -> Match | None:
        """Where a suffix stood in answers of this salt; None if it did not."""
        number = self._numbers.get(salt)
        if number is None:
            return None
        offset = number << TOKEN_BITS
        length, places = self._index.find(array("q", [token + offset for token in suffix] if offset else suffix))
        return Match(length, self._index, places, offset) if places else None

    def add(self, tokens: Sequence[int], salt: bytes) -> None:
        """Keep an answer, in place of the oldest ones; of a very long one its end."""
        if len(tokens) < 2 or not self._max_answers:
            return
        index = self._index
        tokens = tokens[-index.size // 4 :]
        num_tokens = len(tokens) + 2
        if index.offset(index.end) + num_tokens > index.size:
            index.end += -index.end % index.size
        while self._kept and (len(self) == self._max_answers or self._kept[0][0] + index.size < index.end + num_tokens):
            self._drop_oldest()
        if salt not in self._numbers:
            self._numbers[salt] = next(self._unused)
        self._counts[salt] += 1
        self._kept.append((index.end, salt))
        index.first = self._kept[0][0]
        offset = self._numbers[salt] << TOKEN_BITS
        index.write([BREAK, *(token + offset for token in tokens), BREAK])

    def _drop_oldest(self) -> None:
        _, salt = self._kept.popleft()
        self._counts[salt] -= 1
        if not self._counts[salt]:
            del self._counts[salt], self._numbers[salt]
