"""Estimate a run of requests: limits, by measured shares, and collectives.

    estimate = estimate_run(candidate, gpu, load, shares)
    estimate.seconds, estimate.ttft_seconds

A run is that of job=bench: all requests come at once, their prompts are computed in steps of as many tokens as the
engine takes, then each step gives each request a token. Work and limits are those of `atom.jobs.bench.roofline`.
Stages of a pipeline take turns, each with its part of the requests.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import ceil

from atom.config import GPUConfig
from atom.jobs.bench.roofline import step_work, total
from atom.jobs.bench.workload import Step
from atom.jobs.explain.layouts import collective_seconds, limits_of
from atom.jobs.plan.candidates import Candidate
from atom.jobs.plan.load import Load
from atom.jobs.plan.shares import Shape, Share, Shares, measured_share


@dataclass(frozen=True)
class Estimate:
    """An engine's requests at a time."""

    seconds: float  # of all prompts and answers
    limit_seconds: float  # the same at the limits, and collectives
    ttft_seconds: float  # of a single prompt
    ttft_limit_seconds: float  # the same at the limits, and collectives
    collective_seconds: float | None  # of `seconds`; None: not known, and not counted
    share: Share  # of steps of decodes
    prompt_share: Share


def estimate_run(candidate: Candidate, gpu: GPUConfig, load: Load, shares: Shares) -> Estimate:
    """Estimate an engine that gets load.requests at a time."""
    mesh, layers = candidate.mesh, candidate.config.model.layers
    rows = ceil(load.requests / mesh.data)  # of the fullest group
    own = ceil(rows / mesh.pipeline)  # of a step: those of the stages are apart
    num_steps = load.output_len - 1  # a prompt gives the first token
    decode = num_steps * mesh.pipeline * max(_stage_seconds(candidate, gpu, _decode_step(load, own)))
    step_sums = collective_seconds(candidate.graphs, gpu, mesh, own)
    sums, prompts = num_steps * (step_sums or 0.0), 0.0
    in_step = max(candidate.config.limits.max_num_batched_tokens // load.input_len, 1)  # prompts
    for count, times in ((in_step, rows // in_step), (rows % in_step, 1)):
        if count and times:
            stages = _stage_seconds(candidate, gpu, _prompt_step(load, count))
            whole = _prompt_sums(candidate, gpu, load, count)
            prompts += times * max(stages)
            sums += times * whole / mesh.pipeline
    prompts += sum(stages) - max(stages)  # the last step goes through the other stages by itself
    sums += whole * (1 - 1 / mesh.pipeline)
    single = sum(_stage_seconds(candidate, gpu, _prompt_step(load, 1)))
    single_sums = _prompt_sums(candidate, gpu, load, 1)
    seconds = (decode + prompts) / load.output_len / layers
    shape = Shape(candidate.bits, candidate.is_mixture, candidate.is_recurrent, seconds)
    share = measured_share(shares.runs, shape, is_least=True)
    shape = shape._replace(layer_seconds=single / layers)
    prompt_share = measured_share(shares.prompts, shape, is_least=False)
    least = measured_share(shares.runs, shape, is_least=True)
    if shape.layer_seconds < shares.runs[least.rows[0]]["layer_seconds"] and least.value < prompt_share.value:
        prompt_share = least  # its layers take no less time than those of the shortest decode
    seconds = decode / share.value + prompts / prompt_share.value + sums
    return Estimate(
        seconds,
        decode + prompts + sums,
        single / prompt_share.value + single_sums,
        single + single_sums,
        None if step_sums is None else sums,
        share,
        prompt_share,
    )


def _decode_step(load: Load, num_rows: int) -> Step:
    """In the middle of the answers."""
    return Step(0.0, array("q", [load.input_len + load.output_len // 2] * num_rows), [], num_rows)


def _prompt_step(load: Load, count: int) -> Step:
    return Step(0.0, array("q"), [(0, load.input_len)] * count, count)


def _prompt_sums(candidate: Candidate, gpu: GPUConfig, load: Load, count: int) -> float:
    return collective_seconds(candidate.graphs, gpu, candidate.mesh, count * load.input_len) or 0.0


def _stage_seconds(candidate: Candidate, gpu: GPUConfig, step: Step) -> list[float]:
    """The min seconds of a step in each stage, without collectives."""
    limits = limits_of(gpu)
    return [limits.seconds(total(step_work(costs, step).values())) for costs in candidate.costs]
