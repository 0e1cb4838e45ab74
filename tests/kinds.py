"""State kinds for tests of what plans and schedules blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from atom.runtime.types import StateKind
from atom.state_rules import EveryRule, LatestRule, TokenRule, WindowRule


def full_kind(token_bytes: int = 1, block_tokens: int = 4, name: str = "full") -> StateKind:
    return StateKind(name, TokenRule(), token_bytes * block_tokens, block_tokens)


def window_kind(window: int, token_bytes: int = 1, block_tokens: int = 4, name: str = "window") -> StateKind:
    return StateKind(name, WindowRule(window), token_bytes * block_tokens, block_tokens)


def every_kind(every: int, token_bytes: int = 1, block_tokens: int = 4) -> StateKind:
    """token_bytes: a token's part of its entry"""
    stride = max(every // block_tokens, 1)
    size = block_tokens * stride
    return StateKind(f"every_{every}", EveryRule(every), token_bytes * size, size, stride)


def recurrent_kind(state_bytes: int = 1, block_tokens: int = 4) -> StateKind:
    return StateKind("state", LatestRule(), state_bytes, block_tokens)


def in_blocks(kinds: Iterable[StateKind], block_tokens: int) -> list[StateKind]:
    """The kinds with blocks of another size."""
    return [
        every_kind(kind.rule.every, kind.bytes_per_token, block_tokens)
        if isinstance(kind.rule, EveryRule)
        else StateKind(kind.name, kind.rule, kind.bytes_per_token * block_tokens, block_tokens)
        for kind in kinds
    ]


def cells_of(kind: StateKind, start: int, stop: int, block_size: int) -> Iterator[tuple[int, int, int]]:
    """The entries that tokens start to stop complete: the last token of each, its place in the table, in the block."""
    every = kind.rule.entry_tokens
    for position in range(start, stop):
        if (position + 1) % every == 0:
            yield position, position // block_size, position % block_size // every
