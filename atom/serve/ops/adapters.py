"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM.

curl localhost:8000/v1/load_lora_adapter -H "Content-Type: application/json" \
    -d '{"lora_name": "sql", "lora_path": "/adapters/sql"}'
"""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from atom.serve.context import Context
from atom.serve.http.bodies import body_route
from atom.serve.http.errors import FieldError, ModelNotFoundError, shown
from atom.serve.openai.schema import LoadAdapterRequest, UnloadAdapterRequest


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["operations"], route_class=body_route(context))
    if not context.config.serve.allow_runtime_lora_updating:
        return router

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterRequest) -> Response:
        """Load a LoRA adapter of a folder on the server, which requests then name as their model."""
        name = body.lora_name
        if name in context.config.served_names:
            raise FieldError("lora_name", f"{shown(name)} is the model's own name; choose another")
        if name in context.engines.adapters:
            raise FieldError("lora_name", f"the adapter {shown(name)} is loaded already; unload it first")
        await context.engines.load_adapter(name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{shown(name)}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> Response:
        """Drop a LoRA adapter: no new request gets it, and those that have it go on."""
        name = body.lora_name
        if name not in context.engines.adapters:
            known = ", ".join(context.engines.adapters) or "none"
            raise ModelNotFoundError(f"there is no adapter {shown(name)!r} here (known: {known})")
        await context.engines.unload_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{shown(name)}' removed successfully.")

    return router
