"""The page that documents the API."""

from __future__ import annotations

import re
import urllib.request
from html.parser import HTMLParser

import pytest
from serving import Server

from atom.serve.http.docs import kind_of


@pytest.fixture(scope="module")
def html(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/docs") as answer:
        assert "script-src 'none'" in answer.headers["content-security-policy"]
        text: str = answer.read().decode()
    return text


def test_every_route_stands_there_with_its_fields(html: str, server: Server):
    with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
        paths = re.findall(r'"(/[^"]*)":\s*\{"(?:get|post)"', answer.read().decode())
    assert {"/v1/chat/completions", "/v1/messages", "/health"} <= set(paths)
    for path in paths:
        assert f"<code>{path}</code>" in html
    for field in ("stream_options", "include_usage", "tool_choice", "prompt_logprobs", "stop_sequences"):
        assert re.search(rf'<th class="name" scope="row">{field}\b', html)


def test_models_of_the_same_name_stand_there_without_their_modules(html: str):
    captions = re.findall(r'<caption class="quiet">(.*?)</caption>', html)
    assert {"FunctionCall", "Message"} <= set(captions) and not [name for name in captions if "__" in name]
    assert '<td class="kind">FunctionCall</td>' in html and "atom__" not in html


def test_nothing_comes_from_elsewhere_and_no_script_runs(html: str):
    seen: list[tuple[str, str | None]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "img", "iframe")
            seen.extend(pair for pair in attrs if pair[0] in ("href", "src"))

    Reader().feed(html)
    assert seen == [("href", "openapi.json")]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}, "integer from 1"),
        ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "string, or list of string"),
        ({"$ref": "#/components/schemas/Tool"}, "Tool"),
        ({"$ref": "#/components/schemas/atom__serve__schema__Tool"}, "Tool"),
        ({"type": "number", "minimum": -2, "maximum": 2}, "number from -2 to 2"),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 1 << 31}, "integer from 0"),
        ({"enum": ["none", "auto"]}, "none | auto"),
        ({}, "anything"),
    ],
)
def test_a_type_in_words(schema: dict[str, object], words: str):
    assert kind_of(schema) == words
