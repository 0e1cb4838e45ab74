"""Load a configuration in a process of its own, while torch is imported.

    code = run_apart(["job=generate", "prompts=Hello"])      # None: no such job, or its configuration cannot be loaded

To compose a configuration takes Hydra half a second, and torch's import takes longer; one interpreter does one thing
at a time. The other process is a fork of this one, made before there are threads. Meanwhile this one imports torch, or
for job=serve the HTTP server, while the engine's process imports torch. Whatever goes wrong there is left to the
ordinary way, which says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from atom.config import Config
from atom.devices import open_early
from atom.jobs import module_of
from atom.jobs.kind import find_job, open_recipes
from atom.process.gc_utils import no_collection
from atom.serve.engine.process import EngineProcess

HERE = ("generate", "chat")  # jobs whose engine is in this process
KINDS = (*HERE, "serve")
PR_SET_PDEATHSIG = 1  # of prctl(2)


class Loaded(msgspec.Struct):
    config: Config
    said: str  # on stderr meanwhile


def run_apart(argv: Sequence[str]) -> int | None:
    """Run a job of KINDS that has no flags; its exit code."""
    kind = find_kind(argv)
    if kind is None or not hasattr(os, "fork") or threading.active_count() > 1 or "torch" in sys.modules:
        return None
    engine = None if kind in HERE else EngineProcess(run_engine, is_piped=not sys.stderr.isatty())
    await_config = load_apart(argv, has_engine=kind in HERE)
    try:
        if engine is None:
            module_of(kind)  # imports torch meanwhile
        loaded = await_config()
        if loaded is None or loaded.config.job.kind != kind:
            return None
        if engine is not None and loaded.config.serve.idle_sleep_seconds is None:
            engine.configure(loaded.config)  # and imports the server while the engine starts
        job = module_of(kind)
        print(loaded.said, end="", file=sys.stderr)
        code: int = job.run(loaded.config) if engine is None else job.run(loaded.config, engine)
        return code
    finally:
        if engine is not None:
            engine.end()


def run_engine(descriptor: int) -> int:
    """Serve an engine on a socket, in a fork of this process."""
    with no_collection():
        from atom.serve.engine import worker
    return worker.run_worker(descriptor)


def find_kind(argv: Sequence[str]) -> str | None:
    """The job of a command line; None with flags, words or torchrun, or if it is none of KINDS."""
    if any(text.startswith("-") or "=" not in text for text in argv):
        return None
    kind = find_job(argv)
    if kind not in KINDS or "parallel.launcher=torchrun" in (*argv, *open_recipes(argv)):  # most ranks have no job
        return None
    return kind


def load_apart(argv: Sequence[str], *, has_engine: bool = False) -> Callable[[], Loaded | None]:
    """Start to load the configuration of a command line; a function that waits for it, which gives None if that fails.

    has_engine: this process opens a GPU, as soon as the configuration says so
    """
    theirs, ours = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if not pid:
        end_with(parent)
        os.close(theirs)
        send_config(argv, ours)
    os.close(ours)
    found: list[Loaded] = []

    def receive() -> None:
        with open(theirs, "rb") as pipe:
            data = pipe.read()
        os.waitpid(pid, 0)
        with contextlib.suppress(msgspec.DecodeError):  # of a process that was ended, there is nothing or a part
            found.append(msgspec.msgpack.decode(data, type=Loaded))
            if has_engine and found[0].config.device == "cuda":
                open_early()

    thread = threading.Thread(target=receive, name="configuration")
    thread.start()

    def wait() -> Loaded | None:
        thread.join()
        return found[0] if found else None

    return wait


def end_with(parent: int) -> None:
    """Have this process end when its parent does, though it is downloading a checkpoint."""
    with contextlib.suppress(AttributeError, OSError):  # of Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def send_config(argv: Sequence[str], pipe: int) -> None:
    """Load the configuration and write it to a pipe, or nothing; this ends the process."""
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said, open(pipe, "wb") as file:
            args, start = module_of("flags").parse_flags(list(argv)), module_of("start")
            config = start.load_job(start.choose_job(args.overrides))
            if config.rank == 0 and not config.job.save_recipe:
                file.write(msgspec.msgpack.encode(Loaded(config, said.getvalue())))
    except BaseException:
        os._exit(1)
    os._exit(0)
