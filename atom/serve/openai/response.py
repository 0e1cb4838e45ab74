"""Shared by chat and text completions: common fields, usage, the end of a stream."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

from msgspec import json

from atom.images.types import PlacedImage
from atom.runtime.types import openai_reason
from atom.sampling_params import SamplingParams
from atom.serve.context import Context
from atom.serve.http.response import ActiveResponse, Choice, EngineRequest, Responder
from atom.serve.http.sse import DONE, event
from atom.serve.http.tapped import tapped_states
from atom.serve.ids import new_id
from atom.serve.openai.params import budget_field, find_constraint, request_options
from atom.serve.openai.schema import CompletionRequest, Generation
from atom.serve.prompt_parts import NOWHERE, Located

Body = TypeVar("Body", bound=Generation)


class OpenAIResponder(Responder, Generic[Body]):
    kind: str  # of the object that answers
    chunk: str  # of an event
    prefix: str  # of ids

    def __init__(self, context: Context, body: Body) -> None:
        id = new_id(self.prefix) if body.request_id is None else f"{self.prefix}-{body.request_id}"
        super().__init__(context, body.model, id, is_streamed=body.stream)
        self.body = body
        self._created = int(time.time())
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        self._counts = self._has_usage and options is not None and bool(options.continuous_usage_stats)

    def open(self, active: ActiveResponse) -> Iterable[bytes]:
        # an event before and after its choice, which begins with the index
        self._head = b"data: " + json.encode(self._object(self.chunk))[:-1] + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if self._has_usage else b"}]}\n\n"
        return ()

    def tail(self) -> bytes:
        """The end of an event after its choice, with the usage so far if the request wants it in each."""
        if not self._counts:
            return self._tail
        usage = self.usage(self.active)
        counts = {key: usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
        return b'}],"usage":%s}\n\n' % json.encode(counts)

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """One of the answers."""

    def engine_request(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        default_field: str | None = None,
        located: Located = NOWHERE,
        images: tuple[PlacedImage, ...] = (),
    ) -> EngineRequest:
        """
        default_field: the constraint's field if no field of the body has one
        located: of the only prompt
        images: of the only prompt
        """
        body, found, self._prompts = self.body, find_constraint(self.body), prompts
        field = default_field if found is None else found.field
        options = replace(request_options(body), retained=located.retained, images=images)
        return EngineRequest(
            prompts, params, body.user, options, body.n or 1, field, budget_field(body), parts=located.parts
        )

    def response_body(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        body = self._object(self.kind) | {"choices": [self.choice(each) for each in choices], "usage": usage}
        return body | self.active.prefix_hits()

    def close(self, usage: dict[str, Any]) -> Iterator[bytes]:
        more = ({"usage": usage} if self._has_usage else {}) | self.active.prefix_hits()
        if more:
            yield event(self._object(self.chunk) | {"choices": []} | more)
        yield DONE

    def _object(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.model}


def last_fields(body: Generation, choice: Choice) -> dict[str, Any]:
    """The fields of a choice that are there once it has ended."""
    fields = tapped_states(choice.taps)
    if body.return_weight_versions and choice.finish is not None:
        is_shown = not isinstance(body, CompletionRequest) or body.max_tokens != 0
        spans = choice.finish.weight_versions if is_shown else []
        fields["weight_versions"] = [each._asdict() for each in spans]
    return fields


def last_json(body: Generation, choice: Choice) -> bytes:
    """The same ahead of other fields of its event."""
    fields = last_fields(body, choice)
    return b"," + json.encode(fields)[1:-1] if fields else b""


def finish_reason(choice: Choice) -> str | None:
    """Why an answer ended, in OpenAI's words; None while it goes on."""
    return None if choice.finish is None else openai_reason(choice.finish.reason)
