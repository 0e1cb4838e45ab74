"""Ids of answers and requests.

new_id("chatcmpl")            # chatcmpl-5f0c…, 32 hexadecimal digits
request_id_of(headers)        # the client's x-request-id, or a new one
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def new_id(prefix: str, mark: str = "-") -> str:
    return f"{prefix}{mark}{secrets.token_hex(16)}"


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The id that a request's headers state; a new one if they have none, or one that is not fit for a header."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if REQUEST_ID.fullmatch(given) else new_id("req")


def request_id_headers(*, is_anthropic: bool) -> tuple[str, ...]:
    """The headers of an answer that bear the request's id; Anthropic's SDK reads the second."""
    return ("x-request-id", "request-id") if is_anthropic else ("x-request-id",)
