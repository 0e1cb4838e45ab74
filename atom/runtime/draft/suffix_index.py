"""Index tokens by their suffixes, in arrays.

    index = SuffixIndex(num_tokens=4096)
    index.extend([5, 6, 7, 8, 5, 6])
    index.find(index.suffix(24))                # 2, [3]: the last 2 tokens also stood before place 3, that of the 7

The places after an n-gram are a chain, the latest first, as in LZ77, for two n; a match is extended back from there.
A place counts tokens, so it never changes: its token is at the place modulo the size of the arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

SIZES = 3, 1  # n of the n-grams
MAX_PLACES = 12  # the latest ones of a chain that are compared
FEW = 32  # tokens that are indexed one by one; numpy takes longer for so few
BREAK = -1  # comes before the tokens of a stream, and after those of one that has ended; no suffix has it
Ints = npt.NDArray[np.int64]
HASH_BITS = 32
MASK, FACTOR = (1 << HASH_BITS) - 1, 0x9E37_79B1  # Knuth's multiplicative hash


class SuffixIndex:
    """Finds where the last tokens of a sequence stood earlier.

    Extended, it grows. Ends of streams that are written over are the caller's: `runtime.draft.answers`.
    """

    def __init__(self, num_tokens: int, typecode: str = "i") -> None:
        """
        num_tokens: that there is room for; rounded up to a power of two
        typecode: of the arrays' tokens and places
        """
        self.typecode = typecode
        self._allocate(1 << max(num_tokens, FEW).bit_length())
        self.tokens[0] = BREAK
        self.first = self.end = 1  # the oldest place whose token is still there, and that of the next token

    @property
    def size(self) -> int:
        """The tokens that there is room for."""
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        return self.tokens.itemsize * self.size * (1 + 2 * len(SIZES))

    def suffix(self, max_tokens: int) -> array[int]:
        """The last tokens, if the index has only been extended."""
        return self.tokens[max(self.end - max_tokens, 1) : self.end]

    def offset(self, place: int) -> int:
        """The offset of a place in `tokens`."""
        return place & self._mask

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the next tokens; makes room for them."""
        if self.end + len(tokens) > self.size:
            known = self.tokens[: self.end]
            self._allocate(1 << (self.end + len(tokens)).bit_length())
            self.tokens[: self.end] = known
            if self.end > 1:
                self._index_many(1, self.end)
        self.write(tokens)

    def write(self, tokens: Sequence[int]) -> None:
        """Index the next tokens in place of the oldest ones. They must not cross the end of the arrays."""
        start, at = self.end, self.offset(self.end)
        assert at + len(tokens) <= self.size, "a match is contiguous"
        self.end = start + len(tokens)
        if len(tokens) > FEW:
            self.tokens[at : at + len(tokens)] = array(self.typecode, tokens)
            self._index_many(start, self.end)
            return
        values, shift = self.tokens, self._shift
        (latest_3, latest_1), (before_3, before_1) = self._latest, self._before
        third, second, last = values[at - 3], values[at - 2], values[at - 1]
        for place, token in enumerate(tokens, start):
            triple = ((last ^ second << 7 ^ third << 14) * FACTOR & MASK) >> shift
            single = (last * FACTOR & MASK) >> shift
            before_3[at], latest_3[triple] = latest_3[triple], place
            before_1[at], latest_1[single] = latest_1[single], place
            values[at] = token
            third, second, last, at = second, last, token, at + 1

    def find(self, suffix: array[int]) -> tuple[int, list[int]]:
        """The length of the longest match of a suffix, and the places after it, the latest first.

        Of each chain, the latest MAX_PLACES are compared.
        """
        tokens, mask, max_length = self.tokens, self._mask, len(suffix)
        for size, latest, before in zip(SIZES, self._latest, self._before, strict=True):
            if size > max_length:
                continue
            key = suffix[-1] if size == 1 else suffix[-1] ^ suffix[-2] << 7 ^ suffix[-3] << 14
            place, places = latest[(key * FACTOR & MASK) >> self._shift], list[int]()
            length, last = size, suffix[-size:]
            for _ in range(MAX_PLACES):
                if place < self.first:
                    break
                at = place & mask
                if tokens[at - length : at] == last:
                    longer = length
                    while longer < max_length and tokens[at - longer - 1] == suffix[-longer - 1]:
                        longer += 1
                    if longer > length:
                        length, last, places = longer, suffix[-longer:], []
                    places.append(place)
                place = before[at]
            if places:
                return length, places
        return 0, []

    def match(self, suffix: array[int], place: int) -> int:
        """The number of last tokens of a suffix that also stand before a place."""
        tokens, at, length = self.tokens, self.offset(place), 0
        if tokens[at - len(suffix) : at] == suffix:
            return len(suffix)
        while length < len(suffix) and tokens[at - length - 1] == suffix[-length - 1]:
            length += 1
        return length

    def _allocate(self, size: int) -> None:
        empty = bytes(size * array(self.typecode).itemsize)
        self.tokens = array(self.typecode, empty)
        self._latest = tuple(array(self.typecode, empty) for _ in SIZES)  # the latest place of a chain, by hash
        self._before = tuple(array(self.typecode, empty) for _ in SIZES)  # by place, the one before it in its chain
        self._mask, self._shift = size - 1, HASH_BITS + 1 - size.bit_length()

    def _index_many(self, start: int, stop: int) -> None:
        """Index places whose tokens are written, with numpy."""
        at, num = self.offset(start), stop - start
        values = np.frombuffer(self.tokens, self.typecode)[max(at - 3, 0) : at + num - 1].astype(np.int64)
        values = np.concatenate([np.full(num + 2 - len(values), BREAK), values])
        third, second, last = (values[first : first + num] for first in range(3))
        places, keys = np.arange(start, stop), (last ^ second << 7 ^ third << 14, last)
        for key, latest, before in zip(keys, self._latest, self._before, strict=True):
            newest = np.frombuffer(latest, self.typecode)
            hashes = (key * FACTOR & MASK) >> self._shift
            order = sort(hashes)
            hashes, ordered = hashes[order], places[order]
            begins = np.concatenate([[True], hashes[1:] != hashes[:-1]])
            earlier = np.concatenate([[0], ordered[:-1]])
            earlier[begins] = newest[hashes[begins]]
            np.frombuffer(before, self.typecode)[at + order] = earlier
            newest[hashes] = ordered  # the last of equal hashes stays


def sort(hashes: Ints) -> Ints:
    """The stable order of hashes, 16 bits at a time, for which numpy has a radix sort."""
    order = hashes.astype(np.uint16).argsort(kind="stable")
    if hashes.max() > np.iinfo(np.uint16).max:
        order = order[(hashes[order] >> 16).astype(np.uint16).argsort(kind="stable")]
    return order
