"""Manage the KV blocks of one state kind: held, free or cached; no tensors.

    pool = BlockPool(StateKind("full", TokenRule(), 32768, 16), 1024, PrefixCache())
    block = pool.take()                                 # blank, else the least recently used of the cached
    pool.publish(block, prefix)                         # others find it, and share it
    pool.release(block)                                 # by its last holder: cached

Of the cached blocks, some may be retained: `RetainedBlocks` has those that were passed over. A pool may be backed by a
`HostPool` in host memory, where the content of cached blocks is saved. A `HostPool` may be backed by files.
"""

from __future__ import annotations

from itertools import islice

from atom.runtime.kv.eviction import EvictionOrder
from atom.runtime.kv.explain import EvictionLog
from atom.runtime.kv.files import KVFiles, digest_of
from atom.runtime.kv.prefix_cache import Prefix, PrefixCache
from atom.runtime.kv.retention import RetainedBlocks, RetentionLimits
from atom.runtime.types import StateKind

SKIPPED_SHARE = 0.25  # of a pool, for what windows have moved past; more of it is evicted first
SAVED_AHEAD = 256  # blocks of a pool that are to be on the host before they are needed


class BlockPool:
    """The blocks of one state kind: held by tables, free and blank, or free and cached until they are taken."""

    def __init__(
        self,
        kind: StateKind,
        num_blocks: int,
        prefixes: PrefixCache,
        host: HostPool | None = None,
        retention: RetentionLimits = RetentionLimits(),  # noqa: B008
        log: EvictionLog | None = None,
    ) -> None:
        """
        host: the pool in host memory where the content of cached blocks is saved; None: it is lost
        retention: of cached blocks
        log: of the prefixes that leave the pool; None: nobody asks
        """
        assert num_blocks > 1, f"{kind.name}: a pool needs a block besides block 0"
        self.kind, self.name = kind, kind.name  # the name is that of its blocks in `Prefix`
        self.keeps_all = kind.rule.keeps_all
        self.num_blocks = num_blocks
        self.num_holders = [0] * num_blocks
        self.prefix: list[Prefix | None] = [None] * num_blocks  # whose last tokens the block holds
        self.blank = list(range(num_blocks - 1, 0, -1))
        self.cached = EvictionOrder(int(num_blocks * SKIPPED_SHARE))
        self.retained = RetainedBlocks(self.cached, num_blocks - 1, retention)
        self.host = host
        self.unwritten: set[int] = set()  # published ones that the step which is planned will write
        self.saves: list[tuple[int, int]] = []  # of the next plan: blocks, and the host's to save them to
        self.is_overwritten = False  # one of these blocks is taken already
        self._prefixes = prefixes
        self._log = log

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.cached) + self.retained.num_passed

    @property
    def has_idle(self) -> bool:
        """Whether a block is free that is not retained."""
        return bool(self.blank) or self.retained.find_next() is not None

    @property
    def newest_first(self) -> list[int]:
        """The free blocks with content: those that were retained, then the others, most recently used first."""
        return [*reversed(self.retained.passed), *self.cached.newest_first]

    def take(self, *, to_load: bool = False) -> int:
        """Take a free block. to_load: for a load from the host, which runs after the save of what the block held"""
        if self.blank:
            block = self.blank.pop()
        else:
            found = self.retained.find_next()
            block = self.retained.find_least() if found is None else found
            self._evict(block, to_load)
            if self._log is not None:
                self._log.add(self.name, self._prefix_of(block).key)
            self.drop(block)
            if block in self.cached:
                self.cached.remove(block)
        self.num_holders[block] = 1
        return block

    def drop(self, block: int) -> None:
        """Drop the prefix whose last tokens a block holds."""
        self._prefixes.forget(self._prefix_of(block), self.name)
        self.prefix[block] = None
        self.retained.forget(block)

    def forget(self) -> None:
        """Drop all prefixes, and the copies that were to come with the next plan; no block is held."""
        self.retained.clear()
        for block in list(self.cached):
            self.cached.remove(block)
            self.drop(block)
            self.blank.append(block)
        self.saves, self.is_overwritten = [], False

    def discard(self, block: int) -> None:
        """Drop a cached block that is not retained; it is blank then."""
        self.cached.remove(block)
        self.drop(block)
        self.blank.append(block)

    def share(self, block: int) -> int:
        if not self.num_holders[block]:
            if block in self.cached:
                self.cached.remove(block)
            else:
                self.retained.take_back(block)
        self.num_holders[block] += 1
        return block

    def release(self, block: int, *, is_skipped: bool = False) -> None:
        """Give up a hold. is_skipped: the window of its holder has moved past the block"""
        self.num_holders[block] -= 1
        if self.num_holders[block]:
            return
        if self.prefix[block]:
            self.cached.add(block, is_skipped=is_skipped)
        else:
            self.blank.append(block)

    def publish(self, block: int, prefix: Prefix) -> None:
        self.prefix[block] = prefix
        prefix.blocks[self.name] = block

    def unpublish(self, block: int) -> None:
        """Drop the prefix of a block that was published before the step that writes it, which did not take place."""
        self.unwritten.remove(block)
        self.drop(block)

    def drain_saves(self, max_ahead: int) -> list[tuple[int, int]]:
        """Return the saves for the next plan, and forget them here.

        max_ahead: max number of further blocks to save, of those that will be taken soon
        """
        assert self.host is not None, "only a pool with one on the host saves blocks"
        ahead = min(SAVED_AHEAD, self.host.num_blocks // 2) - len(self.blank)
        for block in islice(self.cached, max(ahead, 0)):
            if max_ahead <= 0:
                break
            max_ahead -= self._save(block)
        saves, self.saves, self.is_overwritten = self.saves, [], False
        return saves

    def has(self, prefix: Prefix, on_host: bool, is_written: bool) -> bool:
        """Whether the pool, or the host with `on_host`, holds the prefix's last tokens.

        is_written: blocks that the step being planned will write do not count
        """
        if (block := prefix.blocks.get(self.name)) is not None:
            return not (is_written and block in self.unwritten)
        return on_host and self.host is not None and self.host.name in prefix.blocks

    def _evict(self, block: int, to_load: bool) -> None:
        """Save the content of a cached block that is taken."""
        self.is_overwritten |= self._save(block) and not to_load

    def _save(self, block: int) -> bool:
        """Save a cached block that the host does not have, if it has room; whether the next plan copies it."""
        prefix, host = self._prefix_of(block), self.host
        if host is None or host.name in prefix.blocks or not host.can_refill:
            return False
        copy = host.refill(prefix, is_skipped=self.cached.is_skipped(block))
        self.retained.copy_claims(block, host.retained, copy)
        self.saves.append((block, copy))
        return True

    def _prefix_of(self, block: int) -> Prefix:
        prefix = self.prefix[block]
        assert prefix, "a cached block has a prefix"
        return prefix


class HostPool(BlockPool):
    """The blocks in host memory of one state kind, whose content may go to files when they are taken."""

    def __init__(
        self,
        kind: StateKind,
        num_blocks: int,
        prefixes: PrefixCache,
        files: KVFiles | None,
        retention: RetentionLimits = RetentionLimits(),  # noqa: B008
    ) -> None:
        super().__init__(kind, num_blocks, prefixes, retention=retention)
        self.name = f"host:{kind.name}"
        self.fresh: set[int] = set()  # blocks that the next plan's copies write to
        self._files = files
        self._writes: list[tuple[int, bytes]] = []  # of the next plan: blocks that go to files, by key
        self._fills: list[tuple[int, object]] = []  # of the next plan: blocks that come from files

    @property
    def can_refill(self) -> bool:
        """Whether a block is free that is not retained, and that no copy of the next plan reads or writes."""
        if self.blank:
            return True
        found = self.retained.find_next()
        return found is not None and found not in self.fresh

    def refill(self, prefix: Prefix, content: object = None, *, is_skipped: bool = False) -> int:
        """Take a block for the content of a prefix, in `release`'s queue.

        content: read from a file; None: a save brings it
        """
        block = self.take()
        self.publish(block, prefix)
        self.release(block, is_skipped=is_skipped)
        self.fresh.add(block)
        if content is not None:
            self._fills.append((block, content))
        return block

    def drain_copies(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, object]]]:
        """Return the blocks that the next plan writes to files and those it fills from files, and forget them here."""
        copies = self._writes, self._fills
        self._writes, self._fills = [], []
        self.fresh.clear()
        return copies

    def forget(self) -> None:
        super().forget()
        self.drain_copies()

    def _evict(self, block: int, to_load: bool) -> None:
        if self._files is not None:
            self._writes.append((block, digest_of(self._prefix_of(block))))
