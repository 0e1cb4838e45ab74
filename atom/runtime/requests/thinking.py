"""Limit how long an answer thinks: force its end marker after a budget.

    markers = ReasoningMarkers.encode("<think>", ["</think>"], tokenizer)
    budget = ThinkingBudget(markers, 100, prompt)
    budget.forced               # the token that has to come next; None: any may
    budget.push(token)          # the next token of the answer

A budget knows the prompt and the tokens pushed to it and nothing else, so that preemption, chunks and the other rows of
a batch do not matter to it. It counts as vLLM does (vllm/v1/worker/gpu/sample/thinking_budget.py): tokens after the
marker that opens the reasoning, those that the prompt already has among them. Unlike there, reasoning that begins once
more is of the same budget: an answer that has spent it ends each further block where it begins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atom.checkpoint import Tokenizer

MAX_MARKER = 32  # tokens that a marker may take, however it is spelled
ANY_NUMBER = 1 << 62


@dataclass(frozen=True)
class Marker:
    text: str
    tokens: list[int]  # as the tokenizer writes it

    def ends(self, tail: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
        """Whether the last token completes the marker, be it in other tokens than its text has by itself."""
        count = len(self.tokens)
        return tail[-count:] == self.tokens or (count > 1 and self.text in decode(tail))


@dataclass(frozen=True)
class ReasoningMarkers:
    """What is around the reasoning of a model."""

    begin: Marker
    ends: list[Marker]  # any of them ends it; the first one is forced
    decode: Callable[[Sequence[int]], str]

    @classmethod
    def encode(cls, begin: str, ends: Sequence[str], tokenizer: Tokenizer) -> ReasoningMarkers:
        def read(text: str) -> Marker:
            return Marker(text, tokenizer.encode(text, add_special_tokens=False))

        def decode(tokens: Sequence[int]) -> str:
            return tokenizer.decode(list(tokens), skip_special_tokens=False)

        return cls(read(begin), list(map(read, ends)), decode)

    @property
    def num_tokens(self) -> int:
        """One more than the largest token of a marker."""
        return 1 + max(token for each in (self.begin, *self.ends) for token in each.tokens)

    def find_open(self, prompt: Sequence[int]) -> int | None:
        """The number of a prompt's tokens ahead of reasoning that it leaves open; None if it leaves none open."""
        markers = [self.begin, *self.ends]
        lasts = {each.tokens[-1] for each in markers}
        for stop in range(len(prompt), 0, -1):
            if prompt[stop - 1] in lasts:
                for each in markers:
                    if prompt[max(stop - len(each.tokens), 0) : stop] == each.tokens:
                        return stop if each is self.begin else None
        is_spelled = len(self.begin.tokens) > 1 and self.decode(prompt[-MAX_MARKER:]).rstrip().endswith(self.begin.text)
        return len(prompt) if is_spelled else None


class ThinkingBudget:
    """The tokens that one sequence may still think."""

    def __init__(self, markers: ReasoningMarkers, num_tokens: int, prompt: Sequence[int]) -> None:
        """num_tokens: that the reasoning may have, all its blocks together"""
        self._markers, self._left = markers, num_tokens
        start = markers.find_open(prompt)
        self._is_open = start is not None
        self._tail: list[int] = []  # the last tokens since a marker
        if start is not None:
            self._left -= len(prompt) - start
            self._tail = list(prompt[start:][-MAX_MARKER:])

    def copy(self) -> ThinkingBudget:
        return copy.copy(self)  # its list is replaced, and never changed

    @property
    def forced(self) -> int | None:
        """The token that has to come next, of the marker that ends the reasoning; None if any may."""
        if not self._is_open or self._left > 0:
            return None
        end = self._markers.ends[0].tokens
        sizes = range(min(len(end) - 1, len(self._tail)), 0, -1)  # a part of the marker may be there already
        return end[next((size for size in sizes if self._tail[-size:] == end[:size]), 0)]

    @property
    def num_free(self) -> int:
        """The number of next tokens of which none is forced, unless reasoning begins with one of them."""
        return max(self._left, 0) if self._is_open else ANY_NUMBER

    def push(self, token: int) -> None:
        """Take the next token of the answer."""
        markers, self._tail = self._markers, [*self._tail, token][-MAX_MARKER:]
        if not self._is_open:
            if markers.begin.ends(self._tail, markers.decode):
                self._is_open, self._tail = True, []
            return
        self._left -= 1
        for end in markers.ends:
            if end.ends(self._tail, markers.decode):
                self._left += len(end.tokens)  # which are no reasoning
                self._is_open, self._tail = False, []
                return
