"""Build an engine from a configuration: compile, load weights, plan memory, open the runner.

engine = open_engine(load(["checkpoint=/models/qwen3"]), SilentProgress())
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch
from torch import Tensor

from atom import weights
from atom.cache import Cache, digest
from atom.checkpoint import DRAFT_PREFIX, SILENT, Checkpoint, JoinedCheckpoint, Progress, Tokenizer, stop_ids
from atom.compiler import Compiled, compile_graph, compile_model, has_draft, mesh_of, semantic_graph
from atom.config import Config, ModelConfig, QuantConfig
from atom.config.checkpoint import is_here, open_with_draft
from atom.config.parallel import devices_of
from atom.errors import ArtifactError, CheckpointError, ConfigError, RequestError, UnsupportedError
from atom.frontend import build
from atom.gc_utils import no_collection
from atom.graph import HEAD, Graph, Mesh, Quantize, Recipe, W, ops, show
from atom.graph.recipes import leaves, packed_to
from atom.kernels import Communicator, Rendezvous, Target, connect_rank, find_tuner
from atom.kernels.stable_memory import StableMemory
from atom.measurement.phases import PhaseClock
from atom.passes.context import PassContext
from atom.passes.lower_moe import lower_moe
from atom.passes.quantize import leaves_act
from atom.pieces import sources_of
from atom.runtime import memory
from atom.runtime.data_parallel import DataParallelBuilder, DataParallelScheduler
from atom.runtime.draft_table import DraftTable
from atom.runtime.driver import Driver, RanksProfiler
from atom.runtime.engine import Engine
from atom.runtime.host_blocks import HostBlocks, plan_host_blocks
from atom.runtime.host_blocks import measure as measure_swap
from atom.runtime.kv_cache import KVCache
from atom.runtime.kv_files import KVFiles
from atom.runtime.kv_plan import num_blocks_needed, plan_memory
from atom.runtime.kv_scales import PROMPT, KVScales, ScalePlan, ScaleStore, measured_names
from atom.runtime.loras import Loras
from atom.runtime.model import Model
from atom.runtime.profiler import Profiler
from atom.runtime.program import Bindings
from atom.runtime.ranks import LOOPBACK, RANK, RANK_ON_GPU, Channel, RankProcess, Ranks
from atom.runtime.ray_ranks import place_with_ray
from atom.runtime.remote_ranks import Placement, RemoteRank, await_ranks, without_secrets
from atom.runtime.runner import Runner
from atom.runtime.scheduler import Scheduler
from atom.runtime.sleep import CPUSleeper, GPUSleeper, Sleeper, place_in
from atom.runtime.speculation import Drafter, NgramDrafter, RunnerDrafter, acceptance_rates
from atom.runtime.step_builder import StepBuilder
from atom.runtime.step_input import NUM_REPORTED
from atom.runtime.tune import Exchange, alone, tune, tune_drafts, use_measured, use_measured_drafts
from atom.runtime.types import CacheKind, Drafting, StepLimits
from atom.runtime.vocabulary import Vocabulary
from atom.weights.calibration import MAX_TOKENS, Calibration, read_built_in_text
from atom.weights.evaluate import Loaded, Place
from atom.weights.lora import LoraWeights, Sizes
from atom.weights.packed_store import describe_file
from atom.weights.quantize import is_calibrated

VERIFIED_TOKENS = {"cpu": 8, "cuda": 128}  # serve.max_verified_tokens where nothing is said or measured
TIMED_TOKENS = {"cpu": 64, "cuda": 2048}  # of the prompt whose time is compared with that of loading its KV
WEIGHT_SOURCES = ("dtypes.py", "checkpoint", "graph", "kernels/cpp", "weights")  # what makes tensors of files
SAMPLED = 1024  # elements of a weight, by which hosts compare theirs


@no_collection()
def open_engine(
    config: Config,
    progress: Progress,
    compiled: Compiled | None = None,
    *,
    replica: int = 0,
    clock: PhaseClock | None = None,
) -> Engine:
    """Build an engine from a configuration, or from its compiled model; of several ranks, this process drives.

    replica: its number; each draws tokens of its own where a request has no seed. clock: has the phases before this one
    """
    clock = clock or PhaseClock()
    with ExitStack() as started:
        placement = place_ranks(config, started)
        processes = start_processes(config, replica, started)  # which import torch meanwhile
        with ExitStack() as opened:
            checkpoint = open_checked(config, progress, opened) if is_here(config) else None  # else downloaded last
            compiled = compiled or compile_with(config, progress, checkpoint)
            graph = compiled.graph
            if checkpoint is None:
                checkpoint = open_checked(config, progress, opened)
                check_weights(graph, checkpoint, config)
            clock.stop("model")
            ranks = start_ranks(config, compiled, placement or processes, started)
            tokenizer = checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
            check_same_tokens(tokenizer, checkpoint, config)
            clock.stop("tokenizer")
            memory, kv_memory = stable_memories(config)
            place = None if memory is None else functools.partial(place_in, memory)
            tensors = load_weights(graph, checkpoint, config, progress, place=place, tokenizer=tokenizer)
            adapters = open_adapters(graph, tensors, config)
            clock.stop("weights")
            vocabulary = Vocabulary(config.model.vocab, stop_ids(checkpoint, tokenizer), tokenizer)
            assert config.cache is not None, "config.load resolves it"
            scales = KVScales(graph, tensors)
            store = ScaleStore(measured_names(whole_graph(graph, config)), checkpoint, Cache(Path(config.cache)))
            plan = plan_kv_scales(store, vocabulary, config)
            stored = [f"seed {config.seed}"] if config.load_dummy else list(map(describe_file, checkpoint.files()))
        serve, mesh, stages = config.serve, mesh_of(config), list[RankModel]()
        if ranks is None:
            kinds = cache_kinds(graph)
            measure = set_kv_scales(scales, plan, mesh)
            runner, num_blocks = open_runner(
                compiled, tensors, config, progress, measure, clock=clock, kv_memory=kv_memory
            )
            values = scales.values()
        else:
            with TemporaryDirectory(prefix="atom-run-") as folder:
                stages = compare_ranks(ranks.exchange(describe_rank(graph, tensors, adapters)), mesh)
                kinds = kinds_of_all(kinds_of := [stage.kinds for stage in stages])
                ranks.exchange(msgspec.msgpack.encode(plan))
                communicator = connect(ranks, config, placement, folder)
                measure = set_kv_scales(scales, plan, mesh, communicator)
                clock.stop("ranks")
                runner, num_blocks = open_runner(
                    compiled, tensors, config, progress, measure, communicator, kinds_of, ranks.exchange, clock
                )
                values = gather_kv_scales(scales, ranks.exchange)
                ranks.wait()
            ranks.limit_silence(serve.http.heartbeat_seconds)
        if plan.tokens:
            keep_kv_scales(store, values, scales.num_tokens)
        caching = serve.enable_prefix_caching
        host = runner.host
        if host is not None and serve.kv_cache_dir is not None:
            kept_in, sizes = Path(serve.kv_cache_dir).expanduser(), host.num_bytes
            host.files = KVFiles(kept_in, serve.kv_cache_dir_bytes, sizes, pin_memory=config.device != "cpu")
        files = None if host is None else host.files
        salt = b"" if files is None else identify_kv(graph, stored, values, serve.block_size)
        caches = [
            KVCache(
                kinds,
                num_blocks,
                serve.block_size,
                enable_prefix_caching=caching,
                salt=salt,
                num_host_blocks=None if host is None else host.num_blocks,
                costs=None if host is None else host.costs,
                files=files,
            )
            for _ in mesh.leaders
        ]
        drafter = open_drafter(config)
        num_stages = 1 + runner.run_ahead if stages_overlap(config) else 1
        schedulers = [
            Scheduler(
                cache,
                runner.model.limits,
                runner.run_ahead,
                drafter,
                num_stages,
                delay_factor=serve.scheduler_delay_factor,
            )
            for cache in caches
        ]
        builders = [StepBuilder(runner.capacity) for _ in mesh.leaders]
        print(f"atom-run: {_describe_pool(kinds, num_blocks, config)}", file=sys.stderr)
        if host is not None:
            print(f"atom-run: {_describe_host(host, serve.block_size)}", file=sys.stderr)
        if "vision_config" in config.hf:
            print(f"atom-run: {config.checkpoint} also reads images; here its text model runs alone", file=sys.stderr)
        if text := _describe_sampling(config):
            print(f"atom-run: {text}", file=sys.stderr)
        driver = None if ranks is None else Driver(runner, ranks, mesh)
        traces: dict[str, Any] = {"folder": serve.torch_profiler_dir, "is_detailed": serve.profiler_more}
        engine = Engine(
            driver or runner,
            schedulers[0] if ranks is None else DataParallelScheduler(schedulers),
            builders[0] if ranks is None else DataParallelBuilder(builders),
            vocabulary,
            seed=config.seed + replica,
            profiler=Profiler(**traces) if driver is None else RanksProfiler(driver, **traces),
            ranks=ranks,
            files=files,
            loras=open_loras(adapters, stages, driver, config),
            keep=None if files is None else lambda: runner.keep(caches[0].cached_blocks(), serve.http.drain_seconds),
            sleeper=open_sleeper(runner, graph, tensors, config, num_blocks, memory, kv_memory),
        )
        clock.stop("engine")
        print(f"atom-run: opened in {clock.describe()}", file=sys.stderr)
        weakref.finalize(engine, started.pop_all().close)  # what the stack would end now ends with the engine
        return engine


def stable_memories(config: Config) -> tuple[StableMemory, StableMemory] | tuple[None, None]:
    """Memory for the weights and for KV of a GPU that an engine which sleeps can give up."""
    if not config.serve.enable_sleep_mode or config.device == "cpu":
        return None, None
    _, total = torch.cuda.mem_get_info()
    return StableMemory(total), StableMemory(total)


def open_sleeper(
    runner: Runner,
    graph: Graph,
    tensors: dict[Recipe, Loaded],
    config: Config,
    num_blocks: Mapping[str, int],
    memory: StableMemory | None,
    kv_memory: StableMemory | None,
) -> Sleeper | None:
    """What puts an engine to sleep, where serve.enable_sleep_mode is set. memory, kv_memory: of a GPU"""
    if not config.serve.enable_sleep_mode:
        return None

    def load(place: Place | None) -> dict[Recipe, Loaded]:
        with ExitStack() as opened:
            checkpoint = open_checked(config, SILENT, opened)
            check_weights(graph, checkpoint, config)
            return load_weights(graph, checkpoint, config, SILENT, place=place)

    if memory is None or kv_memory is None:
        return CPUSleeper(runner, load, tensors, num_blocks)
    return GPUSleeper(runner, load, tensors, memory, kv_memory)


def open_adapters(graph: Graph, tensors: Mapping[Recipe, Loaded], config: Config, rank: int = 0) -> LoraWeights | None:
    """A rank's room for adapters; None where the model is served without any."""
    serve, mesh = config.serve, mesh_of(config)
    if not serve.enable_lora:
        return None
    coordinates = mesh.coordinates(rank) if mesh.num_ranks > 1 else None
    return LoraWeights(graph, tensors, serve.max_loras, serve.max_lora_rank, coordinates)


def open_loras(
    adapters: LoraWeights | None, stages: Sequence[RankModel], driver: Driver | None, config: Config
) -> Loras | None:
    """Load the adapters of serve.lora_modules; None where the model is served without any. stages: of a pipeline"""
    if adapters is None:
        return None
    for stage in stages:
        adapters.modules.update(stage.modules)
    loras = Loras(adapters, None if driver is None else driver.load_adapter)
    for name, path in config.serve.lora_modules.items():
        loras.load(name, loras.read(path))
    return loras


class RankOpening(msgspec.Struct):
    """What a rank is started with."""

    config: Config  # its level is that of the text
    rank: int
    num_threads: int | None  # None: as many as torch takes by itself
    text: str  # digest of the lowered text of its stage
    host: str  # the rank's address for the others


def place_ranks(config: Config, started: ExitStack) -> Placement | None:
    """Wait for ranks that others start, or have Ray start them; None where this process does. The stack ends them."""
    parallel, num_ranks = config.parallel, mesh_of(config).num_ranks
    if parallel.launcher == "local":
        return None
    if parallel.launcher == "ray":
        placement = place_with_ray(parallel, num_ranks, on_gpus=config.device != "cpu")
    else:
        placement = await_ranks(parallel, num_ranks)
    started.callback(placement.close)
    return placement


def start_processes(config: Config, replica: int, started: ExitStack) -> list[RankProcess]:
    """Start the processes of the other ranks beside this one, unless others do. The stack ends them."""
    if config.parallel.launcher != "local":
        return []
    processes = []
    for rank in range(1, mesh_of(config).num_ranks):
        on_gpu = (RANK_ON_GPU, devices_of(config.parallel, replica)[rank])
        processes.append(RankProcess(RANK) if config.device == "cpu" else RankProcess(*on_gpu))
        started.callback(processes[-1].close)
    return processes


def start_ranks(
    config: Config, compiled: Compiled, placed: Placement | Sequence[RankProcess], started: ExitStack
) -> Ranks | None:
    """Have the other ranks of an engine load their weights; None for one rank. The stack ends them.

    placed: those that others start, or their processes
    """
    mesh = mesh_of(config)
    if mesh.num_ranks == 1:
        return None
    lowered = replace(config, level=compiled.level)
    others = (compile_graph(lowered, stage=stage) for stage in range(1, mesh.pipeline))
    texts, before = [*map(digest_of, (compiled.graph, *others))], torch.get_num_threads()
    num_threads: int | None = max(before // mesh.num_ranks, 1)  # they share the cores
    channels: Sequence[Channel]
    if isinstance(placed, Placement):
        num_threads, channels = placed.num_threads, (joined := placed.join())
        places = [(config_of(each, rank, config), each.host) for rank, each in enumerate(joined, 1)]
    else:
        channels = placed
        places = [(config, LOOPBACK)] * len(channels)
    openings = [
        RankOpening(replace(own, level=compiled.level), rank, num_threads, texts[mesh.stage(rank)], host)
        for rank, (own, host) in enumerate(places, 1)
    ]
    ranks = Ranks(channels, list(map(msgspec.msgpack.encode, openings)))
    started.callback(ranks.close)
    if num_threads is not None:
        ranks.at_close.append(functools.partial(torch.set_num_threads, before))
        torch.set_num_threads(num_threads)
    return ranks


def config_of(channel: RemoteRank, rank: int, config: Config) -> Config:
    """The configuration of a rank that others have started: the driver's, with the folders of its own host.

    ConfigError where its command line says anything else, which the rank is told too.
    """
    config = without_secrets(config)
    if not channel.hello:
        return config
    own = msgspec.msgpack.decode(channel.hello, type=Config)
    ours = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config)  # as it comes back from there
    ours = replace(ours, cache=own.cache, checkpoint=own.checkpoint)
    names = ("address", "key_file", "host", "torchrun", "visible_devices")
    of_host = {name: getattr(own.parallel, name) for name in names}
    ours = replace(ours, parallel=replace(ours.parallel, **of_host))
    for each in fields(Config):
        if getattr(own, each.name) != getattr(ours, each.name):
            reason = f"its command line differs in {each.name}; give all ranks the same one"
            channel.refuse(reason)
            raise ConfigError(f"rank {rank}: {reason}")
    return ours


def digest_of(graph: Graph) -> str:
    """The digest of a text without its comments, which an artifact does not keep."""
    return digest("\n".join(line.partition("    # ")[0] for line in show(graph).splitlines()))


class RankModel(msgspec.Struct):
    """What a rank tells all others of its model."""

    weights: bytes  # a digest of samples
    kinds: list[CacheKind]  # of its layers
    modules: dict[str, Sizes]  # of its layers that may have adapters


def describe_rank(graph: Graph, tensors: Mapping[Recipe, Loaded], adapters: LoraWeights | None) -> bytes:
    """What all ranks exchange once their weights are loaded, for `compare_ranks`."""
    modules = {} if adapters is None else adapters.modules
    return msgspec.msgpack.encode(RankModel(sample_weights(tensors), cache_kinds(graph), modules))


def compare_ranks(described: Sequence[bytes], mesh: Mesh) -> list[RankModel]:
    """Check that the ranks of a stage have the same weights; the model of each stage."""
    models = msgspec.msgpack.Decoder(RankModel)
    ranks = [models.decode(each) for each in described]
    firsts = range(0, mesh.num_ranks, mesh.ranks_per_stage)
    for first in firsts:
        check_same_weights([rank.weights for rank in ranks[first : first + mesh.ranks_per_stage]], first)
    return [ranks[first] for first in firsts]


def sample_weights(tensors: Mapping[Recipe, Loaded]) -> bytes:
    """A digest of the beginnings of the weights that all ranks have whole: norms, routers, often the embedding."""
    sampled = hashlib.sha256()
    whole = {each.name: tensor for each, tensor in tensors.items() if isinstance(each, W) and torch.is_tensor(tensor)}
    for name in sorted(whole):
        sampled.update(whole[name].flatten()[:SAMPLED].cpu().view(torch.uint8).numpy().tobytes())
    return sampled.digest()


def check_same_weights(samples: Sequence[bytes], first: int = 0) -> None:
    """Raise CheckpointError where a rank, on a host of its own, has other weights than the first of its stage."""
    others = ", ".join(str(rank) for rank, sample in enumerate(samples, first) if sample != samples[0])
    if others:
        raise CheckpointError(f"rank {others} has other weights than rank {first}: each host needs the same files")


def connect(ranks: Ranks, config: Config, placement: Placement | None, folder: str) -> Communicator:
    """Connect all ranks, once their weights are loaded, and have them open their runners.

    folder: a private one, for memory that ranks on one host share
    """
    mesh, is_one_host = mesh_of(config), placement is None or placement.is_one_host
    ranks.tell([folder.encode() if is_one_host else b""] * (mesh.num_ranks - 1))
    host = LOOPBACK if placement is None else placement.host
    shared = Path(folder) if is_one_host else None
    rendezvous = Rendezvous(0, mesh, host, ranks.exchange, shared, config.parallel.collectives)
    communicator = connect_rank(config.device, rendezvous)
    communicator.watch(ranks.check)
    ranks.watch(lambda _: communicator.abort())
    ranks.at_close.append(communicator.abort)
    return communicator


def open_checked(config: Config, progress: Progress, opened: ExitStack) -> Checkpoint:
    """Open the checkpoint and check its header against the configuration; the stack closes it."""
    checkpoint = open_with_draft(config, progress)
    opened.callback(checkpoint.close)
    if not config.load_dummy:
        weights.check_counts(config.model, checkpoint.tensors)
        if isinstance(checkpoint, JoinedCheckpoint) and config.draft and not config.draft.eagle3:
            weights.check_counts(config.draft, checkpoint.other.tensors)
    stop_ids(checkpoint, None)
    return checkpoint


def compile_with(config: Config, progress: Progress, checkpoint: Checkpoint | None = None, stage: int = 0) -> Compiled:
    """Compile the model, or a stage of its pipeline, and report the time and the cache's warnings on stderr.

    A checkpoint on this disk is checked against the configuration first.
    """
    assert config.cache is not None, "config.load resolves it"
    cache, opened = Cache(Path(config.cache)), ExitStack()

    def check(graph: Graph) -> None:  # refuse what cannot run before anything is compiled or downloaded
        weights.refuse_packed(graph)
        refuse_act(graph, config)
        plan_kv(cache_kinds(graph), config, None if config.device == "cpu" else memory.left_for_kv(graph, config))
        if checkpoint is not None:
            check_weights(graph, checkpoint, config)

    try:
        if checkpoint is None and is_here(config):
            checkpoint = open_checked(config, progress, opened)
        compiled = compile_model(config, progress, cache, check=check, stage=stage)
        for line in left_plain(compiled.graph, config):
            print(f"atom-run: quant.act={config.quant.act}: {line}", file=sys.stderr)
        return compiled
    finally:
        opened.close()
        for line in cache.warnings:
            print(f"atom-run: {line}", file=sys.stderr)
        cache.close()


def refuse_act(graph: Graph, config: Config) -> None:
    """Raise UnsupportedError where no kernel multiplies activations in the format that quant.act asks for."""
    for node in (node for program in graph.programs.values() for node in program.nodes):
        if "act" in node.kwargs and node.meta.get("kernel") == "reference" and config.level != 0:
            reasons = "; ".join(node.meta["notes"])
            raise UnsupportedError(f"quant.act={config.quant.act}: {reasons}; leave quant.act out")


def left_plain(graph: Graph, config: Config) -> list[str]:
    """What quant.act asks for and experts do not get, in words: their kernels multiply fp8 in blocks of 128 x 128."""
    nodes = (node for program in graph.programs.values() for node in program.nodes)
    return [*dict.fromkeys(filter(None, map(leaves_act, nodes)))] if config.quant.asks_act else []


def check_weights(graph: Graph, checkpoint: Checkpoint, config: Config) -> None:
    """Check the checkpoint's tensors against the graph, unless weights are random."""
    if not config.load_dummy:
        graph = whole_graph(graph, config)
        weights.check(graph, checkpoint.tensors, left_out(config))
        weights.check_order(graph, checkpoint)


def whole_graph(graph: Graph, config: Config) -> Graph:
    """A graph with all weights and caches of the model: that of a stage is of some layers."""
    return graph if mesh_of(config).pipeline == 1 else semantic_graph(config)


def load_weights(
    graph: Graph,
    checkpoint: Checkpoint,
    config: Config,
    progress: Progress,
    rank: int = 0,
    place: Place | None = None,
    tokenizer: Tokenizer | None = None,
) -> dict[Recipe, Loaded]:
    """Load a rank's tensors of the graph's recipes, stored or random.

    place: as `weights.load` has it. tokenizer: the checkpoint's, if it is open already
    """
    mesh = mesh_of(config)
    coordinates = mesh.coordinates(rank) if mesh.num_ranks > 1 else None
    if config.load_dummy:
        return weights.load_dummy(graph.recipes(), config.seed, config.device, coordinates, place)
    assert config.cache is not None, "config.load resolves it"
    cache = Cache(Path(config.cache))
    sources = sources_of(*WEIGHT_SOURCES)
    calibration = plan_calibration(graph, checkpoint, config, cache, sources, tokenizer)
    tensors = weights.load(
        graph.recipes(),
        checkpoint,
        progress,
        config.device,
        cache,
        coordinates,
        place,
        sources=sources,
        calibration=calibration,
    )
    for line in cache.warnings:
        print(f"atom-run: {line}", file=sys.stderr)
    check_kv_scales(tensors, config)
    check_draft_tokens(tensors, config)
    return tensors


def plan_calibration(
    graph: Graph,
    checkpoint: Checkpoint,
    config: Config,
    cache: Cache,
    sources: str,
    tokenizer: Tokenizer | None = None,
) -> Calibration | None:
    """Plan the calibration of weights that are packed while they load; None: there are none that it rounds."""
    formats = [fmt for fmt in formats_made(graph) if is_calibrated(fmt, config.quant.calibration)]
    if not formats:
        return None
    text, tokens = read_calibration_text(config), list[int]()
    try:
        tokenizer = tokenizer or checkpoint.tokenizer(trust_remote_code=config.trust_remote_code)
        why = "no tokenizer to calibrate with"
        if tokenizer is not None:
            tokens = Vocabulary(config.model.vocab, frozenset(), tokenizer).tokenize(text)[:MAX_TOKENS]
    except RequestError as error:
        why = f"a tokenizer that cannot be used: {error}"
    if not tokens:
        if config.quant.calibration != "auto":
            raise ConfigError(f"quant.calibration={config.quant.calibration}: the checkpoint has {why}; leave it out")
        print(f"atom-run: {formats[0]}: the checkpoint has {why}; weights are rounded to the nearest", file=sys.stderr)
        return None
    rounded = {
        leaf.name: recipe.fmt
        for recipe in semantic_graph(config).recipes()
        if isinstance(recipe, Quantize) and recipe.fmt in formats
        for leaf in leaves(recipe.part)
    }
    return Calibration(plain_graph(config), rounded, tokens, checkpoint, cache, sources)


def formats_made(graph: Graph) -> dict[str, None]:
    """The formats that weights are packed to while they load."""
    return dict.fromkeys(fmt for recipe in graph.recipes() for fmt in packed_to(recipe))


def plain_graph(config: Config) -> Graph:
    """The model with plain weights, as the reference bodies run it; the head is left out where it is not packed."""
    dtype = "fp32" if config.device == "cpu" else config.dtype  # which a CPU multiplies faster
    graph = build(config.model, dtype, dtype, QuantConfig(fmt="none"))
    if config.quant.head == "plain":
        del graph.programs[HEAD]
    return lower_moe(graph, PassContext.of(Target("cpu"), level=0))


def read_calibration_text(config: Config) -> str:
    """The text that quant.calibration names. ConfigError where it cannot be read."""
    path = config.quant.calibration
    if path in ("auto", "prompt"):
        return PROMPT + "\n" + read_built_in_text()
    try:
        text = Path(path).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"quant.calibration={path}: {error}; set it to a text file, auto, prompt or none") from None
    if not text.strip():
        raise ConfigError(f"quant.calibration={path}: the file is empty")
    return text


def plan_kv_scales(store: ScaleStore, vocabulary: Vocabulary, config: Config) -> ScalePlan:
    """Plan where the scales of an fp8 cache come from that the checkpoint does not have."""
    if not store.names:
        return ScalePlan()
    if not config.load_dummy and (kept := store.read()):
        return ScalePlan(kept)
    try:
        prompt = [] if config.load_dummy or vocabulary.tokenizer is None else vocabulary.tokenize(PROMPT)
        why = "weights are random" if config.load_dummy else "the checkpoint has none, and no tokenizer to measure them"
    except RequestError as error:
        prompt, why = [], f"the checkpoint has none, and its tokenizer cannot be used to measure them: {error}"
    if not prompt:
        print(f"atom-run: kv scales: {why}; 1.0 is used", file=sys.stderr)
    return ScalePlan(tokens=prompt)


def set_kv_scales(
    scales: KVScales, plan: ScalePlan, mesh: Mesh, communicator: Communicator | None = None
) -> Callable[[Model], object] | None:
    """Set the scales as planned; what measures them on a model, at the same time on all ranks, if they are to be."""
    if plan.values:
        scales.use(plan.values)
    if not plan.tokens:
        return None

    def largest(x: Tensor) -> Tensor:
        for axis in ops.MEETING_AXES:
            if communicator is not None and mesh.size(axis) > 1:
                x = communicator.all_gather(x, axis=axis, size=mesh.size(axis)).max().view(1, 1)
        return x

    return lambda model: scales.measure(model, plan.tokens, largest)


def gather_kv_scales(scales: KVScales, exchange: Callable[[bytes], list[bytes]]) -> dict[str, float]:
    """The scales of all stages, each of which has those of its layers; all ranks call this at the same time."""
    every = exchange(msgspec.msgpack.encode(scales.values()))
    return {name: value for own in every for name, value in msgspec.msgpack.decode(own, type=dict[str, float]).items()}


def identify_kv(graph: Graph, stored: Sequence[str], scales: Mapping[str, float], block_size: int) -> bytes:
    """A digest of all that KV depends on beside tokens: the text, which has dtypes and layouts, and the weights.

    stored: descriptions of the weights' files
    """
    caches = [f"{cache.name} {cache.kind} {cache.type}" for cache in graph.caches()]
    parts = [digest_of(graph), *stored, *caches, f"{block_size} {sorted(scales.items())}"]
    return hashlib.sha256("\n".join(parts).encode()).digest()


def keep_kv_scales(store: ScaleStore, values: Mapping[str, float], num_tokens: int) -> None:
    """Keep scales that were measured over so many tokens for the next start."""
    try:
        store.write(values)
    except ArtifactError as error:
        store.cache.warnings.append(f"the next start measures them again: {error}")
    what = f"kv scales: the checkpoint has none, measured over {num_tokens} tokens"
    for line in (*store.cache.warnings, what):
        print(f"atom-run: {line}", file=sys.stderr)
    store.cache.close()


def check_kv_scales(tensors: Mapping[Recipe, Loaded], config: Config) -> None:
    """Check that scales of keys and values are numbers above 0."""
    scales = {
        prefix + model.weights[role].replace("{layer}", str(layer))
        for prefix, model in models_of(config).items()
        for role in ("k_scale", "v_scale")
        if role in model.weights
        for layer in range(model.layers + model.mtp_layers)
    }
    for recipe, tensor in tensors.items():
        if isinstance(recipe, W) and recipe.name in scales:
            assert isinstance(tensor, Tensor), "only experts are lists"
            if not 0 < (value := tensor.item()) < math.inf:
                raise CheckpointError(f"tensor {recipe.name} is {value:g}; a scale is a number above 0")


def check_draft_tokens(tensors: Mapping[Recipe, Loaded], config: Config) -> None:
    """Check that a draft of EAGLE-3 maps its tokens to the model's."""
    stored = {recipe.name: tensor for recipe, tensor in tensors.items() if isinstance(recipe, W)}
    name = "" if config.draft is None else DRAFT_PREFIX + config.draft.weights.get("d2t", "")
    if (offsets := stored.get(name)) is None:
        return
    assert isinstance(offsets, Tensor), "only experts are lists"
    tokens = offsets + torch.arange(len(offsets), device=offsets.device)
    if not ((tokens >= 0) & (tokens < config.model.vocab)).all():
        raise CheckpointError(
            f"tensor {name} maps to tokens that the model does not have, of {config.model.vocab}; "
            "set serve.draft_model to a draft for this model"
        )


def check_same_tokens(tokenizer: Tokenizer | None, checkpoint: Checkpoint, config: Config) -> None:
    """Check that a whole model that drafts has the same tokens, where both checkpoints have a tokenizer."""
    if tokenizer is None or not isinstance(checkpoint, JoinedCheckpoint) or config.serve.method != "draft":
        return
    other = checkpoint.other.tokenizer(trust_remote_code=config.trust_remote_code)
    if other is not None and (differing := tokenizer.find_difference(other)) is not None:
        raise ConfigError(
            f"serve.draft_model={config.serve.draft_model} has another vocabulary: token {differing} is not "
            "the model's; take a smaller model of the same family"
        )


def models_of(config: Config) -> dict[str, ModelConfig]:
    """The model, and the one that drafts for it, by what is put before the names of their tensors."""
    return {"": config.model, **({} if config.draft is None else {DRAFT_PREFIX: config.draft})}


def left_out(config: Config) -> list[str]:
    """The patterns of stored tensors that nothing reads."""
    ignored = [prefix + pattern for prefix, model in models_of(config).items() for pattern in model.ignore]
    return [*ignored, *mtp_patterns(config)]


def mtp_patterns(config: Config) -> Sequence[str]:
    """The patterns of tensors of multi-token prediction layers, stored after the last layer, that are left out.

    Of the first layer, where it drafts tokens, these are its embedding and head, which equal the model's own.
    """
    found: list[str] = []
    for prefix, model in models_of(config).items():
        layers = range(model.layers, model.layers + model.mtp_layers)
        num_used = int(model is config.model and config.serve.method == "mtp")
        roles = [(role, layer) for layer in layers[:num_used] for role in ("mtp_embedding", "mtp_head")]
        roles += [("layer", layer) for layer in layers[num_used:]]
        found += [f"{prefix}{model.weights[role].replace('{layer}', str(layer))}.*" for role, layer in roles]
    return found


def open_drafter(config: Config) -> Drafter | None:
    """What drafts tokens by serve.method."""
    serve = config.serve
    if serve.method is None:
        return None
    assert serve.num_speculative_tokens is not None, "config.load resolves it"
    if drafting_of(config) is not None:
        return RunnerDrafter(serve.num_speculative_tokens)
    return NgramDrafter(serve.num_speculative_tokens, serve.prompt_lookup_min, serve.prompt_lookup_max)


def drafting_of(config: Config) -> Drafting | None:
    """How the runner drafts; None where the host does: a CPU's waits for each step, and looks up what it has."""
    serve = config.serve
    is_host = serve.method == "ngram" and config.device == "cpu" and serve.acceptance_length is None
    if serve.method is None or is_host:
        return None
    assert serve.num_speculative_tokens is not None, "config.load resolves it"
    rates = acceptance_rates(serve.acceptance_length, serve.num_speculative_tokens)
    sizes = serve.num_speculative_tokens, serve.prompt_lookup_min, serve.prompt_lookup_max
    return Drafting(*sizes, has_draft(config), rates)


def plan_kv(kinds: Sequence[CacheKind], config: Config, left: int | None = None) -> dict[str, int]:
    """Plan the KV blocks by cache kind. CapacityError or ConfigError where they hold no sequence of max_model_len.

    left: bytes that a GPU has for them; None: serve.kv_cache_memory
    """
    serve = config.serve
    num_ranks = mesh_of(config).num_ranks
    room = "serve.kv_cache_memory has {has}: raise serve.kv_cache_memory to {needs}"
    if num_ranks > 1:
        room += f" for each of {num_ranks} ranks"
    if left is not None:
        room = f"serve.gpu_memory_utilization={serve.gpu_memory_utilization:g} leaves it {{has}}: raise that"
    return plan_memory(
        kinds,
        serve.block_size,
        limits_of(config),
        memory_bytes=serve.kv_cache_memory // num_ranks if left is None else left,
        num_blocks=serve.num_kvcache_blocks,
        room=room,
    )


def stages_overlap(config: Config) -> bool:
    """Whether stages compute steps of different sequences at a time. Drafts of the host follow known tokens alone."""
    return mesh_of(config).pipeline > 1 and config.serve.method is None


def kinds_of_all(kinds_of: Sequence[Sequence[CacheKind]]) -> list[CacheKind]:
    """The cache kinds of all stages, each once."""
    return list({kind.name: kind for kinds in kinds_of for kind in kinds}.values())


def plan_stages(kinds_of: Sequence[Sequence[CacheKind]], config: Config) -> dict[str, int]:
    """Plan the KV blocks of all stages: of each cache kind as many as the stage with the fewest has."""
    plans = [plan_kv(kinds, config) for kinds in kinds_of]
    return {kind.name: min(plan[kind.name] for plan in plans if kind.name in plan) for kind in kinds_of_all(kinds_of)}


def take_least(plans: Sequence[bytes]) -> dict[str, int]:
    """The KV blocks that each rank has room for, by cache kind, of what all have exchanged."""
    least: dict[str, int] = {}
    for plan in plans:
        for kind, num_blocks in msgspec.msgpack.decode(plan, type=dict[str, int]).items():
            least[kind] = min(num_blocks, least.get(kind, num_blocks))
    return least


def open_runner(
    compiled: Compiled,
    tensors: Mapping[Recipe, Loaded],
    config: Config,
    progress: Progress,
    measure: Callable[[Model], object] | None = None,
    communicator: Communicator | None = None,
    kinds_of: Sequence[Sequence[CacheKind]] | None = None,
    exchange: Exchange = alone,
    clock: PhaseClock | None = None,
    kv_memory: StableMemory | None = None,
) -> tuple[Runner, dict[str, int]]:
    """Open the runner; with it the KV blocks. On a GPU its graphs are captured, and the pool takes the free memory.

    measure: called with the model before anything is captured. kinds_of: of the caches of each stage of a pipeline.
    exchange: that of all ranks, which do all of this in step: they meet in each step that is rehearsed or captured
    """
    serve, is_cpu, clock = config.serve, config.device == "cpu", clock or PhaseClock()
    kinds = kinds_of_all(kinds_of := kinds_of or [cache_kinds(compiled.graph)])
    with nullcontext() if is_cpu else memory.no_memory_at_start(serve):
        bindings = Bindings(tensors, compiled.code, communicator=communicator)
        drafting, head = drafting_of(config), compiled.graph.programs[HEAD]
        model = Model(
            compiled.graph, bindings, serve.block_size, limits_of(config), device=config.device, drafting=drafting,
            kinds=[kind.name for kind in kinds],
            defers_logits=stages_overlap(config) and any(node.target is ops.receive for node in head.nodes),
            kv_memory=kv_memory,
        )  # fmt: skip
        ahead = {"run_ahead": min(mesh_of(config).pipeline, NUM_REPORTED) - 1} if stages_overlap(config) else {}
        runner = Runner(model, flops=most_flops(model.flops_a_token, exchange), **ahead)
        if serve.swap_space:
            runner.host = HostBlocks(model, plan_host_blocks(kinds, serve.block_size, serve.swap_space))
        num_blocks = (
            plan_stages(kinds_of, config) if is_cpu else {kind.name: 2 for kind in kinds}
        )  # to walk through steps
        runner.bind(num_blocks)
        if is_cpu:
            if measure is not None:
                measure(runner.model)
            measure_costs(runner, config)
            clock.stop("runner")
            return runner, num_blocks
        use_parameters(runner.model, config, progress, exchange)
        clock.stop("runner")
        has_stages = mesh_of(config).pipeline > 1
        # a stage that waits for the logits of its step waits for what is sent behind its graph
        has_graphs = compiled.level == 3 and (not has_stages or stages_overlap(config))
        sizes = memory.capture_sizes(serve) if has_graphs else []
        with progress.task("compiling kernels"):
            runner.graphs.compile(sizes, serve.max_num_batched_tokens)
        measure_drafts(runner.model, config, exchange)
        clock.stop("kernels")
        if measure is not None:
            measure(runner.model)
            clock.stop("KV scales")
        own = plan_kv(cache_kinds(compiled.graph), config, memory.measure_left(runner, sizes[-1:], serve))
        num_blocks = take_least(exchange(msgspec.msgpack.encode(own)))
        runner.bind(num_blocks)
        clock.stop("memory")
        with progress.task("capturing CUDA graphs"):
            # a server captures all before it is ready; a run of some prompts needs only few sizes. A stage cannot
            # capture beside steps that are not finished
            runner.graphs.capture(sizes, is_lazy=config.job.kind == "generate" and not has_stages)
        measure_costs(runner, config)
        clock.stop("CUDA graphs")
    return runner, num_blocks


def most_flops(own: float, exchange: Exchange) -> float:
    """Of a token in any stage of a pipeline, by which all capture the same steps; all ranks call this together."""
    every = exchange(msgspec.msgpack.encode(own))
    return max(msgspec.msgpack.decode(each, type=float) for each in every)


def measure_costs(runner: Runner, config: Config) -> None:
    """Measure what it takes to load KV from the host, where some is kept, and to compute it."""
    if runner.host is not None:
        num_tokens = min(TIMED_TOKENS[config.device], config.serve.max_num_batched_tokens)
        runner.host.costs = measure_swap(runner.model, runner.host, num_tokens)


def use_parameters(model: Model, config: Config, progress: Progress, exchange: Exchange) -> None:
    """Use what was measured on this GPU, of linears and steps with drafts; tune=true first measures linears.

    exchange: that of all ranks, which do so at the same time
    """
    tuner = find_tuner(config.device, model.device)
    if tuner is None:
        return
    use_measured(model, tuner, cache := cache_of(config), _log)
    if config.tune:
        tune(model, tuner, cache, progress, _log, exchange=exchange)
    if has_draft_table(config):
        # until steps are measured any number of drafts may pay, so that kernels are compiled for each
        trial = DraftTable({model.limits.max_decodes: [1.0] * (1 + model.num_drafts)})
        text = digest_of(model.graph)
        table = trial if config.tune else use_measured_drafts(model, tuner, cache, text, _log, exchange=exchange)
        model.limits = replace(model.limits, draft_table=table)


def measure_drafts(model: Model, config: Config, exchange: Exchange) -> None:
    """With tune=true, measure what steps with drafts take, once their kernels are compiled, and use that.

    exchange: as in `use_parameters`
    """
    tuner = find_tuner(config.device, model.device)
    if tuner is not None and config.tune and has_draft_table(config):
        text = digest_of(model.graph)
        table = tune_drafts(model, tuner, cache_of(config), text, _log, exchange=exchange)
        model.limits = replace(model.limits, draft_table=table)


def has_draft_table(config: Config) -> bool:
    """Whether measured times decide how many tokens are drafted."""
    return drafting_of(config) is not None and config.serve.max_verified_tokens is None


def cache_of(config: Config) -> Path:
    assert config.cache is not None, "config.load resolves it"
    return Path(config.cache)


def _log(line: str) -> None:
    print(f"atom-run: {line}", file=sys.stderr)


def _describe_pool(kinds: Sequence[CacheKind], num_blocks: dict[str, int], config: Config) -> str:
    serve, limits = config.serve, limits_of(config)
    length, step = limits.max_model_len, limits.max_num_batched_tokens
    num_tokens = (max(num_blocks.values()) - 1) * serve.block_size
    num_requests = min(
        (num_blocks[kind.name] - 1) // num_blocks_needed(kind, serve.block_size, length, min(step, length))
        for kind in kinds
    )
    return f"KV: {num_tokens} tokens, {num_requests} requests at max_model_len"


def _describe_host(host: HostBlocks, block_size: int) -> str:
    assert host.costs is not None, "they were measured"
    num_tokens, costs = (max(host.num_blocks.values()) - 1) * block_size, host.costs
    times = (
        f"{costs.load_token_seconds * 1e6:.3g} us a token to load, {costs.compute_token_seconds * 1e6:.3g} to compute"
    )
    return f"KV on the host: {num_tokens} tokens, {times}"


def _describe_sampling(config: Config) -> str:
    """Describe the checkpoint's sampling defaults that are in effect; empty without any."""
    stated = {name: value for name, value in config.generation.items() if getattr(config.sampling, name) == value}
    text = ", ".join(f"{name} {value:g}" for name, value in stated.items())
    return f"sampling as the checkpoint says: {text}; sampling.defaults=none leaves it out" if text else ""


def limits_of(config: Config) -> StepLimits:
    serve = config.serve
    assert serve.max_model_len is not None, "config.load resolves it"
    verified = serve.max_verified_tokens or VERIFIED_TOKENS[config.device]
    return StepLimits(serve.max_num_seqs, serve.max_num_batched_tokens, serve.max_model_len, verified)


def cache_kinds(graph: Graph) -> list[CacheKind]:
    """The cache kinds of the graph's layers."""
    found: dict[str, CacheKind] = {}
    for cache in graph.caches():
        known = found.get(cache.kind)
        size = cache.type.num_bytes + (known.bytes_per_token if known else 0)
        found[cache.kind] = CacheKind(cache.kind, size, cache.window)
    return list(found.values())
