"""Routes for monitoring: /health, /ready, /ping, /load, /metrics, /version, /server_info.

curl -i localhost:8000/health
"""

from __future__ import annotations

import asyncio
import platform
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

import atom
from atom.config import Config
from atom.config.spelling import HIDDEN, is_secret
from atom.measurement.hardware import describe_cpus
from atom.runtime.speculation import draft_statistics
from atom.serve.context import Context
from atom.serve.engine.client import EngineState
from atom.serve.engine.replica import Replica
from atom.serve.errors import json_response


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/health")
    async def health() -> Response:
        """200 where requests are served, else 503; `status` says which of loading, ready, draining, dead it is.

        While it loads, `doing` says what the start is at. `is_sleeping` is there while an engine sleeps. Of several
        engines, `engines` names each; one that serves is enough.
        """
        state = context.state
        status = "ok" if state is EngineState.READY else str(state)
        body: dict[str, Any] = {"status": status, "state": str(state)}
        if state is EngineState.LOADING:
            body["doing"] = context.doing
        if context.engines.is_sleeping:
            body["is_sleeping"] = True
        if len(context.engines) > 1:
            body["engines"] = list(map(describe_engine, context.engines))
        return json_response(body, 200 if state is EngineState.READY else 503)

    @router.get("/ready")
    async def ready() -> Response:
        """The same, for load balancers."""
        return await health()

    @router.get("/ping")
    @router.post("/ping")
    async def ping() -> Response:
        """The same, for SageMaker and clients of vLLM."""
        return await health()

    @router.get("/load")
    async def load() -> Response:
        """The sequences that run or wait in all engines, as `server_load`."""
        return json_response({"server_load": sum(engine.client.num_sequences for engine in context.engines)})

    @router.get("/server_info")
    async def server_info(config_format: Literal["text", "json"] = "text") -> Response:
        """The configuration, API keys hidden: as text, or with config_format=json as an object."""
        shown = describe_config(context.config)
        return json_response({"vllm_config": shown if config_format == "json" else str(shown)})

    @router.get("/metrics")
    async def metrics() -> Response:
        """The metrics, for Prometheus."""
        context.metrics.tasks.set(len(asyncio.all_tasks()))
        return Response(context.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> Response:
        """The versions and the hardware; GPUs are named once the engine is ready."""
        config = context.config
        return json_response(
            {
                "version": atom.__version__,
                "model": config.model.name,
                "dtype": config.dtype,
                "device": config.device,
                "hardware": describe_cpus() if config.device == "cpu" else context.engines.gpus,
                "python": platform.python_version(),
            }
        )

    @router.get("/debug/mtp_stats")
    async def mtp_stats() -> Response:
        """Counts of drafted tokens and of those that were accepted, of each engine; see docs/speculation.md."""
        stats = [draft_statistics(engine.client.stats.scheduler) for engine in context.engines]
        return json_response(stats[0] if len(stats) == 1 else {"engines": stats})

    return router


def describe_config(config: Config) -> dict[str, Any]:
    """The configuration as /server_info shows it: without what it was loaded from, and without API keys."""
    shown = asdict(config)
    for name in ("hf", "generation", "overrides"):
        del shown[name]
    if is_secret(config.serve.http.api_keys):
        shown["serve"]["http"]["api_keys"] = HIDDEN
    return shown


def describe_engine(engine: Replica) -> dict[str, Any]:
    """One of several engines, for /health, which needs no key: nothing that a fault would tell."""
    client = engine.client
    body = {"engine": engine.number, "state": str(client.state), "restarts": engine.num_restarts}
    if client.state is EngineState.LOADING:
        body["doing"] = client.doing
    if client.is_sleeping:
        body["is_sleeping"] = True
    return body | ({"stays_dead": True} if engine.has_failed else {})
