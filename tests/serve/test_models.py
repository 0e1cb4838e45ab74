"""Several models behind one port: requests choose theirs and wake it up, and its faults are its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import serving
import tiny
import torch
import wire
from serving import Server

OPS, APP, SLOW = ({"x-api-key": f"{name}-key"} for name in ("ops", "app", "slow"))
EXITS = 5  # a prompt's first token has the stub end its process
IDLE = "serve.idle_sleep_seconds=1000"  # each is loaded by its first request, and then stays awake


def entries(talker: Path, *more: str, names: str = "ab") -> str:
    each = [f"checkpoint={talker} serve.http.served_model_name=[{name}] {' '.join(more)}" for name in names]
    return f"serve.models={each}"


def status_of(server: Server, headers: Any = None) -> dict[str, str]:
    data = wire.ask(server.url, "GET", "/v1/models", headers=headers).json["data"]
    return {each["id"]: each["status"]["value"] for each in data}


def complete(server: Server, headers: Any = None, **body: Any) -> wire.Answer:
    return wire.ask(server.url, "POST", "/v1/completions", {"prompt": [0], "max_tokens": 2, **body}, headers)


@pytest.fixture(scope="module")
def server(talker: Path, tmp_path_factory: Any) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("several")
    keys = folder / "keys.yaml"
    keys.write_text(
        "ops: {key: ops-key, admin: true}\napp: {key: app-key, models: [b]}\nslow: {key: slow-key, requests_per_second: 0.001}\n"
    )
    given = [entries(talker), IDLE, f"serve.http.api_keys=@{keys}", "serve.http.log=json"]
    with serving.started(talker, folder, *given, stub={}) as started:
        yield started


def test_a_request_wakes_the_model_that_it_names(server: Server):
    assert status_of(server, OPS) == {"a": "unloaded", "b": "unloaded"}
    assert wire.ask(server.url, "GET", "/health").json["models"] == {"unloaded": 2}
    assert wire.ask(server.url, "POST", "/reset_prefix_cache", headers=OPS).status == 200, "there is none"
    answers: list[wire.Answer] = []
    asking = [threading.Thread(target=lambda: answers.append(complete(server, OPS, model="b"))) for _ in range(3)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert [(each.status, each.json["model"]) for each in answers] == [(200, "b")] * 3
    assert status_of(server, OPS) == {"a": "unloaded", "b": "loaded"}
    assert len(serving.family(server)) == 1, "one engine was started for the three"
    usage = answers[0].json["usage"]
    assert 0.01 < usage["ttft_s"] <= usage["latency_s"], "the time to the first token has that of the start"


def test_without_a_name_it_is_the_first_that_the_key_may_use(server: Server):
    assert complete(server, APP).json["model"] == "b"
    assert complete(server, OPS).json["model"] == "a"
    assert complete(server, OPS, model="default").json["model"] == "a"


def test_a_model_that_is_not_served_or_not_to_this_key_is_not_found(server: Server):
    for headers, name, known in ((OPS, "c", "a, b"), (APP, "a", "b")):
        answer = complete(server, headers, model=name)
        assert answer.status == 404 and f"(served: {known})" in answer.json["error"]["message"]
    assert list(status_of(server, APP)) == ["b"]
    assert wire.ask(server.url, "GET", "/v1/models/a", headers=APP).status == 404
    assert wire.ask(server.url, "GET", "/v1/models/a", headers=OPS).json["id"] == "a"


def test_the_metrics_of_all_are_there_by_name(server: Server):
    for name in "ab":
        assert complete(server, OPS, model=name).status == 200
    text = wire.ask(server.url, "GET", "/metrics", headers=OPS).body.decode()
    for name in "ab":
        assert f'atom:request_success_total{{finished_reason="max_tokens",model_name="{name}"}} ' in text
        assert f'atom:engine_up{{model_name="{name}"}} 1.0' in text
    assert text.count("# TYPE atom:engine_up ") == text.count("# TYPE atom:prompt_tokens_total ") == 1


def test_an_operator_loads_and_unloads_a_model(server: Server):
    assert wire.ask(server.url, "POST", "/models/unload", {"model": "b"}, APP).status == 403
    for path, status in (("unload", "unloaded"), ("load", "loaded"), ("load", "loaded")):
        answer = wire.ask(server.url, "POST", f"/models/{path}", {"model": "b"}, OPS)
        assert answer.json == {"success": True, "model": "b"}
        assert status_of(server, OPS)["b"] == status
        text = wire.ask(server.url, "GET", "/metrics", headers=OPS).body.decode()
        assert ('atom:engine_up{model_name="b"}' in text) == (status == "loaded"), "an alert would call a human"
    assert wire.ask(server.url, "POST", "/models/load", {"model": "c"}, OPS).status == 404


def test_what_needs_only_a_tokenizer_wakes_nobody(server: Server):
    wire.ask(server.url, "POST", "/models/unload", {"model": "b"}, OPS)
    asked = {"model": "b", "messages": [{"role": "user", "content": "Hello"}]}
    for path, body in (("/tokenize", {"model": "b", "prompt": "Hi"}), ("/v1/messages/count_tokens", asked)):
        assert wire.ask(server.url, "POST", path, body, OPS).status == 200
    assert status_of(server, OPS)["b"] == "unloaded"


def test_a_body_that_is_refused_wakes_nobody(server: Server):
    wire.ask(server.url, "POST", "/models/unload", {"model": "b"}, OPS)
    assert complete(server, OPS, model="b", temperature="hot").status == 400
    assert wire.ask(server.url, "POST", "/rerank", {"model": "b", "query": "a", "documents": ["b"]}, OPS).status == 400
    assert status_of(server, OPS)["b"] == "unloaded"


def test_a_key_beyond_its_limits_wakes_nobody(server: Server):
    for name, status in (("a", 200), ("b", 429)):  # one request is within the limit
        wire.ask(server.url, "POST", "/models/unload", {"model": name}, OPS)
        assert complete(server, SLOW, model=name).status == status
    assert status_of(server, OPS)["b"] == "unloaded"
    text = wire.ask(server.url, "GET", "/metrics", headers=OPS).body.decode()
    assert 'atom:key_requests_total{key="slow"} 1.0' in text and 'atom:key_requests_open{key="slow"} 0.0' in text


def test_a_stream_keeps_its_model_awake_until_it_ends(server: Server):
    body = {"prompt": [0], "max_tokens": 60, "model": "a"}
    assert complete(server, OPS, model="a").status == 200
    with closing(wire.Stream(server.url, body, **OPS)) as stream:
        stream.read_events(1)
        unloading = threading.Thread(
            target=wire.ask, args=(server.url, "POST", "/models/unload", {"model": "a"}, OPS), daemon=True
        )
        unloading.start()
        rest = stream.read_events()
    unloading.join(wire.SECONDS)
    assert rest[-1] == "[DONE]" and sum(bool(each["choices"]) for each in rest[:-1]) >= 59
    assert status_of(server, OPS)["a"] == "unloaded"


def test_an_engine_that_dies_ends_its_own_requests_only(server: Server):
    for name in "ab":
        assert complete(server, OPS, model=name).status == 200
    body = {"prompt": [0], "max_tokens": 60, "model": "a"}
    with closing(wire.Stream(server.url, body, **OPS)) as stream:
        stream.read_events(1)
        assert complete(server, OPS, model="b", prompt=[EXITS]).status == 503
        wire.wait_until(lambda: status_of(server, OPS)["b"] == "unloaded")
        assert stream.read_events()[-1] == "[DONE]"
    assert wire.ask(server.url, "GET", "/health").status == 200
    assert complete(server, OPS, model="b").status == 200
    assert serving.log_entries(server, message="b is dead, and loaded again when it is asked for")


def test_ctrl_c_drains_all(talker: Path, tmp_path: Path):
    with serving.started(talker, tmp_path, entries(talker), IDLE, "serve.http.log=json", stub={}) as server:
        streams = [wire.Stream(server.url, {"prompt": [0], "max_tokens": 60, "model": name}) for name in "ab"]
        for each in streams:
            each.read_events(1)
        server.process.send_signal(signal.SIGINT)
        assert [each.read_events()[-1] for each in streams] == ["[DONE]"] * 2
        assert server.process.wait(wire.SECONDS) == 130
        assert not serving.log_entries(server, level="error")


def test_an_idle_model_is_unloaded_also_if_it_is_the_only_one(talker: Path, tmp_path: Path):
    with serving.started(talker, tmp_path, "serve.idle_sleep_seconds=0.2", stub={}) as server:
        assert complete(server, model="other").status == 404
        assert status_of(server) == {"talker": "unloaded"}
        assert complete(server).status == 200
        wire.wait_until(lambda: status_of(server) == {"talker": "unloaded"})
        wire.wait_until(lambda: not serving.family(server))
        assert wire.ask(server.url, "GET", "/health").json["state"] == "ready"


def test_a_spare_process_becomes_the_next_engine(talker: Path, tmp_path: Path):
    with serving.started(talker, tmp_path, entries(talker), IDLE, "serve.spare_engine=true", stub={}) as server:
        wire.wait_until(lambda: len(serving.family(server)) == 1)
        (spare,) = serving.family(server)
        assert complete(server, model="b").status == 200
        wire.wait_until(lambda: len(serving.family(server)) == 2)
        assert spare in serving.family(server), "it is the engine of b, and another one is spare"
        assert wire.ask(server.url, "POST", "/models/unload", {"model": "b"}).status == 200
        wire.wait_until(lambda: len(serving.family(server)) == 1)
        assert spare not in serving.family(server)
        server.process.send_signal(signal.SIGTERM)
        (spare,) = serving.family(server)
        assert server.process.wait(wire.SECONDS) == 0
        assert not Path(f"/proc/{spare}").exists()


def test_a_stream_that_waits_for_its_model_is_kept_alive(talker: Path, tmp_path: Path):
    given = [IDLE, "advanced.comment_seconds=0.2"]
    with serving.started(talker, tmp_path, *given, stub={"load_seconds": 0.8}) as server:
        with closing(wire.Stream(server.url, {"prompt": [0], "max_tokens": 2})) as stream:
            events = stream.read_events()
        assert stream.headers["content-type"].startswith("text/event-stream") and stream.headers["x-request-id"]
        silent = next(place for place, each in enumerate(events) if each)
        assert silent >= 2 and [bool(each["choices"]) for each in events[silent:-1]][:2] == [True, True]
        assert events[-1] == "[DONE]"


def test_if_the_model_cannot_be_loaded_meanwhile_the_stream_ends_with_an_error(talker: Path, tmp_path: Path):
    given = [IDLE, "advanced.comment_seconds=0.2", "serve.http.log=json"]
    with serving.started(talker, tmp_path, *given, stub={"load_seconds": 0.8, "no_memory": True}) as server:
        with closing(wire.Stream(server.url, {"prompt": [0], "max_tokens": 2})) as stream:
            *_, last = stream.read_events()
        assert "the KV pool needs 9 GiB" in last["error"]["message"] and last["error"]["code"] == "unavailable"
        answer = complete(server)
        assert answer.status == 503 and "the KV pool needs 9 GiB" in answer.json["error"]["message"]
        entry = serving.wait_for_entry(server, path="/v1/completions", status=200)
        assert entry["error"].startswith("talker cannot be loaded")


@pytest.mark.slow
def test_a_client_that_leaves_while_it_waits_is_forgotten(talker: Path, tmp_path: Path):
    given = ["serve.idle_sleep_seconds=0.2", "advanced.comment_seconds=0.1", "serve.http.log=json"]
    with serving.started(talker, tmp_path, *given, stub={"load_seconds": 0.8}) as server:
        for streams in (True, False):
            connection = wire.connect(server.url)
            body = {"prompt": [0], "max_tokens": 2, "stream": streams}
            connection.sendall(wire.request("POST", "/v1/completions", body))
            wire.wait_until(lambda: status_of(server)["talker"] == "loading")
            connection.close()
            wire.wait_until(lambda: status_of(server)["talker"] == "loaded")
            wire.wait_until(lambda: status_of(server)["talker"] == "unloaded")
        assert not serving.log_entries(server, level="error")


def test_a_fault_at_the_start_is_one_line(talker: Path, tmp_path: Path):
    server = serving.launch(talker, tmp_path, entries(talker), "serve.max_awake=1", stub={"no_memory": True})
    assert server.process.wait(wire.SECONDS) == 2
    (error,) = serving.log_entries(server, level="error")
    assert error["message"].startswith("CapacityError: a: the KV pool needs 9 GiB")


@pytest.mark.slow
def test_a_generator_another_and_an_embedding_model_take_turns(
    talker: Path, checkpoints: Callable[[str], Path], tmp_path: Path
):
    own = [
        f"checkpoint={talker} serve.http.served_model_name=[talker]",
        f"checkpoint={checkpoints('llama')} serve.http.served_model_name=[llama]",
        f"checkpoint={checkpoints('llama')} serve.http.served_model_name=[vectors] serve.pooler_config.pooling_type=LAST",
    ]
    given = [f"serve.models={own}", "serve.max_awake=2", "serve.idle_sleep_level=1", "serve.enable_sleep_mode=true"]
    prompt = tiny.prompt(11)
    reference = tiny.reference(checkpoints("llama"))
    with torch.inference_mode():
        hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0, -1]
    expected = torch.nn.functional.normalize(hidden, dim=0)
    with serving.started(talker, tmp_path, *given) as server:
        for _ in range(2):
            chat = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            assert wire.ask(server.url, "POST", "/v1/chat/completions", chat).json["model"] == "talker"
            answer = complete(server, model="llama", prompt=prompt, max_tokens=8, temperature=0, return_token_ids=True)
            tiny.assert_greedy(answer.json["choices"][0], prompt, reference)
            found = wire.ask(server.url, "POST", "/v1/embeddings", {"model": "vectors", "input": prompt}).json["data"]
            torch.testing.assert_close(torch.tensor(found[0]["embedding"]), expected, rtol=1e-4, atol=1e-5)
        assert sorted(status_of(server).values()) == ["loaded", "loaded", "sleeping"]
        (asleep,) = (name for name, value in status_of(server).items() if value == "sleeping")
        assert wire.ask(server.url, "POST", f"/wake_up?model={asleep}").json == {"is_sleeping": False}
        assert status_of(server)[asleep] == "loaded", "it falls asleep again when it is idle"
        assert sorted(status_of(server).values()) == ["loaded", "loaded", "sleeping"]
