from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import serving
import wire
from runtime.test_engine import Script, make_engine
from serve.stub_engine import Options, StubEngine

import atom.serve
from atom.config.load import load
from atom.kernels import find_piece_compiler
from atom.sampling_params import SamplingParams
from atom.serve.engine.frames import Start, encode
from atom.serve.engine.link import Link
from atom.serve.engine.process import EngineProcess
from atom.serve.engine.protocol import (
    Abort,
    Beat,
    Done,
    End,
    Failed,
    Outputs,
    Pause,
    Profile,
    Ready,
    Sleep,
    Submit,
    from_engine,
)
from atom.serve.engine.worker import Worker

STUB = (sys.executable, str(serving.STUB), "{}", "--engine")


def ended(engine: EngineProcess) -> int:
    wire.wait_until(engine.has_ended)
    return engine.end()


def test_an_engine_that_is_not_wanted_ends_without_a_fault():
    engine = EngineProcess(STUB)
    engine.connection.close()
    assert ended(engine) == 0


def test_an_engine_that_is_to_end_before_it_has_begun_ends_without_a_fault():
    engine = EngineProcess(STUB)
    engine.connection.sendall(encode(Start(load([]))) + encode(End()))
    assert ended(engine) == 0


def test_an_engine_is_ready_beats_and_ends_with_its_socket():
    engine, frames, messages = EngineProcess(STUB), from_engine(), []
    engine.connection.sendall(encode(Start(load([]))))
    engine.connection.settimeout(wire.SECONDS)
    while Ready(100_000) not in messages:
        messages += frames.feed(engine.connection.recv(1 << 16))
    while sum(isinstance(message, Beat) for message in messages) < 5:
        messages += frames.feed(engine.connection.recv(1 << 16))
    engine.connection.close()
    assert ended(engine) == 0


def test_a_heartbeat_says_for_how_long_a_step_has_run_and_which_ranks_are_stopped():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker, beats = Worker(Link(ours)), []

        class Once(StubEngine):
            has_work, stopped_ranks = True, [2]

            def step(self, tell_plan: object) -> None:
                time.sleep(0.05)
                beats.append(worker.make_heartbeat())
                worker._inbox.put(None)

        worker.load(lambda: Once(Options()))  # type: ignore[arg-type, return-value]
        worker.run()
        assert beats[0].step_seconds >= 0.05 and beats[0].stopped_ranks == [2]
        assert worker.make_heartbeat().step_seconds == 0.0


@pytest.mark.parametrize(
    ("names", "shown"), [([], ""), (["A"], "1 x A"), (["A", "B", "A"], "2 x A + 1 x B")], ids=["none", "one", "three"]
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_who_is_ready_names_the_gpus_where_it_runs_on_one(
    device: str, names: list[str], shown: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(names))
    monkeypatch.setattr("torch.cuda.get_device_name", names.__getitem__)
    monkeypatch.setattr("atom.serve.engine.worker.settle", lambda: None)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Worker(Link(ours)).load(lambda: StubEngine(Options()), device)  # type: ignore[arg-type, return-value]
        assert from_engine().feed(theirs.recv(1 << 16)) == [Ready(100_000, shown if device == "cuda" else "")]


def test_an_engine_can_compile_grammars_before_it_is_ready():
    messages: list[object] = []

    class Recorded(StubEngine):
        def try_open(self) -> None:
            messages.append("grammars")

    class Played:
        def send(self, message: object) -> None:
            messages.append(message)

    Worker(Played()).load(lambda: Recorded(Options()))  # type: ignore[arg-type, return-value]
    assert messages == ["grammars", Ready(100_000)]


def test_an_engine_imports_torch_before_its_configuration_comes_and_nothing_that_it_can_do_without(checkpoints: Any):
    heavy = "fastapi gguf hydra jinja2 llguidance omegaconf pydantic rich sympy transformers triton yaml"
    code = f"""
import sys
from atom.serve.engine import worker
def prepare():
    worker.import_engine()
    print("imported", "torch" in sys.modules, file=sys.stderr, flush=True)
code = worker.main(prepare=prepare)
heavy = [*"{heavy}".split(), "torch._dynamo", "torch._inductor"]
print("loaded", [each for each in heavy if each in sys.modules], file=sys.stderr)
"""
    engine, frames, messages, printed = (
        EngineProcess((sys.executable, "-c", code), is_piped=True),
        from_engine(),
        [],
        [],
    )
    engine.relay(lambda line: printed.append(line.strip()))
    wire.wait_until(lambda: printed, 60)
    assert printed == ["imported True"]
    config = load([f"checkpoint={checkpoints('llama')}", "level=0", "device=cpu", "serve.kv_cache_memory=1048576"])
    engine.connection.sendall(encode(Start(config)))
    engine.connection.settimeout(wire.SECONDS)
    while not any(isinstance(message, Ready) for message in messages):
        messages += frames.feed(engine.connection.recv(1 << 16))
    engine.connection.close()
    assert ended(engine) == 0
    assert printed[-1] == "loaded []"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("garbage", [b"\x03\x00\x00\x00abc", b"\xff\xff\xff\xff"])
def test_what_is_no_message_ends_the_engine_with_a_reason(garbage: bytes):
    engine, frames, messages = EngineProcess(STUB), from_engine(), []
    engine.connection.sendall(encode(Start(load([]))))
    engine.connection.settimeout(wire.SECONDS)
    while not any(isinstance(message, Ready) for message in messages):
        messages += frames.feed(engine.connection.recv(1 << 16))
    engine.connection.sendall(garbage)
    while data := engine.connection.recv(1 << 16):
        messages += frames.feed(data)
    assert isinstance(messages[-1], Failed) and messages[-1].error
    assert ended(engine) != 0


def test_a_profiler_that_fails_ends_no_engine():
    engine, frames, messages = EngineProcess((*STUB[:2], '{"breaks_profiler": true}', "--engine")), from_engine(), []
    engine.connection.sendall(encode(Start(load([]))))
    engine.connection.settimeout(wire.SECONDS)
    while not any(isinstance(message, Ready) for message in messages):
        messages += frames.feed(engine.connection.recv(1 << 16))
    for id in ("first", "second"):
        engine.connection.sendall(encode(Profile(id, True)))
        while Done(id, "", "internal error, the engine's log has it", is_internal=True) not in messages:
            data = engine.connection.recv(1 << 16)
            assert data, "the engine has ended"
            messages += frames.feed(data)
    engine.connection.close()
    assert ended(engine) == 0


def test_signals_to_the_group_leave_the_engine_to_the_http_process():
    engine, frames, messages = EngineProcess(STUB), from_engine(), []
    engine.connection.sendall(encode(Start(load([]))))
    engine.connection.settimeout(wire.SECONDS)
    while not messages:
        messages += frames.feed(engine.connection.recv(1 << 16))
    assert os.getpgid(engine.pid) == engine.pid != os.getpgrp()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(engine.pid, number)
    time.sleep(0.3)
    assert not engine.has_ended()
    assert engine.end() == -signal.SIGKILL


def test_its_socket_is_handed_to_nobody_else():
    code = "import socket, sys, subprocess; s = socket.socket(fileno=int(sys.argv[-1])); print(s.family.name)"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            check=True,
            capture_output=True,
        )
    assert done.stdout == b"AF_UNIX\n"
    engine = EngineProcess((sys.executable, "-c", "import os, sys; sys.exit(len(os.listdir('/proc/self/fd')))"))
    assert ended(engine) == 5  # three standard ones, the socket, and the listing's own


def test_nothing_in_serve_can_unpickle():
    folder = Path(atom.serve.__file__).parent
    for file in folder.rglob("*.py"):
        text = file.read_text()
        assert not re.search(r"\b(import|from) (pickle|marshal|shelve|dill|cloudpickle|multiprocessing)\b", text), file
        assert not re.search(r"\b(eval|exec|compile)\(", text.replace("re.compile(", "")), file


class Played:
    """A sleeper without any memory, and the other end of a worker's link."""

    def __init__(self) -> None:
        self.is_sleeping = False
        self.sent: list[Any] = []

    def sleep(self, level: int) -> None:
        self.is_sleeping = True

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def ends(self) -> dict[str, tuple[str, int]]:
        """The finish reason and the number of tokens of each request that has ended."""
        outputs = [output for each in self.sent if isinstance(each, Outputs) for output in each.outputs]
        return {output.id: (output.finish.reason, output.finish.num_output) for output in outputs if output.finish}

    def answers(self) -> list[Done]:
        return [each for each in self.sent if isinstance(each, Done)]


def play_sleeping(*messages: Any) -> tuple[Worker, Played]:
    """A worker whose request `a` has one token when these messages come; None: the end. It has read them."""
    engine, played = make_engine(Script(dict.fromkeys("abc", "x" * 50))), Played()
    engine._sleeper = played  # type: ignore[assignment]
    worker = Worker(played)  # type: ignore[arg-type]
    worker._engine = engine
    worker._inbox.put(worker._prepare(Submit("a", [65], SamplingParams(max_tokens=20))))
    assert worker._run_inbox()
    engine.step()
    for message in messages:
        worker._inbox.put(None if message is None else worker._prepare(message))
    return worker, played


def test_who_leaves_while_a_sleep_waits_for_running_requests_is_not_waited_for():
    others = [Submit("b", [65], SamplingParams(max_tokens=2)), Submit("c", [65], SamplingParams(max_tokens=2))]
    worker, played = play_sleeping(Sleep("s", 1, "wait"), *others, Abort("a"), Abort("b"))
    assert worker._run_inbox()
    worker._send_outputs()
    assert played.is_sleeping and played.answers() == [Done("s", "", is_sleeping=True)]
    assert played.ends() == {"a": ("abort", 2), "b": ("abort", 0)}
    assert list(worker.engine.scheduler.sequences) == ["c-0"], "it waits"


def test_an_engine_that_is_to_end_while_a_sleep_waits_does_not_sleep_and_keeps_its_kv():
    worker, played = play_sleeping(Sleep("s", 1, "wait"), Submit("b", [65], SamplingParams(max_tokens=2)), None)
    assert not worker._run_inbox()
    assert not played.is_sleeping and played.answers() == [Done("s", "", "the engine is to end")]
    assert list(worker.engine.scheduler.sequences) == ["a-0", "b-0"] and not played.ends()
    assert worker.engine.scheduler.cache.fullest[0] == 1


def test_what_a_pause_aborts_ends_ahead_of_its_answer_also_while_its_grammar_is_compiled():
    two = SamplingParams(max_tokens=2, n=2, structured_outputs={"regex": "a"})
    worker, played = play_sleeping(
        Submit("b", [65], two), Pause("p", "abort", True), Submit("c", [65], two), Abort("c")
    )
    assert worker._run_inbox()
    worker._send_outputs()
    ends = [message for message in played.sent if isinstance(message, Outputs) and message.outputs]
    assert played.sent.index(ends[-1]) > played.sent.index(done := Done("p", "", is_paused=True)), "c's"
    assert played.sent.index(ends[0]) < played.sent.index(done)
    assert played.ends() == {"a": ("abort", 1), "b": ("abort", 0), "c": ("abort", 0)}
    assert not worker._compiling and worker.engine.is_paused


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.skipif(find_piece_compiler("cpu").find_missing(), reason="no C++ compiler")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_compilers_end_with_the_server(talker: Path, tmp_path: Path, number: int):
    server = serving.launch(talker, tmp_path, "level=2", f"cache={tmp_path / 'cache'}")

    started: list[int] = []

    def compilers() -> list[int]:
        found = []
        for process in Path("/proc").iterdir():
            if process.name.isdigit():
                try:
                    words = (process / "cmdline").read_text(errors="replace")
                    parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                except (OSError, ValueError):
                    continue
                if "atom.pieces.compile_workers" in words and (parent == engine or int(process.name) in started):
                    found.append(int(process.name))
        return found

    def engines() -> list[int]:
        pids = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        stats = {int(pid): Path(f"/proc/{pid}/stat") for pid in pids}
        return [pid for pid, stat in stats.items() if stat.exists() and os.getpgid(pid) == pid]  # of a group of its own

    wire.wait_until(engines)
    (engine,) = engines()
    wire.wait_until(compilers)
    started += compilers()
    server.process.send_signal(number)
    assert server.process.wait(wire.SECONDS) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    wire.wait_until(lambda: not compilers() and not Path(f"/proc/{engine}").exists())
