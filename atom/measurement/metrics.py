"""Compute throughput, latencies and goodput from request outputs.

    finish_outputs(outputs, count=lambda text: len(tokenizer.encode(text)))
    metrics = calculate_metrics(outputs, seconds=12.5, percentiles=[50, 99], goodput={"ttft": 200.0})
    metrics.output_throughput, metrics.latencies["ttft"].percentiles[99]
    print(format_table(metrics, ["ttft", "tpot"]))

Latencies are in milliseconds, except in the outputs of requests.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
TURNS = {"first_turn": "First Turns", "later_turns": "Later Turns"}  # of conversations
WIDTH = 50  # characters of the table, as in vLLM's


@dataclass(slots=True)
class RequestFuncOutput:
    generated_text: str = ""
    success: bool = False
    started: float = 0.0  # when it was sent, in seconds of time.perf_counter
    latency: float = 0.0  # seconds from sending to the end of the answer
    ttft: float | None = None  # seconds from sending to the first token; None if the protocol does not stream
    itl: list[float] = field(default_factory=list)  # seconds between the arrivals of tokens
    tpot: float | None = None  # seconds a token after the first, once these are counted; None with fewer than two
    prompt_len: int = 0  # tokens, as the server counts them if it reports them
    output_tokens: int | None = None  # as the server counts them; None if it does not say
    cached_tokens: int = 0  # of the prompt, which the server had in its prefix cache, as it says
    error: str = ""
    turn: int = 0  # of its conversation, from 0
    token_ids: list[int] = field(default_factory=list)  # of the answer, if they were asked for


@dataclass(frozen=True)
class Latency:
    """Statistics of a latency, in milliseconds; None if nothing was measured."""

    mean: float | None
    median: float | None
    std: float | None
    percentiles: dict[float, float | None]


@dataclass(frozen=True)
class TurnMetrics:
    """Of some turns of conversations; None if nothing was measured."""

    ttft: Latency
    cached_share: float | None  # of prompt tokens, in the server's prefix cache
    interactivity: float | None  # output tokens a second of one user, the inverse of the median TPOT


@dataclass(frozen=True)
class BenchmarkMetrics:
    duration: float  # seconds
    completed: int  # requests
    failed: int
    total_input: int  # tokens of the completed requests
    total_output: int
    request_throughput: float  # completed requests a second
    request_goodput: float | None  # requests a second that met every objective; None: no objectives
    output_throughput: float  # tokens a second
    total_token_throughput: float
    max_output_tokens_per_s: float  # events of the second that had most of them
    max_concurrent_requests: int  # requests under way in some part of the second that had most of them
    latencies: dict[str, Latency]  # by the names of METRICS
    turns: dict[str, TurnMetrics]  # by the names of TURNS; empty if no conversation has a second turn


def finish_outputs(outputs: Sequence[RequestFuncOutput], count: Callable[[str], int] | None) -> None:
    """Set every answer's number of tokens and its TPOT: the time after its first token over the tokens after it.

    That time ends with the answer, since a last token without text has no event.
    count: tokens of a text, for servers that do not report them; without it an event counts as a token.
    """
    for output in outputs:
        if not output.success:
            continue
        if output.output_tokens is None:
            num_events = len(output.itl) + (output.ttft is not None)
            output.output_tokens = count(output.generated_text) if count else num_events
        if output.ttft is not None and output.output_tokens > 1:
            output.tpot = (output.latency - output.ttft) / (output.output_tokens - 1)


def calculate_metrics(
    outputs: Sequence[RequestFuncOutput], seconds: float, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> BenchmarkMetrics:
    """
    percentiles: from 0 to 100
    goodput: milliseconds that a request may take, by metric
    """
    good = [output for output in outputs if output.success]
    inputs = sum(output.prompt_len for output in good)
    generated = sum(output.output_tokens or 0 for output in good)
    samples = {
        "ttft": [output.ttft for output in good if output.ttft is not None],
        "tpot": [output.tpot for output in good if output.tpot is not None],
        "itl": [gap for output in good for gap in output.itl],
        "e2el": [output.latency for output in good],
    }
    met = sum(meets(output, goodput) for output in good)
    max_tokens, max_requests = find_peaks(good)
    return BenchmarkMetrics(
        duration=seconds,
        completed=len(good),
        failed=len(outputs) - len(good),
        total_input=inputs,
        total_output=generated,
        request_throughput=len(good) / seconds,
        request_goodput=met / seconds if goodput else None,
        output_throughput=generated / seconds,
        total_token_throughput=(inputs + generated) / seconds,
        max_output_tokens_per_s=max_tokens,
        max_concurrent_requests=max_requests,
        latencies={name: summarize(values, percentiles) for name, values in samples.items()},
        turns=measure_turns(good, percentiles) if any(output.turn for output in outputs) else {},
    )


def measure_turns(good: Sequence[RequestFuncOutput], percentiles: Sequence[float]) -> dict[str, TurnMetrics]:
    by_name = {
        "first_turn": [each for each in good if not each.turn],
        "later_turns": [each for each in good if each.turn],
    }
    return {name: measure_turn(outputs, percentiles) for name, outputs in by_name.items()}


def measure_turn(outputs: Sequence[RequestFuncOutput], percentiles: Sequence[float]) -> TurnMetrics:
    asked, tpots = sum(each.prompt_len for each in outputs), [each.tpot for each in outputs if each.tpot]
    return TurnMetrics(
        ttft=summarize([each.ttft for each in outputs if each.ttft is not None], percentiles),
        cached_share=sum(each.cached_tokens for each in outputs) / asked if asked else None,
        interactivity=1 / float(numpy.median(tpots)) if tpots else None,
    )


def find_peaks(good: Sequence[RequestFuncOutput]) -> tuple[float, int]:
    """Max events and max requests of one second, counted from the first start, as vLLM counts them.

    A request counts in every second that it touches, so that there may be more than ever ran at one time.
    """
    start = min((output.started for output in good), default=0.0)
    tokens: Counter[int] = Counter()
    requests: Counter[int] = Counter()
    for output in good:
        sent = output.started - start
        requests.update(range(int(sent), int(sent + output.latency) + 1))
        if output.ttft is not None:
            tokens.update(map(int, itertools.accumulate([sent + output.ttft, *output.itl])))
    return float(max(tokens.values(), default=0)), max(requests.values(), default=0)


def summarize(values: Sequence[float], percentiles: Sequence[float]) -> Latency:
    """values: seconds."""
    if not values:
        return Latency(None, None, None, dict.fromkeys(percentiles))
    ms = numpy.asarray(values) * 1000
    ranks: dict[float, float | None] = {rank: float(numpy.percentile(ms, rank)) for rank in percentiles}
    return Latency(float(ms.mean()), float(numpy.median(ms)), float(ms.std()), ranks)


def meets(output: RequestFuncOutput, goodput: Mapping[str, float]) -> bool:
    """Whether an answer met every objective. One of a single token has no TPOT to miss."""
    seconds = {"ttft": output.ttft, "tpot": output.tpot, "e2el": output.latency}
    return all(1000 * (seconds[name] or 0.0) <= limit for name, limit in goodput.items())


def flatten_metrics(metrics: BenchmarkMetrics) -> dict[str, Any]:
    """The metrics under the names of a result file: duration, completed, …, mean_ttft_ms, p99_ttft_ms, …"""
    result: dict[str, Any] = {
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input,
        "total_output_tokens": metrics.total_output,
        "request_throughput": metrics.request_throughput,
    }
    if metrics.request_goodput is not None:
        result["request_goodput"] = metrics.request_goodput
    result |= {
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    latencies = metrics.latencies | {f"{name}_ttft": turn.ttft for name, turn in metrics.turns.items()}
    for name, latency in latencies.items():
        result |= {f"mean_{name}_ms": latency.mean, f"median_{name}_ms": latency.median, f"std_{name}_ms": latency.std}
        result |= {f"p{rank:g}_{name}_ms": value for rank, value in latency.percentiles.items()}
    for name, turn in metrics.turns.items():
        result |= {f"{name}_cached_share": turn.cached_share, f"{name}_interactivity": turn.interactivity}
    return result


def format_table(metrics: BenchmarkMetrics, shown: Sequence[str], percentiles: Sequence[float]) -> str:
    """Format the metrics as a table. shown: names of METRICS."""
    rows: list[tuple[str, float | None]] = [
        ("Successful requests", metrics.completed),
        ("Failed requests", metrics.failed),
        ("Benchmark duration (s)", metrics.duration),
        ("Total input tokens", metrics.total_input),
        ("Total generated tokens", metrics.total_output),
        ("Request throughput (req/s)", metrics.request_throughput),
    ]
    if metrics.request_goodput is not None:
        rows.append(("Request goodput (req/s)", metrics.request_goodput))
    rows.append(("Output token throughput (tok/s)", metrics.output_throughput))
    rows.append(("Peak output token throughput (tok/s)", metrics.max_output_tokens_per_s))
    rows.append(("Peak concurrent requests", metrics.max_concurrent_requests))
    rows.append(("Total Token throughput (tok/s)", metrics.total_token_throughput))
    lines = [" Serving Benchmark Result ".center(WIDTH, "="), *map(row, rows)]
    for name in shown:
        lines.append(METRICS[name].center(WIDTH, "-"))
        lines += latency_rows(name, metrics.latencies[name], percentiles)
    for name, turn in metrics.turns.items():
        lines.append(TURNS[name].center(WIDTH, "-"))
        lines += latency_rows("ttft", turn.ttft, percentiles)
        percent = None if turn.cached_share is None else 100 * turn.cached_share
        lines += map(row, [("Cached prompt tokens (%)", percent), ("Interactivity (tok/s a user)", turn.interactivity)])
    return "\n".join([*lines, "=" * WIDTH])


def latency_rows(name: str, latency: Latency, percentiles: Sequence[float]) -> list[str]:
    label = f"{name.upper()} (ms)"
    rows = [(f"Mean {label}", latency.mean), (f"Median {label}", latency.median), (f"Std {label}", latency.std)]
    return [row(each) for each in [*rows, *((f"P{rank:g} {label}", latency.percentiles[rank]) for rank in percentiles)]]


def row(entry: tuple[str, float | None]) -> str:
    label, value = entry
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label + ':':<40} {shown:<10}".rstrip()
