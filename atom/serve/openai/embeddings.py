"""`POST /v1/embeddings`: OpenAI's embeddings, with vLLM's extensions, pooled of a decoder's hidden states.

curl localhost:8000/v1/embeddings -H "Content-Type: application/json" -d '{"input": "The capital of France"}'
"""

from __future__ import annotations

import time
from base64 import b64encode
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from atom.errors import RequestError
from atom.sampling_params import SamplingParams
from atom.serve.context import CUT_TOKENS, Context
from atom.serve.http.bodies import body_route
from atom.serve.http.errors import FieldError
from atom.serve.http.response import Choice, EngineRequest, Responder
from atom.serve.ids import new_id
from atom.serve.openai.params import check_tokens, request_options, split_inputs
from atom.serve.openai.schema import EmbeddingRequest


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=body_route(context))

    @router.post("/v1/embeddings")
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """A vector of each input."""
        return await Embeddings(context, body).respond(request)

    return router


class Embeddings(Responder):
    renders = False

    def __init__(self, context: Context, body: EmbeddingRequest) -> None:
        id = new_id("embd") if body.request_id is None else f"embd-{body.request_id}"
        super().__init__(context, body.model, id, is_streamed=False)
        self._body, self._pooler, self._created = body, context.config.serve.pooler_config, int(time.time())

    def make_request(self) -> EngineRequest:
        body, config = self._body, self.context.config
        if self._pooler.pooling_type is None:
            raise RequestError(
                "this server makes no embeddings; start it with serve.pooler_config.pooling_type=LAST, or MEAN"
            )
        if body.dimensions is not None and body.dimensions > config.model.hidden:
            fault = f"dimensions={body.dimensions} is more than the {config.model.hidden} that the model has"
            raise FieldError("dimensions", fault)
        if None not in (body.normalize, body.use_activation) and body.normalize != body.use_activation:
            raise FieldError("use_activation", "normalize and use_activation are one thing; give one of them")
        prompts = [self._fit(each) for each in split_inputs("input", body.input, config)]
        params = SamplingParams(max_tokens=1, temperature=0)
        options = request_options(body, self._pooler.pooling_type)
        return EngineRequest(prompts, [params] * len(prompts), body.user, options)

    def response_body(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": each.index, "embedding": self._encoded(each.embedding)} for each in choices
        ]
        head = {"id": self.id, "object": "list", "created": self._created, "model": self.model}
        return head | {"data": data, "usage": usage}

    def _encoded(self, embedding: bytes) -> list[float] | str:
        body = self._body
        vector = np.frombuffer(embedding, np.float32)[: body.dimensions]
        normalize = body.normalize if body.use_activation is None else body.use_activation
        if self._pooler.normalize if normalize is None else normalize:
            vector = normalized(vector)
        if body.encoding_format == "base64":
            return b64encode(vector.astype("<f4").tobytes()).decode()
        return list(vector.tolist())

    def _fit(self, given: str | list[int]) -> list[int]:
        """The tokens of an input, cut where the body says so. FieldError if they are too many, or none."""
        context = self.context
        most = min(context.config.serve.http.max_input_length or context.max_total_tokens, context.max_total_tokens)
        asked = self._body.truncate_prompt_tokens
        limit = most if asked == -1 else asked
        if limit is not None and not 0 < limit <= most:
            raise FieldError("truncate_prompt_tokens", f"truncate_prompt_tokens={limit}: it is 1 to {most}, or -1")
        if isinstance(given, str):
            tokens = self._encode(given, limit)
        else:
            check_tokens("input", given, context.config)
            tokens = given[:limit]
        if not tokens:
            raise FieldError("input", "an input is empty; give at least one token")
        if len(tokens) > most:
            fix = "shorten it or set truncate_prompt_tokens"
            raise context.too_long("input", f"an input has {len(tokens)} tokens", str(most), fix)
        return tokens

    def _encode(self, text: str, limit: int | None) -> list[int]:
        """Tokenize a text, of which the first tokens are kept, and the special ones around it."""
        context, has_special = self.context, self._body.add_special_tokens is not False
        if limit is not None:
            text = text[: context.need_tokenizer().longest_token * min(limit + CUT_TOKENS, context.max_input_length)]
        tokens = context.encode(text, add_special_tokens=has_special)
        if limit is None or len(tokens) <= limit:
            return tokens
        bare = context.encode(text, add_special_tokens=False) if has_special else tokens
        before = next((at for at in range(len(tokens)) if tokens[at : at + len(bare)] == bare), 0)
        around = len(tokens) - len(bare)
        if around >= limit:
            return tokens[:limit]
        return [*tokens[: before + limit - around], *tokens[before + len(bare) :]]


def normalized(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The vector with the length 1; zeros stay as they are."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector / np.float32(length) if length else vector
