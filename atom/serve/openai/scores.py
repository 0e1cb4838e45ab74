"""Score and rerank texts: by a classifier, or the cosine similarity of their embeddings.

curl localhost:8000/score -H "Content-Type: application/json" -d '{"text_1": "Hi", "text_2": ["Hello", "Bread"]}'
curl localhost:8000/rerank -H "Content-Type: application/json" -d '{"query": "Hi", "documents": ["Hello", "Bread"]}'

`/rerank` is that of Jina's and Cohere's clients too.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from atom.embeddings import check_labels, probabilities, similarities
from atom.pair_prompts import PairTemplate, first_tokens
from atom.serve.context import Context
from atom.serve.http.bodies import Awake, body_route
from atom.serve.http.errors import FieldError
from atom.serve.http.response import Choice
from atom.serve.openai.pooled import PooledResponder, vector_of
from atom.serve.openai.schema import ComparisonRequest, RerankRequest, ScoreRequest

ComparisonT = TypeVar("ComparisonT", bound=ComparisonRequest)


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["Scores"], route_class=body_route(context))

    @router.post("/score")
    @router.post("/v1/score")
    async def score(body: ScoreRequest, request: Request, context: Awake) -> Response:
        """How similar texts are: one with each of a list, or each pair of two lists."""
        return await Scores(context, body).respond(request)

    @router.post("/rerank")
    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    async def rerank(body: RerankRequest, request: Request, context: Awake) -> Response:
        """Documents, those first that are most similar to a query."""
        return await Reranked(context, body).respond(request)

    return router


class Comparison(PooledResponder[ComparisonT]):
    """Scores one text with each of others, or each of as many with its own."""

    def __init__(self, context: Context, body: ComparisonT) -> None:
        super().__init__(context, body)
        self.renders = context.pair_template is not None  # for each pair

    @property
    def classifies(self) -> bool:
        return self.context.config.classifies

    def compare(self, first: str, left: list[str], second: str, right: list[str]) -> list[list[int]]:
        """The inputs of texts. first, second: their fields"""
        limits = self.body.max_tokens_per_query or 0, self.body.max_tokens_per_doc or 0
        self._num_first = len(left)
        template = self.context.pair_template
        for name in ("instruction", "chat_template_kwargs"):
            if template is None and getattr(self.body, name) is not None:
                raise FieldError(
                    name, f"{name} is for a template that makes one prompt of two texts, and this model has none"
                )
        if not self.classifies:
            queries = [self.fit(first, text, max_tokens=limits[0]) for text in left]
            return queries + [self.fit(second, text, max_tokens=limits[1]) for text in right]
        check_labels(self.context.config, 1)
        left, right = self._first(left, limits[0]), self._first(right, limits[1])
        pairs = zip(left * len(right) if len(left) == 1 else left, right, strict=True)
        if template is None:
            return [self.fit(second, query + text) for query, text in pairs]
        return [self.fill(template, second, query, text) for query, text in pairs]

    def fill(self, template: PairTemplate, field: str, query: str, document: str) -> list[int]:
        """The tokens of a pair in a template, of which the document is cut where the body says so."""
        context, body = self.context, self.body
        limit = self.limit
        if limit is not None:
            document = self.near(document, limit)
        context.cut(query + document)
        values: dict[str, Any] = {} if body.instruction is None else {"instruction": body.instruction}
        values |= body.chat_template_kwargs or {}
        return self.fit(field, template.encode(query, document, values, limit=limit, check=context.check_count))

    def _first(self, texts: list[str], number: int) -> list[str]:
        """The beginning of texts that so many tokens spell; 0: all of them."""
        if not number:
            return texts
        tokenizer = self.context.need_tokenizer()
        return [first_tokens(tokenizer, self.near(text, number), number) for text in texts]

    def scores(self, choices: list[Choice]) -> list[float]:
        vectors = [vector_of(each.embedding) for each in choices]
        if not self.classifies:
            return similarities(vectors, self._num_first)
        return [float(probabilities(each, self.context.config)[0]) for each in vectors]


class Scores(Comparison[ScoreRequest]):
    prefix = "score"

    def prompts(self) -> list[list[int]]:
        body = self.body
        texts = {name: [given] if isinstance(given, str) else given for name, given in body.compared.items()}
        (first, left), (second, right) = texts.items()
        if not right or len(left) not in (1, len(right)):
            fault = f"{first} has {len(left)} texts and {second} {len(right)}; give 1 or as many, and not none"
            raise FieldError(first if right else second, fault)
        return self.compare(first, left, second, right)

    def response_body(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        scored = enumerate(self.scores(choices))
        data = [{"index": index, "object": "score", "score": score} for index, score in scored]
        head = {"id": self.id, "object": "list", "created": self.created, "model": self.model}
        return head | {"data": data, "usage": usage}


class Reranked(Comparison[RerankRequest]):
    prefix = "rerank"

    def prompts(self) -> list[list[int]]:
        body = self.body
        if not body.documents:
            raise FieldError("documents", "there are no documents; give at least one")
        self._texts = [each if isinstance(each, str) else each.text for each in body.documents]
        return self.compare("query", [body.query], "documents", self._texts)

    def response_body(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        scores = self.scores(choices)
        ranked = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.body.top_n or None]
        results = [{"index": index, "relevance_score": scores[index]} | self._document(index) for index in ranked]
        return {"id": self.id, "model": self.model, "results": results, "usage": usage}

    def _document(self, index: int) -> dict[str, Any]:
        return {} if self.body.return_documents is False else {"document": {"text": self._texts[index]}}
