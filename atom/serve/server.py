"""Run the server: start the engines, listen, drain, end.

    code = run_loop(Server(config).run, config.serve.http)

SIGTERM and Ctrl-C drain: running requests may end within drain_seconds, new ones get 503. A second signal ends at once,
and so does one while the engines load. SIGHUP reads the files of keys and certificates anew. An engine that dies or
hangs is started again while others serve (`atom.serve.engine.replicas`); if none does, the server ends with
an exit code on which a supervisor restarts it. One of several models is started again when it is asked for
(`atom.serve.engine.models`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
import ipaddress
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from typing import Any

import uvicorn
from starlette.types import ASGIApp

import atom
from atom.config import Config, HTTPConfig
from atom.errors import AtomError, ConfigError
from atom.process.gc_utils import settle
from atom.serve.app import create_app
from atom.serve.auth.tenants import read_tenants
from atom.serve.context import Context, Shared, read_template
from atom.serve.engine.client import EngineState
from atom.serve.engine.events import wait_for_any
from atom.serve.engine.models import Models
from atom.serve.engine.process import WORKER, EngineProcess
from atom.serve.http.protocol import limited_protocol
from atom.serve.loading import open_tokenizer
from atom.serve.ops import log
from atom.serve.ops.metrics import Metrics
from atom.serve.ops.server_metrics import ServerMetrics
from atom.serve.ops.systemd import adopt, notify

LOG = logging.getLogger("atom.serve")
TICK_SECONDS = 0.5  # between two checks of the engines
DEAD_SECONDS = 5.0  # for /health to report the engines' death before the server ends
POLL_SECONDS = 0.02
END_SECONDS = 5.0  # for connections to close, and for the engines' processes to end and the last spans to be sent
BACKLOG = 2048  # connections that wait to be accepted
MAX_FILES = 1 << 16  # connections and files that a process may have open, if the system allows so many


def run_loop(serve: Callable[[], Coroutine[Any, Any, int]], http: HTTPConfig) -> int:
    """Run a server and return its exit code. The log takes what is printed meanwhile too."""
    log.configure(http.log, http.log_level)
    raise_file_limit()
    with contextlib.ExitStack() as opened:
        if log.is_captured(http.log):
            opened.enter_context(log.capture())
        opened.callback(log.flush)  # the command line's error comes after the log
        runner = opened.enter_context(asyncio.Runner(loop_factory=find_loop()))
        try:
            return runner.run(serve())
        except (AtomError, OSError):  # reported by the command line
            raise
        except Exception:
            LOG.exception("the server failed")
            return 1


def raise_file_limit() -> None:
    """Allow as many connections as the hard limit does: the soft one, often 1024, is for programs that call select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_files = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < max_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, hard))


def find_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop if it is installed, else asyncio's."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


class Server:
    def __init__(
        self,
        config: Config,
        worker: tuple[str, ...] = WORKER,
        started: EngineProcess | None = None,
        others: Sequence[Config] = (),
    ) -> None:
        """ConfigError, with nothing started, if the keys or the template cannot be read, or the address is in use.

        worker: the command of an engine's process
        started: the first engine's process
        others: the other models
        """
        http, configs = config.serve.http, [config, *others]
        self._config = config
        self._templates = list(map(read_template, configs))
        self._engines = Models(configs, worker, started)
        self._metrics = metrics = ServerMetrics(has_several=bool(others))
        self._shared = shared = Shared(config, self._engines)
        for own, model in zip(configs, self._engines, strict=True):
            Context(own, model.engines, Metrics(model.engines, metrics, model), shared=shared, served=model)
        self._context = shared.contexts[0]
        tenants = read_tenants(http)
        app = create_app(self._context, tenants)
        check_certificate(http)
        passed = adopt(config.advanced.listen_fds, config.advanced.listen_pid)
        self._is_passed = passed is not None  # requests wait in the socket's queue until the engines are ready
        self._opens_late = self._is_passed or http.listen_when_ready
        self._is_open = asyncio.Event()  # requests can come
        self._socket = passed or bind(http.host, http.port)
        if not self._opens_late:
            listen(self._socket)
        checkpoints = ", ".join(one.checkpoint or one.model.name for one in configs)
        fields = {"version": atom.__version__, "checkpoint": checkpoints}
        LOG.info("starting", extra={"fields": {**fields, "pid": os.getpid(), "port": self._port}})
        if not tenants and not is_loopback(self._socket):
            fix = "set serve.http.api_keys (or ATOM_API_KEYS, VLLM_API_KEY), or serve.http.host=127.0.0.1"
            LOG.warning("whoever reaches port %d may use this server, as it has no API keys: %s", self._port, fix)
        self._uvicorn = _Uvicorn(uvicorn_config(app, config, metrics))
        self._end_requested = asyncio.Event()
        self._signals: list[int] = []
        self._is_idle = False  # it ends since nobody has asked for long
        self._has_reported_death = False
        self._ending: asyncio.Task[None] | None = None  # kills what is left of dead engines' processes
        self._busy_at = time.perf_counter()  # it was last seen to load or to answer
        self._fault: Exception | None = None  # an error of this process
        self._code = 0

    async def run(self) -> int:
        """Serve until a signal or the engines' death; return the exit code. AtomError if none can start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._handle_signal, number)
        if not sys.stderr.isatty():
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # that the terminal is gone
            loop.add_signal_handler(signal.SIGHUP, self._handle_signal, signal.SIGHUP)
        serving = asyncio.create_task(self._serve())
        try:
            await self._engines.start()
            for context, template in zip(self._shared.contexts, self._templates, strict=True):
                open_tokenizer(context, template, self._fail)
            announcing = asyncio.create_task(self._announce())
            await self._watch()
            announcing.cancel()
            if self._is_idle:  # what has come since is answered
                self._uvicorn.config.timeout_graceful_shutdown = int(self._config.serve.http.drain_seconds)
                self._uvicorn.end()
                await serving
        finally:
            self._uvicorn.end()
            self._engines.close("the server ends before this request has been answered")
            await serving
            self._shared.close()
            engine_end = await self._end()
        if self._fault is not None:
            raise self._fault
        if not self._signals and not self._is_idle and self._engines.fault is not None:
            raise self._engines.fault
        LOG.info("ended", extra={"fields": {"engine": engine_end}})
        return self._code

    async def _serve(self) -> None:
        """Accept connections: from the start or, if the port opens late, once requests can be answered."""
        if self._opens_late:
            ready = asyncio.gather(self._engines.ready.wait(), self._shared.await_tokenizers())
            ending = asyncio.create_task(self._uvicorn.ended.wait())
            waited: list[asyncio.Future[Any]] = [ready, ending]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            if not ready.done():
                ready.cancel()
                return
            try:
                listen(self._socket)
            except ConfigError as error:  # another server has opened the port meanwhile
                return self._fail(error)
        self._is_open.set()
        await self._uvicorn.serve([self._socket])

    async def _end(self) -> str:
        """Wait for the engines to end, unless the end is forced or they are dead; return how they ended.

        The last spans are sent meanwhile.
        """
        loop, traces = asyncio.get_running_loop(), self._shared.traces
        serve = self._config.serve
        keep_seconds = 0.0 if serve.kv_cache_dir is None else serve.http.drain_seconds  # to write KV to files
        start = loop.time()
        end = start + (0.0 if self._has_reported_death else END_SECONDS + keep_seconds)
        while not self._is_forced:
            is_sending = traces is not None and traces.is_sending and loop.time() < start + END_SECONDS
            if not is_sending and (self._engines.has_ended() or loop.time() >= end):
                break
            await asyncio.sleep(POLL_SECONDS)
        return await self._engines.end()

    @property
    def _port(self) -> int:
        return int(self._socket.getsockname()[1])

    @property
    def _is_forced(self) -> bool:
        return len(self._signals) > 1

    async def _watch(self) -> None:
        """Watch the engines and signals; return when the server must end."""
        while not self._end_requested.is_set() and self._engines.state is not EngineState.DEAD:
            await wait_for_any(TICK_SECONDS, self._end_requested, self._engines.dead)
            self._engines.check()
            if self._has_been_idle():
                self._is_idle = True
                notify(self._config.advanced.notify_socket, "STOPPING=1")
                LOG.info("idle", extra={"fields": {"seconds": self._config.serve.idle_exit_seconds}})
                return None
        if self._engines.state is EngineState.DEAD:
            return await self._report_death()
        self._end_requested.clear()  # so that the next signal forces the end
        self._code = 130 if self._signals[0] == signal.SIGINT else 0
        if self._engines.ready.is_set():
            await self._drain()
        return None

    def _has_been_idle(self) -> bool:
        """Whether no request has come for idle_exit_seconds since the engines have become ready, and none runs."""
        seconds, now = self._config.serve.idle_exit_seconds, time.perf_counter()
        has_loaded = self._engines.ready.is_set() and self._shared.has_tokenizers
        if not has_loaded or self._metrics.num_open or self._engines.running:
            self._busy_at = now
        self._busy_at = max(self._busy_at, self._metrics.ended_at)
        return seconds is not None and not self._end_requested.is_set() and now - self._busy_at > seconds

    async def _drain(self) -> None:
        """Wait until no request runs or is prepared, or the end is forced."""
        engines, seconds = self._engines, self._config.serve.http.drain_seconds
        engines.drain()
        if self._is_passed:
            self._uvicorn.stop_listening()  # what comes now waits in the socket's queue for the next server
        notify(self._config.advanced.notify_socket, "STOPPING=1")
        LOG.info("draining", extra={"fields": {"seconds": seconds}})
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end and not self._end_requested.is_set():
            # requests of an engine that is paused do not end: nobody can resume it any more
            running = [each for each in engines.running if not each.client.is_paused]
            is_preparing = self._shared.num_preparing > 0
            if not running and not is_preparing:
                break
            idle = [each.client.idle for each in running[:1]]
            tick = POLL_SECONDS if is_preparing else TICK_SECONDS
            await wait_for_any(min(tick, end - loop.time()), *idle, self._end_requested, engines.dead)
            engines.check()
            if engines.state is EngineState.DEAD:
                return await self._report_death()

    async def _report_death(self) -> None:
        """Let /health report the death for a while, unless a signal ends the server. All streams have ended."""
        self._code = 1
        self._ending = asyncio.create_task(self._engines.end_dead())  # now: one that hangs keeps its memory
        if self._engines.ready.is_set():
            what = "the engine is dead" if len(self._context.engines) == 1 else "all engines are dead"
            LOG.error(what, extra={"fields": {"reason": self._engines.reason}})
            if not self._signals:
                await wait_for_any(DEAD_SECONDS, self._end_requested)
                self._has_reported_death = True

    def _handle_signal(self, number: int) -> None:
        self._signals.append(number)
        self._end_requested.set()
        if self._is_forced:
            self._uvicorn.force_exit = True

    def _reload(self) -> None:
        """Read the files of keys and certificates anew; what is wrong with one is logged, and all stays as it was."""
        http = self._config.serve.http
        try:
            tenants = read_tenants(http)
            check_certificate(http)
        except ConfigError as error:
            LOG.error("nothing is reloaded: %s", error)
            return
        self._shared.admit(tenants)
        if http.ssl_certfile is not None and self._uvicorn.config.loaded:
            assert self._uvicorn.config.ssl is not None, "it has a certificate"
            self._uvicorn.config.ssl.load_cert_chain(http.ssl_certfile, http.ssl_keyfile)  # of new connections
        LOG.info("reloaded", extra={"fields": {"keys": [each.name for each in tenants]}})

    def _fail(self, error: Exception) -> None:
        self._fault = error
        self._engines.close(str(error))

    async def _announce(self) -> None:
        """Print the server's address and notify systemd, once it serves."""
        await self._engines.ready.wait()
        await self._shared.await_tokenizers()
        await self._is_open.wait()
        settle()
        host, port = self._socket.getsockname()[0], self._port
        http = self._config.serve.http
        scheme = "https" if http.ssl_certfile else "http"
        shown = f"[{host}]" if ":" in host else "localhost" if host == "0.0.0.0" else host
        names = ", ".join(name for each in self._shared.contexts for name in each.names)
        LOG.info("%s at %s://%s:%d%s (Ctrl-C drains, twice ends at once)", names, scheme, shown, port, http.root_path)
        notify(self._config.advanced.notify_socket, "READY=1")


def uvicorn_config(app: ASGIApp, config: Config, metrics: ServerMetrics) -> uvicorn.Config:
    http = config.serve.http
    return uvicorn.Config(
        app,
        http=limited_protocol(config, metrics),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(END_SECONDS),
        timeout_keep_alive=65,
        ssl_certfile=http.ssl_certfile,
        ssl_keyfile=http.ssl_keyfile,
    )


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.servers = []  # uvicorn sets it only when it listens
        self.ended = asyncio.Event()

    def capture_signals(self) -> Any:
        """Leave signals to this module."""
        return nullcontext()

    async def main_loop(self) -> None:
        """Wait for an event, while uvicorn polls ten times a second whether it must end."""
        while not self.ended.is_set():
            await self.on_tick(0)  # updates the date header
            await wait_for_any(1.0, self.ended)

    def stop_listening(self) -> None:
        """Accept no more connections. A socket that was passed stays open in the process that has passed it."""
        for server in self.servers:
            server.close()

    def end(self) -> None:
        self.should_exit = True
        self.ended.set()


def bind(host: str, port: int) -> socket.socket:
    """Open a socket with an address. ConfigError if it is in use."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, proto)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except OSError as error:
        raise address_fault(host, port, error) from None
    return opened


def listen(opened: socket.socket) -> None:
    """Let clients connect; until then they are refused. ConfigError if another process listens at the address."""
    try:
        opened.listen(BACKLOG)
    except OSError as error:
        host, port, *_ = opened.getsockname()
        raise address_fault(host, port, error) from None


def address_fault(host: str, port: int, error: OSError) -> ConfigError:
    is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
    fix = f"choose another serve.http.{'port' if is_port else 'host'}"
    return ConfigError(f"cannot listen on {host}:{port} ({error.strerror or error}); {fix}")


def check_certificate(http: HTTPConfig) -> None:
    """ConfigError if the files of HTTPS cannot be used."""
    if http.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(http.ssl_certfile, http.ssl_keyfile, lambda: "")
    except (OSError, ssl.SSLError) as error:
        files = f"serve.http.ssl_certfile={http.ssl_certfile}"
        files += f", serve.http.ssl_keyfile={http.ssl_keyfile}" if http.ssl_keyfile else ""
        raise ConfigError(
            f"{files}: {getattr(error, 'strerror', None) or error}; give PEM files, the key unlocked"
        ) from None


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    return ipaddress.ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback
