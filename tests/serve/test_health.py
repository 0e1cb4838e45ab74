from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import serving
import wire


@pytest.mark.parametrize("last", ["draining", "dead"])
def test_health_is_loading_then_ready_then_draining_or_dead(last: str, talker: Path, tmp_path: Path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
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
        assert wire.ask(url, "GET", "/v1/models").status == 200  # what needs no engine is told
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
        server.process.wait(20)
    assert states == ["loading", "ready", last]
