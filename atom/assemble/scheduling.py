"""Open the KV caches, the drafter and the schedulers of an engine's data groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from atom.config import ServeConfig
from atom.config.limits import Drafting
from atom.runtime.draft.speculation import Drafter, NgramDrafter, RunnerDrafter
from atom.runtime.draft.suffix import SuffixDrafter
from atom.runtime.images.encode_planner import EncodePlanner
from atom.runtime.kv.cache import KVCache
from atom.runtime.kv.files import KVFiles
from atom.runtime.kv.host_blocks import HostBlocks
from atom.runtime.kv.retention import RetentionLimits
from atom.runtime.schedule.data_parallel import DataParallelScheduler
from atom.runtime.schedule.prefill_budget import PrefillBudget
from atom.runtime.schedule.scheduler import Scheduler
from atom.runtime.step.runner import Runner
from atom.runtime.types import StateKind


def open_kv_files(host: HostBlocks, serve: ServeConfig, *, pin_memory: bool) -> KVFiles | None:
    """The files of serve.kv_cache_dir, for the blocks that the host keeps; None without them."""
    if serve.kv_cache_dir is None:
        return None
    folder = Path(serve.kv_cache_dir).expanduser()
    return KVFiles(folder, serve.kv_cache_dir_bytes, host.num_bytes, pin_memory=pin_memory)


def open_caches(
    kinds: Sequence[StateKind],
    num_blocks: Mapping[str, int],
    host: HostBlocks | None,
    salt: bytes,
    serve: ServeConfig,
    num_groups: int = 1,
) -> list[KVCache]:
    """The KV cache of each data group.

    num_blocks: KV blocks by state kind
    salt: of the keys of stored blocks
    """
    return [
        KVCache(
            kinds,
            num_blocks,
            serve.block_size,
            enable_prefix_caching=serve.enable_prefix_caching,
            salt=salt,
            num_host_blocks=None if host is None else host.num_blocks,
            costs=None if host is None else host.costs,
            files=None if host is None else host.files,
            state_interval=serve.state_interval,
            retention=RetentionLimits(serve.cache_retention_share),
        )
        for _ in range(num_groups)
    ]


def open_scheduler(
    caches: Sequence[KVCache],
    runner: Runner,
    drafter: Drafter | None,
    serve: ServeConfig,
    *,
    has_ranks: bool,
    overlap: bool,
    images: EncodePlanner | None = None,
) -> Scheduler | DataParallelScheduler:
    """The scheduler of an engine: with ranks, one of a scheduler for the KV cache of each data group.

    overlap: whether pipeline stages compute steps of different sequences at a time
    images: as of `Scheduler`, of an engine with one cache
    """
    limits, run_ahead = runner.model.limits, runner.run_ahead
    num_stages = 1 + run_ahead if overlap else 1
    budget = None
    if serve.max_itl_ms is not None:
        budget = PrefillBudget(serve.max_itl_ms / 1000, serve.block_size, limits.max_num_batched_tokens, num_stages)
    schedulers = [
        Scheduler(
            cache,
            limits,
            run_ahead,
            drafter,
            num_stages,
            delay_factor=serve.scheduler_delay_factor,
            prefill_budget=None if has_ranks else budget,
            images=images,
        )
        for cache in caches
    ]
    return DataParallelScheduler(schedulers, budget) if has_ranks else schedulers[0]


def open_drafter(drafts: Drafting | None, by_runner: bool) -> Drafter | None:
    """The scheduler's drafter; None without drafts.

    by_runner: whether the runner verifies drafts by itself, and makes them, unless it takes those of the host
    """
    if drafts is None:
        return None
    if drafts.suffix is not None:
        return SuffixDrafter(drafts.num_tokens, drafts.suffix)
    if by_runner:
        return RunnerDrafter(drafts.num_tokens)
    return NgramDrafter(drafts.num_tokens, drafts.min_n, drafts.max_n)
