"""Fork servers of stub_engine.py from one process that has imported what they import, which is most of their start.

    forks = Forks()
    process = forks.start(['{"step_seconds": 0.02}', "checkpoint=FOLDER", ...], stderr)
    process.terminate()
    assert process.wait(20) == 0

A server's environment, signals and stderr are those that a process started by subprocess.Popen would have here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

HANDLED = (signal.SIGHUP, signal.SIGINT)  # ignored here, they are ignored there


class Forked:
    """A server that was forked, with the fields of a Popen that tests use."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked server", timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The process that forks servers; it ends with this one."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._lock = threading.Lock()

    def start(self, arguments: Sequence[str], stderr: int) -> Forked:
        ignored = [number for number in HANDLED if signal.getsignal(number) is signal.SIG_IGN]
        said = {"arguments": arguments, "environment": dict(os.environ), "ignored": ignored, "folder": os.getcwd()}
        return Forked(self, self.ask(said, [stderr]))

    def ask(self, message: dict[str, Any], files: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._link, [json.dumps(message).encode()], files)
            return json.loads(self._link.recv(1000))


def work(link: socket.socket) -> None:
    """The main function of that process."""
    while True:
        text, (*files,), _, _ = socket.recv_fds(link, 1 << 20, 1)
        if not text:
            return
        message = json.loads(text)
        if "ended" in message:
            pid, status = os.waitpid(message["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            link.close()
            become(message, *files)
        for file in files:
            os.close(file)
        link.send(json.dumps(answer).encode())


def become(message: dict[str, Any], stderr: int) -> None:
    """Be the server, to its end."""
    import stub_engine

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(stderr, 2)
    os.closerange(3, 100)
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["environment"])
    for number in HANDLED:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in message["ignored"] else default)
    sys.argv = [stub_engine.__file__, *message["arguments"]]
    sys.exit(stub_engine.main())


def main() -> None:
    import gc
    import warnings

    from atom.config import Config
    from atom.config.hydra import compose
    from atom.config.load import load
    from atom.config.spelling import override

    for module in ("atom.jobs.report", "atom.serve.engine.replica", "atom.serve.server", "stub_engine"):
        __import__(module)
    load([])  # and what a configuration imports when it is made
    compose(Config, [override("model", "qwen3")])  # kept for the servers, whose checkpoint is of this family
    gc.freeze()  # no collection of a child writes to what it shares
    warnings.simplefilter("ignore")  # of threads that numpy has started, which wait for work
    work(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
