"""The engine's client in the HTTP process: submit requests, receive outputs.

    client = EngineClient(config)
    await client.connect(connection)                       # a socket whose other end is the engine process's
    stream = client.submit([[1, 2, 3]], [params], id="cmpl-1")
    while not stream.is_done:
        for output in await stream.next():
            print(output.text)

Each running request has a stream; its outputs wake the one task that waits for it. When the engine dies, every stream
ends with an EngineDeadError.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from enum import StrEnum
from socket import socket

from msgspec.structs import replace

from atom.config import Config
from atom.errors import AtomError, EngineDeadError, RequestError
from atom.process.liveness import Life, Vitals, Watch
from atom.runtime.metrics import DEFAULT_VERSION, EngineStats
from atom.runtime.types import NO_OPTIONS, RequestOptions
from atom.sampling_params import SamplingParams
from atom.serve.engine.frames import Frames, Message, encode
from atom.serve.engine.protocol import (
    Abort,
    Beat,
    Done,
    End,
    Failed,
    FinishWeightUpdate,
    FromEngine,
    InitWeightTransfer,
    LoadAdapter,
    Output,
    Outputs,
    Pause,
    Profile,
    Ready,
    Refused,
    ResetPrefixCache,
    Resume,
    SetWeightVersion,
    Sleep,
    StartWeightUpdate,
    Submit,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
    from_engine,
)
from atom.serve.engine.stream import MAX_UNREAD, RequestStream, UnreadError

SMOOTHING = 0.1  # weight of the newest interval between two finished sequences in their mean


class EngineState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class QueueFullError(AtomError):
    """Too many requests wait."""

    limit = "queue_full"  # as a LimitError has one

    def __init__(self, num_waiting: int, retry_after: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting, and no more may; try again in {retry_after} s")
        self.retry_after = retry_after  # seconds


class EngineClient(asyncio.Protocol):
    """The client of one engine. /health reports `state`; the last heartbeat brought `stats`."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = EngineState.LOADING
        self.stats = EngineStats()
        self.doing = "starting the engine"  # while it loads
        self.num_blocks = 0  # of KV, from `Ready`
        self.gpus = ""  # of the heartbeat too
        self.num_sequences = 0  # of requests that run or wait
        self.error: Failed | None = None  # why the engine died, if it could report it
        self.reason = ""  # why it is dead, for clients
        self.is_sleeping = False  # it has given up memory, or a part of it
        self.is_paused = False  # it starts no step until it is resumed
        self.weight_version = DEFAULT_VERSION
        self.weights_fault = ""  # why it serves nothing: an update of its weights has failed half-way
        self.has_left = False  # its process ended, or is about to, unexpectedly
        self.ready = asyncio.Event()
        self.dead = asyncio.Event()
        self.idle = asyncio.Event()  # no request is running
        self.idle.set()
        self._config = config
        self._clock = clock
        self._streams: dict[str, RequestStream] = {}  # by the ids of prompts in the engine
        self._ids: set[str] = set()  # of the requests that have these
        self._numbers = itertools.count()
        self._asked: dict[str, asyncio.Future[str]] = {}  # what operators wait for, by id
        self._frames: Frames[FromEngine] = from_engine()
        self._transport: asyncio.Transport | None = None
        self._watch = Watch(config.advanced.heartbeat_seconds)
        self._is_stopped = False
        self._stopped_ranks: list[int] = []
        self._step_seconds = 0.0  # of the step that ran at the last heartbeat
        self._finished_at = clock()  # when the last sequence finished
        self._interval = 0.0  # mean seconds between two finished sequences
        self._num_sent = 0  # Submit messages
        self._unseen: deque[tuple[int, str, int]] = deque()  # Submits that the engine has not received
        self._num_unseen = Counter[str]()  # sequences of these, by tenant
        self._num_waiting: dict[str, int] = {}  # sequences that wait in the engine, by tenant

    async def connect(self, connection: socket) -> None:
        """Connect to an engine process that has the configuration."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=connection)

    @property
    def num_waiting(self) -> int:
        """Sequences that are not admitted, including those that the engine has not received yet."""
        return sum(self._num_waiting.values()) + self._num_unseen.total()

    def has_room(self, num_sequences: int, tenant: str = "") -> bool:
        """Whether this many more may wait.

        A tenant may have no more of the queue than what is left of it, so that there is always room for others
        (Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet switches, 1998).
        """
        room = self._config.serve.http.max_queue - self.num_waiting
        own = self._num_waiting.get(tenant, 0) + self._num_unseen[tenant] if tenant else 0
        return own + num_sequences <= room

    def submit(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        options: RequestOptions = NO_OPTIONS,
        *,
        id: str,
    ) -> RequestStream:
        """Send a request, params for each of its prompts.

        QueueFullError beyond max_queue, RequestError for a request that exceeds it by itself or whose id is in use,
        EngineDeadError if the engine is dead.
        """
        if not self.takes_requests:
            raise EngineDeadError(f"the engine is {self.state}")
        if self.weights_fault:
            raise EngineDeadError(self.weights_fault)
        num_sequences, limit = sum(one.n for one in params), self._config.serve.http.max_queue
        if num_sequences > limit:
            raise RequestError(f"{num_sequences} answers in a request; at most {limit} may wait (serve.http.max_queue)")
        if not self.has_room(num_sequences, options.tenant):
            raise QueueFullError(self.num_waiting, self.retry_after())
        if id in self._ids:
            raise RequestError(f"the request id {id} is in use; choose another")
        # numbered, so that what the engine still sends of an aborted request is not taken for that of its id's next one
        ids = [f"{id}#{number}" for number in range(self._num_sent + 1, self._num_sent + 1 + len(prompts))]
        stream = RequestStream(id, ids, num_sequences)
        self._ids.add(id)
        self.idle.clear()
        self.num_sequences += num_sequences
        for each, prompt, one in zip(ids, prompts, params, strict=True):
            self._streams[each] = stream
            self._num_sent += 1
            self._unseen.append((self._num_sent, options.tenant, one.n))
            self._num_unseen[options.tenant] += one.n
            self._send(Submit(each, prompt, one, options))
        return stream

    def retry_after(self) -> int:
        """Whole seconds until the queue should have room, at the recent rate of finished sequences."""
        return min(max(math.ceil(self._interval), 1), 60)

    def abort(self, stream: RequestStream) -> None:
        """Abort a request; its blocks are freed within a step."""
        stream.stop_timer()
        if ids := self._forget(stream):
            self.num_sequences -= stream.num_running
        for id in ids:
            self._send(Abort(id))

    def abort_requests(self, ids: Collection[str] | None) -> int:
        """Have requests end with finish_reason abort, which their streams bring; how many there are.

        ids: of requests that may run; None: of all
        """
        chosen = {each for each in self._streams.values() if ids is None or each.id in ids}
        for id in [id for stream in chosen for id in stream.prompt_index if id in self._streams]:
            self._send(Abort(id))
        return len(chosen)

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Have the engine start no step until `resume`; see `atom.runtime.engine.Engine.pause`."""
        await self._ask(lambda id: Pause(id, mode, clear_cache))

    async def resume(self) -> None:
        """Have it go on."""
        await self._ask(Resume)

    async def set_weight_version(self, version: str) -> None:
        """Name the weights that sample from now on."""
        await self._ask(lambda id: SetWeightVersion(id, version))

    async def init_weight_transfer(self, info: bytes) -> None:
        """Have the engine prepare for a trainer, and wait for it. info: vLLM's init_info, in msgpack"""
        await self._ask(lambda id: InitWeightTransfer(id, info))

    async def start_weight_update(self) -> None:
        """Begin an update of several parts; requests wait until it has ended."""
        await self._ask(StartWeightUpdate)

    async def update_weights(self, info: bytes) -> None:
        """Update weights. info: vLLM's update_info, in msgpack. RequestError if nothing has changed."""
        await self._ask(lambda id: UpdateWeights(id, info))

    async def finish_weight_update(self, version: str | None) -> None:
        """End an update of several parts, and name the weights."""
        await self._ask(lambda id: FinishWeightUpdate(id, version))

    async def profile(self, *, starts: bool) -> str:
        """Start or stop the profiler; return the path of the trace. RequestError if that fails."""
        return await self._ask(lambda id: Profile(id, starts))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter. RequestError if that fails."""
        await self._ask(lambda id: LoadAdapter(id, name, path))

    async def unload_adapter(self, name: str) -> None:
        """Drop a LoRA adapter; requests that have it go on. RequestError if that fails."""
        await self._ask(lambda id: UnloadAdapter(id, name))

    async def sleep(self, level: int, mode: str) -> None:
        """Have the engine give up its memory; requests wait there meanwhile. RequestError if it cannot."""
        await self._ask(lambda id: Sleep(id, level, mode))

    async def wake_up(self, tags: list[str] | None) -> None:
        """Have it take its memory again, or a part of it. RequestError if there is too little."""
        await self._ask(lambda id: WakeUp(id, tags))

    async def reset_prefix_cache(self) -> None:
        """Have the engine forget the KV of all prompts."""
        await self._ask(ResetPrefixCache)

    async def _ask(self, make: Callable[[str], Message]) -> str:
        """Send a message of an id, and wait for its answer. AtomError for an internal error."""
        if self.state is not EngineState.READY:
            raise EngineDeadError(f"the engine is {self.state}")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        id = f"ask-{next(self._numbers)}"
        self._asked[id] = answer
        self._send(make(id))
        return await answer

    @property
    def takes_requests(self) -> bool:
        """Also while it drains: of those that have come before, some are still being prepared."""
        return self.state in (EngineState.READY, EngineState.DRAINING)

    def drain(self) -> None:
        """Accept no more requests but those that have come."""
        if self.state in (EngineState.READY, EngineState.LOADING):
            self.state = EngineState.DRAINING

    def close(self, reason: str) -> None:
        """Have the engine end, and all running requests. The connection stays: its end would hurry the engine."""
        if self.state is not EngineState.DEAD:
            self._send(End())
            self._end_requests(reason)

    def disconnect(self) -> None:
        """Close the connection, once the engine's process has ended."""
        if self._transport is not None:
            self._transport.close()

    @property
    def stopped(self) -> list[str]:
        """The engine's processes that are stopped."""
        if self.state is EngineState.DEAD:
            return []
        own = ["engine"] if self._is_stopped else []
        return own + [f"rank {rank}" for rank in self._stopped_ranks]

    @property
    def step_seconds(self) -> float:
        """Seconds since a busy engine last ended a step, as far as is known; 0 if it is idle."""
        is_open = self.state in (EngineState.READY, EngineState.DRAINING)
        return self._step_seconds + self._watch.silence if is_open else 0.0

    def check(self, vitals: Vitals | None) -> None:
        """Declare the engine dead if its process hangs or has ended; to be called regularly.

        vitals: of its process; None if unknown
        """
        life = self._watch.look(self._clock(), vitals)
        self._is_stopped = life is Life.STOPPED
        if life is Life.HUNG:
            self._die(f"the engine has neither answered nor used the CPU for {self._watch.seconds:g} s")
        elif life is Life.ENDED:  # what it has started may keep its end of the socket open
            self.connection_lost(None)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._watch.hear()
        if self.state is EngineState.DEAD:  # it is ending
            return
        for message in self._frames.feed(data):
            self._handle(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.has_left = self.has_left or self.state is not EngineState.DEAD
        self._die("the engine's process has ended")

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Outputs():
                self._note_seen(message.num_seen, message.num_waiting)
                now = asyncio.get_running_loop().time()
                for output in message.outputs:
                    self._push_output(output, now)
            case Beat(stats, doing, step_seconds, stopped_ranks):
                self.stats, self.doing = stats, doing or self.doing
                self._step_seconds, self._stopped_ranks = step_seconds, stopped_ranks
            case Refused(id, error):
                self._fail(id, RequestError(error) if error else AtomError("the engine could not prepare this request"))
            case Done(id, result, error, is_internal, is_sleeping, is_paused):
                self.is_sleeping, self.is_paused = is_sleeping, is_paused
                self.weight_version, self.weights_fault = message.weight_version, message.weights_fault
                answer, fault = self._asked.pop(id), AtomError(error) if is_internal else RequestError(error)
                if not answer.done():
                    answer.set_exception(fault) if error else answer.set_result(result)
            case Ready(num_blocks, gpus):
                self.num_blocks, self.gpus = num_blocks, gpus
                self.ready.set()
                if self.state is EngineState.LOADING:
                    self.state = EngineState.READY
            case Failed():
                self.error = message
                self._die(message.error)

    def _push_output(self, output: Output, now: float) -> None:
        if output.finish is not None:
            finished_at = self._clock()
            self._interval += SMOOTHING * (finished_at - self._finished_at - self._interval)
            self._finished_at = finished_at
        stream = self._streams.get(output.id)
        if stream is None:
            return  # the request has been aborted
        if stream.is_full:
            self.abort(stream)
            fault = f"the client has left {MAX_UNREAD} pieces of its answer unread; the rest is not computed"
            return stream.fail(UnreadError(fault), drops=True)
        stream.push(output, now)
        self.num_sequences -= output.finish is not None
        if output.finish is not None and not stream.num_running:
            self._forget(stream)

    def _note_seen(self, num_seen: int, num_waiting: dict[str, int]) -> None:
        self._num_waiting = num_waiting
        while self._unseen and self._unseen[0][0] <= num_seen:
            _, tenant, num_sequences = self._unseen.popleft()
            self._num_unseen[tenant] -= num_sequences

    def _forget(self, stream: RequestStream) -> list[str]:
        """Free a request's id; the ids of its prompts in the engine, none if they were forgotten before."""
        ids = [id for id in stream.prompt_index if self._streams.pop(id, None) is not None]
        if ids:
            self._ids.discard(stream.id)
        self._note_idle()
        return ids

    def _note_idle(self) -> None:
        if not self._streams:
            self.idle.set()

    def _fail(self, id: str, error: AtomError) -> None:
        """End a request with an error, for all its prompts."""
        stream = self._streams.get(id)
        if stream is not None:
            self.abort(stream)
            stream.fail(error)

    def _die(self, reason: str) -> None:
        if self.state is not EngineState.DEAD:
            self._end_requests(reason)
            self.disconnect()

    def _end_requests(self, reason: str) -> None:
        self.state, self.reason, self.is_sleeping = EngineState.DEAD, reason, False
        for stream in set(self._streams.values()):
            stream.fail(EngineDeadError(reason))
        self._streams.clear()
        self._ids.clear()
        self._unseen.clear()
        self._num_unseen, self._num_waiting, self.num_sequences = Counter(), {}, 0
        self.stats = replace(
            self.stats,
            num_running=0,
            num_waiting=0,
            num_blocks_used=0,
            num_host_blocks_used=0,
            num_retained_blocks=0,
            running_adapters=[],
            waiting_adapters=[],
        )
        self._note_idle()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(reason))
        self.dead.set()

    def _send(self, message: Message) -> None:
        if self._transport is not None:
            self._transport.write(encode(message))
