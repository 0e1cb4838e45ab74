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
    outputs, seconds = asyncio.run(send_all(REQUESTS, send, [0.0] * 8, on_end=lambda: ended.append(1)))
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

    asyncio.run(send_all(REQUESTS, send, [0.0] * 8, max_concurrency=limit))
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
    asyncio.run(send_all(REQUESTS[:3], send, [0.0, 10.0, 30.0]))
    assert sent == [5.0, 15.0, 35.0]
