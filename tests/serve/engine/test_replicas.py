"""What replicas do without a server: their processes, the client's counts, pauses between starts."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import wire

from atom.compiler.artifact import launch_ingredients, recipe_of
from atom.config.load import load
from atom.errors import EngineDeadError, RequestError
from atom.kernels import find_target
from atom.process.liveness import Vitals
from atom.sampling_params import SamplingParams
from atom.serve.engine import replica, replicas, worker
from atom.serve.engine.client import EngineState
from atom.serve.engine.frames import Start, encode
from atom.serve.engine.process import EngineProcess
from atom.serve.engine.protocol import Finish, Output, Outputs, Ready
from atom.serve.engine.replica import Replica
from atom.serve.engine.replicas import Replicas

ONE = SamplingParams(max_tokens=4)


class Played(Replica):
    """A replica whose process a test plays: each start takes what comes next, None for one that comes to nothing."""

    script: list[list[bool]]  # by number, whether each start comes to serve
    clock: list[tuple[float, int]]

    async def start(self) -> None:
        ours, self.theirs = socket.socketpair()
        self.clock.append((asyncio.get_running_loop().time(), self.number))
        await self.client.connect(ours)
        if self.script[self.number].pop(0):
            self.theirs.sendall(encode(Ready(100)))
        else:
            self.theirs.close()

    def has_ended(self) -> bool:
        return True


def play(
    monkeypatch: pytest.MonkeyPatch, script: list[list[bool]], body: Callable[[Replicas], Awaitable[None]]
) -> list[tuple[float, int]]:
    """Run a test on two replicas whose starts go as the script has it; when each was started, in pauses."""
    monkeypatch.setattr(replicas, "Replica", Played)
    monkeypatch.setattr(replica, "PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(replica, "MAX_PAUSE_SECONDS", 0.4)
    clock: list[tuple[float, int]] = []
    monkeypatch.setattr(Played, "script", script, raising=False)
    monkeypatch.setattr(Played, "clock", clock, raising=False)

    async def main() -> None:
        engines = Replicas(load(["parallel=dp2", "device=cpu"]))
        await engines.start()
        await body(engines)
        engines.close("the test is over")
        await engines.end()

    asyncio.run(asyncio.wait_for(main(), wire.SECONDS))
    return clock


def kill(engines: Replicas, number: int) -> None:
    engines[number].theirs.close()  # type: ignore[attr-defined]


async def until(is_true: Callable[[], Any]) -> None:
    while not is_true():
        await asyncio.sleep(0.005)


def test_a_replica_that_dies_again_and_again_waits_twice_as_long_each_time(monkeypatch: pytest.MonkeyPatch):
    pauses = [0.1, 0.2, 0.4, 0.4]  # not beyond the longest

    async def body(engines: Replicas) -> None:
        for num_restarts, pause in enumerate(pauses):
            await until(lambda: engines[1].client.state is EngineState.READY)
            assert engines[1].num_restarts == num_restarts
            kill(engines, 1)
            await until(lambda: engines[1].client.state is not EngineState.READY)
            assert engines.state is EngineState.READY and not engines.dead.is_set()
            await until(lambda: engines[1].num_restarts > num_restarts)  # noqa: B023
            assert engines[1].pause == pause
        await until(lambda: engines[1].client.state is EngineState.READY)

    clock = play(monkeypatch, [[True], [True] * 5], body)
    times = [at for at, number in clock if number == 1]
    assert all(
        later - earlier >= pause for (earlier, later), pause in zip(itertools.pairwise(times), pauses, strict=True)
    )


def test_a_stopped_engine_gets_no_requests_while_another_runs(monkeypatch: pytest.MonkeyPatch):
    async def body(engines: Replicas) -> None:
        await until(lambda: all(each.client.state is EngineState.READY for each in engines))
        chosen = []
        for number in range(4):
            engines[0].client.check(Vitals("T", 1.0))
            chosen.append(engines.submit([[number]], [ONE], id=f"r{number}").engine)
        assert chosen == [1, 1, 1, 1] and not engines.is_stopped
        engines[1].client.check(Vitals("T", 1.0))
        assert engines.is_stopped and engines.submit([[5]], [ONE], id="last").engine == 0, "by load, as when both run"
        engines[0].client.check(Vitals("S", 1.0))
        assert not engines.is_stopped and engines.state is EngineState.READY

    play(monkeypatch, [[True], [True]], body)


def test_starts_that_come_to_nothing_are_counted_in_a_row(monkeypatch: pytest.MonkeyPatch):
    async def body(engines: Replicas) -> None:
        await until(lambda: engines[1].num_restarts == 2 and engines[1].client.state is EngineState.READY)
        assert not engines[1].has_failed  # two had failed
        kill(engines, 1)
        await until(lambda: engines[1].has_failed)
        assert engines[1].num_restarts == 5 and engines.state is EngineState.READY

    play(monkeypatch, [[True], [False, False, True, False, False, False]], body)


def test_with_nobody_that_serves_nobody_is_started_again(monkeypatch: pytest.MonkeyPatch):
    async def body(engines: Replicas) -> None:
        await until(lambda: engines.state is EngineState.READY)
        kill(engines, 0)
        await until(lambda: engines[0].client.state is EngineState.DEAD)
        kill(engines, 1)
        await engines.dead.wait()
        assert engines.state is EngineState.DEAD and engines.reason == "the engine's process has ended"
        await asyncio.sleep(0.3)
        assert engines[0].num_restarts == engines[1].num_restarts == 0
        with pytest.raises(EngineDeadError, match="the engine is dead"):
            engines.submit([[1]], [ONE], id="late")

    play(monkeypatch, [[True], [True]], body)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_adapter_that_one_engine_cannot_load_is_dropped_by_the_other(failing: int, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[int, str]] = []

    async def body(engines: Replicas) -> None:
        await until(lambda: all(each.client.state is EngineState.READY for each in engines))
        for engine in engines:

            async def load_adapter(name: str, path: str, number: int = engine.number) -> None:
                calls.append((number, f"load {name}"))
                if number == failing:
                    raise RequestError("there is no such folder")

            async def unload_adapter(name: str, number: int = engine.number) -> None:
                calls.append((number, f"unload {name}"))

            monkeypatch.setattr(engine.client, "load_adapter", load_adapter)
            monkeypatch.setattr(engine.client, "unload_adapter", unload_adapter)
        with pytest.raises(RequestError, match="there is no such folder"):
            await engines.load_adapter("sql", "/adapters/sql")
        assert sorted(calls) == sorted([(0, "load sql"), (1, "load sql"), (1 - failing, "unload sql")])
        assert "sql" not in engines.adapters

    play(monkeypatch, [[True], [True]], body)


def test_a_load_is_of_sequences_that_wait_and_run(monkeypatch: pytest.MonkeyPatch):
    async def body(engines: Replicas) -> None:
        await until(lambda: all(each.client.state is EngineState.READY for each in engines))
        many = engines.submit([[1], [2]], [SamplingParams(n=2, max_tokens=4)] * 2, id="many", pin=0)
        more = engines.submit([[3]], [ONE], id="more", pin=0)
        assert engines[0].load == (5, 0) and engines[1].load == (0, 0)
        done = Output("many#2", 1, "a", [1], None, Finish("eos", 1, 0, 0.0))
        engines[0].theirs.sendall(encode(Outputs([done], num_seen=3, num_waiting={"": 1})))  # type: ignore[attr-defined]
        await until(lambda: engines[0].load == (1, 3))
        engines.abort(many)
        assert engines[0].load == (1, 0)
        engines.abort(many)
        engines.abort(more)
        assert engines[0].client.num_sequences == 0 and engines.running == []

    play(monkeypatch, [[True], [True]], body)


LISTEN = """
import contextlib, socket, sys
from atom.serve.engine.link import Link

link = Link(socket.socket(fileno=int(sys.argv[-1])))
with contextlib.suppress(EOFError), open(sys.argv[1], "a") as file:
    while True:
        for message in link.receive():
            print(type(message).__name__, message.replica, message.config.serve.max_num_seqs, file=file, flush=True)
"""


def test_each_engine_gets_its_number_and_the_configuration_once_though_one_had_it_before(tmp_path: Path):
    config = load(["parallel.replicas=2", "serve.http.log=json", "serve.max_num_seqs=77", "device=cpu"])
    report = tmp_path / "report"
    command = (sys.executable, "-c", LISTEN, str(report))
    started = EngineProcess(command, is_piped=True)
    started.configure(config)

    async def main() -> None:
        engines = Replicas(config, command, started)
        await until(lambda: report.exists() and report.read_text())  # before there is a client
        await engines.start()
        await until(lambda: len(report.read_text().splitlines()) == 2)
        engines.close("the test is over")
        await engines.end()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert sorted(report.read_text().splitlines()) == ["Start 0 77", "Start 1 77"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["device=cuda"], ["None"]),
        (["device=cpu", "parallel=dp2"], ["None", "None"]),
        (["device=cuda", "parallel=dp2"], ["0", "1"]),
        (["device=cuda", "parallel=dp2", "parallel.visible_devices='5, GPU-8f3,2'"], ["5", "GPU-8f3"]),
        (["device=cuda", "parallel=dp2_tp3", "parallel.visible_devices='5,4,2,3,1,0'"], ["5,4,2", "3,1,0"]),
    ],
)
def test_each_of_several_replicas_sees_the_gpus_of_its_ranks(
    texts: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("atom.config.check_parallel.count_devices", lambda: 6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = load(texts)
    code = """
import ctypes, os, sys
from atom.serve.engine import worker

def show(*_):
    getenv = ctypes.CDLL(None).getenv  # which CUDA asks
    getenv.restype = ctypes.c_char_p
    name = "CUDA_VISIBLE_DEVICES"
    print(os.environ.get(name), (getenv(name.encode()) or b"None").decode(), file=sys.stderr, flush=True)
    os._exit(0)

worker.open_early = lambda: None
worker.main(show)
"""
    seen: list[str] = []
    for number in range(len(expected)):
        process = EngineProcess((sys.executable, "-c", code), is_piped=True)  # which has no variables of its own
        process.relay(seen.append)
        process.connection.sendall(encode(Start(config, number)))
        wire.wait_until(process.has_ended, 20)
        process.end()
    assert [line.split() for line in seen] == [[each, each] for each in expected]


@pytest.mark.parametrize("is_piped", [True, False])
def test_a_process_that_was_started_before_is_the_first_engine_s_if_it_suits(is_piped: bool):
    code = "import socket, sys, time; socket.socket(fileno=int(sys.argv[-1])).recv(1); time.sleep(60)"
    command = (sys.executable, "-c", code)
    started = EngineProcess(command, is_piped=is_piped)

    async def main() -> None:
        engines = Replicas(load(["serve.http.log=json", "device=cpu"]), command, started)
        await engines.start()
        assert started.has_ended() == (not is_piped)  # a log in JSON reads what the engine prints
        assert not engines.has_ended()
        engines.close("the test is over")
        await engines.end()
        assert started.has_ended()

    asyncio.run(asyncio.wait_for(main(), wire.SECONDS))


@pytest.mark.parametrize(("num_replicas", "expected"), [(1, 6), (2, 3), (4, 1), (9, 1)])
def test_replicas_share_the_cores(num_replicas: int, expected: int, monkeypatch: pytest.MonkeyPatch):
    def open_engine(config: Any, progress: Any, *, replica: int, **_options: Any) -> tuple[int, int]:
        return torch.get_num_threads(), replica

    monkeypatch.setattr("atom.assemble.open_engine", open_engine)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        start = Start(load([f"parallel.replicas={num_replicas}", "device=cpu"]), 3)
        opened: Any = worker.open_real(start, None)  # type: ignore[arg-type]
        assert opened == (expected, 3)
    finally:
        torch.set_num_threads(before)


def test_replicas_share_the_artifact():
    single, several = (load([f"parallel={name}", "device=cpu"]) for name in ("tp1", "dp8"))
    target = find_target("cpu")
    assert launch_ingredients(single, target) == launch_ingredients(several, target)
    assert recipe_of(single) == recipe_of(several)
