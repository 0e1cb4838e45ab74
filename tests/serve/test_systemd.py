from __future__ import annotations

import logging
import re
import socket
import time
from pathlib import Path

import pytest
import serving
import wire

from atom.serve.systemd import notify


@pytest.mark.parametrize("is_abstract", [False, True])
def test_systemd_is_told_when_the_server_is_ready_and_when_it_drains(
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
            (url,) = re.findall(r" at (http://127\.0\.0\.1:\d+) ", server.log.read_text())
            assert wire.ask(url, "GET", "/health").status == 200
            server.process.terminate()
            assert systemd.recv(100) == b"STOPPING=1"
            assert server.process.wait(15) == 0
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
        start = time.monotonic()
        notify(path, "READY=1")
        assert time.monotonic() - start < 5
    assert caplog.messages == [f"cannot send READY=1 to systemd at {path}: timed out"]
