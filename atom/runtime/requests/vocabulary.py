"""The tokens of a model: check them, and encode text as them.

vocabulary = Vocabulary(49152, frozenset({2}), tokenizer)
vocabulary.tokenize("Hello")        # [19556]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from atom.checkpoint import Tokenizer
from atom.errors import RequestError
from atom.runtime.requests.thinking import ReasoningMarkers, ThinkingBudget
from atom.sampling_params import SamplingParams

MAX_BAD_WORDS = 1 << 16  # characters of a request's bad words together: one thread encodes those of all requests


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that a model computes with; any thread may use it."""

    size: int
    stop_ids: frozenset[int]  # tokens that end an answer
    tokenizer: Tokenizer | None  # None: the checkpoint has none
    find_reasoning: Callable[[], ReasoningMarkers | None] = lambda: None  # None: the model's reasoning has no markers

    def tokenize(self, prompt: str | list[int]) -> list[int]:
        """A prompt's token ids. RequestError if it is empty or has a token that the model does not have."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the checkpoint has no tokenizer; give the prompt as a list of token ids")
            prompt = self.tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple):
            raise RequestError(
                f"{prompt!r} is not a prompt; a prompt is a string or a list of token ids, as in [[1, 2]]"
            )
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < self.size:
            return list(prompt)  # ten times as fast as a look at each one
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < self.size:
                raise RequestError(
                    f"{token!r} in the prompt is not a token id; they are numbers from 0 to {self.size - 1}"
                )
        return [int(token) for token in prompt]

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """The token ids of a conversation in the chat template. RequestError if the checkpoint has none."""
        if self.tokenizer is None:
            raise RequestError("the checkpoint has no tokenizer; give prompts as lists of token ids, without job.chat")
        return self.tokenizer.encode_chat(messages)

    def encode_bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """The tokens of each text at the start of an answer and, if they differ in the first one, after a space.

        As in vLLM's SamplingParams.update_from_tokenizer. RequestError without a tokenizer, or for too long texts.
        """
        words, found = list(words), list[list[int]]()
        if (size := sum(map(len, words))) > MAX_BAD_WORDS:
            raise RequestError(f"bad_words: the texts have {size} characters, more than {MAX_BAD_WORDS}; give fewer")
        for word in words:
            if self.tokenizer is None:
                raise RequestError("bad_words needs a tokenizer, which the checkpoint has not; use logit_bias")
            plain, spaced = (
                self.tokenizer.encode(f"{space}{word.lstrip()}", add_special_tokens=False) for space in ("", " ")
            )
            if not plain:
                raise RequestError(f"bad_words: {word!r} has no token; give a word")
            found += [plain, spaced] if plain[0] != spaced[0] and len(plain) == len(spaced) else [plain]
        return found

    def limit_thinking(self, params: SamplingParams, prompt: list[int]) -> ThinkingBudget | None:
        """The budget of an answer's reasoning, None without one. RequestError if the model's has no markers."""
        if params.thinking_token_budget is None:
            return None
        markers = self.find_reasoning()
        if markers is None:
            raise RequestError("thinking_token_budget: nothing marks where this model's reasoning ends; leave it out")
        return ThinkingBudget(markers, params.thinking_token_budget, prompt)

    def check(self, params: SamplingParams) -> None:
        """RequestError if the parameters name a token that the model does not have, or need a tokenizer."""
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop_strings needs a tokenizer, which the checkpoint has not; use stop_token_ids")
        for token in (*(params.stop_token_ids or ()), *(params.logit_bias or ()), *(params.allowed_token_ids or ())):
            if not 0 <= token < self.size:
                raise RequestError(f"{token} is not a token id; they are numbers from 0 to {self.size - 1}")
