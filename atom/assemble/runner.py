"""Open the runner: bind weights, tune, plan memory, capture CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace

import msgspec

from atom.assemble.compiling import digest_of
from atom.assemble.images import count_rows, largest_encode
from atom.assemble.kv_blocks import fit_limits, kinds_of_all, min_blocks, plan_host, plan_kv, plan_stages, state_kinds
from atom.checkpoint import Progress
from atom.compiler import Compiled
from atom.config import Config
from atom.graph import HEAD, Recipe, ops
from atom.kernels import Communicator, find_tuners
from atom.kernels.stable_memory import StableMemory
from atom.measurement.phases import PhaseClock
from atom.process.messages import say
from atom.runtime import memory
from atom.runtime.draft.table import DraftTable
from atom.runtime.kv.host_blocks import HostBlocks
from atom.runtime.kv.host_blocks import measure as measure_swap
from atom.runtime.step.input import NUM_REPORTED
from atom.runtime.step.model import Model
from atom.runtime.step.prefix_groups import find_rule
from atom.runtime.step.program import Bindings
from atom.runtime.step.runner import Runner
from atom.runtime.tune import Exchange, single_rank, tune, tune_drafts, use_measured, use_measured_drafts
from atom.runtime.types import StateKind, StepLimits
from atom.weights.evaluate import Loaded

TIMED_TOKENS = {"cpu": 64, "cuda": 2048}  # of the prompt whose time is compared with that of loading its KV


def open_runner(
    compiled: Compiled,
    tensors: Mapping[Recipe, Loaded],
    config: Config,
    progress: Progress,
    measure: Callable[[Model], object] | None = None,
    communicator: Communicator | None = None,
    kinds_of: Sequence[Sequence[StateKind]] | None = None,
    exchange: Exchange = single_rank,
    clock: PhaseClock | None = None,
    kv_memory: StableMemory | None = None,
) -> tuple[Runner, dict[str, int]]:
    """Open the runner; with it the KV blocks. On a GPU its graphs are captured, and the pool takes the free memory.

    measure: called with the model before anything is captured
    kinds_of: the state kinds of each stage of a pipeline; None: there is one stage
    exchange: that of all ranks, which do all of this in step: they meet in each step that is rehearsed or captured
    kv_memory: the KV pool's memory on a GPU with sleep mode
    """
    is_cpu, clock = config.device == "cpu", clock or PhaseClock()
    kinds_of = kinds_of or [state_kinds(compiled.graph, config.serve.block_size)]
    config = fit_config(config, kinds_of, exchange)
    with nullcontext() if is_cpu else memory.no_memory_at_start(config.serve):
        bindings = Bindings(tensors, compiled.code, communicator=communicator)
        runner = make_runner(compiled, bindings, config, kinds_of, exchange, kv_memory)
        if is_cpu:
            num_blocks = plan_stages(kinds_of, config.serve, config.limits, config.parallel.num_ranks)
            runner.bind(num_blocks)
            if measure is not None:
                measure(runner.model)
            measure_costs(runner)
            clock.stop("runner")
        else:
            num_blocks = prepare_gpu(runner, compiled, config, progress, measure, exchange, clock)
    return runner, num_blocks


def fit_config(config: Config, kinds_of: Sequence[Sequence[StateKind]], exchange: Exchange) -> Config:
    """The configuration with as many sequences as have room for their recurrent state, on all ranks alike."""
    serve, left = config.serve, None if config.device == "cpu" else memory.left_of_share(config.serve)
    own = fit_limits(kinds_of, serve, config.limits, config.parallel.num_ranks, left).max_num_seqs
    fitting = min(msgspec.msgpack.decode(each, type=int) for each in exchange(msgspec.msgpack.encode(own)))
    return replace(config, serve=replace(serve, max_num_seqs=fitting))


def make_runner(
    compiled: Compiled,
    bindings: Bindings,
    config: Config,
    kinds_of: Sequence[Sequence[StateKind]],
    exchange: Exchange,
    kv_memory: StableMemory | None,
) -> Runner:
    """Make a runner, and the host's KV blocks if any; its own are not allocated yet. Parameters as in `open_runner`."""
    serve, head, overlaps = config.serve, compiled.graph.programs[HEAD], config.stages_overlap
    # graphs of steps with groups are captured on the way, which all ranks have to do at a time and no stage can
    may_group = serve.enable_prefix_caching and config.parallel.pipeline == config.parallel.data == 1
    model = Model(
        compiled.graph,
        bindings,
        serve.block_size,
        StepLimits(*astuple(config.limits)),
        device=config.device,
        drafting=config.drafting,
        kinds=[kind.name for kind in kinds_of_all(kinds_of) if not kind.rule.in_slot],
        defers_logits=overlaps and any(node.target is ops.receive for node in head.nodes),
        kv_memory=kv_memory,
        prefix_rule=find_rule(compiled.graph, config.limits) if may_group else None,
        image_rows=count_rows(compiled.graph, config),
    )
    ahead = {"run_ahead": min(config.parallel.pipeline, NUM_REPORTED) - 1} if overlaps else {}
    if config.drafts is not None and config.drafts.suffix is not None:
        ahead = {"run_ahead": 0}  # the host drafts, for which it needs the newest tokens
    runner = Runner(model, flops=max_flops(model.flops_a_token, exchange), **ahead)
    if serve.swap_space:
        runner.host = HostBlocks(model, plan_host(kinds_of, serve))
    return runner


def prepare_gpu(
    runner: Runner,
    compiled: Compiled,
    config: Config,
    progress: Progress,
    measure: Callable[[Model], object] | None,
    exchange: Exchange,
    clock: PhaseClock,
) -> dict[str, int]:
    """Compile the kernels of steps, measure the memory that they leave, and capture graphs; the KV blocks.

    Parameters as in `open_runner`.
    """
    model, serve, has_stages = runner.model, config.serve, config.parallel.pipeline > 1
    kinds = state_kinds(compiled.graph, serve.block_size)
    runner.bind({kind.name: 2 for kind in kinds})  # for steps of padding
    use_parameters(model, config, progress, exchange)
    clock.stop("runner")
    # a stage that waits for the logits of its step waits for what is sent after its graph
    has_graphs = compiled.level == 3 and (not has_stages or config.stages_overlap)
    sizes = memory.capture_sizes(serve) if has_graphs else []
    with progress.task("compiling kernels"):
        runner.graphs.compile(sizes, serve.max_num_batched_tokens)
    measure_drafts(model, config, exchange)
    clock.stop("kernels")
    if measure is not None:
        measure(model)
        clock.stop("KV scales")
    size = sum(kind.bytes_per_slot(config.limits) for kind in kinds)  # of a slot; they are allocated already
    slots = size * (1 + serve.max_num_seqs)
    left = memory.measure_left(runner, sizes[-1:], serve, largest_encode(compiled.graph, config)) + slots
    own = plan_kv(kinds, serve, config.limits, config.parallel.num_ranks, left)
    num_blocks = min_blocks(exchange(msgspec.msgpack.encode(own)))
    runner.bind(num_blocks)
    clock.stop("memory")
    with progress.task("capturing CUDA graphs"):
        # a server captures all before it is ready; a run of some prompts needs only few sizes. A stage cannot
        # capture while steps are unfinished
        runner.graphs.capture(sizes, is_lazy=config.job.kind == "generate" and not has_stages)
    measure_costs(runner)
    clock.stop("CUDA graphs")
    return num_blocks


def max_flops(own: float, exchange: Exchange) -> float:
    """The FLOPs of a token in the stage that computes the most; all ranks call this together.

    By these, all stages capture the same steps.
    """
    every = exchange(msgspec.msgpack.encode(own))
    return max(msgspec.msgpack.decode(each, type=float) for each in every)


def measure_costs(runner: Runner) -> None:
    """Measure what it takes to load KV from the host, if some is kept there, and to compute it."""
    if runner.host is not None:
        num_tokens = min(TIMED_TOKENS[runner.model.device.type], runner.model.limits.max_num_batched_tokens)
        runner.host.costs = measure_swap(runner.model, runner.host, num_tokens)


def use_parameters(model: Model, config: Config, progress: Progress, exchange: Exchange) -> None:
    """Use what was measured on this GPU, of GEMMs and of steps with drafts; tune=true first measures GEMMs.

    exchange: that of all ranks, which do so at the same time
    """
    tuners, cache = find_tuners(config.device, model.device), config.cache_folder
    use_measured(model, tuners, cache, say)
    if config.tune:
        fitting = [each for each in tuners if each.matmuls(model.graph)]
        for tuner in fitting or tuners[:1]:  # without GEMMs, the first one says so
            tune(model, tuner, cache, progress, say, exchange=exchange)
    if tuners and config.chooses_drafts:
        # until steps are measured any number of drafts may pay, so that kernels are compiled for each
        trial = DraftTable({model.limits.max_decodes: [1.0] * (1 + model.num_drafts)})
        text = digest_of(model.graph)
        table = trial if config.tune else use_measured_drafts(model, tuners[0], cache, text, say, exchange=exchange)
        model.limits = replace(model.limits, draft_table=table)


def measure_drafts(model: Model, config: Config, exchange: Exchange) -> None:
    """With tune=true, measure what steps with drafts take, once their kernels are compiled, and use that.

    exchange: as in `use_parameters`
    """
    tuners = find_tuners(config.device, model.device)
    if tuners and config.tune and config.chooses_drafts:
        text = digest_of(model.graph)
        table = tune_drafts(model, tuners[0], config.cache_folder, text, say, exchange=exchange)
        model.limits = replace(model.limits, draft_table=table)
