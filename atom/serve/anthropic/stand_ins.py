"""Put texts in place of blocks that a model here cannot read.

    stand_in({"type": "image", "source": {…}})        # {"type": "text", "text": "[image: not shown to this model]"}
    readable_text(block.content)                      # of a result of a tool that Anthropic's servers ran

They are what tools return, and stay in the history: to refuse them would end an agent's session.
"""

from __future__ import annotations

import json
from typing import Any

from atom.serve.content import IMAGE
from atom.serve.openai.schema import plain_json

DOCUMENT = "[document: not shown to this model]"
OPAQUE = ("encrypted_", "cache_control", "citations")  # begin the names of fields that say nothing to a model
STRUCTURED = ("search_result", "browser_state")  # blocks whose fields the model reads as JSON


def stand_in(block: Any) -> Any:
    """The text block in place of a block, as bodies have them; any other block unchanged. PydanticCustomError too."""
    match block:
        case {"type": "image" | "document"}:
            text = readable(block)
        case {"type": "tool_reference", "tool_name": str(text)}:
            pass  # the model reads the tool itself in tools
        case {"type": kind} if kind in STRUCTURED:
            text = readable_text(plain_json(block))
        case _:
            return block
    return {"type": "text", "text": text}


def stand_ins(content: Any) -> Any:
    """The content of a result, with texts in place of what the model cannot read."""
    return [stand_in(block) for block in content] if isinstance(content, list) else content


def readable_text(content: Any) -> str:
    """A content of JSON, at most MAX_DEPTH deep, as the model reads it: texts as they are, anything else as JSON."""
    if isinstance(content, list) and all(is_text(block) for block in content):
        return "\n".join(block["text"] for block in content)
    found = readable(content)
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def readable(value: Any) -> Any:
    """JSON without fields that are opaque, and with texts in place of images and documents."""
    match value:
        case {"type": "image"}:
            return IMAGE
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case {"type": "document", "source": {"type": "content", "content": str(text)}}:
            return text
        case {"type": "document", "source": {"type": "content", "content": list(blocks)}} if all(map(is_text, blocks)):
            return "\n".join(block["text"] for block in blocks)
        case {"type": "document"}:
            return DOCUMENT
        case dict():
            return {name: readable(each) for name, each in value.items() if not name.startswith(OPAQUE)}
        case list():
            return [readable(each) for each in value]
    return value
