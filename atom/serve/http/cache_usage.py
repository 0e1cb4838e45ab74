"""Count the tokens that a request leaves in the prefix cache to be kept.

count_written(spans, num_cached=48, block_size=16)      # Written(short=32, long=0)

As in Anthropic's usage: tokens up to the last retained beginning of the prompt that were not cached before, those of
the longer time up to the last beginning that has it. Only whole blocks are cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atom.config import ServeConfig
from atom.runtime.types import RetainedPrefix

SHORT_SECONDS = 300.0  # up to which a time counts as Anthropic's 5m


class Written(NamedTuple):
    """Tokens of a prompt that were computed and are kept."""

    short: int = 0  # for Anthropic's 5m
    long: int = 0  # for its 1h

    @property
    def total(self) -> int:
        return self.short + self.long


def count_written(spans: Sequence[RetainedPrefix], num_cached: int, block_size: int) -> Written:
    """spans: the beginnings of the prompt that are retained"""
    ends = [(span.num_tokens // block_size * block_size, span.seconds > SHORT_SECONDS) for span in spans]
    last_long = max([end for end, is_long in ends if is_long], default=0)
    last = max([end for end, _ in ends], default=0)
    long = max(last_long - num_cached, 0)
    return Written(max(last - num_cached, 0) - long, long)


def retains(serve: ServeConfig) -> bool:
    """Whether the server keeps any prefix."""
    return serve.enable_prefix_caching and serve.cache_retention_share > 0
