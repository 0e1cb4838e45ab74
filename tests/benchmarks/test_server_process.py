from __future__ import annotations

import os
import re
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from atom.benchmarks.benchmark_utils import BenchmarkError, UsageError
from atom.benchmarks.server_process import (
    Server,
    answers_health,
    find_free_port,
    is_alive,
    make_command,
    running_server,
)

STUB = f"{sys.executable} {Path(__file__).with_name('stub_command.py')}"


def start(tmp_path: Path, mode: str = "", **options: float) -> AbstractContextManager[Server]:
    port = find_free_port()
    command = make_command(STUB, model="m", port=port, tp=1, extra=["--mode", mode])
    options = {"health_timeout": 120, "grace": 0.5} | options
    return running_server(command, f"http://127.0.0.1:{port}", log=tmp_path / "server.log", **options)


def is_there(pid: int) -> bool:
    """Whether a process runs; one that waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("template", "command"),
    [
        ("serve", ["serve", "--model", "/m", "--host", "127.0.0.1", "--server-port", "9", "-tp", "2", "--level", "1"]),
        ("vllm serve {model} --port {port}", ["vllm", "serve", "/m", "--port", "9", "--level", "1"]),
        ("x -p={port} '-a b' -t {tp}", ["x", "-p=9", "-a b", "-t", "2", "--level", "1"]),
    ],
)
def test_the_command_line_of_a_server(template: str, command: list[str]):
    assert make_command(template, model="/m", port=9, tp=2, extra=["--level", "1"]) == command


def test_a_server_is_ready_within_and_gone_after(tmp_path: Path):
    with start(tmp_path) as server:
        assert is_alive(server)
        port = server.args[server.args.index("--server-port") + 1]
        assert answers_health(f"http://127.0.0.1:{port}")
    assert not is_there(server.pid)
    assert server.returncode == -15
    assert not answers_health(f"http://127.0.0.1:{port}")
    assert (tmp_path / "server.log").read_text().startswith("serving m at tp 1")


def test_it_is_gone_after_an_error_too(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), start(tmp_path) as server:
        raise KeyboardInterrupt
    assert not is_there(server.pid)


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with start(tmp_path, "stubborn") as server:
        pass
    assert server.returncode == -9
    assert "the server did not end within 0.5 s of SIGTERM: killed" in capsys.readouterr().err


def test_what_it_started_ends_with_it(tmp_path: Path):
    with start(tmp_path, "child"):
        found = re.search(r"child (\d+)", (tmp_path / "server.log").read_text())
        assert found and is_there(int(found[1]))
    deadline = time.monotonic() + 60
    while is_there(int(found[1])) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_there(int(found[1]))
    assert is_there(os.getpid())


def test_a_server_that_dies_is_noticed_before_the_timeout(tmp_path: Path):
    message = r"the server ended with 1 before it was ready: [^$]*no memory left \(all of it in "
    with pytest.raises(BenchmarkError, match=message), start(tmp_path, "dies at once", health_timeout=10_000):
        pass


def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path):
    message = r"the server was not ready in 0.3 s \(--health-timeout\); see .*server.log"
    with pytest.raises(BenchmarkError, match=message), start(tmp_path, "never-ready", health_timeout=0.3):
        pass


def test_a_command_that_does_not_exist_is_named(tmp_path: Path):
    serving = running_server(["/nowhere/serve"], "http://127.0.0.1:1", log=tmp_path / "a.log", health_timeout=1)
    message = "cannot start /nowhere/serve: No such file or directory; see --server-command"
    with pytest.raises(UsageError, match=message), serving:
        pass
    with pytest.raises(UsageError, match="--server-command is empty"):
        make_command(" ", model="m", port=1, tp=1)
