"""Counts of what an engine has done, and how full it is.

Tests assert through them that an event took place.

engine.metrics.num_output_tokens, engine.metrics.scheduler.num_preemptions
engine.stats().kv_cache_usage        # all of it at this moment, in plain numbers that can be sent elsewhere
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from atom.runtime.scheduler import SchedulerStats


@dataclass
class Metrics:
    scheduler: SchedulerStats
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)


class EngineStats(NamedTuple):
    """The load of an engine, and its counts since the start."""

    num_running: int  # sequences
    num_waiting: int  # sequences
    num_blocks: int  # of the kind of KV blocks that is fullest
    num_blocks_used: int  # of these, held by sequences
    kv_cache_usage: float  # the share of the two, 0 to 1
    num_preemptions: int
    num_prefix_queries: int  # tokens looked up in the prefix cache
    num_prefix_hit_tokens: int  # tokens found there
    num_steps: int
    num_prompt_tokens: int  # of all requests that were queued
    num_output_tokens: int
    finish_reasons: dict[str, int]  # sequences by finish reason
