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
from atom.checkpoint.chat_template import last_text
from atom.errors import RequestError
from atom.images.types import Image, PlacedImage
from atom.images.videos import Video
from atom.serve.context import Context
from atom.serve.http.bodies import check_size
from atom.serve.http.errors import FieldError
from atom.serve.openai.schema import ChatMessage, Clip, Picture, Tool, find_fault
from atom.serve.prompt_images import GivenImage, GivenVideo, PromptImages, join_parts, places_of
from atom.serve.template_variables import check_variables

OWN_ID = re.compile(r"(call|toolu)_[0-9a-f]{16,}")  # `ids.new_id` and `tool_parser.new_call_id`
RAW = "arguments"  # the name of arguments that are no object
DEVELOPER = re.compile("""['"]developer['"]""")  # a template that knows this role


class Conversation(NamedTuple):
    text: str
    tokens: list[int]  # with placeholders of images
    images: tuple[PlacedImage, ...] = ()


def shown_tokens(context: Context, tokens: list[int]) -> list[int]:
    """A prompt's tokens as a response shows them: the token of an image or a video in place of each placeholder."""
    return tokens if context.images is None else context.images.show(tokens)


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
    plain, images = plain_messages(context, messages)
    values = dict(kwargs or {}) | {"add_generation_prompt": add_generation_prompt}
    return encode_plain(
        context, plain, tools, values, truncate=truncate, is_continued=continue_final_message,
        images=images.found, videos=images.videos,
    )  # fmt: skip


def encode_plain(
    context: Context,
    messages: list[dict[str, Any]],
    tools: Sequence[Tool] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    prefill: str = "",
    truncate: int | None = None,
    is_continued: bool = False,
    images: Sequence[Image] = (),
    videos: Sequence[Video] = (),
) -> Conversation:
    """Render and tokenize messages in the template's form. prefill: the beginning of the answer.

    is_continued: the answer begins with the last message.
    images, videos: those of the messages' parts, by their place
    """
    if (images or videos) and truncate is not None:
        raise FieldError("truncate_prompt_tokens", "truncate_prompt_tokens: a prompt with images is not cut")
    cut = partial(context.cut, truncate=truncate)
    for message in messages:
        if message["role"] != "assistant":  # templates leave out thoughts of the assistant
            cut(last_text(message["content"]))
    values = chat_values(context, messages, tools, kwargs) | {"prefill": prefill, "is_continued": is_continued}
    shown = list[dict[str, Any]]()
    tokenizer = context.need_tokenizer()
    text, tokens = tokenizer.prepare_chat(**values, cut=cut, check=context.check_count, shown=shown.extend)
    if not (images or videos) or context.images is None:
        return Conversation(text, tokens)
    own, clips = [images[place] for place in places_of(shown)], [videos[place] for place in places_of(shown, "video")]
    if own and {context.images.processor.token, context.images.processor.row_token}.isdisjoint(tokens):
        what = "set serve.http.chat_template to a file of one that writes the model's image token for each"
        raise RequestError(f"the model's chat template leaves out images: {what}")
    tokens, placed = context.images.place(tokens, own, tokenizer, clips)
    return Conversation(text, tokens, placed)


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
    plain, _ = plain_messages(context, messages)
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


def plain_messages(context: Context, messages: Sequence[ChatMessage]) -> tuple[list[dict[str, Any]], PromptImages]:
    """Messages in the template's form, and their images and videos."""
    tokenizer, is_of_tool, plain = context.need_tokenizer(), False, list[dict[str, Any]]()
    contents = [message.content for message in messages if isinstance(message.content, list)]
    parts = [part for content in contents for part in content]
    num_given = sum(len(part.frames) if isinstance(part, Clip) else isinstance(part, Picture) for part in parts)
    images = PromptImages(context.images, num_given, context.config.serve.max_images, context.prepare_seconds)
    for number, message in enumerate(messages):
        is_of_tool = message.role == "tool" or (is_of_tool and message.role == "user")
        plain.append(plain_message(message, tokenizer, images, number, is_of_tool=is_of_tool))
    return plain, images


def plain_message(
    message: ChatMessage,
    tokenizer: Tokenizer,
    images: PromptImages | None = None,
    number: int = 0,
    *,
    is_of_tool: bool = False,
) -> dict[str, Any]:
    """A message in the template's form: its content as `join_parts`, and the arguments of calls as objects.

    images: reads those of its content
    number: of the message
    is_of_tool: it is a tool's result, or follows one
    """
    content: Any = message.refusal if message.content is None else message.content
    if isinstance(content, list):
        parts = list[dict[str, Any]]()
        for at, part in enumerate(content):
            if not isinstance(part, Clip | Picture):
                parts.append({"type": "text", "text": part.text})
                continue
            assert images is not None, "the message has none"
            place = part._place or ("messages", f"messages.{number}.content.{at}")
            stays = is_of_tool or message.role == "assistant"
            if isinstance(part, Clip):
                clip = GivenVideo(part.frames, part.rate, *place, part.type, part.known, stays=stays)
                parts.append(images.read_video(clip))
            else:
                parts.append(images.read(GivenImage(*part.given, *place, part.type, part.known, stays=stays)))
        content = join_parts(parts)
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
