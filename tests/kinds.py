"""State kinds for tests of what plans and schedules blocks."""

from __future__ import annotations

from collections.abc import Iterable

from atom.runtime.types import StateKind
from atom.state_rules import LatestRule, TokenRule, WindowRule


def full_kind(token_bytes: int = 1, block_tokens: int = 4, name: str = "full") -> StateKind:
    return StateKind(name, TokenRule(), token_bytes * block_tokens, block_tokens)


def window_kind(window: int, token_bytes: int = 1, block_tokens: int = 4, name: str = "window") -> StateKind:
    return StateKind(name, WindowRule(window), token_bytes * block_tokens, block_tokens)


def recurrent_kind(state_bytes: int = 1, block_tokens: int = 4) -> StateKind:
    return StateKind("state", LatestRule(), state_bytes, block_tokens)


def in_blocks(kinds: Iterable[StateKind], block_tokens: int) -> list[StateKind]:
    """The kinds with blocks of another size."""
    return [StateKind(kind.name, kind.rule, kind.bytes_per_token * block_tokens, block_tokens) for kind in kinds]
