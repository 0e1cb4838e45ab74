"""Plan the KV blocks of each state kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from atom.config import ServeConfig
from atom.config.limits import EngineLimits
from atom.errors import CapacityError, ConfigError
from atom.graph import Graph
from atom.runtime.kv.host_blocks import plan_host_blocks
from atom.runtime.kv.plan import fit_slots, plan_memory
from atom.runtime.types import StateKind


def state_kinds(graph: Graph, block_size: int) -> list[StateKind]:
    """The state kinds of the graph's layers; ConfigError if an entry of one and a block are not multiples."""
    found: dict[str, StateKind] = {}
    for state in graph.states():
        known, every = found.get(state.kind), state.rule.entry_tokens
        if block_size % every and every % block_size:
            raise ConfigError(
                f"serve.block_size={block_size} is neither a multiple nor a divisor of the {every} tokens that have an "
                f"entry of {state.name} together: set another serve.block_size, such as 16 or {every}"
            )
        size, stride = state.block(block_size).num_bytes, state.stride(block_size)
        size += known.block_bytes if known else 0
        found[state.kind] = StateKind(state.kind, state.rule, size, block_size * stride, stride)
    return list(found.values())


def kinds_of_all(kinds_of: Sequence[Sequence[StateKind]]) -> list[StateKind]:
    """The state kinds of all stages, each once."""
    return list({kind.name: kind for kinds in kinds_of for kind in kinds}.values())


def fit_limits(
    kinds_of: Sequence[Sequence[StateKind]],
    serve: ServeConfig,
    limits: EngineLimits,
    num_ranks: int = 1,
    left: int | None = None,
) -> EngineLimits:
    """Lower the number of sequences to those whose recurrent state has room on each stage.

    num_ranks, left: as of `plan_kv`
    """
    memory = serve.kv_cache_memory // num_ranks if left is None else left
    fitting = min(fit_slots(kinds, limits, memory) for kinds in kinds_of)
    return replace(limits, max_num_seqs=fitting)


def plan_kv(
    kinds: Sequence[StateKind], serve: ServeConfig, limits: EngineLimits, num_ranks: int = 1, left: int | None = None
) -> dict[str, int]:
    """Plan the KV blocks by state kind. CapacityError or ConfigError if they hold no sequence of max_model_len.

    num_ranks: the ranks that divide serve.kv_cache_memory
    left: bytes that a GPU has for the blocks; None: a rank's part of serve.kv_cache_memory
    """
    if left is not None and left <= 0 and serve.num_kvcache_blocks is None:
        raise CapacityError(
            f"serve.gpu_memory_utilization={serve.gpu_memory_utilization:g} leaves no memory for KV: weights and "
            f"the largest step take {-left / 2**30:.1f} GiB more. Raise that, or lower "
            f"serve.max_num_batched_tokens ({serve.max_num_batched_tokens}) or serve.max_num_seqs "
            f"({serve.max_num_seqs})"
        )

    def describe_room(has: int, needs: int) -> str:
        if left is not None:
            return f"serve.gpu_memory_utilization={serve.gpu_memory_utilization:g} leaves it {has}: raise that"
        each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
        return f"serve.kv_cache_memory has {has}{each}: raise serve.kv_cache_memory to {needs * num_ranks}"

    return plan_memory(
        kinds,
        serve.block_size,
        limits,
        memory_bytes=serve.kv_cache_memory // num_ranks if left is None else left,
        num_blocks=serve.num_kvcache_blocks,
        state_memory=serve.state_memory,
        describe_room=describe_room,
    )


def plan_stages(
    kinds_of: Sequence[Sequence[StateKind]], serve: ServeConfig, limits: EngineLimits, num_ranks: int = 1
) -> dict[str, int]:
    """Plan the KV blocks of all stages: of each state kind as many as the stage with the fewest has."""
    plans = [plan_kv(kinds, serve, limits, num_ranks) for kinds in kinds_of]
    return {kind.name: min(plan[kind.name] for plan in plans if kind.name in plan) for kind in kinds_of_all(kinds_of)}


def plan_host(kinds_of: Sequence[Sequence[StateKind]], serve: ServeConfig) -> dict[str, int]:
    """Plan the KV blocks in serve.swap_space: of each state kind as many as the stage with the fewest holds."""
    plans = [plan_host_blocks(kinds, serve.swap_space) for kinds in kinds_of]
    return {kind.name: min(plan[kind.name] for plan in plans if kind.name in plan) for kind in kinds_of_all(kinds_of)}


def min_blocks(plans: Sequence[bytes]) -> dict[str, int]:
    """The KV blocks that each rank has room for, by state kind, of what all have exchanged."""
    fewest: dict[str, int] = {}
    for plan in plans:
        for kind, num_blocks in msgspec.msgpack.decode(plan, type=dict[str, int]).items():
            fewest[kind] = min(num_blocks, fewest.get(kind, num_blocks))
    return fewest
