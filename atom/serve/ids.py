"""Ids of answers and requests.

new_id("chatcmpl")            # chatcmpl-5f0c…, 32 hexadecimal digits
"""

from __future__ import annotations

import secrets


def new_id(prefix: str, mark: str = "-") -> str:
    return f"{prefix}{mark}{secrets.token_hex(16)}"
