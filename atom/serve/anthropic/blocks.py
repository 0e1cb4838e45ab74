"""Anthropic's content blocks: thinking, text, tool use, whole or streamed.

    content_blocks(answer)                       # [{"type": "text", "text": "Hello"}]
    blocks = BlockStream()
    data = blocks.push(delta)                    # the bytes of events; b"" if nothing is new
    data = blocks.close()                        # at the end

A block has an index and ends before the next one begins.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import json
from pydantic_core import from_json

from atom.serve.http.sse import event
from atom.serve.output.output_parser import Answer, Delta, ToolCall, ToolDelta

ThinkingShown = Literal["whole", "empty", "none"]  # its text; a block without text; no block
DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":%s}}\n\n'


def content_blocks(answer: Answer, thinking: ThinkingShown = "whole") -> list[dict[str, Any]]:
    """The blocks of a whole answer; none where the model said nothing."""
    blocks: list[dict[str, Any]] = []
    if answer.reasoning and thinking != "none":
        blocks.append(thinking_block(answer.reasoning if thinking == "whole" else ""))
    if answer.content:
        blocks.append(text_block(answer.content))
    return blocks + [tool_block(call.id, call.name, tool_input(call)) for call in answer.calls]


def tool_input(call: ToolCall) -> Any:
    """The arguments of a call: their text; of one that is incomplete, what Anthropic's SDK reads from a stream."""
    if call.is_whole:
        return msgspec.Raw(call.arguments.encode())
    try:
        return from_json(call.arguments or "{}", allow_partial=True)
    except ValueError:  # a number or an escape that it cannot hold
        return {}


def thinking_block(thinking: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": thinking, "signature": ""}


def text_block(text: str = "") -> dict[str, Any]:
    return {"type": "text", "text": text}


def tool_block(id: str, name: str, input: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


class BlockStream:
    def __init__(self, thinking: ThinkingShown = "whole") -> None:
        self._thinking = thinking
        self._num_blocks = 0
        self._open: str | None = None  # type of the block that is not closed

    def push(self, delta: Delta) -> bytes:
        """The events of a delta, in a model's order: thinking, the rest of a call, text, further calls."""
        data = b""
        if delta.reasoning and self._thinking != "none":
            data += self._begin("thinking", thinking_block())
            if self._thinking == "whole":
                data += self._add(b"thinking_delta", b"thinking", delta.reasoning)
        num_open = 0  # deltas of the call that is open
        while num_open < len(delta.tools) and delta.tools[num_open].id is None:
            data += self._push_call(delta.tools[num_open])
            num_open += 1
        if delta.content:
            data += self._begin("text", text_block())
            data += self._add(b"text_delta", b"text", delta.content)
        for call in delta.tools[num_open:]:
            data += self._push_call(call)
        return data

    def close(self) -> bytes:
        """End the open block."""
        if self._open is None:
            return b""
        self._open = None
        return event({"type": "content_block_stop", "index": self._num_blocks - 1}, "content_block_stop")

    def _push_call(self, call: ToolDelta) -> bytes:
        data = b""
        if call.id is not None:
            data = self.close() + self._begin("tool_use", tool_block(call.id, call.name or "", {}))
        return data + self._add(b"input_json_delta", b"partial_json", call.arguments) if call.arguments else data

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        """Open a block, unless one of this type is open."""
        if self._open == kind:
            return b""
        data = self.close()
        self._open, index = kind, self._num_blocks
        self._num_blocks += 1
        start = {"type": "content_block_start", "index": index, "content_block": block}
        return data + event(start, "content_block_start")

    def _add(self, kind: bytes, name: bytes, text: str) -> bytes:
        return DELTA % (self._num_blocks - 1, kind, name, json.encode(text))
