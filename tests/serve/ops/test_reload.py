"""SIGHUP: keys and certificates are read anew while requests are answered."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import serving
import wire
from serving import Server, Start

BODY = {"prompt": [0, 9], "max_tokens": 2}


def entries(server: Server, message: str) -> list[dict[str, Any]]:
    return [entry for entry in serving.log_entries(server) if entry["message"].startswith(message)]


def reload(server: Server, message: str = "reloaded") -> dict[str, Any]:
    """Send SIGHUP; the line of the log that reports the result."""
    before = len(entries(server, message))
    server.process.send_signal(signal.SIGHUP)
    wire.wait_until(lambda: len(entries(server, message)) > before)
    return entries(server, message)[-1]


def status(server: Server, key: str, path: str = "/v1/completions", body: Any = BODY) -> int:
    return wire.ask(server.url, "POST", path, body, {"x-api-key": key}).status


def test_keys_are_read_anew_under_nohup_too(start_server: Start, tmp_path: Path):
    """Where SIGHUP, ignored, would leave a revoked key in use and say nothing."""
    keys = tmp_path / "keys.txt"
    keys.write_text("old\n")
    handled = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = start_server(f"serve.http.api_keys=@{keys}", stub={})
    finally:
        signal.signal(signal.SIGHUP, handled)
    keys.write_text("new\n")
    reload(server)
    assert [status(server, key) for key in ("old", "new")] == [401, 200]


def test_keys_are_replaced_while_a_stream_goes_on_and_counts_stay(start_server: Start, tmp_path: Path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("app: {key: old, max_concurrent: 1}\nguest: {key: guests}\nops: {key: opss, admin: true}\n")
    server = start_server(f"serve.http.api_keys=@{keys}", stub={"step_seconds": 0.02})
    assert status(server, "guests") == 200
    stream = wire.Stream(server.url, BODY | {"max_tokens": 150}, **{"x-api-key": "old"})
    stream.read_events(1)
    assert status(server, "old") == 429
    keys.write_text("app: {key: [new], max_concurrent: 2}\nclerk: {key: clerks, admin: true}\nops: {key: opss}\n")
    assert status(server, "new") == 401, "it has not been reloaded yet"
    assert reload(server)["keys"] == ["app", "clerk", "ops"]
    assert [status(server, key) for key in ("old", "guests", "clerks", "new")] == [401, 401, 200, 200]
    assert status(server, "opss", "/start_profile", None) == 403, "it is no administrator any more"
    metrics = wire.metrics(server.url, {"x-api-key": "clerks"})
    assert metrics['atom:key_requests_open{key="app"}'] == 1 and metrics['atom:key_requests_total{key="app"}'] == 2
    assert metrics['atom:key_refused_total{key="app",limit="max_concurrent"}'] == 1
    assert 'atom:key_requests_total{key="guest"}' not in metrics
    events = stream.read_events()
    assert events[-1] == "[DONE]" and len(events) == 150
    wire.wait_until(lambda: wire.metrics(server.url, {"x-api-key": "new"})['atom:key_requests_open{key="app"}'] == 0)


def test_a_model_that_a_key_may_use_no_more_is_refused_after_a_reload(start_server: Start, tmp_path: Path):
    keys = tmp_path / "keys.yaml"
    names = "serve.http.served_model_name=[talker,other]"
    keys.write_text("app: {key: apps, models: [talker, other]}\nclerk: {key: clerks, models: [talker]}\n")
    server = start_server(f"serve.http.api_keys=@{keys}", names, stub={})

    def statuses(key: str) -> list[int]:
        return [status(server, key, body=BODY | {"model": model}) for model in ("talker", "other")]

    assert [statuses("apps"), statuses("clerks")] == [[200, 200], [200, 404]]
    keys.write_text("app: {key: apps, models: [other]}\nclerk: {key: clerks}\n")
    reload(server)
    assert [statuses("apps"), statuses("clerks")] == [[404, 200], [200, 200]]
    listed = wire.ask(server.url, "GET", "/v1/models", headers={"x-api-key": "apps"}).json["data"]
    assert [each["id"] for each in listed] == ["other"]


def test_a_file_that_is_wrong_changes_nothing(start_server: Start, tmp_path: Path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("app: {key: apps}\n")
    server = start_server(f"serve.http.api_keys=@{keys}", stub={})
    for text in ("", "app: {kee: x}", None):
        if text is None:
            keys.unlink()
        else:
            keys.write_text(text)
        entry = reload(server, "nothing is reloaded: ")
        assert entry["level"] == "error" and str(keys) in entry["message"]
        assert (status(server, "apps"), status(server, "")) == (200, 401)


def test_a_server_without_keys_stays_open(start_server: Start):
    server = start_server(stub={})
    assert reload(server)["keys"] == []
    assert status(server, "") == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_a_certificate_is_replaced(start_server: Start, tmp_path: Path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def make(name: str) -> None:
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            key,
            "-out",
            cert,
            "-days",
            "2",
        ]
        subprocess.run([*command, "-subj", f"/CN={name}"], check=True, capture_output=True)

    make("first")
    server = start_server(f"serve.http.ssl_certfile={cert}", f"serve.http.ssl_keyfile={key}", stub={})
    where = urlsplit(server.url)
    assert where.hostname is not None and where.port is not None
    address = (where.hostname, where.port)
    first = ssl.get_server_certificate(address)
    assert first.split() == cert.read_text().split()
    make("second")
    assert ssl.get_server_certificate(address) == first
    reload(server)
    assert ssl.get_server_certificate(address).split() == cert.read_text().split() != first.split()
    cert.write_text("none")
    reload(server, "nothing is reloaded: ")
    assert ssl.get_server_certificate(address).split() != first.split()


def test_on_a_terminal_that_is_closed_it_drains(talker: Path, tmp_path: Path):
    port = serving.free_port()
    ours, theirs = pty.openpty()
    server = serving.launch(talker, tmp_path, f"serve.http.port={port}", stub={"step_seconds": 0.02}, stderr=theirs)
    os.close(theirs)
    url, said = f"http://127.0.0.1:{port}", b""
    while b" at http" not in said:
        said += os.read(ours, 1000)
    stream = wire.Stream(url, BODY | {"max_tokens": 50})
    stream.read_events(1)
    os.close(ours)
    server.process.send_signal(signal.SIGHUP)
    events = stream.read_events()
    assert events[-1] == "[DONE]" and len(events) == 50
    assert server.process.wait(wire.SECONDS) == 0
