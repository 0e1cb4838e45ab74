"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.

curl localhost:8000/v1/messages -H "Content-Type: application/json" -H "x-api-key: KEY" \\
    -d '{"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "Hello!"}], "stream": true}'

Clients with Anthropic's SDK only change `base_url`. Errors have Anthropic's body (`atom.serve.http.errors`), and `ping`
events keep a silent stream open.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from atom.runtime.requests.taps import Registered, read_steer, read_taps
from atom.runtime.types import RequestOptions
from atom.sampling_params import SamplingParams
from atom.serve.anthropic.blocks import BlockStream, ThinkingShown, content_blocks
from atom.serve.anthropic.prompt import prepare
from atom.serve.anthropic.schema import CountRequest, MessagesRequest, Thinking
from atom.serve.context import Context
from atom.serve.engine.protocol import Finish, Output, Tapped
from atom.serve.http.bodies import Awake, Named, body_route
from atom.serve.http.cache_usage import Written
from atom.serve.http.errors import FieldError, json_response
from atom.serve.http.response import ActiveResponse, Choice, EngineRequest, Responder
from atom.serve.http.sse import event
from atom.serve.http.tapped import tapped_states
from atom.serve.ids import new_id
from atom.serve.openai.params import SAME_NAMES, sampling_params
from atom.serve.openai.schema import Generation, StructuredOutputs

NO_THREADS = (
    "thread: conversations are not kept here; send all messages, without thread. The SDK's thread() does so with "
    'unsupported_request_behavior="continue_unthreaded"'
)


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=body_route(context))

    @router.post("/v1/messages")
    async def create_message(body: MessagesRequest, request: Request, context: Awake) -> Response:
        """Answer a conversation."""
        return await MessageResponder(context, body).respond(request)

    @router.post("/v1/messages/count_tokens")
    async def count_message_tokens(body: CountRequest, request: Request, context: Named) -> Response:
        """The tokens of the prompt that a conversation becomes."""
        context.begin()
        prepared = await context.in_thread(lambda: prepare(context, body))
        return json_response({"input_tokens": len(prepared.conversation.tokens)})

    return router


class MessageResponder(Responder):
    waits, keep_alive = False, event({"type": "ping"}, "ping")

    def __init__(self, context: Context, body: MessagesRequest) -> None:
        super().__init__(context, body.model, new_id("msg", "_"), is_streamed=body.stream)
        self._body, self._format = body, body.output_config.format if body.output_config else None
        self._thinking = thinking_shown(body.thinking)
        self._blocks = BlockStream(self._thinking)
        self._has_begun = False  # a stream
        self._finish: Finish | None = None
        self._tapped: Mapping[str, Tapped] = {}  # of a stream

    def make_request(self) -> EngineRequest:
        if self._body.thread is not None:
            raise FieldError("thread", NO_THREADS, "thread_unsupported_request")  # the SDK then sends all messages
        params = self._params()
        self._parsers, conversation, parts, retained = prepare(self.context, self._body)
        params = self._parsers.constrain(params, conversation.text)
        self._prompt, prompt = conversation.text, conversation.tokens
        if len(prompt) > (longest := self.context.max_input_length):
            raise FieldError("messages", f"prompt is too long: {len(prompt)} tokens > {longest} maximum")
        prompt, params = self.context.fit(prompt, params)
        user = self._body.metadata.user_id if self._body.metadata else None
        field = "tools" if self._format is None else "output_config.format.schema"
        asked: dict[str, Any] = {"taps": read_taps(self._body.taps), "steer": read_steer(self._body.steer)}
        passes = self.context.config.passes
        known = Registered(passes.taps, list(passes.steer or ()))
        known.open(asked["taps"])  # a stream's head is sent ahead of the engine's refusal
        known.scales_of(asked["steer"])
        options = RequestOptions(retained=retained, images=conversation.images, **asked)
        budget = "thinking.budget_tokens"
        return EngineRequest(
            [prompt], [params], user, options, constraint_field=field, budget_field=budget, parts=parts
        )

    def _params(self) -> SamplingParams:
        body, limit = self._body, self.context.config.serve.http.max_stop_sequences
        if len(body.stop_sequences or ()) > limit:
            raise FieldError("stop_sequences", f"stop_sequences has more than {limit} strings")
        values = {name: getattr(body, name) for name in SAME_NAMES if name in type(body).model_fields}
        constraint = StructuredOutputs(json=self._format.schema_) if self._format else None
        known = Generation(**values, stop=body.stop_sequences, structured_outputs=constraint)
        known.cache_retention = body.cache_retention
        if body.thinking is not None and body.thinking.type == "enabled":
            known.thinking_token_budget = body.thinking.budget_tokens
        return sampling_params(known, self.context.config, max_tokens=body.max_tokens)

    def response_body(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        (choice,) = choices
        answer = self._parsers.read(choice.text, self._prompt)
        assert choice.finish is not None, "it is done"
        stop = stop_reason(choice.finish, has_calls=answer.has_whole_calls)
        content = content_blocks(answer, self._thinking)
        return self._message(usage, content, *stop) | tapped_states(choice.taps)

    def _message(
        self, usage: dict[str, Any], content: list[dict[str, Any]], reason: str | None = None, stop: str | None = None
    ) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}
        ended = {"stop_reason": reason, "stop_sequence": stop, "usage": usage}
        return message | ended | self.active.prefix_hits()

    def error(self, body: dict[str, Any]) -> bytes:
        return self._begin() + event(body, "error")

    def open(self, active: ActiveResponse) -> Iterable[bytes]:
        self._parser = self._parsers.parser(self._prompt)
        return ()  # the first event has the usage, which is known with the first output

    def delta(self, choice: Choice, output: Output) -> bytes:
        self._tapped = choice.taps
        return self._begin() + self._push(output)

    def _begin(self) -> bytes:
        """The event before all others, once."""
        if self._has_begun:
            return b""
        self._has_begun = True
        message = self._message(self.usage(self.active) | {"output_tokens": 0}, [])
        return event({"type": "message_start", "message": message}, "message_start")

    def _push(self, output: Output) -> bytes:
        self._finish = output.finish
        delta = self._parsers.next(self._parser, output.text or "", is_last=output.finish is not None)
        return self._blocks.push(delta)

    def close(self, usage: dict[str, Any]) -> Iterator[bytes]:
        assert self._finish is not None, "it is done"
        has_calls = self._parser is not None and self._parser.has_whole_calls
        reason, stop = stop_reason(self._finish, has_calls=has_calls)
        delta = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": usage}
        yield self._blocks.close() + event(delta | tapped_states(self._tapped), "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def usage(self, active: ActiveResponse) -> dict[str, Any]:
        """Tokens so far. input_tokens counts those of the prompt that were neither cached nor are kept in the cache."""
        usage, written = active.usage(), active.written() or Written()
        return {
            "input_tokens": usage["prompt_tokens"] - active.num_cached - written.total,
            "cache_creation_input_tokens": written.total,
            "cache_read_input_tokens": active.num_cached,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written.short,
                "ephemeral_1h_input_tokens": written.long,
            },
            "output_tokens": usage["completion_tokens"],
        }


def thinking_shown(thinking: Thinking | None) -> ThinkingShown:
    """How an answer shows its thinking. A model that always thinks may do so although it is disabled."""
    if thinking is None:
        return "whole"
    if thinking.type == "disabled":
        return "none"
    return "empty" if thinking.display == "omitted" else "whole"


def stop_reason(finish: Finish, *, has_calls: bool) -> tuple[str, str | None]:
    """The stop reason of an answer in Anthropic's terms, and the stop sequence that ended it.

    has_calls: there are tool calls, all of them complete: a client must not act on an answer that was cut off.
    """
    match finish.reason:
        case "stop_sequence":
            return "stop_sequence", finish.stop_string
        case "max_tokens" | "repetition":  # of Anthropic's terms the one for an answer that is cut off
            return "max_tokens", None
    return ("tool_use" if has_calls else "end_turn"), None
