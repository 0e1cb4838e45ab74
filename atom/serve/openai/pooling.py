"""`POST /pooling`: vLLM's one route for embeddings and the probabilities of labels.

curl localhost:8000/pooling -H "Content-Type: application/json" -d '{"input": "I like it."}'
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from atom.embeddings import check_labels, probabilities
from atom.serve.context import Context
from atom.serve.http.bodies import Awake, body_route
from atom.serve.http.errors import FieldError
from atom.serve.http.response import Choice, EngineRequest
from atom.serve.openai.embeddings import Embeddings
from atom.serve.openai.pooled import vector_of
from atom.serve.openai.schema import PoolingRequest


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["Scores"], route_class=body_route(context))

    @router.post("/pooling")
    async def pool(body: PoolingRequest, request: Request, context: Awake) -> Response:
        """The embedding of each input, or the probabilities of its labels."""
        return await Pooled(context, body).respond(request)

    return router


class Pooled(Embeddings[PoolingRequest]):
    prefix = "pooling"

    @property
    def classifies(self) -> bool:
        task = self.body.task
        return self.context.config.classifies if task is None else task == "classify"

    def make_request(self) -> EngineRequest:
        body = self.body
        if self.classifies:
            check_labels(self.context.config)
            for name in ("encoding_format", "dimensions", "normalize", "use_activation"):
                if getattr(body, name) is not None:
                    raise FieldError(name, f"{name} is of embeddings, and probabilities of labels are asked for")
        return super().make_request()

    def response_body(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        data = [{"index": each.index, "object": "pooling", "data": self._numbers(each.embedding)} for each in choices]
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.model}
        return head | {"data": data, "usage": usage}

    def _numbers(self, pooled: bytes) -> list[float] | str:
        if not self.classifies:
            return self.encode(pooled)
        return list(probabilities(vector_of(pooled), self.context.config).tolist())
