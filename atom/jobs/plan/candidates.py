"""The layouts and formats that a plan compares, each compiled once.

engine_layouts(8, num_experts=128)              # tp2, tp2_ep, dp2_ep, pp2, …, each a ParallelConfig
find_formats(config, gpu, load)                 # as stored and fp8, each with KV in 16 bits and in fp8
compile_candidate(config, parallel, target)     # the graphs of all stages, and what a run of them costs
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from atom.compiler import compile_graph, level_of, mesh_of
from atom.compiler.artifact import semantic_graph
from atom.config import Config, GPUConfig
from atom.config.check_parallel import check_parallel
from atom.config.load import load
from atom.config.resolve_quant import BUDGET
from atom.config.schema import ParallelConfig
from atom.config.spelling import override
from atom.errors import AtomError, ConfigError
from atom.graph import BODY, Graph, Mesh, State
from atom.graph.graph import copy_graph
from atom.jobs.bench.roofline import Costs, read_costs
from atom.jobs.kind import keys_of
from atom.jobs.plan.load import Load
from atom.kernels import Target

MAX_STAGES = 8  # of a pipeline: no more steps are in flight
AS_STORED = "auto"  # a file of conf/quant
AS_GIVEN = "as given"
PACKED = "fp8"  # the same, for plain weights of a GPU with a rate of it
KINDS_OF_BITS = (4, 8, 16)  # that shares were measured of


class Format(NamedTuple):
    quant: str  # a file of conf/quant, or AS_GIVEN
    kv: str  # dtype of the cache
    config: Config
    overrides: list[str]  # that choose it, and the context
    written: Graph  # the semantic graph

    def state_dtypes(self) -> dict[tuple[str, str, str], str]:
        """The dtypes of states by layer, part and kind."""
        return {(state.name, state.part, state.kind): state.type.dtype for state in self.written.states()}


@dataclass(frozen=True)
class Candidate:
    """An engine of one layout and format."""

    config: Config
    graphs: list[Graph]  # of all stages
    costs: list[Mapping[str, Costs]]  # the same

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.config)

    @property
    def is_mixture(self) -> bool:
        return any(mlp.kind == "moe" for mlp in self.config.model.mlps)

    @property
    def is_recurrent(self) -> bool:
        return any(costs.recurrent for programs in self.costs for costs in programs.values())

    @property
    def bits(self) -> int:
        """Bits of most weights that a token is multiplied with."""
        found = Counter[int]()
        for programs in self.costs:
            for matmul in (matmul for costs in programs.values() for matmul in costs.matmuls):
                bits = 8 * matmul.num_bytes / matmul.num_elements
                found[min(KINDS_OF_BITS, key=lambda kind: abs(kind - bits))] += int(matmul.num_elements * matmul.share)
        return found.most_common(1)[0][0]

    def with_kv(self, other: Format) -> Candidate:
        """The same with the cache of another format, whose text has only its scales besides, of a few bytes."""
        dtypes = other.state_dtypes()

        def convert(leaf: object) -> object:
            if not isinstance(leaf, State):
                return leaf
            return replace(leaf, type=replace(leaf.type, dtype=dtypes[leaf.name, leaf.part, leaf.kind]))

        for graph in self.graphs:
            for program in graph.programs.values():
                for node in program.nodes:
                    if any(isinstance(arg, State) for arg in node.args):
                        node.args = tuple(map(convert, node.args))
        config = replace(other.config, parallel=self.config.parallel, level=self.config.level)
        return Candidate(config, self.graphs, [read_costs(graph) for graph in self.graphs])


def engine_layouts(num_gpus: int, num_experts: int) -> Iterator[ParallelConfig]:
    """Layouts of one engine of 2, 4, … ranks, and of all GPUs: stages, data groups, and ranks of each group.

    Experts are divided by width among all ranks of a stage, or into as many parts as there are ranks or experts.

    num_experts: of a layer; 0: the model is no mixture
    """
    sizes = sorted({*(1 << power for power in range(1, num_gpus.bit_length())), num_gpus} - {1})
    for num in sizes:
        for stages in (each for each in divisors_of(num) if each <= MAX_STAGES):
            ranks = num // stages
            yield ParallelConfig(tensor=ranks, pipeline=stages)
            parts = max((each for each in divisors_of(ranks) if each <= num_experts), default=1)
            if parts > 1:
                yield ParallelConfig(tensor=ranks, experts=parts, pipeline=stages)
            for groups in divisors_of(ranks)[1:] if num_experts else ():
                yield from (ParallelConfig(ranks // groups, groups, each, stages) for each in {parts: 0, 1: 0})


def divisors_of(num: int) -> list[int]:
    return [each for each in range(1, num + 1) if num % each == 0]


def find_formats(config: Config, gpu: GPUConfig, load_: Load) -> tuple[list[Format], list[tuple[str, str]]]:
    """The formats to compare, each with its configuration, and those refused with the reasons.

    Only as given if the overrides have a format. The context is that of the load unless serve.max_model_len is given.
    """
    given, has_fp8 = {*keys_of(config.overrides)}, "fp8" in gpu.rates
    quants: Sequence[str | None] = config.job.formats or [AS_STORED, *([PACKED] if has_fp8 else [])]
    if BUDGET in quants:
        raise ConfigError("job.formats: budget is measured when an engine starts, not here; leave it out")
    if any(key == "quant" or (key.startswith("quant.") and key != "quant.kv") for key in given):
        if config.job.formats is not None:
            raise ConfigError("job.formats chooses the format of weights: leave out quant")
        quants = [None]
    kvs = [None] if {"quant.kv", "serve.kv_cache_dtype"} & given or not has_fp8 else [None, "fp8"]
    context = [] if "serve.max_model_len" in given else [override("serve.max_model_len", load_.max_len)]
    formats: list[Format] = []
    refused: dict[str, str] = {}
    for quant, kv in itertools.product(quants, kvs):
        if f"quant={quant}" in refused:  # with another cache too
            continue
        values = [f"quant={quant}"] if quant else []
        values += [f"quant.kv={kv}"] if kv else []
        values += context
        try:
            found = load_format(config, gpu, values)
            if (found.quant, found.serve) not in ((each.config.quant, each.config.serve) for each in formats):
                cache_dtype = found.serve.kv_cache_dtype.partition("_")[0]
                formats.append(Format(quant or AS_GIVEN, cache_dtype, found, values, semantic_graph(found)))
        except AtomError as error:
            if config.job.formats and str(error).startswith(f"quant={quant}: there is no such choice"):
                raise ConfigError(f"job.formats: {str(error).removeprefix('quant=')}") from None
            if quant == quants[0] and kv is None:  # without which the others say nothing
                raise
            refused[" ".join(values[: len(values) - len(context)])] = str(error)
    return formats, [*refused.items()]


def load_format(config: Config, gpu: GPUConfig, overrides: list[str]) -> Config:
    """Load the configuration with these overrides, for a GPU's text unless the device is given."""
    own = own_overrides(config)
    device = [] if "device" in keys_of(own) else [f"device={'rocm' if 'amd' in gpu.features else 'cuda'}"]
    job = ["job=explain", override("job.gpu", config.job.gpu)]
    return load([*job, *own, *device, *overrides], config_dirs=config.config_dirs)


def own_overrides(config: Config) -> list[str]:
    """The overrides without those of this job, and without what load has added."""
    return [text for text in config.overrides if not text.lstrip("+").startswith(("job=", "job.", "model.name="))]


def compile_candidate(fmt: Format, parallel: ParallelConfig, target: Target) -> Candidate:
    """Compile an engine's graphs. UnsupportedError or ConfigError if ranks cannot divide the model."""
    own = replace(fmt.config, parallel=parallel, level=min(level_of(fmt.config), 1))
    check_parallel(own, own.model, own.device)
    # passes that divide a body write a new one, unless a user's pass is ahead of them
    shared = [BODY] if parallel.num_ranks > 1 and not own.passes.extra else []
    graphs = [
        compile_graph(
            own,
            target=target,
            stage=stage,
            semantic=copy_graph(fmt.written, shared) if own.job.graph is None else None,
            verifies_each=False,
        )
        for stage in range(parallel.pipeline)
    ]
    return Candidate(own, graphs, [read_costs(graph) for graph in graphs])
