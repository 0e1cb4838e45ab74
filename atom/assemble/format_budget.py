"""Choose formats by module within an error budget: `quant=budget quant.max_kl=0.01`.

    config = settle_formats(config, progress)        # with quant.formats in place of the budget

Groups of modules are measured on a few prompts: the KL divergence of all their positions' outputs from the plain
model's (`format_search.py`). What is chosen is written as a file of conf/quant, and kept in the cache folder by the
checkpoint's files. The measured costs are kept as well, for other budgets.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from atom import weights
from atom.assemble.budget_prompts import PROMPTS
from atom.assemble.calibration import plan_calibration, read_calibration_text
from atom.assemble.format_costs import KLMeter, find_groups
from atom.assemble.format_search import PLAIN, Choice, FormatSearch, Tensors, bytes_in, format_in, recipes_in
from atom.assemble.loading import WEIGHT_SOURCES, open_checked, settle_heads
from atom.cache import Cache, digest, key_of
from atom.cache.files import WEIGHTS
from atom.checkpoint import SILENT, Checkpoint, Progress
from atom.compiler import semantic_graph
from atom.config import Config, QuantConfig
from atom.config.checkpoint import is_here
from atom.config.resolve_quant import BUDGET
from atom.errors import ConfigError, RequestError, naming_a_lack_of_memory
from atom.frontend import build
from atom.graph import TORCH_DTYPES, Quantize, Recipe, show
from atom.kernels import Target
from atom.passes.context import PassContext
from atom.passes.lower_moe import lower_moe
from atom.pieces import sources_of
from atom.process.messages import say
from atom.runtime.requests.vocabulary import Vocabulary
from atom.weights.calibration import Calibration
from atom.weights.packed_store import describe_file

MARKER = "int8[1, *]"  # of all that may be packed, in the text that is measured; it fits any number of columns
FILE, FORMATS, COSTS = "formats.yaml", "formats.json", "costs.json"
SOURCES = (
    "assemble/format_budget.py", "assemble/format_costs.py", "assemble/format_search.py", "assemble/divergence.py",
)  # fmt: skip


def settle_formats(config: Config, progress: Progress, *, measures: bool = True) -> Config:
    """The configuration with formats by module in place of a budget; as it is without a budget.

    measures: False: ConfigError if no earlier start has measured
    """
    if config.quant.fmt != BUDGET:
        return config
    if config.job.graph is not None:
        raise ConfigError("quant=budget: job.graph is a text, which has its formats; leave one of them out")
    if config.load_dummy:
        raise ConfigError("quant=budget measures a checkpoint's weights, and random ones are asked for; leave it out")
    unmeasured = ConfigError(
        "quant=budget: the formats are measured when an engine first starts with this budget; start one, "
        "or load a file that it wrote"
    )
    if not measures and not is_here(config) and config.checkpoint is not None:
        raise unmeasured
    with ExitStack() as opened:
        cache = Cache(config.cache_folder)
        checkpoint = open_checked(config, progress, opened)
        budget = FormatBudget(settle_heads(config, checkpoint), checkpoint, cache, progress)
        formats = budget.find()
        if formats is None and not measures:
            raise unmeasured
        if formats is None:
            with cache.lock(WEIGHTS, budget.key, lambda: say("quant=budget: waiting for another start that measures")):
                formats = budget.find() or budget.measure()
    for line in cache.warnings:
        say(line)
    cache.close()
    return with_formats(config, formats)


def with_formats(config: Config, formats: Mapping[str, str]) -> Config:
    """A configuration with formats by module, and nothing packed besides."""
    return replace(config, quant=replace(config.quant, fmt="none", formats=dict(formats), max_kl=None))


class FormatBudget:
    """A model's formats within the budget of a configuration."""

    def __init__(self, config: Config, checkpoint: Checkpoint, cache: Cache, progress: Progress) -> None:
        """ConfigError if there is no tokenizer, or nothing to pack."""
        self._config, self._checkpoint, self._cache, self._progress = config, checkpoint, cache, progress
        self._max_kl, self._sources = float(config.quant.max_kl or 0), sources_of(*WEIGHT_SOURCES)
        dtype = "fp32" if config.device == "cpu" else config.dtype  # as in `plain_graph`
        quant = QuantConfig(fmt=MARKER, plain=config.quant.plain, act="none")
        graph = build(config.model, dtype, dtype, quant)
        self._groups = find_groups(graph)
        self._graph = lower_moe(graph, PassContext.of(Target("cpu"), level=0))
        if not self._groups:
            raise ConfigError("quant=budget: the model has no linears to pack; leave it out")
        tokenizer = checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
        if tokenizer is None:
            raise ConfigError("quant=budget measures on texts, and the checkpoint has no tokenizer; name a format")
        self._tokenizer = tokenizer
        try:
            vocabulary = Vocabulary(config.model.vocab, frozenset(), tokenizer)
            self._prompts = [vocabulary.tokenize(text)[: config.limits.max_model_len] for text in PROMPTS]
        except RequestError as error:
            raise ConfigError(f"quant=budget: the checkpoint's tokenizer cannot be used: {error}") from None
        self._ladder = [*config.quant.choices, PLAIN]
        self._ladder = sorted(self._ladder, key=self._num_bytes)
        calibration = config.quant.calibration
        text = "" if calibration == "none" else read_calibration_text(config)
        self._ingredients = {
            "files": "; ".join(map(describe_file, checkpoint.files())),
            "reading": digest(checkpoint.reading),
            "model": digest(show(self._graph)),
            "dtype": config.dtype,
            "formats": "; ".join(self._ladder),
            "prompts": digest(repr(self._prompts)),
            "calibration": f"{calibration} {digest(text)}",
            "sources": f"{self._sources} {sources_of(*SOURCES)}",
        }
        self.key = key_of({**self._ingredients, "budget": repr(self._max_kl)})

    def find(self) -> dict[str, str] | None:
        """The formats by module that are kept; None: there are none."""
        folder = self._cache.find(WEIGHTS, self.key)
        if folder is None:
            return None
        say(f"quant=budget: the formats of {folder / FILE}")
        formats: dict[str, str] = json.loads((folder / FORMATS).read_bytes())
        return formats

    def measure(self) -> dict[str, str]:
        """Measure, choose and keep formats by module. CapacityError if the device has no room for the plain model."""
        device = self._config.device
        with naming_a_lack_of_memory(
            f"device={device} has no room for the plain model, which quant=budget measures: start once with "
            f"device=cpu or on a machine with more memory, and load the file that this start writes"
        ):
            choice = self._search()
        if device != "cpu":
            torch.cuda.empty_cache()
        formats = self._by_module(choice.formats)
        files = {FILE: self._as_yaml(choice), FORMATS: json.dumps(formats)}
        folder = self._keep(self.key, files, f"formats within {self._max_kl:g} nats")
        say(f"quant=budget: {self._describe(choice)}; written to {folder / FILE}")
        return formats

    def _search(self) -> Choice:
        packed: dict[Recipe, Recipe] = {}
        for group in self._groups:
            packed |= recipes_in(PLAIN, group)
        others = self._load(None, {recipe: recipe for recipe in self._graph.recipes() if recipe not in packed})
        plain = self._load(
            None, {weight: part for group in self._groups for weight, part in recipes_in(PLAIN, group).items()}
        )
        meter = KLMeter(self._graph, self._prompts, {**others, **plain}, self._config.device)
        del plain
        calibrate = functools.cache(self._calibrate)
        search = FormatSearch(
            self._groups,
            self._ladder,
            lambda fmt, recipes: self._load(None if fmt == PLAIN else calibrate(fmt), recipes),
            meter,
            others,
            self._progress,
        )
        choice = search.run(self._max_kl, self._kept_costs)
        if choice.costs and not self._kept_costs(choice.smaller):
            files = {COSTS: json.dumps([*choice.costs.items()])}
            self._keep(self._costs_key(choice.smaller), files, "costs of formats")
        return choice

    def _load(self, calibration: Calibration | None, recipes: Mapping[Recipe, Recipe]) -> Tensors:
        """The tensors of recipes, by what they are in the text; those that may be packed in the model's dtype."""
        device, dtype = self._config.device, TORCH_DTYPES[self._config.dtype]
        made = weights.load(
            recipes.values(), self._checkpoint, SILENT, device, sources=self._sources, calibration=calibration
        )
        tensors: Tensors = {}
        for at, recipe in recipes.items():
            tensor = made[recipe]
            assert isinstance(tensor, torch.Tensor), "it is not packed in the end"
            tensors[at] = tensor.to(dtype) if isinstance(at, Quantize) else tensor
        return tensors

    def _calibrate(self, fmt: str) -> Calibration | None:
        """The calibration of all groups that a format packs; None if it is not calibrated."""
        formats = [fmt if format_in(fmt, group, self._ladder) == fmt else PLAIN for group in self._groups]
        config = with_formats(self._config, self._by_module(formats))
        graph, device = semantic_graph(config), config.device
        made = plan_calibration(graph, self._checkpoint, config, self._cache, self._sources, self._tokenizer)

        def load_plain(recipe: Recipe) -> Any:
            return weights.load([recipe], self._checkpoint, SILENT, device)[recipe]

        if made is not None:
            made.open(load_plain, device, self._progress).close()  # here, to show its progress
        return made

    def _kept_costs(self, fmt: str) -> dict[int, float]:
        folder = self._cache.find(WEIGHTS, self._costs_key(fmt))
        return {} if folder is None else {index: cost for index, cost in json.loads((folder / COSTS).read_bytes())}

    def _costs_key(self, fmt: str) -> str:
        return key_of({**self._ingredients, "costs": fmt})

    def _keep(self, key: str, files: Mapping[str, str], what: str) -> Path:
        about = {"name": f"{what} of {self._checkpoint.location}", "ingredients": self._ingredients}
        return self._cache.publish(WEIGHTS, key, {name: text.encode() for name, text in files.items()}, about)

    def _by_module(self, formats: Sequence[str]) -> dict[str, str]:
        every = zip(formats, self._groups, strict=True)
        return {module: fmt for fmt, group in every for module in group.modules}

    def _num_bytes(self, fmt: str) -> int:
        return sum(bytes_in(format_in(fmt, group, self._ladder), group) for group in self._groups)

    def _describe(self, choice: Choice) -> str:
        counts = Counter(choice.formats)
        groups = ", ".join(f"{counts[fmt]} groups of modules in {fmt}" for fmt in self._ladder if counts[fmt])
        size = sum(map(bytes_in, choice.formats, self._groups))
        return f"{groups}: {size / 1e6:,.1f} MB, KL {choice.kl:.4f} of {self._max_kl:g} nats"

    def _as_yaml(self, choice: Choice) -> str:
        """A file of conf/quant that sets the formats, with what was measured of them."""
        prompts = f"{sum(map(len, self._prompts))} tokens of {len(self._prompts)} prompts"
        uniform = [
            f"# all in {fmt}: {self._num_bytes(fmt) / 1e6:,.1f} MB"
            + (f", KL {choice.kls[fmt]:.4f}" if fmt in choice.kls else "")
            for fmt in self._ladder
        ]
        lines = [
            f"# Formats by module of {self._checkpoint.location}, by quant=budget quant.max_kl={self._max_kl:g}.",
            f"# {self._describe(choice)}",
            *uniform,
            f"# measured on {prompts}, sha256 {digest(repr(self._prompts))[:16]}",
            "fmt: none",
            "formats:",
        ]
        for index, (fmt, group) in enumerate(zip(choice.formats, self._groups, strict=True)):
            if index in choice.costs:
                lines.append(f"  # {choice.smaller} instead of {choice.base}: {choice.costs[index]:.2e} nats")
            lines += [f"  {json.dumps(module)}: {json.dumps(fmt)}" for module in group.modules]
        return "\n".join(lines) + "\n"
