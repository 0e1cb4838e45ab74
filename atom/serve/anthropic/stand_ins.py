"""Put texts in place of blocks that a model here cannot read.

stand_in({"type": "document", "source": {…}})     # {"type": "text", "text": "[document: not shown to this model]"}
readable_text(block.content)                      # of a result of a tool that Anthropic's servers ran
"""

from __future__ import annotations

import json
from typing import Any

from atom.serve import content
from atom.serve.openai.schema import plain_json

OPAQUE = ("encrypted_", "cache_control", "citations")  # begin the names of fields that say nothing to a model
STRUCTURED = ("search_result", "browser_state")  # blocks whose fields the model reads as JSON


def stand_in(block: Any) -> Any:
    """The text block in place of a block, as bodies have them; any other block unchanged. PydanticCustomError too."""
    match block:
        case {"type": "document"}:
            text = readable(block)
        case {"type": "tool_reference", "tool_name": str(text)}:
            pass  # the model reads the tool itself in tools
        case {"type": kind} if kind in STRUCTURED:
            text = readable_text(plain_json(block))
        case _:
            return content.stand_in(block)
    return {"type": "text", "text": text}


def readable_text(found: Any) -> str:
    """A content of JSON, at most MAX_DEPTH deep, as the model reads it: texts as they are, anything else as JSON."""
    if isinstance(found, list) and all(is_text(block) for block in found):
        return "\n".join(block["text"] for block in found)
    shown = readable(found)
    return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


def is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text" and isinstance(block.get("text"), str)


def readable(value: Any) -> Any:
    """JSON without fields that are opaque, and with texts in place of images and documents."""
    match value:
        case {"type": "image"}:
            return content.IMAGE
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return text
        case {"type": "document", "source": {"type": "content", "content": str(text)}}:
            return text
        case {"type": "document", "source": {"type": "content", "content": list(blocks)}} if all(map(is_text, blocks)):
            return "\n".join(block["text"] for block in blocks)
        case {"type": "document"}:
            return content.DOCUMENT
        case dict():
            return {name: readable(each) for name, each in value.items() if not name.startswith(OPAQUE)}
        case list():
            return [readable(each) for each in value]
    return value
