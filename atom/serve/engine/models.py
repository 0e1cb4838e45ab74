"""Serve several models: wake one for a request, and make room for it.

    models = Models(configs)
    await models.start()                     # those that do not sleep at first
    await models[0].acquire()                # waits until it is awake
    models.check()                           # regularly: an engine may hang, a model may be idle

At most serve.max_awake models are awake. For one more, the model that was used least recently is put to sleep: one that
nobody uses if there is any, else one whose requests then end first, while new ones wait for their turn. So is one if
the memory for another lacks. One model only is always awake, unless serve.idle_sleep_seconds is set, and the server
ends with its engines; of several, one that dies is loaded again when it is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from atom.config import Config
from atom.errors import AtomError, CapacityError, EngineDeadError
from atom.serve.engine.client import EngineState
from atom.serve.engine.process import WORKER, EngineProcess, Spare
from atom.serve.engine.replica import Replica
from atom.serve.engine.replicas import Replicas
from atom.serve.engine.served_model import ModelState, ServedModel

LOG = logging.getLogger("atom.serve")
DRAINING = "the server is draining"


class Models:
    """One task uses it."""

    def __init__(
        self,
        configs: Sequence[Config],
        command: tuple[str, ...] = WORKER,
        started: EngineProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        command: of an engine's process
        started: a process for the first engine of the first model
        clock: seconds, by which models are idle
        """
        self._spare: Spare | None = None  # for the next that wakes up
        if configs[0].serve.spare_engine:
            unused = started if started is not None and not started.is_configured else None
            self._spare, started = Spare(command, unused), None if unused is started else started
        self._has_several = len(configs) > 1
        self._models: list[ServedModel] = []
        for number, config in enumerate(configs):
            name = config.served_names[0]
            own = Replicas(config, command, None if number else started, name if self._has_several else None)
            self._models.append(ServedModel(name, own, self.wake, clock))
        self._max_awake = configs[0].serve.max_awake or len(configs)
        self.ready = asyncio.Event()  # those that do not sleep at first are loaded, or have been
        self.dead = asyncio.Event()  # one of them could not be loaded; or the only one has died
        self.fault: AtomError | None = None  # why it could not be
        self._first: list[ServedModel] = []  # which the start waits for
        self._waking: dict[ServedModel, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # that put models to sleep, and watch their engines
        self._falling: set[ServedModel] = set()  # about to be put to sleep since they are idle
        self._watched: set[ServedModel] = set()  # whose engines' death is waited for
        self._changing = asyncio.Lock()  # which models are awake
        # two that load at a time would take the same free memory of a GPU
        self._loading = asyncio.Semaphore(1 if configs[0].device == "cuda" else len(configs))
        self._is_draining = False

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __getitem__(self, number: int) -> ServedModel:
        return self._models[number]

    @property
    def state(self) -> EngineState:
        """Of the server: a model that sleeps does not keep it from being ready."""
        if self.dead.is_set():
            return EngineState.DEAD
        if self._is_draining:
            return EngineState.DRAINING
        only = None if self._has_several else self._models[0]
        if not self.ready.is_set():  # that of the only one is ready a moment before this is
            is_there = only is not None and only.engines.state is EngineState.READY
            return EngineState.READY if is_there else EngineState.LOADING
        return only.engines.state if only is not None and only.state is ModelState.LOADED else EngineState.READY

    @property
    def accepts(self) -> EngineState:
        """The same for requests: of several models, they wait until theirs is loaded."""
        state = self.state
        return EngineState.READY if state is EngineState.LOADING and self._has_several else state

    @property
    def doing(self) -> str:
        """The phases that starting engines are in."""
        loading = [each for each in self if each.state is ModelState.LOADING]
        return "; ".join(dict.fromkeys(filter(None, (each.engines.doing for each in loading))))

    @property
    def reason(self) -> str:
        """Why the engines are dead."""
        return "; ".join(dict.fromkeys(filter(None, (each.engines.reason for each in self))))

    async def start(self) -> None:
        """Start to load the models that do not sleep at first, as many as may be awake."""
        self._first = [each for each in self if not each.sleeps_at_first][: self._max_awake]
        for each in self._first:
            each.is_requested = True
            self.wake(each)
        if not self._first:
            self.ready.set()
            self._prepare_spare()

    def wake(self, model: ServedModel) -> asyncio.Task[None]:
        """Have a model loaded, unless it is being; the task that does so."""
        task = self._waking.get(model)
        if task is None or task.done():
            task = self._waking[model] = asyncio.create_task(self._load(model))
        return task

    async def load(self, model: ServedModel) -> None:
        """Load a model before it is asked for. EngineDeadError if it cannot be loaded."""
        if model.state is ModelState.LOADED:
            return
        if self._is_draining:
            raise EngineDeadError(DRAINING)
        model.is_requested = True
        await asyncio.shield(self.wake(model))
        if model.error is not None:
            raise EngineDeadError(f"{model.name} cannot be loaded: {model.error}")

    async def unload(self, model: ServedModel) -> None:
        """End a model's processes, once it is loaded if it is being, and nobody uses it."""
        if (waking := self._waking.get(model)) is not None:
            await asyncio.wait((waking,))
        await model.await_unused()
        async with self._changing:
            await model.sleep()

    @property
    def running(self) -> list[Replica]:
        """The engines that have requests."""
        return [engine for each in self for engine in each.engines.running]

    def check(self) -> None:
        """Declare engines dead whose processes hang or have ended, and put idle models to sleep."""
        for each in self:
            if each.state is not ModelState.UNLOADED:
                each.engines.check()
            if each.has_been_idle and each not in self._falling:
                self._falling.add(each)
                self._begin(self._sleep_if_idle(each))
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            if not task.cancelled() and (fault := task.exception()) is not None:
                raise fault

    def drain(self) -> None:
        """Accept no more requests."""
        self._is_draining = True
        for each in self:
            each.close(DRAINING)
            each.engines.drain()

    def close(self, reason: str) -> None:
        """Have all engines end, and all requests that run or wait."""
        for each in self:
            each.close(reason)
            each.engines.close(reason)
        self.dead.set()

    def has_ended(self) -> bool:
        """Whether all processes have ended."""
        return all(each.engines.has_ended() for each in self)

    async def end_dead(self) -> None:
        """Kill what is left of dead engines' processes, after some time for those that are ending by themselves."""
        await asyncio.gather(*(each.engines.end_dead() for each in self))

    async def end(self) -> str:
        """Kill what is left of all processes; how they ended."""
        tasks = [*self._waking.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._spare is not None:
            await asyncio.to_thread(self._spare.end)
        return ", ".join(await asyncio.gather(*(each.engines.end() for each in self)))

    async def _load(self, model: ServedModel) -> None:
        """Make room for a model, load it, and let in who waits for it."""
        try:
            while not await self._take_place(model):
                await self._await_others(model)
            if model.state is ModelState.LOADING:
                await self._load_evicting(model)
                self._watch(model)
        except Exception as error:
            if not isinstance(error, AtomError | OSError):
                LOG.exception("%s cannot be loaded", model.name)
            model.fail(error)
            if model in self._first and not self.ready.is_set():
                self.fault = self._name_fault(model)
                self.dead.set()
            elif not self.dead.is_set():  # else the server ends
                LOG.error("%s cannot be loaded", model.name, extra={"fields": {"reason": str(model.error)}})
            return
        if is_awake(model):
            model.admit()
            self._prepare_spare()
        if all(each.state is ModelState.LOADED for each in self._first):
            self.ready.set()

    def _prepare_spare(self) -> None:
        """Have a process ready for the next start, now that none is under way."""
        if self._spare is not None and not any(each.state is ModelState.LOADING for each in self):
            self._spare.prepare(is_piped=self._models[0].engines[0].is_piped)

    async def _take_place(self, model: ServedModel) -> bool:
        """Note that a model loads, and make room for it before. False: others are loading, which have to be waited for.

        Nothing is done if nobody wants it any more, or it is awake.
        """
        async with self._changing:
            if model.state is ModelState.LOADED or not model.is_wanted:
                return True
            while sum(is_awake(each) for each in self) >= self._max_awake:
                if not await self._evict(model):
                    return False
            model.state = ModelState.LOADING
            return True

    async def _await_others(self, model: ServedModel) -> None:
        """Wait until one of the other models that are loading is loaded, or cannot be."""
        tasks = [task for other, task in self._waking.items() if other is not model and not task.done()]
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _load_evicting(self, model: ServedModel) -> None:
        """Load a model, and put others to sleep for as long as memory lacks.

        At the start of the server, it is left for when it is asked for.
        """
        while True:
            try:
                async with self._loading:
                    return await model.load(self._spare)
            except CapacityError as error:
                fields = {"fields": {"reason": str(error)}}
                is_start = model in self._first and not self.ready.is_set()
                if is_start and len(self._first) > 1 and not model.num_waiting:
                    LOG.warning("%s lacks memory, and is loaded when it is asked for", model.name, extra=fields)
                    self._first.remove(model)
                    return model.leave_unloaded()
                async with self._changing:
                    if not await self._evict(model) and not await self._end_sleeping(model):
                        raise
                LOG.warning("%s lacked memory", model.name, extra=fields)

    async def _evict(self, model: ServedModel) -> bool:
        """Put another model to sleep; whether there was one."""
        others = [each for each in self if each is not model and each.state is ModelState.LOADED]
        if not others:
            return False
        victim = min(others, key=lambda each: (each.num_users > 0, each.used_at))
        LOG.info("%s makes room for %s", victim.name, model.name)
        await victim.sleep(victim.engines.config.serve.idle_sleep_level)
        return True

    async def _end_sleeping(self, model: ServedModel) -> bool:
        """End the processes of another model that sleeps, which hold some memory still; whether there was one."""
        others = [each for each in self if each is not model and each.state is ModelState.SLEEPING]
        if others:
            victim = min(others, key=lambda each: each.used_at)
            LOG.info("%s makes room for %s", victim.name, model.name)
            await victim.sleep()
        return bool(others)

    async def _sleep_if_idle(self, model: ServedModel) -> None:
        try:
            async with self._changing:
                if model.has_been_idle:
                    await model.sleep(model.engines.config.serve.idle_sleep_level)
        finally:
            self._falling.discard(model)

    def _watch(self, model: ServedModel) -> None:
        """Have the death of a model's engines noted, unless that is being watched."""
        if model not in self._watched and is_awake(model):
            self._watched.add(model)
            self._begin(self._await_death(model))

    async def _await_death(self, model: ServedModel) -> None:
        await model.engines.dead.wait()
        self._watched.discard(model)
        if model.state in (ModelState.UNLOADED, ModelState.LOADING):  # it was put to sleep, or could not wake up
            return
        if self.dead.is_set():  # the server ends
            return
        if self._has_several:
            model.note_death()
        else:
            self.dead.set()

    def _name_fault(self, model: ServedModel) -> AtomError | None:
        if self._has_several and model.error is not None:
            model.error.args = (f"{model.name}: {model.error}",)
        return model.error

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))


def is_awake(model: ServedModel) -> bool:
    return model.state in (ModelState.LOADING, ModelState.LOADED)
