"""Estimate a model on GPUs: room for KV, limits of decode.

    limits = decode_limits([graph], gpu, mesh)           # of 1 and 32 requests, by the text of each stage's ranks
    for layout in layouts(gpu, config, target): …        # the same for tp2, tp4_ep, …

A limit is the roofline of a step and the collectives in it, one after the other. A collective takes as long as the
GPU's file says of a sum of as many bytes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from atom.assemble import fit_limits, kinds_of_all, plan_stages, state_kinds
from atom.compiler import compile_graph, level_of, mesh_of
from atom.config import Config, GPUConfig
from atom.config.check_parallel import divides_heads
from atom.config.limits import EngineLimits
from atom.config.schema import ParallelConfig, ServeConfig
from atom.errors import CapacityError, ConfigError, UnsupportedError
from atom.graph import BODY, Graph, Mesh, ops
from atom.graph.formats import act_of
from atom.graph.graph import results_of
from atom.graph.recipe_contents import device_bytes
from atom.jobs.bench.roofline import MATMULS, Costs, Limits, Matmul, program_costs, read_costs, step_work, total
from atom.jobs.bench.workload import Step
from atom.kernels import Target
from atom.runtime.types import StateKind

NUM_GPUS = (2, 4, 8, 16)  # that are shown besides one
ON_A_HOST = 8  # of these; more are shown if no fewer are enough
NUM_REQUESTS = (1, 32)  # whose limits are shown
CONTEXT = 1024  # tokens that each of these sees
PROMPT = 8192  # tokens of a prompt whose limit is shown


def kv_pool(
    kinds: list[StateKind],
    serve: ServeConfig,
    limits: EngineLimits,
    num_ranks: int,
    others: Sequence[list[StateKind]] = (),
) -> dict[str, Any]:
    """The capacity of the configured pool: tokens by state kind, the longest sequence, up to max_model_len, and how
    many sequences of max_model_len it holds.

    num_ranks: the ranks that divide serve.kv_cache_memory
    others: the kinds of other stages, which have as many blocks
    """
    kinds_of, max_model_len = [kinds, *others], limits.max_model_len
    limits = fit_limits(kinds_of, serve, limits, num_ranks)

    def plan(length: int) -> dict[str, int] | None:
        return _plan(kinds_of, serve, replace(limits, max_model_len=length), num_ranks)

    longest = bisect_left(range(1, max_model_len + 1), True, key=lambda length: plan(length) is None)
    num_blocks = plan(longest) or {kind.name: 0 for kind in kinds_of_all(kinds_of)}
    num_usable = {name: max(num - 1, 0) for name, num in num_blocks.items()}  # without block 0, that of padding
    needed = _blocks_of_one(kinds_of, limits)
    states = {kind.name: num_usable[kind.name] for kind in kinds if kind.rule.in_slot}
    kept = {kind.name: kind.blocks(limits.max_model_len) for kind in kinds_of_all(kinds_of)}

    def count(num_blocks: int, of_first: int, of_others: int) -> int:
        """The sequences whose prompts share a step: only its tokens need blocks besides those that decodes keep."""
        return 0 if num_blocks < of_first else 1 + (num_blocks - of_first) // of_others

    return {
        **({"state_slots": limits.max_num_seqs, "state_copies": sum(states.values())} if states else {}),
        "kv_pool_bytes": sum(num_blocks[kind.name] * kind.block_bytes for kind in kinds),
        "kv_tokens": {name: num * serve.block_size for name, num in num_usable.items() if needed[name]},
        "kv_longest_sequence": longest,
        "kv_sequences": min(
            (count(num_usable[name], num, kept[name]) for name, num in needed.items() if num), default=0
        ),
    }


def _plan(
    kinds_of: Sequence[list[StateKind]], serve: ServeConfig, limits: EngineLimits, num_ranks: int
) -> dict[str, int] | None:
    """The pool's blocks by state kind for sequences of max_model_len; None if it does not hold one."""
    try:
        num_blocks = plan_stages(kinds_of, serve, limits, num_ranks)
    except (CapacityError, ConfigError):
        return None
    needed = _blocks_of_one(kinds_of, limits)
    return num_blocks if all(needed[name] < num for name, num in num_blocks.items()) else None  # block 0 is padding's


def _blocks_of_one(kinds_of: Sequence[list[StateKind]], limits: EngineLimits) -> dict[str, int]:
    """The blocks by state kind that a sequence of max_model_len needs."""
    length, step = limits.max_model_len, min(limits.max_model_len, limits.max_num_batched_tokens)
    return {kind.name: kind.blocks(length, step) for kind in kinds_of_all(kinds_of)}


def fit(gpu: GPUConfig, graphs: Sequence[Graph], config: Config) -> dict[str, Any]:
    """Whether weights and the KV of one sequence of max_model_len fit in all of a GPU's memory, and its limits.

    graphs: of all stages
    """
    return {**find_room(gpu, graphs, config), "decode": decode_limits(graphs, gpu, mesh_of(config))}


def find_room(gpu: GPUConfig, graphs: Sequence[Graph], config: Config) -> dict[str, Any]:
    """Whether weights and the KV of one sequence of max_model_len fit, and how many tokens and sequences do.

    graphs: of all stages
    """
    mesh, pools = mesh_of(config), []
    weights_bytes = [sum(map(device_bytes, graph.recipes())) for graph in graphs]
    for graph, held in zip(graphs, weights_bytes, strict=True):
        left = max(gpu.memory - held, 0)  # of each rank
        serve = replace(config.serve, kv_cache_memory=left * mesh.num_ranks, num_kvcache_blocks=None)
        pools.append(kv_pool(state_kinds(graph, serve.block_size), serve, config.limits, mesh.num_ranks))
    longest = min(pool["kv_longest_sequence"] for pool in pools)
    names = dict.fromkeys(name for pool in pools for name in pool["kv_tokens"])
    fewest = {name: min(pool["kv_tokens"].get(name, inf) for pool in pools) for name in names}
    states = [pool["state_slots"] for pool in pools if "state_slots" in pool]
    return {
        **({"state_slots": min(states)} if states else {}),
        "weights_fit": max(weights_bytes) <= gpu.memory,
        "fits": longest == config.serve.max_model_len,
        "kv_tokens": {name: num * mesh.data for name, num in fewest.items()},
        "kv_longest_sequence": longest,
        "kv_sequences": min(pool["kv_sequences"] for pool in pools) * mesh.data,
        "gpus_for_weights": -(-max(weights_bytes) // gpu.memory),
    }


def limits_of(gpu: GPUConfig) -> Limits:
    """The rates of a GPU's file; matmuls that it has none for take no time."""
    return Limits(gpu.bandwidth, gpu.rates.get("bf16", inf), **{act: gpu.rates.get(act) for act in MATMULS})


def decode_limits(graphs: Sequence[Graph], gpu: GPUConfig, mesh: Mesh) -> list[dict[str, Any]]:
    """Max tokens/s that some requests get, by number; with it, the seconds of a step's collectives, and its bytes.

    The seconds are None, and do not count, if the GPU's file has no times for as many ranks.

    graphs: of all stages, which take a step one after the other
    """
    limits = limits_of(gpu)
    result = []
    for num_requests in NUM_REQUESTS:
        num_rows = -(-num_requests // mesh.data)  # of the fullest group
        step = Step(0.0, array("q", [CONTEXT] * num_rows), [], num_rows)
        collectives = collective_seconds(graphs, gpu, mesh, num_rows)
        costs = [read_costs(graph) for graph in graphs]
        work = (total(step_work(each, step).values()) for each in costs)
        seconds = sum(map(limits.seconds, work)) + (collectives or 0.0)
        about = {"requests": num_requests, "tokens_per_second": num_requests / seconds}
        moved = sum(map(Counter, (step_bytes(each, step) for each in costs)), Counter[str]())
        result.append({**about, "collective_seconds": collectives, "step_bytes": moved})
    return result


def step_bytes(costs: Mapping[str, Costs], step: Step) -> dict[str, int]:
    """The bytes of a step: of weights and KV, which are read, and of recurrent states, which are written too."""
    work, runs = step_work(costs, step), step.runs(costs)
    latent = total(  # weights of
        layer.weight.work(run.step.num_tokens)
        for run in runs
        for layer in costs[run.program].attention
        if layer.weight is not None
    ).bytes
    weights = work["matrix"].bytes + work["routing"].bytes + latent
    each = {"weights": weights, "KV": work["attention"].bytes - latent, "states": work["recurrent"].bytes}
    return {name: round(size) for name, size in each.items() if size}


def prefill_limit(graphs: Sequence[Graph], gpu: GPUConfig, mesh: Mesh) -> float | None:
    """Max tokens/s of long prompts, by the matmuls of layers; None if the GPU states no rate.

    A weight's matmul counts at the rate of its 8-bit numbers, if the GPU has one. Attention, the head and reading do
    not count.

    graphs: of all stages, one after the other
    """
    return None if "bf16" not in gpu.rates else mesh.data / sum(matmul_seconds(graph, gpu) for graph in graphs)


def prompt_limit(graphs: Sequence[Graph], gpu: GPUConfig, mesh: Mesh) -> dict[str, Any] | None:
    """Max tokens/s of prompts of PROMPT tokens, and the seconds of one by kind of work; None as `prefill_limit`.

    graphs: of all stages, one after the other
    """
    if "bf16" not in gpu.rates:
        return None
    seconds = Counter[str]()
    for graph in graphs:
        work = step_work({BODY: program_costs(graph.programs[BODY])}, Step(0.0, array("q"), [(0, PROMPT)], 0))
        others = {kind: work[kind].flops / gpu.rates["bf16"] for kind in ("attention", "recurrent") if work[kind].flops}
        seconds += Counter({"matrix": matmul_seconds(graph, gpu) * PROMPT, **others})
    return {"tokens": PROMPT, "tokens_per_second": mesh.data * PROMPT / seconds.total(), "seconds": seconds}


def matmul_seconds(graph: Graph, gpu: GPUConfig) -> float:
    """The seconds that a prompt's token takes in the matmuls of layers."""
    costs = program_costs(graph.programs[BODY])
    return sum(sum(matmul.work(1)[1:]) / rate_of(matmul, gpu) for matmul in (*costs.matmuls, *costs.routing))


def rate_of(matmul: Matmul, gpu: GPUConfig) -> float:
    """FLOP/s"""
    act = act_of(matmul.fmt) if matmul.fmt else None
    return gpu.rates.get(act.partition("[")[0] if act else matmul.act, gpu.rates["bf16"])


def collective_seconds(graphs: Sequence[Graph], gpu: GPUConfig, mesh: Mesh, num_rows: int) -> float | None:
    """The seconds of the collectives of a step with this many rows; None if they are not known."""
    seconds = 0.0
    programs = (program for graph in graphs for program in graph.programs.values())
    nodes = (node for program in programs for node in program.nodes if node.target.is_collective)
    for node in nodes:
        if node.target is ops.send:  # what takes time is to receive it
            continue
        ranks = 2 if node.target is ops.receive else mesh.size(node.kwargs["axis"])
        if ranks not in gpu.all_reduce:
            return None
        given, taken = (
            sum(value.meta["type"].bytes_per_token for value in values)
            for values in (node.all_input_nodes, results_of(node))
        )
        seconds += sum_seconds(gpu.all_reduce[ranks], max(given, taken) * num_rows)
    return seconds


def sum_seconds(measured: Mapping[int, float], num_bytes: int) -> float:
    """The seconds of a sum, between those that were measured of other sizes; beyond the largest, as many more."""
    sizes = sorted(measured)
    at = bisect_left(sizes, num_bytes)
    if at == 0:
        return measured[sizes[0]]
    if at == len(sizes):
        return measured[sizes[-1]] * num_bytes / sizes[-1]
    low, high = sizes[at - 1], sizes[at]
    return measured[low] + (measured[high] - measured[low]) * (num_bytes - low) / (high - low)


def layouts(gpu: GPUConfig, config: Config, target: Target | None) -> Iterator[dict[str, Any]]:
    """Memory and limits of each of several GPUs; the reason, if ranks cannot divide the model.

    Of a mixture, also with whole experts on each, and with data groups, if the weights fit.
    """
    is_mixture, fitted = any(mlp.kind == "moe" for mlp in config.model.mlps), False
    for num in NUM_GPUS:
        if fitted and num > ON_A_HOST:
            return
        names = {f"tp{num}": ParallelConfig(tensor=num)}
        if is_mixture:
            names[f"tp{num}_ep"] = ParallelConfig(tensor=num, experts=num)
            names[f"dp{num}_ep"] = ParallelConfig(data=num, experts=num)
        for name, parallel in names.items():
            layout = {"name": name, **_layout(gpu, replace(config, parallel=parallel), target)}
            yield layout
            if not layout.get("weights_fit", True):
                break
            fitted = fitted or "refused" not in layout


def _layout(gpu: GPUConfig, config: Config, target: Target | None) -> dict[str, Any]:
    mesh = mesh_of(config)
    try:
        if not all(divides_heads(mesh.tensor, each) for each in config.model.with_heads):
            raise UnsupportedError(f"its heads cannot be divided among {mesh.tensor}")
        if mesh.experts > min((mlp.experts or 1 for mlp in config.model.mlps if mlp.kind == "moe"), default=1):
            raise UnsupportedError("a layer has fewer experts")
        graph = compile_graph(replace(config, level=min(level_of(config), 1)), target=target)
    except UnsupportedError as error:
        return {"refused": str(error)}
    return {"weights_bytes": sum(map(device_bytes, graph.recipes())), **fit(gpu, [graph], config)}
