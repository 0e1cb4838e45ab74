"""`POST /v1/chat/completions`: OpenAI's chat, with tools, reasoning and structured answers.

curl localhost:8000/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec import json

from atom.runtime.types import Logprobs
from atom.serve.chat_template import Conversation, encode_conversation, render_conversation, shown_tokens
from atom.serve.context import Context
from atom.serve.engine.protocol import Output
from atom.serve.http.bodies import Awake, body_route
from atom.serve.http.errors import FieldError
from atom.serve.http.response import ActiveResponse, Choice, EngineRequest
from atom.serve.openai.breakpoints import breakpoints_of, mark_texts
from atom.serve.openai.logprobs import chat_logprobs, prompt_logprobs, raw
from atom.serve.openai.params import effort_of, sampling_params
from atom.serve.openai.response import OpenAIResponder, finish_reason, last_fields, last_json
from atom.serve.openai.schema import ChatRequest
from atom.serve.openai.tools import offered_tools
from atom.serve.output.parsers import ChatParsers
from atom.serve.prompt_parts import NOWHERE, Located, Marker, find_parts, retained_parts, retained_whole
from atom.serve.template_variables import effort_variables


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=body_route(context))

    @router.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatRequest, request: Request, context: Awake) -> Response:
        """Answer a conversation."""
        return await Chat(context, body).respond(request)

    return router


def template_kwargs(context: Context, body: ChatRequest) -> dict[str, Any]:
    """The template's variables besides the messages."""
    return effort_variables(context.need_tokenizer(), effort_of(body)) | (body.chat_template_kwargs or {})


def parsers_of(context: Context, body: ChatRequest) -> ChatParsers:
    """What turns the tools of a chat into a prompt, and its answer into calls. FieldError for tools that are wrong."""
    return ChatParsers(
        context.config,
        offered_tools(context, body.tools, body.tool_choice),
        body.tool_choice,
        context.tokenizer,
        is_parallel=body.parallel_tool_calls is not False,
        has_called=any(each.tool_calls or each.role == "tool" for each in body.messages or body.prompt or ()),
    )


def locate(context: Context, body: ChatRequest, parsers: ChatParsers, conversation: Conversation) -> Located:
    """Find the parts of a prompt, if the chat asks for them, and what its cache_control keeps."""
    breakpoints = breakpoints_of(body)
    if not breakpoints and not body.explain:
        return NOWHERE
    if conversation.images:
        return Located((), retained_whole(conversation, breakpoints))

    def render(marker: Marker) -> str:
        return render_conversation(
            context,
            mark_texts(body.messages or body.prompt or [], marker),
            parsers.tools,
            template_kwargs(context, body),
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
        )

    parts = find_parts(render, conversation.text)
    return Located(parts, retained_parts(context, conversation, parts, breakpoints))


class Chat(OpenAIResponder[ChatRequest]):
    kind, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def make_request(self) -> EngineRequest:
        context, body = self.context, self.body
        if (body.messages is None) == (body.prompt is None):
            raise FieldError(
                "messages", "messages is missing" if body.messages is None else "messages and prompt are one"
            )
        self._parsers = parsers = parsers_of(context, body)
        params = sampling_params(body, context.config)
        conversation = encode_conversation(
            context,
            body.messages or body.prompt or [],
            parsers.tools,
            template_kwargs(context, body),
            body.truncate_prompt_tokens,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
        )
        self._prompt = conversation.text
        if conversation.images and body.prompt_logprobs is not None:
            raise FieldError("prompt_logprobs", "prompt_logprobs: a prompt with images has none")
        params = parsers.constrain(params, conversation.text)
        prompt, params = context.fit(conversation.tokens, params, body.truncate_prompt_tokens)
        located = locate(context, body, parsers, conversation) if len(prompt) == len(conversation.tokens) else NOWHERE
        # a forced call constrains the answer
        return self.engine_request([prompt], [params], "tools", located, conversation.images)

    def choice(self, choice: Choice) -> dict[str, Any]:
        answer = self._parsers.read(choice.text, self._prompt)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = message["reasoning"] = answer.reasoning  # newer versions of vLLM: the latter
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in answer.calls
            ]
        fields: dict[str, Any] = {"index": choice.index, "message": message, "logprobs": None}
        tokenizer = self.context.tokenizer
        if self.body.logprobs:
            logprobs = self._describe(choice.logprobs)
            fields["logprobs"] = logprobs | {"content": raw(logprobs["content"])}
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = raw(prompt_logprobs(tokenizer, choice.prompt_logprobs))
        if self.body.return_token_ids:
            fields["token_ids"] = choice.tokens
        fields |= last_fields(self.body, choice)
        return fields | {"finish_reason": "tool_calls" if answer.has_whole_calls else finish_reason(choice)}

    def response_body(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        ids = {"prompt_token_ids": shown_tokens(self.context, self._prompts[0])} if self.body.return_token_ids else {}
        return super().response_body(choices, usage) | ids

    def _describe(self, logprobs: list[Logprobs]) -> dict[str, Any]:
        body = self.body
        as_ids = bool(body.return_tokens_as_token_ids)
        return chat_logprobs(self.context.tokenizer, logprobs, body.top_logprobs or 0, as_ids=as_ids)

    def open(self, active: ActiveResponse) -> Iterable[bytes]:
        super().open(active)
        role, tail = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null', self.tail()
        if self.body.return_token_ids:
            tail = b'}],"prompt_token_ids":%s%s' % (
                json.encode(shown_tokens(self.context, self._prompts[0])),
                tail.removeprefix(b"}]"),
            )
        self._role_chunks = [b"%s%d%s%s" % (self._head, each.index, role, tail) for each in active.choices]
        self._by_choice = [self._parsers.parser(self._prompt) for _ in active.choices]
        self._held: list[list[Logprobs]] = [[] for _ in active.choices]  # of text that is held back
        self._held_tokens: list[list[int]] = [[] for _ in active.choices]
        return ()

    def delta(self, choice: Choice, output: Output) -> bytes:
        index, parser, text = choice.index, self._by_choice[choice.index], output.text or ""
        reason, logprobs, ids, has_calls = b"null", b"null", b"", False
        if parser is None:
            delta = b'{"content":%s}' % json.encode(text) if text else b"{}"
        else:
            delta = json.encode(self._parsers.delta(parser, text, is_last=output.finish is not None))
            has_calls = parser.has_whole_calls
        if self.body.logprobs:
            self._held[index] += output.logprobs or []
        if self.body.return_token_ids:
            self._held_tokens[index] += output.tokens
        if output.finish is not None:
            reason = json.encode("tool_calls" if has_calls else finish_reason(choice))
        elif delta == b"{}":
            return b""
        if self.body.logprobs:
            found, self._held[index] = self._held[index], []
            logprobs = json.encode(self._describe(found))
        if self.body.return_token_ids:
            ids, self._held_tokens[index] = b',"token_ids":%s' % json.encode(self._held_tokens[index]), []
        if output.finish is not None:
            ids += last_json(self.body, choice)
        first, self._role_chunks[index] = self._role_chunks[index], b""
        parts = (first, self._head, index, delta, logprobs, ids, reason, self.tail())
        return b'%s%s%d,"delta":%s,"logprobs":%s%s,"finish_reason":%s%s' % parts
