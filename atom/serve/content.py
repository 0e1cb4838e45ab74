"""Put a text in place of contents that a model cannot read.

without_images([{"type": "image_url", "image_url": {"url": "data:…"}}], "image_url", "text")
# [{"type": "text", "text": "[image: not shown to this model]"}]
"""

from __future__ import annotations

from typing import Any

IMAGE = "[image: not shown to this model]"  # in a tool's result, which stays in the history


def without_images(content: Any, kind: str, text: str) -> Any:
    """The content of a tool's result, as a body has it, with a text in place of each image.

    kind: type of the API's images
    text: type of its texts
    """
    if not isinstance(content, list):
        return content
    shown = {"type": text, "text": IMAGE}
    return [shown if isinstance(part, dict) and part.get("type") == kind else part for part in content]
