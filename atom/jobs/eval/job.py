"""`job=eval`: measure perplexity, KL and tasks, besides speed and bytes.

atom-run job=eval checkpoint=/models/qwen3 job.texts=[wiki.txt] job.num_tokens=50000
atom-run job=eval checkpoint=/models/qwen3 quant=fp8 job.reference='quant=none'       # and KL, and agreement
atom-run job=eval checkpoint=/models/qwen3 job.reference=transformers job.output=json
atom-run job=eval checkpoint=/models/qwen3 job.tasks=[hellaswag,mine.yaml] job.limit=200
atom-run -m job=eval checkpoint=/models/qwen3 quant=none,fp8,int8,int4

The reference runs first, and what it predicts is held in a file; so only one engine is open at a time. Speed is that of
the requests of `job=bench`.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from atom.assemble import compile_with, open_engine
from atom.checkpoint import Progress, RichProgress
from atom.compiler import Compiled
from atom.config import Config
from atom.config.checkpoint import open_for
from atom.errors import ConfigError
from atom.graph.recipe_contents import device_bytes
from atom.jobs.bench.job import answer, describe_run
from atom.jobs.bench.job import measure as measure_speed
from atom.jobs.bench.workload import open_workload
from atom.jobs.compare.job import finite
from atom.jobs.compare.reference import open_model
from atom.jobs.compare.sides import TRANSFORMERS, load_added, naming
from atom.jobs.eval.estimate import Estimate, estimate_mean, exponential, scaled
from atom.jobs.eval.score import Compared, compare_logits, complete, keep_logits, keep_reference, map_logits, score
from atom.jobs.eval.texts import (
    BUILT_IN,
    Window,
    choose_windows,
    cut_windows,
    encode_text,
    num_bytes_of,
    read_text,
)
from atom.jobs.tables import make_table, with_error
from atom.measurement.cores import core_seconds, warn_of
from atom.process.gc_utils import settle
from atom.process.messages import say
from atom.runtime.engine import Engine

CONTEXT_LEN = 1024  # tokens of a window, if the model takes as many
ESTIMATED = ("perplexity", "bits_per_byte", "perplexity_ratio", "kl", "agreement")
# the numbers that job.objective may choose, of each task tasks.NAME.METRIC
OBJECTIVES = (
    *(f"{name}{suffix}" for name in ESTIMATED for suffix in ("", "_error")),
    "max_kl",
    "scored_tokens",
    "tasks.*",
    "output_throughput",
    "weights_bytes",
    "share_waited_for_cores",
)
METRICS = {  # of the table: number -> heading
    "perplexity": "perplexity",
    "bits_per_byte": "bits/byte",
    "perplexity_ratio": "to reference",
    "kl": "KL, nats",
    "agreement": "agreement",
}


@dataclass(frozen=True)
class Corpus:
    """What is scored."""

    windows: list[Window]
    num_bytes: dict[str, int]  # of each text, up to where its last window ends
    num_tokens: dict[str, int]  # the same, of its tokens

    @property
    def num_scored(self) -> int:
        return sum(window.num_scored for window in self.windows)


def run(config: Config, report: Callable[[Mapping[str, Any]], None] = lambda numbers: None) -> int:
    """Print tables or, with job.output=json, an object; the exit code is 0.

    report: is called with the numbers of OBJECTIVES
    """
    result = evaluate(config)
    report({**result, **result.get("all", {}), **flat_tasks(result)})
    if config.job.output == "json":
        print(json.dumps(finite(result), allow_nan=False))
    else:
        show(result)
    for warning in result["warnings"]:
        say(warning)
    return 0


def evaluate(config: Config) -> dict[str, Any]:
    """Evaluate a configuration; what `job.output=json` prints."""
    progress, compared = RichProgress(), None
    if config.job.tasks:
        import_harness()  # before anything takes its time
    corpus = read_corpus(config, progress)
    reference: Tensor | None = None
    if corpus.windows and config.job.reference is not None:
        reference = map_logits(config.cache_folder, corpus.num_scored, config.model.vocab)
        run_reference(config, corpus, reference, progress)
        if config.device != "cpu":
            gc.collect()  # an engine's parts reference each other
            torch.cuda.empty_cache()
    compiled = compile_with(config, progress)
    engine = open_engine(config, progress, compiled)
    try:
        result = {**describe_run(config, compiled.level), **measure(engine, config, compiled)}
        if config.job.tasks:
            result["tasks"] = run_harness(engine, config)
        if corpus.windows:
            compared = score_corpus(engine, corpus, reference, progress)
    finally:
        engine.close()
    if compared is not None:
        result |= describe_scores(config, corpus, compared)
    return result


def read_corpus(config: Config, progress: Progress) -> Corpus:
    """The windows of the texts. ConfigError if there is nothing to score."""
    names = config.job.texts
    if names is None:
        names = [] if config.job.tasks else list(BUILT_IN)
    if not names and not config.job.tasks:
        raise ConfigError("job.texts=[] leaves nothing to evaluate: name a text, or job.tasks")
    if not names and config.job.reference is not None:
        raise ConfigError("job.reference is for texts: name some in job.texts")
    if not names:
        return Corpus([], {}, {})
    with closing(open_for(config, progress, weights=False)) as checkpoint:
        tokenizer = checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
    if tokenizer is None:
        raise ConfigError("job.texts: the checkpoint has no tokenizer")
    length, stride = window_len(config), config.job.stride
    texts = {name: encode_text(name, read_text(name, config.cache_folder, progress), tokenizer) for name in names}
    windows = choose_windows([cut_windows(text, length, stride) for text in texts.values()], config.job.num_tokens)
    ends = {name: max((each.end for each in windows if each.text == name), default=0) for name in texts}
    if empty := [name for name, text in texts.items() if len(text.tokens) < 2]:
        raise ConfigError(f"job.texts: {empty[0]} has fewer than 2 tokens")
    ends = {name: end for name, end in ends.items() if end}
    return Corpus(windows, {name: num_bytes_of(texts[name], end, tokenizer) for name, end in ends.items()}, ends)


def window_len(config: Config) -> int:
    """The tokens of a window. ConfigError if the model takes fewer."""
    limit = max_window(config, is_one_step=config.job.reference is not None)
    length = config.job.context_len or min(CONTEXT_LEN, limit)
    if length > limit:
        limits = "serve.max_model_len, less one, and of a comparison serve.max_num_batched_tokens"
        raise ConfigError(f"job.context_len={length}: a window has at most {limit} tokens ({limits})")
    return length


def max_window(config: Config, *, is_one_step: bool) -> int:
    """The tokens that a window may have, after which one is generated. is_one_step: so that all logits are seen"""
    limit = config.limits.max_model_len - 1
    return min(limit, config.limits.max_num_batched_tokens) if is_one_step else limit


def run_reference(config: Config, corpus: Corpus, kept: Tensor, progress: Progress) -> None:
    """Write the reference's logits. ConfigError if it cannot run, or has other tokens."""
    own, windows = config.job.reference, corpus.windows
    assert own is not None, "there is a reference"
    counting = partial(progress.task, "Scoring the reference", len(windows), in_bytes=False)
    if own == TRANSFORMERS:
        with closing(open_for(config, progress)) as checkpoint:
            model = open_model(config, checkpoint, "job.reference")
        with counting() as counted:
            keep_reference(model, windows, kept, counted)
        return
    other = load_added("reference", config, own)
    if other.model.vocab != config.model.vocab:
        sizes = f"{other.model.vocab} tokens, and the model {config.model.vocab}"
        raise ConfigError(f"job.reference has a vocabulary of {sizes}: only the same tokens are compared")
    length, limit = max(len(window.tokens) for window in windows), max_window(other, is_one_step=True)
    if length > limit:
        raise ConfigError(f"job.reference takes {limit} tokens, and a window has {length}: lower job.context_len")
    other = replace(other, sampling=replace(other.sampling, defaults="none"))
    with naming("job.reference"), closing(open_engine(other, progress)) as engine, counting() as counted:
        keep_logits(engine, windows, kept, counted)


def score_corpus(engine: Engine, corpus: Corpus, reference: Tensor | None, progress: Progress) -> Compared:
    """Score the windows; without a reference the lists of a comparison are empty."""
    with progress.task("Scoring", len(corpus.windows), in_bytes=False) as counted:
        if reference is None:
            return Compared(score(engine, corpus.windows, counted), [], [], [])
        return compare_logits(engine, corpus.windows, reference, counted)


def measure(engine: Engine, config: Config, compiled: Compiled) -> dict[str, Any]:
    """The speed of the requests of `job=bench`, and the bytes of the weights that a rank holds."""
    draw = open_workload(config)
    for _ in range(config.job.num_warmups):
        answer(engine, draw(engine), config)
    settle()
    cores = core_seconds()
    timed = answer(engine, draw(engine), config)
    waited = core_seconds().share_waited(cores)
    if failed := next((output for output in timed.outputs if not output.success), None):
        raise ConfigError(f"a request that is timed has failed: {failed.error}")
    speed = measure_speed([timed])
    return {
        "output_throughput": speed["output_throughput"],
        "weights_bytes": sum(map(device_bytes, compiled.graph.recipes())),
        "share_waited_for_cores": waited,
        "warnings": warn_of(waited),
    }


def describe_scores(config: Config, corpus: Corpus, compared: Compared) -> dict[str, Any]:
    """The numbers of each text and of all."""
    texts = {name: describe_text([name], corpus, compared) for name in corpus.num_tokens}
    return {
        "context_len": window_len(config),
        "stride": config.job.stride,
        "reference": config.job.reference,
        "scored_tokens": corpus.num_scored,
        "texts": texts,
        "all": describe_text(list(corpus.num_tokens), corpus, compared),
    }


def describe_text(names: Sequence[str], corpus: Corpus, compared: Compared) -> dict[str, Any]:
    """The numbers of some texts together."""

    def values_of(column: Sequence[Tensor]) -> list[Tensor]:
        """By text, in its order."""
        pairs = list(zip(column, corpus.windows, strict=True))
        return [torch.cat([values for values, window in pairs if window.text == name]) for name in names]

    losses = values_of(compared.losses)
    estimates = {
        "perplexity": exponential(estimate_mean(losses)),
        "bits_per_byte": bits_per_byte(losses, names, corpus),
    }
    result: dict[str, Any] = {"scored_tokens": sum(map(len, losses))}
    if compared.kl:
        theirs = values_of(compared.reference_losses)
        more = [ours - other for ours, other in zip(losses, theirs, strict=True)]
        kl = values_of(compared.kl)
        estimates |= {
            "perplexity_ratio": exponential(estimate_mean(more)),
            "kl": estimate_mean(kl),
            "agreement": estimate_mean(values_of(compared.is_same)),
        }
        result["reference_perplexity"] = exponential(estimate_mean(theirs)).value
        result["max_kl"] = float(torch.cat(kl).max())
    for name, estimate in estimates.items():
        result |= {name: estimate.value, f"{name}_error": estimate.error}
    return result


def bits_per_byte(losses: Sequence[Tensor], names: Sequence[str], corpus: Corpus) -> Estimate:
    """Bits for a byte of the texts, if tokens that are not scored cost as much as the others of their text."""
    num_bytes = sum(corpus.num_bytes[name] for name in names)
    each = [
        scaled(estimate_mean([part]), corpus.num_tokens[name] / num_bytes / math.log(2))
        for part, name in zip(losses, names, strict=True)
    ]
    errors = [estimate.error for estimate in each]
    known = [error for error in errors if error is not None]
    return Estimate(sum(one.value for one in each), math.hypot(*known) if len(known) == len(errors) else None)


def import_harness() -> Any:
    """The module that runs tasks. ConfigError without lm_eval."""
    try:
        from atom.jobs.eval import harness
    except ImportError as error:
        raise ConfigError(f"job.tasks needs lm_eval ({error}): pip install 'atom-run[eval]'") from None
    return harness


def run_harness(engine: Engine, config: Config) -> dict[str, dict[str, float]]:
    harness = import_harness()
    lm = harness.AtomLM(
        lambda prompts, params: complete(engine, prompts, params),
        engine.vocabulary.tokenizer,
        config.limits.max_model_len,
    )
    found: dict[str, dict[str, float]] = harness.run_tasks(lm, config)
    return found


def flat_tasks(result: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of tasks by the names that job.objective has for them."""
    tasks: Mapping[str, Mapping[str, float]] = result.get("tasks", {})
    return {f"tasks.{task}.{name}": value for task, values in tasks.items() for name, value in values.items()}


def show(result: dict[str, Any]) -> None:
    width = None if sys.stdout.isatty() else 1000  # lines are not cut in a pipe
    console = Console(width=width, highlight=False, soft_wrap=True, markup=False)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    console.print(f"{result['model']}, {result['dtype']}, level {result['level']}, on {result['hardware']}; {versions}")
    if "texts" in result:
        stride = "without overlap" if result["stride"] is None else f"every {result['stride']:,} tokens"
        console.print(f"windows of {result['context_len']:,} tokens, {stride}; ±: standard errors")
        if result["reference"] is not None:
            console.print(f"reference: {result['reference'] or 'as it is'}")
    console.print()
    if "texts" in result:
        console.print(text_table(result), "")
    if "tasks" in result:
        tasks = make_table("task", "metric", "value", left=("task", "metric"))
        for task, values in result["tasks"].items():
            for name in (name for name in values if not name.endswith("_error")):
                tasks.add_row(task, name, with_error(values[name], values.get(f"{name}_error")))
        console.print(tasks, "")
    speed = make_table("output tokens/s", "weights, MB")
    speed.add_row(f"{result['output_throughput']:,.2f}", f"{result['weights_bytes'] / 1e6:,.1f}")
    console.print(speed)


def text_table(result: dict[str, Any]) -> Any:
    texts = {**result["texts"], **({"all": result["all"]} if len(result["texts"]) > 1 else {})}
    names = [name for name in METRICS if name in result["all"]]
    table = make_table("text", "tokens", *(METRICS[name] for name in names), left=("text",))
    for text, values in texts.items():
        cells = (with_error(values[name], values[f"{name}_error"]) for name in names)
        table.add_row(text, f"{values['scored_tokens']:,}", *cells)
    return table
