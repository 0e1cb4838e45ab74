"""Put a text in place of contents that a model cannot read.

stand_ins([{"type": "image_url", "image_url": {"url": "data:…"}}], stand_in)
# [{"type": "text", "text": "[image: not shown to this model]"}]

They are in what tools return, and stay in the history: to refuse them would end an agent's session. An image that has
its URL stays: whether a model reads it is known once the request has found its model (`atom.serve.prompt_images`).

read_results(messages, is_result)                # a body's messages, with such texts in the results of tools
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

IMAGE, DOCUMENT = "[image: not shown to this model]", "[document: not shown to this model]"
VIDEO = "[video: not shown to this model]"
TEXTS = {  # by type of a part that no model here reads: the type of a text in its API, and the text
    "image_url": ("text", IMAGE),
    "image": ("text", IMAGE),
    "input_image": ("input_text", IMAGE),
    "file": ("text", DOCUMENT),
    "input_file": ("input_text", DOCUMENT),
}


def stand_in(part: Any) -> Any:
    """A text in place of an image or a file, of the type that its API has; any other part unchanged."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in TEXTS or is_image(part):
        return part
    text_type, text = TEXTS[kind]
    return {"type": text_type, "text": text}


def is_image(part: Any) -> bool:
    """Whether a part of a body is an image that has its URL, or its data."""
    match part:
        case {"type": "image_url", "image_url": {"url": str()} | str()} | {"type": "input_image", "image_url": str()}:
            return True
        case {"type": "image", "source": {"type": "base64", "data": str(), "media_type": str()}}:
            return True
        case {"type": "image", "source": {"type": "url", "url": str()}}:
            return True
    return False


def stand_ins(content: Any, stand_in: Callable[[Any], Any]) -> Any:
    """The content of a tool's result, as a body has it, with texts in place of what the model cannot read."""
    return [stand_in(part) for part in content] if isinstance(content, list) else content


def read_results(
    messages: Any, is_result: Callable[[dict[str, Any]], bool], stand_in: Callable[[Any], Any] = stand_in
) -> Any:
    """The messages of a body with texts in place of what the model cannot read of tools' results.

    Clients also put a result's images into messages of the user that follow it directly: litellm does so.
    """
    if not isinstance(messages, list):
        return messages
    found, is_of_tool = [], False
    for message in messages:
        shown = message
        if isinstance(message, dict):
            is_of_tool = is_result(message) or (is_of_tool and message.get("role") == "user")
            names = [name for name in ("content", "output") if is_of_tool and name in message]
            shown = message | {name: stand_ins(message[name], stand_in) for name in names}
        found.append(shown)
    return found
