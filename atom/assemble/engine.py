"""Open an engine: compile, load weights, connect the ranks, open runner and schedulers."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from atom.assemble.adapters import open_adapters, open_loras
from atom.assemble.checks import check_same_tokens, check_weights
from atom.assemble.classifier import read_classifier
from atom.assemble.compiling import compile_with, digest_of
from atom.assemble.format_budget import settle_formats
from atom.assemble.images import open_images
from atom.assemble.kv_blocks import kinds_of_all, state_kinds
from atom.assemble.kv_scales import gather_kv_scales, keep_kv_scales, plan_kv_scales, set_kv_scales
from atom.assemble.loading import has_own_heads, load_weights, open_checked, settle_heads
from atom.assemble.ranks import (
    RankModel,
    check_placed,
    compare_ranks,
    connect,
    describe_rank,
    place_ranks,
    start_processes,
    start_ranks,
)
from atom.assemble.reasoning import find_markers
from atom.assemble.report import report_engine, report_host_tables, report_unused
from atom.assemble.runner import open_runner
from atom.assemble.scheduling import open_caches, open_drafter, open_kv_files, open_scheduler
from atom.assemble.sleep import open_sleeper, stable_memories
from atom.assemble.weight_updates import open_updates
from atom.cache import Cache
from atom.cache.temporary import temporary_folder
from atom.checkpoint import CheckedProgress, Checkpoint, Progress, stop_ids
from atom.checkpoint.lora import read_adapter
from atom.compiler import Compiled, mesh_of, whole_graph
from atom.config import Config
from atom.config.checkpoint import is_here
from atom.graph import Graph, Recipe
from atom.kernels.stable_memory import StableMemory
from atom.measurement.phases import PhaseClock
from atom.process.gc_utils import no_collection
from atom.process.messages import say
from atom.runtime.engine import Engine
from atom.runtime.kv.scales import KVScales, ScalePlan, ScaleStore, measured_names
from atom.runtime.profiler import Profiler
from atom.runtime.ranks.driver import Driver, RanksProfiler
from atom.runtime.ranks.links import RankProcess, Ranks
from atom.runtime.ranks.remote import Placement
from atom.runtime.requests.grammar import Grammars
from atom.runtime.requests.taps import Registered
from atom.runtime.requests.vocabulary import Vocabulary
from atom.runtime.schedule.data_parallel import DataParallelBuilder
from atom.runtime.sleep import place_in
from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.runner import Runner
from atom.weights.evaluate import Loaded
from atom.weights.lora import LoraWeights
from atom.weights.packed_store import describe_file


@no_collection()
def open_engine(
    config: Config,
    progress: Progress,
    compiled: Compiled | None = None,
    *,
    replica: int = 0,
    clock: PhaseClock | None = None,
    opens_grammars: bool = False,
) -> Engine:
    """Build an engine from a configuration, or from its compiled model; of several ranks, this process drives.

    replica: its number; each draws tokens of its own if a request has no seed
    clock: the clock that has timed the phases before this one
    opens_grammars: a thread makes the compiler of grammars meanwhile; else the first request that needs it does
    """
    config, clock = settle_formats(config, progress), clock or PhaseClock()
    serve, mesh = config.serve, mesh_of(config)
    for path in (serve.lora_modules or {}).values():
        read_adapter(Path(path))  # a wrong folder is refused before anything is compiled
    with ExitStack() as started:
        placement = place_ranks(config, started)
        processes = start_processes(config, replica, started)  # which import torch meanwhile
        model = load_model(config, progress, compiled, placement or processes, started, clock, opens_grammars)
        config, graph, ranks = model.config, model.compiled.graph, model.ranks
        runner, num_blocks, stages, scales = open_runners(model, config, progress, placement, clock)
        if model.plan.tokens:
            keep_kv_scales(model.store, scales, model.scales.num_tokens)
        host = runner.host
        kinds = kinds_of_all([stage.kinds for stage in stages] or [state_kinds(graph, serve.block_size)])
        if host is not None:
            host.files = open_kv_files(host, serve, pin_memory=config.device != "cpu")
        files = None if host is None else host.files
        window = None if config.model.vision is None else config.model.vision.window
        salt = b"" if files is None else identify_kv(graph, model.stored, scales, serve.block_size, window)
        caches = open_caches(kinds, num_blocks, host, salt, serve, mesh.data)
        drafter = open_drafter(config.drafts, config.drafting is not None)
        overlap = config.stages_overlap
        images = open_images(graph, config)
        scheduler = open_scheduler(
            caches,
            runner,
            drafter,
            serve,
            has_ranks=ranks is not None,
            overlap=overlap,
            images=None if images is None else images.planner,
        )
        builders = [StepBuilder(runner.capacity, None if images is None else images.of_steps) for _ in caches]
        of_requests = None if images is None else images.of_requests
        report_engine(kinds, num_blocks, runner.model.limits, host, config, of_requests)
        driver = None if ranks is None else Driver(runner, ranks, mesh)
        traces: dict[str, Any] = {"folder": serve.torch_profiler_dir, "is_detailed": serve.profiler_more}
        sleeper = open_sleeper(runner, graph, model.tensors, config, num_blocks, *model.memories)
        engine = Engine(
            driver or runner,
            scheduler,
            builders[0] if ranks is None else DataParallelBuilder(builders),
            model.vocabulary,
            seed=config.seed + replica,
            profiler=Profiler(**traces) if driver is None else RanksProfiler(driver, **traces),
            ranks=ranks,
            files=files,
            loras=open_loras(model.adapters, stages, driver, sleeper, serve.lora_modules),
            keep=None if files is None else lambda: runner.keep(caches[0].cached_blocks(), serve.http.drain_seconds),
            sleeper=sleeper,
            grammars=model.grammars,
            classifier=read_classifier(config),
            images=of_requests,
            registered=Registered(config.passes.taps, list(config.passes.steer), config.model.layer_shape),
            weights=open_updates(
                graph,
                model.tensors,
                config,
                model.rename,
                driver,
                is_one_host=placement is None or placement.is_one_host,
            ),
        )
        clock.stop("engine")
        say(f"opened in {clock.describe()}")
        weakref.finalize(engine, started.pop_all().close)  # what the stack would end now ends with the engine
        return engine


class LoadedModel(NamedTuple):
    """A compiled model with its weights, of which a runner is opened."""

    config: Config  # with what only the weights decide
    compiled: Compiled
    ranks: Ranks | None  # the others; None: there are none
    tensors: dict[Recipe, Loaded]
    adapters: LoraWeights | None
    vocabulary: Vocabulary
    grammars: Grammars
    scales: KVScales
    store: ScaleStore
    plan: ScalePlan
    stored: list[str]  # descriptions of the weights' files
    rename: Callable[[str], str | None]  # the name that a tensor of transformers' whole model has in the checkpoint
    memories: tuple[StableMemory, StableMemory] | tuple[None, None]  # of an engine that sleeps: for weights, for KV


def load_model(
    config: Config,
    progress: Progress,
    compiled: Compiled | None,
    placed: Placement | Sequence[RankProcess],
    started: ExitStack,
    clock: PhaseClock,
    opens_grammars: bool,
) -> LoadedModel:
    """Compile the model unless it is, have the other ranks load their weights, and load this rank's.

    placed: the other ranks, as `start_ranks` takes them
    started: ends them
    opens_grammars: as in `open_engine`
    """
    with ExitStack() as opened:
        is_first = is_here(config) or config.checkpoint is None  # the embedded one is small; others are downloaded last
        checkpoint = open_checked(config, progress, opened) if is_first else None
        waited_for = CheckedProgress(progress, functools.partial(check_placed, placed))
        compiled = compiled or compile_with(config, waited_for, checkpoint)
        graph = compiled.graph
        if checkpoint is None:
            checkpoint = open_checked(config, progress, opened)
            config, previous = settle_heads(config, checkpoint), config
            if has_own_heads(config) != has_own_heads(previous):  # by weights that were not here before
                compiled = compile_with(config, waited_for, checkpoint)
                graph = compiled.graph
            check_weights(graph, checkpoint, config)
        report_unused(checkpoint.generation_config, config)
        clock.stop("model")
        ranks = start_ranks(config, compiled, placed, started)
        progress = progress if ranks is None else CheckedProgress(progress, ranks.check)
        tokenizer = checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
        check_same_tokens(tokenizer, checkpoint, config)
        find_reasoning = functools.cache(functools.partial(find_markers, config, tokenizer))
        vocabulary = Vocabulary(config.model.vocab, stop_ids(checkpoint, tokenizer), tokenizer, find_reasoning)
        grammars = Grammars(vocabulary)
        if opens_grammars:
            grammars.open_early()
        clock.stop("tokenizer")
        memory, _ = memories = stable_memories(config)
        place = None if memory is None else functools.partial(place_in, memory)
        tensors = load_weights(graph, checkpoint, config, progress, place=place, tokenizer=tokenizer)
        report_host_tables(graph)
        adapters = open_adapters(graph, tensors, config.serve, mesh_of(config))
        clock.stop("weights")
        scales, cache = KVScales(graph, tensors), Cache(config.cache_folder)
        store = ScaleStore(measured_names(whole_graph(graph, config)), checkpoint, cache)
        plan = plan_kv_scales(store, vocabulary, is_random=config.load_dummy)
        stored = describe_weights(config, checkpoint)
    return LoadedModel(
        config,
        compiled,
        ranks,
        tensors,
        adapters,
        vocabulary,
        grammars,
        scales,
        store,
        plan,
        stored,
        checkpoint.name_of,
        memories,
    )


def describe_weights(config: Config, checkpoint: Checkpoint) -> list[str]:
    """What KV in files depends on: the files of the weights and of steering vectors."""
    if config.load_dummy:
        return [f"seed {config.seed}"]
    vectors = (Path(path).expanduser() for path in (config.passes.steer or {}).values())
    return [*map(describe_file, checkpoint.files()), *map(describe_file, vectors)]


def open_runners(
    model: LoadedModel, config: Config, progress: Progress, placement: Placement | None, clock: PhaseClock
) -> tuple[Runner, dict[str, int], list[RankModel], dict[str, float]]:
    """Open this rank's runner, while the others open theirs.

    Gives also the KV blocks, the models of the stages if there are other ranks, and the scales of an fp8 cache.
    """
    compiled, ranks, tensors, scales, mesh = model.compiled, model.ranks, model.tensors, model.scales, mesh_of(config)
    if ranks is None:
        measure = set_kv_scales(scales, model.plan, mesh)
        _, kv_memory = model.memories
        runner, num_blocks = open_runner(compiled, tensors, config, progress, measure, clock=clock, kv_memory=kv_memory)
        return runner, num_blocks, [], scales.values()
    progress = CheckedProgress(progress, ranks.check)
    with temporary_folder() as folder:
        described = describe_rank(compiled.graph, tensors, model.adapters, config.serve.block_size)
        stages = compare_ranks(ranks.exchange(described), mesh)
        ranks.exchange(msgspec.msgpack.encode(model.plan))
        communicator = connect(ranks, config, placement, folder)
        measure = set_kv_scales(scales, model.plan, mesh, communicator)
        clock.stop("ranks")
        kinds_of = [stage.kinds for stage in stages]
        runner, num_blocks = open_runner(
            compiled, tensors, config, progress, measure, communicator, kinds_of, ranks.exchange, clock
        )
        values = gather_kv_scales(scales, ranks.exchange)
        ranks.wait()
    return runner, num_blocks, stages, values


def identify_kv(
    graph: Graph, stored: Sequence[str], scales: Mapping[str, float], block_size: int, window: int | None = None
) -> bytes:
    """A digest of all that KV depends on besides tokens: the text, which has dtypes and layouts, and the weights.

    stored: descriptions of the weights' files
    window: of the tower, which is in its inputs and not in its text; None: it has none
    """
    states = [f"{state.name} {state.kind} {state.type}" for state in graph.states()]
    parts = [digest_of(graph), *stored, *states, f"{block_size} {sorted(scales.items())}"]
    parts += [] if window is None else [f"window {window}"]
    return hashlib.sha256("\n".join(parts).encode()).digest()
