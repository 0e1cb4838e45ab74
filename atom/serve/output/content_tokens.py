"""Find the tokens of an answer's content, by where it was in the text.

    tokens = ContentTokens(tokenizer, prompt, params)
    tokens.push(output.logprobs, is_last=output.finish is not None)
    delta = parsers.next(parser, output.text, is_last=output.finish is not None)
    tokens.take(delta.places)          # the Logprobs of the tokens of delta.content

A token belongs to the content if any of its text does: of reasoning, markers and calls it is none. Tokens that make a
character together all have its place. A token counts once, where its text begins; one without text never does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from atom.runtime.requests.detokenizer import Detokenizer, TextCodec
from atom.runtime.types import Logprobs
from atom.sampling_params import SamplingParams
from atom.serve.output.incremental_text import Span


class ContentTokens:
    def __init__(self, tokenizer: TextCodec, prompt: Sequence[int], params: SamplingParams) -> None:
        """params: with which the engine makes text of the tokens"""
        self._detokenizer = Detokenizer(tokenizer, prompt, replace(params, stop_strings=None))  # a place is of all text
        self._num_characters = 0
        self._held: list[Logprobs] = []  # tokens whose text waits for that of the next ones
        self._tokens: deque[tuple[Span, Logprobs]] = deque()

    def push(self, logprobs: Iterable[Logprobs], *, is_last: bool) -> None:
        """Take the next tokens of the answer."""
        for each in logprobs:
            num_held = self._detokenizer.num_held
            text = self._detokenizer.push(each.token)
            if text or self._detokenizer.num_held > num_held:
                self._held.append(each)
            self._place(text)
        if is_last:
            self._place(self._detokenizer.finish())

    def take(self, places: Iterable[Span]) -> list[Logprobs]:
        """The tokens at the next places of content, in order; those before are dropped."""
        found: list[Logprobs] = []
        for start, end in places:
            while self._tokens and self._tokens[0][0][0] < end:
                (_, token_end), logprobs = self._tokens.popleft()
                if token_end > start:
                    found.append(logprobs)
        return found

    def _place(self, text: str) -> None:
        """Give the held tokens the place of their text, if it has come."""
        if text:
            end = self._num_characters + len(text)
            self._tokens += [((self._num_characters, end), each) for each in self._held]
            self._num_characters, self._held = end, []
