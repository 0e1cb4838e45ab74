"""A server of its own process, whose engine is on the GPU: it answers as an engine on the CPU does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import serving
import torch
import wire
from serving import Server

from atom import LLMEngine, SamplingParams

PACKAGES = ("fastapi", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client")
MISSING = [name for name in PACKAGES if find_spec(name) is None]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=f"there is no {', '.join(MISSING)} here")]

FIELDS = {"num_kvcache_blocks": 200, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64,
          "cudagraph_capture_sizes": "[1,4,8]"}  # fmt: skip
BODY: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 40, "temperature": 0}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.save_talker(tmp_path_factory.mktemp("talker") / "talker")


@pytest.fixture(scope="module")
def server(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    overrides = [f"serve.{name}={value}" for name, value in FIELDS.items()]
    server = serving.start(talker, tmp_path_factory.mktemp("server"), "device=cuda", "level=3", *overrides)
    yield server
    server.process.terminate()
    assert server.process.wait(60) == 0, "it ends cleanly"


@pytest.fixture(scope="module")
def cpu(talker: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine(str(talker), device="cpu", dtype="fp32", level=1, max_model_len=256, kv_cache_memory=1 << 24)
    yield engine
    engine.close()


def expected(cpu: LLMEngine, prompt: str, **params: Any) -> str:
    return str(cpu.generate([prompt], SamplingParams(**params))[0]["text"])


def pin(number: int) -> dict[str, str]:
    """Headers that name a replica."""
    return {"X-data-parallel-rank": str(number)}


def test_a_completion_is_the_cpu_s(server: Server, cpu: LLMEngine):
    answer = wire.ask(server.url, "POST", "/v1/completions", BODY)
    assert answer.status == 200
    assert answer.json["choices"][0]["text"] == expected(cpu, **BODY)


def test_the_version_names_the_gpus_that_torch_finds(server: Server):
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    hardware = wire.ask(server.url, "GET", "/version").json["hardware"]
    assert hardware.startswith(f"{names.count(names[0])} x {names[0]}")


def test_a_stream_of_sampled_tokens_is_the_cpu_s(server: Server, cpu: LLMEngine):
    params = {"max_tokens": 40, "temperature": 0.9, "top_p": 0.9, "seed": 5}
    *events, done = wire.Stream(server.url, {"prompt": "Once upon", **params}).read_events()
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == expected(cpu, "Once upon", **params)


def test_more_clients_than_rows_are_answered_each_with_its_own(server: Server, cpu: LLMEngine):
    prompts = [chr(65 + at) * (at + 1) for at in range(20)]
    texts: dict[int, str] = {}

    def ask(at: int) -> None:
        body = {"prompt": prompts[at], "max_tokens": 30, "temperature": 0}
        texts[at] = wire.ask(server.url, "POST", "/v1/completions", body).json["choices"][0]["text"]

    clients = [Thread(target=ask, args=(at,)) for at in range(len(prompts))]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    answers = cpu.generate(prompts, SamplingParams(max_tokens=30, temperature=0))
    assert [texts[at] for at in range(len(prompts))] == [answer["text"] for answer in answers]


def test_a_client_that_goes_away_leaves_nothing_running(server: Server):
    stream = wire.Stream(server.url, {"prompt": "A", "max_tokens": 200, "ignore_eos": True})
    stream.read_events(2)
    stream.close()
    wire.wait_until(lambda: wire.metrics(server.url)["atom:num_requests_running"] == 0)
    assert wire.ask(server.url, "GET", "/health").status == 200


def test_a_grammar_is_held(server: Server):
    pytest.importorskip("llguidance")
    body = {"prompt": "A", "max_tokens": 20, "temperature": 1.0, "seed": 1, "regex": "[ab]{6}"}
    answer = wire.ask(server.url, "POST", "/v1/completions", body)
    text = answer.json["choices"][0]["text"]
    assert len(text) == 6 and set(text) <= {"a", "b"}


@pytest.fixture
def pair(talker: Path, tmp_path: Path) -> Iterator[Server]:
    """Two replicas that serve, one on each of two GPUs."""
    used_on_each()  # which needs memory itself at first
    before = used_on_each()
    overrides = [f"serve.{name}={value}" for name, value in FIELDS.items()]
    server = serving.start(talker, tmp_path, "device=cuda", "level=1", "parallel=dp2", *overrides)
    wire.wait_until(lambda: states(server) == ["ready", "ready"], 60)
    grown = [now - then for now, then in zip(used_on_each(), before, strict=True)]
    assert all(each > 200 << 20 for each in grown), f"a process with a CUDA context is on each GPU: {grown}"
    yield server
    server.process.terminate()
    assert server.process.wait(60) == 0, "it ends cleanly"


def used_on_each() -> list[int]:
    """The bytes in use on each of two GPUs."""
    found = map(torch.cuda.mem_get_info, range(2))
    return [total - free for free, total in found]


def states(server: Server) -> list[str]:
    return [each["state"] for each in wire.ask(server.url, "GET", "/health").json["engines"]]


def engines(server: Server) -> list[int]:
    """The engines' processes, by the replica's number at the first start."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    return sorted(map(int, children.split()))


@two_gpus
def test_each_replica_answers_on_a_gpu_of_its_own(pair: Server, cpu: LLMEngine):
    for number in range(2):
        answer = wire.ask(pair.url, "POST", "/v1/completions", BODY, pin(number))
        assert answer.json["choices"][0]["text"] == expected(cpu, **BODY)


@two_gpus
def test_a_replica_that_is_killed_comes_back_while_the_other_serves(pair: Server, cpu: LLMEngine):
    first, text = engines(pair)[0], expected(cpu, **BODY)
    endless = {"prompt": "A", "max_tokens": 240, "temperature": 0, "ignore_eos": True,
               "stream_options": {"include_usage": True}}  # fmt: skip
    dies, lives = (wire.Stream(pair.url, endless, **pin(number)) for number in range(2))
    for stream in (dies, lives):
        stream.read_events(1)
    os.kill(first, signal.SIGKILL)
    assert dies.read_events()[-1]["error"]["code"] == "unavailable"
    *_, counted, _ = lives.read_events()
    assert counted["usage"]["completion_tokens"] == 240
    num_answered = 0
    while states(pair) != ["ready", "ready"]:
        answer = wire.ask(pair.url, "POST", "/v1/completions", BODY)
        assert answer.json["choices"][0]["text"] == text
        num_answered += 1
    assert num_answered > 0
    assert wire.ask(pair.url, "POST", "/v1/completions", BODY, pin(0)).json["choices"][0]["text"] == text
    assert first not in engines(pair)
