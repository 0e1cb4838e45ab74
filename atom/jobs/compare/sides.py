"""One side of a comparison: its configuration, its text and its engine.

side = load_side("a", config, "level=0")
with side.open(prompts, num_tokens=8) as opened:
    answers = opened.answer()
    opened.answer(watcher)
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atom.assemble import compile_with, open_engine, settle_formats
from atom.checkpoint import RichProgress
from atom.compiler import Compiled, compile_graph, mesh_of
from atom.compiler.artifact import semantic_graph
from atom.compiler.saved_graph import read_saved
from atom.config import Config
from atom.config.load import load
from atom.errors import AtomError, ConfigError
from atom.graph import BODY, HEAD, Graph
from atom.jobs.compare.lines import History, Line, read_lines
from atom.jobs.compare.trace import Value, Watcher
from atom.runtime.engine import Engine
from atom.runtime.ranks.driver import Driver
from atom.runtime.step.runner import Runner
from atom.sampling_params import SamplingParams

OWN = ("job", "prompts", "recipe")  # groups and fields of the comparison itself, which no side is loaded with …
KEPT = "job.graph"  # … but for this one
TRANSFORMERS = "transformers"


@dataclass
class Side:
    """One of the two ways of running a model."""

    name: str  # a or b
    config: Config
    shown: str  # its overrides

    @property
    def dtype(self) -> str:
        """The dtype of its hidden states."""
        return self.config.dtype

    @contextmanager
    def open(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Iterator[Opened]:
        """Open an engine for prompts, one at a time, and answers of so many tokens. Errors name the side."""
        with naming(f"job.{self.name}"):
            config = fit(self.config, prompts, num_tokens)
            compiled = compile_with(config, RichProgress())
            engine = open_engine(config, RichProgress(), compiled)
        try:
            yield Opened(self, engine, compiled, prompts, num_tokens)
        finally:
            engine.close()

    def written(self) -> Graph:
        """The text before all passes, or the saved one."""
        path = self.config.job.graph
        return semantic_graph(self.config) if path is None else read_saved(Path(path))[0]

    def names(self) -> frozenset[str]:
        """The values that its text names before all passes."""
        return frozenset(name for _, name in values_of(self.written()))

    def lines(self) -> dict[Value, Line]:
        """The lines of its text."""
        return read_lines(compile_graph(self.config))

    def history(self) -> dict[Value, list[str]]:
        """The passes that make or change the call of each value."""
        history = History(self.written())
        compile_graph(self.config, history)
        return history.passes


@dataclass
class Opened:
    """A side that runs."""

    side: Side
    engine: Engine
    compiled: Compiled
    prompts: Sequence[Sequence[int]]
    num_tokens: int  # of each answer

    @property
    def runner(self) -> Runner:
        """This process's; of several ranks that of the first."""
        runner: Any = self.engine.runner
        return runner.runner if isinstance(runner, Driver) else runner

    @property
    def is_one_rank(self) -> bool:
        return mesh_of(self.side.config).num_ranks == 1

    @property
    def logits(self) -> str:
        """What the text calls the result of its head."""
        (result,) = self.compiled.graph.programs[HEAD].results
        return str(result.name)

    @property
    def values(self) -> frozenset[Value]:
        """All values of its text."""
        return values_of(self.compiled.graph)

    @property
    def lengths(self) -> list[int]:
        return list(map(len, self.prompts))

    def lines(self) -> dict[Value, Line]:
        lines, passes = read_lines(self.compiled.graph), self.side.history()
        for value, line in lines.items():
            line.passes = passes.get(value, [])
        return lines

    def answer(self, watcher: Watcher | None = None) -> list[list[int]]:
        """The greedy answers to the prompts, one after the other. watcher: is shown all values"""
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=self.num_tokens)
        if watcher is not None:
            self.runner.graphs.clear()
            params = replace(params, prompt_logprobs=0)  # so that the head runs for all tokens of a prompt
        with self.runner.model.watched(watcher) if watcher else nullcontext():
            answers = []
            for number, prompt in enumerate(self.prompts):
                with naming(f"prompt {number}"), watcher.prompt(number) if watcher else nullcontext():
                    answers.append(self._answer(prompt, params))
        return answers

    def _answer(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        self.engine.submit(self.engine.prepare(list(prompt), params))
        ended = []
        while self.engine.has_work:
            ended += self.engine.step()
        (sequence,) = ended
        if sequence.error is not None:
            raise ConfigError(sequence.error)
        return list(sequence.output)


def values_of(graph: Graph) -> frozenset[Value]:
    """The inputs and results of the body and the head."""
    return frozenset((name, node.name) for name in (BODY, HEAD) for node in graph.programs[name].fx.nodes)


def load_side(name: str, config: Config, own: str) -> Side:
    """The side of these overrides, which are added to those of the comparison. ConfigError names the side."""
    loaded, shown = load_added(name, config, own), own or "as it is"
    if loaded.level is None:  # compiled pieces show only their results
        return Side(name, replace(loaded, level=1), f"{shown}, level 1")
    return Side(name, loaded, shown)


def load_added(name: str, config: Config, own: str) -> Config:
    """A job's configuration with further overrides, those of the job itself left out. ConfigError names the field.

    name: the field of `job` that has them
    """
    with naming(f"job.{name}"):
        try:
            texts = shlex.split(own)
        except ValueError as error:
            raise ConfigError(f"{own!r}: {error}") from None
        if wrong := [each for each in texts if not is_shared(each)]:
            raise ConfigError(f"{wrong[0]} applies to the comparison, not to a side: write it outside of job.{name}")
        shared = [each for each in config.overrides if is_shared(each)]
        return settle_formats(load([*shared, *texts], config_dirs=config.config_dirs), RichProgress())


def is_shared(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0]
    return key == KEPT or key.partition(".")[0] not in OWN


def fit(config: Config, prompts: Sequence[Sequence[int]], num_tokens: int) -> Config:
    """The configuration with one sequence at a time, whose prompt is one step. ConfigError if that cannot be."""
    serve, limits = config.serve, config.limits
    budget = limits.max_num_batched_tokens
    if config.draft is not None or serve.method is not None:
        raise ConfigError(f"serve.method={serve.method}: drafts change no token; leave it out")
    for number, prompt in enumerate(prompts):
        if len(prompt) + num_tokens > limits.max_model_len:
            size = f"{len(prompt)} tokens and {num_tokens} of its answer"
            raise ConfigError(f"prompt {number} has {size}, and serve.max_model_len={limits.max_model_len}")
        if len(prompt) > budget:
            size = f"{len(prompt)} tokens, to run in one step"
            raise ConfigError(f"prompt {number} has {size}, and serve.max_num_batched_tokens={budget}")
    fitted = replace(serve, enable_prefix_caching=False, max_num_seqs=1, swap_space=0, kv_cache_dir=None)
    return replace(config, serve=fitted, sampling=replace(config.sampling, defaults="none"))


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put the name of a side or a prompt before the errors of the users' own making."""
    try:
        yield
    except AtomError as error:
        error.args = (f"{what}: {error}",)
        raise
