"""From a configuration to an engine: compile, load the weights, plan the memory, open the runner.

engine = open_engine(load(["checkpoint=/models/qwen3"]), SilentProgress())
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from atom import weights
from atom.cache import Cache
from atom.checkpoint import Checkpoint, Progress, stop_ids
from atom.compiler import Compiled, compile_model
from atom.compiler.artifact import level_of
from atom.config import Config, ModelConfig
from atom.config.checkpoint import open_for
from atom.gc_utils import no_collection
from atom.graph import Graph, Recipe
from atom.runtime import memory
from atom.runtime.engine import Engine
from atom.runtime.kv_cache import KVCache, num_blocks_needed, plan_memory
from atom.runtime.profiler import Profiler
from atom.runtime.runner import Runner
from atom.runtime.scheduler import Scheduler
from atom.runtime.step_builder import StepBuilder
from atom.runtime.tune import tune, use_measured
from atom.runtime.types import CacheKind


@no_collection()
def open_engine(config: Config, progress: Progress) -> Engine:
    """Everything between a configuration and an engine that waits for requests."""
    compiled = compile_with(config, progress)
    graph, kinds = compiled.graph, cache_kinds(compiled.graph)
    checkpoint = open_for(config, progress)
    try:
        tokenizer = checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
        tensors = load_weights(graph, checkpoint, config, progress)
        stops = stop_ids(checkpoint, tokenizer)
    finally:
        checkpoint.close()
    serve = config.serve
    runner, num_blocks = open_runner(compiled, tensors, config, progress)
    cache = KVCache(kinds, num_blocks, serve.block_size, enable_prefix_caching=serve.enable_prefix_caching)
    scheduler = Scheduler(cache, run_ahead=runner.run_ahead, **_limits(config))
    print(_describe_pool(kinds, num_blocks, config), file=sys.stderr)
    return Engine(
        runner,
        scheduler,
        StepBuilder(runner.capacity),
        tokenizer=tokenizer,
        stop_ids=stops,
        vocab_size=config.model.vocab,
        seed=config.seed,
        profiler=Profiler(serve.torch_profiler_dir, is_detailed=serve.profiler_more),
    )


def compile_with(config: Config, progress: Progress) -> Compiled:
    """The compiled model; what it took, and what is wrong with the cache folder, is told on stderr."""
    assert config.cache is not None, "config.load resolves it"
    cache = Cache(Path(config.cache))

    def check(graph: Graph) -> None:  # what can be refused before anything is compiled or downloaded
        weights.refuse_packed(graph)
        plan_kv(cache_kinds(graph), config, None if config.device == "cpu" else memory.left_for_kv(graph, config))

    try:
        return compile_model(config, progress, cache, check=check)
    finally:
        for line in cache.warnings:
            print(f"atom-run: {line}", file=sys.stderr)
        cache.close()


def load_weights(
    graph: Graph, checkpoint: Checkpoint, config: Config, progress: Progress
) -> dict[Recipe, weights.Loaded]:
    """The tensors of the graph's recipes, stored or random."""
    if config.load_dummy:
        return weights.load_dummy(graph.recipes(), config.seed, config.device)
    weights.check(graph, checkpoint.tensors, [*config.model.ignore, *mtp_patterns(config.model)])
    return weights.load(graph.recipes(), checkpoint, progress, config.device)


def mtp_patterns(model: ModelConfig) -> Sequence[str]:
    """The tensors of the layers that predict further tokens, which are stored behind the last one."""
    layers = range(model.layers, model.layers + model.mtp_layers)
    return [model.weights["layer"].replace("{layer}", str(layer)) + ".*" for layer in layers]


def plan_kv(kinds: Sequence[CacheKind], config: Config, left: int | None = None) -> dict[str, int]:
    """Blocks of the KV pool by cache kind. CapacityError where they hold no sequence of max_model_len.

    left: bytes that a GPU has for it; None: what serve.kv_cache_memory says
    """
    serve, limits = config.serve, _limits(config)
    room = "serve.kv_cache_memory has {has}: raise serve.kv_cache_memory to {needs}"
    if left is not None:
        room = f"serve.gpu_memory_utilization={serve.gpu_memory_utilization:g} leaves it {{has}}: raise that"
    return plan_memory(
        kinds,
        serve.block_size,
        memory_bytes=serve.kv_cache_memory if left is None else left,
        num_blocks=serve.num_kvcache_blocks,
        max_model_len=limits["max_model_len"],
        max_num_seqs=limits["max_num_seqs"],
        max_num_batched_tokens=limits["max_num_batched_tokens"],
        room=room,
    )


def open_runner(
    compiled: Compiled, tensors: Mapping[Recipe, weights.Loaded], config: Config, progress: Progress
) -> tuple[Runner, dict[str, int]]:
    """The runner and the blocks of its KV pool. On a GPU its graphs are captured, and the pool takes what is left."""
    serve, kinds, is_cpu = config.serve, cache_kinds(compiled.graph), config.device == "cpu"
    limits = _limits(config)
    with nullcontext() if is_cpu else memory.no_memory_at_start(serve):
        num_blocks = plan_kv(kinds, config) if is_cpu else {kind.name: 2 for kind in kinds}  # to rehearse with
        runner = Runner(
            compiled.graph,
            tensors,
            num_blocks,
            serve.block_size,
            compiled.code,
            device=config.device,
            max_num_seqs=limits["max_num_seqs"],
            max_model_len=limits["max_model_len"],
        )
        if is_cpu:
            return runner, num_blocks
        use_parameters(runner, compiled.graph, config, progress)
        sizes = memory.capture_sizes(serve) if level_of(config) == 3 else []
        with progress.task("compiling kernels"):
            runner.graphs.compile(sizes, serve.max_num_batched_tokens)
        num_blocks = plan_kv(kinds, config, memory.measure_left(runner, sizes[-1:], serve))
        runner.bind(num_blocks)
        with progress.task("capturing CUDA graphs"):
            # a server is ready when nothing is left to do; a run of some prompts needs but few sizes
            runner.graphs.capture(sizes, is_lazy=config.job.kind == "generate")
    return runner, num_blocks


def use_parameters(runner: Runner, graph: Graph, config: Config, progress: Progress) -> None:
    """Run with what was measured for linears on this GPU; tune=true measures what nobody has measured first."""
    assert config.cache is not None, "config.load resolves it"
    cache, limits = Path(config.cache), _limits(config)

    def tell(line: str) -> None:
        print(f"atom-run: {line}", file=sys.stderr)

    use_measured(runner.model, cache, tell)
    if config.tune:
        max_rows = min(limits["max_num_seqs"], limits["max_num_batched_tokens"])
        tune(runner.model, graph, cache, max_rows, progress, tell)


def _describe_pool(kinds: Sequence[CacheKind], num_blocks: dict[str, int], config: Config) -> str:
    serve, limits = config.serve, _limits(config)
    length, step = limits["max_model_len"], limits["max_num_batched_tokens"]
    num_tokens = (max(num_blocks.values()) - 1) * serve.block_size
    num_requests = min(
        (num_blocks[kind.name] - 1) // num_blocks_needed(kind, serve.block_size, length, min(step, length))
        for kind in kinds
    )
    return f"KV: {num_tokens} tokens, {num_requests} requests at max_model_len"


def _limits(config: Config) -> dict[str, int]:
    serve = config.serve
    assert serve.max_model_len is not None, "config.load resolves it"
    return {
        "max_model_len": serve.max_model_len,
        "max_num_seqs": serve.max_num_seqs,
        "max_num_batched_tokens": serve.max_num_batched_tokens,
    }


def cache_kinds(graph: Graph) -> list[CacheKind]:
    """What the graph's layers keep for each token, by kind."""
    found: dict[str, CacheKind] = {}
    for cache in graph.caches():
        known = found.get(cache.kind)
        size = cache.type.num_bytes + (known.bytes_per_token if known else 0)
        found[cache.kind] = CacheKind(cache.kind, size, cache.window)
    return list(found.values())
