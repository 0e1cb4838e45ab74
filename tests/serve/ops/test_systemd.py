from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import serving
import wire

from atom.errors import ConfigError
from atom.serve.ops.systemd import adopt, notify


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_abstract", [False, True])
def test_systemd_is_notified_when_the_server_is_ready_and_when_it_drains(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_abstract: bool
):
    address = f"@atom-{tmp_path}" if is_abstract else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address.replace("@", "\0", 1))
        systemd.settimeout(serving.START_SECONDS)
        server = serving.launch(talker, tmp_path, stub={"load_seconds": 1})
        try:
            assert systemd.recv(100) == b"READY=1"
            assert wire.ask(serving.wait_for_url(server), "GET", "/health").status == 200
            server.process.terminate()
            assert systemd.recv(100) == b"STOPPING=1"
            assert server.process.wait(wire.SECONDS) == 0
        finally:
            server.process.kill()
            server.process.wait()
        systemd.setblocking(False)
        with pytest.raises(BlockingIOError):  # nothing more was said, by no process of the server
            systemd.recv(100)


def test_a_server_that_systemd_does_not_hear_serves_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        notify(f"{tmp_path}/nobody", "READY=1")
        assert caplog.messages == [f"cannot send READY=1 to systemd at {tmp_path}/nobody: No such file or directory"]
        notify(None, "READY=1")
    assert len(caplog.messages) == 1


def test_a_full_queue_of_systemds_does_not_hold_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    other.sendto(b"x", path)
        notify(path, "READY=1")  # comes back
    assert caplog.messages == [f"cannot send READY=1 to systemd at {path}: timed out"]


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened


PASS = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
os.execv(sys.argv[2], sys.argv[2:])
"""


def activate(
    listening: socket.socket, checkpoint: Path, folder: Path, *overrides: str, stub: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a server as systemd does: the socket as descriptor 3, its own pid in LISTEN_PID."""
    program = ["-m", "atom.cli", "job=serve"] if stub is None else [str(serving.STUB), stub]
    command = [sys.executable, *program, f"checkpoint={checkpoint}", f"cache={folder / 'cache'}"]
    command += ["level=0", "dtype=fp32", "serve.kv_cache_memory=16777216", "sampling.max_tokens=16", *overrides]
    number = listening.fileno()
    with (folder / "activated.log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-c", PASS, str(number), *command], pass_fds=[number], stderr=log)


@pytest.mark.slow
def test_the_first_request_waits_and_an_idle_server_ends_and_starts_anew(
    talker: Path, tmp_path: Path, listening: socket.socket
):
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    body = {"prompt": [0, 9], "max_tokens": 3}
    for _ in range(2):
        with wire.connect(url) as first, first.makefile("rb") as file:  # before there is any process
            first.sendall(wire.request("POST", "/v1/completions", body))
            server = activate(listening, talker, tmp_path, "serve.idle_exit_seconds=1")
            try:
                first.settimeout(wire.SECONDS)
                answer = wire.read_answer(file)
                assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 3
                assert server.wait(wire.SECONDS) == 0
            finally:
                server.kill()
                server.wait()
    entries = [
        json.loads(line) for line in (tmp_path / "activated.log").read_text().splitlines() if line.startswith("{")
    ]
    assert sum(each.get("seconds") == 1 and each["message"] == "idle" for each in entries) == 2


@pytest.mark.slow
def test_what_comes_to_a_passed_socket_in_a_drain_waits_for_the_next_server(
    talker: Path, tmp_path: Path, listening: socket.socket
):
    url, log = f"http://127.0.0.1:{listening.getsockname()[1]}", tmp_path / "activated.log"
    servers = [activate(listening, talker, tmp_path, stub='{"step_seconds": 0.02}')]
    try:
        stream = wire.Stream(url, {"prompt": [0, 9], "max_tokens": 50})
        stream.read_events(1)
        servers[0].terminate()
        wire.wait_until(lambda: '"draining"' in log.read_text())
        with wire.connect(url) as late, late.makefile("rb") as file:
            late.sendall(wire.request("POST", "/v1/completions", {"prompt": [0, 9], "max_tokens": 3}))
            assert stream.read_events()[-1] == "[DONE]" and servers[0].wait(wire.SECONDS) == 0
            servers.append(activate(listening, talker, tmp_path, stub="{}"))
            assert wire.read_answer(file).status == 200
    finally:
        for server in servers:
            server.kill()
            server.wait()


@pytest.mark.slow
def test_an_idle_server_ends_never_amid_a_request(talker: Path, tmp_path: Path):
    stub = {"step_seconds": 0.15}
    server = serving.start(talker, tmp_path, "serve.idle_exit_seconds=2", stub=stub)  # longer than a start is noticed
    try:
        stream = wire.Stream(server.url, {"prompt": [0, 9], "max_tokens": 20})  # three seconds
        events = stream.read_events()
        assert len(events) == 21 and events[-1] == "[DONE]"

        def has_ended() -> bool:
            try:
                wire.ask(server.url, "GET", "/health")  # a probe keeps no server awake
            except OSError:
                return True
            return False

        wire.wait_until(has_ended)
        assert server.process.wait(wire.SECONDS) == 0
        (asked,), (idle,) = (
            serving.log_entries(server, **each) for each in ({"path": "/v1/completions"}, {"message": "idle"})
        )
        between = datetime.fromisoformat(idle["time"]) - datetime.fromisoformat(asked["time"])
        assert between.total_seconds() > 1.9
    finally:
        server.process.kill()
        server.process.wait()


def test_a_socket_of_another_process_or_kind_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    assert adopt(0, os.getpid()) is None and adopt(1, os.getpid() + 1) is None
    with pytest.raises(ConfigError, match=r"systemd passes 2 sockets; give the .socket unit one ListenStream="):
        adopt(2, os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        monkeypatch.setattr("atom.serve.ops.systemd.FIRST", os.dup(other.fileno()))
        with pytest.raises(ConfigError, match=r"does not listen for TCP"):
            adopt(1, os.getpid())
