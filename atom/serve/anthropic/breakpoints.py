"""Find the blocks of a conversation that have cache_control; mark all texts.

    breakpoints_of(body)                 # {"system.1": 3600.0, "messages.4.content.0": 300.0}: seconds
    find_parts(lambda marker: render(mark_texts(body, marker)), text)

A prompt of Anthropic's API begins with the tools. Chat templates put them next to the system prompt, before or after
it: so cache_control of a tool, or of the last block of the system prompt, reaches to the end of both.
"""

from __future__ import annotations

from collections.abc import Iterator

from atom.serve.anthropic.message_schema import Block, Message, TextBlock, ToolResultBlock
from atom.serve.anthropic.schema import CountRequest, MessageTool
from atom.serve.prompt_parts import END, TOOLS, Marker, ttl_of


def breakpoints_of(body: CountRequest) -> dict[str, float]:
    """The parts up to which the prompt is kept from eviction, in their order, and for how many seconds."""
    found: dict[str, float] = {}
    for name, control in controls_of(body):
        if (seconds := ttl_of(control)) is not None:
            found[name] = max(seconds, found.get(name, 0.0))
    return found


def controls_of(body: CountRequest) -> Iterator[tuple[str, object]]:
    """The names of parts, and their cache_control."""
    system = [] if body.system is None or isinstance(body.system, str) else body.system
    for at, block in enumerate(system):
        yield f"system.{at}", block.cache_control
    if body.tools:
        for tool in body.tools:
            yield TOOLS, tool.cache_control if isinstance(tool, MessageTool) else None
        yield TOOLS, system[-1].cache_control if system else None
    for number, message in enumerate(body.messages):
        for at, each in enumerate([] if isinstance(message.content, str) else message.content):
            yield f"messages.{number}.content.{at}", getattr(each, "cache_control", None)
    yield END, body.cache_control


def mark_texts(body: CountRequest, marker: Marker) -> CountRequest:
    """The conversation with a mark at the end of each text, and one where its first turn begins."""
    system = body.system
    if isinstance(system, str):
        system = marker.mark(system, "system")
    elif system is not None:
        system = [
            block.model_copy(update={"text": marker.mark(block.text, f"system.{at}")})
            for at, block in enumerate(system)
        ]
    messages = [_mark_message(each, f"messages.{at}", marker, is_first=not at) for at, each in enumerate(body.messages)]
    return body.model_copy(update={"system": system, "messages": messages})


def _mark_message(message: Message, name: str, marker: Marker, *, is_first: bool) -> Message:
    content = message.content
    if isinstance(content, str):
        marked = marker.mark(content, name)
        return message.model_copy(update={"content": marker.mark_start(marked, TOOLS) if is_first else marked})
    blocks = [
        _mark_block(block, f"{name}.content.{at}", marker, is_first=is_first and not at)
        for at, block in enumerate(content)
    ]
    return message.model_copy(update={"content": blocks})


def _mark_block(block: Block, name: str, marker: Marker, *, is_first: bool) -> Block:
    if isinstance(block, TextBlock):
        marked = marker.mark(block.text, name)
        return block.model_copy(update={"text": marker.mark_start(marked, TOOLS) if is_first else marked})
    if not isinstance(block, ToolResultBlock) or not block.content:
        return block
    if isinstance(block.content, str):
        return block.model_copy(update={"content": marker.mark(block.content, name, is_result=True)})
    *texts, last = block.content
    if not isinstance(last, TextBlock):
        return block
    ended = last.model_copy(update={"text": marker.mark(last.text, name, is_result=True)})
    return block.model_copy(update={"content": [*texts, ended]})
