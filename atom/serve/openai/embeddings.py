"""`POST /v1/embeddings`: OpenAI's embeddings, with vLLM's extensions, pooled of a decoder's hidden states.

curl localhost:8000/v1/embeddings -H "Content-Type: application/json" -d '{"input": "The capital of France"}'
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from atom.serve.context import Context
from atom.serve.http.bodies import Awake, body_route
from atom.serve.http.errors import FieldError
from atom.serve.http.response import Choice
from atom.serve.openai.params import split_inputs
from atom.serve.openai.pooled import PooledResponder, vector_of
from atom.serve.openai.schema import EmbeddingRequest

EmbeddingT = TypeVar("EmbeddingT", bound=EmbeddingRequest)


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=body_route(context))

    @router.post("/v1/embeddings")
    async def create_embeddings(body: EmbeddingRequest, request: Request, context: Awake) -> Response:
        """A vector of each input."""
        return await Embeddings(context, body).respond(request)

    return router


class Embeddings(PooledResponder[EmbeddingT]):
    prefix = "embd"

    def prompts(self) -> list[list[int]]:
        body, config = self.body, self.context.config
        if body.dimensions is not None and body.dimensions > config.model.hidden:
            fault = f"dimensions={body.dimensions} is more than the {config.model.hidden} that the model has"
            raise FieldError("dimensions", fault)
        if None not in (body.normalize, body.use_activation) and body.normalize != body.use_activation:
            raise FieldError("use_activation", "normalize and use_activation are one thing; give one of them")
        has_special = body.add_special_tokens is not False
        inputs = split_inputs("input", body.input, config)
        return [self.fit("input", each, add_special_tokens=has_special) for each in inputs]

    def response_body(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": each.index, "embedding": self.encode(each.embedding)} for each in choices
        ]
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.model}
        return head | {"data": data, "usage": usage}

    def encode(self, embedding: bytes) -> list[float] | str:
        """An embedding in the form that the body asks for."""
        body = self.body
        vector = vector_of(embedding)[: body.dimensions]
        normalize = body.normalize if body.use_activation is None else body.use_activation
        if self.pooler.normalize if normalize is None else normalize:
            vector = normalized(vector)
        if body.encoding_format == "base64":
            return b64encode(vector.astype("<f4").tobytes()).decode()
        return list(vector.tolist())


def normalized(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The vector with the length 1; zeros stay as they are."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector / np.float32(length) if length else vector
