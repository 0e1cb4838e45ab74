"""Run a server for the length of a `with` block.

It is started on a free port, waited for, and stopped.

    command = make_command(DEFAULT_SERVER, model="org/model", port=8123, tp=2, extra=["--level", "1"])
    with running_server(command, "http://127.0.0.1:8123", log=Path("server.log"), health_timeout=1200) as server:
        is_alive(server)

It has its own process group, so that stopping it ends all that it started, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from atom.benchmarks.benchmark_utils import BenchmarkError, UsageError, say

DEFAULT_SERVER = f"{shlex.quote(sys.executable)} -m atom.entrypoints.openai_server"
GRACE = 30.0  # seconds from SIGTERM to SIGKILL
POLL = 0.25  # seconds between looks at /health
LOG_TAIL = 300  # characters of the log that an error quotes

Server = subprocess.Popen[bytes]


def make_command(template: str, *, model: str, port: int, tp: int, extra: Sequence[str] = ()) -> list[str]:
    """Make the server's command line: fill in {model}, {port} and {tp} of a template.

    A template without {port} is taken for a server with ROCm/ATOM's flags, which are added.
    """
    words = shlex.split(template)
    if not words:
        raise UsageError("--server-command is empty")
    values = {"{model}": model, "{port}": str(port), "{tp}": str(tp)}
    if not any("{port}" in word for word in words):
        words += ["--model", "{model}", "--host", "127.0.0.1", "--server-port", "{port}", "-tp", "{tp}"]
    for name, value in values.items():
        words = [word.replace(name, value) for word in words]
    return [*words, *extra]


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running_server(
    command: Sequence[str], url: str, *, log: Path, health_timeout: float, grace: float = GRACE
) -> Iterator[Server]:
    """Run a server and wait until it is ready. Its output goes to the file `log`.

    health_timeout: seconds until /health has to answer 200. BenchmarkError if it does not, or the server dies first.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"starting {shlex.join(command)}; its output goes to {log}")
    with log.open("wb") as output:
        try:
            server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise UsageError(f"cannot start {command[0]}: {error.strerror}; see --server-command") from None
    try:
        wait_until_ready(server, url, log, health_timeout)
        yield server
    finally:
        stop(server, grace)


def wait_until_ready(server: Server, url: str, log: Path, health_timeout: float) -> None:
    started = time.monotonic()
    while True:
        is_ready = answers_health(url)
        if not is_alive(server):  # another server may answer on the port
            raise BenchmarkError(f"the server ended with {server.returncode} before it was ready: {read_tail(log)}")
        if is_ready:
            break
        if time.monotonic() - started > health_timeout:
            raise BenchmarkError(f"the server was not ready in {health_timeout:g} s (--health-timeout); see {log}")
        time.sleep(POLL)
    say(f"the server was ready after {time.monotonic() - started:.1f} s")


def answers_health(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
    try:
        with opener.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False


def is_alive(server: Server) -> bool:
    return server.poll() is None


def stop(server: Server, grace: float) -> None:
    """SIGTERM, then SIGKILL for what is left of its process group after `grace` seconds."""
    try:
        if is_alive(server):
            server.terminate()
            server.wait(grace)
    except subprocess.TimeoutExpired:
        say(f"the server did not end within {grace:g} s of SIGTERM: killed")
    finally:  # also if the wait is interrupted
        with contextlib.suppress(ProcessLookupError):  # all of the group have ended
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def read_tail(log: Path) -> str:
    """The end of a log, and the path of the rest."""
    lines = log.read_text(errors="replace").strip()[-LOG_TAIL:]
    return f"{lines or 'it said nothing'} (all of it in {log})"
