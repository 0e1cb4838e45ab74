"""Measure options of a plan by `job=bench`, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import NamedTuple

from atom.config import Config
from atom.errors import ConfigError
from atom.jobs.plan.candidates import own_overrides
from atom.jobs.plan.load import Load
from atom.jobs.plan.ranking import Option
from atom.jobs.sweep.job import Sweep, run_job
from atom.process.messages import say

FOLDER = "multirun"  # as that of a sweep


class Measured(NamedTuple):
    tokens_per_second: float  # of all engines: that of one, times their number
    ttft_seconds: float  # the median of requests that come at once


def measure_options(options: Sequence[Option], load: Load, config: Config) -> list[Measured | None]:
    """Run each of some options on this machine; None if it failed, for which a line says why."""
    started = datetime.now()
    folder = Path(FOLDER, f"{started:%Y-%m-%d}", f"{started:%H-%M-%S}").absolute()
    try:
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from None
    dirs = [str(Path(each).absolute()) for each in config.config_dirs]
    sweep = Sweep(
        folder / "jobs", dirs, Path.cwd(), started.isoformat(), is_resumed=False, is_shown=False, pins_gpus=True
    )
    say(f"measuring {len(options)} of the options; what their runs write is in {folder}")
    measured = list[Measured | None]()
    for number, option in enumerate(options):
        result = run_job(sweep, number, bench_overrides(option, load, config))
        if result.code:
            say(f"{option.layout}, {option.describe_format()}: {result.error}")
            measured.append(None)
        else:
            rate, ttft = (result.numbers[name] for name in ("output_throughput", "median_ttft_ms"))
            measured.append(Measured(rate * option.replicas, ttft / 1e3))
    return measured


def bench_overrides(option: Option, load: Load, config: Config) -> list[str]:
    """The run of one engine of an option, with its part of the requests."""
    chosen = [text for text in option.overrides if not text.startswith("parallel.replicas=")]
    sizes = {
        "num_prompts": ceil(option.requests / option.replicas),
        "input_len": load.input_len,
        "output_len": load.output_len,
    }
    return ["job=bench", *own_overrides(config), *chosen, *(f"job.{name}={size}" for name, size in sizes.items())]
