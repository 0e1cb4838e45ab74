from __future__ import annotations

import argparse
import asyncio
import resource

import pytest
from benchmarks.stub_server import Answer, Asked, Reply, obeying, serving

from atom.benchmarks import client
from atom.benchmarks.arguments import read_arguments
from atom.benchmarks.backend_request_func import RequestFuncInput
from atom.benchmarks.benchmark_utils import BenchmarkError
from atom.benchmarks.client import allow_connections, measure, run_loop
from atom.measurement.hardware import describe_machine


def arguments(url: str, *flags: str) -> argparse.Namespace:
    return read_arguments(["--model", "m", "--dataset-name", "random", "--base-url", url, "--disable-tqdm", *flags])


def inputs(url: str, num: int) -> list[RequestFuncInput]:
    return [RequestFuncInput(f"prompt {at}", f"{url}/v1/completions", 2, 3, "m") for at in range(num)]


def single(requests: list[RequestFuncInput]) -> list[list[RequestFuncInput]]:
    """Conversations of one turn."""
    return [[each] for each in requests]


def warmups(url: str) -> list[RequestFuncInput]:
    return inputs(url, 1)


def test_one_request_warms_the_server_up_and_does_not_count():
    with serving(obeying()) as stub:
        *requests, warmup = inputs(stub.url, 4)
        measured = run_loop(measure(arguments(stub.url), single(requests), [warmup]))
    prompts = [each.json()["prompt"] for each in stub.of("POST")]
    assert prompts[0] == "prompt 3"
    assert sorted(prompts[1:]) == ["prompt 0", "prompt 1", "prompt 2"]
    assert [each.output_tokens for each in measured.outputs] == [3, 3, 3]
    assert (measured.hardware, measured.hardware_of, measured.trouble) == (describe_machine(), "client", "")


def test_as_many_warm_ups_are_sent_as_asked_for():
    with serving(obeying()) as stub:
        run_loop(measure(arguments(stub.url, "--num-warmups", "5"), single(inputs(stub.url, 2)), inputs(stub.url, 6)))
    assert len(stub.of("POST")) == 5 + 2


def test_a_failing_warm_up_ends_it_early():
    async def answer(asked: Asked, reply: Reply) -> None:
        await reply.whole(404, b'{"error": {"message": "no model m"}}')

    with serving(answer) as stub:
        with pytest.raises(
            BenchmarkError, match=r"a test request to http://.* failed: HTTP 404 .*no model m.*; is the"
        ):
            run_loop(
                measure(arguments(stub.url, "--num-warmups", "3"), single(inputs(stub.url, 5)), inputs(stub.url, 3))
            )
        assert len(stub.of("POST")) == 1


LOADING = b'{"status": "loading", "state": "loading", "doing": "loading weights: 40%"}'


def test_a_server_that_loads_is_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(client, "RETRY", 0.01)
    answers = [(503, LOADING), (503, LOADING), (200, b'{"status": "ok"}')]

    async def health(asked: Asked, reply: Reply) -> None:
        assert not stub.of("POST"), "nothing is sent before"
        await reply.whole(*answers.pop(0))

    with serving(obeying(), health=health) as stub:
        run_loop(measure(arguments(stub.url), single(inputs(stub.url, 2)), warmups(stub.url)))
        assert (answers, len(stub.of("POST"))) == ([], 1 + 2)
    assert capsys.readouterr().err.count("the server is loading its model; waiting 1200 s at most\n") == 1


def test_a_server_that_loads_for_too_long_or_ends_meanwhile_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "RETRY", 0.01)

    async def loads(asked: Asked, reply: Reply) -> None:
        await reply.whole(503, LOADING)

    async def cut(reply: Reply) -> None:
        reply.cut()

    async def ends(asked: Asked, reply: Reply) -> None:
        await (reply.whole(503, LOADING) if len(stub.of("GET")) == 1 else cut(reply))

    message = r"^http://[\d.:]+ no longer answers, though it was loading: "
    with serving(obeying(), health=ends) as stub, pytest.raises(BenchmarkError, match=message):
        run_loop(measure(arguments(stub.url), single(inputs(stub.url, 2)), warmups(stub.url)))
    monkeypatch.setattr(client, "LOADING_SECONDS", 0.1)
    message = r"^http://[\d.:]+ is still loading after 0.1 s$"
    with serving(obeying(), health=loads) as stub, pytest.raises(BenchmarkError, match=message):
        run_loop(measure(arguments(stub.url), single(inputs(stub.url, 2)), warmups(stub.url)))


def test_as_many_connections_are_open_as_there_are_requests():
    num, waiting = 120, 0

    async def answer(asked: Asked, reply: Reply) -> None:
        nonlocal waiting
        if len(stub.of("POST")) > 1:  # after the warm-up no answer begins before all were asked for
            waiting += 1
            while waiting < num:
                await asyncio.sleep(0.001)
        await obeying()(asked, reply)

    with serving(answer) as stub:
        measured = run_loop(measure(arguments(stub.url), single(inputs(stub.url, num)), warmups(stub.url)))
    assert all(each.success for each in measured.outputs)


@pytest.mark.parametrize(("key", "header"), [("secret", "bearer secret"), ("", None), (None, None)])
def test_the_key_of_the_environment_is_sent(key: str | None, header: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    with serving(obeying()) as stub:
        run_loop(measure(arguments(stub.url), single(inputs(stub.url, 1)), warmups(stub.url)))
    assert {each.headers.get("authorization") for each in stub.asked} == {header}


def test_the_profiler_runs_around_the_requests_that_count():
    with serving(obeying()) as stub:
        run_loop(measure(arguments(stub.url, "--profile"), single(inputs(stub.url, 2)), warmups(stub.url)))
    paths = [each.path for each in stub.of("POST")]
    assert paths == ["/v1/completions", "/start_profile", "/v1/completions", "/v1/completions", "/stop_profile"]


def refusing(route: str) -> Answer:
    async def answer(asked: Asked, reply: Reply) -> None:
        await (reply.whole(400, b"no torch_profiler_dir") if asked.path == route else obeying()(asked, reply))

    return answer


def test_a_profiler_that_cannot_be_started_ends_it():
    with serving(refusing("/start_profile")) as stub:
        with pytest.raises(BenchmarkError, match=r"--profile: http://.*/start_profile answers HTTP 400: no torch_prof"):
            run_loop(measure(arguments(stub.url, "--profile"), single(inputs(stub.url, 2)), warmups(stub.url)))
        assert len(stub.of("POST", "completions")) == 1


def test_a_profiler_that_cannot_be_stopped_is_reported_next_to_the_results():
    with serving(refusing("/stop_profile")) as stub:
        measured = run_loop(measure(arguments(stub.url, "--profile"), single(inputs(stub.url, 2)), warmups(stub.url)))
    assert [each.success for each in measured.outputs] == [True, True]
    assert measured.trouble == f"--profile: {stub.url}/stop_profile answers HTTP 400: no torch_profiler_dir"


@pytest.mark.parametrize(
    ("version", "hardware"),
    [
        (b'{"version": "1", "hardware": "8 \xc3\x97 NVIDIA H200"}', ("8 × NVIDIA H200", "server")),
        (b'{"version": "1"}', (describe_machine(), "client")),
        (b'["1"]', (describe_machine(), "client")),
        (b"1.0.0 (build 5)", (describe_machine(), "client")),
    ],
)
def test_hardware_is_what_the_server_reports_or_this_machine(version: bytes, hardware: tuple[str, str]):
    with serving(obeying(), version=version) as stub:
        measured = run_loop(measure(arguments(stub.url), single(inputs(stub.url, 1)), warmups(stub.url)))
    assert (measured.hardware, measured.hardware_of) == hardware


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch):
    now = [(100, 500)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: now[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: now.append(limits))
    allow_connections(30)
    assert now == [(100, 500)]
    allow_connections(300)
    assert now[-1] == (364, 500)
    with pytest.raises(BenchmarkError, match="1000 connections need more open files than 500: set --max-concurrency"):
        allow_connections(1000)
