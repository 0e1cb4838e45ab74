"""One model of the server: its engines, awake or asleep, and who uses it.

    model = ServedModel("qwen", Replicas(config), wake)       # wake: has somebody load it, and `admit` who waits
    await model.acquire()                                     # waits until it is awake; not put to sleep until
    model.release()

Asleep, it has no processes; with serve.idle_sleep_level, its engines have given up their memory. A model whose engines
die is unloaded: the requests that they had fail, and the next one has it loaded again, after a pause if it fails often.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from enum import StrEnum

from atom.errors import AtomError, CapacityError, EngineDeadError, RequestError
from atom.serve.engine.client import QueueFullError
from atom.serve.engine.events import wait_for_any
from atom.serve.engine.process import Spare
from atom.serve.engine.replicas import Replicas

LOG = logging.getLogger("atom.serve")
MAX_PAUSE_SECONDS = 60.0  # between two starts of a model that fails
STEADY_SECONDS = 60.0  # of serving after which the next death counts as the first
END_SECONDS = 5.0  # for processes to end, if they have no KV to write
RETRY_SECONDS = 5  # after which a request that found too many waiting may come again


class ModelState(StrEnum):
    """In the words of llama.cpp's router."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"  # its engines have given up their memory


class ServedModel:
    """One task of the event loop at a time may `load` it or put it to `sleep`; any may use it."""

    def __init__(
        self,
        name: str,
        engines: Replicas,
        wake: Callable[[ServedModel], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.engines = name, engines
        self.state = ModelState.UNLOADED
        self.num_users = 0  # requests that keep it awake
        self.used_at = clock()  # when one of these began or ended
        self.is_requested = False  # an operator waits for it, or the start of the server
        self.error: AtomError | None = None  # why it could not be loaded, or died
        self._serve = engines.config.serve
        self._wake, self._clock = wake, clock
        self._waiters: dict[asyncio.Future[None], str] = {}  # their keys
        self._is_leaving = False  # who comes now waits until it has been woken up again
        self._unused = asyncio.Event()
        self._unused.set()
        self._is_closed = ""  # why nobody may use it any more
        self._num_failures = 0  # in a row
        self._retry_at = -math.inf
        self._loaded_at = 0.0
        self._ending: asyncio.Task[str] | None = None  # of the processes of engines that have died

    @property
    def num_waiting(self) -> int:
        """Requests that wait until it is awake."""
        return len(self._waiters)

    @property
    def is_wanted(self) -> bool:
        return self.is_requested or self.num_waiting > 0

    @property
    def has_engines(self) -> bool:
        """Whether its engines have processes, of which one serves, or may."""
        return self.state in (ModelState.LOADED, ModelState.SLEEPING)

    @property
    def is_asleep(self) -> bool:
        """Whether it has no processes, and that is not for a fault."""
        return self.state is ModelState.UNLOADED and self.error is None

    @property
    def sleeps_at_first(self) -> bool:
        """Whether it is not loaded before the first request."""
        return self._serve.idle_sleep_seconds is not None

    @property
    def has_been_idle(self) -> bool:
        """Whether it is awake, and nobody has used it for idle_sleep_seconds."""
        seconds = self._serve.idle_sleep_seconds
        if seconds is None or self.state is not ModelState.LOADED or self.num_users or self.is_wanted:
            return False
        return self._clock() - self.used_at > seconds

    def acquire_now(self) -> bool:
        """The same as `acquire`, if it is awake; whether it is."""
        self.used_at = self._clock()
        is_awake = self.state is ModelState.LOADED and not self._is_leaving
        if is_awake:
            self._add_user()
        return is_awake

    async def acquire(self, tenant: str = "") -> None:
        """Wait until it is awake, and keep it so until `release`.

        EngineDeadError if it cannot be loaded, or has just failed; QueueFullError if max_queue requests wait already,
        or as many of this key as it leaves free (as in `EngineClient.has_room`).

        tenant: the key's name, if there are several
        """
        if self.acquire_now():
            return
        if self._is_closed:
            raise EngineDeadError(self._is_closed)
        if (seconds := self._retry_at - self._clock()) > 0:
            raise EngineDeadError(f"{self.error}; it is loaded again in {math.ceil(seconds)} s at the earliest")
        own = sum(each == tenant for each in self._waiters.values()) if tenant else 0
        if len(self._waiters) + own >= self._serve.http.max_queue:
            raise QueueFullError(len(self._waiters), RETRY_SECONDS)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = tenant
        self._wake(self)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release()  # it was let in, and has left in the same moment
            raise
        finally:
            self._waiters.pop(waiter, None)

    def release(self) -> None:
        self.num_users -= 1
        self.used_at = self._clock()
        if not self.num_users:
            self._unused.set()

    def admit(self) -> None:
        """Note that it is awake, and let in who waits, before it can be put to sleep again."""
        self.state, self.error, self.is_requested = ModelState.LOADED, None, False
        self.used_at = self._loaded_at = self._clock()
        waiters, self._waiters = self._waiters, {}
        for each in waiters:
            if not each.done():
                self._add_user()
                each.set_result(None)

    def fail(self, error: Exception) -> None:
        """Note that it could not be loaded; who waits gets the error."""
        self.state = ModelState.SLEEPING if self._has_processes else ModelState.UNLOADED
        self.is_requested = False
        self.error = error if isinstance(error, AtomError) else AtomError(f"the system cannot start it: {error}")
        self._num_failures += 1
        self._retry_at = self._clock() + min(2.0 ** min(self._num_failures - 1, 10), MAX_PAUSE_SECONDS)
        self._refuse(f"{self.name} cannot be loaded: {self.error}")

    def leave_unloaded(self) -> None:
        """Give up loading it until it is asked for."""
        self.state, self.is_requested = ModelState.UNLOADED, False

    def note_death(self) -> None:
        """Note that its engines have died. The first death after some time of serving is followed by no pause."""
        self.state = ModelState.UNLOADED
        self.error = EngineDeadError(f"{self.name}: {self.engines.reason}")
        is_first = self._clock() - self._loaded_at >= STEADY_SECONDS or not self._num_failures
        self._num_failures = 1 if is_first else self._num_failures + 1
        pause = 0.0 if is_first else min(2.0 ** min(self._num_failures - 2, 10), MAX_PAUSE_SECONDS)
        self._retry_at = self._clock() + pause
        fields = {"reason": self.engines.reason}
        LOG.error("%s is dead, and loaded again when it is asked for", self.name, extra={"fields": fields})
        self._ending = asyncio.create_task(self._end_dead())

    async def load(self, spare: Spare | None = None) -> None:
        """Start its engines, or wake them up, and wait for one. CapacityError if memory lacks; AtomError, OSError."""
        if self._ending is not None:
            await self._ending
            self._ending = None
        if self._has_processes:
            try:  # an operator may have woken them up
                return await self.engines.wake_up(None) if self.engines.is_sleeping else None
            except RequestError as error:
                raise CapacityError(str(error)) from None
            except EngineDeadError:
                self._ending = asyncio.create_task(self._end_dead())
                raise
        if spare is not None and (process := spare.take()) is not None:
            self.engines[0].adopt(process)
        try:
            await self.engines.start()
        except OSError:
            await self.engines.stop("the system cannot start it", 0.0)
            raise
        await wait_for_any(None, self.engines.ready, self.engines.dead)
        if not self.engines.ready.is_set():
            raise self.engines.load_error(await self._end_dead())

    async def sleep(self, level: int | None = None) -> None:
        """Wait until nobody uses it, and put it to sleep, deeper if it sleeps; who comes meanwhile waits to be let in.

        level: as of /sleep; None: its processes end
        """
        self._is_leaving = True
        try:
            await self._unused.wait()
            is_there = self.state is ModelState.LOADED or (self.state is ModelState.SLEEPING and level is None)
            if not is_there:  # it has died
                return
            self._num_failures = 0
            if level is None or not await self._doze(level):
                self.state = ModelState.UNLOADED
                kept = 0.0 if self._serve.kv_cache_dir is None else self._serve.http.drain_seconds  # to write KV
                await self.engines.stop(f"{self.name} is asleep", END_SECONDS + kept)
            LOG.info("%s sleeps", self.name, extra={"fields": {"state": str(self.state)}})
        finally:
            self._is_leaving = False

    async def await_unused(self) -> None:
        await self._unused.wait()

    def close(self, reason: str) -> None:
        """Let nobody wait for it any more."""
        self._is_closed = reason
        self._refuse(reason)

    @property
    def _has_processes(self) -> bool:
        return self.engines.ready.is_set() and not self.engines.dead.is_set()

    async def _doze(self, level: int) -> bool:
        """Have its engines give up their memory; whether they did."""
        try:
            await self.engines.sleep(level, "wait")
        except AtomError as error:
            LOG.warning("%s cannot sleep (%s); its processes end", self.name, error)
            return False
        self.state = ModelState.SLEEPING
        return True

    async def _end_dead(self) -> str:
        await self.engines.end_dead()
        return await self.engines.end()

    def _add_user(self) -> None:
        self.num_users += 1
        self._unused.clear()

    def _refuse(self, reason: str) -> None:
        waiters, self._waiters = self._waiters, {}
        for each in waiters:
            if not each.done():
                each.set_exception(EngineDeadError(reason))
