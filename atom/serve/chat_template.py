"""Render a chat to a prompt with the checkpoint's template, and tokenize it.

It is slow, so call it in a thread (`Context.in_thread`).

prompt = encode_conversation(context, body.messages, tools=body.tools, kwargs={"enable_thinking": False})
prompt.tokens, prompt.text.endswith("<think>")
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic_core import from_json

from atom.checkpoint import Tokenizer
from atom.serve.context import Context
from atom.serve.http.bodies import check_size
from atom.serve.http.errors import FieldError
from atom.serve.openai.schema import ChatMessage, Tool, find_fault
from atom.serve.template_variables import check_variables

OWN_ID = re.compile(r"(call|toolu)_[0-9a-f]{16,}")  # `ids.new_id` and `tool_parser.new_call_id`
RAW = "arguments"  # the name of arguments that are no object
DEVELOPER = re.compile("""['"]developer['"]""")  # a template that knows this role


class Conversation(NamedTuple):
    text: str
    tokens: list[int]


def encode_conversation(
    context: Context,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    truncate: int | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> Conversation:
    """Render and tokenize a chat. RequestError if the checkpoint's template is missing or refuses these messages.

    truncate: only that many of the last tokens are used; more may be returned
    continue_final_message: the prompt ends where the last message does, as in transformers' apply_chat_template
    """
    tokenizer = context.need_tokenizer()
    if continue_final_message and add_generation_prompt:
        fix = "set add_generation_prompt=false"
        raise FieldError("continue_final_message", f"continue_final_message opens no other turn; {fix}")
    check_variables(tokenizer, kwargs)
    for call in (call for message in messages for call in message.tool_calls or ()):
        check_size(call.function.arguments.encode(), context.config.advanced)  # JSON in JSON
    plain = [plain_message(message, tokenizer) for message in messages]
    values = dict(kwargs or {}) | {"add_generation_prompt": add_generation_prompt}
    return encode_plain(context, plain, tools, values, truncate=truncate, is_continued=continue_final_message)


def encode_plain(
    context: Context,
    messages: list[dict[str, Any]],
    tools: Sequence[Tool] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    prefill: str = "",
    truncate: int | None = None,
    is_continued: bool = False,
) -> Conversation:
    """Render and tokenize messages in the template's form. prefill: the beginning of the answer.

    is_continued: the answer begins with the last message.
    """
    cut = partial(context.cut, truncate=truncate)
    for message in messages:
        if message["role"] != "assistant":  # templates leave out thoughts of the assistant
            cut(message["content"])
    values = chat_values(context, messages, tools, kwargs) | {"prefill": prefill, "is_continued": is_continued}
    return Conversation(*context.need_tokenizer().prepare_chat(**values, cut=cut, check=context.check_count))


def render_conversation(
    context: Context,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Render a chat as `encode_conversation` does."""
    plain = [plain_message(message, context.need_tokenizer()) for message in messages]
    values = dict(kwargs or {}) | {"add_generation_prompt": add_generation_prompt}
    return render_plain(context, plain, tools, values, is_continued=continue_final_message)


def render_plain(
    context: Context,
    messages: list[dict[str, Any]],
    tools: Sequence[Tool] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    prefill: str = "",
    is_continued: bool = False,
) -> str:
    """Render messages as `encode_plain` does."""
    values = chat_values(context, messages, tools, kwargs) | {"prefill": prefill, "is_continued": is_continued}
    return context.need_tokenizer().render_prompt(**values)


def chat_values(
    context: Context,
    messages: list[dict[str, Any]],
    tools: Sequence[Tool] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a chat is rendered from: messages, tools, the template's other variables."""
    values = {**(context.config.serve.http.chat_template_kwargs or {}), **(kwargs or {})}
    named = [name_thoughts(message, context.need_tokenizer().template_text) for message in messages]
    for message in named:
        for call in message.get("tool_calls", ()):
            call["id"] = template_id(call["id"])
        if "tool_call_id" in message:
            message["tool_call_id"] = template_id(message["tool_call_id"])
    return values | ({"tools": [plain_tool(tool) for tool in tools]} if tools else {}) | {"messages": named}


EMPTY_SCHEMA = {"type": "object", "properties": {}}


def plain_tool(tool: Tool) -> dict[str, Any]:
    """A tool in the template's form, with the description and the schema that templates read of each."""
    function = tool.function
    schema = function.parameters or {}
    schema = schema | {name: value for name, value in EMPTY_SCHEMA.items() if name not in schema}
    return {
        "type": "function",
        "function": {"name": function.name, "description": function.description or "", "parameters": schema},
    }


def plain_message(message: ChatMessage, tokenizer: Tokenizer) -> dict[str, Any]:
    """A message in the template's form: one text, and the arguments of calls as objects."""
    content = message.refusal if message.content is None else message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if content is None and message.role not in ("assistant", "tool"):  # these may have nothing to say
        raise FieldError("messages", f"a message of the {message.role} has no content")
    role = message.role
    if role == "developer" and not DEVELOPER.search(tokenizer.chat_template or ""):
        role = "system"  # the name in most templates
    plain: dict[str, Any] = {"role": role, "content": content or ""}
    thoughts = message.reasoning if message.reasoning_content is None else message.reasoning_content
    more = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": thoughts}
    plain |= {name: value for name, value in more.items() if value is not None}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": read_arguments(call.function.arguments)},
            }
            for call in sorted(message.tool_calls, key=lambda call: call.index or 0)
        ]
    return plain


def name_thoughts(message: dict[str, Any], template: str) -> dict[str, Any]:
    """A message whose reasoning has the template's name: gpt-oss calls it thinking, with no text next to a call."""
    if "message.thinking" not in template or not message.get("reasoning_content"):
        return message
    thoughts = [message["reasoning_content"]]
    if message.get("tool_calls") and message["content"]:
        thoughts.append(message["content"])
        message = message | {"content": ""}
    return message | {"thinking": "\n".join(thoughts)}


def template_id(id: str) -> str:
    """The id of a call for a template: some insist on 9 letters and digits, so our own ids are cut."""
    return id[-9:] if OWN_ID.fullmatch(id) else id


def read_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call as an object, which templates need.

    Those of a call that was cut off are what there is of them. Other text becomes the object's only field.
    """
    try:
        arguments = from_json(text.strip() or "{}", allow_partial="trailing-strings")
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) and not find_fault(arguments) else {RAW: text}
