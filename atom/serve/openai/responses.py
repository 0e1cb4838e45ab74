"""`POST /v1/responses` and `/v1/responses/input_tokens`: OpenAI's Responses API.

curl localhost:8000/v1/responses -H "Content-Type: application/json" -d '{"input": "Hello!", "stream": true}'

Text, reasoning and function tools, whole or streamed. A request becomes that of a chat: the same template, sampling and
parsers. With serve.http.response_store_bytes, responses are stored (`atom.serve.openai.response_store`): they can be
fetched and deleted, and previous_response_id continues one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Raw
from pydantic import TypeAdapter

from atom.runtime.types import Logprobs
from atom.sampling_params import SamplingParams
from atom.serve.chat_template import Conversation, encode_conversation, shown_tokens
from atom.serve.context import Context
from atom.serve.engine.protocol import Finish, Output, Tapped
from atom.serve.http.bodies import Awake, Named, body_route
from atom.serve.http.errors import FieldError, ResponseNotFoundError, json_response, shown
from atom.serve.http.response import ActiveResponse, Choice, EngineRequest, Responder
from atom.serve.http.tapped import tapped_states
from atom.serve.ids import new_id
from atom.serve.openai.chat import locate, parsers_of, template_kwargs
from atom.serve.openai.logprobs import chat_logprobs, raw
from atom.serve.openai.namespaces import GivenTool, call_names, flat_name, flat_tools
from atom.serve.openai.params import budget_field, find_constraint, request_options, sampling_params
from atom.serve.openai.response_items import ItemStream, output_items
from atom.serve.openai.response_store import ResponseStore, Stored
from atom.serve.openai.responses_schema import (
    LOGPROBS,
    NOT_STORED,
    AllowedFunctions,
    CallOutput,
    CustomCall,
    FunctionCall,
    FunctionChoice,
    FunctionTool,
    InputImage,
    InputText,
    Items,
    Message,
    NamespaceChoice,
    NamespaceTool,
    PlainFormat,
    Reasoning,
    ReasoningOptions,
    ResponsesRequest,
    SchemaFormat,
)
from atom.serve.openai.schema import (
    AllowedChoice,
    AllowedTools,
    ChatMessage,
    ChatRequest,
    Function,
    NamedFunction,
    NamedTool,
    OtherTool,
    Picture,
    ReasoningLimit,
    RefusalPart,
    ResponseFormat,
    Sampling,
    Tool,
    ToolCallMessage,
    function_call,
)
from atom.serve.openai.schema import FunctionCall as ChatCall
from atom.serve.output.content_tokens import ContentTokens
from atom.serve.output.output_parser import Delta, OutputParser
from atom.serve.output.parsers import ChatParsers

# fields of a request that its response repeats
REPEATED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "user",
)
NOT_FOUND = "the response {} is not stored here, or no more, or with another key"
AnyPart = InputText | RefusalPart | InputImage
ITEMS: TypeAdapter[Any] = TypeAdapter(Items)
# our finish reason -> why the response is incomplete; an operator's /sleep aborts what runs
INCOMPLETE = {"max_tokens": "max_output_tokens", "repetition": "repetition", "abort": "abort"}
# field of the chat that constrains the answer -> ours
CONSTRAINT_FIELDS = {"response_format": "text.format", "response_format.json_schema": "text.format.schema"}


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=body_route(context))

    @router.post("/v1/responses")
    async def create_response(body: ResponsesRequest, request: Request, context: Awake) -> Response:
        """Answer a conversation, in items."""
        return await ResponsesResponder(context, body).respond(request)

    @router.post("/v1/responses/input_tokens")
    async def count_input_tokens(body: ResponsesRequest, request: Request, context: Named) -> Response:
        """The tokens of the prompt that the same body of /v1/responses becomes."""
        context.begin()
        tenant = request.state.tenant.name
        _, _, conversation = await context.in_thread(lambda: prepare(context, continued(context, body, tenant)))
        return json_response({"object": "response.input_tokens", "input_tokens": len(conversation.tokens)})

    if (store := context.responses) is not None:
        add_stored(router, store)
    return router


def add_stored(router: APIRouter, store: ResponseStore) -> None:
    """Add the routes of responses that are stored."""

    def find(response_id: str, request: Request) -> Stored:
        found = store.find(response_id, request.state.tenant.name)
        if found is None:
            raise ResponseNotFoundError(NOT_FOUND.format(shown(response_id)))
        return found

    @router.get("/v1/responses/{response_id}")
    def get_response(response_id: str, request: Request) -> Response:
        """A response that is stored, as it was sent."""
        if request.query_params.get("stream", "false") == "true":
            raise FieldError("stream", "a stored response comes whole; leave stream out")
        return Response(find(response_id, request).body, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    def delete_response(response_id: str, request: Request) -> Response:
        """Delete a response."""
        find(response_id, request)
        store.delete(response_id, request.state.tenant.name)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.post("/v1/responses/{response_id}/cancel")
    def cancel_response(response_id: str, request: Request) -> Response:
        """Refused: only responses with background=true can be cancelled, and there are none."""
        find(response_id, request)
        raise FieldError("response_id", "this response has ended; to end one that runs, close its connection")


def continued(context: Context, body: ResponsesRequest, tenant: str) -> ResponsesRequest:
    """The request whose input has the items of the response that it continues, and that response's own, in front.

    FieldError if there is no such response of this key.
    """
    if (id := body.previous_response_id) is None:
        return body
    if context.responses is None:
        raise FieldError("previous_response_id", f"previous_response_id: {NOT_STORED}")
    if (found := context.responses.find(id, tenant)) is None:
        fault = f"previous_response_id: {NOT_FOUND.format(shown(id))}"
        raise FieldError("previous_response_id", fault, "previous_response_not_found")
    items = [*found.items, *json.loads(found.body)["output"], *plain_items(body)]
    return body.model_copy(update={"input": ITEMS.validate_python(items)})


def plain_items(body: ResponsesRequest) -> list[dict[str, Any]]:
    """The items of a request's input, as they may be sent."""
    items = body.model_dump(include={"input"}, by_alias=True, exclude_none=True)["input"]
    return [{"role": "user", "content": items}] if isinstance(items, str) else list(items)


def prepare(context: Context, body: ResponsesRequest) -> tuple[ChatRequest, ChatParsers, Conversation]:
    """The chat that asks for the same, what turns its tools into a prompt, and that prompt."""
    chat = as_chat(body)
    parsers = parsers_of(context, chat)
    return (
        chat,
        parsers,
        encode_conversation(context, chat.messages or [], parsers.tools, template_kwargs(context, chat)),
    )


class ResponsesResponder(Responder):
    def __init__(self, context: Context, body: ResponsesRequest) -> None:
        id = new_id("resp", "_") if body.request_id is None else f"resp_{body.request_id}"
        super().__init__(context, body.model, id, is_streamed=body.stream)
        self._body, self._created = body, int(time.time())
        self._store = None if body.store is False else context.responses
        self._tenant = ""
        self._names = call_names(body.tools or ())
        self._items = ItemStream(self._names)
        self._finish: Finish | None = None
        self._tapped: Mapping[str, Tapped] = {}  # of a stream
        self._tokens: ContentTokens | None = None  # where log probabilities are asked for

    async def respond(self, request: Request) -> Response:
        self._tenant = request.state.tenant.name
        return await super().respond(request)

    def make_request(self) -> EngineRequest:
        context = self.context
        self._body = continued(context, self._body, self._tenant)
        chat, self._parsers, conversation = prepare(context, self._body)
        self._prompt = conversation.text
        params = self._parsers.constrain(sampling_params(chat, context.config), conversation.text)
        prompt, self._params = context.fit(conversation.tokens, params)
        constraint = find_constraint(chat)
        field = CONSTRAINT_FIELDS.get(constraint.field, constraint.field) if constraint else "tools"
        if chat.logprobs:
            self._tokens = ContentTokens(context.need_tokenizer(), shown_tokens(context, prompt), self._params)
        located = locate(context, chat, self._parsers, conversation)
        return EngineRequest(
            [prompt],
            [self._params],
            chat.user,
            replace(request_options(chat), retained=located.retained, images=conversation.images),
            constraint_field=field,
            budget_field=budget_field(chat),
            parts=located.parts,
        )

    def response_body(self, choices: list[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        (choice,) = choices
        assert choice.finish is not None, "it is done"
        self._finish, status = choice.finish, status_of(choice.finish)
        parser = self._make_parser()
        delta = self._parsers.next(parser, choice.text, is_last=True)
        logprobs = self._logprobs(choice.logprobs, delta, choice.finish)
        response = self._stored(self._response(status, output_items(delta, logprobs, status, self._names), usage))
        return response | tapped_states(choice.taps)

    def open(self, active: ActiveResponse) -> Iterator[bytes]:
        self._parser = self._make_parser()
        for name in ("response.created", "response.in_progress"):
            yield self._items.event(name, response=self._response("in_progress", []))

    def delta(self, choice: Choice, output: Output) -> bytes:
        self._finish, self._tapped = output.finish, choice.taps
        is_last = output.finish is not None
        delta = self._parsers.next(self._parser, output.text or "", is_last=is_last)
        return self._items.push(delta, self._logprobs(output.logprobs or [], delta, output.finish))

    def error(self, body: dict[str, Any]) -> bytes:
        fault = body["error"]  # once more as a whole, by which the SDK knows it
        return self._items.event("error", **{name: fault[name] for name in ("code", "message", "param")}, error=fault)

    def close(self, usage: dict[str, Any]) -> Iterator[bytes]:
        assert self._finish is not None, "it is done"
        status = status_of(self._finish)
        yield from self._items.close(status)
        response = self._stored(self._response(status, self._items.done, usage)) | tapped_states(self._tapped)
        yield self._items.event(f"response.{status}", response=response)

    def usage(self, active: ActiveResponse) -> dict[str, Any]:
        usage = active.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0} | usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},  # they are not counted apart
            "total_tokens": usage["total_tokens"],
        }

    def _make_parser(self) -> OutputParser:
        return self._parsers.parser(self._prompt) or OutputParser(None, None)

    def _logprobs(self, made: list[Logprobs], delta: Delta, finish: Finish | None) -> list[Raw]:
        """The log probabilities of a delta's text, those of the tokens that were made last among them."""
        if self._tokens is None:
            return []
        is_hidden = finish is not None and hides_last(finish, self._params)
        self._tokens.push(made[:-1] if is_hidden else made, is_last=finish is not None)
        found, num_top = self._tokens.take(delta.places), self._body.top_logprobs or 0
        return raw(chat_logprobs(self.context.tokenizer, found, num_top)["content"])

    def _stored(self, response: dict[str, Any]) -> dict[str, Any]:
        """A response that has ended, once it is stored, if it is to be."""
        if self._store is not None:
            body = msgspec.json.encode(response)
            response["store"] = self._store.put(self.id, self._tenant, body, plain_items(self._body))
        return response

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        body = self._body.model_dump(by_alias=True, exclude_none=True, exclude={"input", "tools"})
        reason = INCOMPLETE.get(self._finish.reason) if self._finish else None
        return {name: body.get(name) for name in REPEATED} | {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": reason} if reason else None,
            "model": self.model,
            "output": output,
            "usage": usage,
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            "top_logprobs": body.get("top_logprobs", 0),
            "tools": [
                each.model_dump(exclude_none=True)
                for each in self._body.tools or ()
                if isinstance(each, FunctionTool | NamespaceTool)
            ],
            "tool_choice": body.get("tool_choice", "auto"),
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "text": {"format": {"type": "text"}} | body.get("text", {}),
            "truncation": "disabled",
            "previous_response_id": self._body.previous_response_id,
            "store": self._store is not None,
            **({} if usage is None else self.active.prefix_hits()),
        }


def status_of(finish: Finish) -> str:
    return "incomplete" if finish.reason in INCOMPLETE else "completed"


def hides_last(finish: Finish, params: SamplingParams) -> bool:
    """Whether the engine has left the last token out of the text."""
    if finish.reason == "eos":  # a grammar may also end with a token that is none
        return params.structured_outputs is None
    is_token = finish.reason.startswith("stop_") and finish.reason != "stop_sequence"
    return is_token and not params.include_stop_str_in_output


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat that asks for the same."""
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise FieldError("top_logprobs", f'top_logprobs needs include=["{LOGPROBS}"]')
    return ChatRequest.model_construct(
        messages=chat_messages(body),
        tools=[chat_tool(each) for each in flat_tools(body.tools or ())] or None,
        tool_choice=tool_choice(body.tool_choice, body.tools or ()),
        parallel_tool_calls=body.parallel_tool_calls,
        max_tokens=body.max_output_tokens,
        response_format=response_format(body.text.format if body.text else None),
        logprobs=has_logprobs,
        top_logprobs=body.top_logprobs if has_logprobs else None,
        reasoning=reasoning_limit(body.reasoning),
        chat_template_kwargs=body.chat_template_kwargs,
        **{name: getattr(body, name) for name in Sampling.model_fields},
    )


def chat_tool(tool: FunctionTool | OtherTool) -> Tool | OtherTool:
    if isinstance(tool, OtherTool):
        return tool
    function = Function.model_construct(**tool.model_dump(exclude={"type"}, exclude_none=True))
    return Tool.model_construct(type="function", function=function)


def tool_choice(
    choice: str | FunctionChoice | AllowedFunctions | None, tools: Sequence[GivenTool] = ()
) -> str | NamedTool | AllowedChoice | None:
    """tools: of the request, of which an allowed namespace has its functions"""
    match choice:
        case FunctionChoice():
            return named_tool(choice.name)
        case AllowedFunctions():
            named = [each for given in choice.tools for each in allowed_tools(given, tools)]
            allowed = AllowedTools.model_construct(mode=choice.mode, tools=named)
            return AllowedChoice.model_construct(type="allowed_tools", allowed_tools=allowed)
    return choice


def allowed_tools(
    choice: FunctionChoice | NamespaceChoice | OtherTool, tools: Sequence[GivenTool]
) -> list[NamedTool | OtherTool]:
    match choice:
        case FunctionChoice():
            return [named_tool(choice.name)]
        case NamespaceChoice():
            inside = [each for each in tools if isinstance(each, NamespaceTool) and each.name == choice.name]
            return [named_tool(name) for name in call_names(inside)] or [named_tool(choice.name)]
    return [choice]


def named_tool(name: str) -> NamedTool:
    return NamedTool.model_construct(type="function", function=NamedFunction.model_construct(name=name))


def reasoning_limit(given: ReasoningOptions | None) -> ReasoningLimit | None:
    if given is None:
        return None
    return ReasoningLimit.model_construct(effort=given.effort, max_tokens=given.max_tokens)


def response_format(given: PlainFormat | SchemaFormat | None) -> ResponseFormat | None:
    if given is None or given.type == "text":
        return None
    schema = given if isinstance(given, SchemaFormat) else None
    return ResponseFormat.model_construct(type=given.type, json_schema=schema)


def chat_messages(body: ResponsesRequest) -> list[ChatMessage]:
    """The messages that the items are. Reasoning, text and calls of one turn of the assistant are one message."""
    messages: list[ChatMessage] = []
    if body.instructions is not None:
        messages.append(ChatMessage.model_construct(role="system", content=body.instructions))
    items = body.input
    for number, item in enumerate(
        [Message.model_construct(role="user", content=items)] if isinstance(items, str) else items
    ):
        if isinstance(item, Message | CallOutput):
            name_pictures(item, number)
        if isinstance(item, Message) and item.role == "user":
            messages.append(ChatMessage.model_construct(role="user", content=parts_or_text(item.content)))
        elif isinstance(item, Message) and item.role != "assistant":
            text, last = join(item.content), messages[-1] if messages else None
            if last is not None and last.role == "system" and len(messages) == 1:
                last.content = f"{last.content}\n\n{text}"  # templates take one system message, in front
            else:
                messages.append(ChatMessage.model_construct(role=item.role, content=text))
        elif isinstance(item, CallOutput):
            content = parts_or_text(item.output)
            messages.append(ChatMessage.model_construct(role="tool", content=content, tool_call_id=item.call_id))
        elif not isinstance(item, Reasoning) or item.content:  # another server's reasoning is empty here
            if not messages or messages[-1].role != "assistant":
                messages.append(ChatMessage.model_construct(role="assistant", content=""))
            add_to_turn(messages[-1], item)
    return messages


def add_to_turn(message: ChatMessage, item: Message | FunctionCall | CustomCall | Reasoning) -> None:
    """Add an item of the assistant's to the message of its turn."""
    match item:
        case Message():
            message.content = f"{message.content}{join(item.content)}"
        case Reasoning():
            message.reasoning_content = (message.reasoning_content or "") + join(item.content or [])
        case FunctionCall() | CustomCall():
            call = ToolCallMessage.model_construct(id=item.call_id, type="function", function=chat_call(item))
            message.tool_calls = [*(message.tool_calls or ()), call]


def chat_call(item: FunctionCall | CustomCall) -> ChatCall:
    name = flat_name(item.namespace, item.name)
    if isinstance(item, CustomCall):
        return function_call(name, item.input)
    return ChatCall.model_construct(name=name, arguments=item.arguments)


def name_pictures(item: Message | CallOutput, number: int) -> None:
    """Note where in the body the images of an item are. FieldError for a role that has none."""
    field, content = ("output", item.output) if isinstance(item, CallOutput) else ("content", item.content)
    for at, part in enumerate(() if isinstance(content, str) else content):
        if isinstance(part, Picture):
            part._place = "input", f"input.{number}.{field}.{at}"
            if isinstance(item, Message) and item.role != "user":
                raise FieldError("input", f"{part._place[1]}: an image does not go with role={item.role}")


def parts_or_text(content: str | Sequence[AnyPart]) -> str | list[Any]:
    """A content as a chat has it: its parts if it has images, else its text."""
    has_images = not isinstance(content, str) and any(isinstance(part, Picture) for part in content)
    return list(content) if has_images else join(content)


def join(content: str | Sequence[AnyPart]) -> str:
    """The texts of a content."""
    return content if isinstance(content, str) else "\n".join(p.text for p in content if not isinstance(p, Picture))
