"""Which models are awake: woken up by requests, asleep when idle, and to make room; their engines are played."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import wire

from atom.config import Config
from atom.config.load import load
from atom.errors import EngineDeadError
from atom.serve.engine import replicas
from atom.serve.engine.client import EngineState, QueueFullError
from atom.serve.engine.frames import encode
from atom.serve.engine.models import Models
from atom.serve.engine.protocol import Done, End, Failed, Ready, Sleep, WakeUp, to_engine
from atom.serve.engine.replica import Replica
from atom.serve.engine.served_model import ModelState, ServedModel

IDLE = {"idle_sleep_seconds": 60.0}
LIGHT = {**IDLE, "idle_sleep_level": 1}
LACKS = "there is too little memory"


class Played(Replica):
    """An engine whose process a test plays."""

    events: list[str]  # what each was asked for
    lacking: list[str]  # names of models for which memory lacks, once each
    broken: list[str]  # of those that cannot be loaded
    stuck: list[str]  # of those that lack memory to wake up, once each
    gate: asyncio.Event  # no engine is ready before it is set

    async def start(self) -> None:
        ours, self.theirs = socket.socketpair()
        await self.client.connect(ours)
        self.events.append(f"start {self.model}")
        self.playing = asyncio.create_task(self._play())

    @property
    def model(self) -> str:
        return self.name.rpartition(" ")[2]

    async def _play(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self.theirs)
        await self.gate.wait()
        frames, is_lacking = to_engine(), self.model in self.lacking
        if is_lacking:
            self.lacking.remove(self.model)
        failed = "CapacityError" if is_lacking else "CheckpointError" if self.model in self.broken else None
        writer.write(encode(Ready(100) if failed is None else Failed(failed, LACKS, 1)))
        while data := await reader.read(1 << 16):
            for message in frames.feed(data):
                self.events.append(f"{type(message).__name__} {self.model}")
                if isinstance(message, Sleep | WakeUp):
                    is_stuck = isinstance(message, WakeUp) and self.model in self.stuck
                    if is_stuck:
                        self.stuck.remove(self.model)
                    is_sleeping = is_stuck or isinstance(message, Sleep)
                    writer.write(encode(Done(message.id, "", LACKS if is_stuck else "", is_sleeping=is_sleeping)))
                if isinstance(message, End):
                    writer.close()
                    return

    def has_ended(self) -> bool:
        return True


@functools.cache
def base() -> Config:
    return load(["device=cpu"])


def configured(name: str, max_queue: int, serve: dict[str, Any]) -> Config:
    http = replace(base().serve.http, served_model_name=[name], max_queue=max_queue)
    return replace(base(), serve=replace(base().serve, http=http, **serve))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


Play = Callable[..., list[str]]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """Run a test on models a, b, …; what their engines were asked for."""
    monkeypatch.setattr(replicas, "Replica", Played)

    def run(
        test: Callable[[Models, Clock], Awaitable[None]],
        names: str = "ab",
        lacking: list[str] | None = None,
        broken: list[str] | None = None,
        max_queue: int = 1024,
        **serve: Any,
    ) -> list[str]:
        configs = [configured(name, max_queue, serve) for name in names]
        events: list[str] = []
        seen: list[str] = []  # before the end

        async def main() -> None:
            gate = asyncio.Event()
            gate.set()
            for name, value in {
                "events": events,
                "lacking": lacking or [],
                "broken": broken or [],
                "stuck": [],
                "gate": gate,
            }.items():
                monkeypatch.setattr(Played, name, value, raising=False)
            clock = Clock()
            models = Models(configs, clock=clock)
            await models.start()
            await test(models, clock)
            seen.extend(events)
            models.close("the test is over")
            await models.end()

        asyncio.run(asyncio.wait_for(main(), wire.SECONDS))
        return seen

    return run


async def until(is_true: Callable[[], Any]) -> None:
    while not is_true():
        await asyncio.sleep(0)


def states(models: Models) -> str:
    return " ".join(f"{each.name}:{each.state}" for each in models)


async def use(model: ServedModel) -> None:
    await model.acquire()
    model.release()


def test_requests_at_once_wake_a_model_once(play: Play):
    async def test(models: Models, _: Clock) -> None:
        assert models.state is EngineState.READY and states(models) == "a:unloaded b:unloaded"
        await asyncio.gather(*(models[1].acquire() for _ in range(5)))
        assert models[1].num_users == 5 and states(models) == "a:unloaded b:loaded"

    assert play(test, **IDLE) == ["start b"]


def test_a_model_that_does_not_sleep_is_loaded_at_the_start(play: Play):
    async def test(models: Models, _: Clock) -> None:
        assert models.state is EngineState.LOADING and models.accepts is EngineState.READY
        await use(models[0])
        await models.ready.wait()
        assert models.state is EngineState.READY and states(models) == "a:loaded b:loaded"

    assert sorted(play(test)) == ["start a", "start b"]


def test_of_those_no_more_are_loaded_than_may_be_awake(play: Play):
    async def test(models: Models, _: Clock) -> None:
        await models.ready.wait()
        assert states(models) == "a:loaded b:loaded c:unloaded"

    assert sorted(play(test, max_awake=2, names="abc")) == ["start a", "start b"]


def test_a_stream_does_not_count_as_idle(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        await models[0].acquire()
        clock.now += 100
        assert not models[0].has_been_idle
        models[0].release()
        assert not models[0].has_been_idle, "it has just been used"
        clock.now += 60.1
        assert models[0].has_been_idle

    play(test, **IDLE)


def test_an_idle_model_sleeps_and_wakes_up_again(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        await use(models[0])
        clock.now += 60
        models.check()
        await asyncio.sleep(0)
        assert states(models) == "a:loaded b:unloaded", "it has been idle for 60 s, and no longer"
        clock.now += 0.1
        models.check()
        await until(lambda: models[0].state is ModelState.UNLOADED)
        await use(models[0])
        assert states(models) == "a:loaded b:unloaded"

    assert play(test, **IDLE) == ["start a", "End a", "start a"]


def test_with_a_level_its_engines_keep_their_processes(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        await use(models[0])
        clock.now += 61
        models.check()
        await until(lambda: models[0].state is ModelState.SLEEPING)
        await use(models[0])
        assert states(models) == "a:loaded b:unloaded"

    assert play(test, **LIGHT) == ["start a", "Sleep a", "WakeUp a"]


def test_engines_that_an_operator_has_woken_up_are_taken_as_they_are(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        await use(models[0])
        clock.now += 61
        models.check()
        await until(lambda: models[0].state is ModelState.SLEEPING)
        await models[0].engines.wake_up(None)
        await use(models[0])
        assert states(models) == "a:loaded b:unloaded"

    assert play(test, **LIGHT) == ["start a", "Sleep a", "WakeUp a"]


def test_one_that_cannot_wake_up_is_asleep_still(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        await use(models[0])
        clock.now += 61
        models.check()
        await until(lambda: models[0].state is ModelState.SLEEPING)
        Played.stuck.append("a")
        with pytest.raises(EngineDeadError, match=LACKS):
            await models[0].acquire()
        assert states(models) == "a:sleeping b:unloaded"
        clock.now += 1
        await use(models[0])
        assert states(models) == "a:loaded b:unloaded"

    assert play(test, **LIGHT) == ["start a", "Sleep a", "WakeUp a", "WakeUp a"]


def test_the_least_recently_used_one_makes_room(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        for number in (0, 1, 0, 2):
            clock.now += 1
            await use(models[number])
        assert states(models) == "a:loaded b:unloaded c:loaded"

    assert play(test, max_awake=2, **IDLE, names="abc") == ["start a", "start b", "End b", "start c"]


def test_one_that_nobody_uses_goes_before_one_that_has_requests(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        await models[0].acquire()
        clock.now += 1
        await use(models[1])
        await asyncio.wait_for(use(models[2]), 10)
        assert states(models) == "a:loaded b:unloaded c:loaded"

    assert "End a" not in play(test, max_awake=2, **IDLE, names="abc")


def test_a_model_with_requests_sleeps_only_after_them_and_later_ones_wait_for_their_turn(play: Play):
    async def test(models: Models, _: Clock) -> None:
        a, b = models
        await a.acquire()
        other = asyncio.create_task(b.acquire())
        await asyncio.sleep(0.01)
        later = asyncio.create_task(a.acquire())
        await asyncio.sleep(0.01)
        assert states(models) == "a:loaded b:unloaded" and not other.done() and not later.done()
        a.release()
        await other
        assert states(models) == "a:unloaded b:loaded" and not later.done()
        b.release()
        await later
        assert states(models) == "a:loaded b:unloaded"

    assert play(test, max_awake=1, **IDLE) == ["start a", "End a", "start b", "End b", "start a"]


def test_requests_for_two_models_are_all_served_where_one_may_be_awake(play: Play):
    served: list[str] = []

    async def answer(model: ServedModel) -> None:
        await model.acquire()
        await asyncio.sleep(0)
        served.append(model.name)
        model.release()

    async def test(models: Models, _: Clock) -> None:
        await asyncio.gather(*(answer(models[number % 3]) for number in range(60)))

    play(test, max_awake=1, **IDLE, names="abc")
    assert sorted(served) == sorted("abc" * 20)


def test_a_model_makes_room_if_memory_lacks_for_another(play: Play):
    async def test(models: Models, _: Clock) -> None:
        await use(models[0])
        await use(models[1])
        assert states(models) == "a:unloaded b:loaded"

    assert play(test, **IDLE, lacking=["b"])[:2] == ["start a", "start b"]


def test_what_sleeps_with_processes_loses_them_if_memory_lacks_still(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        await use(models[0])
        clock.now += 61
        models.check()
        await until(lambda: models[0].state is ModelState.SLEEPING)
        await use(models[1])
        assert states(models) == "a:unloaded b:loaded"

    assert play(test, **LIGHT, lacking=["b"]) == ["start a", "Sleep a", "start b", "End a", "start b"]


def test_at_the_start_one_that_lacks_memory_is_left_for_later(play: Play):
    async def test(models: Models, _: Clock) -> None:
        await models.ready.wait()
        assert states(models) == "a:loaded b:unloaded"
        await use(models[1])
        assert states(models) == "a:loaded b:loaded"

    play(test, lacking=["b"])


def test_one_that_cannot_be_loaded_says_why_and_is_tried_again_after_a_pause(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=LACKS):
                await models[0].acquire()
        clock.now += 1
        Played.broken.clear()
        await use(models[0])
        assert models[0].error is None

    assert play(test, **IDLE, broken=["a"]).count("start a") == 2, "the second request came in the pause"


def test_one_that_cannot_be_loaded_at_the_start_ends_it(play: Play):
    async def test(models: Models, _: Clock) -> None:
        await models.dead.wait()
        assert str(models.fault) == f"b: {LACKS}" and models.fault is not None and models.fault.exit_code == 2

    play(test, broken=["b"])


def test_the_death_of_one_leaves_the_others_as_they_are(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        for each in models:
            await use(each)
        for pause in (0.0, 1.0, 2.0, 4.0):
            models[0].engines[0].theirs.close()  # type: ignore[attr-defined]
            models[0].engines[0].playing.cancel()  # type: ignore[attr-defined]
            await until(lambda: models[0].state is ModelState.UNLOADED)
            if pause:
                with pytest.raises(EngineDeadError, match=f"again in {pause:.0f} s"):
                    await models[0].acquire()
            clock.now += pause
            await use(models[0])
            assert states(models) == "a:loaded b:loaded" and models.state is EngineState.READY

    assert play(test, **IDLE).count("start a") == 5


def test_the_death_of_the_only_one_is_that_of_the_server(play: Play):
    async def test(models: Models, _: Clock) -> None:
        await models.ready.wait()
        models[0].engines[0].theirs.close()  # type: ignore[attr-defined]
        models[0].engines[0].playing.cancel()  # type: ignore[attr-defined]
        await models.dead.wait()
        assert models.state is EngineState.DEAD

    assert play(test, names="a") == ["start engine"]


def test_the_only_one_is_ready_once_its_engine_is(play: Play):
    async def test(models: Models, _: Clock) -> None:
        while models[0].engines.state is not EngineState.READY:
            assert models.state is models.accepts is EngineState.LOADING
            await asyncio.sleep(0)
        assert models.state is models.accepts is EngineState.READY
        await use(models[0])

    play(test, names="a")


def test_a_client_that_leaves_keeps_nothing_awake(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        Played.gate.clear()
        waiting = asyncio.create_task(models[0].acquire())
        await until(lambda: models[0].state is ModelState.LOADING)
        waiting.cancel()
        await asyncio.sleep(0)
        Played.gate.set()
        await until(lambda: models[0].state is ModelState.LOADED)
        assert models[0].num_users == 0
        clock.now += 61
        models.check()
        await until(lambda: "End a" in Played.events)

    assert play(test, **IDLE) == ["start a", "End a"]


def test_one_that_leaves_as_it_is_let_in_keeps_nothing_awake(play: Play):
    async def test(models: Models, _: Clock) -> None:
        Played.gate.clear()
        waiting = asyncio.create_task(models[0].acquire())
        await until(lambda: models[0].state is ModelState.LOADING)
        admit = models[0].admit
        models[0].admit = lambda: (admit(), waiting.cancel())  # type: ignore[method-assign, func-returns-value, return-value]
        Played.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert models[0].state is ModelState.LOADED and models[0].num_users == 0

    play(test, **IDLE)


def test_no_more_wait_than_the_queue_holds(play: Play):
    async def test(models: Models, _: Clock) -> None:
        Played.gate.clear()
        waiting = [asyncio.create_task(models[0].acquire()) for _ in range(2)]
        await until(lambda: models[0].num_waiting == 2)
        with pytest.raises(QueueFullError):
            await models[0].acquire()
        Played.gate.set()
        await asyncio.gather(*waiting)

    play(test, **IDLE, max_queue=2)


def test_a_key_leaves_room_for_others_among_those_that_wait(play: Play):
    async def test(models: Models, _: Clock) -> None:
        Played.gate.clear()
        waiting = [asyncio.create_task(models[0].acquire("one")) for _ in range(2)]
        await until(lambda: models[0].num_waiting == 2)
        with pytest.raises(QueueFullError):
            await asyncio.wait_for(models[0].acquire("one"), 1)
        waiting.append(asyncio.create_task(models[0].acquire("other")))
        await until(lambda: models[0].num_waiting == 3)
        Played.gate.set()
        await asyncio.gather(*waiting)

    play(test, **IDLE, max_queue=4)


def test_those_that_wait_are_refused_when_the_server_drains(play: Play):
    async def test(models: Models, _: Clock) -> None:
        Played.gate.clear()
        waiting = asyncio.create_task(models[0].acquire())
        await until(lambda: models[0].num_waiting)
        models.drain()
        with pytest.raises(EngineDeadError, match="draining"):
            await waiting
        with pytest.raises(EngineDeadError, match="draining"):
            await models[1].acquire()
        assert models.state is models.accepts is EngineState.DRAINING

    play(test, **IDLE)


def test_an_operator_loads_and_unloads(play: Play):
    async def test(models: Models, _: Clock) -> None:
        await models.load(models[0])
        await models[0].acquire()
        unloading = asyncio.create_task(models.unload(models[0]))
        await asyncio.sleep(0.01)
        assert states(models) == "a:loaded b:unloaded"
        models[0].release()
        await unloading
        assert states(models) == "a:unloaded b:unloaded"
        with pytest.raises(EngineDeadError, match=LACKS):
            await models.load(models[1])

    play(test, **LIGHT, broken=["b"])


def test_what_an_operator_unloads_has_no_processes_also_if_it_slept_or_was_loading(play: Play):
    async def test(models: Models, clock: Clock) -> None:
        await use(models[0])
        clock.now += 61
        models.check()
        await until(lambda: models[0].state is ModelState.SLEEPING)
        await models.unload(models[0])
        assert states(models) == "a:unloaded b:unloaded"
        Played.gate.clear()
        loading = asyncio.create_task(models.load(models[1]))
        await until(lambda: models[1].state is ModelState.LOADING)
        unloading = asyncio.create_task(models.unload(models[1]))
        await asyncio.sleep(0)
        Played.gate.set()
        await asyncio.gather(loading, unloading)
        assert states(models) == "a:unloaded b:unloaded"

    assert play(test, **LIGHT) == ["start a", "Sleep a", "End a", "start b", "End b"]
