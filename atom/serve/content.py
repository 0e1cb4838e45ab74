"""Put a text in place of contents that a model cannot read.

stand_ins([{"type": "image_url", "image_url": {"url": "data:…"}}], stand_in)
# [{"type": "text", "text": "[image: not shown to this model]"}]

They are in what tools return, and stay in the history: to refuse them would end an agent's session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

IMAGE = "[image: not shown to this model]"
TEXTS = {"image_url": "text", "image": "text", "input_image": "input_text"}  # by type of an image: that of a text


def stand_in(part: Any) -> Any:
    """A text in place of an image, of the type that its API has; any other part unchanged."""
    kind = part.get("type") if isinstance(part, dict) else None
    return {"type": TEXTS[kind], "text": IMAGE} if isinstance(kind, str) and kind in TEXTS else part


def stand_ins(content: Any, stand_in: Callable[[Any], Any]) -> Any:
    """The content of a tool's result, as a body has it, with texts in place of what the model cannot read."""
    return [stand_in(part) for part in content] if isinstance(content, list) else content
