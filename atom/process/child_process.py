"""Start child processes in groups of their own, and end them whole.

process = start_python("from atom.x import work; work()", "argument", TMPDIR="/tmp/x")
process.stdin                # ends when this process does, in whatever way
process = fork(work, is_piped=True)      # a function that returns the exit code
end(process)

A process that was started so ends its own group by `end_group`, `limit_end` and `end_children`. With `run_guarded` it
runs a program that does not read stdin, such as a compiler, which then ends when this process does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread, Timer
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[2]  # from where a checkout that is not installed can be imported


def start_python(
    code: str,
    *arguments: str,
    stderr: int | IO[Any],
    has_own_session: bool = True,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    **environment: str,
) -> subprocess.Popen[bytes]:
    """Run code in a Python process.

    has_own_session: else it is of this process's group, and is killed with it
    cwd: its folder; None: the package's, on which nothing depends
    pass_fds: files that stay open in it
    environment: variables besides our own
    """
    if cwd is not None:
        code = f"import sys; sys.path[0] = {str(ROOT)!r}; {code}"
    # env sets them, so that nothing here reads the environment, which only atom.config does
    return subprocess.Popen(
        ["/usr/bin/env", *map("=".join, environment.items()), sys.executable, "-c", code, *arguments],
        cwd=cwd or ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=has_own_session,
        pass_fds=pass_fds,
    )


def run_guarded(*command: str) -> NoReturn:
    """Run a program until it ends, or stdin does; then kill it and what it has started. Ends as the program has."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to the program too

    def watch() -> None:
        os.read(0, 1)
        kill_tree(child.pid)

    Thread(target=watch, daemon=True).start()
    code = child.wait()
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def kill_tree(pid: int) -> None:
    """Kill a process and all that it has started, which stay in the group that they are in."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)  # so that it starts no more
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            kill_tree(int(child))
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


class ForkedProcess:
    """A child that was forked from this process, with the fields of a Popen that are used here."""

    stdin = stdout = None

    def __init__(self, pid: int, stderr: IO[str] | None) -> None:
        self.pid, self.stderr = pid, stderr
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


Process = subprocess.Popen[Any] | ForkedProcess


def fork(work: Callable[[], int], *, is_piped: bool) -> ForkedProcess:
    """Run a function in a fork of this process, which has one thread; it ends with the code that the function returns.

    What is imported here need not be imported there. It has a group of its own, and no stdin.
    is_piped: its stderr is a pipe; else it shares ours
    """
    ours, theirs = os.pipe() if is_piped else (-1, -1)
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        if not is_piped:
            return ForkedProcess(pid, None)
        os.close(theirs)
        return ForkedProcess(pid, open(ours, errors="replace"))
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    if is_piped:
        os.dup2(theirs, 2)
        os.close(theirs)
        os.close(ours)
    sys.exit(work())


def exit_status(process: Process, flags: int = 0) -> int | None:
    """Wait for a child: its exit code or the signal that ended it; None if flags=os.WNOHANG and it runs.

    It is not reaped: its pid is not used again before `end` has ended its group.
    """
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | flags)
    return None if ended is None else ended.si_status


def end(process: Process, reader: Thread | None = None, seconds: float | None = None) -> int:
    """Kill what is left of a child's group; its exit code, negative for a signal.

    reader: the thread that reads its output, which is waited for, for that many seconds at most.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if reader is not None:
            reader.join(seconds)
        for pipe in filter(None, (process.stdin, process.stdout)):
            with contextlib.suppress(BrokenPipeError):  # it did not read all of its input
                pipe.close()
        return process.wait()
    return process.returncode


def limit_end(seconds: float) -> Timer:
    """Have this process killed if it has not ended in this many seconds from now."""
    timer = Timer(seconds, end_group)
    timer.daemon = True
    timer.start()
    return timer


def end_group() -> None:
    """Kill this process and those that it has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def end_children() -> None:
    """Kill the processes that this one has started, so that it can end with its own exit code."""
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
        os.killpg(0, signal.SIGVTALRM)  # ends them, unlike SIGHUP under nohup
