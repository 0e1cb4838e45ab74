"""Signed requests and answers, limits and turns of keys, over real servers. The other side is http-message-signatures."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import serving
import wire
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from http_message_signatures import (
    HTTPMessageSigner,
    HTTPMessageVerifier,
    InvalidSignature,
    MappingKeyResolver,
    algorithms,
)
from serving import Server, Start

ALICE = Ed25519PrivateKey.from_private_bytes(b"alice" * 6 + b"!!")
SERVER_KEY = Ed25519PrivateKey.from_private_bytes(b"serve" * 6 + b"!!")
BODY = {"prompt": [0], "max_tokens": 2}
DAVE = {"x-api-key": "daves-old"}
COVERED = ("@method", "@authority", "@path", "@query", "content-digest")


@dataclass
class Request:
    """A request as the library takes it."""

    method: str
    url: str
    headers: dict[str, str]


@dataclass
class Response:
    status_code: int
    headers: dict[str, str]
    request: Request


@dataclass
class Signed:
    """A request signed by the library."""

    body: Any = None
    path: str = "/v1/completions"
    method: str = "POST"
    covered: tuple[str, ...] = COVERED
    key: Ed25519PrivateKey = ALICE
    more: dict[str, str] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        data = b"" if self.body is None else json.dumps(self.body).encode()
        message = Request(self.method, f"http://test{self.path}", {"host": "test", **self.more})
        if "content-digest" in self.covered:
            message.headers["content-digest"] = f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"
        signer = HTTPMessageSigner(
            signature_algorithm=algorithms.ED25519,
            key_resolver=MappingKeyResolver(public_keys={}, private_keys={"alice": self.key}),
        )
        signer.sign(
            message,
            key_id="alice",
            nonce=uuid.uuid4().hex,
            covered_component_ids=self.covered,
            use_existing_digest="content-digest" in self.covered,
        )
        return {name.lower(): value for name, value in message.headers.items()}

    def ask(self, server: Server, headers: dict[str, str] | None = None) -> wire.Answer:
        return wire.ask(server.url, self.method, self.path, self.body, headers or self.headers())


def ssh(key: Ed25519PublicKey) -> str:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


@pytest.fixture(scope="module")
def doors(start_server: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Alice signs; bob and carol have API keys, and limits."""
    folder = tmp_path_factory.mktemp("doors")
    (folder / "clients.pub").write_text(f"{ssh(ALICE.public_key())} alice\n")
    (folder / "keys.yaml").write_text(
        "bob: {key: bobs-key, requests_per_second: 0.2, max_concurrent: 1}\n"
        "carol: {key: carols-key, tokens_per_second: 10}\n"
        "dave: {key: [daves-old, daves-new], admin: true}\n"
    )
    pem = SERVER_KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "server.key").write_bytes(pem)
    started = start_server(
        f"serve.http.public_keys=@{folder}/clients.pub",
        f"serve.http.api_keys=@{folder}/keys.yaml",
        f"serve.http.signing_key=@{folder}/server.key",
        "serve.http.signature_seconds=60",
        stub={"step_seconds": 0.005},
    )
    time.sleep(1.0)  # what is signed in the second of the start does not count
    return started


def test_a_signed_request_needs_no_key_and_counts_once(doors: Server):
    signed = Signed(BODY)
    headers = signed.headers()
    assert signed.ask(doors, headers).status == 200
    again = signed.ask(doors, headers)
    assert again.status == 401 and again.json["error"]["code"] == "invalid_signature"
    assert (
        again.json["error"]["message"]
        == "the signature does not count: its nonce has been used before; sign each request anew"
    )
    assert '"@method" "@authority" "@path" "@query" "content-digest"' in again.headers["accept-signature"]
    assert Signed(method="GET", path="/v1/models?x=1", covered=COVERED[:-1]).ask(doors).status == 200
    assert Signed(BODY, covered=("@method", "@target-uri", "content-digest")).ask(doors).status == 200


def test_the_example_of_the_docs_signs_a_request(
    doors: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = (Path(__file__).parents[3] / "docs/serving.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = code.replace("http://localhost:8000", doors.url).replace('"Hello"', "[0]")  # this model has no tokenizer
    key = ALICE.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "id_ed25519").write_bytes(key)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/serving.md", "exec"), {})
    assert "'object': 'text_completion'" in capsys.readouterr().out


def test_a_key_and_a_signature_have_to_be_of_one_client(doors: Server):
    for other in (
        DAVE,
        {"authorization": "Bearer bobs-key"},
        {"x-api-key": "none", "authorization": "Bearer bobs-key"},
    ):
        answer = Signed(BODY, more=other).ask(doors)
        assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_signature"), other
        message = "the signature does not count: the API key is of another client; send the key or the signature"
        assert answer.json["error"]["message"] == message
    headers = Signed(BODY).headers() | DAVE | {"signature": "pyhms=:AAAA:"}
    assert wire.ask(doors.url, "POST", "/v1/completions", BODY, headers).status == 401, "a signature has to count"
    answer = Signed(BODY, more={"authorization": "Bearer none", "x-request-id": "of-alice-too"}).ask(doors)
    assert answer.status == 200, "of nobody, as SDKs send it"
    assert serving.wait_for_entry(doors, request_id="of-alice-too")["key"] == "alice"


def test_one_tenant_may_send_its_key_and_a_signature(start_server: Start, tmp_path: Path):
    (tmp_path / "keys.yaml").write_text(f'alice: {{key: alices, public_key: "{ssh(ALICE.public_key())}"}}\n')
    server = start_server(f"serve.http.api_keys=@{tmp_path}/keys.yaml", stub={})
    time.sleep(1.0)  # what is signed in the second of the start does not count
    assert Signed(BODY, more={"x-api-key": "alices"}).ask(server).status == 200


def test_the_key_of_the_log_and_of_metrics_is_a_name(doors: Server):
    before = wire.metrics(doors.url, DAVE)
    assert Signed(BODY).ask(doors, Signed(BODY).headers() | {"x-request-id": "of-alice"}).status == 200
    assert serving.wait_for_entry(doors, request_id="of-alice")["key"] == "alice"
    metrics = wire.metrics(doors.url, DAVE)
    counts = (f'atom:key_{what}_total{{key="alice"}}' for what in ("requests", "prompt_tokens", "generation_tokens"))
    assert [metrics[name] - before.get(name, 0) for name in counts] == [1, 1, 2]
    assert metrics['atom:key_requests_open{key="alice"}'] == 0
    said = (
        wire.ask(doors.url, "GET", "/metrics", headers={"x-api-key": "daves-new"}).body.decode() + doors.log.read_text()
    )
    assert "daves" not in said and "bobs-key" not in said


def test_what_was_changed_on_the_way_is_refused(doors: Server):
    before = wire.metrics(doors.url, DAVE)["atom:prompt_tokens_total"]
    signed = Signed(BODY)

    def reason(**changed: Any) -> str:
        headers = signed.headers() | changed.pop("headers", {})
        method, path, body = (changed.pop(each, getattr(signed, each)) for each in ("method", "path", "body"))
        answer = wire.ask(doors.url, method, path, body, headers)
        assert answer.status == 401 and not changed
        message: str = answer.json["error"]["message"]
        return message.removeprefix("the signature does not count: ")

    other = "it does not match the request, or is of another key"
    assert reason(body=BODY | {"max_tokens": 9}) == "content-digest is not that of the body"
    assert reason(path="/v1/chat/completions") == reason(method="PUT") == other
    assert reason(path="/v1/completions?a=b") == other
    assert reason(headers={"host": "elsewhere"}) == other
    assert reason(headers={"content-digest": "sha-256=:AAAA:"}) == other
    assert reason(headers={"signature": "pyhms=:AAAA:"}) == other
    assert reason(headers={"signature": ""}) == "signature has no bytes for pyhms"
    assert (
        reason(headers={"signature-input": "nonsense("}) == "signature-input is not a dictionary of structured fields"
    )
    signed = Signed(BODY, covered=COVERED[:-1])
    assert reason() == "it does not cover content-digest, and there is a body"
    signed = Signed(BODY, key=Ed25519PrivateKey.generate())
    assert reason() == other
    assert wire.metrics(doors.url, DAVE)["atom:prompt_tokens_total"] == before


def test_a_client_of_openai_can_sign(doors: Server):
    import httpx

    class Auth(httpx.Auth):
        requires_request_body = True

        def auth_flow(self, request: httpx.Request) -> Any:
            signed = Request(request.method, str(request.url), {"host": request.headers["host"]})
            signer = HTTPMessageSigner(
                signature_algorithm=algorithms.ED25519,
                key_resolver=MappingKeyResolver(public_keys={}, private_keys={"alice": ALICE}),
            )
            signer.sign(
                signed, key_id="alice", nonce=uuid.uuid4().hex, covered_component_ids=COVERED[:4], body=request.content
            )
            request.headers.update({name: value for name, value in signed.headers.items() if name != "host"})
            yield request

    with httpx.Client(auth=Auth()) as http:
        client = openai.OpenAI(base_url=f"{doors.url}/v1", api_key="none", http_client=http)
        streamed = client.chat.completions.create(
            model="talker", messages=[{"role": "user", "content": "x"}], max_tokens=3, stream=True
        )
        assert "".join(each.choices[0].delta.content or "" for each in streamed if each.choices) == "word " * 3


def test_limits_of_a_key_are_429_with_the_limit_and_when_to_come_back(doors: Server):
    bob, carol = {"authorization": "Bearer bobs-key"}, {"x-api-key": "carols-key"}
    first = wire.Stream(doors.url, BODY | {"max_tokens": 400}, **bob)
    first.read_events(1)
    refused = wire.ask(doors.url, "POST", "/v1/completions", BODY, bob)
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert refused.json["error"] == {
        "message": "bob may have no more than 1 at a time (max_concurrent); try again in 1 s",
        "type": "rate_limit_error", "param": None, "code": "max_concurrent",
    }  # fmt: skip
    first.close()
    wire.wait_until(lambda: wire.metrics(doors.url, DAVE)['atom:key_requests_open{key="bob"}'] == 0)
    refused = wire.ask(doors.url, "POST", "/v1/messages", {"model": "talker", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}, bob)  # fmt: skip
    assert refused.status == 429 and 3 <= int(refused.headers["retry-after"]) <= 5
    assert refused.json["error"]["type"] == "rate_limit_error"
    assert "bob may send 0.2 requests a second (requests_per_second)" in refused.json["error"]["message"]
    assert wire.ask(doors.url, "POST", "/v1/completions", {"prompt": [0] * 40, "max_tokens": 20}, carol).status == 200
    refused = wire.ask(doors.url, "POST", "/v1/completions", BODY, carol)
    assert refused.status == 429 and refused.json["error"]["code"] == "tokens_per_second"
    assert 4 <= int(refused.headers["retry-after"]) <= 6, "51 tokens at 10 a second"
    assert Signed(BODY).ask(doors).status == 200, "others are let in"
    assert wire.ask(doors.url, "GET", "/v1/models", headers=bob).status == 200, "limits are of requests to the model"
    metrics = wire.metrics(doors.url, DAVE)
    assert metrics['atom:key_refused_total{key="bob",limit="max_concurrent"}'] == 1
    assert metrics['atom:key_refused_total{key="carol",limit="tokens_per_second"}'] == 1


def public_key(server: Server) -> tuple[str, Ed25519PublicKey]:
    answer = wire.ask(server.url, "GET", "/.well-known/http-message-signatures-directory")
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/http-message-signatures-directory+json"
    (key,) = answer.json["keys"]
    assert (key["kty"], key["crv"], key["alg"], key["use"]) == ("OKP", "Ed25519", "EdDSA", "sig")
    return key["kid"], Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(key["x"] + "="))


def test_an_answer_is_signed_where_that_is_asked_for_bound_to_its_request(doors: Server):
    name, key = public_key(doors)
    assert key.public_bytes_raw() == SERVER_KEY.public_key().public_bytes_raw()
    signed = Signed(BODY)
    asked = 'sig=("@status" "content-type" "content-digest" "x-request-id" "@method";req "@path";req "content-digest";req "signature";req;key="pyhms");created;nonce="n-1";tag="app"'
    headers = signed.headers() | {"accept-signature": asked, "x-request-id": "mine"}
    before = int(time.time())
    answer = signed.ask(doors, headers)
    assert answer.status == 200
    verifier = HTTPMessageVerifier(
        signature_algorithm=algorithms.ED25519,
        key_resolver=MappingKeyResolver(public_keys={name: key}, private_keys={}),
    )
    request = Request("POST", "http://test/v1/completions", headers)
    response = Response(answer.status, answer.headers, request)

    def verify() -> Any:
        (result,) = verifier.verify(response, expect_tag="app", body=answer.body)
        return result

    result = verify()
    assert result.parameters["nonce"] == "n-1" and result.parameters["keyid"] == name
    assert before <= result.parameters["created"] <= time.time()
    assert set(result.covered_components) - {'"@signature-params"'} == {
        '"@status"', '"content-type"', '"content-digest"', '"x-request-id"', '"@method";req', '"@path";req', '"content-digest";req', '"signature";req;key="pyhms"',
    }  # fmt: skip
    for changed in ({"status_code": 201}, {"headers": answer.headers | {"x-request-id": "other"}},
                    {"request": Request("POST", "http://test/v1/chat", headers)}):  # fmt: skip
        kept = response.status_code, response.headers, response.request
        for each, value in changed.items():
            setattr(response, each, value)
        with pytest.raises(InvalidSignature):
            verify()
        response.status_code, response.headers, response.request = kept
    assert "signature" not in wire.ask(doors.url, "POST", "/v1/completions", BODY, DAVE).headers, "it is asked for"


def test_a_refusal_is_signed_too_and_a_list_may_be_empty(doors: Server):
    name, key = public_key(doors)
    answer = wire.ask(doors.url, "POST", "/v1/completions", {"prompt": []}, DAVE | {"accept-signature": "s=()"})
    assert answer.status == 400
    covered = answer.headers["signature-input"].removeprefix("s=")
    assert re.fullmatch(rf'\("@status" "content-digest"\);created=\d+;keyid="{name}"', covered)
    digest = base64.b64encode(hashlib.sha256(answer.body).digest()).decode()
    base = f'"@status": 400\n"content-digest": sha-256=:{digest}:\n"@signature-params": {covered}'
    key.verify(base64.b64decode(answer.headers["signature"].removeprefix("s=:").removesuffix(":")), base.encode())
    assert "signature" not in wire.ask(doors.url, "GET", "/v1/models", headers={"accept-signature": "s=()"}).headers, (
        "nobody's"
    )


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
                                            ("/v1/messages", {"model": "talker", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
                                            ("/v1/responses", {"input": "x", "max_output_tokens": 2})])  # fmt: skip
def test_a_stream_is_signed_in_its_last_comments(doors: Server, path: str, body: dict[str, Any]):
    _, key = public_key(doors)
    headers = DAVE | {"accept-signature": 's=("@status" "content-type" "@path";req);nonce="n"'}
    answer = wire.ask(doors.url, "POST", path, body | {"stream": True}, headers)
    assert answer.status == 200 and "signature" not in answer.headers
    text, signature = re.split(rb"(?=: content-digest: )", answer.body)
    lines = dict(line.removeprefix(": ").split(": ", 1) for line in signature.decode().removesuffix("\n\n").split("\n"))
    assert set(lines) == {"content-digest", "signature-input", "signature"}
    digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
    assert lines["content-digest"] == f"sha-256=:{digest}:"
    covered = lines["signature-input"].removeprefix("s=")
    assert covered.startswith('("@status" "content-type" "@path";req "content-digest";tr);created=')
    base = f'"@status": 200\n"content-type": {answer.headers["content-type"]}\n"@path";req: {path}\n'
    base += f'"content-digest";tr: sha-256=:{digest}:\n"@signature-params": {covered}'
    key.verify(base64.b64decode(lines["signature"].removeprefix("s=:").removesuffix(":")), base.encode())
    assert text.count(b"word") >= 2 and text.endswith(b"\n\n")


def test_clients_of_others_read_a_signed_stream(doors: Server):
    client = openai.OpenAI(
        base_url=f"{doors.url}/v1", api_key="daves-new", default_headers={"accept-signature": "s=()"}
    )
    chat: Any = [{"role": "user", "content": "x"}]
    streamed = client.chat.completions.create(model="talker", messages=chat, max_tokens=3, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in streamed if each.choices) == "word " * 3
    other = anthropic.Anthropic(base_url=doors.url, api_key="daves-new", default_headers={"accept-signature": "s=()"})
    with other.messages.stream(model="talker", messages=chat, max_tokens=3) as stream:
        assert "".join(stream.text_stream) == "word " * 3


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("s=(", "not a dictionary"),
        ("a=(), b=()", "ask for one signature"),
        ("", "ask for one signature"),
        ('s=("date")', "content-digest, content-type, x-request-id are signed"),
        ('s=("@method")', "are signed"),
        ('s=("x-none";req)', "of the request: the message has no x-none"),
        ('s=("content-digest";req;key="md5")', "sha-256 and sha-512 are signed"),
        ('s=();keyid="other"', "the server's keyid is"),
        ('s=();alg="rsa-v1_5-sha256"', "the server's alg is ed25519"),
        ("s=();expires", "does not expire"),
        ("s=();nonce=5", "are strings"),
        ("s=();shape=round", "shape is not known"),
    ],
)
def test_a_signature_that_cannot_be_given_is_400(doors: Server, asked: str, message: str):
    answer = wire.ask(doors.url, "POST", "/v1/completions", BODY, DAVE | {"accept-signature": asked})
    assert answer.status == 400 and message in answer.json["error"]["message"]


@pytest.mark.parametrize("covered", ['"content-digest";req', '"content-digest";req;key="sha-256"'])
def test_no_answer_is_signed_for_another_question(doors: Server, covered: str):
    asked = DAVE | {"accept-signature": f"s=({covered})"}
    for question, status in ((BODY, 200), (BODY | {"prompt": [1]}, 400)):
        digest = base64.b64encode(hashlib.sha256(json.dumps(question).encode()).digest()).decode()
        headers = asked | {"content-digest": f"sha-256=:{digest}:"}
        answer = wire.ask(doors.url, "POST", "/v1/completions", BODY, headers)
        assert (answer.status, "signature" in answer.headers) == (status, status == 200)
    assert answer.json["error"]["message"] == "content-digest is not that of the body"


def test_one_key_cannot_fill_the_queue(start_server: Start):
    server = start_server("serve.http.api_keys=a,b", "serve.http.max_queue=8", stub={"max_running": 1})
    endless = {"prompt": [0], "max_tokens": 8000}
    a, b = {"x-api-key": "a"}, {"x-api-key": "b"}
    streams = [wire.Stream(server.url, endless, **a)]
    streams[0].read_events(1)
    for num in range(1, 5):
        streams.append(wire.Stream(server.url, endless, **a))
        wire.wait_until(lambda num=num: wire.metrics(server.url, a)["atom:num_requests_waiting"] == num)
    refused = wire.ask(server.url, "POST", "/v1/completions", endless, a)
    assert refused.status == 429 and refused.json["error"]["code"] == "queue_full"
    for num in range(5, 7):
        streams.append(wire.Stream(server.url, endless, **b))
        wire.wait_until(lambda num=num: wire.metrics(server.url, a)["atom:num_requests_waiting"] == num)
    assert wire.ask(server.url, "POST", "/v1/completions", endless, b).status == 429, "2 of its own, and 2 are left"
    metrics = wire.metrics(server.url, a) | wire.metrics(server.url, b)
    assert [metrics[f'atom:key_requests_total{{key="key{number}"}}'] for number in (1, 2)] == [5, 2]
    assert [metrics[f'atom:key_refused_total{{key="key{number}",limit="queue_full"}}'] for number in (1, 2)] == [1, 1]
    for each in streams:
        each.close()


def soak(server: Server, seconds: float, num_streams: dict[str, int]) -> dict[str, float]:
    """Keep so many streams of each key open; the tokens that each got between a fifth of the time and its end."""
    end = time.monotonic() + seconds

    def ask(key: str) -> None:
        while time.monotonic() < end:
            body = {"prompt": [65] * 32, "max_tokens": 32, "ignore_eos": True}
            answer = wire.ask(server.url, "POST", "/v1/completions", body, {"x-api-key": key})
            assert answer.status == 200, answer.body

    def counts() -> dict[str, float]:
        metrics = wire.metrics(server.url, {"x-api-key": "heavy-key"})
        assert metrics["atom:num_requests_waiting"], "there is no overload"
        return {
            name: metrics[f'atom:key_generation_tokens_total{{key="{name}"}}'] for name in ("heavy", "light", "double")
        }

    threads = [threading.Thread(target=ask, args=(key,)) for key, num in num_streams.items() for _ in range(num)]
    for each in threads:
        each.start()
    time.sleep(seconds / 5)
    before = counts()
    time.sleep(seconds * 0.7)
    after = counts()
    for each in threads:
        each.join()
    return {name: after[name] - before[name] for name in before}


@pytest.mark.slow
def test_two_keys_share_an_overloaded_engine_whoever_asks_for_more(start_server: Start, tmp_path: Path):
    """The real engine: 24 streams of one key, 6 of another, and 12 of one with twice the weight; 4 can run."""
    file = tmp_path / "keys.yaml"
    file.write_text(
        "heavy: {key: heavy-key, admin: true}\nlight: {key: light-key}\ndouble: {key: double-key, weight: 2}\n"
    )
    server = start_server(f"serve.http.api_keys=@{file}", "serve.max_num_seqs=4")
    soak(server, 3.0, {"heavy-key": 8, "light-key": 2, "double-key": 4})  # warm
    got = soak(server, 10.0, {"heavy-key": 24, "light-key": 6, "double-key": 12})
    total = sum(got.values())
    shares: dict[str, float] = {name: count / total for name, count in got.items()}
    print(shares, total)
    expected: dict[str, Callable[[float], bool]] = {
        "heavy": lambda share: 0.2 < share < 0.3, "light": lambda share: 0.2 < share < 0.3, "double": lambda share: 0.44 < share < 0.56,
    }  # fmt: skip
    assert all(is_right(shares[name]) for name, is_right in expected.items()), shares


@pytest.mark.slow
def test_a_key_of_a_better_priority_goes_first(start_server: Start, tmp_path: Path):
    file = tmp_path / "keys.yaml"
    file.write_text("urgent: {key: u, priority: -5}\nbatch: {key: b}\n")
    server = start_server(f"serve.http.api_keys=@{file}", "serve.max_num_seqs=1", "serve.http.max_queue=64")
    long = {"prompt": [65] * 8, "max_tokens": 300, "ignore_eos": True}
    order: list[str] = []

    def ask(key: str, body: dict[str, Any]) -> None:
        assert wire.ask(server.url, "POST", "/v1/completions", body, {"x-api-key": key}).status == 200
        order.append(f"{key} {body.get('priority', 0)}")

    waits = [threading.Thread(target=ask, args=("b", long | {"priority": -9 if num == 2 else 0})) for num in range(3)]
    for each in waits:
        each.start()
        time.sleep(0.05)
    wire.wait_until(lambda: wire.metrics(server.url, {"x-api-key": "u"})["atom:num_requests_waiting"] >= 1)
    waits.append(threading.Thread(target=ask, args=("u", long | {"max_tokens": 1})))
    waits[-1].start()
    for each in waits:
        each.join()
    assert order.index("u 0") < order.index("b -9"), "it goes first, however urgent others say they are"


def test_without_its_packages_a_key_file_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import sys

    from atom.errors import ConfigError
    from atom.serve.auth.tenants import read_public_keys

    for name in [each for each in sys.modules if each.partition(".")[0] == "cryptography"] + ["cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "clients.pub").write_text("ssh-ed25519 AAAA alice\n")
    with pytest.raises(ConfigError, match=r"pip install 'atom-run\[signatures\]'"):
        read_public_keys(f"@{tmp_path}/clients.pub")
