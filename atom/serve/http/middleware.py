"""Middleware for every request: request id, log line, span, API key or signature, origin.

    app = Guard(fastapi, tenants=read_tenants(config.serve.http), metrics=metrics)

Access is decided on `scope["path"]`, which the server routes by, and needs a key: `Authorization: Bearer KEY` (OpenAI),
`x-api-key: KEY` (Anthropic), or the password of Basic (a browser, for the page); or a signature of one of the public
keys (`atom.serve.auth.signatures`). Only PUBLIC_PATHS need none, and ADMIN_PATHS need that of an administrator. A
browser keeps that password and sends it with any page's requests, so a POST from a page of another origin is refused,
unless it is in `origins`.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atom.serve.auth.signatures import (
    BodyDigest,
    Fields,
    SignatureError,
    Verifier,
    as_jwk,
    covers_digest,
    find_signatures,
    request_components,
)
from atom.serve.auth.signed_answers import DIRECTORY, SigningSend, read_signature_request
from atom.serve.auth.tenants import Tenant, digest
from atom.serve.http.errors import body_of, error_body, is_anthropic, refuse, shown
from atom.serve.ids import request_id_headers, request_id_of
from atom.serve.ops.server_metrics import ServerMetrics
from atom.serve.ops.traces import Traces

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

LOG = logging.getLogger("atom.access")
PUBLIC_PATHS = ("/health", "/ping", DIRECTORY)
ADMIN_PATHS = (  # they change the server for everybody, or show how it is set up
    "/sleep", "/wake_up", "/reset_prefix_cache", "/start_profile", "/stop_profile", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/server_info", "/debug/mtp_stats", "/models/load", "/models/unload", "/pause",
    "/resume", "/is_paused", "/abort_requests", "/update_weight_version", "/weight_info", "/weight_version",
    "/get_world_size", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update",
)  # fmt: skip
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # methods that change nothing
POLLED_PATHS = ("/health", "/ping", "/ready", "/load", "/metrics")  # polled too often to be logged
ASKED = 'sig=("@method" "@authority" "@path" "@query" "content-digest");created;nonce;keyid'  # of a client
KEY_FAULTS = (  # by the number of keys that a request has
    "an API key is missing",
    "the API key is invalid, this server has no such key",
    "the API keys of Authorization and x-api-key are not of one client",
)


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        tenants: Sequence[Tenant],
        metrics: ServerMetrics,
        origins: Sequence[str] = (),
        root_path: str = "",
        signature_seconds: float = 300.0,
        signing_key: Ed25519PrivateKey | None = None,
        traces: Traces | None = None,
    ) -> None:
        """
        tenants: empty disables authentication
        root_path: prefix of all paths, unless a proxy has removed it
        signature_seconds: how long a signature stays valid
        signing_key: of answers
        """
        self._app, self._metrics, self._origins, self._root_path = app, metrics, origins, root_path
        self._traces = traces
        self._tenants: dict[str, Tenant] = {}
        self._signature_seconds, self._signing_key = signature_seconds, signing_key
        self._verifier: Verifier | None = None
        self.admit(tenants)
        self._key_id = "" if signing_key is None else as_jwk(signing_key.public_key())["kid"]

    def admit(self, tenants: Sequence[Tenant]) -> list[Tenant]:
        """Let in these from now on, and nobody else. One whose name is known keeps its counts and open requests."""
        found = [self._tenants.get(each.name, each) for each in tenants]
        for known, new in zip(found, tenants, strict=True):
            if known is not new:
                known.become(new)
        self._tenants = {each.name: each for each in found}
        self._digests = [(each, tenant) for tenant in found for each in tenant.digests]
        self._everybody = None if found else Tenant(is_admin=True)
        public_keys = {each.name: each.public_key for each in found if each.public_key is not None}
        if self._verifier is not None:
            self._verifier.keys = public_keys  # the nonces that were used stay known
        elif public_keys:
            self._verifier = Verifier(public_keys, self._signature_seconds)
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None  # other protocols are not served
        scope["path"] = strip_root(scope["path"], self._root_path)
        started, headers = time.perf_counter(), dict(scope["headers"])
        request_id = request_id_of(headers)
        scope["state"] = {**scope.get("state", {}), "log": {}, "request_id": request_id, "send": send}
        id_headers = request_id_headers(is_anthropic=is_anthropic(scope["path"]))
        status = 0
        is_polled = scope["path"] in POLLED_PATHS
        self._metrics.num_open += not is_polled

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = ((name.encode(), request_id.encode()) for name in id_headers)
                message["headers"] = [*message["headers"], *own]
            await scope["state"]["send"](message)

        try:
            await self._answer(scope, receive, send_with_id)
        except Exception as error:
            LOG.exception("request failed", extra={"fields": {"request_id": request_id}})
            if not status:
                await refuse(scope, 500, body_of(error))(scope, receive, send_with_id)
        finally:
            seconds = round(time.perf_counter() - started, 6)
            self._record_end(scope, status, seconds, is_polled=is_polled)
            if self._traces is not None:
                self._traces.record(scope["state"], headers, seconds)

    def _record_end(self, scope: Scope, status: int, seconds: float, *, is_polled: bool) -> None:
        """Count an answered request and write its log line. status: 0 if the client left before the answer"""
        path = getattr(scope.get("route"), "path", None) or "other"  # the path of a route, so that labels are bounded
        self._metrics.http.labels(path, str(status or "left")).inc()
        if is_polled:
            return
        self._metrics.num_open -= 1
        self._metrics.ended_at = time.perf_counter()
        fields: dict[str, Any] = {"request_id": scope["state"]["request_id"], "method": scope["method"]}
        fields |= {"path": shown(scope["path"]), "status": status, "seconds": seconds, **scope["state"]["log"]}
        if fields.get("user"):
            fields["user"] = shown(fields["user"])
        LOG.info("request", extra={"fields": fields})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        headers = dict(scope["headers"])
        if scope["path"] not in PUBLIC_PATHS:
            try:
                tenant, receive = await self._find_tenant(scope, headers, receive)
            except SignatureError as error:
                return await self._refuse_unauthorized(scope, str(error))(scope, receive, send)
            if tenant is None:
                return await self._refuse_unauthorized(scope, num_keys=len(find_keys(headers)))(scope, receive, send)
            scope["state"]["tenant"] = tenant
            if tenant.name:
                scope["state"]["log"]["key"] = tenant.name
            if scope["path"] in ADMIN_PATHS and not tenant.is_admin:
                return await refuse_key(scope, tenant)(scope, receive, send)
        if scope["method"] not in SAFE_METHODS and not self.is_allowed_origin(headers):
            return await refuse_origin(scope, headers)(scope, receive, send)
        if self._signing_key is not None and b"accept-signature" in headers:
            fields = Fields(scope["headers"])
            try:
                requested = read_signature_request(fields, request_components(scope, fields), self._key_id)
                if requested.covers_question:
                    receive = await read_digested(receive, BodyDigest(fields.get("content-digest") or ""))
            except SignatureError as error:
                return await refuse(scope, 400, error_body(400, str(error)))(scope, receive, send)
            scope["state"]["send"] = SigningSend(scope["state"]["send"], self._signing_key, requested)
        await self._app(scope, receive, send)

    async def _find_tenant(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive
    ) -> tuple[Tenant | None, Receive]:
        """Whose request it is, and what receives its body. SignatureError if its signature does not count.

        A key of nobody next to a signature does not matter: SDKs always send one.
        """
        if self._everybody is not None or self._verifier is None or b"signature-input" not in headers:
            return self._everybody or self.find_key_holder(headers), receive
        fields = Fields(scope["headers"])
        name, signature = self._verifier.verify(find_signatures(fields), request_components(scope, fields))
        if any(self._find_holder(key) not in (None, self._tenants[name]) for key in find_keys(headers)):
            raise SignatureError("the API key is of another client; send the key or the signature")
        body = BodyDigest(fields.get("content-digest") or "") if covers_digest(signature) else None
        receive = await read_digested(receive, body)
        self._verifier.note(signature)
        return self._tenants[name], receive

    def find_key_holder(self, headers: dict[bytes, bytes]) -> Tenant | None:
        """The tenant whose API key the request has; None without one, and with keys that are not all of one tenant."""
        holders = [self._find_holder(key) for key in find_keys(headers) or [b""]]
        return holders[0] if len(set(holders)) == 1 else None

    def _find_holder(self, key: bytes) -> Tenant | None:
        """The tenant of a key, compared in constant time."""
        sent = digest(key)
        matches = [(hmac.compare_digest(sent, each), tenant) for each, tenant in self._digests]
        return next((tenant for is_equal, tenant in matches if is_equal), None)

    def _refuse_unauthorized(self, scope: Scope, fault: str | None = None, *, num_keys: int = 0) -> ASGIApp:
        """
        fault: of the request's signature
        num_keys: keys of the request: a wrong one, or two that are not of one tenant
        """
        header = "x-api-key: KEY" if is_anthropic(scope["path"]) else "Authorization: Bearer KEY"
        if fault is None:
            body = error_body(401, f"{KEY_FAULTS[num_keys]}: send {header}", code="invalid_api_key")
        else:
            body = error_body(401, f"the signature does not count: {fault}", code="invalid_signature")
        # only Basic: Chromium reads the header as one challenge, and shows no prompt if another scheme follows
        asked = {"www-authenticate": 'Basic realm="atom"'}
        return refuse(scope, 401, body, asked | ({"accept-signature": ASKED} if self._verifier else {}))

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
    """The path without the root path, if it begins with that."""
    return path.removeprefix(root_path) if path.startswith(f"{root_path}/") else path


def find_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    """The different API keys in a request's headers."""
    given = (headers.get(b"x-api-key", b""), find_authorized(headers.get(b"authorization", b"")))
    return list(dict.fromkeys(filter(None, given)))


def find_authorized(header: bytes) -> bytes:
    """The API key of an Authorization header, empty if it has none."""
    kind, _, value = header.partition(b" ")
    if kind.lower() == b"bearer":
        return value.strip()
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""


async def read_digested(receive: Receive, digest: BodyDigest | None) -> Receive:
    """Receive a body, and replay it if it has the signed digest; else SignatureError."""
    messages: list[Message] = []
    while not messages or messages[-1].get("more_body", False):
        messages.append(message := await receive())
        if message["type"] == "http.disconnect":
            break
        if data := message.get("body", b""):
            if digest is None:
                raise SignatureError("it does not cover content-digest, and there is a body")
            digest.update(data)
    if digest is not None:
        digest.check()
    left = iter(messages)

    async def receive_again() -> Message:
        return next(left, None) or await receive()

    return receive_again


def refuse_key(scope: Scope, tenant: Tenant) -> ASGIApp:
    fix = "the server's file of keys (serve.http.api_keys=@FILE.yaml) says admin: true of those that may"
    message = f"{scope['path']} is for administrators, and the key {tenant.name} is not one of theirs: {fix}"
    return refuse(scope, 403, error_body(403, message, code="admin_only"))


def refuse_origin(scope: Scope, headers: dict[bytes, bytes]) -> ASGIApp:
    origin = shown(headers.get(b"origin", b"").decode("latin-1"))
    fix = "the server's serve.http.cors names the origins that may"
    return refuse(scope, 403, error_body(403, f"a page of {origin or 'another site'} may not post here; {fix}"))


class HeadAsGet:
    """Answers HEAD as GET, for FastAPI's routes have no HEAD; of the answer uvicorn sends only the head."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") != "HEAD":
            return await self._app(scope, receive, send)
        as_get = {**scope, "method": "GET"}
        try:
            await self._app(as_get, receive, send)
        finally:
            scope["route"] = as_get.get("route")  # requests are counted by route
