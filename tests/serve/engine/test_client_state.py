from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from atom.config.load import load
from atom.errors import AtomError, EngineDeadError, RequestError
from atom.process.liveness import Vitals
from atom.runtime.metrics import EngineStats
from atom.sampling_params import SamplingParams
from atom.serve.engine.client import EngineClient, EngineState, QueueFullError
from atom.serve.engine.frames import encode
from atom.serve.engine.protocol import (
    Abort,
    Beat,
    End,
    Failed,
    Finish,
    FromEngine,
    Output,
    Outputs,
    Ready,
    Refused,
    Submit,
    ToEngine,
    to_engine,
)
from atom.serve.engine.stream import RequestStream, UnreadError
from atom.serve.http.errors import status_of

ONE = SamplingParams(max_tokens=4)
CONFIG = load(["serve.http.max_queue=3", "advanced.heartbeat_seconds=4"])


class Engine:
    """The other end of the socket, in the test's hand."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.frames = connection, to_engine()

    async def send(self, *messages: FromEngine) -> None:
        for message in messages:
            self.connection.sendall(encode(message))
        await asyncio.sleep(0.02)

    def heard(self) -> list[ToEngine]:
        self.connection.settimeout(0.5)
        return self.frames.feed(self.connection.recv(1 << 16))


def run(body: Callable[[EngineClient, Engine, list[float]], Awaitable[None]]) -> None:
    """Run a test with a client that is ready; the clock stands still unless its only value is changed."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        now = [0.0]
        with theirs:
            client, engine = EngineClient(CONFIG, clock=lambda: now[0]), Engine(theirs)
            await client.connect(ours)
            await asyncio.sleep(0.02)
            assert client.state is EngineState.LOADING
            await engine.send(Ready(100, "2 x A GPU"))
            assert (client.state, client.gpus) == (EngineState.READY, "2 x A GPU")
            await body(client, engine, now)
            client.close("the test is over")

    asyncio.run(main())


def token(id: str, reason: str | None = None) -> Output:
    return Output(id, 0, "a", [1], None, Finish(reason, 1, 0, 0.0) if reason else None)


def look(client: EngineClient, now: list[float], seconds: float, vitals: Callable[[], Vitals | None]) -> None:
    """Check for so long, or until it is dead."""
    for _ in range(round(seconds / 0.5)):
        now[0] += 0.5
        if client.state is not EngineState.DEAD:
            client.check(vitals())


def test_an_engine_that_neither_beats_nor_uses_the_cpu_is_dead_and_its_streams_end():
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        stream = client.submit([[1]], [ONE], id="r")
        for seconds in range(1, 6):
            look(client, now, 3.5, lambda: Vitals("S", 1.0))
            await engine.send(Beat(EngineStats(num_running=seconds)))
            assert client.state is EngineState.READY and client.stats.num_running == seconds
        look(client, now, 4.0, lambda: Vitals("S", 1.0))
        assert client.state is EngineState.READY
        look(client, now, 1.0, lambda: Vitals("S", 1.0))
        reason = "the engine has neither answered nor used the CPU for 4 s"
        assert client.state is EngineState.DEAD and client.reason == reason
        with pytest.raises(EngineDeadError, match=reason):
            await stream.next()
        assert not client.has_left, "the server has ended it"

    run(body)


def test_an_engine_that_is_busy_stopped_or_of_a_system_without_proc_is_alive():
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        look(client, now, 100, lambda: Vitals("R", now[0]))
        look(client, now, 100, lambda: None)
        look(client, now, 100, lambda: Vitals("T", 1.0))
        assert client.state is EngineState.READY and client.stopped == ["engine"]
        look(client, now, 3, lambda: Vitals("S", 1.0))
        assert client.state is EngineState.READY and client.stopped == []

    run(body)


def test_the_seconds_of_a_step_are_those_of_the_last_heartbeat_and_of_the_silence_since():
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        await engine.send(Beat(EngineStats(), step_seconds=50.0))
        look(client, now, 20, lambda: Vitals("R", now[0]))
        assert client.step_seconds == 69.5, "a look takes what came before it for just heard"
        await engine.send(Beat(EngineStats(), stopped_ranks=[1, 3]))
        look(client, now, 0.5, lambda: Vitals("S", now[0]))
        assert client.step_seconds == 0.0 and client.stopped == ["rank 1", "rank 3"]
        client.close("the test is over")
        assert client.stopped == []

    run(body)


def test_an_engine_that_was_killed_is_dead_though_its_children_keep_the_socket():
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        look(client, now, 2, lambda: Vitals("Z", 1.0))
        assert client.state is EngineState.DEAD and client.has_left
        assert client.reason == "the engine's process has ended"

    run(body)


def test_requests_that_the_engine_has_not_heard_of_count_as_waiting():
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        streams = [client.submit([[1]], [ONE], id=f"r{place}") for place in range(3)]
        assert client.num_waiting == 3
        with pytest.raises(QueueFullError) as refused:
            client.submit([[1]], [ONE], id="r3")
        assert refused.value.retry_after == 1
        await asyncio.sleep(0.02)
        assert [message.id for message in engine.heard() if isinstance(message, Submit)] == ["r0#1", "r1#2", "r2#3"]
        await engine.send(Outputs([token("r0#1")], num_seen=2, num_waiting={}))
        assert client.num_waiting == 1
        await engine.send(Outputs([token("r0#1", "eos")], num_seen=3, num_waiting={"": 1}))
        assert client.num_waiting == 1
        assert [output.text for output in await streams[0].next()] == ["a", "a"] and streams[0].is_done
        client.submit([[1]], [ONE], id="r4")

    run(body)


def test_a_request_that_can_never_wait_is_the_clients_fault():
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        with pytest.raises(RequestError, match="at most 3 may wait"):
            client.submit([[1], [2]], [ONE, SamplingParams(n=3)], id="many")

    run(body)


@pytest.mark.parametrize(("reason", "kind"), [("too long", RequestError), ("", AtomError)])
def test_a_refusal_ends_all_prompts_of_its_request(reason: str, kind: type[AtomError]):
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        stream = client.submit([[1], [2]], [ONE, ONE], id="r")
        await engine.send(Refused("r#2", reason), Outputs([token("r#1")], 2, {}))
        with pytest.raises(kind, match=reason or "could not prepare") as refused:
            await stream.next()
        assert type(refused.value) is kind
        assert stream.is_done and client.idle.is_set() and client.state is EngineState.READY

    run(body)


def test_an_answer_that_nobody_reads_ends_by_itself_and_takes_no_more_memory():
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        unread, other = (client.submit([[1]], [SamplingParams(n=1)], id=id) for id in ("unread", "other"))
        engine.heard()
        for _ in range(9):
            await engine.send(Outputs([token("unread#1")] * 2000, 2, {}))
        with pytest.raises(UnreadError, match="16384 pieces of its answer unread") as refused:
            await unread.next()
        assert status_of(refused.value) == 408 and unread.is_done
        assert [message.id for message in engine.heard() if isinstance(message, Abort)] == ["unread#1"]
        await engine.send(Outputs([token("other#2", "eos")], 2, {}))
        assert len(await other.next()) == 1 and client.num_sequences == 0 and client.idle.is_set()

    run(body)


def test_the_next_request_of_an_id_is_not_taken_for_the_one_that_was_aborted():
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        left = client.submit([[1]], [ONE], id="same")
        client.abort(left)
        stream = client.submit([[2]], [ONE], id="same")
        await asyncio.sleep(0.02)
        first, aborted, second = engine.heard()
        assert isinstance(first, Submit) and isinstance(aborted, Abort) and isinstance(second, Submit)
        assert aborted.id == first.id
        await engine.send(Outputs([token(first.id), token(first.id, "abort")], 2, {}))  # which were on their way
        client.abort(left)  # once its answer is written, as far as it came
        await engine.send(Outputs([token(second.id, "eos")], 2, {}))
        (output,) = await asyncio.wait_for(stream.next(), 20)
        assert output.finish is not None and output.finish.reason == "eos" and stream.is_done
        assert client.num_sequences == 0 and client.idle.is_set()

    run(body)


def test_an_id_is_refused_while_a_request_has_it():
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        stream = client.submit([[1], [2]], [ONE, ONE], id="same")
        with pytest.raises(RequestError, match="the request id same is in use"):
            client.submit([[3]], [ONE], id="same")
        await engine.send(Outputs([token("same#1", "eos"), token("same#2", "eos")], 2, {}))
        assert len(await stream.next()) == 2
        client.submit([[3]], [ONE], id="same")

    run(body)


def test_an_engine_is_asked_to_end_and_keeps_its_connection():
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        client.close("the server ends")
        await engine.send(Beat(EngineStats(num_running=3)))
        assert engine.heard() == [End()] and client.stats.num_running == 0
        with pytest.raises(TimeoutError):
            engine.heard()
        client.disconnect()
        await asyncio.sleep(0.02)
        assert engine.connection.recv(1) == b""

    run(body)


@pytest.mark.parametrize("way", ["failed", "closed", "garbage", "ended"])
def test_death_ends_every_stream_however_it_comes(way: str):
    async def body(client: EngineClient, engine: Engine, now: list[float]) -> None:
        streams: list[RequestStream] = [client.submit([[1]], [ONE], id=f"r{place}") for place in range(2)]
        readers = [asyncio.create_task(stream.next()) for stream in streams]
        await asyncio.sleep(0)
        if way == "failed":
            await engine.send(Failed("CapacityError", "no memory", 1))
        elif way == "closed":
            client.close("no memory")
        elif way == "garbage":
            engine.connection.sendall(b"\x03\x00\x00\x00abc")
        else:
            engine.connection.close()
        for reader in readers:
            with pytest.raises(EngineDeadError, match="no memory" if way in ("failed", "closed") else "has ended"):
                await asyncio.wait_for(reader, 60)
        assert client.state is EngineState.DEAD and client.dead.is_set() and client.idle.is_set()
        with pytest.raises(EngineDeadError):
            client.submit([[1]], [ONE], id="late")

    run(body)
