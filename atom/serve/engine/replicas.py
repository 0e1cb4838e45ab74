"""Run the server's engines, route requests to them, restart those that die.

    engines = Replicas(config)
    await engines.start()
    stream = engines.submit([[1, 2, 3]], [params], id="cmpl-1")      # where its prefix is cached, or load is least
    engines[stream.engine].client.stats
    engines.abort(stream)
    engines.check()                                                  # regularly: one may hang

A replica is an engine with a process, a client and a KV cache of its own. When one dies, its streams end with an error
and it is started again while others serve; after `MAX_FAILURES` starts in a row that fail it stays dead. When all are
dead, the server ends. A single replica takes the same path: no other serves meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from typing import Any

from msgspec import msgpack

from atom.config import Config
from atom.errors import (
    ArtifactError,
    AtomError,
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    PassError,
    RequestError,
    UnsupportedError,
    WeightsIncompleteError,
)
from atom.runtime.types import NO_OPTIONS, RequestOptions
from atom.sampling_params import SamplingParams
from atom.serve.engine.client import EngineClient, EngineState
from atom.serve.engine.events import wait_for_any
from atom.serve.engine.process import WORKER, EngineProcess
from atom.serve.engine.protocol import Output
from atom.serve.engine.replica import MAX_FAILURES, POLL_SECONDS, Replica
from atom.serve.engine.router import Load, Router, Sent
from atom.serve.engine.stream import RequestStream

LOG = logging.getLogger("atom.serve")
PIN = "X-data-parallel-rank"  # the header that names a replica, as in vLLM
KNOWN = (ConfigError, CheckpointError, UnsupportedError, CapacityError, PassError, ArtifactError)
ERRORS = {each.__name__: each for each in KNOWN}
CANNOT_LOAD = 2  # the exit code if the next start would fail in the same way
STATES = (EngineState.READY, EngineState.DRAINING, EngineState.LOADING, EngineState.DEAD)  # the first that one has


class Replicas:
    """The server's engines. One task uses it."""

    def __init__(
        self,
        config: Config,
        command: tuple[str, ...] = WORKER,
        started: EngineProcess | None = None,
        model: str | None = None,
    ) -> None:
        """
        command: of an engine's process
        started: the first engine's process, if it suits the configuration
        model: its name, if the server has others too
        """
        serve, num_replicas = config.serve, config.parallel.replicas
        self.config = config
        self.ready = asyncio.Event()  # one serves, or has served
        self.dead = asyncio.Event()  # all are
        self._replicas = [
            Replica(config, number, command, None if number else started, model) for number in range(num_replicas)
        ]
        self._router = Router(num_replicas, serve.block_size, enable_prefix_caching=serve.enable_prefix_caching)
        self._watching: list[asyncio.Task[None]] = []
        self.adapters: dict[str, str] = dict(serve.lora_modules or {})  # that requests may name: name -> path
        self._updating = asyncio.Lock()  # of them

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __getitem__(self, number: int) -> Replica:
        return self._replicas[number]

    @property
    def state(self) -> EngineState:
        """Ready if one is; dead if all are."""
        return min((each.client.state for each in self), key=STATES.index)

    @property
    def doing(self) -> str:
        """The phases that starting engines are in."""
        loading = [each.client for each in self if each.client.state is EngineState.LOADING]
        return "; ".join(dict.fromkeys(client.doing for client in loading))

    @property
    def gpus(self) -> str:
        return " + ".join(filter(None, (each.client.gpus for each in self)))

    @property
    def reason(self) -> str:
        """Why all are dead."""
        return "; ".join(dict.fromkeys(filter(None, (each.client.reason for each in self))))

    async def start(self) -> None:
        """Start all at once, again after a `stop`: the cache's locks let one of them compile.

        OSError if the system cannot.
        """
        if self.dead.is_set():
            self.dead.clear()
            self.ready.clear()
            for each in self:
                each.renew()
                self._router.forget(each.number)
        for each in self:
            await each.start()
        self._watching = [asyncio.create_task(self._watch(each)) for each in self]

    def submit(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        options: RequestOptions = NO_OPTIONS,
        *,
        id: str,
        pin: int | None = None,
    ) -> RequestStream:
        """Send a request to a replica, params for each of its prompts. The errors of `EngineClient.submit`.

        pin: the replica's number; None: the router chooses.
        """
        adapter = b"" if options.adapter is None else options.adapter.encode() + b"\0"
        steered = repr(options.steer).encode() if options.steer else b""
        request = self._router.hash(prompts, adapter + steered + options.salt)
        number = pin
        if number is None:
            loads = self._find_loads(sum(one.n for one in params), options.tenant)
            number = self._router.choose(request, loads)
        replica = self[number]
        if not replica.client.takes_requests:
            raise EngineDeadError(f"{replica.name} is {replica.client.state}")
        stream = replica.client.submit(prompts, params, options, id=id)
        stream.engine = number
        sent = self._router.send(number, request)
        if self._router.remembers:
            stream.watch = PrefixTracker(self._router, sent, stream, params, options.reads_prompt).note
        return stream

    def abort(self, stream: RequestStream) -> None:
        """Abort a request; its blocks are freed within a step."""
        self[stream.engine].client.abort(stream)

    def pinned(self, header: str | None) -> int | None:
        """The replica that a request's header names. RequestError if none has that number."""
        if header is None:
            return None
        if not (header.isascii() and header.isdigit() and len(header) < 5 and int(header) < len(self)):
            raise RequestError(f"{PIN}: {header[:20]!r} is not an engine here (known: 0 to {len(self) - 1})")
        return int(header)

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter in all engines, or in none. RequestError if that fails."""
        async with self._updating:
            serving = self._find_all_serving()
            done = await asyncio.gather(*(each.load_adapter(name, path) for each in serving), return_exceptions=True)
            faults = [each for each in done if each is not None]
            if faults:
                loaded = [client for client, fault in zip(serving, done, strict=True) if fault is None]
                await asyncio.gather(*(each.unload_adapter(name) for each in loaded), return_exceptions=True)
                raise faults[0]
            self._set_adapters(self.adapters | {name: path})

    async def unload_adapter(self, name: str) -> None:
        """Drop a LoRA adapter in all engines; requests that have it go on. RequestError if that fails."""
        async with self._updating:
            serving = self._find_all_serving()
            self._set_adapters({each: path for each, path in self.adapters.items() if each != name})
            await asyncio.gather(*(each.unload_adapter(name) for each in serving))

    def _find_serving(self) -> list[Replica]:
        """The replicas that serve. EngineDeadError if there is none."""
        serving = [each for each in self if each.client.takes_requests]
        if not serving:
            raise EngineDeadError(f"the engine is {self.state}")
        return serving

    def _find_all_serving(self) -> list[EngineClient]:
        """The clients of those that serve. EngineDeadError also if one is loading, since it would miss a change."""
        if loading := next((each.name for each in self if each.client.state is EngineState.LOADING), None):
            raise EngineDeadError(f"{loading} is loading; try again once it serves")
        return [each.client for each in self._find_serving()]

    def _set_adapters(self, adapters: dict[str, str]) -> None:
        self.adapters = adapters
        for each in self:
            each.set_adapters(adapters)

    async def profile(self, *, starts: bool) -> list[str]:
        """Start or stop the profiler of all that serve; the paths of the traces. RequestError if that fails."""
        profiling = (each.client.profile(starts=starts) for each in self._find_serving())
        done = await asyncio.gather(*profiling, return_exceptions=True)
        traces = [each for each in done if isinstance(each, str)]
        for fault in (each for each in done if isinstance(each, BaseException)):
            if starts or not traces:  # one that was started since then has no trace to stop
                raise fault
        return traces

    def abort_requests(self, ids: Collection[str] | None) -> int:
        """Have requests end with finish_reason abort, all with None; how many there are."""
        return sum(each.client.abort_requests(ids) for each in self)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Have all engines start no step until `resume`; requests wait there. One that starts meanwhile does so too.

        RequestError if one cannot; the others are paused.
        """
        serving = self._find_all_serving()
        for each in self:
            each.is_paused = True
        await _gather(client.pause(mode, clear_cache=clear_cache) for client in serving)

    async def resume(self) -> None:
        """Have all engines go on."""
        serving = self._find_all_serving()
        for each in self:
            each.is_paused = False
        await _gather(client.resume() for client in serving)

    async def set_weight_version(self, version: str) -> None:
        """Name the weights of all engines."""
        serving = self._find_all_serving()
        for each in self:
            each.weight_version = version
        await _gather(client.set_weight_version(version) for client in serving)

    async def init_weight_transfer(self, info: dict[str, Any]) -> None:
        """Have all engines prepare for a trainer. RequestError if they cannot, or the trainer does not come.

        info: vLLM's init_info; its rank_offset is the first engine's
        """
        offset, serving = info.get("rank_offset", 1), self._find_all_serving()
        if info.keys() & {"master_address", "nccl_unique_id_b64"} and len(serving) < len(self):
            raise EngineDeadError("an engine is dead, and the trainer would wait for its ranks")

        async def init(number: int, client: EngineClient) -> None:
            own = {"rank_offset": offset + number * self.config.parallel.num_ranks} if isinstance(offset, int) else {}
            await client.init_weight_transfer(msgpack.encode(info | own))

        await _gather(init(number, client) for number, client in enumerate(serving))

    async def start_weight_update(self) -> None:
        """Begin an update of several parts in all engines; requests wait until it has ended."""
        await self._change_weights(EngineClient.start_weight_update)

    async def update_weights(self, info: dict[str, Any]) -> None:
        """Update the weights of all engines. info: vLLM's update_info. RequestError if nothing has changed.

        WeightsIncompleteError if one has failed half-way, and serves nothing until it has been updated.
        """
        encoded = msgpack.encode(info)
        await self._change_weights(lambda client: client.update_weights(encoded))

    async def finish_weight_update(self, version: str | None) -> None:
        """End an update of several parts in all engines, and name the weights. The errors of `update_weights`."""
        await self._change_weights(lambda client: client.finish_weight_update(version))

    async def _change_weights(self, ask: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Ask all engines for a change after which no start would give an engine the weights of the others."""
        serving, had_new = self._find_all_serving(), any(each.has_new_weights for each in self)
        for each in self:  # ahead of it: one may die in it
            each.has_new_weights = True
        done = await asyncio.gather(*map(ask, serving), return_exceptions=True)
        faults = [each for each in done if each is not None]
        if broken := next((client.weights_fault for client in serving if client.weights_fault), ""):
            raise WeightsIncompleteError(broken)
        if all(isinstance(each, RequestError) for each in done):
            for each in self:
                each.has_new_weights = had_new
        elif faults:
            raise WeightsIncompleteError(f"engines differ in their weights now, repeat the update: {faults[0]}")
        if faults:
            raise faults[0]

    async def sleep(self, level: int, mode: str) -> None:
        """Have all engines give up their memory. RequestError if one cannot; the others sleep."""
        await self._ask_all(lambda client: client.sleep(level, mode))

    async def wake_up(self, tags: list[str] | None) -> None:
        """Have all engines take it again, or a part of it. RequestError if there is too little."""
        await self._ask_all(lambda client: client.wake_up(tags))

    async def reset_prefix_cache(self) -> None:
        """Have all engines forget the KV of all prompts."""
        await self._ask_all(EngineClient.reset_prefix_cache)

    async def _ask_all(self, ask: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Ask all engines, and wait for all of them; then the first error is raised."""
        await _gather(map(ask, self._find_all_serving()))

    @property
    def is_stopped(self) -> bool:
        """Whether each engine of this state has a process that is stopped."""
        return all(each.client.stopped for each in self if each.client.state is self.state)

    @property
    def is_sleeping(self) -> bool:
        return any(each.client.is_sleeping for each in self)

    @property
    def is_paused(self) -> bool:
        """Whether all that serve are."""
        serving = [each.client.is_paused for each in self if each.client.takes_requests]
        return bool(serving) and all(serving)

    @property
    def weights_fault(self) -> str:
        """Why none of those that serve can: updates of their weights have failed half-way. "": one can."""
        faults = [each.client.weights_fault for each in self if each.client.takes_requests]
        return faults[0] if faults and all(faults) else ""

    @property
    def weight_version(self) -> str:
        """The name of the weights, of the first engine that serves; `set_weight_version` sets that of all."""
        return next((each.client for each in self if each.client.takes_requests), self[0].client).weight_version

    def drain(self) -> None:
        """Accept no more requests."""
        for each in self:
            each.client.drain()

    @property
    def running(self) -> list[Replica]:
        """The replicas that have requests."""
        return [each for each in self if not each.client.idle.is_set()]

    def close(self, reason: str) -> None:
        """Have the engines end, and all running requests."""
        for each in self:
            each.client.close(reason)
        self.dead.set()

    def check(self) -> None:
        """Declare engines dead whose processes hang or have ended; to be called regularly."""
        for each in self:
            each.check()
        for task in self._watching:
            if task.done() and (fault := task.exception()) is not None:
                raise fault

    async def stop(self, reason: str, seconds: float) -> str:
        """Have the engines end, within so many seconds; how their processes ended. `start` starts them again."""
        self.close(reason)
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not self.has_ended() and loop.time() < end:
            await asyncio.sleep(POLL_SECONDS)
        return await self.end()

    def has_ended(self) -> bool:
        """Whether all processes have ended."""
        return all(each.has_ended() for each in self)

    async def end_dead(self) -> None:
        """Kill what is left of all dead engines' processes, after some time for those that are ending by themselves."""
        await asyncio.gather(*(each.end_dead() for each in self))

    async def end(self) -> str:
        """Kill what is left of all processes; how they ended."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        return ", ".join(await asyncio.gather(*(each.end() for each in self)))

    def load_error(self, end: str) -> AtomError:
        """Why none has loaded. end: how their processes have ended"""
        failed = next((each.client.error for each in self if each.client.error is not None), None)
        if failed is None:
            return EngineDeadError(f"{self.reason} while it loaded ({end})")
        if failed.kind not in ERRORS:
            return AtomError(f"{failed.kind}: {failed.error}")
        error = ERRORS[failed.kind](failed.error)
        error.exit_code = CANNOT_LOAD
        return error

    def _find_loads(self, num_sequences: int, tenant: str) -> dict[int, Load]:
        """The loads of replicas that serve; of those not stopped, if any; of those awake and not paused; with room.

        EngineDeadError if none serves.
        """
        serving = self._find_serving()
        whole = [each for each in serving if not each.client.weights_fault] or serving
        going = [each for each in whole if not each.client.stopped] or whole
        awake = [each for each in going if not (each.client.is_sleeping or each.client.is_paused)] or going
        roomy = [each for each in awake if each.client.has_room(num_sequences, tenant)]
        return {each.number: each.load for each in roomy or awake}

    async def _watch(self, replica: Replica) -> None:
        """Start a replica again whenever it dies while another serves, until it has failed too often."""
        while True:
            await self._await_death(replica)
            if self.state is EngineState.DEAD:
                self.dead.set()
                return
            self._router.forget(replica.number)
            fields = {"fields": {"reason": replica.client.reason, "exit": await replica.end_dead()}}
            if not replica.has_failed:
                LOG.error("%s is dead; it is started again in %g s", replica.name, replica.pause, extra=fields)
                await asyncio.sleep(replica.pause)
                while self.state is not EngineState.READY:  # with no other that serves, it must not hide their death
                    await asyncio.sleep(POLL_SECONDS)
            if replica.has_failed:
                why = f"has not come to serve in {MAX_FAILURES} starts in a row"
                if replica.has_new_weights:
                    why = "would come back with the weights of the files, which are not those of the others"
                LOG.error("%s %s: it stays dead; the others serve", replica.name, why, extra=fields)
                return
            await replica.restart()

    async def _await_death(self, replica: Replica) -> None:
        """Wait for a replica to serve, and to die; count its death."""
        client, loop = replica.client, asyncio.get_running_loop()
        await wait_for_any(None, client.ready, client.dead)
        began = loop.time()
        if client.ready.is_set():
            self._note_ready(replica)
        await client.dead.wait()
        replica.count_death(loop.time() - began if client.ready.is_set() else None)

    def _note_ready(self, replica: Replica) -> None:
        self._router.resize(replica.number, replica.client.num_blocks)
        self.ready.set()
        if len(self) > 1:
            LOG.info("%s serves%s", replica.name, " again" if replica.num_restarts else "")


async def _gather(asked: Iterable[Awaitable[None]]) -> None:
    """Wait for all; then the first error is raised."""
    done = await asyncio.gather(*asked, return_exceptions=True)
    if fault := next((each for each in done if each is not None), None):
        raise fault


class PrefixTracker:
    """Reports to the router what a request's answers are and how much of its prompts was cached."""

    def __init__(
        self,
        router: Router,
        sent: Sent,
        stream: RequestStream,
        params: list[SamplingParams],
        reads_prompt: bool,
    ) -> None:
        self._router, self._sent, self._stream, self._params = router, sent, stream, params
        self._reads_prompt = reads_prompt
        self._tokens: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # by prompt and answer

    def note(self, output: Output) -> None:
        prompt = self._stream.prompt_index[output.id]
        tokens = self._tokens[prompt, output.index]
        tokens += output.tokens
        if output.finish is not None and output.finish.reason != "error":
            # the siblings of the first answer take over what it has; what needs the whole prompt looks nothing up
            needs_prompt = self._params[prompt].prompt_logprobs is not None or self._reads_prompt
            is_asked = output.index == 0 and not needs_prompt
            self._router.finish(self._sent, prompt, tokens, output.finish.num_cached if is_asked else None)
