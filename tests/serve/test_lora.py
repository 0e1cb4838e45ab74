"""Adapters over HTTP: named as models, listed, loaded and dropped while the server runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adapters
import pytest
import serving
import tiny
import wire

PROMPT = tiny.prompt(11)
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folders(references: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: adapters.save(references("llama"), root / name, seed=seed) for seed, name in enumerate(("sql", "chat"))
    }


@pytest.fixture(scope="module")
def server(
    folders: dict[str, Path], checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    lines = ["ops: {key: secret, admin: true}", "app: {key: apps}"]
    lines += ["plain: {key: plains, models: [talker]}", "query: {key: queries, models: [sql, chat]}"]
    keys.write_text("\n".join(lines))
    started = serving.start(
        checkpoints("llama"), tmp_path_factory.mktemp("server"), f"serve.lora_modules={{sql: '{folders['sql']}'}}",
        "serve.allow_runtime_lora_updating=true", f"serve.http.api_keys=@{keys}", "serve.max_loras=2",
    )  # fmt: skip
    yield started.url
    started.process.kill()
    started.process.wait()


def complete(url: str, model: str) -> wire.Answer:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return wire.ask(url, "POST", "/v1/completions", body, KEY)


def names(url: str) -> list[tuple[str, str | None]]:
    return [(each["id"], each["parent"]) for each in wire.ask(url, "GET", "/v1/models", headers=KEY).json["data"]]


def test_a_request_names_its_adapter_as_the_model(server: str, folders: dict[str, Path], references: Any):
    model = references("llama")
    assert names(server) == [("talker", None), ("sql", "talker")]
    for name, reference in (("talker", model), ("sql", adapters.merge(model, folders["sql"]))):
        answer = complete(server, name)
        assert answer.status == 200 and answer.json["model"] == name
        tiny.assert_greedy({"token_ids": answer.json["choices"][0]["token_ids"]}, PROMPT, reference)


def test_a_key_may_use_only_the_models_that_it_is_given(server: str):
    def ask(key: str, model: str | None, path: str = "/v1/completions", **body: Any) -> wire.Answer:
        named = {} if model is None else {"model": model}
        return wire.ask(server, "POST", path, named | body, {"x-api-key": key})

    prompt = {"prompt": PROMPT, "max_tokens": 2}
    assert [ask("plains", name, **prompt).status for name in ("talker", "sql", "chat", None)] == [200, 404, 404, 200]
    assert [ask("queries", name, **prompt).status for name in ("talker", "sql", "chat", None)] == [404, 200, 404, 200]
    assert ask("queries", None, **prompt).json["model"] == "sql"
    refused = ask("plains", "sql", **prompt).json["error"]
    assert (refused["code"], refused["message"]) == (
        "model_not_found",
        "the model 'sql' is not served here (served: talker)",
    )
    for path, body in {
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/responses": {"input": "a"},
        "/v1/responses/input_tokens": {"input": "a"},
    }.items():
        assert ask("plains", "sql", path, **body).status == 404, path
    listed = wire.ask(server, "GET", "/v1/models", headers={"x-api-key": "plains"}).json["data"]
    assert [each["id"] for each in listed] == ["talker"]
    named = [
        wire.ask(server, "GET", f"/v1/models/{name}", headers={"x-api-key": "plains"}) for name in ("talker", "sql")
    ]
    assert [each.status for each in named] == [200, 404]


def test_an_adapter_is_loaded_and_dropped_by_an_operator(server: str, folders: dict[str, Path], references: Any):
    load = {"lora_name": "chat", "lora_path": str(folders["chat"])}
    assert complete(server, "chat").status == 404
    assert wire.ask(server, "POST", "/v1/load_lora_adapter", load).status == 401
    assert wire.ask(server, "POST", "/v1/load_lora_adapter", load, {"x-api-key": "apps"}).status == 403
    loaded = wire.ask(server, "POST", "/v1/load_lora_adapter", load, KEY)
    assert (loaded.status, loaded.body.decode()) == (200, "Success: LoRA adapter 'chat' added successfully.")
    assert ("chat", "talker") in names(server)
    answer = complete(server, "chat")
    merged = adapters.merge(references("llama"), folders["chat"])
    tiny.assert_greedy({"token_ids": answer.json["choices"][0]["token_ids"]}, PROMPT, merged)
    again = wire.ask(server, "POST", "/v1/load_lora_adapter", load, KEY)
    assert again.status == 400 and "the adapter chat is loaded already" in again.json["error"]["message"]
    third = wire.ask(server, "POST", "/v1/load_lora_adapter", {**load, "lora_name": "third"}, KEY)
    assert third.status == 400 and "serve.max_loras" in third.json["error"]["message"]
    dropped = wire.ask(server, "POST", "/v1/unload_lora_adapter", {"lora_name": "chat"}, KEY)
    assert (dropped.status, dropped.body.decode()) == (200, "Success: LoRA adapter 'chat' removed successfully.")
    assert complete(server, "chat").status == 404 and names(server) == [("talker", None), ("sql", "talker")]
    assert wire.ask(server, "POST", "/v1/unload_lora_adapter", {"lora_name": "chat"}, KEY).status == 404


@pytest.mark.parametrize("body, reason", [
    ({"lora_name": "talker", "lora_path": "/nowhere"}, "is the model's own name"),
    ({"lora_name": "new", "lora_path": "/nowhere"}, "/nowhere has no adapter_config.json"),
    ({"lora_name": "new"}, "lora_path"),
])  # fmt: skip
def test_what_cannot_be_loaded_is_a_fault_of_the_request(server: str, body: dict[str, str], reason: str):
    answer = wire.ask(server, "POST", "/v1/load_lora_adapter", body, KEY)
    assert answer.status in (400, 422) and reason in answer.json["error"]["message"]
    assert names(server) == [("talker", None), ("sql", "talker")]


def test_without_leave_there_are_no_such_routes(stub: serving.Server):
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert wire.ask(stub.url, "POST", path, {"lora_name": "sql", "lora_path": "/sql"}).status == 404
