"""`POST /v1/chat/completions`: OpenAI's chat, with tools, reasoning and structured answers.

curl localhost:8000/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import json

from atom.config import SamplingParams
from atom.serve.bodies import body_route
from atom.serve.chat_template import Conversation, encode_conversation
from atom.serve.context import Context
from atom.serve.engine.protocol import Output
from atom.serve.errors import FieldError, json_response
from atom.serve.ids import new_id
from atom.serve.openai.logprobs import chat_logprobs, prompt_logprobs, raw
from atom.serve.openai.params import find_form, sampling_params
from atom.serve.openai.schema import ChatRequest
from atom.serve.output.parsers import Talk
from atom.serve.response import Answering, Choice, best
from atom.serve.sse import DONE, EventStream, event, until_gone


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=body_route(context))

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await Chat(context, body).answer(request)

    return router


def template_kwargs(context: Context, body: ChatRequest) -> dict[str, Any]:
    """The template's variables beside the messages; reasoning_effort only where the template reads it."""
    given = body.chat_template_kwargs or {}
    if body.reasoning_effort is None or "reasoning_effort" not in context.need_tokenizer().template_variables():
        return given
    return {"reasoning_effort": body.reasoning_effort} | given


class Chat:
    def __init__(self, context: Context, body: ChatRequest) -> None:
        self._context, self._body = context, body
        self._started = time.perf_counter()
        self._model = context.begin(body.model)
        self._id = new_id("chatcmpl")
        self._created = int(time.time())

    async def answer(self, request: Request) -> Response:
        context, body = self._context, self._body
        if (body.messages is None) == (body.prompt is None):
            raise FieldError(
                "messages", "messages is missing" if body.messages is None else "messages and prompt are one"
            )
        talk, params, conversation = await context.in_thread(self._ask)
        prompt, params = context.fit(conversation.tokens, params, body.truncate_prompt_tokens)
        request.state.log |= {"model": self._model, "user": body.user, "id": self._id}
        salt = (body.cache_salt or "").encode()
        stream = context.client.submit([prompt], [params], id=self._id, salt=salt, priority=body.priority or 0)
        form = find_form(body)
        field = form.field if form is not None else "tools"  # a forced call sets one itself
        answering = Answering(context, stream, [prompt], params.n, self._started, field)
        leave = partial(context.client.abort, stream)
        if body.stream:
            await answering.begin(request.receive, leave)
            events = self._events(request, answering, talk, conversation.text)
            return EventStream(events, leave)
        try:
            choices = await until_gone(request.receive, answering.collect())
        finally:
            leave()
        kept = best(choices, params.n, body.n or 1)
        request.state.log |= answering.record(usage := answering.usage())

        def tell() -> Response:
            told = [self._choice(choice, talk, conversation.text) for choice in kept]
            return json_response(self._head("chat.completion") | {"choices": told, "usage": usage})

        return await answering.write(tell)

    def _ask(self) -> tuple[Talk, SamplingParams, Conversation]:
        """The parsers, how the answer is sampled, and the prompt."""
        context, body = self._context, self._body
        talk = Talk(context.config, body.tools, body.tool_choice, is_parallel=body.parallel_tool_calls is not False)
        params = talk.constrain(sampling_params(body, context.config))
        conversation = encode_conversation(
            context,
            body.messages or body.prompt or [],
            talk.tools,
            template_kwargs(context, body),
            body.truncate_prompt_tokens,
        )
        return talk, params, conversation

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, choice: Choice, talk: Talk, prompt: str) -> dict[str, Any]:
        answer = talk.read(choice.text, prompt)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        told: dict[str, Any] = {"index": choice.index, "message": message, "logprobs": None}
        tokenizer = self._context.tokenizer
        if self._body.logprobs:
            logprobs = chat_logprobs(tokenizer, choice.logprobs, self._body.top_logprobs or 0)
            told["logprobs"] = logprobs | {"content": raw(logprobs["content"])}
        if self._body.prompt_logprobs is not None:
            told["prompt_logprobs"] = raw(prompt_logprobs(tokenizer, choice.prompt_logprobs))
        return told | {"finish_reason": "tool_calls" if answer.calls else choice.finish_reason}

    async def _events(self, request: Request, answering: Answering, talk: Talk, prompt: str) -> AsyncIterator[bytes]:
        body, tokenizer = self._body, self._context.tokenizer
        has_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        head = b"data: " + json.encode(self._head("chat.completion.chunk"))[:-1] + b',"choices":[{"index":'
        tail = b'}],"usage":null}\n\n' if has_usage else b"}]}\n\n"
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null' + tail
        parsers = [talk.parser(prompt) for _ in answering.choices]
        begun = [False] * len(parsers)
        held: list[list[Any]] = [[] for _ in parsers]  # log probabilities of text that is held back

        def tell(choice: Choice, output: Output) -> bytes:
            parser, text = parsers[choice.index], output.text or ""
            reason, delta = b"null", b""
            if parser is None:
                delta = b'{"content":%s}' % json.encode(text) if text else b"{}"
                has_calls = False
            else:
                told = talk.delta(parser, text, is_last=output.finish is not None)
                delta, has_calls = json.encode(told), parser.num_tool_calls > 0
            logprobs = b"null"
            if body.logprobs:
                held[choice.index] += output.logprobs or []
            if output.finish is None:
                if delta == b"{}":
                    return b""
            else:
                reason = json.encode("tool_calls" if has_calls else choice.finish_reason)
            if body.logprobs:
                found, held[choice.index] = held[choice.index], []
                logprobs = json.encode(chat_logprobs(tokenizer, found, body.top_logprobs or 0))
            first = b"" if begun[choice.index] else b"%s%d%s" % (head, choice.index, role)
            begun[choice.index] = True
            parts = (first, head, choice.index, delta, logprobs, reason, tail)
            return b'%s%s%d,"delta":%s,"logprobs":%s,"finish_reason":%s%s' % parts

        try:
            async for item in answering.outputs():
                if item is None:
                    yield b""
                elif data := tell(*item):
                    yield data
        except Exception as error:
            request.state.log |= answering.record(error=error)
            yield event(self._context.report(error))
            return
        request.state.log |= answering.record()
        if has_usage:
            yield event(self._head("chat.completion.chunk") | {"choices": [], "usage": answering.usage()})
        yield DONE
