"""/v1/models: list the served models and their adapters; load and unload one.

curl localhost:8000/v1/models
curl localhost:8000/models/load -H "Content-Type: application/json" -d '{"model": "qwen"}'
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from atom.serve.context import Context
from atom.serve.engine.models import Models
from atom.serve.engine.served_model import ServedModel
from atom.serve.http.bodies import Named, body_route
from atom.serve.http.errors import json_response
from atom.serve.openai.schema import ModelRequest


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["operations"], route_class=body_route(context))
    created, shared = int(time.time()), context.shared

    def describe(own: Context, name: str) -> dict[str, Any]:
        modalities = ["text"] if own.images is None else ["text", "image"]
        described = {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "atom",
            "root": own.engines.adapters.get(name) or own.config.checkpoint or own.config.model.name,
            "parent": None if own.adapter(name) is None else own.names[0],
            "max_model_len": own.config.serve.max_model_len,
            "architecture": {"input_modalities": modalities, "output_modalities": ["text"]},
        }
        return described if own.served is None else described | {"status": describe_status(own.served)}

    @router.get("/v1/models")
    @router.get("/v1/models/", include_in_schema=False)
    @router.get("/models", include_in_schema=False)
    async def models(request: Request) -> Response:
        """The names of each served model, then those of its adapters, whose `parent` it is.

        `status.value` is loaded, loading, sleeping or unloaded; `status.failed` says that it could not be loaded.
        """
        tenant = request.state.tenant
        data = [describe(own, name) for own in shared.contexts for name in own.names_for(tenant)]
        return json_response({"object": "list", "data": data})

    @router.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        """One of these names."""
        own = shared.find(request.state.tenant, name)
        return json_response(describe(own, own.model_for(request.state.tenant, name)))

    if (served := shared.models) is not None:
        add_loading(router, served)
    return router


def add_loading(router: APIRouter, models: Models) -> None:
    """Add the routes that load and unload a model."""

    @router.post("/models/load")
    async def load_model(body: ModelRequest, request: Request, context: Named) -> Response:
        """Load a model, or wake it up, before it is asked for; others may have to sleep."""
        own = context.model_for(request.state.tenant, body.model)
        assert context.served is not None, "it is one of them"
        await models.load(context.served)
        return json_response({"success": True, "model": own})

    @router.post("/models/unload")
    async def unload_model(body: ModelRequest, request: Request, context: Named) -> Response:
        """End a model's processes, once the requests that it has are answered; the next one loads it again."""
        own = context.model_for(request.state.tenant, body.model)
        assert context.served is not None, "it is one of them"
        await models.unload(context.served)
        return json_response({"success": True, "model": own})


def describe_status(model: ServedModel) -> dict[str, Any]:
    """A model's state in the words of llama.cpp's router."""
    return {"value": str(model.state)} | ({"failed": True} if model.error is not None else {})
