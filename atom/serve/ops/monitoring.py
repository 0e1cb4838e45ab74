"""Routes for monitoring: /health, /ready, /ping, /load, /metrics, /version, /server_info.

curl -i localhost:8000/health
"""

from __future__ import annotations

import asyncio
import platform
from collections import Counter
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

import atom
from atom.config import Config
from atom.config.spelling import HIDDEN, is_secret
from atom.dtypes import DTYPES
from atom.measurement.hardware import describe_cpus
from atom.runtime.draft.speculation import draft_statistics
from atom.serve.context import Context
from atom.serve.engine.client import EngineState
from atom.serve.engine.models import Models
from atom.serve.engine.replica import Replica
from atom.serve.http.errors import json_response


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/health")
    async def health() -> Response:
        """200 if requests are accepted, else 503; `state` is loading, ready, stopped, incomplete, draining or dead.

        incomplete: an update of the weights has failed half-way, and has to be repeated.
        A stopped engine (SIGSTOP, a debugger) answers its requests once it continues; `stopped` names its processes.
        While it loads, `doing` says what the start is at. `is_sleeping` is there while an engine sleeps, `is_paused`
        while all are paused, `step_seconds` once a step takes long. Of several engines, `engines` names each; one that
        serves is enough. Of several models, `models` counts those of each state: one that sleeps, or has failed, does
        not keep the server from being ready.
        """
        models = context.shared.models
        if models is not None and len(models) > 1:
            return health_of(models, has_tokenizers=context.shared.has_tokenizers)
        state, engines = context.state, context.engines
        is_ready = state is EngineState.READY and not engines.weights_fault
        shown = "stopped" if is_ready and engines.is_stopped else str(state)
        if engines.weights_fault and state is EngineState.READY:
            shown = "incomplete"
        body: dict[str, Any] = {"status": "ok" if shown == EngineState.READY else shown, "state": shown}
        if state is EngineState.LOADING:
            body["doing"] = context.doing
        if engines.is_sleeping:
            body["is_sleeping"] = True
        if engines.is_paused:
            body["is_paused"] = True
        body |= {"engines": list(map(describe_engine, engines))} if len(engines) > 1 else describe_pause(engines[0])
        return json_response(body, 200 if is_ready else 503)

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
        engines = [engine for each in context.shared.contexts for engine in each.engines]
        return json_response({"server_load": sum(engine.client.num_sequences for engine in engines)})

    @router.get("/server_info")
    async def server_info(
        request: Request, config_format: Literal["text", "json"] = "text", model: str | None = None
    ) -> Response:
        """The configuration, API keys hidden: as text, or with config_format=json as an object. model: of several."""
        config = context.shared.find(request.state.tenant, model).config
        shown = describe_config(config)
        return json_response({"vllm_config": shown | vllm_names(config) if config_format == "json" else str(shown)})

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """The metrics, for Prometheus; an administrator's key gets the counts of all keys, another one its own."""
        context.metrics.server.tasks.set(len(asyncio.all_tasks()))
        return Response(context.metrics.render(request.state.tenant), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> Response:
        """The versions and the hardware; GPUs are named once the engine is ready. It is about the first model."""
        config = context.config
        return json_response(
            {
                "version": atom.__version__,
                "model": config.model.name,
                "dtype": config.dtype,
                "weights": list_formats(config),
                "device": config.device,
                "hardware": describe_cpus() if config.device == "cpu" else context.engines.gpus,
                "python": platform.python_version(),
            }
        )

    @router.get("/debug/mtp_stats")
    async def mtp_stats() -> Response:
        """Counts of drafted tokens and of those that were accepted, of each engine; see docs/speculation.md."""
        engines = [engine for each in context.shared.contexts for engine in each.engines]
        stats = [draft_statistics(engine.client.stats.scheduler) for engine in engines]
        return json_response(stats[0] if len(stats) == 1 else {"engines": stats})

    return router


def health_of(models: Models, *, has_tokenizers: bool) -> Response:
    """The answer of /health for several models, which needs no key, so without names."""
    state = EngineState.LOADING if models.state is EngineState.READY and not has_tokenizers else models.state
    body: dict[str, Any] = {"status": "ok" if state is EngineState.READY else str(state), "state": str(state)}
    if state is EngineState.LOADING:
        body["doing"] = models.doing or "opening tokenizers"
    body["models"] = dict(Counter(str(each.state) for each in models))
    return json_response(body, 200 if state is EngineState.READY else 503)


def list_formats(config: Config) -> list[str]:
    """The formats of packed weights, that of the most modules first; empty if all weights are plain."""
    model, fmt = config.model, config.quant.fmt
    named = (model.fmt, *model.formats.values()) if fmt == "auto" else (fmt,)
    named = (*named, *config.quant.formats.values())
    counts = Counter(each.partition("[")[0] for each in named if each not in (None, "none", "plain"))
    return [name for name, _ in counts.most_common()]


def describe_config(config: Config) -> dict[str, Any]:
    """The configuration as /server_info shows it: without what it was loaded from, and without API keys."""
    shown = asdict(config)
    for name in ("hf", "generation", "overrides"):
        del shown[name]
    if is_secret(config.serve.http.api_keys):
        shown["serve"]["http"]["api_keys"] = HIDDEN
    return shown


def vllm_names(config: Config) -> dict[str, Any]:
    """What TRL's clients read of vLLM's configuration, by vLLM's names."""
    parallel, serve = config.parallel, config.serve
    return {
        "model_config": {
            "dtype": f"torch.{DTYPES[config.dtype].name}",
            "max_model_len": serve.max_model_len,
            "logprobs_mode": "raw_logprobs",
        },
        "parallel_config": {
            "tensor_parallel_size": parallel.tensor,
            "pipeline_parallel_size": parallel.pipeline,
            "data_parallel_size": parallel.data * parallel.replicas,
        },
        "lora_config": {"max_loras": serve.max_loras, "max_lora_rank": serve.max_lora_rank}
        if serve.enable_lora
        else None,
        "weight_transfer_config": None if config.device == "cpu" else {"backend": "nccl"},
    }


def describe_pause(engine: Replica) -> dict[str, Any]:
    """Which of an engine's processes are stopped, and for how long it has ended no step, if that is long."""
    stopped, seconds = engine.client.stopped, int(engine.client.step_seconds)
    return ({"stopped": stopped} if stopped else {}) | ({"step_seconds": seconds} if engine.has_long_step else {})


def describe_engine(engine: Replica) -> dict[str, Any]:
    """One of several engines, for /health, which needs no key, so without details of a fault."""
    client = engine.client
    body = {"engine": engine.number, "state": str(client.state), "restarts": engine.num_restarts}
    if client.state is EngineState.LOADING:
        body["doing"] = client.doing
    if client.is_sleeping:
        body["is_sleeping"] = True
    if client.is_paused:
        body["is_paused"] = True
    if client.weights_fault:
        body["state"] = "incomplete"
    return body | describe_pause(engine) | ({"stays_dead": True} if engine.has_failed else {})
