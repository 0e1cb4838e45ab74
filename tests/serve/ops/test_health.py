from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import serving
import wire


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("last", ["draining", "dead"])
def test_health_is_loading_then_ready_then_draining_or_dead(last: str, talker: Path, tmp_path: Path):
    port = free_port()
    stub = {"load_seconds": 3, "step_seconds": 0.02}
    server = serving.launch(talker, tmp_path, f"serve.http.port={port}", stub=stub)
    url = f"http://127.0.0.1:{port}"
    states = []

    def look() -> str:
        try:
            health, ready = (wire.ask(url, "GET", path) for path in ("/health", "/ready"))
        except ConnectionError:
            return "nobody"
        assert health.body == ready.body or health.json["state"] != ready.json["state"]
        state = str(health.json["state"])
        assert health.json.get("doing") == ("loading nothing: 40%" if state == "loading" else None)
        assert health.status == (200 if state == "ready" else 503)
        assert health.json["status"] == ("ok" if state == "ready" else state)
        if state not in states:
            states.append(state)
        return state

    def looks_for(doing: str) -> bool:
        try:
            return wire.ask(url, "GET", "/health").json.get("doing") == doing
        except ConnectionError:
            return False

    try:
        wire.wait_until(lambda: looks_for("loading nothing: 40%"))
        wire.wait_until(lambda: look() == "loading")
        refused = wire.ask(url, "POST", "/v1/completions", {"prompt": [0], "max_tokens": 1})
        assert refused.status == 503 and refused.json["error"]["message"] == "the server is loading"
        assert wire.ask(url, "GET", "/v1/models").status == 200  # what needs no engine is served
        wire.wait_until(lambda: look() == "ready")
        stream = wire.Stream(url, {"prompt": [0], "max_tokens": 8000})
        stream.read_events(1)
        if last == "draining":
            server.process.terminate()
        else:
            (engine,) = serving.family(server)
            os.kill(engine, signal.SIGKILL)
        wire.wait_until(lambda: look() == last)
    finally:
        server.process.terminate()
        server.process.wait(wire.SECONDS)
    assert states == ["loading", "ready", last]


def test_a_port_that_opens_when_ready_refuses_until_then(talker: Path, tmp_path: Path):
    """ROCm/ATOM's benchmark waits by `curl -s $URL/health > /dev/null && break`, which takes any answer for yes."""
    port, states = free_port(), list[str]()
    fields = [f"serve.http.port={port}", "serve.http.listen_when_ready=true"]
    server = serving.launch(talker, tmp_path, *fields, stub={"load_seconds": 3})

    def look() -> str:
        try:
            state = str(wire.ask(f"http://127.0.0.1:{port}", "GET", "/health").json["state"])
        except ConnectionRefusedError:
            state = "refused"
        states.append(state)
        return state

    try:
        serving.wait_for_line(server, "loading nothing")
        assert look() == "refused"
        wire.wait_until(lambda: look() == "ready")
        assert set(states) == {"refused", "ready"}
        serving.wait_for_url(server)
    finally:
        server.process.terminate()
        assert server.process.wait(wire.SECONDS) == 0


@pytest.mark.slow
def test_a_port_that_another_server_opens_meanwhile_is_reported(talker: Path, tmp_path: Path):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        fields = [f"serve.http.port={port}", "serve.http.listen_when_ready=true"]
        server = serving.launch(talker, tmp_path, *fields, stub={"load_seconds": 3})
        try:
            serving.wait_for_line(server, "loading nothing")
            other.listen()
            assert server.process.wait(wire.SECONDS) == 2
        finally:
            server.process.kill()
            server.process.wait()
    message = f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another serve.http.port"
    assert message in server.log.read_text()
