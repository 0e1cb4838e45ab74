"""Whatever fits the OpenAPI schema, and whatever does not: no 5xx, no dropped connection, and then a real generation."""

from __future__ import annotations

from typing import Any

import asking
import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck
from schemathesis import GenerationMode
from serving import Server, Start

OPERATIONS = [
    "GET /",
    "GET /.well-known/http-message-signatures-directory",
    "GET /debug/mtp_stats",
    "GET /docs",
    "GET /get_world_size",
    "GET /health",
    "GET /is_paused",
    "GET /is_sleeping",
    "GET /load",
    "GET /metrics",
    "GET /ping",
    "GET /ready",
    "GET /server_info",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "GET /version",
    "GET /weight_info",
    "GET /weight_version",
    "POST /abort_requests",
    "POST /classify",
    "POST /detokenize",
    "POST /finish_weight_update",
    "POST /init_weight_transfer_engine",
    "POST /models/load",
    "POST /models/unload",
    "POST /pause",
    "POST /ping",
    "POST /pooling",
    "POST /rerank",
    "POST /reset_prefix_cache",
    "POST /resume",
    "POST /score",
    "POST /sleep",
    "POST /start_profile",
    "POST /start_weight_update",
    "POST /stop_profile",
    "POST /tokenize",
    "POST /update_weight_version",
    "POST /update_weights",
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/embeddings",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/rerank",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "POST /v1/score",
    "POST /v2/rerank",
    "POST /wake_up",
]
BODILESS = {"POST /pause", "POST /ping", "POST /reset_prefix_cache", "POST /resume", "POST /sleep", "POST /start_profile",
            "POST /start_weight_update", "POST /stop_profile", "POST /wake_up"}  # fmt: skip
ALIASES = {"POST /v1/rerank", "POST /v1/score", "POST /v2/rerank"}  # of routes that are tried
ELSEWHERE = {  # this server has no labels, /pooling is like embeddings, and others need what is loaded or begun
    "POST /classify", "POST /pooling", "POST /models/load", "POST /models/unload", "POST /finish_weight_update",
}  # fmt: skip
EXAMPLES = [8, pytest.param(200, marks=pytest.mark.slow)]
QUICK = hypothesis.settings(
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SAID = [{"role": "user", "content": "Hello"}]
LEAST: dict[str, dict[str, Any]] = {  # what is served, and with whatever FREE holds
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/messages": {"model": "talker", "messages": SAID, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "talker", "messages": SAID},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/embeddings": {"input": "Hello"},
    "/score": {"text_1": "Hello", "text_2": "there"},
    "/rerank": {"query": "Hello", "documents": ["there"]},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1]},
    "/abort_requests": {"request_ids": ["nobodys"]},
    "/update_weight_version": {"new_version": "7"},
    "/init_weight_transfer_engine": {"init_info": {}},
    "/update_weights": {"update_info": {"names": [], "dtype_names": [], "shapes": []}},
}
FREE = {  # fields whose values are good by themselves; of others, no schema says which go with which
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "stream", "user", "cache_salt", "add_special_tokens",
    "parallel_tool_calls",
}  # fmt: skip
SHORT = {"max_tokens", "max_completion_tokens", "max_output_tokens"}  # what is generated in a test need not be long


@pytest.fixture(scope="module")
def schema(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_all_operations_are_here(schema: Any):
    found = [result.ok() for result in schema.get_all_operations()]
    known = sorted(f"{operation.method.upper()} {operation.path}" for operation in found)
    assert known == OPERATIONS
    statuses = {status for operation in found for status in operation.definition.raw["responses"]}
    assert statuses == {"200", "4XX"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "name", [name for name in OPERATIONS if "POST" in name and name not in BODILESS | ALIASES | ELSEWHERE]
)
def test_no_body_brings_the_server_down(name: str, mode: GenerationMode, examples: int, schema: Any, server: Server):
    method, path = name.split()
    statuses = set()

    @hypothesis.settings(QUICK, max_examples=examples)
    @hypothesis.given(case=schema[path][method].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body |= dict.fromkeys(SHORT & case.body.keys(), 4)
            case.body |= dict.fromkeys({"model"} & case.body.keys(), "talker")
        answer = case.call(base_url=server.url, timeout=120)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]
        if mode is GenerationMode.POSITIVE:
            body = {key: value for key, value in case.body.items() if key in FREE} | LEAST[path]
            answer = asking.post(server, path, body)
            assert answer.status == 200, (body, answer.body)

    send()
    assert statuses
    asking.assert_generates(server)


ADMINISTRATIVE = ["GET /debug/mtp_stats", "GET /get_world_size", "GET /is_paused", "GET /server_info",
                  "GET /weight_info", "GET /weight_version", "POST /abort_requests", "POST /pause", "POST /reset_prefix_cache",
                  "POST /resume", "POST /sleep", "POST /update_weight_version", "POST /start_profile", "POST /stop_profile", "POST /v1/load_lora_adapter",
                  "POST /v1/unload_lora_adapter", "POST /wake_up"]  # fmt: skip


@pytest.fixture(scope="module")
def administered(start_server: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("app: {key: apps}\nops: {key: opss, admin: true}\n")
    return start_server(
        f"serve.http.api_keys=@{keys}", "serve.enable_lora=true", "serve.allow_runtime_lora_updating=true"
    )


# so nothing can be wrong
TAKES_NOTHING = ("GET /debug/mtp_stats", "POST /reset_prefix_cache", "POST /start_profile", "POST /stop_profile")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, GenerationMode.POSITIVE) for name in ADMINISTRATIVE]
    + [(name, GenerationMode.NEGATIVE) for name in ADMINISTRATIVE if name not in TAKES_NOTHING],
)
def test_nothing_that_is_sent_to_an_administrative_route_makes_up_for_a_key(
    name: str, mode: GenerationMode, administered: Server
):
    method, path = name.split()
    admin, app = {"x-api-key": "opss"}, {"x-api-key": "apps"}
    schema = schemathesis.openapi.from_url(f"{administered.url}/openapi.json", headers=admin)

    @hypothesis.settings(QUICK, max_examples=6)
    @hypothesis.given(case=schema[path][method].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        statuses = {key: case.call(base_url=administered.url, timeout=120, headers=headers).status_code
                for key, headers in (("nobody", {}), ("app", app), ("ops", admin))}  # fmt: skip
        assert (statuses["nobody"], statuses["app"]) == (401, 403)
        assert statuses["ops"] < 500 and statuses["ops"] not in (401, 403)

    send()
