"""An engine of the server: its process and its client, through all its starts.

    replica = Replica(config, number=1, command=WORKER)
    await replica.start()
    stream = replica.client.submit(prompts, params, id="cmpl-1")
    replica.count_death(seconds=12.5)                  # of serving, until it died
    await asyncio.sleep(replica.pause)
    await replica.restart()                            # unless it `has_failed`

Each start has a process and a client of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from atom.config import Config
from atom.process.liveness import read_vitals
from atom.runtime.metrics import DEFAULT_VERSION
from atom.serve.engine.client import EngineClient, EngineState
from atom.serve.engine.process import EngineProcess, describe_exit
from atom.serve.engine.router import Load
from atom.serve.ops import log

LOG = logging.getLogger("atom.serve")
MAX_FAILURES = 3  # starts in a row
PAUSE_SECONDS = 1.0  # before a dead engine is started again; twice as long after each further death
MAX_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 60.0  # of serving after which the next death counts as the first
POLL_SECONDS = 0.02
END_SECONDS = 5.0  # for a process to end by itself


class Replica:
    """One engine of the server, through all its starts."""

    def __init__(
        self,
        config: Config,
        number: int,
        command: tuple[str, ...],
        started: EngineProcess | None = None,
        model: str | None = None,
    ) -> None:
        """
        started: a process for the first start
        model: its name, if the server has others too
        """
        self.number = number
        self.name = "the engine" if config.parallel.replicas == 1 else f"engine {number}"
        if model is not None:
            self.name += f" of {model}"
        self.client = EngineClient(config)  # of the present start
        self.num_restarts = 0
        self._num_failures = 0  # starts in a row that came to nothing
        self._num_deaths = 0  # in a row, without `STEADY_SECONDS` of serving in between
        self._config, self._command = config, command  # of the next start
        self._process: EngineProcess | None = None
        self._stopped: list[str] = []  # its stopped processes, as last logged
        self.is_paused = False  # its next start is, until it is resumed
        self.weight_version = DEFAULT_VERSION  # of its next start
        self.has_new_weights = False  # those of all engines are, which no start reads: it is not started again
        self.has_long_step = False  # it has ended none for `heartbeat_seconds`, which has been logged
        self._started = started
        self._is_only = model is None and number == 0

    @property
    def load(self) -> Load:
        num_waiting = self.client.num_waiting
        return Load(num_waiting, max(self.client.num_sequences - num_waiting, 0))

    @property
    def has_failed(self) -> bool:
        """Whether it stays dead: it has failed to serve too often, or would serve other weights than the others."""
        is_dead = self.client.state is EngineState.DEAD
        return self._num_failures >= MAX_FAILURES or (self.has_new_weights and is_dead)

    @property
    def pause(self) -> float:
        """Seconds before it is started again."""
        return min(PAUSE_SECONDS * 2.0 ** min(self._num_deaths - 1, 10), MAX_PAUSE_SECONDS)

    def count_death(self, seconds: float | None) -> None:
        """seconds: for which it has served; None: not at all"""
        self._num_failures = self._num_failures + 1 if seconds is None else 0
        self._num_deaths = 1 if (seconds or 0.0) >= STEADY_SECONDS else self._num_deaths + 1

    def set_adapters(self, adapters: Mapping[str, str]) -> None:
        """Have the next start load these adapters, paths by name."""
        self._config = replace(self._config, serve=replace(self._config.serve, lora_modules=dict(adapters)))

    async def start(self) -> None:
        """Start the process, or take the one that has been started if it suits. OSError if the system cannot."""
        relay = self._relay()
        started, self._started = self._started, None
        if started is not None and started.is_piped != (relay is not None):
            started.end()
            started.connection.close()
            started = None
        self._process = started or EngineProcess(self._command, is_piped=relay is not None)
        if relay is not None:
            self._process.relay(relay)
        self._process.configure(self._config, self.number, is_paused=self.is_paused, weight_version=self.weight_version)
        await self.client.connect(self._process.connection)

    @property
    def is_piped(self) -> bool:
        """Whether what its process prints is read here."""
        return self._relay() is not None

    def adopt(self, process: EngineProcess) -> None:
        """Take a process for the next start."""
        self._started = process

    def renew(self) -> None:
        """Prepare the next start, after an end that was asked for."""
        self.weight_version, self.has_new_weights = DEFAULT_VERSION, False
        self._renew_client()
        self._num_failures = self._num_deaths = 0

    def _renew_client(self) -> None:
        self.client = EngineClient(self._config)
        self.client.is_paused, self.client.weight_version = self.is_paused, self.weight_version

    async def restart(self) -> None:
        self.num_restarts += 1
        self._renew_client()
        try:
            await self.start()
        except OSError as error:
            self.client.close(f"the system cannot start it: {error}")

    def check(self) -> None:
        """Declare the engine dead if its process hangs or has ended; to be called regularly."""
        client, process = self.client, self._process
        if client.state is not EngineState.DEAD:
            client.check(None if process is None else read_vitals(process.pid))
        self._report_stopped()
        is_long = client.step_seconds >= self._config.advanced.heartbeat_seconds
        if is_long and not self.has_long_step:
            LOG.warning("%s is busy, and has ended no step for %.0f s", self.name, client.step_seconds)
        self.has_long_step = is_long

    def _report_stopped(self) -> None:
        stopped = self.client.stopped
        if stopped != self._stopped and self.client.state is not EngineState.DEAD:
            names = {"fields": {"stopped": stopped}}
            if stopped:
                LOG.warning("%s is stopped, and its requests wait", self.name, extra=names)
            else:
                LOG.info("%s is not stopped any more", self.name, extra=names)
        self._stopped = stopped

    def has_ended(self) -> bool:
        return self._process is None or self._process.has_ended()

    async def end(self) -> str:
        """Kill what is left of the process; how it ended."""
        if self._process is None:
            return "not started"
        code = await asyncio.to_thread(self._process.end)
        self.client.disconnect()
        return describe_exit(code, has_left=self.client.has_left)

    async def end_dead(self) -> str:
        """Kill what is left, after some time for a process that is ending by itself; how it ended."""
        loop = asyncio.get_running_loop()
        end = loop.time() + (END_SECONDS if self.client.has_left or self.client.error else 0.0)
        while not self.has_ended() and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)
        return await self.end()

    def _relay(self) -> Callable[[str], object] | None:
        """What takes the lines that the engine prints; None: it prints to our stderr, for one progress bar."""
        kind = self._config.serve.http.log
        if self._is_only and not log.is_json(kind):
            return log.pass_on if log.is_captured(kind) else None
        return partial(log.relay, process=self.name.removeprefix("the "))
