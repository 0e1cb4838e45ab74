"""Open the KV caches, the drafter and the schedulers of an engine's data groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from atom.assemble import settings
from atom.compiler import mesh_of
from atom.config import Config
from atom.runtime.draft.speculation import Drafter, NgramDrafter, RunnerDrafter
from atom.runtime.kv.cache import KVCache
from atom.runtime.kv.files import KVFiles
from atom.runtime.kv.host_blocks import HostBlocks
from atom.runtime.schedule.scheduler import Scheduler
from atom.runtime.step.runner import Runner
from atom.runtime.types import CacheKind


def open_kv_files(host: HostBlocks, config: Config) -> KVFiles | None:
    """The files of serve.kv_cache_dir, for the blocks that the host keeps; None without them."""
    serve = config.serve
    if serve.kv_cache_dir is None:
        return None
    folder = Path(serve.kv_cache_dir).expanduser()
    return KVFiles(folder, serve.kv_cache_dir_bytes, host.num_bytes, pin_memory=config.device != "cpu")


def open_caches(
    kinds: Sequence[CacheKind], num_blocks: Mapping[str, int], host: HostBlocks | None, salt: bytes, config: Config
) -> list[KVCache]:
    """The KV cache of each data group. salt: of the keys of stored blocks"""
    serve = config.serve
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
        )
        for _ in mesh_of(config).leaders
    ]


def open_schedulers(caches: Sequence[KVCache], runner: Runner, config: Config) -> list[Scheduler]:
    """A scheduler for the KV cache of each data group."""
    drafter, delay_factor = open_drafter(config), config.serve.scheduler_delay_factor
    num_stages = 1 + runner.run_ahead if settings.stages_overlap(config) else 1
    limits, run_ahead = runner.model.limits, runner.run_ahead
    return [Scheduler(cache, limits, run_ahead, drafter, num_stages, delay_factor=delay_factor) for cache in caches]


def open_drafter(config: Config) -> Drafter | None:
    """The drafter of serve.method; None without one."""
    serve = config.serve
    if serve.method is None:
        return None
    num_tokens, least, most = settings.draft_sizes(config)
    if settings.drafting_of(config) is not None:
        return RunnerDrafter(num_tokens)
    return NgramDrafter(num_tokens, least, most)
