from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace

import numpy
import pytest

from atom.benchmarks import traffic
from atom.benchmarks.backend_request_func import RequestFuncInput
from atom.benchmarks.traffic import Strategy, draw_arrivals, ramp_rates, send_all
from atom.measurement.metrics import RequestFuncOutput

REQUESTS = [RequestFuncInput(str(at), "", 1, 1, "m") for at in range(8)]
SINGLE = [[each] for each in REQUESTS]  # conversations of one turn


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_between_arrivals_are_gamma_distributed(burstiness: float):
    gaps = numpy.diff(draw_arrivals(40_000, 5.0, burstiness, numpy.random.default_rng(0)))
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.03)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.08)  # of a gamma distribution: 1/shape
    assert gaps.min() >= 0


def test_an_infinite_rate_sends_all_at_once():
    assert draw_arrivals(5, math.inf, 1.0, numpy.random.default_rng(0)).tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("strategy", "start", "end", "rates"),
    [("linear", 2, 10, [2, 4, 6, 8, 10]), ("exponential", 1, 16, [1, 2, 4, 8, 16]), ("linear", 3, 3, [3] * 5)],
)
def test_rates_grow_from_request_to_request(strategy: Strategy, start: float, end: float, rates: list[float]):
    assert ramp_rates(5, strategy, start, end).tolist() == pytest.approx(rates)
    assert ramp_rates(1, strategy, start, end).tolist() == [start]


def test_arrivals_follow_the_rate_of_each_request():
    rates = numpy.repeat([1.0, 100.0], 20_000)
    gaps = numpy.diff(draw_arrivals(40_000, rates, 1.0, numpy.random.default_rng(0)))
    assert gaps[:19_999].mean() == pytest.approx(1, rel=0.03)
    assert gaps[19_999:].mean() == pytest.approx(1 / 100, rel=0.03)


def test_the_first_request_does_not_wait_and_a_seed_fixes_the_others():
    first, second = (draw_arrivals(9, 2.0, 1.0, numpy.random.default_rng(7)) for _ in range(2))
    assert first[0] == 0
    assert first.tolist() == second.tolist()


def test_outputs_come_in_the_order_of_the_requests():
    async def send(request: RequestFuncInput) -> RequestFuncOutput:
        await asyncio.sleep(0.02 if request.prompt in "02" else 0)
        return RequestFuncOutput(generated_text=f"answer {request.prompt}")

    ended: list[int] = []
    started = time.perf_counter()
    outputs, seconds = asyncio.run(send_all(SINGLE, send, [0.0] * 8, on_end=lambda: ended.append(1)))
    assert [each.generated_text for each in outputs] == [f"answer {at}" for at in range(8)]
    assert len(ended) == 8
    assert 0.02 <= seconds < time.perf_counter() - started


@pytest.mark.parametrize(("limit", "max_running"), [(3, 3), (None, 8)])
def test_no_more_requests_are_under_way_than_allowed(limit: int | None, max_running: int):
    under_way, seen = 0, 0

    async def send(request: RequestFuncInput) -> RequestFuncOutput:
        nonlocal under_way, seen
        under_way += 1
        seen = max(seen, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        return RequestFuncOutput()

    asyncio.run(send_all(SINGLE, send, [0.0] * 8, max_concurrency=limit))
    assert seen == max_running


def test_a_request_is_sent_when_it_arrives(monkeypatch: pytest.MonkeyPatch):
    now, sent = [5.0], []

    async def sleep(seconds: float) -> None:
        end = now[0] + seconds
        await asyncio.sleep(0)
        now[0] = max(now[0], end)

    async def send(request: RequestFuncInput) -> RequestFuncOutput:
        sent.append(now[0])
        now[0] += 2.0  # the loop was busy
        return RequestFuncOutput()

    monkeypatch.setattr(traffic, "asyncio", SimpleNamespace(TaskGroup=asyncio.TaskGroup, sleep=sleep))
    monkeypatch.setattr(traffic, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    asyncio.run(send_all(SINGLE[:3], send, [0.0, 10.0, 30.0]))
    assert sent == [5.0, 15.0, 35.0]


def test_a_turn_is_sent_after_the_answer_and_the_pause_before_it_with_what_was_said(monkeypatch: pytest.MonkeyPatch):
    now, sent = [0.0], list[tuple[float, object, int]]()

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    async def send(request: RequestFuncInput) -> RequestFuncOutput:
        sent.append((now[0], request.joined(), request.prompt_len))
        now[0] += 2.0
        return RequestFuncOutput(f"({request.prompt})", success=True, prompt_len=request.prompt_len, output_tokens=4)

    monkeypatch.setattr(traffic, "asyncio", SimpleNamespace(TaskGroup=asyncio.TaskGroup, sleep=sleep))
    first, second, third = (
        RequestFuncInput(each, "", 3, 9, "m", delay=delay) for each, delay in zip("abc", (7, 0, 5), strict=True)
    )
    outputs, _ = asyncio.run(send_all([[first, second, third]], send, [0.0]))
    assert sent == [(0.0, "a", 3), (2.0, "a(a)b", 3 + 4 + 3), (9.0, "a(a)b(b)c", 10 + 4 + 3)], (
        "a first turn has arrived"
    )
    assert [(each.generated_text, each.turn) for each in outputs] == [("(a)", 0), ("(b)", 1), ("(c)", 2)]


def test_conversations_keep_their_place_while_they_pause_and_outputs_their_order():
    running, most, sent = set[str](), 0, list[str]()

    async def send(request: RequestFuncInput) -> RequestFuncOutput:
        nonlocal most
        sent.append(request.prompt)
        running.add(request.prompt[0])
        most = max(most, len(running))
        await asyncio.sleep(0)
        if request.prompt[1] == "2":
            running.remove(request.prompt[0])
        return RequestFuncOutput(request.prompt, success=True)

    turns = [[RequestFuncInput(f"{name}{at}", "", 1, 1, "m", delay=0.01) for at in range(3)] for name in "abcd"]
    ended: list[int] = []
    outputs, _ = asyncio.run(send_all(turns, send, [0.0] * 4, max_concurrency=2, on_end=lambda: ended.append(1)))
    assert most == 2 and {*sent[:6]} == {f"{name}{at}" for name in "ab" for at in range(3)}
    assert [each.generated_text for each in outputs] == [f"{name}{at}" for name in "abcd" for at in range(3)]
    assert len(ended) == 12


def test_after_a_turn_that_fails_no_other_of_its_conversation_is_sent():
    sent = []

    async def send(request: RequestFuncInput) -> RequestFuncOutput:
        sent.append(request.prompt)
        return RequestFuncOutput(success=request.prompt != "1", error="kaputt" if request.prompt == "1" else "")

    outputs, _ = asyncio.run(send_all([REQUESTS[:4], REQUESTS[4:6]], send, [0.0, 0.0]))
    assert sorted(sent) == ["0", "1", "4", "5"]
    unsent = "not sent, since turn 2 of its conversation failed"
    assert [each.error for each in outputs] == ["", "kaputt", unsent, unsent, "", ""]
    assert [each.turn for each in outputs] == [0, 1, 2, 3, 0, 1]
