"""Engine metrics: counters, queue lengths, KV usage.

engine.metrics.num_output_tokens, engine.metrics.scheduler.num_preemptions     # counted where it happens
engine.stats().num_blocks_used       # all of it at this moment, in plain numbers that are sent elsewhere as they are

Tests assert through them that an event took place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import msgspec

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # vLLM's ITERATION_TOKENS_BUCKETS
DEFAULT_VERSION = "default"  # the name of the checkpoint's weights, as in vLLM


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """Counts since the start."""

    num_steps: int = 0  # committed plans
    num_chunks: int = 0  # rows that did not reach the end of their prompt
    num_preemptions: int = 0
    num_prefix_queries: int = 0  # tokens that the prefix cache was asked for at admissions
    num_prefix_hit_tokens: int = 0  # that the prefix cache gave at admissions
    num_host_queries: int = 0  # of the tokens asked for, those that the host's blocks were asked for
    num_host_hit_tokens: int = 0  # of the tokens that the prefix cache gave, those loaded from the host
    num_saved_blocks: int = 0  # copied to the host
    num_loaded_blocks: int = 0  # copied from there
    num_forked_tokens: int = 0  # that siblings share with their parent
    num_ahead: int = 0  # rows planned while the one before them was not committed
    num_overrun: int = 0  # tokens sampled after the end of their sequence
    num_drafts: int = 0  # steps of a sequence that verified drafted tokens
    num_draft_tokens: int = 0  # that were verified
    num_accepted_tokens: int = 0  # of these, that count
    accepted_per_pos: list[int] = msgspec.field(default_factory=list)  # drafts whose first, second, … token counts
    num_cached_tokens: int = 0  # of prompts, which the prefix cache had at their first admission
    max_prompt_tokens: int = 0  # of prompts, that the newest step could have next to decodes; 0: no limit


class EngineStats(msgspec.Struct, array_like=True):
    """Counts since the start and, if it is from `Engine.stats`, how full the engine is."""

    scheduler: SchedulerStats = msgspec.field(default_factory=SchedulerStats)
    num_requests: int = 0
    num_prompt_tokens: int = 0  # of all requests that were queued
    num_output_tokens: int = 0
    finish_reasons: dict[str, int] = msgspec.field(default_factory=Counter)  # ended sequences by their reason
    num_running: int = 0  # sequences
    num_waiting: int = 0  # sequences
    num_blocks: int = 0  # of the kind of KV blocks that is fullest
    num_blocks_used: int = 0  # of these, held by sequences
    num_host_blocks: int = 0  # of the kind of KV blocks that is fullest in host memory
    num_host_blocks_used: int = 0  # of these, with content
    num_read_blocks: int = 0  # of KV, read from files since the start
    num_written_blocks: int = 0  # of KV, written to files since the start
    num_step_tokens: int = 0  # of prompts that steps computed, and generated
    step_sizes: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))  # steps, by such tokens
    num_deferred: int = 0  # sequences that wait for something other than room
    running_adapters: list[str] = msgspec.field(default_factory=list)  # names of adapters that these have
    waiting_adapters: list[str] = msgspec.field(default_factory=list)
    num_retained_blocks: int = 0  # of KV, of all kinds, that requests want to be kept
    num_retained_found: int = 0  # of these, found by requests after they would have been evicted, since the start
    num_retained_overridden: int = 0  # taken for running sequences before their time was over, since the start

    num_encoded_images: int = 0  # since the start, each time that one was encoded
    num_encoded_patches: int = 0  # of these
    num_image_hits: int = 0  # images that prompts reached and that were encoded already, since the start
    weights_fault: str = ""  # why nothing is served: an update of the weights failed half-way

    def count_step(self, num_tokens: int) -> None:
        """Count a step by its tokens; `step_sizes` ends with those beyond STEP_TOKENS."""
        self.num_step_tokens += num_tokens
        self.step_sizes = list(self.step_sizes)  # since others hold the old one
        self.step_sizes[bisect_left(STEP_TOKENS, num_tokens)] += 1

    @property
    def kv_cache_usage(self) -> float:
        """The share of the blocks that is held, 0 to 1."""
        return self.num_blocks_used / max(self.num_blocks, 1)

    @property
    def host_cache_usage(self) -> float:
        """The share of the blocks in host memory that have content, 0 to 1."""
        return self.num_host_blocks_used / max(self.num_host_blocks, 1)
