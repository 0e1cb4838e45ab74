"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.

curl localhost:8000/v1/messages -H "Content-Type: application/json" -H "x-api-key: KEY" \\
    -d '{"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "Hello!"}], "stream": true}'

Clients of Anthropic's SDK need no change but `base_url`. Errors have Anthropic's body (`atom.serve.errors`), and `ping`
events keep a silent stream open.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from atom.config import SamplingParams
from atom.serve.anthropic.blocks import BlockStream, content_blocks
from atom.serve.anthropic.prompt import Asked, prepare
from atom.serve.anthropic.schema import CountRequest, MessagesRequest
from atom.serve.bodies import body_route
from atom.serve.context import Context
from atom.serve.engine.protocol import Finish
from atom.serve.errors import FieldError, anthropic_body, json_response, status_of
from atom.serve.ids import new_id
from atom.serve.openai.params import sampling_params
from atom.serve.openai.schema import Generation
from atom.serve.output.output_parser import Delta
from atom.serve.response import Answering
from atom.serve.sse import EventStream, event, until_gone

PING = event({"type": "ping"}, "ping")


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=body_route(context))

    @router.post("/v1/messages")
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await MessageAnswer(context, body).answer(request)

    @router.post("/v1/messages/count_tokens")
    async def count_message_tokens(body: CountRequest) -> Response:
        """The tokens of the prompt that a conversation becomes."""
        context.begin(body.model)
        asked = await context.in_thread(lambda: prepare(context, body))
        return json_response({"input_tokens": len(asked.conversation.tokens)})

    return router


class MessageAnswer:
    def __init__(self, context: Context, body: MessagesRequest) -> None:
        self._context, self._body = context, body
        self._started = time.perf_counter()
        self._model = context.begin(body.model)
        self._id = new_id("msg", "_")

    async def answer(self, request: Request) -> Response:
        context, body = self._context, self._body
        asked, params = await context.in_thread(self._ask)
        prompt = asked.conversation.tokens
        if len(prompt) > (longest := context.max_input_length):
            raise FieldError("messages", f"prompt is too long: {len(prompt)} tokens > {longest} maximum")
        prompt, params = context.fit(prompt, params)
        user = body.metadata.user_id if body.metadata else None
        request.state.log |= {"model": self._model, "user": user, "id": self._id}
        stream = context.client.submit([prompt], [params], id=self._id)
        answering = Answering(context, stream, [prompt], 1, self._started)
        leave = partial(context.client.abort, stream)
        if body.stream:
            events = self._events(request, answering, asked)
            return EventStream(events, leave)
        try:
            (choice,) = await until_gone(request.receive, answering.collect())
        finally:
            leave()
        answer = asked.talk.read(choice.text, asked.conversation.text)
        assert choice.finish is not None, "it is done"
        reason, stop = stop_reason(choice.finish, has_calls=bool(answer.calls))
        request.state.log |= answering.record(usage := told_usage(answering))
        return json_response(self._message(content_blocks(answer), usage, reason, stop))

    def _ask(self) -> tuple[Asked, SamplingParams]:
        """The prompt, and how the answer is sampled."""
        params = self._params()
        asked = prepare(self._context, self._body)
        return asked, asked.talk.constrain(params)

    def _params(self) -> SamplingParams:
        body, limit = self._body, self._context.config.serve.http.max_stop_sequences
        if len(body.stop_sequences or ()) > limit:
            raise FieldError("stop_sequences", f"stop_sequences has more than {limit} strings")
        values = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
        known = Generation(**values, stop=body.stop_sequences)
        return sampling_params(known, self._context.config, max_tokens=body.max_tokens)

    def _message(
        self, content: list[dict[str, Any]], usage: dict[str, int], reason: str | None = None, stop: str | None = None
    ) -> dict[str, Any]:
        told = {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content}
        return told | {"stop_reason": reason, "stop_sequence": stop, "usage": usage}

    async def _events(self, request: Request, answering: Answering, asked: Asked) -> AsyncIterator[bytes]:
        parser = asked.talk.parser(asked.conversation.text)
        blocks = BlockStream()
        finish: Finish | None = None
        yield event({"type": "message_start", "message": self._message([], told_usage(answering))}, "message_start")
        try:
            async for item in answering.outputs():
                if item is None:
                    yield PING
                    continue
                _, output = item
                text, finish = output.text or "", output.finish
                delta = Delta(text, "", [])
                if parser is not None:
                    delta = asked.talk.next(parser, text, is_last=finish is not None)
                if data := blocks.push(delta):
                    yield data
        except Exception as error:
            request.state.log |= answering.record(told_usage(answering), error)
            message = self._context.report(error)["error"]["message"]
            yield event(anthropic_body(status_of(error), message, request.state.request_id), "error")
            return
        request.state.log |= answering.record(told_usage(answering))
        assert finish is not None, "it is done"
        is_whole = parser is not None and parser.num_tool_calls >= blocks.num_calls > 0
        reason, stop = stop_reason(finish, has_calls=is_whole)
        told = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stop}}
        yield blocks.close() + event(told | {"usage": told_usage(answering)}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")


def stop_reason(finish: Finish, *, has_calls: bool) -> tuple[str, str | None]:
    """The stop reason of an answer in Anthropic's terms, and the stop sequence that ended it.

    has_calls: there are tool calls, all of them whole; an answer that was cut off must not be acted on.
    """
    match finish.reason:
        case "stop_sequence":
            return "stop_sequence", finish.stop_string
        case "max_tokens":
            return "max_tokens", None
    return ("tool_use" if has_calls else "end_turn"), None


def told_usage(answering: Answering) -> dict[str, int]:
    """The usage so far. input_tokens are without the prompt tokens from the cache, which are known at the end."""
    usage = answering.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,  # nothing is stored at a client's request
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
