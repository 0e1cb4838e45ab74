"""What a plan is for: requests at a time, or a trace of them.

    load = read_load(config)                # of job.num_prompts, job.input_len, job.output_len
    load = read_load(config)                # or of job.trace: the rate of its busiest minute, and mean lengths

A trace is one of two published forms: lines of JSON with `timestamp` (milliseconds), `input_length` and
`output_length`, as Mooncake's, or CSV with TIMESTAMP, ContextTokens and GeneratedTokens, as Azure's.
"""

from __future__ import annotations

import csv
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from atom.config import Config
from atom.errors import ConfigError
from atom.jobs.bench.workload import parse_range
from atom.jobs.kind import keys_of
from atom.sampling_params import SamplingParams

PEAK_SECONDS = 60.0  # over which the rate of requests is the largest
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length")


class Load(NamedTuple):
    requests: int  # at a time; of a trace 1, until a layout is known
    input_len: int  # tokens of a prompt, on average
    output_len: int  # of an answer
    max_len: int  # of a prompt and its answer
    rate: float | None = None  # requests/s to keep up with; None: as many as are done
    mean_rate: float | None = None  # requests/s over the whole trace


class Arrival(NamedTuple):
    seconds: float
    input_len: int
    output_len: int


def read_load(config: Config) -> Load:
    """The load of job.trace, or of the numbers in its place."""
    job = config.job
    if job.trace is not None:
        keys = {"job.num_prompts", "job.input_len", "job.output_len"} & {*keys_of(config.overrides)}
        if keys:
            raise ConfigError(f"job.trace has the requests and their lengths: leave out {', '.join(sorted(keys))}")
        return load_of_trace(read_trace(job.trace), job.trace)
    default = SamplingParams(**config.sampling.values()).max_tokens
    inputs = parse_range("job.input_len", job.input_len)
    outputs = parse_range("job.output_len", job.output_len or str(default))
    return Load(job.num_prompts, sum(inputs) // 2, sum(outputs) // 2, inputs[1] + outputs[1])


def check_length(load: Load, config: Config) -> None:
    """Raise ConfigError if the longest request is longer than the context."""
    limit = config.serve.max_model_len
    assert limit is not None, "config.load resolves it"
    if load.max_len > limit:
        what = "job.input_len and job.output_len are" if config.job.trace is None else "a request of job.trace has"
        raise ConfigError(f"{what} {load.max_len:,} tokens, more than serve.max_model_len={limit:,}")


def load_of_trace(arrivals: Sequence[Arrival], path: str) -> Load:
    """Mean lengths, the rate of the busiest PEAK_SECONDS, and the mean rate."""
    times = sorted(each.seconds for each in arrivals)
    duration = times[-1] - times[0]
    if duration <= 0:
        raise ConfigError(f"job.trace={path}: all requests come at once; set job.num_prompts to their number instead")
    window = min(PEAK_SECONDS, duration)
    peak = max(bisect_left(times, start + window) - at for at, start in enumerate(times)) / window
    mean_in, mean_out = (
        max(round(sum(getattr(each, name) for each in arrivals) / len(arrivals)), 1)
        for name in ("input_len", "output_len")
    )
    longest = max(each.input_len + each.output_len for each in arrivals)
    mean = len(arrivals) / duration
    return Load(1, mean_in, mean_out, longest, max(peak, mean), mean)


def read_trace(path: str) -> list[Arrival]:
    """The requests of a trace. ConfigError for a file that is none."""
    try:
        lines = Path(path).expanduser().read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"job.trace={path}: {reason}") from None
    try:
        read = read_mooncake if lines and lines[0].lstrip().startswith("{") else read_azure
        arrivals = [each for each in read(lines) if each.input_len > 0 and each.output_len > 0]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        form = f"lines of JSON with {', '.join(MOONCAKE)}, or CSV with {', '.join(AZURE)}"
        raise ConfigError(f"job.trace={path}: a trace has {form} ({type(error).__name__}: {error})") from None
    if not arrivals:
        raise ConfigError(f"job.trace={path} has no request")
    return arrivals


def read_mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    for line in filter(str.strip, lines):
        at, input_len, output_len = (json.loads(line)[name] for name in MOONCAKE)
        yield Arrival(float(at) / 1e3, int(input_len), int(output_len))


def read_azure(lines: Iterable[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(lines):
        at, input_len, output_len = (row[name] for name in AZURE)
        yield Arrival(datetime.fromisoformat(at).timestamp(), int(input_len), int(output_len))
