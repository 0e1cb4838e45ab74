"""The benchmark's client: warm up the server, send the requests, ask its hardware.

    measured = run_loop(measure(args, conversations, warmups))    # args of read_arguments, the others RequestFuncInput
    measured.outputs, measured.seconds, measured.hardware

OPENAI_API_KEY of the environment is sent as the bearer token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy

from atom.benchmarks.backend_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput
from atom.benchmarks.benchmark_utils import BenchmarkError, one_line, say
from atom.benchmarks.traffic import Send, draw_arrivals, ramp_rates, send_all
from atom.measurement.hardware import describe_machine
from atom.measurement.metrics import RequestFuncOutput

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

LONGEST = 6 * 3600  # seconds that a request may take
KEEP_ALIVE = 3  # seconds that an idle connection is kept: servers close theirs after 5
RETRY = 1.0  # seconds between two attempts to reach a server
LOADING_SECONDS = 1200.0  # that a server may load its model, as in ROCm/ATOM's scripts
SPARE_FILES = 64  # descriptors besides those of the connections


@dataclass(frozen=True)
class Measurement:
    outputs: list[RequestFuncOutput]  # in the order of the conversations and their requests
    seconds: float
    hardware: str  # the server's hardware, if it reports it; else that of this machine
    hardware_of: str  # server or client
    trouble: str  # errors after the requests; empty without any


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop if it is installed: it costs half of asyncio's own loop."""
    factory = asyncio.new_event_loop
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


async def measure(
    args: argparse.Namespace,
    conversations: Sequence[Sequence[RequestFuncInput]],
    warmups: Sequence[RequestFuncInput],
) -> Measurement:
    """BenchmarkError if the server does not answer a warm-up. warmups: one at least; not all need be sent."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    request_func = ASYNC_REQUEST_FUNCS[args.backend]
    num, rate = len(conversations), args.request_rate
    if args.ramp_up_strategy:
        rate = ramp_rates(num, args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    arrivals = draw_arrivals(num, rate, args.burstiness, numpy.random.default_rng(args.seed))
    arrivals += [turns[0].delay for turns in conversations]
    allow_connections(min(args.max_concurrency or num, num))
    async with open_session() as session:

        async def send(request: RequestFuncInput) -> RequestFuncOutput:
            return await request_func(request, session)

        if args.ready_check_timeout_sec:
            await retry(lambda: send_test(warmups[0], send), args.ready_check_timeout_sec)
        else:
            await wait_while_loading(session, args.base_url)
        if args.num_warmups:
            await warm_up(warmups[: args.num_warmups], send)
        hardware, hardware_of = await ask_hardware(session, args.base_url)
        troubles: list[str] = []
        async with profiling(session, args.base_url, troubles) if args.profile else contextlib.nullcontext():
            with (
                tqdm(total=sum(map(len, conversations)), disable=args.disable_tqdm, unit="req") as bar,
                untracked_past(),
            ):
                outputs, seconds = await send_all(
                    conversations, send, arrivals, max_concurrency=args.max_concurrency, on_end=bar.update
                )
    return Measurement(outputs, seconds, hardware, hardware_of, " ".join(troubles))


def open_session() -> aiohttp.ClientSession:
    try:
        import aiohttp
    except ImportError:
        raise BenchmarkError("sending requests needs the package aiohttp: pip install 'atom-run[bench]'") from None
    key = os.environ.get("OPENAI_API_KEY")
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
        timeout=aiohttp.ClientTimeout(total=LONGEST),
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )


async def retry(attempt: Callable[[], Awaitable[T]], seconds: float) -> T:
    """Repeat what raises a BenchmarkError until that many seconds have passed, to wait for a server."""
    deadline = time.monotonic() + seconds
    is_waiting = False
    while True:
        try:
            return await attempt()
        except BenchmarkError as error:
            if time.monotonic() >= deadline:
                raise
            if not is_waiting:
                say(f"waiting {seconds:g} s for the server at most: {error}")
                is_waiting = True
        await asyncio.sleep(RETRY)


async def wait_while_loading(session: aiohttp.ClientSession, base_url: str) -> None:
    """Wait until /health no longer reports loading. BenchmarkError if that takes too long or the server ends."""
    import aiohttp

    deadline, is_waiting = time.monotonic() + LOADING_SECONDS, False
    while True:
        try:
            if not await is_loading(session, base_url):
                return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if not is_waiting:
                return  # the first request says what is wrong
            gone = f"{base_url} no longer answers, though it was loading"
            raise BenchmarkError(f"{gone}: {one_line(str(error))}") from None
        if time.monotonic() >= deadline:
            raise BenchmarkError(f"{base_url} is still loading after {LOADING_SECONDS:g} s")
        if not is_waiting:
            say(f"the server is loading its model; waiting {LOADING_SECONDS:g} s at most")
            is_waiting = True
        await asyncio.sleep(RETRY)


async def is_loading(session: aiohttp.ClientSession, base_url: str) -> bool:
    """Whether /health says that the model is being loaded, as atom's does."""
    import aiohttp

    async with session.get(f"{base_url}/health", timeout=aiohttp.ClientTimeout(total=30)) as response:
        with contextlib.suppress(ValueError):  # another server's answer
            answer = json.loads(await response.text(errors="replace"))
            return response.status == 503 and isinstance(answer, dict) and answer.get("status") == "loading"
    return False


async def warm_up(requests: Sequence[RequestFuncInput], send: Send) -> None:
    """Send warm-up requests, the first one by itself, so that a server that cannot answer fails early."""
    await send_test(requests[0], send)
    await asyncio.gather(*(send_test(each, send) for each in requests[1:]))


async def send_test(request: RequestFuncInput, send: Send) -> None:
    """BenchmarkError if this request fails."""
    output = await send(request)
    if not output.success:
        raise BenchmarkError(
            f"a test request to {request.api_url} failed: {output.error}; is the server up, and are --backend, "
            "--endpoint and --model what it expects?"
        )


async def ask_model(base_url: str) -> tuple[str, str]:
    """The name of the server's first model, and the checkpoint that it says it is of. BenchmarkError without one."""
    import aiohttp

    url = f"{base_url}/v1/models"
    try:
        async with open_session() as session, session.get(url, timeout=aiohttp.ClientTimeout(total=30)) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}")
            first = (await response.json())["data"][0]
            return str(first["id"]), str(first.get("root") or first["id"])
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BenchmarkError(
            f"{url} names no model ({one_line(str(error))}); is the server up? else give --model"
        ) from None


async def ask_hardware(session: aiohttp.ClientSession, base_url: str) -> tuple[str, str]:
    """The `hardware` of the server's /version, and "server"; else this machine's, and "client"."""
    import aiohttp

    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):  # a server need not have this route
        async with session.get(f"{base_url}/version", timeout=aiohttp.ClientTimeout(total=5)) as response:
            answer = await response.json() if response.status == 200 else {}
            if isinstance(answer, dict) and answer.get("hardware"):
                return str(answer["hardware"]), "server"
    return describe_machine(), "client"


@contextlib.asynccontextmanager
async def profiling(session: aiohttp.ClientSession, base_url: str, troubles: list[str]) -> AsyncIterator[None]:
    """Profile the server within this context. If the profiler cannot be stopped, that is a trouble: results stay."""
    if refused := await post_profile(session, f"{base_url}/start_profile"):
        raise BenchmarkError(f"--profile: {refused}")
    try:
        yield
    finally:
        if refused := await post_profile(session, f"{base_url}/stop_profile"):
            troubles.append(f"--profile: {refused}")


async def post_profile(session: aiohttp.ClientSession, url: str) -> str:
    """POST to the profiler; the error, or an empty text."""
    import aiohttp

    try:
        async with session.post(url) as response:
            text = (await response.text(errors="replace"))[:500]
            return "" if response.status == 200 else one_line(f"{url} answers HTTP {response.status}: {text}")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return one_line(f"{url}: {type(error).__name__}: {error}")


@contextlib.contextmanager
def untracked_past() -> Iterator[None]:
    """Freeze existing objects for the garbage collector, whose pauses would be timed as the server's."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def allow_connections(num: int) -> None:
    """Raise this process's limit of open files as far as allowed. BenchmarkError if that is too low."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise BenchmarkError(f"{num} connections need more open files than {hard}: set --max-concurrency")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
