"""Render an Anthropic conversation to a prompt.

It converts messages, tools and the switch for thinking to what chat templates know.

    prepared = await context.in_thread(lambda: prepare(context, body))
    prepared.conversation.tokens                 # the prompt
    prepared.parsers.read(text, prepared.conversation.text)

Newlines join the text blocks of a turn, and consecutive turns of one role are one turn. A tool result is a message of
its own; one that is an error begins with "Error: ", since templates have no field for errors. If the last message is
the assistant's, the answer continues it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from atom.runtime.types import RetainedPrefix
from atom.serve.anthropic.breakpoints import breakpoints_of, mark_texts
from atom.serve.anthropic.message_schema import (
    SHOWN_BLOCKS,
    Block,
    ImageBlock,
    Message,
    ServerCallBlock,
    ServerResultBlock,
    SilentBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from atom.serve.anthropic.schema import CountRequest, FreeChoice, HostedTool, MessagesRequest, MessageTool, OneTool
from atom.serve.anthropic.stand_ins import readable_text
from atom.serve.chat_template import Conversation, encode_plain, render_plain
from atom.serve.context import Context
from atom.serve.http.errors import FieldError, shown
from atom.serve.ids import new_id
from atom.serve.openai.schema import (
    AllowedChoice,
    AllowedTools,
    Function,
    NamedFunction,
    NamedTool,
    OtherTool,
    Tool,
)
from atom.serve.openai.tools import offered_tools
from atom.serve.output.output_parser import is_opened
from atom.serve.output.parsers import ChatParsers
from atom.serve.prompt_images import GivenImage, PromptImages, join_parts
from atom.serve.prompt_parts import Marker, Part, find_parts, retained_parts, retained_whole
from atom.serve.template_variables import SWITCHES, effort_variables

BLOCKS = {  # of each role
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock, SilentBlock, ServerCallBlock, ServerResultBlock),
}
CALLS, RESULTS = (ToolUseBlock, ServerCallBlock), (ToolResultBlock, ServerResultBlock)


class Prepared(NamedTuple):
    parsers: ChatParsers
    conversation: Conversation
    parts: list[Part]  # of the prompt, if the request needs them
    retained: tuple[RetainedPrefix, ...]  # by its cache_control


def prepare(context: Context, body: CountRequest) -> Prepared:
    """Prepare the prompt of a request. FieldError, or another RequestError, if that fails."""
    choice = body.tool_choice
    is_parallel = not (isinstance(choice, FreeChoice) and choice.disable_parallel_tool_use)
    tools, tool_choice = [openai_tool(tool) for tool in body.tools or ()], openai_choice(body)
    offered = offered_tools(context, tools, tool_choice)
    new_call_id = partial(new_id, "toolu", "_")
    turns = list(read_turns(body))
    parsers = ChatParsers(
        context.config,
        offered,
        tool_choice,
        context.tokenizer,
        is_parallel=is_parallel,
        has_called=any(isinstance(block, CALLS + RESULTS) for _, blocks in turns for block in blocks),
        new_id=new_call_id,
    )
    prefill = take_prefill(turns)
    effort = effort_variables(context.need_tokenizer(), body.output_config.effort if body.output_config else None)
    variables = effort | thinking_variables(context, body, has_reasoning=parsers.has_reasoning)
    limits = context.config.serve.max_images, context.prepare_seconds
    images = PromptImages(context.images, sum(map(count_images, turns)), *limits)
    plain = plain_messages(turns, images)
    conversation = encode_plain(context, plain, parsers.tools, variables, prefill, images=images.found)
    reasoning = context.config.model.reasoning
    if prefill and reasoning and is_opened(conversation.text.removesuffix(prefill), (reasoning[0], reasoning[1])):
        fix = "end with a message of the user"
        if body.thinking is None or body.thinking.type != "disabled":
            fix += ', or send thinking={"type": "disabled"}'
        raise FieldError("messages", f"an answer of this model begins with its thinking, not with a given text; {fix}")

    def render(marker: Marker) -> str:
        turns = list(read_turns(mark_texts(body, marker)))
        begun = take_prefill(turns)
        plain = plain_messages(turns, PromptImages(context.images))
        return render_plain(context, plain, parsers.tools, variables, begun)

    breakpoints, parts = {}, []
    if isinstance(body, MessagesRequest):
        breakpoints = breakpoints_of(body)
        if conversation.images:
            return Prepared(parsers, conversation, [], retained_whole(conversation, breakpoints))
        parts = find_parts(render, conversation.text) if breakpoints or body.explain else []
    return Prepared(parsers, conversation, parts, retained_parts(context, conversation, parts, breakpoints))


def openai_tool(tool: MessageTool | HostedTool) -> Tool | OtherTool:
    if isinstance(tool, HostedTool):
        return OtherTool.model_construct(type=tool.family)
    schema = tool.input_schema | ({"examples": tool.input_examples} if tool.input_examples else {})
    function = Function.model_construct(name=tool.name, description=tool.description, parameters=schema)
    return Tool.model_construct(type="function", function=function)


def openai_choice(body: CountRequest) -> str | NamedTool | AllowedChoice | None:
    choice = body.tool_choice
    if isinstance(choice, OneTool):
        named = [each for each in body.tools or () if isinstance(each, HostedTool) and each.name == choice.name]
        if named:
            allowed = AllowedTools.model_construct(mode="required", tools=list(map(openai_tool, named)))
            return AllowedChoice.model_construct(type="allowed_tools", allowed_tools=allowed)
        function = NamedFunction.model_construct(name=choice.name)
        return NamedTool.model_construct(type="function", function=function)
    return None if choice is None else {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def thinking_variables(context: Context, body: CountRequest, *, has_reasoning: bool) -> dict[str, Any]:
    """The template's variables for thinking; empty if the request does not mention it.

    A model whose template has no switch always thinks. Claude Code disables thinking for titles and sub-agents, so the
    model then thinks as little as the template can ask for, and the answer does not show it.
    """
    thinking = body.thinking
    if thinking is None:
        return {}
    tokenizer = context.need_tokenizer()
    switches = {name: thinking.type != "disabled" for name in SWITCHES if name in tokenizer.template_variables()}
    if thinking.type == "disabled":
        return switches or effort_variables(tokenizer, "none")
    if not has_reasoning:
        if thinking.type == "adaptive":  # as much as it is of use, which may be none
            return {}
        raise FieldError("thinking", "this model does not think; leave thinking out or send type=disabled")
    if body.tool_choice is not None and body.tool_choice.type in ("any", "tool"):
        raise FieldError("thinking", "a forced tool call has no room for thinking; disable it or send tool_choice auto")
    return switches


Turn = tuple[str, list[Block]]  # a role and its blocks


def read_turns(body: CountRequest) -> Iterator[Turn]:
    """The turns of a conversation, texts as blocks; consecutive messages of one role are one turn."""
    if body.system is not None and body.system != []:
        yield "system", read_blocks(body.system)
    for index, message in enumerate(body.messages):
        check_blocks(index, message)
    for role, group in groupby(shown_messages(body.messages), key=lambda message: message.role):
        blocks = [block for message in group for block in read_blocks(message.content)]
        yield role, [block for block in blocks if not isinstance(block, SilentBlock)]


def shown_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages that the model reads: a reminder may be for the turn that it follows only."""
    last = max((index for index, message in enumerate(messages) if message.role == "user"), default=0)
    return [
        message for index, message in enumerate(messages) if index >= last or message.clear_at != "next_user_message"
    ]


def read_blocks(content: str | Sequence[Block]) -> list[Block]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else list(content)


def check_blocks(index: int, message: Message) -> None:
    allowed = BLOCKS.get(message.role, (TextBlock,))
    for block in read_blocks(message.content):
        if not isinstance(block, allowed):
            raise FieldError("messages", f"messages.{index}: a {block.type} block does not go with role={message.role}")
    for at, block in enumerate(read_blocks(message.content)):
        inside = block.content if isinstance(block, ToolResultBlock) and not isinstance(block.content, str) else ()
        for image in [block, *(inside or ())]:
            if isinstance(image, ImageBlock):
                image._name = f"messages.{index}.content.{at}"


def take_prefill(turns: list[Turn]) -> str:
    """Remove the last turn if it is the assistant's; its text, which the answer begins with."""
    if turns[-1][0] != "assistant":
        return ""
    _, blocks = turns.pop()
    for block in blocks:
        if not isinstance(block, TextBlock):
            fix = "only text can be continued; end with a message of the user"
            raise FieldError("messages", f"the last message is the assistant's and has a {block.type} block; {fix}")
    return join(blocks)


def count_images(turn: Turn) -> int:
    """The images of a turn, those in results too."""
    contents = [block.content for block in turn[1] if isinstance(block, ToolResultBlock)]
    inside = [block for content in contents if isinstance(content, list) for block in content]
    return sum(isinstance(block, ImageBlock) for block in [*turn[1], *inside])


def plain_messages(turns: Iterable[Turn], images: PromptImages) -> list[dict[str, Any]]:
    """Convert turns to messages for a chat template. FieldError for a result without its call.

    images: reads those of the turns
    """
    names: dict[str, str] = {}  # of the tools called so far, by the id of the call
    plain: list[dict[str, Any]] = []
    for role, blocks in turns:
        follows = any(isinstance(block, RESULTS) for block in blocks)
        read = partial(read_content, images=images, is_of_tool=follows)
        for is_result, group in groupby(blocks or read_blocks(""), key=lambda block: isinstance(block, RESULTS)):
            part = list(group)
            if is_result:
                plain += [tool_message(block, names, read) for block in part if isinstance(block, RESULTS)]
            elif role == "assistant":
                plain.append(assistant_message(part))
                names |= {block.id: block.name for block in part if isinstance(block, CALLS)}
            else:
                plain.append({"role": role, "content": read(part)})
    return plain


def assistant_message(blocks: Sequence[Block]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": join(blocks)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in blocks if isinstance(block, CALLS)]
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
            for call in calls
        ]
    return message


def tool_message(
    block: ToolResultBlock | ServerResultBlock,
    names: dict[str, str],
    read: Callable[[Sequence[Block]], str | list[dict[str, Any]]],
) -> dict[str, Any]:
    name = names.get(block.tool_use_id)
    if name is None:
        fault = f"a tool_result is for {shown(block.tool_use_id)}, but no tool_use before it has this id"
        raise FieldError("messages", fault)
    if isinstance(block, ServerResultBlock):
        content: str | list[dict[str, Any]] = readable_text(block.content)
    else:
        content = "" if block.content is None else read(read_blocks(block.content))
    if block.is_error:
        content = f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}


def read_content(blocks: Sequence[Block], images: PromptImages, *, is_of_tool: bool) -> str | list[dict[str, Any]]:
    """A template's content of texts and images."""
    parts = list[dict[str, Any]]()
    for block in blocks:
        if isinstance(block, TextBlock):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, ImageBlock):
            place = "messages", block._name, block.type, ", ".join(SHOWN_BLOCKS)
            parts.append(images.read(GivenImage(block.url, None, *place, stays=is_of_tool)))
    return join_parts(parts)


def join(blocks: Iterable[Block]) -> str:
    """The text of the text blocks."""
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
