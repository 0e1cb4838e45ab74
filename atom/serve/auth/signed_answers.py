"""Sign answers whose requests ask for it with Accept-Signature (RFC 9421, section 5).

    requested = read_signature_request(fields, request_components(scope, fields), key_id)
    send = SigningSend(send, key, requested)

A signature covers what is asked for, and always the status and the digest of the whole body. After a stream of events,
whose digest is known at its end, the fields of the signature are comments, the last of the body: there they stand for
trailers, which few clients can read, so that the digest is covered as `"content-digest";tr`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from fastapi import APIRouter, Response
from starlette.exceptions import HTTPException
from starlette.types import Message, Send

from atom.serve.auth.signatures import (
    HASHES,
    NUMBERED,
    TEXTS,
    Component,
    Fields,
    Parameters,
    Resolve,
    SignatureError,
    as_jwk,
    content_digest,
    parse_components,
    parse_dictionary,
    resolver,
    sign,
)
from atom.serve.http.errors import json_response

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

DIRECTORY = "/.well-known/http-message-signatures-directory"
DIRECTORY_TYPE = "application/http-message-signatures-directory+json"
ALWAYS = (Component("@status"), Component("content-digest"))
COVERED = {"@status", "content-digest", "content-type", "x-request-id"}  # of an answer


class SignatureRequest(NamedTuple):
    """A signature that is asked for."""

    label: str
    components: list[Component]
    parameters: Parameters
    values: dict[Component, str]  # of the components of the request

    @property
    def covers_question(self) -> bool:
        """Whether it covers the digest that the request states of its body, which then has to be right."""
        return any(each.name == "content-digest" for each in self.values)


def read_signature_request(fields: Fields, resolve_request: Resolve, key_id: str) -> SignatureRequest:
    """What a request asks for. SignatureError for what cannot be given: as by the RFC, nothing else is."""
    members = parse_dictionary("accept-signature", fields.get("accept-signature") or "")
    if len(members) != 1:
        raise SignatureError("accept-signature: ask for one signature")
    label, member = next(iter(members.items()))
    components, asked = parse_components("accept-signature", member)
    components += [each for each in ALWAYS if each not in components]
    values = {}
    for each in components:
        parameters = dict(each.parameters)
        if parameters.pop("req", False) is True:
            if each.name == "content-digest" and parameters.get("key", "sha-256") not in HASHES:
                raise SignatureError(f"accept-signature: of content-digest, {' and '.join(HASHES)} are signed")
            try:
                values[each] = resolve_request(Component(each.name, tuple(parameters.items())))
            except SignatureError as error:
                raise SignatureError(f"accept-signature, of the request: {error}") from None
        elif each.parameters or each.name not in COVERED:
            raise SignatureError(f"accept-signature: of an answer, {', '.join(sorted(COVERED))} are signed")
    return SignatureRequest(label, components, {"keyid": key_id} | read_parameters(asked, key_id), values)


def read_parameters(asked: Parameters, key_id: str) -> Parameters:
    """The parameters of the signature, but for the time; the words of the client are given back."""
    if unknown := next((each for each in asked if each not in (*NUMBERED, *TEXTS)), None):
        raise SignatureError(f"accept-signature: {unknown[:64]} is not known")
    if "expires" in asked:
        raise SignatureError("accept-signature: a signature of an answer does not expire")
    if any(type(asked[each]) is not str for each in TEXTS if each in asked):
        raise SignatureError(f"accept-signature: {', '.join(TEXTS)} are strings")
    if asked.get("keyid", key_id) != key_id:
        raise SignatureError(f"accept-signature: the server's keyid is {key_id}")
    if asked.get("alg", "ed25519") != "ed25519":
        raise SignatureError("accept-signature: the server's alg is ed25519")
    return {each: asked[each] for each in ("alg", "nonce", "tag") if each in asked}


class SigningSend:
    """An ASGI `send` that signs the answer which passes through it."""

    def __init__(
        self, send: Send, key: Ed25519PrivateKey, requested: SignatureRequest, clock: Callable[[], float] = time.time
    ) -> None:
        self._send, self._key, self._requested, self._clock = send, key, requested, clock
        self._digest = hashlib.sha256()
        self._start: Message = {}
        self._is_stream = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message  # held back: a signature stands in the head
            return
        is_first, is_last = not self._is_stream, not message.get("more_body", False)
        self._digest.update(message.get("body", b""))
        if is_first and is_last:
            fields = [(name.encode(), value.encode()) for name, value in self._sign()]
            await self._send({**self._start, "headers": [*self._start["headers"], *fields]})
        elif is_first:
            self._is_stream = True
            await self._send(self._start)
        elif is_last:
            lines = "".join(f": {name}: {value}\n" for name, value in self._sign())
            await self._send({"type": "http.response.body", "body": f"{lines}\n".encode(), "more_body": True})
        await self._send(message)

    def _sign(self) -> list[tuple[str, str]]:
        """The fields of the signature."""
        digest = content_digest(self._digest.digest())
        trailer = (("tr", True),) if self._is_stream else ()
        digested = Component("content-digest", trailer)
        components = [digested if each == Component("content-digest") else each for each in self._requested.components]
        resolve = resolver({"@status": str(self._start["status"])}, Fields(self._start["headers"]))
        values = self._requested.values | {digested: digest}
        parameters = {"created": int(self._clock())} | self._requested.parameters

        def value_of(component: Component) -> str:
            return values[component] if component in values else resolve(component)

        signature_input, signature = sign(self._key, self._requested.label, components, parameters, value_of)
        return [("content-digest", digest), ("signature-input", signature_input), ("signature", signature)]


def routes(key: Ed25519PrivateKey | None) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get(DIRECTORY)
    async def signing_keys() -> Response:
        """The public key that signs answers, as JSON; it needs no key."""
        if key is None:
            raise HTTPException(404, "this server signs nothing; its option serve.http.signing_key names a key")
        response = json_response({"keys": [as_jwk(key.public_key())]})
        response.headers["content-type"] = DIRECTORY_TYPE
        return response

    return router
