"""Every field and route of vLLM 0.33 and ROCm/ATOM is taken, or refused with what to use instead."""

from __future__ import annotations

import ast
import json
import re
from functools import cache

import pytest
from fastapi.exceptions import RequestValidationError
from generated import check_block
from library_words import UNKNOWN_FIELD
from pydantic import BaseModel
from serve.http.test_middleware import all_routes
from serve.vllm_names import FIELDS, MODELS, ROCM_FIELDS, ROCM_ROUTES, ROUTES, STRUCTURED_OUTPUTS
from vllm_sources import sources, tree, version

from atom.config import AdvancedConfig, Config
from atom.config.schema_keys import keys
from atom.serve import vllm
from atom.serve.anthropic.schema import CountRequest, MessagesRequest
from atom.serve.app import instead_of
from atom.serve.http.bodies import read_body
from atom.serve.openai import schema
from atom.serve.openai.responses_schema import ResponsesRequest

OURS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": schema.ChatRequest,
    "/v1/completions": schema.CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/embeddings": schema.EmbeddingRequest,
    "/classify": schema.ClassifyRequest,
    "/pooling": schema.PoolingRequest,
    "/score": schema.ScoreRequest,
    "/rerank": schema.RerankRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
    "/v1/load_lora_adapter": schema.LoadAdapterRequest,
    "/v1/unload_lora_adapter": schema.UnloadAdapterRequest,
}


def message_of(model: type[BaseModel], field: str) -> str:
    """What is said of a field of a body, or of a field of a field; empty if nothing is wrong with it."""
    outer, _, inner = field.partition(".")
    try:
        read_body(json.dumps({outer: {inner: 1} if inner else 1}).encode(), "application/json", model, AdvancedConfig())
    except RequestValidationError as error:
        faults = {".".join(map(str, fault["loc"][1:])): str(fault["msg"]) for fault in error.errors()}
        return faults.get(field, "")
    return ""


def is_bare(model: type[BaseModel], field: str) -> bool:
    """Whether a field is refused as one that nobody has heard of: with no word more than a name that is like it."""
    return message_of(model, field).partition(" (did you mean")[0] == UNKNOWN_FIELD


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_of_vllm_is_taken_or_refused_with_what_works_instead(path: str):
    assert is_bare(OURS[path], "colour") and is_bare(OURS[path], "modell")
    assert [name for name in FIELDS[path].split() if is_bare(OURS[path], name)] == []


@pytest.mark.parametrize("path", ROCM_FIELDS)
def test_every_field_of_rocm_atom_is_taken_or_refused_with_what_works_instead(path: str):
    assert [name for name in ROCM_FIELDS[path].split() if is_bare(OURS[path], name)] == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_every_field_of_structured_outputs_is_taken_or_refused_with_what_works_instead(path: str):
    names = [f"structured_outputs.{name}" for name in (*STRUCTURED_OUTPUTS.split(), "colour")]
    assert [name for name in names if is_bare(OURS[path], name)] == ["structured_outputs.colour"]


@pytest.mark.parametrize(
    ("path", "field", "hint"),
    [
        ("/v1/completions", "prompt_embeds", "a prompt is a text or token ids; send prompt"),
        ("/v1/responses", "kv_transfer_params", "no KV leaves its engine; leave it out"),
        ("/v1/messages", "vllm_xargs", "there is no extension that reads it; leave it out"),
        ("/v1/embeddings", "chat_template", "a template is code, and comes from the server's command line: "
                                            "serve.http.chat_template"),
        ("/v1/chat/completions", "structured_outputs.disable_additional_properties",
         "write additionalProperties: false in the schema"),
    ],
)  # fmt: skip
def test_a_refused_field_says_what_to_use_instead(path: str, field: str, hint: str):
    assert message_of(OURS[path], field) == f"{UNKNOWN_FIELD}; {hint}"


@pytest.fixture(scope="module")
def served() -> set[str]:
    return {path for _, path in all_routes()}


def test_every_route_of_vllm_and_rocm_atom_is_served_or_refused_with_what_works_instead(served: set[str]):
    names = [*ROUTES.split(), *ROCM_ROUTES.split(), "/v1/colours"]
    left = [path for path in names if path not in served and instead_of(path) == "/docs lists the routes"]
    assert left == ["/v1/colours"]


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v2/embed", "write POST /v1/embeddings"),
        (
            "/v1/responses/resp_1/cancel",
            "serve.http.response_store_bytes=4GiB stores answers; or send the whole conversation as input",
        ),
        ("/v1/audio/transcriptions", "models read text and images here, and write text"),
        ("/tokenizer_info", "serve.http.enable_tokenizer_info_endpoint=true adds it"),
        ("/v1/v1/score", "write /v1/score: the base URL has /v1 once, and no slash after it"),
    ],
)
def test_a_refused_route_says_what_to_use_instead(path: str, hint: str):
    assert instead_of(path) == hint


def test_the_routes_and_fields_that_a_refusal_names_are_there(served: set[str]):
    texts = [*vllm.INSTEAD.values(), *vllm.ROUTES.values()]
    optional = {path for path, hint in vllm.ROUTES.items() if hint.endswith("adds it")}
    named = {path for text in texts for path in re.findall(r"(?<![\w.])/[\w/]+\b", text)}
    assert named <= served | optional and len(named) > 10
    assert {key for text in texts for key in re.findall(r"serve\.[\w.]*\w", text)} <= set(keys(Config))


def test_no_refused_route_is_served(served: set[str]):
    assert not (served - {"/v1/responses"}) & set(vllm.ROUTES)


def test_the_tables_of_refused_fields_and_routes_are_those_of_the_server(request: pytest.FixtureRequest):
    for title, table in (("fields", vllm.INSTEAD), ("routes", vllm.ROUTES)):
        lines = [f"| {title[:-1]} | instead |", "|---|---|"]
        for hint in dict.fromkeys(table.values()):
            names = ", ".join(f"`{name}`" for name, each in table.items() if each == hint)
            lines.append(f"| {names} | {hint} |")
        check_block("from-vllm.md", title, "\n".join(lines) + "\n", request)


def test_these_are_vllms_fields_and_routes():
    """Each has an answer; those of 0.33 are the lists."""
    calls = [call for module in modules() for call in ast.walk(module) if isinstance(call, ast.Call)]
    routes = {path for call in calls if (path := route_of(call))}
    assert len(routes) > 70 and {path for path in routes if instead_of(path).startswith("/docs")} <= {*ROUTES.split()}
    found = {path: {name for model in names.split() for name in fields_of(model)} for path, names in MODELS.items()}
    assert {name for path, names in found.items() for name in names if is_bare(OURS[path], name)} == set()
    if version().startswith("0.33."):
        assert {path: set(names.split()) for path, names in FIELDS.items()} == found
        assert routes == set(ROUTES.split())


def modules() -> list[ast.Module]:
    files = (sources() / "entrypoints").rglob("*.py")
    return [tree(str(path.relative_to(sources()))) for path in files]


def route_of(call: ast.Call) -> str | None:
    """The path of a route that a call adds."""
    adds = ("get", "post", "add_api_route", "websocket")
    first = call.args[0] if call.args else None
    if not (isinstance(call.func, ast.Attribute) and call.func.attr in adds and isinstance(first, ast.Constant)):
        return None
    return first.value if isinstance(first.value, str) and first.value.startswith("/") else None


@cache
def classes() -> dict[str, ast.ClassDef]:
    nodes = [node for module in modules() for node in ast.walk(module)]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def fields_of(name: str) -> set[str]:
    """The fields of a class of vLLM's entrypoints and of those that it inherits from."""
    node = classes().get(name)
    if node is None:
        return set()
    own = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        if not each.target.id.startswith("_") and "ClassVar" not in ast.unparse(each.annotation)
    }
    return own.union(*(fields_of(base.id) for base in node.bases if isinstance(base, ast.Name)))
