"""Weights updated over HTTP: all engines answer with the new ones, or with the old ones, or not at all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import serving
import tiny
import torch
import wire
from serve.test_pause import are_ready, begin, engines_of
from serving import Start

from atom.trainer import SharedWeights

KEY = {"Authorization": "Bearer secret"}
BODY = {"prompt": tiny.prompt(11), "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        "return_weight_versions": True}  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["one engine", "two"])
def server(request: Any, checkpoints: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[serving.Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("ops: {key: secret, admin: true}\napp: {key: apps}\n")
    started = serving.start(
        checkpoints("llama"), tmp_path_factory.mktemp("server"), f"serve.http.api_keys=@{keys}", "dtype=fp32",
        f"parallel.replicas={request.param}", "serve.enable_prefix_caching=true", "serve.block_size=4",
    )  # fmt: skip
    wire.wait_until(lambda: are_ready(started.url))
    yield started
    started.process.kill()
    started.process.wait()


@pytest.fixture(scope="module")
def trained(checkpoints: Callable[[str], Path]) -> Any:
    """The model with other weights."""
    model = tiny.reference(checkpoints("llama"))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.3)
    return model


def ask(server: serving.Server, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
    answer = wire.ask(server.url, method, path, body, KEY)
    assert answer.status == status, answer.body
    return answer.json


def complete(server: serving.Server, engine: int = 0) -> dict[str, Any]:
    pinned = KEY | {"X-data-parallel-rank": str(engine)}
    return dict(wire.ask(server.url, "POST", "/v1/completions", BODY, pinned).json["choices"][0])


def update(server: serving.Server, tensors: dict[str, torch.Tensor], *, status: int = 200, **more: Any) -> Any:
    with SharedWeights(tensors) as shared:
        body = {"update_info": shared.update_info | more}
        return ask(server, "POST", "/update_weights", body, status=status)


def assert_all(server: serving.Server, model: Any, version: str) -> None:
    """Each engine answers as transformers does by these weights."""
    for number in range(len(engines_of(server.url))):
        choice = complete(server, number)
        tiny.assert_greedy(choice, list(BODY["prompt"]), model)  # type: ignore[call-overload]
        assert choice["weight_versions"] == [{"version": version, "start": 0, "end": 12}]
    for path in ("/weight_info", "/weight_version"):
        assert ask(server, "GET", path) == {"weight_version": version}


def test_all_engines_answer_with_the_weights_of_an_update(
    server: serving.Server, trained: Any, checkpoints: Callable[[str], Path]
):
    original = tiny.reference(checkpoints("llama"))
    assert complete(server)["token_ids"] != trained_tokens(trained)
    assert ask(server, "POST", "/init_weight_transfer_engine", {"init_info": {}})["message"]
    assert update(server, trained.state_dict(), version="trained") == {"message": "Weights updated"}
    assert_all(server, trained, "trained")
    assert update(server, original.state_dict(), version="default")
    assert_all(server, original, "default")


def trained_tokens(model: Any) -> list[int]:
    prompt = torch.tensor([BODY["prompt"]])
    made = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in made[0, prompt.shape[1] :]]


def test_parts_of_an_update_come_while_requests_wait(
    server: serving.Server, trained: Any, checkpoints: Callable[[str], Path]
):
    tensors, original = list(trained.state_dict().items()), tiny.reference(checkpoints("llama"))
    for body in ({}, None):
        assert "under way" in ask(server, "POST", "/finish_weight_update", body, status=400)["error"]["message"]
    assert ask(server, "POST", "/start_weight_update") == {"message": "Weight update started"}
    assert "under way" in ask(server, "POST", "/start_weight_update", status=400)["error"]["message"]
    answers: list[Any] = []
    late = begin(server.url, BODY, answers)
    assert ask(server, "GET", "/is_paused") == {"is_paused": True}
    update(server, dict(tensors[:7]))
    wire.wait_until(
        lambda: sum(wire.metrics(server.url, KEY)[key] for key in metrics_of(server, "num_requests_waiting"))
    )
    update(server, dict(tensors[7:]))
    assert not answers
    answer = ask(server, "POST", "/finish_weight_update", {"weight_version": "parts"})
    assert answer == {"message": "Weight update finished"}
    late.join(wire.SECONDS)
    assert answers[0]["weight_versions"] == [{"version": "parts", "start": 0, "end": 12}]
    assert_all(server, trained, "parts")
    update(server, original.state_dict(), version="default")


def metrics_of(server: serving.Server, name: str) -> list[str]:
    return [key for key in wire.metrics(server.url, KEY) if key.partition("{")[0] == f"atom:{name}"]


def test_a_tensor_that_does_not_fit_is_named_and_nothing_changes(
    server: serving.Server, trained: Any, checkpoints: Callable[[str], Path]
):
    original, tensors = tiny.reference(checkpoints("llama")), trained.state_dict()
    for name, tensor in (("model.norm.wait", torch.zeros(48)), ("model.norm.weight", torch.zeros(49))):
        refused = update(server, tensors | {name: tensor}, status=400)["error"]
        assert name in refused["message"]
    refused = ask(server, "POST", "/update_weights", {"update_info": {"names": "a"}}, status=400)["error"]["message"]
    assert "update_info" in refused and "names" in refused
    for body in ({}, {"update_info": []}):
        assert ask(server, "POST", "/update_weights", body, status=400)["error"]["param"] == "update_info"
    assert_all(server, original, "default")


@pytest.mark.parametrize("pause", [None, "?mode=keep&clear_cache=false", "?mode=keep&clear_cache=true"])
def test_kv_of_older_weights_is_forgotten_unless_a_pause_keeps_it(
    pause: str | None, server: serving.Server, checkpoints: Callable[[str], Path]
):
    original, prompt = tiny.reference(checkpoints("llama")), tiny.prompt(50, seed=9)

    def num_cached() -> int:
        answer = ask(server, "POST", "/v1/completions", BODY | {"prompt": prompt})
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    ask(server, "POST", "/reset_prefix_cache")
    assert [num_cached(), num_cached()] == [0, 48]
    if pause is not None:
        ask(server, "POST", f"/pause{pause}")
    update(server, {"model.norm.weight": original.state_dict()["model.norm.weight"]}, version="default")
    if pause is not None:
        ask(server, "POST", "/resume")
    assert num_cached() == (48 if pause is not None and "false" in pause else 0)


def test_a_request_that_a_pause_keeps_goes_on_with_the_new_weights(
    server: serving.Server, trained: Any, checkpoints: Callable[[str], Path]
):
    with closing(wire.Stream(server.url, BODY | {"max_tokens": 200}, **KEY)) as stream:
        events = stream.read_events(1)
        ask(server, "POST", "/pause?mode=keep")
        update(server, trained.state_dict(), version="trained")
        ask(server, "POST", "/resume")
        events += stream.read_events()
    choices = [each["choices"][0] for each in events if isinstance(each, dict)]
    tokens = [token for each in choices for token in each["token_ids"]]
    old, new = choices[-1]["weight_versions"]
    assert (old["version"], new["version"], new["end"]) == ("default", "trained", 200)
    prompt = [*tiny.prompt(11), *tokens[: new["start"]]]
    tiny.assert_greedy({"token_ids": tokens[new["start"] :]}, prompt, trained)
    update(server, tiny.reference(checkpoints("llama")).state_dict(), version="default")


def test_only_an_operator_may(server: serving.Server):
    for path in ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"):
        assert wire.ask(server.url, "POST", path, {}).status == 401
        assert wire.ask(server.url, "POST", path, {}, headers={"x-api-key": "apps"}).status == 403


SCORED = {"prompt": tiny.prompt(17, seed=4), "max_tokens": 9, "temperature": 1.0, "seed": 3, "ignore_eos": True,
          "logprobs": 2, "prompt_logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}  # fmt: skip


def test_engines_give_the_same_bits_and_transformers_log_probabilities_after_an_update(
    trained: Any, checkpoints: Callable[[str], Path], start_server: Start
):
    server = start_server(
        f"checkpoint={checkpoints('llama')}", "dtype=fp32", "level=1", "parallel.replicas=2", "batch_invariant=true",
        "serve.block_size=4",
    )  # fmt: skip
    wire.wait_until(lambda: are_ready(server.url))
    update(server, trained.state_dict(), version="trained")
    with closing(wire.Stream(server.url, BODY | {"max_tokens": 300}, **{"X-data-parallel-rank": "1"})) as stream:
        stream.read_events(1)  # engine 1 has another batch
        one, other = (
            wire.ask(server.url, "POST", "/v1/completions", SCORED, {"X-data-parallel-rank": str(engine)}).json
            for engine in (0, 1)
        )
    (choice,) = one["choices"]
    assert choice == other["choices"][0], "each number of the JSON"
    prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
    expected = tiny.logits(trained, prompt + tokens).log_softmax(-1)
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in tokens]
    for place, logprob in enumerate(choice["logprobs"]["token_logprobs"], len(prompt)):
        assert logprob == pytest.approx(expected[place - 1, tokens[place - len(prompt)]].item(), abs=2e-4)
    for place in range(1, len(prompt)):
        found = choice["prompt_logprobs"][place][str(prompt[place])]["logprob"]
        assert found == pytest.approx(expected[place - 1, prompt[place]].item(), abs=2e-4)


def stub_update(*names: str) -> dict[str, Any]:
    return {"update_info": {"names": list(names)}}


def test_an_engine_whose_update_failed_half_way_serves_nothing_until_it_is_repeated(start_server: Start):
    server = start_server("parallel.replicas=2", stub={"names": True})
    wire.wait_until(lambda: are_ready(server.url))
    short = {"prompt": [0], "max_tokens": 1}
    failed = wire.ask(server.url, "POST", "/update_weights", stub_update("0"))
    assert (failed.status, failed.json["error"]["message"]) == (503, "an update has failed half-way")
    assert [each["state"] for each in engines_of(server.url)] == ["incomplete", "ready"]
    assert wire.ask(server.url, "GET", "/health").status == 200
    texts = {wire.ask(server.url, "POST", "/v1/completions", short).json["choices"][0]["text"] for _ in range(4)}
    assert texts == {"1 "}, "the other serves"
    assert wire.ask(server.url, "POST", "/update_weights", stub_update("0", "1")).status == 503
    health = wire.ask(server.url, "GET", "/health")
    assert (health.status, health.json["state"]) == (503, "incomplete")
    refused = wire.ask(server.url, "POST", "/v1/completions", short)
    assert (refused.status, refused.json["error"]["message"]) == (503, "an update has failed half-way")
    assert wire.ask(server.url, "POST", "/update_weights", stub_update("a")).status == 200
    assert are_ready(server.url) and wire.ask(server.url, "POST", "/v1/completions", short).status == 200
    differ = wire.ask(server.url, "POST", "/update_weights", stub_update("not of 1"))
    message = "engines differ in their weights now, repeat the update: there is no tensor not of 1"
    assert (differ.status, differ.json["error"]["message"]) == (503, message)


def test_ranks_of_a_trainers_group_are_numbered_over_all_engines(start_server: Start):
    server = start_server("parallel.replicas=2", stub={})
    wire.wait_until(lambda: are_ready(server.url))
    info = {"master_address": "trainer", "master_port": 1, "rank_offset": 3, "world_size": 5}
    assert wire.ask(server.url, "POST", "/init_weight_transfer_engine", {"init_info": info}).status == 200
    versions = [key for key in wire.metrics(server.url) if key.startswith("atom:weight_version_info")]
    assert [f'version="rank {rank}"' in key for rank, key in zip((3, 4), sorted(versions), strict=True)] == [True, True]


def test_an_engine_that_dies_after_an_update_does_not_come_back_with_older_weights(start_server: Start):
    server = start_server("parallel.replicas=2", stub={"pause_seconds": 0.05})
    wire.wait_until(lambda: are_ready(server.url))
    assert wire.ask(server.url, "POST", "/update_weights", stub_update("nobody")).status == 400
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    wire.wait_until(lambda: sum(each["restarts"] for each in engines_of(server.url)) == 1 and are_ready(server.url))
    assert wire.ask(server.url, "POST", "/update_weights", stub_update("a")).status == 200
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)

    def has_stayed_dead() -> bool:
        return any(each["state"] == "dead" and each.get("stays_dead", False) for each in engines_of(server.url))

    def num_restarts() -> int:
        return sum(each["restarts"] for each in engines_of(server.url))

    wire.wait_until(lambda: has_stayed_dead() or num_restarts() > 1)
    assert has_stayed_dead() and num_restarts() == 1
    assert wire.ask(server.url, "GET", "/health").status == 200
