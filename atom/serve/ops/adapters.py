"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM.

curl localhost:8000/v1/load_lora_adapter -H "Content-Type: application/json" \
    -d '{"lora_name": "sql", "lora_path": "/adapters/sql"}'
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from atom.errors import RequestError
from atom.serve.context import Context
from atom.serve.http.bodies import body_route
from atom.serve.http.errors import FieldError, ModelNotFoundError, shown
from atom.serve.openai.schema import LoadAdapterRequest, UnloadAdapterRequest
from atom.serve.ops.admin import find_loaded


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["operations"], route_class=body_route(context))
    shared = context.shared
    if not any(each.config.serve.allow_runtime_lora_updating for each in shared.contexts):
        return router

    def find(request: Request) -> Context:
        """The model whose adapters change: of several, that of the query's `model`. EngineDeadError if it sleeps."""
        found = shared.find(request.state.tenant, request.query_params.get("model"))
        if not found.config.serve.allow_runtime_lora_updating:
            raise RequestError(
                f"{found.names[0]} is served without serve.allow_runtime_lora_updating; ?model= names one"
            )
        find_loaded([found])
        return found

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterRequest, request: Request) -> Response:
        """Load a LoRA adapter of a folder on the server, which requests then name as their model."""
        name, own = body.lora_name, find(request)
        if any(name in each.config.served_names for each in shared.contexts):
            raise FieldError("lora_name", f"{shown(name)} is the model's own name; choose another")
        if any(name in each.engines.adapters for each in shared.contexts):
            raise FieldError("lora_name", f"the adapter {shown(name)} is loaded already; unload it first")
        await own.engines.load_adapter(name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{shown(name)}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterRequest, request: Request) -> Response:
        """Drop a LoRA adapter: no new request gets it, and those that have it go on."""
        name, own = body.lora_name, find(request)
        if name not in own.engines.adapters:
            known = ", ".join(own.engines.adapters) or "none"
            raise ModelNotFoundError(f"there is no adapter {shown(name)!r} here (known: {known})")
        await own.engines.unload_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{shown(name)}' removed successfully.")

    return router
