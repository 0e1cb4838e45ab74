"""`job=compare`: find where two ways of running a model part.

atom-run job=compare checkpoint=Qwen/Qwen3-0.6B job.a='level=0' job.b='level=2 quant=fp8'
atom-run job=compare checkpoint=/models/new job.b=transformers
atom-run job=compare checkpoint=/models/x job.b='job.graph=mine.py' job.bisect=passes
atom-run job=compare checkpoint=/models/x job.b='checkpoint=/models/y' job.output=html > page.html

Both sides compute the same prompts and the same answers after them. Each value that both texts name is compared; then
the reference's is put in its place, so that an error is of the calls since the values before it. The reference is the
first side, or `transformers`. The exit code is 1 if a value is off by more than `job.bound`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from atom.checkpoint import RichProgress
from atom.compiler import mesh_of
from atom.config import Config
from atom.config.checkpoint import open_for
from atom.errors import ConfigError
from atom.jobs.compare.bisect import bisect
from atom.jobs.compare.outcome import Comparison, describe
from atom.jobs.compare.page import make_page
from atom.jobs.compare.prompts import choose_prompts
from atom.jobs.compare.reference import run_reference
from atom.jobs.compare.sides import TRANSFORMERS, Side, load_side
from atom.jobs.compare.text import print_result
from atom.jobs.compare.trace import Recorder, Trace

NUM_TOKENS = 8  # of each answer


def run(config: Config) -> int:
    """Print what parts, or with job.output=json an object, with html a page; the exit code."""
    result = compare(config)
    match config.job.output:
        case "json":
            print(json.dumps(finite(result), allow_nan=False))
        case "html":
            print(make_page(result))
        case _:
            print_result(result)
    return 0 if result["agree"] else 1


def finite(result: Any) -> Any:
    """A result with null for numbers that JSON does not have."""
    match result:
        case dict():
            return {key: finite(each) for key, each in result.items()}
        case list() | tuple():
            return list(map(finite, result))
        case float():
            return result if math.isfinite(result) else None
    return result


def compare(config: Config) -> dict[str, Any]:
    """Compare the two sides of a configuration; what `job.output=json` prints."""
    sides = load_sides(config)
    prompts = choose_prompts(config, sides[-1].config)
    comparison = Comparison(sides, compute_reference(sides, prompts), prompts, config.job.bound)
    with comparison.open(comparison.tested) as opened:
        answered, outcome = comparison.answer(opened), comparison.measure(opened)
    result = describe(comparison, outcome, answered)
    if config.job.bisect is not None:
        result["bisect"] = bisect(config.job.bisect, comparison, outcome, answered)
    return result


def load_sides(config: Config) -> list[Side]:
    """The sides that atom runs: the one that is judged is last. ConfigError if they cannot be compared."""
    job = config.job
    sides = [load_side(name, config, own) for name, own in (("a", job.a), ("b", job.b)) if own != TRANSFORMERS]
    if not sides:
        raise ConfigError("both sides are transformers: set job.a or job.b to overrides, or leave one out")
    if len(sides) == 2:
        check_pair(*(side.config for side in sides))
    if job.bisect == "layers" and mesh_of(sides[-1].config).num_ranks > 1:
        raise ConfigError("job.bisect=layers: values of several ranks are not replaced; passes and kernels work")
    return sides


def check_pair(a: Config, b: Config) -> None:
    """ConfigError if two configurations are the same, or of models that differ in size."""
    if is_same(a, b):
        raise ConfigError("both sides are the same: set job.b, as in job.b='level=0' or job.b=transformers")
    for name in ("vocab", "hidden", "layers"):
        sizes = getattr(a.model, name), getattr(b.model, name)
        if sizes[0] != sizes[1]:
            shown = " and ".join(map(str, sizes))
            raise ConfigError(f"the sides have model.{name}={shown}: only models of the same shapes are compared")


def compute_reference(sides: Sequence[Side], prompts: Sequence[Sequence[int]]) -> Trace:
    """The values of the first side and its answers; of transformers if there is one side."""
    first = sides[0]
    if len(sides) == 1:
        with closing(open_for(first.config, RichProgress())) as checkpoint:
            return run_reference(first.config, checkpoint, first.written(), prompts, NUM_TOKENS)
    with first.open(prompts, NUM_TOKENS) as opened:
        recorder = Recorder(opened.lengths, opened.logits, shared_names(sides))
        recorder.trace.answers = opened.answer(recorder)
        return recorder.trace


def is_same(a: Config, b: Config) -> bool:
    """Whether two configurations are the same, however they are written."""
    return replace(a, overrides=[]) == replace(b, overrides=[])


def shared_names(sides: Sequence[Side]) -> frozenset[str]:
    """The values that all texts name before the passes, whose own names tell nothing of another text."""
    return frozenset[str].intersection(*(side.names() for side in sides))
