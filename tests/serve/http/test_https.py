"""HTTPS, and a path in front of all paths, as a proxy has it."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import serving
import wire
from serving import Server, Start

from atom.config.load import load
from atom.errors import ConfigError
from atom.serve.server import Server as AtomServer


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by its own key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("pem")
    key, cert = folder / "key.pem", folder / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2"]
    made += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def secure(start_server: Start, pem: tuple[Path, Path]) -> Server:
    cert, key = pem
    files = f"serve.http.ssl_certfile={cert}", f"serve.http.ssl_keyfile={key}"
    return start_server(*files, "advanced.max_header=2048", stub={})


@pytest.fixture
def trusting(pem: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(pem[0]))


def test_a_client_that_trusts_the_certificate_is_served(secure: Server, trusting: ssl.SSLContext):
    assert secure.url.startswith("https://")
    with urllib.request.urlopen(f"{secure.url}/health", context=trusting, timeout=120) as answer:
        assert json.load(answer)["state"] == "ready"
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"{secure.url}/health", timeout=120)


def test_a_head_that_is_too_large_is_refused_over_https(secure: Server, trusting: ssl.SSLContext):
    where = urlsplit(secure.url)
    assert where.hostname is not None
    with (
        socket.create_connection((where.hostname, where.port), 30) as plain,
        trusting.wrap_socket(plain, server_hostname=where.hostname) as connection,
        connection.makefile("rb") as file,
    ):
        connection.sendall(wire.request("GET", "/health", headers={"x-long": "x" * 3000}))
        assert wire.read_answer(file).status == 431


def test_a_stream_ends_over_https(secure: Server, pem: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(pem[0]))
    with openai.OpenAI(base_url=f"{secure.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        chunks = list(client.completions.create(model="talker", prompt=[0, 9], max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "word word word "


@pytest.mark.parametrize("wrong", ["missing", "no_pem", "another_key"])
def test_files_that_cannot_be_used_are_one_error(wrong: str, pem: tuple[Path, Path], tmp_path: Path):
    cert, key = pem
    if wrong == "missing":
        key = tmp_path / "nowhere.pem"
    elif wrong == "no_pem":
        cert = tmp_path / "cert.pem"
        cert.write_text("nothing")
    else:
        key = tmp_path / "key.pem"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    files = [f"serve.http.ssl_certfile={cert}", f"serve.http.ssl_keyfile={key}"]
    with pytest.raises(ConfigError, match=r"^serve\.http\.ssl_certfile=.*give PEM files"):
        AtomServer(load([*files, "serve.http.host=127.0.0.1", "serve.http.port=0"]))


@pytest.fixture(scope="module")
def rooted(start_server: Start) -> Server:
    return start_server(
        "serve.http.root_path=/a/llm", "serve.http.api_keys=sesame", "serve.http.max_body=1000", stub={}
    )


@pytest.mark.parametrize("root", ["", "/a/llm"])
def test_paths_are_served_under_the_root_and_without_it(rooted: Server, root: str):
    headers = {"authorization": "Bearer sesame"}
    body: dict[str, Any] = {"prompt": [0, 9], "max_tokens": 2}
    assert wire.ask(rooted.url, "GET", f"{root}/health").status == 200
    assert wire.ask(rooted.url, "GET", f"{root}/v1/models").status == 401
    assert wire.ask(rooted.url, "GET", f"{root}/v1/models", headers=headers).status == 200
    assert wire.ask(rooted.url, "POST", f"{root}/v1/completions", body, headers).status == 200
    assert wire.ask(rooted.url, "GET", f"{root}/", headers=headers).status == 200
    refused = wire.ask(rooted.url, "POST", f"{root}/v1/messages", b" " * 2000, headers)
    assert (refused.status, refused.json["type"]) == (413, "error"), "in Anthropic's form"


def test_another_root_is_not_served(rooted: Server):
    headers = {"authorization": "Bearer sesame"}
    for path in ("/a/llm", "/a/llmx/health", "/a/health", "/llm/v1/models", "/a/llm/a/llm/health"):
        assert wire.ask(rooted.url, "GET", path, headers=headers).status == 404


def test_the_log_has_the_address_with_its_root(rooted: Server):
    serving.wait_for_line(rooted, f"{rooted.url}/a/llm (Ctrl-C drains")
