"""Routes for trainers, as in vLLM: /pause, /resume, /abort_requests, /update_weights, /weight_version.

curl -X POST "localhost:8000/pause?mode=keep&clear_cache=false"
curl localhost:8000/update_weights -H "Content-Type: application/json" -d '{"update_info": {"names": [], …}}'
curl -X POST localhost:8000/resume

They are about all models that are loaded, or about the one that the query's `model` names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from fastapi import APIRouter, Request, Response

from atom.serve.context import Context
from atom.serve.engine.replicas import Replicas
from atom.serve.http.bodies import body_route
from atom.serve.http.errors import json_response
from atom.serve.openai.schema import AbortRequest, FinishRequest, TransferRequest, UpdateRequest, VersionRequest
from atom.serve.ops.admin import find_loaded


def routes(context: Context) -> APIRouter:
    router = APIRouter(tags=["operations"], route_class=body_route(context))

    def named(request: Request) -> list[Replicas]:
        contexts = context.shared.named(request.state.tenant, request.query_params.get("model"))
        return [each.engines for each in contexts]

    async def change(request: Request, work: Callable[[Replicas], Awaitable[object]]) -> None:
        contexts = context.shared.named(request.state.tenant, request.query_params.get("model"))
        for each in find_loaded(contexts):
            await work(each.engines)

    @router.post("/pause")
    async def pause(
        request: Request,
        mode: Literal["abort", "wait", "keep"] = "abort",
        clear_cache: bool = True,
        wait_for_inflight_requests: bool = False,
        model: str | None = None,
    ) -> Response:
        """Start no step until /resume; requests that come meanwhile wait.

        Running requests are aborted, waited for, or kept as they are, to go on afterwards. clear_cache forgets the KV
        of all prompts: what is kept computes its own again. wait_for_inflight_requests is an older name of mode=wait.
        """
        chosen = "wait" if wait_for_inflight_requests else mode
        await change(request, lambda engines: engines.pause(chosen, clear_cache=clear_cache))
        return json_response({"status": "paused"})

    @router.post("/resume")
    async def resume(request: Request, model: str | None = None) -> Response:
        """Go on after /pause."""
        await change(request, Replicas.resume)
        return json_response({"status": "resumed"})

    @router.get("/is_paused")
    async def is_paused(request: Request, model: str | None = None) -> Response:
        """Whether all engines are paused."""
        return json_response({"is_paused": all(each.is_paused for each in named(request))})

    @router.post("/abort_requests")
    async def abort_requests(body: AbortRequest, request: Request) -> Response:
        """End requests with finish_reason abort and what they have; without request_ids all. The engines go on."""
        chosen = set(body.request_ids or ()) or None
        return json_response(
            {"status": "aborted", "aborted": sum(each.abort_requests(chosen) for each in named(request))}
        )

    @router.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(body: TransferRequest, request: Request) -> Response:
        """Prepare for a trainer that sends weights by NCCL, and wait until it has come; other ways need nothing."""
        await change(request, lambda engines: engines.init_weight_transfer(body.init_info))
        return json_response({"message": "Weight transfer initialized"})

    @router.post("/start_weight_update")
    async def start_weight_update(request: Request, model: str | None = None) -> Response:
        """Begin an update of several parts, each a POST /update_weights; requests wait until it has ended."""
        await change(request, Replicas.start_weight_update)
        return json_response({"message": "Weight update started"})

    @router.post("/update_weights")
    async def update_weights(body: UpdateRequest, request: Request) -> Response:
        """Update weights in place, all or some, between two steps; requests that run go on with the new ones.

        400 names a tensor that does not fit, and nothing has changed. 503: it has failed half-way, and nothing is
        served until the tensors that it was about have been updated.
        """
        await change(request, lambda engines: engines.update_weights(body.update_info))
        return json_response({"message": "Weights updated"})

    @router.post("/finish_weight_update")
    async def finish_weight_update(body: FinishRequest, request: Request) -> Response:
        """End an update of several parts, and name the weights."""
        await change(request, lambda engines: engines.finish_weight_update(body.weight_version))
        return json_response({"message": "Weight update finished"})

    @router.post("/update_weight_version")
    async def update_weight_version(body: VersionRequest, request: Request) -> Response:
        """Name the weights; answers report it with return_weight_versions."""
        await change(request, lambda engines: engines.set_weight_version(body.new_version))
        return json_response({"success": True, "new_version": body.new_version})

    @router.get("/weight_version")
    @router.get("/weight_info")
    async def weight_info(request: Request, model: str | None = None) -> Response:
        """The name of the weights that sample, `default` until they get one. It is about the first model.

        /weight_info is vLLM's name, /weight_version an older one of SGLang.
        """
        return json_response({"weight_version": named(request)[0].weight_version})

    @router.get("/get_world_size")
    async def get_world_size(request: Request, include_dp: bool = True, model: str | None = None) -> Response:
        """The number of ranks of all engines, or without groups of data and replicas. It is about the first model."""
        parallel = named(request)[0].config.parallel
        num_ranks = parallel.tensor * parallel.pipeline
        return json_response({"world_size": num_ranks * parallel.data * parallel.replicas if include_dp else num_ranks})

    return router
