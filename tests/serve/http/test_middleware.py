from __future__ import annotations

import base64
import hmac
import http.client
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import serving
import wire
from fastapi.routing import APIRoute
from serving import Server, Start
from starlette.routing import BaseRoute, Mount, Route

from atom.config.load import load
from atom.errors import ConfigError
from atom.serve.app import create_app
from atom.serve.auth.tenants import digest, read_keys
from atom.serve.context import Context
from atom.serve.engine.replicas import Replicas
from atom.serve.http import middleware
from atom.serve.http.middleware import Guard
from atom.serve.ops.metrics import Metrics

KEYS = ("first-key", "second-key")
PUBLIC_PATHS = ("/health", "/ping", "/.well-known/http-message-signatures-directory")


@pytest.fixture(scope="module")
def locked(start_server: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text("first-key\nsecond-key\n")
    return start_server(f"serve.http.api_keys=@{file}", "serve.http.cors=[https://a.example]", stub={})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def is_locked_out(answer: wire.Answer) -> bool:
    return answer.status == 401


def all_routes(*overrides: str) -> Iterator[tuple[str, str]]:
    """Every path of the app with every method that it has."""
    config = load(overrides)
    engines = Replicas(config)
    app = create_app(Context(config, engines, Metrics(engines)), read_keys(",".join(KEYS)))
    assert isinstance(app, Guard)

    def walk(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
        for route in routes:
            assert not isinstance(route, Mount)
            if isinstance(route, APIRoute | Route):
                yield from ((method, route.path) for method in sorted(route.methods or ()))
            else:
                yield from walk(getattr(route, "routes", None) or route.original_router.routes)  # type: ignore[attr-defined]

    yield from walk(app._app.routes)  # type: ignore[attr-defined]


def test_every_route_but_health_ping_and_our_public_key_needs_a_key(locked: Server):
    routes = list(all_routes())
    expected = {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/models", "/metrics", "/ready", "/version",
                "/v1/responses", "/v1/responses/input_tokens", "/v1/embeddings", "/score", "/v2/rerank", "/load", "/server_info", "/ping", "/tokenize", "/detokenize", "/start_profile", "/stop_profile", "/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/docs", "/openapi.json", "/"}  # fmt: skip
    assert expected <= {path for _, path in routes}
    for method, path in routes:
        without, wrong = (wire.ask(locked.url, method, path, headers=headers) for headers in ({}, bearer("first-kex")))
        if path in PUBLIC_PATHS:
            assert without.status == wrong.status == (404 if "well-known" in path else 200)  # it signs nothing
            continue
        assert is_locked_out(without) and is_locked_out(wrong), (method, path)
        opened = wire.ask(locked.url, method, path, headers=bearer("second-key"))
        assert opened.status != 401, (method, path)


ADMINISTRATIVE = {
    "/sleep", "/wake_up", "/reset_prefix_cache", "/start_profile", "/stop_profile", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/server_info", "/debug/mtp_stats", "/pause", "/resume", "/is_paused",
    "/abort_requests", "/update_weight_version", "/weight_info", "/weight_version",
    "/get_world_size", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
}  # fmt: skip
WITH_ADAPTERS = ("serve.enable_lora=true", "serve.allow_runtime_lora_updating=true")


@pytest.fixture(scope="module")
def administered(start_server: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text("app: {key: apps}\nclerk: {key: clerks, admin: false}\nops: {key: [opss, new-opss], admin: true}\n")
    options = (f"serve.http.api_keys=@{file}", "serve.http.root_path=/llm", *WITH_ADAPTERS)
    return start_server(*options, stub={})


def test_administrative_routes_need_the_key_of_an_administrator(administered: Server, locked: Server):
    routes = list(all_routes(*WITH_ADAPTERS))
    assert {path for _, path in routes} >= ADMINISTRATIVE
    for method, path in routes:
        statuses = {key: wire.ask(administered.url, method, path, headers=bearer(key)).status
                for key in ("nobodys", "apps", "clerks", "opss", "new-opss")}  # fmt: skip
        is_public = path in PUBLIC_PATHS
        assert (statuses["nobodys"] == 401) is not is_public, (method, path)
        for key in ("apps", "clerks"):
            assert (statuses[key] == 403) is (path in ADMINISTRATIVE), (method, path, key)
        assert not {statuses["opss"], statuses["new-opss"]} & {401, 403}, (method, path)
        if path in ADMINISTRATIVE:
            assert wire.ask(locked.url, method, path, headers=bearer("first-key")).status == 403, "a key without a name"


@pytest.mark.parametrize(
    "path",
    [
        "/llm/sleep",
        "/sleep?level=2",
        "/sleep#x",
        "/%73leep",
        "/llm/%73leep",
        "/sleep;x",
        "/sleep/",
        "//sleep",
        "/SLEEP",
    ],
)
def test_no_spelling_of_a_path_gets_round_that(administered: Server, path: str):
    answer = wire.ask(administered.url, "POST", path, headers=bearer("apps"))
    if answer.status == 307:
        answer = wire.ask(
            administered.url, "POST", answer.headers["location"].partition("test")[2], headers=bearer("apps")
        )
    assert answer.status in (403, 404)


def test_who_is_no_administrator_is_refused_and_the_log_says_why(administered: Server):
    headers = bearer("apps") | {"x-request-id": "of-app"}
    answer = wire.ask(administered.url, "POST", "/start_profile", headers=headers)
    assert answer.json["error"]["code"] == "admin_only"
    assert answer.json["error"]["message"] == (
        "/start_profile is for administrators, and the key app is not one of theirs: the server's file of keys "
        "(serve.http.api_keys=@FILE.yaml) says admin: true of those that may"
    )
    line = serving.wait_for_entry(administered, request_id="of-app")
    assert (line["key"], line["status"], line["error"]) == ("app", 403, answer.json["error"]["message"])


@pytest.mark.parametrize("asked", ["", "access-control-request-method: POST\r\n"])  # of a preflight, but for Origin
def test_no_spelling_of_a_path_or_a_host_opens_the_door(locked: Server, asked: str):
    lines = [
        "GET //health", "GET /health/", "GET /health/../v1/models", "GET /health%2f..%2fv1/models", "GET /Health",
        "GET /v1/models?/health", "GET /v1/models#/health", "GET /v1/models;/health", "GET /%76%31/models",
        "GET http://x/v1/models", "GET http://x/v1/models?http://x/health", "HEAD /v1/models", "OPTIONS /v1/models",
        "OPTIONS /nowhere", "OPTIONS /health/..", "BREW /v1/models", "GET /nowhere", "GET /health\\..\\v1/models", "GET /./v1/models",
    ]  # fmt: skip
    hosts = ["x", "x/health", "x/health?", "/health", "x/health#", "health"]
    for line, host in itertools.product(lines, hosts):
        head = f"{line} HTTP/1.1\r\nhost: {host}\r\n{asked}connection: close\r\n\r\n"
        answer = wire.exchange(locked.url, head.encode())
        assert answer.status in (400, 401), (line, host, answer)


@pytest.mark.parametrize("line", ["GET /health?x", "GET /%68ealth", "GET http://x/health"])
def test_health_is_open_however_it_is_spelt(locked: Server, line: str):
    answer = wire.exchange(locked.url, f"{line} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert (answer.status, answer.json["status"]) == (200, "ok")


def test_a_missing_key_is_an_error_in_openais_words(locked: Server):
    answer = wire.ask(locked.url, "GET", "/v1/models")
    assert answer.json == {
        "error": {
            "message": "an API key is missing: send Authorization: Bearer KEY",
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }
    assert answer.headers["www-authenticate"] == 'Basic realm="atom"'
    assert wire.ask(locked.url, "POST", "/v1/messages").json["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    "headers", [bearer("x"), {"x-api-key": "x"}, {"authorization": "Basic " + base64.b64encode(b"a:x").decode()}]
)
def test_a_wrong_key_is_called_invalid_in_both_dialects(locked: Server, headers: dict[str, str]):
    what = "the API key is invalid, this server has no such key: send"
    error = wire.ask(locked.url, "GET", "/v1/models", headers=headers).json["error"]
    assert (error["message"], error["code"]) == (f"{what} Authorization: Bearer KEY", "invalid_api_key")
    error = wire.ask(locked.url, "POST", "/v1/messages", headers=headers).json["error"]
    assert error == {"type": "authentication_error", "message": f"{what} x-api-key: KEY"}


def test_counts_of_other_keys_are_for_administrators(administered: Server):
    def names(key: str) -> set[str]:
        text = wire.ask(administered.url, "GET", "/metrics", headers=bearer(key)).body.decode()
        assert "atom:http_requests_total{" in text, "the rest is for all"
        return set(re.findall(r'key="(\w+)"', text))

    assert {key: names(key) for key in ("apps", "clerks", "opss")} == {
        "apps": {"app"},
        "clerks": {"clerk"},
        "opss": {"app", "clerk", "ops"},
    }


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer("first-key"), 200),
        (bearer("second-key"), 200),
        ({"authorization": "bearer  first-key "}, 200),
        ({"x-api-key": "first-key"}, 200),
        ({"authorization": "Basic " + base64.b64encode(b"anyone:first-key").decode()}, 200),
        (bearer("first-key,second-key"), 401),
        (bearer("first-ke"), 401),
        (bearer("first-keyy"), 401),
        (bearer(""), 401),
        ({"authorization": "first-key"}, 401),
        ({"authorization": "Basic first-key"}, 401),
        ({"authorization": "Digest first-key"}, 401),
        ({"x-api-key": "no", **bearer("first-key")}, 401),
        ({"x-api-key": "first-key", **bearer("first-key")}, 200),
        ({"x-api-key": "first-key", **bearer("second-key")}, 401),
        ({"x-api-key": "first-key", **bearer("no")}, 401),
        ({"x-api-key": "first-key", **bearer("")}, 200),
        ({"cookie": "key=first-key"}, 401),
    ],
)
def test_a_key_opens_the_door_in_three_ways(locked: Server, headers: dict[str, str], status: int):
    assert wire.ask(locked.url, "GET", "/v1/models", headers=headers).status == status


def test_two_keys_have_to_be_of_one_client(locked: Server, administered: Server):
    headers = {"x-api-key": "first-key", **bearer("second-key")}
    error = wire.ask(locked.url, "GET", "/v1/models", headers=headers).json["error"]
    what = "the API keys of Authorization and x-api-key are not of one client: send Authorization: Bearer KEY"
    assert (error["message"], error["code"]) == (what, "invalid_api_key")
    both = {"x-api-key": "opss", **bearer("new-opss")}
    assert wire.ask(administered.url, "GET", "/v1/models", headers=both).status == 200, "both are of ops"
    for one, other in (("opss", "apps"), ("apps", "opss")):
        both = {"x-api-key": one, **bearer(other)}
        assert wire.ask(administered.url, "POST", "/reset_prefix_cache", headers=both).status == 401


def test_a_preflight_gets_cors_headers_and_nothing_else(locked: Server):
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    answer = wire.ask(locked.url, "OPTIONS", "/v1/chat/completions", headers=asked)
    assert answer.status == 200 and answer.headers["access-control-allow-origin"] == "https://a.example"
    assert "choices" not in answer.body.decode()
    other = wire.ask(locked.url, "OPTIONS", "/v1/chat/completions", headers=asked | {"origin": "https://b.example"})
    assert other.status == 400 and "access-control-allow-origin" not in other.headers
    # the answer itself bears the headers too, a refusal included, and still needs the key
    for key, status in (("first-key", 200), ("no", 401)):
        headers = {"origin": "https://a.example"} | bearer(key)
        answer = wire.ask(locked.url, "GET", "/v1/models", headers=headers)
        assert answer.status == status and answer.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize(
    "path", ["/start_profile", "/stop_profile", "/sleep", "/v1/chat/completions", "/v1/messages", "/tokenize"]
)
@pytest.mark.parametrize(
    "page",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://test:3000"},
        {"sec-fetch-site": "cross-site", "origin": "null"},
        {"sec-fetch-site": "cross-site", "origin": "https://b.example"},
        {"origin": "http://b.example"},  # browsers do not send the site to servers without TLS
        {"origin": "null"},
    ],
    ids=str,
)
def test_a_page_of_another_origin_cannot_post_with_the_key_that_a_browser_keeps(
    administered: Server, path: str, page: dict[str, str]
):
    key = {"authorization": "Basic " + base64.b64encode(b":opss").decode(), "content-type": "text/plain"}
    answer = wire.ask(administered.url, "POST", path, b"", headers=key | page)
    assert answer.status == 403
    assert "may not post here; the server's serve.http.cors names" in answer.json["error"]["message"]
    assert wire.ask(administered.url, "GET", "/v1/models", headers=key | page).status == 200, (
        "what changes nothing is asked"
    )
    for method in ("PUT", "PATCH", "DELETE"):
        assert wire.ask(administered.url, method, path, headers=key | page).status == 403, method


@pytest.mark.parametrize(
    "page",
    [
        {},
        {"sec-fetch-site": "same-origin", "origin": "https://a.proxy"},
        {"sec-fetch-site": "none"},
        {"origin": "http://test"},  # what wire says that it asked for
        {"sec-fetch-site": "cross-site", "origin": "https://a.example"},
        {"origin": "https://a.example"},
    ],
    ids=str,
)
def test_our_page_and_those_that_cors_names_can_post(locked: Server, page: dict[str, str]):
    body = {"prompt": [0], "max_tokens": 1}
    assert wire.ask(locked.url, "POST", "/v1/completions", body, headers=bearer("first-key") | page).status == 200


def test_where_cors_names_all_origins_all_can_post():
    guard = Guard(None, (), Metrics(Replicas(load([]))), ["*"])  # type: ignore[arg-type]
    assert guard.is_allowed_origin({b"origin": b"https://b.example", b"sec-fetch-site": b"cross-site"})


def test_keys_are_compared_as_digests_all_of_them_whichever_is_right(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        seen.append((len(left), len(right)))
        return real(left, right)

    monkeypatch.setattr(middleware.hmac, "compare_digest", compare)
    config = load([])
    guard = Guard(None, read_keys(",".join(KEYS)), Metrics(Replicas(config)))  # type: ignore[arg-type]
    for given, name in ((b"first-key", "key1"), (b"second-key", "key2"), (b"x" * 1000, None), (b"", None)):
        seen.clear()
        holder = guard.find_key_holder({b"x-api-key": given, b"authorization": b"Bearer " + given})
        assert (holder and holder.name) == name
        assert seen == [(32, 32), (32, 32)]  # bytes of SHA-256


def test_keys_come_from_a_list_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "keys"
    file.write_text("# of the team\na\n\n b \r\n  # c d\n#e\nf#g\n")
    assert read_keys(None) == []
    assert [(each.name, *each.digests) for each in read_keys("a, b,,")] == [
        ("key1", digest(b"a")),
        ("key2", digest(b"b")),
    ]
    assert [each.digests for each in read_keys(f"@{file}")] == [[digest(key)] for key in (b"a", b"b", b"f#g")]
    monkeypatch.setenv("ATOM_API_KEYS", "from-outside")
    assert load([]).serve.http.api_keys == "from-outside"
    monkeypatch.setenv("VLLM_API_KEY", "from-vllm")
    assert load([]).serve.http.api_keys == "from-outside"
    monkeypatch.delenv("ATOM_API_KEYS")
    assert load([]).serve.http.api_keys == "from-vllm"
    monkeypatch.delenv("VLLM_API_KEY")
    assert load([]).serve.http.api_keys is None


@pytest.mark.parametrize("line", ["b of Bob", "b\tc", "b # Bob's"])
def test_every_word_of_a_file_is_not_a_key(tmp_path: Path, line: str):
    file = tmp_path / "keys"
    file.write_text(f"# ours\na\n{line}\n")
    with pytest.raises(ConfigError, match="line 3 has more than one word; write one key a line"):
        read_keys(f"@{file}")


@pytest.mark.parametrize("content", ["", "\n \n", "# a\n"])
def test_keys_that_are_none_are_an_error_and_not_an_open_door(tmp_path: Path, content: str):
    file = tmp_path / "keys"
    file.write_text(content)
    for keys in (f"@{file}", "", "\n \n", ","):
        with pytest.raises(ConfigError, match="holds no key"):
            read_keys(keys)
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(f"@{file}.missing")


def test_a_request_id_is_taken_and_returned_or_made(locked: Server):
    def id_of(given: str | None, path: str = "/health") -> dict[str, str]:
        headers: dict[str, Any] = {} if given is None else {"x-request-id": given}
        return wire.ask(locked.url, "GET", path, headers=headers).headers

    assert id_of("mine-1")["x-request-id"] == "mine-1"
    assert id_of("mine-2", "/v1/models")["x-request-id"] == "mine-2"  # a refusal
    assert id_of("mine-3", "/v1/messages")["request-id"] == "mine-3"  # as Anthropic's clients want it
    made = {id_of(given)["x-request-id"] for given in (None, "with space", "x" * 129, "ü")}
    assert len(made) == 4 and all(each.startswith("req-") and len(each) == 36 for each in made)


def head(url: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes, str | None]:
    """The status of an answer to HEAD, its body, and the length that a body would have."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("HEAD", path, headers=headers or {})
    answer = connection.getresponse()
    found = answer.status, answer.read(), answer.getheader("content-length")
    connection.request("HEAD", "/ping")  # the connection goes on
    assert connection.getresponse().status == 200
    connection.close()
    return found


def test_a_probe_by_head_gets_the_head_of_what_get_answers(locked: Server):
    for path in ("/health", "/ping", "/ready", "/version", "/v1/models", "/v1/models/", "/load", "/"):
        body = wire.ask(locked.url, "GET", path, headers=bearer("first-key")).body
        assert head(locked.url, path, bearer("first-key")) == (200, b"", str(len(body))), path
    assert head(locked.url, "/metrics", bearer("first-key"))[:2] == (200, b"")
    assert head(locked.url, "/health")[:2] == (200, b"")
    assert head(locked.url, "/v1/models")[:2] == (401, b"")
    assert head(locked.url, "/nothing", bearer("first-key"))[:2] == (404, b"")
    assert head(locked.url, "/v1/messages", bearer("first-key"))[:2] == (405, b"")


def test_a_probe_by_head_is_counted_and_logged_as_one(locked: Server):
    counted = 'atom:http_requests_total{path="/version",status="200"}'

    def count() -> float:
        lines = wire.ask(locked.url, "GET", "/metrics", headers=bearer("first-key")).body.decode().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(counted)), 0.0)

    before = count()
    head(locked.url, "/version", bearer("first-key") | {"x-request-id": "by-head"})
    wire.wait_until(lambda: count() == before + 1)
    line = serving.wait_for_entry(locked, request_id="by-head")
    assert (line["method"], line["path"]) == ("HEAD", "/version")
