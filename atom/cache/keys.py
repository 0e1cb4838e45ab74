"""Keys of cache entries: hashes of what an entry depends on.

key_of({"text": digest(text), "torch": torch.__version__})     # 32 hex digits
"""

from __future__ import annotations

import hashlib
import json


def key_of(ingredients: dict[str, str]) -> str:
    return digest(json.dumps(ingredients, sort_keys=True))


def digest(text: str) -> str:
    """32 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
