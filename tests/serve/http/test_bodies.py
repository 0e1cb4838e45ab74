from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
import wire
from serving import Server, Start

from atom.config.load import load
from atom.errors import RequestError
from atom.serve.http import bodies
from atom.serve.http.bodies import check_size, is_json

LIMITS = replace(load([]).advanced, max_values=20, max_items=10)


@pytest.fixture(params=[2, 3, 7, 1 << 18])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "CHUNK", request.param)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
    "value",
    [
        {"a": "," * 100 + "[" * 100 + "{" * 100},
        {"a": 'say "' * 30},
        {"a": '\\"' * 30, "b": "\\", "c": '",[{' * 20},
        {"a": "\\\\" * 31, "b": '"'},
        {"a": list(range(20))},
        [[], [], [], [], [], [], [], [], []],
        {str(number): {} for number in range(4)},
    ],
)
def test_what_stands_in_a_text_does_not_count(value: Any):
    check_size(json.dumps(value).encode(), LIMITS)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a": list(range(21))}, "max_values"),
        ([[]] * 10, "max_items"),
        ({str(number): "" for number in range(10)}, "max_items"),
        ({str(number): {} for number in range(6)}, "max_items"),
        (["\\"] * 11, "max_items"),
        (['"'] * 11, "max_items"),
        (['\\"'] * 11, "max_items"),
    ],
)
def test_more_than_the_limits_is_refused_by_their_names(value: Any, name: str):
    with pytest.raises(RequestError, match=rf"more than \d+ .*\(advanced\.{name}\)"):
        check_size(json.dumps(value).encode(), LIMITS)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/vnd.x+json", True),
        ("text/json", False),
        ("application/x-www-form-urlencoded", False),
        ("", False),
    ],
)
def test_a_body_is_json_where_its_content_type_is(kind: str, expected: bool):
    assert is_json(kind) is expected


@pytest.fixture(scope="module")
def narrow(start_server: Start) -> Server:
    return start_server("advanced.max_values=2000", "advanced.max_items=1000", stub={})


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": [7] * 3000}, "max_values"),
        ("/v1/completions", {"prompt": ["a"] * 1001}, "max_items"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 300}, "max_items"),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[]" * 1001}}],
                    }
                ]
            },
            "max_items",
        ),
        (
            "/v1/messages",
            {"model": "talker", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}] * 300},
            "max_items",
        ),
        ("/tokenize", {"prompt": "a" * 5000}, "max_values"),
        ("/detokenize", {"tokens": [97] * 3000}, "max_values"),
    ],
)
def test_every_route_refuses_more_than_the_limits(narrow: Server, path: str, body: dict[str, Any], name: str):
    answer = wire.ask(narrow.url, "POST", path, body)
    assert answer.status == 400 and f"(advanced.{name})" in answer.json["error"]["message"]


def test_a_compressed_body_is_refused(narrow: Server):
    packed = gzip.compress(json.dumps({"prompt": "Hello"}).encode())
    for coding, status in (("gzip", 415), ("identity", 400), ("", 400)):
        head = f"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Encoding: {coding}\r\n"
        answer = wire.exchange(narrow.url, f"{head}Content-Length: {len(packed)}\r\n\r\n".encode() + packed)
        assert answer.status == status
        error = answer.json["error"]
        assert error["type"] == "invalid_request_error"
        assert ("send it without Content-Encoding: gzip" in error["message"]) is (coding == "gzip")
    assert wire.ask(narrow.url, "POST", "/tokenize", {"prompt": "a"}, {"Content-Encoding": "identity"}).status == 200


def test_ids_are_decoded_and_more_than_a_context_holds_are_refused(narrow: Server, start_server: Start):
    tokens = wire.ask(narrow.url, "POST", "/tokenize", {"prompt": "ab" * 500}).json["tokens"]
    assert wire.ask(narrow.url, "POST", "/detokenize", {"tokens": tokens}).json == {"prompt": "ab" * 500}
    server = start_server("serve.http.max_total_tokens=999", stub={})
    refused = wire.ask(server.url, "POST", "/detokenize", {"tokens": tokens})
    assert refused.status == 400
    assert refused.json["error"]["message"] == "1000 tokens; this server takes 999 (max_total_tokens)"
