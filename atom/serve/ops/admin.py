"""Admin routes: /sleep, /wake_up, /reset_prefix_cache, the profiler.

curl -X POST localhost:8000/sleep?level=1
curl -X POST "localhost:8000/sleep?level=1&model=qwen"

They are about all models that are loaded, or about the one that `model` names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response

from atom.errors import EngineDeadError
from atom.serve.context import Context
from atom.serve.engine.served_model import ModelState
from atom.serve.http.errors import json_response


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["operations"])

    def loaded(request: Request, model: str | None) -> list[Context]:
        return find_loaded(context.shared.named(request.state.tenant, model))

    async def change(contexts: list[Context], work: Callable[[Context], Awaitable[Any]]) -> Response:
        for each in contexts:
            await work(each)
        return json_response({"is_sleeping": any(each.engines.is_sleeping for each in contexts)})

    async def wake(own: Context, parts: list[str] | None) -> None:
        """Wake up engines. A model that slept counts as awake then, and another one may have to sleep for it."""
        served, models = own.served, context.shared.models
        if parts is None and models is not None and served is not None and served.state is ModelState.SLEEPING:
            await models.load(served)
        else:
            await own.engines.wake_up(parts)

    @router.post("/sleep")
    async def sleep(
        request: Request,
        level: Literal["1", "2"] = "1",
        mode: Literal["abort", "wait", "keep"] = "abort",
        model: str | None = None,
    ) -> Response:
        """Give up the memory of weights and KV until /wake_up; needs serve.enable_sleep_mode.

        level 1 keeps the weights in host memory, 2 reads them again. Running requests are aborted, waited for, or kept,
        to go on afterwards; new ones wait.
        """
        return await change(loaded(request, model), lambda own: own.engines.sleep(int(level), mode))

    @router.post("/wake_up")
    async def wake_up(
        request: Request,
        tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None,
        model: str | None = None,
    ) -> Response:
        """Take the memory again; with tags=weights or tags=kv_cache a part of it, the engine then still sleeps."""
        parts = None if tags is None else list(map(str, tags))
        return await change(loaded(request, model), lambda own: wake(own, parts))

    @router.get("/is_sleeping")
    async def is_sleeping(request: Request, model: str | None = None) -> Response:
        """Whether the engines, or some of them, sleep."""
        asked = context.shared.named(request.state.tenant, model)
        return json_response({"is_sleeping": any(each.engines.is_sleeping for each in asked)})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request, model: str | None = None) -> Response:
        """Forget the KV of all prompts but that in files. Requests that run go on, and compute theirs again."""
        asked = context.shared.named(request.state.tenant, model)
        await change(list(filter(has_engines, asked)), lambda own: own.engines.reset_prefix_cache())
        return json_response({})

    @router.post("/start_profile")
    async def start_profile(request: Request, model: str | None = None) -> Response:
        """Start the profiler of every engine."""
        await change(loaded(request, model), lambda own: own.engines.profile(starts=True))
        return json_response({"status": "started"})

    @router.post("/stop_profile")
    async def stop_profile(request: Request, model: str | None = None) -> Response:
        """Stop it and write the traces: `trace` is the first, and `traces` are those of all engines."""
        traces = [each for own in loaded(request, model) for each in await own.engines.profile(starts=False)]
        return json_response({"status": "stopped", "trace": traces[0], "traces": traces})

    return router


def has_engines(own: Context) -> bool:
    """Whether a model's engines have processes."""
    return own.served is None or own.served.has_engines


def find_loaded(contexts: list[Context]) -> list[Context]:
    """The models whose engines have processes. EngineDeadError if there is none."""
    found = list(filter(has_engines, contexts))
    if not found:
        names = ", ".join(each.names[0] for each in contexts)
        raise EngineDeadError(f"{names}: not loaded; /models/load does so")
    return found
