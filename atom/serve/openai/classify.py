"""`POST /classify`: the label of each text, in vLLM's schema.

curl localhost:8000/classify -H "Content-Type: application/json" -d '{"input": ["I like it.", "It broke at once."]}'
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from atom.embeddings import check_labels, describe_labels
from atom.serve.context import Context
from atom.serve.http.bodies import Awake, body_route
from atom.serve.http.response import Choice, EngineRequest
from atom.serve.openai.params import split_inputs
from atom.serve.openai.pooled import PooledResponder, vector_of
from atom.serve.openai.schema import ClassifyRequest


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["Scores"], route_class=body_route(context))

    @router.post("/classify")
    async def classify(body: ClassifyRequest, request: Request, context: Awake) -> Response:
        """The probabilities of each input's labels."""
        return await Classified(context, body).respond(request)

    return router


class Classified(PooledResponder[ClassifyRequest]):
    prefix = "classify"

    @property
    def classifies(self) -> bool:
        return True

    def prompts(self) -> list[list[int]]:
        body, config = self.body, self.context.config
        has_special = body.add_special_tokens is not False
        return [
            self.fit("input", each, add_special_tokens=has_special)
            for each in split_inputs("input", body.input, config)
        ]

    def make_request(self) -> EngineRequest:
        check_labels(self.context.config)
        return super().make_request()

    def response_body(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        config = self.context.config
        data = [{"index": each.index, **describe_labels(vector_of(each.embedding), config)} for each in choices]
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.model}
        return head | {"data": data, "usage": usage}
