"""`job=plan`: layouts and formats that fit some GPUs, by estimated cost.

Reads config.json only, and needs no GPU.

atom-run job=plan job.gpu=h200 job.gpus=8 checkpoint=deepseek-ai/DeepSeek-V3   # 32 requests of 1,024 in, 256 out
atom-run job=plan job.gpu=h200 job.gpus=8 job.num_prompts=128 job.input_len=8192 job.output_len=512
atom-run job=plan job.gpu=h200 job.gpus=8 job.min_user_rate=50 job.max_ttft=2 job.price_per_hour=3
atom-run job=plan job.gpu=h200 job.gpus=8 job.trace=trace.jsonl          # requests with times and lengths
atom-run job=plan job.gpu=h200 job.gpus=8 job.save_recipe=best.yaml      # the first one, for recipe=
atom-run -m job=plan job.gpu=h200 job.gpus=8 load_dummy=true             # measures the first few here
atom-run job=plan job.gpu=h200 job.gpus=8 job.output=html > page.html
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from typing import Any

from atom.checkpoint import RichProgress
from atom.config import Config
from atom.config.load import load_gpu
from atom.config.overrides import SECRET, write_recipe
from atom.errors import ConfigError
from atom.jobs.kind import keys_of
from atom.jobs.plan.candidates import own_overrides
from atom.jobs.plan.load import Load, check_length, read_load
from atom.jobs.plan.measure import Measured, measure_options
from atom.jobs.plan.page import make_page
from atom.jobs.plan.ranking import Option, Plan, make_plan
from atom.jobs.plan.text import describe_load, print_text
from atom.kernels import Target, find_target
from atom.measurement.hardware import describe_cpus, describe_machine, find_commit
from atom.process.messages import say

NUM_MEASURED = 3  # options that -m measures


def run(config: Config, *, measures: bool = False) -> int:
    """Print the options as a table, an object or a page, and write the first one to job.save_recipe.

    measures: run job=bench with the first NUM_MEASURED options here
    """
    check_fields(config)
    gpu, load = load_gpu(str(config.job.gpu)), read_load(config)
    check_length(load, config)
    plan = make_plan(config, gpu, load, target_of(config, frozenset(gpu.features)), RichProgress())
    measured = measure_options(plan.options[:NUM_MEASURED], load, config) if measures else []
    match config.job.output:
        case "json":
            print(json.dumps(describe_plan(plan, load, config, measured)))
        case "html":
            print(make_page(plan, load, gpu, config, measured))
        case _:
            print_text(plan, load, gpu, config, measured)
    if config.job.save_recipe is not None:
        save_best(plan.options[0], config, next(iter(measured), None))
    return 0


def check_fields(config: Config) -> None:
    """Raise ConfigError for what a plan chooses itself, or needs."""
    given = keys_of(config.overrides)
    if config.job.gpu is None:
        raise ConfigError("job=plan needs job.gpu=NAME, a file of conf/gpu or of yours, and job.gpus=8 or the like")
    if chosen := [key for key in given if key == "parallel" or key.startswith("parallel.")]:
        names = ", ".join(dict.fromkeys(chosen))
        raise ConfigError(f"job=plan chooses the layout: leave out {names}, or the recipe that sets it")
    if config.serve.method is not None:
        raise ConfigError("job=plan estimates a model without drafts: leave out serve.method")


def target_of(config: Config, features: frozenset[str]) -> Target:
    """The GPU whose kernels run; this machine if a device is given that is no GPU."""
    is_cpu = "device" in keys_of(config.overrides) and config.device == "cpu"
    return find_target("cpu") if is_cpu else Target("cuda", features)


def describe_plan(plan: Plan, load: Load, config: Config, measured: Sequence[Measured | None]) -> dict[str, Any]:
    """The object of job.output=json; times are seconds, rates tokens/s, *_bytes lists: of a rank of each stage."""
    return {
        "gpu": config.job.gpu,
        "gpus": config.job.gpus,
        "load": load._asdict(),
        "shares_measured_on": plan.shares.measured_on,
        "options": [
            describe_option(option, config, measured[at] if at < len(measured) else None)
            for at, option in enumerate(plan.options)
        ],
        "too_slow": [describe_option(option, config, None) for option in plan.short],
        "refused": dict(plan.refused),
    }


def describe_option(option: Option, config: Config, measured: Measured | None) -> dict[str, Any]:
    estimate, price = option.estimate, config.job.price_per_hour
    return {
        "layout": option.layout,
        "quant": option.format.quant,
        "kv": option.format.kv,
        "gpus": option.num_gpus,
        "weights_bytes": option.engine.weights_bytes,
        "sequence_bytes": option.engine.sequence_bytes,
        "left_bytes": option.left_bytes,
        "sequences": option.sequences,
        "requests": option.requests,
        "tokens_per_second": option.tokens_per_second,
        "tokens_per_second_of_user": option.user_rate,
        "ttft_seconds": estimate.ttft_seconds,
        "limit_tokens_per_second": option.limit_rate,
        "limit_ttft_seconds": estimate.ttft_limit_seconds,
        "collective_seconds": estimate.collective_seconds,
        "share": {"value": estimate.share.value, "rows": estimate.share.rows},
        "prompt_share": {"value": estimate.prompt_share.value, "rows": estimate.prompt_share.rows},
        "gpu_seconds_per_million_tokens": option.gpu_seconds,
        **({} if price is None else {"cost_per_million_tokens": option.cost(price)}),
        **({} if measured is None else {"measured": measured._asdict()}),
    }


def save_best(option: Option, config: Config, measured: Measured | None) -> None:
    """Write the recipe of an option. measured: its figures, if it was run here"""
    assert config.job.save_recipe is not None, "only then there is a file"
    about: dict[str, Any] = {
        "what": f"the cheapest of job=plan: {describe_load(read_load(config))}",
        "model": config.model.name,
        "hardware": f"{option.num_gpus} x {config.job.gpu}",
        "estimated": {
            "tokens_per_second": round(option.tokens_per_second, 1),
            "tokens_per_second_of_user": round(option.user_rate, 1),
            "ttft_seconds": round(option.estimate.ttft_seconds, 3),
        },
        "measured": "not measured; job=plan has estimated it",
    }
    if measured is not None:
        throughput, ttft = round(measured.tokens_per_second, 1), round(measured.ttft_seconds * 1e3, 1)
        about["measured"] = {"output_throughput": throughput, "median_ttft_ms": ttft}  # as of job=bench
        machine = describe_cpus() if config.device == "cpu" else describe_machine()
        about["measured_on"] = "; ".join(filter(None, (machine, f"{date.today()}", find_commit())))
    if write_recipe(config.job.save_recipe, [*own_overrides(config), *option.overrides], about):
        say(f"{config.job.save_recipe} is without {SECRET}, as others may read it; {SECRET}=@FILE would stay")
