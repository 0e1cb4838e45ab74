"""Names of models: the list, one of them, and names that mean the only one there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scripted
import serving
import wire
from scripted import Said
from serving import Server

from atom.config.load import load
from atom.serve.auth.tenants import Tenant, read_keys
from atom.serve.context import Context

NAMES = ["default", "dummy", "local-model", "tgi"]
ASKED = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": ASKED, "max_tokens": 8},
}


@pytest.fixture(scope="module")
def config(talker: Path) -> Any:
    return load([f"checkpoint={talker}", "job=serve", "serve.http.served_model_name=[talker, other]"])


def ask(config: Any, path: str, model: str, *tenants: Tenant, before: Any = lambda _: None) -> tuple[int, str | None]:
    """The status, and the model that the answer names."""
    headers = {"x-api-key": "secret"} if tenants else None
    body = {"model": model, **BODIES[path]}
    response, _ = scripted.post(config, Said(["Hi"]), body, path, tenants=tenants, headers=headers, before=before)
    return response.status_code, response.json().get("model")


@pytest.mark.parametrize(("path", "name"), zip(BODIES, NAMES, strict=True))
def test_a_name_of_no_model_means_the_only_one_there_is(config: Any, path: str, name: str):
    assert ask(config, path, name) == (200, "talker")
    assert ask(config, path, "other") == (200, "other")
    assert ask(config, path, "gpt-4o")[0] == 404


def test_with_adapters_it_means_none(config: Any):
    def load_adapter(context: Context) -> None:
        context.engines.adapters["sql"] = "/adapters/sql"

    assert ask(config, "/v1/chat/completions", "tgi", before=load_adapter)[0] == 404
    assert ask(config, "/v1/chat/completions", "talker", before=load_adapter)[0] == 200


def test_a_key_that_may_not_use_the_model_gets_nothing_by_it(config: Any, tmp_path: Path):
    for models, status in (("[sql]", 404), ("[other]", 200)):
        keys = tmp_path / "keys.yaml"
        keys.write_text(f"a: {{key: secret, models: {models}}}")
        (tenant,) = read_keys(f"@{keys}")
        found = ask(config, "/v1/chat/completions", "tgi", tenant)
        assert found == (status, "other" if status == 200 else None)


def test_a_model_may_have_such_a_name_itself(talker: Path):
    config = load([f"checkpoint={talker}", "job=serve", "serve.http.served_model_name=[talker, tgi]"])
    assert ask(config, "/v1/chat/completions", "tgi") == (200, "tgi")
    assert ask(config, "/v1/chat/completions", "dummy") == (200, "talker")


def test_the_list_may_end_with_a_slash(stub: Server):
    listed = wire.ask(stub.url, "GET", "/v1/models")
    assert listed.status == 200 and wire.ask(stub.url, "GET", "/v1/models/").json == listed.json
    assert wire.ask(stub.url, "GET", "/v1/models/dummy").json == listed.json["data"][0]
    assert wire.ask(stub.url, "GET", "/v1/models/nobody").status == 404


def test_tokens_are_those_of_the_only_model(server: serving.Server):
    asked: dict[str, Any] = {"prompt": "Hello"}
    named = wire.ask(server.url, "POST", "/tokenize", asked | {"model": "dummy"})
    assert named.status == 200 and named.json == wire.ask(server.url, "POST", "/tokenize", asked).json
