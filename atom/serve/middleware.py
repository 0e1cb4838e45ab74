"""Middleware for every request: request id, log line, API key, origin.

    app = Guard(fastapi, keys=read_keys(config.serve.http.api_keys), metrics=metrics)

Access is decided on `scope["path"]`, which the server routes by, and needs a key: `Authorization: Bearer KEY` (OpenAI),
`x-api-key: KEY` (Anthropic), or the password of Basic (a browser, for the page). Only /health and /ping need none. A
browser keeps that password and sends it with any page's requests, so a POST from a page of another origin is refused,
unless it is in `origins`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atom.errors import ConfigError
from atom.serve.errors import body_of, error_body, is_anthropic, refuse, shown
from atom.serve.ids import new_id
from atom.serve.metrics import Metrics

LOG = logging.getLogger("atom.access")
PUBLIC_PATHS = ("/health", "/ping")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # methods that change nothing
POLLED_PATHS = (*PUBLIC_PATHS, "/ready", "/load", "/metrics")  # polled too often to be logged
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Guard:
    def __init__(
        self, app: ASGIApp, keys: Sequence[str], metrics: Metrics, origins: Sequence[str] = (), root_path: str = ""
    ) -> None:
        """root_path: may stand in front of a path, or a proxy has taken it away."""
        self._app, self._metrics, self._origins, self._root_path = app, metrics, origins, root_path
        self._digests = [digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # other protocols are not served
        scope["path"] = strip_root(scope["path"], self._root_path)
        started, headers = time.perf_counter(), dict(scope["headers"])
        client_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else new_id("req")
        log_fields: dict[str, Any] = {}
        scope["state"] = {**scope.get("state", {}), "log": log_fields, "request_id": request_id, "send": send}
        id_headers = [b"x-request-id"]
        if is_anthropic(scope["path"]):
            id_headers.append(b"request-id")  # which Anthropic's SDK reads
        status = 0
        is_polled = scope["path"] in POLLED_PATHS
        self._metrics.num_open += not is_polled

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *((name, request_id.encode()) for name in id_headers)]
            await send(message)

        try:
            if scope["path"] not in PUBLIC_PATHS and not self.has_valid_key(headers):
                await refuse_unauthorized(scope)(scope, receive, send_with_id)
            elif scope["method"] not in SAFE_METHODS and not self.is_allowed_origin(headers):
                await refuse_origin(scope, headers)(scope, receive, send_with_id)
            else:
                await self._app(scope, receive, send_with_id)
        except Exception as error:
            LOG.exception("request failed", extra={"fields": {"request_id": request_id}})
            if not status:
                await refuse(scope, 500, body_of(error))(scope, receive, send_with_id)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", None) or "other"  # the path of a route, so that labels are bounded
            self._metrics.http.labels(path, str(status or "left")).inc()
            seconds = round(time.perf_counter() - started, 6)
            line = {"request_id": request_id, "method": scope["method"], "path": shown(scope["path"]), "status": status}
            if log_fields.get("user"):
                log_fields["user"] = shown(log_fields["user"])
            if not is_polled:
                self._metrics.num_open -= 1
                self._metrics.ended_at = time.perf_counter()
                LOG.info("request", extra={"fields": line | {"seconds": seconds} | log_fields})

    def has_valid_key(self, headers: dict[bytes, bytes]) -> bool:
        """Whether the request has a valid key, compared in constant time."""
        if not self._digests:
            return True
        sent = digest(find_key(headers))
        return any([hmac.compare_digest(sent, each) for each in self._digests])

    def is_allowed_origin(self, headers: dict[bytes, bytes]) -> bool:
        """Whether the request comes from no page, from our own page, or from one of `origins`.

        Browsers send Origin always, Sec-Fetch-Site only to https and localhost.
        """
        origin = headers.get(b"origin")
        if "*" in self._origins or (origin or b"").decode("latin-1") in self._origins:
            return True
        if site := headers.get(b"sec-fetch-site"):
            return site in (b"same-origin", b"none")
        return origin is None or origin.partition(b"://")[2].lower() == headers.get(b"host", b"").lower()


def strip_root(path: str, root_path: str) -> str:
    """The path behind the root path, if it begins with that."""
    return path.removeprefix(root_path) if path.startswith(f"{root_path}/") else path


def find_key(headers: dict[bytes, bytes]) -> bytes:
    """The API key in a request's headers, empty where it has none."""
    if key := headers.get(b"x-api-key"):
        return key
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return value.strip()
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def refuse_unauthorized(scope: Scope) -> ASGIApp:
    header = "x-api-key: KEY" if is_anthropic(scope["path"]) else "Authorization: Bearer KEY"
    body = error_body(401, f"a valid API key is missing: send {header}", code="invalid_api_key")
    # only Basic: Chromium reads the header as one challenge, and shows no prompt if another scheme follows
    return refuse(scope, 401, body, {"www-authenticate": 'Basic realm="atom"'})


def refuse_origin(scope: Scope, headers: dict[bytes, bytes]) -> ASGIApp:
    origin = shown(headers.get(b"origin", b"").decode("latin-1"))
    fix = "the server's serve.http.cors names the origins that may"
    return refuse(scope, 403, error_body(403, f"a page of {origin or 'another site'} may not post here; {fix}"))


def read_keys(stated: str | None) -> list[str]:
    """Read the keys of serve.http.api_keys. ConfigError for a file without keys: no request would need one."""
    if stated is None:
        return []
    if stated.startswith("@"):
        try:
            lines = Path(stated[1:]).expanduser().read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", error)
            raise ConfigError(f"serve.http.api_keys={stated}: {reason}") from None
        found = {at: key for at, line in enumerate(lines, 1) if (key := line.strip()) and key[0] != "#"}
        if wrong := next((at for at, key in found.items() if len(key.split()) > 1), None):
            fix = "write one key a line, and comments on lines that begin with #"
            raise ConfigError(f"serve.http.api_keys={stated}: line {wrong} has more than one word; {fix}")
        keys = list(found.values())
    else:
        keys = [key for each in stated.split(",") if (key := each.strip())]
    if not keys:
        raise ConfigError("serve.http.api_keys holds no key; name one, or null for none")
    return keys
