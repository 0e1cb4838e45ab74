"""Admin routes: /sleep, /wake_up, /reset_prefix_cache, the profiler.

curl -X POST localhost:8000/sleep?level=1
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from atom.serve.context import Context
from atom.serve.http.errors import json_response


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.post("/sleep")
    async def sleep(level: Literal["1", "2"] = "1", mode: Literal["abort", "wait", "keep"] = "abort") -> Response:
        """Give up the memory of weights and KV until /wake_up; needs serve.enable_sleep_mode.

        level 1 keeps the weights in host memory, 2 reads them again. Running requests are aborted, waited for, or kept,
        to go on afterwards; new ones wait.
        """
        await context.engines.sleep(int(level), mode)
        return json_response({"is_sleeping": context.engines.is_sleeping})

    @router.post("/wake_up")
    async def wake_up(tags: Annotated[list[Literal["weights", "kv_cache"]] | None, Query()] = None) -> Response:
        """Take the memory again; with tags=weights or tags=kv_cache a part of it, the engine then still sleeps."""
        await context.engines.wake_up(None if tags is None else list(map(str, tags)))
        return json_response({"is_sleeping": context.engines.is_sleeping})

    @router.get("/is_sleeping")
    async def is_sleeping() -> Response:
        """Whether the engines, or some of them, sleep."""
        return json_response({"is_sleeping": context.engines.is_sleeping})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Forget the KV of all prompts but that in files. Requests that run go on, and compute theirs again."""
        await context.engines.reset_prefix_cache()
        return json_response({})

    @router.post("/start_profile")
    async def start_profile() -> Response:
        """Start the profiler of every engine."""
        await context.engines.profile(starts=True)
        return json_response({"status": "started"})

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        """Stop it and write the traces: `trace` is the first, and `traces` are those of all engines."""
        traces = await context.engines.profile(starts=False)
        return json_response({"status": "stopped", "trace": traces[0], "traces": traces})

    return router
