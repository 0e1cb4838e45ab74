"""Draft what followed the last tokens earlier, in the request or in answers.

    drafter = SuffixDrafter(7, SuffixLimits())
    sequence.drafts = drafter.draft(sequence, max_drafts=7)     # the longer the match, the more
    drafter.forget(sequence)                                    # its answer is looked up from now on

As in SuffixDecoding (Oliaro 2024), a longer match is followed for longer, as long as enough of the places that match
agree. Besides, an answer that edits a text goes on copying it after each change: so near the places that it has
followed, matches count that are too short to tell anything elsewhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from atom.config.limits import SuffixLimits
from atom.runtime.draft.answers import Answers, Match
from atom.runtime.draft.suffix_index import BREAK, SuffixIndex
from atom.runtime.step.input import NUM_REPORTED
from atom.runtime.types import Sequence

MAX_INDEXED = 1 << 15  # tokens of a sequence that a step indexes, so that a long prompt delays nobody
ROOM = 1024  # tokens of an answer that an index has room for before it grows
NUM_SOURCES = 2  # that are remembered of a sequence
SOURCE_LENGTH = 8  # tokens of a match whose place becomes a source
SURE_LENGTH = 16  # of a match that none of a source can better
BACK, AHEAD = 4, 128  # places around a source's that are tried


class Source(NamedTuple):
    """A place that an answer has followed."""

    origin: SuffixIndex
    place: int
    end: int  # the place of the sequence's next token, when that was expected to be the one at `place`
    offset: int  # as in `Match`

    def encode(self, suffix: array[int]) -> array[int]:
        """A suffix as the index has its tokens."""
        if not self.offset and self.origin.typecode == suffix.typecode:
            return suffix
        return array(self.origin.typecode, [token + self.offset for token in suffix] if self.offset else suffix)


@dataclass
class Stream:
    """The tokens of a sequence, and what it copies from."""

    index: SuffixIndex
    sources: list[Source] = field(default_factory=list)  # the latest first

    def note(self, match: Match) -> None:
        """Note what is followed, in place of a source that is near it."""
        source = Source(match.origin, match.places[0], self.index.end, match.offset)
        others = (
            each
            for each in self.sources
            if each.origin is not source.origin or abs(each.place - source.place + source.end - each.end) > AHEAD
        )
        self.sources = [source, *others][:NUM_SOURCES]


class SuffixDrafter:
    """Drafts of the host, which has to know the newest token."""

    def __init__(self, num_tokens: int, limits: SuffixLimits) -> None:
        """num_tokens: max drafts"""
        assert num_tokens < NUM_REPORTED, "a step's draws of a sequence must be distinguished"
        self._limits, factor = limits, limits.max_spec_factor
        # of the tokens of the tree's depth, those that a match of the others allows
        self._num_tokens = min(num_tokens, int(limits.max_tree_depth * factor / (1 + factor)))
        self._streams: dict[str, Stream] = {}  # by sequence id
        self.answers = Answers(limits.max_cached_requests)

    def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
        if (stream := self._streams.get(sequence.id)) is None:
            stream = self._streams[sequence.id] = Stream(SuffixIndex(len(sequence.prompt) + ROOM))
        index = stream.index
        start = index.end - 1
        index.extend(sequence.shown_tokens(start, min(sequence.num_tokens, start + MAX_INDEXED)))
        if index.end - 1 < sequence.num_tokens:
            return []
        match = self._find(stream, sequence.salt)
        if match is None:
            return []
        if match.length >= SOURCE_LENGTH:
            stream.note(match)
        num_drafts = min(max_drafts, self._num_tokens, int(match.length * self._limits.max_spec_factor))
        return follow(match, num_drafts, self._limits.min_token_prob)

    def forget(self, sequence: Sequence) -> None:
        self._streams.pop(sequence.id, None)
        self.answers.add(sequence.output, sequence.salt)

    def _find(self, stream: Stream, salt: bytes) -> Match | None:
        """The best match of a stream's last tokens."""
        suffix = stream.index.suffix(self._limits.max_tree_depth)
        if stream.sources and (followed := stay(stream.sources[0], suffix, stream.index.end)) is not None:
            return followed
        length, places = stream.index.find(suffix)
        best = Match(length, stream.index, places) if places else None
        if length >= SURE_LENGTH:
            return best
        other = self.answers.find(suffix, salt)
        if other is not None and other.length > length:
            best, length = other, other.length
        if length >= SURE_LENGTH:
            return best
        for source in stream.sources:
            match = resume(source, suffix, stream.index.end)
            if match is not None and match.length + 1 >= length:
                best, length = match, match.length + 2
        return best


def stay(source: Source, suffix: array[int], end: int) -> Match | None:
    """The match of a source that is still followed. end: the place of the sequence's next token"""
    index, place = source.origin, source.place + end - source.end
    if source.place < index.first or place >= index.end:
        return None
    length = index.match(source.encode(suffix), place)
    return Match(length, index, [place], source.offset) if length >= SURE_LENGTH else None


def resume(source: Source, suffix: array[int], end: int) -> Match | None:
    """The longest match of a suffix near a source; of equal ones that nearest to where the source would be now.

    end: the place of the sequence's next token
    """
    index, start, since = source.origin, source.place, end - source.end
    if start < index.first:  # overwritten
        return None
    suffix, zero = source.encode(suffix), start - index.offset(start)  # zero: the place of the first offset
    stop = min(start + AHEAD, index.end - 1, zero + index.size)
    places = (zero + at for at in find_all(index.tokens, suffix[-1], max(start - BACK - zero, 0), stop - zero))
    found = max(((index.match(suffix, place), -abs(start + since - place), place) for place in places), default=None)
    return None if found is None else Match(found[0], index, [found[2]], source.offset)


def find_all(tokens: array[int], token: int, start: int, stop: int) -> Iterator[int]:
    """The offsets after each occurrence of a token from start to stop."""
    with suppress(ValueError):
        while True:
            start = tokens.index(token, start, stop) + 1
            yield start


def follow(match: Match, num_drafts: int, min_prob: float) -> list[int]:
    """The tokens at the latest place of a match, as long as min_prob of its places agree."""
    drafts = copy(match.origin, match.places[0], num_drafts)
    if min_prob * len(match.places) > 1:  # it does not suffice that the latest one agrees with itself
        others = (copy(match.origin, place, num_drafts) for place in match.places)
        agreed = [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, other, strict=False)))
            for other in others
        ]
        needed = min_prob * len(agreed)
        drafts = [token for number, token in enumerate(drafts) if sum(each > number for each in agreed) >= needed]
    return [token - match.offset for token in drafts] if match.offset else drafts


def copy(index: SuffixIndex, place: int, num_tokens: int) -> list[int]:
    """The tokens at a place and after it, up to the end of their stream; those of one that goes on are repeated."""
    at = index.offset(place)
    tokens = index.tokens[at : at + min(num_tokens, index.end - place)].tolist()
    if BREAK in tokens:
        return tokens[: tokens.index(BREAK)]
    return (tokens * -(-num_tokens // len(tokens)))[:num_tokens] if tokens else tokens
