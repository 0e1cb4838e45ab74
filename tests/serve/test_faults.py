"""Faults of real processes on a real socket; the engine is a stub inside the real worker, protocol and server."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import serving
import wire
from rank_checks import assert_server_ends_by_a_signal, assert_server_outlives_a_stop, files_of, ranks_of
from serving import Server, Start, family, free_port, is_alive, listening

# as in stub_engine.py
RAISES, IN_PYTHON, IN_C, NO_MEMORY, EXITS, UNPREPARED, SLEEPS_LOCKED, SPINS_LOCKED = range(1, 9)


def assert_dies(
    server: Server, streams: list[wire.Stream], answers: list[wire.Stream], *, is_hurried: bool = True
) -> None:
    """/health says so, streams end with an error event, answers that are waited for are 503, the exit code is 1."""
    wire.wait_until(lambda: wire.ask(server.url, "GET", "/health").json["state"] == "dead")
    assert wire.ask(server.url, "GET", "/health").status == 503
    assert wire.ask(server.url, "GET", "/ready").status == 503
    for stream in streams:
        *_, last = stream.read_events()
        assert last["error"]["code"] == "unavailable" and last["error"]["type"] == "server_error"
    for waiting in answers:
        answer = wire.read_answer(waiting.file)
        assert answer.status == 503 and answer.json["error"]["code"] == "unavailable"
    late = wire.ask(server.url, "POST", "/v1/completions", {"prompt": [0]})
    assert late.status == 503
    if is_hurried:
        server.process.terminate()  # it reports the death for some seconds more
    assert server.process.wait(wire.SECONDS) == 1


@pytest.fixture
def running(start_server: Start) -> Iterator[tuple[Server, list[wire.Stream], list[wire.Stream]]]:
    """A server, two streams that have begun, one of them with two sequences, and a request that waits for its answer."""
    server = start_server(stub={"step_seconds": 0.02})
    body: dict[str, Any] = {"prompt": [0, 9], "max_tokens": 100_000}
    streams = [wire.Stream(server.url, body | {"max_tokens": 8000, "n": n}) for n in (1, 2)]
    answers = [wire.Stream(server.url, body | {"stream": False, "max_tokens": 8000})]
    for stream in streams:
        stream.read_events(3)
    yield server, streams, answers
    for stream in [*streams, *answers]:
        stream.close()


Running = tuple[Server, list[wire.Stream], list[wire.Stream]]


def test_an_engine_that_is_killed_ends_streams_with_an_error_and_the_server(running: Running):
    server, streams, answers = running
    (engine,) = family(server)
    os.kill(engine, signal.SIGKILL)
    assert_dies(server, streams, answers, is_hurried=False)
    serving.wait_for_entry(server, message="the engine is dead", reason="the engine's process has ended")


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [0]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"model": "talker", "messages": [{"role": "user", "content": "x"}]},
}


def test_a_stream_that_dies_is_no_success_in_the_log_and_the_counts(start_server: Start):
    server = start_server(stub={"step_seconds": 0.02})
    streams = [
        wire.Stream(server.url, body | {"max_tokens": 8000}, path, **{"x-request-id": f"at{path}"})
        for path, body in BODIES.items()
    ]
    wire.wait_until(lambda: wire.metrics(server.url)["atom:time_to_first_token_seconds_count"] == 3)
    (engine,) = family(server)
    os.kill(engine, signal.SIGKILL)
    lines = [serving.wait_for_entry(server, message="request", request_id=f"at{path}") for path in BODIES]
    assert wire.metrics(server.url)['atom:request_success_total{finished_reason="error"}'] == 3
    for line, path in zip(lines, BODIES, strict=True):
        assert line["path"] == path
        assert line["error"] == "the engine's process has ended" and line["finish_reasons"] == ["error"]
        assert line["usage"].get("completion_tokens", line["usage"].get("output_tokens")) > 0
    for stream in streams:
        stream.close()
    server.process.terminate()
    assert server.process.wait(wire.SECONDS) == 1


def health(server: Server) -> dict[str, Any]:
    answer = wire.ask(server.url, "GET", "/health")
    assert answer.status == 200, answer.json
    return dict(answer.json)


READY = {"status": "ok", "state": "ready"}


def test_an_engine_that_is_stopped_ends_nothing_and_goes_on(start_server: Start):
    server = start_server("advanced.heartbeat_seconds=2", stub={"step_seconds": 0.02})
    (engine,) = family(server)
    stream = wire.Stream(server.url, {"prompt": [0], "max_tokens": 200})
    stream.read_events(3)
    os.kill(engine, signal.SIGSTOP)
    wire.wait_until(lambda: health(server) == {"status": "stopped", "state": "stopped", "stopped": ["engine"]})
    assert wire.metrics(server.url)["atom:engine_up"] == 0
    time.sleep(3.5)  # more than the limit and two looks
    waiting = wire.Stream(server.url, {"prompt": [0], "max_tokens": 1})  # is taken
    os.kill(engine, signal.SIGCONT)
    assert stream.read_events()[-1] == waiting.read_events()[-1] == "[DONE]"
    wire.wait_until(lambda: health(server) == READY)
    serving.wait_for_entry(server, message="the engine is not stopped any more")
    messages = [entry["message"] for entry in serving.log_entries(server) if "stopped" in entry["message"]]
    assert messages == ["the engine is stopped, and its requests wait", "the engine is not stopped any more"]


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "later"), [(1.0, 3.5), (12.0, 0.0), (12.0, 10.0)])
def test_processes_that_are_all_stopped_go_on_though_the_engine_continues_later(
    seconds: float, later: float, start_server: Start
):
    """As on a laptop that is suspended, or in a container that is paused."""
    server = start_server("advanced.heartbeat_seconds=2", stub={"step_seconds": 0.02})
    processes = [server.process.pid, *family(server)]
    stream = wire.Stream(server.url, {"prompt": [0], "max_tokens": 100})
    stream.read_events(3)
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
        time.sleep(later if pid == server.process.pid else 0)
    assert stream.read_events()[-1] == "[DONE]"
    wire.wait_until(lambda: health(server) == READY)


@pytest.mark.slow
def test_an_engine_that_sleeps_with_the_lock_held_is_not_taken_for_dead(start_server: Start):
    server = start_server(stub={"hold_seconds": 10.0})
    start = time.monotonic()
    stream = wire.Stream(server.url, {"prompt": [SLEEPS_LOCKED], "max_tokens": 5})
    assert stream.read_events()[-1] == "[DONE]"
    assert time.monotonic() - start > 10, "it has slept"
    assert health(server) == READY


def test_an_engine_that_computes_with_the_lock_held_is_not_taken_for_dead_and_health_names_the_time(
    start_server: Start,
):
    server = start_server("advanced.heartbeat_seconds=2", stub={"hold_seconds": 6.0})
    stream = wire.Stream(server.url, {"prompt": [SPINS_LOCKED], "max_tokens": 5})
    stream.read_events(1)
    wire.wait_until(lambda: "step_seconds" in health(server))
    shown = health(server)
    assert shown.pop("step_seconds") >= 2 and shown == READY
    assert stream.read_events()[-1] == "[DONE]"
    wire.wait_until(lambda: health(server) == READY)
    busy = "the engine is busy, and has ended no step for "
    serving.wait_for_line(server, busy)
    assert server.log.read_text().count(busy) == 1


@pytest.mark.slow
def test_a_profile_is_written_to_its_end_however_long_the_lock_is_held(talker: Path, tmp_path: Path):
    folder, body = tmp_path / "traces", {"prompt": [0, 9], "max_tokens": 200, "ignore_eos": True}
    with serving.started(talker, tmp_path, f"serve.torch_profiler_dir={folder}") as server:
        assert wire.ask(server.url, "POST", "/start_profile").status == 200
        assert wire.ask(server.url, "POST", "/v1/completions", body).json["usage"]["completion_tokens"] == 200
        with wire.connect(server.url, 300) as connection, connection.makefile("rb") as file:
            connection.sendall(wire.request("POST", "/stop_profile"))
            stopped = wire.read_answer(file)
        assert stopped.status == 200, stopped.json
        (trace,) = (folder / "rank_0").iterdir()
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "atom::norm_rope_write" for event in events) >= 2 * 200, (
            "of each layer and step"
        )
        assert wire.ask(server.url, "POST", "/v1/completions", body | {"max_tokens": 2}).status == 200


def test_an_engine_that_neither_beats_nor_uses_the_cpu_is_ended(start_server: Start):
    server = start_server("advanced.heartbeat_seconds=1", stub={"hold_seconds": 1000.0, "step_seconds": 0.02})
    (engine,) = family(server)
    stream = wire.Stream(server.url, {"prompt": [SLEEPS_LOCKED], "max_tokens": 8000})
    stream.read_events(1)
    assert_dies(server, [stream], [])
    assert not is_alive(engine)
    assert "the engine has neither answered nor used the CPU for 1 s" in server.log.read_text()


def test_an_engine_that_dies_while_the_server_drains_ends_it_at_once(start_server: Start):
    server = start_server(stub={"step_seconds": 0.02, "dead_seconds": 10_000})
    stream = wire.Stream(server.url, {"prompt": [0, 9], "max_tokens": 8000})
    stream.read_events(1)
    server.process.terminate()
    wire.wait_until(lambda: wire.ask(server.url, "GET", "/health").json["state"] == "draining")
    (engine,) = family(server)
    os.kill(engine, signal.SIGKILL)
    *_, last = stream.read_events()
    assert last["error"]["code"] == "unavailable"
    assert server.process.wait(wire.SECONDS) == 1, "no client is left to hear of it"


def test_an_engine_without_memory_ends_with_that_error(running: Running):
    server, streams, answers = running
    answers.append(wire.Stream(server.url, {"prompt": [NO_MEMORY], "max_tokens": 5}))
    assert_dies(server, streams, answers)
    assert "lower serve.kv_cache_memory" in server.log.read_text()


def test_an_engine_whose_process_exits_ends_the_server(running: Running):
    server, streams, answers = running
    answers.append(wire.Stream(server.url, {"prompt": [EXITS], "max_tokens": 5}))
    assert_dies(server, streams, answers)


def test_a_step_that_raises_ends_what_was_in_it_and_the_next_request_is_served(start_server: Start):
    server = start_server(stub={})
    stream = wire.Stream(server.url, {"prompt": [RAISES], "max_tokens": 5})
    *_, last = stream.read_events()
    assert last["error"]["type"] == "server_error"
    refused = wire.ask(server.url, "POST", "/v1/completions", {"prompt": [UNPREPARED], "max_tokens": 5})
    assert refused.status == 500 and refused.json["error"]["type"] == "server_error"
    good = wire.ask(server.url, "POST", "/v1/completions", {"prompt": [0], "max_tokens": 2})
    assert good.status == 200 and good.json["choices"][0]["text"] == "word word "
    for fault in ("ArithmeticError: a fault", "KeyError: 'a fault'"):
        serving.wait_for_line(server, fault)
    # two in a row are more than a bad request
    for status in (500, 503):
        bad = wire.ask(server.url, "POST", "/v1/completions", {"prompt": [RAISES], "max_tokens": 5})
        assert bad.status == status
    server.process.terminate()
    assert server.process.wait(wire.SECONDS) == 1


@pytest.mark.parametrize("where", [IN_PYTHON, IN_C])
@pytest.mark.slow
def test_an_engine_that_computes_for_long_is_not_taken_for_dead(start_server: Start, where: int):
    server = start_server("advanced.heartbeat_seconds=1", stub={})
    stream = wire.Stream(server.url, {"prompt": [where], "max_tokens": 5})
    stream.read_events(1)
    end, shown = time.monotonic() + 8, {}
    while time.monotonic() < end:
        shown = health(server)
        assert shown == READY | ({"step_seconds": shown["step_seconds"]} if "step_seconds" in shown else {})
        time.sleep(0.2)
    assert shown["step_seconds"] >= 5, "heartbeats say how long it takes"
    assert stream.read_events()[-1] == "[DONE]"


def test_an_engine_that_cannot_load_is_one_line_and_an_exit_code(talker: Path, tmp_path: Path):
    server = serving.launch(talker, tmp_path, stub={"no_memory": True})
    assert server.process.wait(wire.SECONDS) == 2  # on which a supervisor leaves it
    assert "CapacityError: the KV pool needs 9 GiB" in server.log.read_text()


@pytest.mark.slow
def test_a_pool_that_is_too_small_names_the_whole_key_and_is_a_mistake(talker: Path, tmp_path: Path):
    server = serving.launch(talker, tmp_path, "serve.kv_cache_memory=1000")
    assert server.process.wait(wire.SECONDS) == 2
    assert "serve.kv_cache_memory has 1000: raise serve.kv_cache_memory to " in server.log.read_text()


def test_an_engine_that_the_server_ends_has_not_run_out_of_memory(talker: Path, tmp_path: Path):
    server = serving.launch(talker, tmp_path, stub={"load_seconds": 10_000})
    wire.wait_until(lambda: family(server))
    time.sleep(0.5)
    server.process.terminate()
    assert server.process.wait(wire.SECONDS) == 0
    (line,) = (line for line in server.log.read_text().splitlines() if '"message":"ended"' in line)
    assert json.loads(line)["engine"] in ("SIGKILL, at the server's request", "exit code 0")


def test_an_engine_that_is_killed_while_it_loads_ends_the_server(talker: Path, tmp_path: Path):
    server = serving.launch(talker, tmp_path, stub={"load_seconds": 10_000})
    wire.wait_until(lambda: family(server))
    (engine,) = family(server)
    os.kill(engine, signal.SIGKILL)
    assert server.process.wait(wire.SECONDS) == 1
    assert "ended while it loaded (SIGKILL, as when memory runs out)" in server.log.read_text()


def test_an_engine_that_hangs_while_it_loads_is_killed_once_it_is_taken_for_dead(talker: Path, tmp_path: Path):
    port = free_port()
    stub = {"load_seconds": 3.0, "load_hangs": True}
    fields = [f"serve.http.port={port}", "advanced.heartbeat_seconds=3"]
    server = serving.launch(talker, tmp_path, *fields, stub=stub)

    def listens() -> bool:
        return ("127.0.0.1", port) in listening(server.process.pid)

    wire.wait_until(listens)
    wire.wait_until(lambda: "loading nothing" in wire.ask(f"http://127.0.0.1:{port}", "GET", "/health").body.decode())
    (engine,) = family(server)
    wire.wait_until(lambda: not listens())  # the server ends
    wire.wait_until(lambda: not is_alive(engine))  # it cannot end by itself
    assert server.process.wait(wire.SECONDS) == 1
    reason = (
        "the engine has neither answered nor used the CPU for 3 s while it loaded (SIGKILL, at the server's request)"
    )
    assert reason in server.log.read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("load_seconds", [100, 0])
def test_no_process_is_left_where_the_http_process_is_killed(talker: Path, tmp_path: Path, load_seconds: int):
    port = free_port()
    stub = {"load_seconds": load_seconds, "has_child": True}
    handled = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        server = serving.launch(talker, tmp_path, f"serve.http.port={port}", stub=stub)
    finally:
        signal.signal(signal.SIGHUP, handled)
    wire.wait_until(lambda: len(family(server)) == 2)  # the engine, and a compiler of its own
    left = family(server)
    if not load_seconds:
        url = serving.wait_for_url(server)
        wire.Stream(url, {"prompt": [0], "max_tokens": 8000}).read_events(1)
    server.process.kill()
    server.process.wait()
    wire.wait_until(lambda: not any(map(is_alive, left)))


def test_what_an_engine_has_started_ends_with_the_engine(start_server: Start):
    server = start_server(stub={"has_child": True, "dead_seconds": 10_000})
    engine, child = family(server)
    os.kill(engine, signal.SIGKILL)
    wire.wait_until(lambda: wire.ask(server.url, "GET", "/health").json["state"] == "dead")
    wire.wait_until(lambda: not is_alive(child))  # while the server reports the death
    server.process.terminate()
    assert server.process.wait(wire.SECONDS) == 1


@pytest.mark.slow
def test_a_package_whose_format_of_calls_is_none_ends_the_server_by_name(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = {
        "broken-1.0.dist-info/METADATA": "Name: broken\nVersion: 1.0\n",
        "broken-1.0.dist-info/entry_points.txt": "[atom.conf]\nbroken = broken.conf\n",
        "broken/conf/tool_calls/mine.yaml": "begin: <tools>\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server = serving.launch(talker, tmp_path, stub={})
    assert server.process.wait(wire.SECONDS) == 2
    log = server.log.read_text()
    assert f"ConfigError: tool_calls={tmp_path}/broken/conf/tool_calls/mine.yaml: call is missing" in log
    assert "Traceback" not in log


def test_only_http_listens(stub: Server):
    port = int(stub.url.rpartition(":")[2])
    assert listening(stub.process.pid) == {("127.0.0.1", port)}
    (engine,) = family(stub)
    assert listening(engine) == set()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rank", [0, 1, None])
def test_a_process_that_dies_ends_those_of_ranks(
    rank: int | None, talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Rank 0 is the process of the engine, and drives; None is that of HTTP."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with serving.started(talker, tmp_path, "parallel=tp2", stub={"breaks": [], "dead_seconds": 10_000}) as server:
        ranks = ranks_of(server)
        assert {host for pid in ranks for host, _ in listening(pid)} == {"127.0.0.1"}, "gloo's; nothing else"
        assert files_of(ranks, temporary), "ranks on CPUs add in memory that they share, of which nothing may be left"
        assert_server_ends_by_a_signal(server, rank, signal.SIGKILL, temporary)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_ends_nothing_and_goes_on(rank: int, talker: Path, tmp_path: Path):
    with serving.started(talker, tmp_path, "parallel=tp2", "advanced.heartbeat_seconds=2") as server:
        assert_server_outlives_a_stop(server, rank)
