"""State rules: which entries of a sequence a layer keeps; no torch.

Pools, plans, prefix hits and limits ask the rule, and nothing else about a model. Positions and counts are in tokens.

    TokenRule().first_visible(100)      # 0: a query reads the entries of all tokens up to its own
    WindowRule(16).first_visible(100)   # 85: of the last 16
    WindowRule(16).num_read(100, 104)   # 19: what the queries of 4 tokens read
    EveryRule(4).num_read(100, 104)     # 26: an entry for each 4 tokens, once they are all there
    LatestRule().first_visible(100)     # 99: what the token before it left
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class Rule(msgspec.Struct, frozen=True):
    """Entries of tokens, of which a query reads those from `first_visible` up to its own."""

    keeps_all: ClassVar[bool]  # whether a sequence needs all its entries until it ends
    in_slot: ClassVar[bool] = False  # whether the newest entry is in the sequence's slot, and blocks copy some of them

    @property
    def name(self) -> str:
        """The name of the kind of layers that have this rule."""
        raise NotImplementedError

    @property
    def entry_tokens(self) -> int:
        """Consecutive tokens that have an entry together, from a multiple of this number on."""
        return 1

    def first_visible(self, query: int) -> int:
        """The first position whose entry a query at this position reads; earlier ones are needed no more."""
        raise NotImplementedError

    def num_read(self, start: int, stop: int) -> int:
        """The number of entries that queries at positions start to stop read, each once."""
        return stop - self.first_visible(start)


class TokenRule(Rule, frozen=True, tag="token"):
    """A query reads all entries: full attention."""

    keeps_all = True

    @property
    def name(self) -> str:
        return "full"

    def first_visible(self, query: int) -> int:
        return 0


class WindowRule(Rule, frozen=True, tag="window"):
    """A query reads the last entries: sliding-window attention."""

    window: int  # tokens, the query's own included
    keeps_all = False

    @property
    def name(self) -> str:
        return f"window_{self.window}"

    def first_visible(self, query: int) -> int:
        return max(query - self.window + 1, 0)


class EveryRule(Rule, frozen=True, tag="every"):
    """A query reads the entries of all runs of `every` tokens that end at or before it: compressed attention."""

    every: int  # tokens; the last of them writes the entry
    keeps_all = True

    @property
    def name(self) -> str:
        return f"every_{self.every}"

    @property
    def entry_tokens(self) -> int:
        return self.every

    def first_visible(self, query: int) -> int:
        return 0

    def num_read(self, start: int, stop: int) -> int:
        return stop // self.every


class LatestRule(Rule, frozen=True, tag="latest"):
    """Each token writes over the entry of the one before it: recurrent state."""

    keeps_all = False
    in_slot = True

    @property
    def name(self) -> str:
        return "state"

    def first_visible(self, query: int) -> int:
        return max(query - 1, 0)

    def num_read(self, start: int, stop: int) -> int:
        return min(start, 1)


StateRule = TokenRule | WindowRule | EveryRule | LatestRule
