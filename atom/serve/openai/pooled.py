"""Requests whose inputs become embeddings: tokenize, cut, pool.

class Scores(PooledResponder[ScoreRequest]):
    prefix = "score"                         # of its ids

    def prompts(self) -> list[list[int]]:
        return [self.fit("text_1", text) for text in texts]
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from atom.embeddings import pooling_of
from atom.sampling_params import SamplingParams
from atom.serve.context import CUT_TOKENS, Context
from atom.serve.http.errors import FieldError
from atom.serve.http.response import EngineRequest, Responder
from atom.serve.ids import new_id
from atom.serve.openai.params import check_tokens, request_options
from atom.serve.openai.schema import PooledRequest

BodyT = TypeVar("BodyT", bound=PooledRequest)


class PooledResponder(Responder, Generic[BodyT]):
    renders = False
    prefix: ClassVar[str]  # of ids

    def __init__(self, context: Context, body: BodyT) -> None:
        id = new_id(self.prefix) if body.request_id is None else f"{self.prefix}-{body.request_id}"
        super().__init__(context, body.model, id, is_streamed=False)
        self.body, self.pooler, self.created = body, context.config.serve.pooler_config, int(time.time())

    @property
    def classifies(self) -> bool:
        """Whether the choices' embeddings are scores of labels."""
        return False

    @abstractmethod
    def prompts(self) -> list[list[int]]:
        """The inputs that are pooled. RequestError if the body cannot be served."""

    def make_request(self) -> EngineRequest:
        pooling = pooling_of(self.context.config)
        prompts, params = self.prompts(), SamplingParams(max_tokens=1, temperature=0)
        options = request_options(self.body, pooling, classify=self.classifies)
        return EngineRequest(prompts, [params] * len(prompts), self.body.user, options)

    @property
    def max_tokens(self) -> int:
        """Max tokens of an input."""
        total = self.context.max_total_tokens
        return min(self.context.config.serve.http.max_input_length or total, total)

    @property
    def limit(self) -> int | None:
        """The tokens to which an input is cut, None: it is not. FieldError if it cannot be cut to so many."""
        asked, most = self.body.truncate_prompt_tokens, self.max_tokens
        limit = most if asked == -1 else asked
        if limit is not None and not 0 < limit <= most:
            raise FieldError("truncate_prompt_tokens", f"truncate_prompt_tokens={limit}: it is 1 to {most}, or -1")
        return limit

    def near(self, text: str, num_tokens: int) -> str:
        """A beginning of a text that has at least so many tokens, short enough to be encoded; the text if it is."""
        context = self.context
        return text[: context.need_tokenizer().longest_token * min(num_tokens + CUT_TOKENS, context.max_input_length)]

    def fit(
        self, field: str, given: str | list[int], *, add_special_tokens: bool = True, max_tokens: int = 0
    ) -> list[int]:
        """The tokens of an input, cut where the body says so. FieldError of its field if they are too many, or none.

        max_tokens: of a text, without special tokens; 0: all
        """
        context, most, limit = self.context, self.max_tokens, self.limit
        if isinstance(given, str):
            tokens = self._encode(given, limit, max_tokens, has_special=add_special_tokens)
        else:
            check_tokens(field, given, context.config)
            tokens = given[:limit]
        if not tokens:
            raise FieldError(field, "an input is empty; give at least one token")
        if len(tokens) > most:
            fix = "shorten it or set truncate_prompt_tokens"
            raise context.too_long(field, f"an input has {len(tokens)} tokens", str(most), fix)
        return tokens

    def _encode(self, text: str, limit: int | None, max_tokens: int, *, has_special: bool) -> list[int]:
        """Tokenize a text, of which the first tokens are kept, and the special ones around it."""
        context = self.context
        longest = min(filter(None, (limit, max_tokens)), default=None)
        if longest is not None:
            text = self.near(text, longest)
        tokens = context.encode(text, add_special_tokens=has_special)
        if longest is None or len(tokens) <= longest:
            return tokens
        bare = context.encode(text, add_special_tokens=False) if has_special else tokens
        before = next((at for at in range(len(tokens)) if tokens[at : at + len(bare)] == bare), 0)
        around = len(tokens) - len(bare)
        if max_tokens:
            limit = min(filter(None, (limit, max_tokens + around)))
        if limit is None or len(tokens) <= limit:
            return tokens
        if around >= limit:
            return tokens[:limit]
        return [*tokens[: before + limit - around], *tokens[before + len(bare) :]]


def vector_of(embedding: bytes) -> npt.NDArray[np.float32]:
    """The numbers of a choice's embedding."""
    return np.frombuffer(embedding, np.float32)
