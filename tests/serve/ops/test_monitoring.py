"""What a server reports of itself; health, metrics and drafts have files of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import wire
from serving import Server, Start

from atom.config.load import load
from atom.serve.app import create_app
from atom.serve.context import Context
from atom.serve.engine.replicas import Replicas
from atom.serve.ops.metrics import Metrics
from atom.serve.ops.monitoring import describe_config, list_formats


def test_ping_says_what_health_says_and_load_counts_sequences(stub: Server):
    for method in ("GET", "POST"):
        assert wire.ask(stub.url, method, "/ping")[::2] == wire.ask(stub.url, "GET", "/health")[::2]
    assert wire.ask(stub.url, "GET", "/load").json == {"server_load": 0}
    stream = wire.Stream(stub.url, {"prompt": [0, 9], "max_tokens": 4000, "n": 3})
    wire.wait_until(lambda: wire.ask(stub.url, "GET", "/load").json == {"server_load": 3})
    stream.close()
    wire.wait_until(lambda: wire.ask(stub.url, "GET", "/load").json == {"server_load": 0})


def test_server_info_shows_the_configuration_without_keys(start_server: Start, tmp_path: Path):
    (tmp_path / "keys.yaml").write_text("ops: {key: sesame, admin: true}")
    server = start_server(f"serve.http.api_keys=@{tmp_path}/keys.yaml", "serve.max_num_seqs=7", stub={})
    headers = {"authorization": "Bearer sesame"}
    answer = wire.ask(server.url, "GET", "/server_info?config_format=json", headers=headers)
    shown = answer.json["vllm_config"]
    assert (shown["serve"]["max_num_seqs"], shown["serve"]["http"]["api_keys"]) == (7, f"@{tmp_path}/keys.yaml")
    trl = {name: shown[name] for name in ("model_config", "lora_config", "weight_transfer_config")}  # as its clients do
    of_model = {
        "dtype": "torch.float32",
        "max_model_len": shown["serve"]["max_model_len"],
        "logprobs_mode": "raw_logprobs",
    }
    assert trl == {"model_config": of_model, "lora_config": None, "weight_transfer_config": None}
    text = wire.ask(server.url, "GET", "/server_info", headers=headers).json["vllm_config"]
    assert isinstance(text, str) and "'max_num_seqs': 7" in text
    assert "sesame" not in answer.body.decode() + text
    assert wire.ask(server.url, "GET", "/server_info?config_format=xml", headers=headers).status == 400


def test_keys_that_are_in_the_configuration_itself_are_hidden():
    shown = describe_config(load(["serve.http.api_keys=sesame"]))
    assert shown["serve"]["http"]["api_keys"] == "***" and "sesame" not in str(shown)


def version(device: str, gpus: str = "") -> dict[str, Any]:
    """What /version answers, if the engine has reported these GPUs."""

    async def ask() -> dict[str, Any]:
        engines = Replicas(load([f"device={device}"]))
        engines[0].client.gpus = gpus
        context = Context(load([f"device={device}"]), engines, Metrics(engines))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(context, ())), base_url="http://a"
        ) as http:
            body: dict[str, Any] = (await http.get("/version")).json()
        context.close()
        return body

    return asyncio.run(ask())


@pytest.mark.parametrize("gpus", ["", "2 x A GPU"], ids=["loading", "ready"])
def test_the_version_names_the_gpus_once_the_engine_has(gpus: str):
    shown = version("cuda", gpus)
    assert (shown["device"], shown["hardware"]) == ("cuda", gpus)


def test_the_version_names_the_formats_of_weights(tmp_path: Path):
    config = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32}
    described = {"architectures": ["LlamaForCausalLM"], "vocab_size": 9, "max_position_embeddings": 99, **config}
    (tmp_path / "config.json").write_text(json.dumps({**described, "quantization_config": quantization}))
    for overrides, expected in {(): ["awq_int4"], ("quant=none",): []}.items():
        assert list_formats(load([f"checkpoint={tmp_path}", *overrides])) == expected
    (tmp_path / "config.json").write_text(json.dumps(described))
    for overrides, expected in {(): [], ("quant=fp8",): ["fp8"]}.items():
        assert list_formats(load([f"checkpoint={tmp_path}", *overrides])) == expected
    assert version("cpu")["weights"] == ["q4_1", "q8_0"], "the embedded model's"


def test_the_version_names_the_processor_where_the_engine_runs_on_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atom.serve.ops.monitoring.describe_cpus", lambda: "8 x A CPU")
    shown = version("cpu")
    assert (shown["device"], shown["hardware"]) == ("cpu", "8 x A CPU")
