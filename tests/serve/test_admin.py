"""What operators ask of a server whose engine is not there; the rest is asked of real servers, in other files."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from atom.config.load import load
from atom.serve.app import create_app
from atom.serve.context import Context
from atom.serve.engine.replicas import Replicas
from atom.serve.metrics import Metrics


def version(device: str, gpus: str = "") -> dict[str, Any]:
    """What /version answers, where the engine has told these GPUs."""

    async def ask() -> dict[str, Any]:
        engines = Replicas(load([f"device={device}"]))
        engines[0].client.gpus = gpus
        context = Context(load([f"device={device}"]), engines, Metrics(engines))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(context, ())), base_url="http://a"
        ) as http:
            told: dict[str, Any] = (await http.get("/version")).json()
        context.close()
        return told

    return asyncio.run(ask())


@pytest.mark.parametrize("gpus", ["", "2 x A GPU"], ids=["loading", "ready"])
def test_the_version_names_the_gpus_once_the_engine_has(gpus: str):
    told = version("cuda", gpus)
    assert (told["device"], told["hardware"]) == ("cuda", gpus)


def test_the_version_names_the_processor_where_the_engine_runs_on_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atom.serve.admin.describe_cpus", lambda: "8 x A CPU")
    told = version("cpu")
    assert (told["device"], told["hardware"]) == ("cpu", "8 x A CPU")
