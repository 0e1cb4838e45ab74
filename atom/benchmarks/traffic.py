"""Draw arrival times and send requests at them.

    rng = numpy.random.default_rng(0)
    times = draw_arrivals(100, rate=5.0, burstiness=1.0, rng=rng)       # seconds after the start; all 0.0 for inf
    rates = ramp_rates(100, "linear", 1.0, 10.0)                        # or one rate for each request
    outputs, seconds = await send_all([[first, second], [other]], send, times, max_concurrency=16)

A conversation is a list of requests, each of which is sent after the answer to the one before it.
A burstiness of 1 is a Poisson process; below it requests come in bursts, above it more evenly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from typing import Literal

import numpy
from numpy.typing import NDArray

from atom.benchmarks.backend_request_func import RequestFuncInput
from atom.measurement.metrics import RequestFuncOutput

Strategy = Literal["linear", "exponential"]
Send = Callable[[RequestFuncInput], Awaitable[RequestFuncOutput]]


def draw_arrivals(
    num: int, rate: float | NDArray[numpy.float64], burstiness: float, rng: numpy.random.Generator
) -> NDArray[numpy.float64]:
    """Draw the arrival times of requests, in seconds from the start, with gamma-distributed gaps of mean 1/rate.

    rate: requests/s, or inf for all at once; an array has the rate at which each request follows the one before it
    burstiness: the gamma distribution's shape
    """
    rates = numpy.broadcast_to(rate, num)
    if numpy.isinf(rates).all():
        return numpy.zeros(num)
    gaps = rng.gamma(shape=burstiness, scale=1 / (rates * burstiness))
    return numpy.concatenate([[0.0], numpy.cumsum(gaps[1:])])


def ramp_rates(num: int, strategy: Strategy, start: float, end: float) -> NDArray[numpy.float64]:
    """The rates of requests from start to end, growing by equal differences (linear) or ratios (exponential)."""
    return (numpy.linspace if strategy == "linear" else numpy.geomspace)(start, end, num)


async def send_all(
    conversations: Sequence[Sequence[RequestFuncInput]],
    send: Send,
    arrivals: Sequence[float] | NDArray[numpy.float64],
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[], object] = lambda: None,
) -> tuple[list[RequestFuncOutput], float]:
    """Send all requests; their outputs in order, and the seconds from the first one's start to the last one's end.

    A conversation that arrives while max_concurrency are under way waits; a request's times count from when it is sent.
    If a request fails, those after it in its conversation are not sent, and fail too.

    conversations: a request that depends on no other is one of length 1
    arrivals: seconds from the start, of each conversation, in ascending order
    on_end: is called at the end of each request
    """
    limit: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    )

    async def converse(turns: Sequence[RequestFuncInput]) -> list[RequestFuncOutput]:
        async with limit:
            outputs = [await send(request := turns[0])]
            on_end()
            for number, turn in enumerate(turns[1:], 1):
                if not outputs[-1].success:
                    unsent = f"not sent, since turn {number} of its conversation failed"
                    outputs += [RequestFuncOutput(error=unsent, turn=at) for at in range(number, len(turns))]
                    break
                request = turn.after(request, outputs[-1])
                if turn.delay:
                    await asyncio.sleep(turn.delay)
                outputs.append(replace(await send(request), turn=number))
                on_end()
        return outputs

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for turns, arrival in zip(conversations, arrivals, strict=True):
            wait = started + arrival - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(converse(turns)))
    return [output for task in tasks for output in task.result()], time.perf_counter() - started
