"""/v1/models: the names of the served model and of its adapters.

curl localhost:8000/v1/models
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from atom.serve.context import Context
from atom.serve.http.errors import json_response


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["operations"])
    created = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "atom",
            "root": context.engines.adapters.get(name) or context.config.checkpoint or context.config.model.name,
            "parent": None if context.adapter(name) is None else context.names[0],
            "max_model_len": context.config.serve.max_model_len,
        }

    @router.get("/v1/models")
    @router.get("/v1/models/", include_in_schema=False)
    async def models(request: Request) -> Response:
        """The names of the served model, then those of its adapters, whose `parent` it is."""
        names = context.names_for(request.state.tenant)
        return json_response({"object": "list", "data": [describe(name) for name in names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> Response:
        """One of these names."""
        return json_response(describe(context.model_for(request.state.tenant, name)))

    return router
