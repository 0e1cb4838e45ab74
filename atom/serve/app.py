"""The ASGI app: FastAPI's routes inside our middleware.

context = Context(config, engines, Metrics(engines))
app = create_app(context, tenants=[])            # for uvicorn, or for httpx.ASGITransport in a test
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

import atom
from atom.errors import AtomError
from atom.serve.anthropic import messages
from atom.serve.auth import signed_answers
from atom.serve.auth.signatures import load_signing_key
from atom.serve.auth.tenants import Tenant
from atom.serve.context import Context
from atom.serve.http import docs, page
from atom.serve.http.body_faults import describe
from atom.serve.http.errors import error_body, error_response, refuse, shown
from atom.serve.http.middleware import Guard, HeadAsGet
from atom.serve.llama_cpp import ROUTES
from atom.serve.openai import chat, classify, completions, embeddings, models, pooling, responses, scores, tokenize
from atom.serve.ops import adapters, admin, monitoring, trainers
from atom.serve.vllm import instead_of_route

TITLE = "atom"
ABOUT = "The APIs of OpenAI and Anthropic, served by atom"
ROUTED = (
    completions, chat, responses, embeddings, scores, classify, pooling, messages, tokenize, models, adapters,
    monitoring, admin, trainers, page,
)  # fmt: skip
REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "Refused: `error` says why, and `param` which field"}
}


def create_app(context: Context, tenants: Sequence[Tenant]) -> ASGIApp:
    """Create the app. tenants: who has a key; empty disables authentication.

    ConfigError if the key that signs answers cannot be read.
    """
    http = context.config.serve.http
    signing_key = load_signing_key(http.signing_key)
    app = FastAPI(title=TITLE, description=ABOUT, version=atom.__version__, openapi_url=None, responses=REFUSALS)
    app.add_middleware(HeadAsGet)
    for module in ROUTED:
        app.include_router(module.routes(context))
    app.include_router(docs.routes(app.openapi))
    app.include_router(signed_answers.routes(signing_key))

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        param, message = describe(error)
        return refuse(request.scope, 400, error_body(400, message, param))

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        body = error_body(error.status_code, explain(request, error))
        return refuse(request.scope, error.status_code, body, dict(error.headers or {}))

    @app.exception_handler(AtomError)
    async def refuse_request(request: Request, error: AtomError) -> Response:
        context.report(error)
        return error_response(request.scope, error)

    @app.exception_handler(Exception)
    async def report_error(request: Request, error: Exception) -> Response:
        return error_response(request.scope, error)  # Starlette raises it again, and the guard logs it

    @app.exception_handler(ClientDisconnect)
    async def end_disconnected(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=499)  # the client has left

    origins, shared, server_metrics = http.cors, context.shared, context.metrics.server
    guard = Guard(
        app, tenants, server_metrics, origins, http.root_path, http.signature_seconds, signing_key, shared.traces
    )

    def admit(given: Sequence[Tenant]) -> None:
        found = guard.admit(given)
        server_metrics.set_tenants(found)
        shared.are_several = len(found) > 1

    admit(tenants)
    shared.admit = admit
    guarded: ASGIApp = guard
    if origins:
        guarded = CORSMiddleware(
            guarded, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["x-request-id"]
        )
    return guarded


def instead_of(path: str) -> str:
    """The response for a path that is no route."""
    if meant := ROUTES.get(path):
        return f"write {meant}"
    plain = re.sub("^(/v1)+(?=/v1/)", "", re.sub("/+", "/", path))  # clients add their own /v1 to a base URL's
    if plain != path:
        return f"write {shown(plain)}: the base URL has /v1 once, and no slash after it"
    return instead_of_route(path) or "/docs lists the routes"


def explain(request: Request, error: HTTPException) -> str:
    """The message for a request that no route has handled."""
    path = shown(request.url.path)
    match error.status_code:
        case 404:
            return f"there is no {request.method} {path} here; {instead_of(request.url.path)}"
        case 405:
            allowed = (error.headers or {}).get("Allow")
            return f"{request.method} {path} is not served" + (f"; use {allowed}" if allowed else "")
        case 400 if error.__cause__ is not None:
            return f"the body is no JSON that can be read: {error.__cause__}"
    return str(error.detail)
