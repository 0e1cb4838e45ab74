"""Allocate KV blocks to sequences, by cache kind; no tensors.

Room, sharing, prefix hits and the plan of memory are decided here.

    cache = KVCache([CacheKind("full", 2048)], {"full": 1024}, block_size=16, enable_prefix_caching=True)
    sequence.num_computed = cache.match_prefix(sequence)    # fills sequence.blocks with what is there already
    cache.allocate(sequence, 40)                            # room for the KV of positions 0 to 39; the step runs
    sequence.num_computed = 40
    cache.commit(sequence)                                  # its 2 full blocks are prefixes for others from now on
    cache.free(sequence)                                    # and stay so until their room is needed

Each cache kind has a pool. Entry i of a sequence's table is the block of positions i * block_size and on, 0 for none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from atom.errors import CapacityError, ConfigError
from atom.runtime.prefix_cache import TOKEN_BYTES, Prefix, PrefixCache, pack
from atom.runtime.types import CacheKind, Sequence, StepLimits


def num_blocks_needed(kind: CacheKind, block_size: int, num_tokens: int, step: int = 1) -> int:
    """The most blocks that a sequence holds while it grows to `num_tokens`, `step` tokens at a time."""
    whole = -(-num_tokens // block_size)
    if kind.window is None:
        return whole
    span = kind.window - 1 + step  # tokens that a step's queries see, wherever blocks begin
    return min(whole, (span - 2) // block_size + 2 + 1)  # and the block that `commit` keeps for siblings


def plan_memory(
    kinds: SequenceOf[CacheKind],
    block_size: int,
    limits: StepLimits,
    *,
    memory_bytes: int | None = None,
    num_blocks: int | None = None,
    room: str = "there are {has}",
) -> dict[str, int]:
    """Blocks of each pool by cache kind, block 0 included: of `memory_bytes` together, or `num_blocks` without it.

    All kinds get equally many, but a window kind no more than `max_num_seqs` windows and a step can fill.
    Where they do not hold one sequence of `max_model_len`: CapacityError for `memory_bytes`, ConfigError for
    `num_blocks`; room: what to say of the memory.
    """
    max_model_len, max_step = limits.max_model_len, limits.max_num_batched_tokens
    step_blocks = -(-max_step // block_size)
    useful = {
        kind.name: limits.max_num_seqs * num_blocks_needed(kind, block_size, max_model_len) + step_blocks
        for kind in kinds
        if kind.window is not None
    }

    def equal(count: int) -> dict[str, int]:
        return {kind.name: 1 + min(count, useful.get(kind.name, count)) for kind in kinds}

    def alone(length: int) -> dict[str, int]:
        step = min(length, max_step)
        return {kind.name: 1 + num_blocks_needed(kind, block_size, length, step) for kind in kinds}

    def size(blocks: Mapping[str, int]) -> int:
        return sum(blocks[kind.name] * block_size * kind.bytes_per_token for kind in kinds)

    least = alone(max_model_len)
    if num_blocks is not None:
        given, needed = equal(num_blocks), max(least.values()) - 1
        if any(given[name] < blocks for name, blocks in least.items()):
            raise ConfigError(
                f"serve.num_kvcache_blocks={num_blocks} hold no sequence of serve.max_model_len={max_model_len}, which "
                f"takes {needed} blocks of {block_size} tokens: set serve.num_kvcache_blocks={needed} or more, or "
                f"serve.max_model_len={num_blocks * block_size} or less"
            )
        return given
    assert memory_bytes is not None, "plan_memory needs memory_bytes or num_blocks"
    if size(least) > memory_bytes:
        length = bisect_right(range(1, max_model_len), memory_bytes, key=lambda length: size(alone(length)))
        raise CapacityError(
            f"the KV of one sequence of serve.max_model_len={max_model_len} takes {size(least)} bytes, "
            + room.format(has=memory_bytes, needs=size(least))
            + (f" or lower serve.max_model_len to {length}" if length else "")
        )

    def plan(count: int) -> dict[str, int]:
        return {name: max(blocks, least[name]) for name, blocks in equal(count).items()}

    counts = range(memory_bytes // (block_size * min(kind.bytes_per_token for kind in kinds)) + 1)
    return plan(bisect_right(counts, memory_bytes, key=lambda count: size(plan(count))) - 1)


class BlockPool:
    """The blocks of one cache kind: held by tables, free and blank, or free and cached until they are taken."""

    def __init__(self, kind: CacheKind, num_blocks: int, prefixes: PrefixCache) -> None:
        assert num_blocks > 1, f"{kind.name}: a pool needs a block beside block 0"
        self.kind, self.name, self.window = kind, kind.name, kind.window
        self.num_blocks = num_blocks
        self.num_holders = [0] * num_blocks
        self.prefix: list[Prefix | None] = [None] * num_blocks  # whose last tokens the block holds
        self.blank = list(range(num_blocks - 1, 0, -1))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._prefixes = prefixes

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.cached)

    def take(self) -> int:
        if self.blank:
            block = self.blank.pop()
        else:
            block, _ = self.cached.popitem(last=False)
            prefix, self.prefix[block] = self.prefix[block], None
            assert prefix, "a cached block has a prefix"
            self._prefixes.forget(prefix, self.name)
        self.num_holders[block] = 1
        return block

    def share(self, block: int) -> int:
        if not self.num_holders[block]:
            del self.cached[block]
        self.num_holders[block] += 1
        return block

    def release(self, block: int) -> None:
        self.num_holders[block] -= 1
        if self.num_holders[block]:
            return
        if self.prefix[block]:
            self.cached[block] = None
        else:
            self.blank.append(block)

    def publish(self, block: int, prefix: Prefix) -> None:
        self.prefix[block] = prefix
        prefix.blocks[self.name] = block

    def first_seen(self, query: int, block_size: int) -> int:
        """The index of the first block that a query at this position sees."""
        return 0 if self.window is None else max(query - self.window + 1, 0) // block_size


class KVCache:
    """All pools of one model, the tables in `Sequence.blocks`, and the prefix cache."""

    def __init__(
        self,
        kinds: SequenceOf[CacheKind],
        num_blocks: Mapping[str, int],
        block_size: int,
        *,
        enable_prefix_caching: bool,
        salt: bytes = b"",
    ) -> None:
        """num_blocks: with block 0, where padding reads and writes. salt: all that the KV of this engine depends on."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefixes = PrefixCache()
        self.pools = [BlockPool(kind, num_blocks[kind.name], self.prefixes) for kind in kinds]
        self._full = [pool for pool in self.pools if pool.window is None]
        self._windows = [pool for pool in self.pools if pool.window is not None]
        self._salt = salt
        self._published: dict[Sequence, tuple[Prefix, int]] = {}  # its last prefix in the tree, and how many blocks

    @property
    def num_free(self) -> dict[str, int]:
        """Free blocks by cache kind."""
        return {pool.name: pool.num_free for pool in self.pools}

    @property
    def fullest(self) -> tuple[int, int]:
        """Used blocks and all blocks of the fullest pool."""
        counts = ((pool.num_blocks - 1 - pool.num_free, pool.num_blocks - 1) for pool in self.pools)
        return max(counts, key=lambda count: count[0] / count[1])

    @property
    def usage(self) -> float:
        """The share of used blocks in the fullest pool."""
        num_used, num_blocks = self.fullest
        return num_used / num_blocks

    def has_room(self, num_tokens: int, num_cached: int, spare: int) -> bool:
        """Whether a sequence of that many tokens, of which some are cached, fits now and leaves so many blocks."""
        needs = ((pool, num_blocks_needed(pool.kind, self.block_size, num_tokens)) for pool in self.pools)
        return all(pool.num_free - spare >= needed - num_cached // self.block_size for pool, needed in needs)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of that many tokens fits when it is alone."""
        needs = ((pool, num_blocks_needed(pool.kind, self.block_size, num_tokens)) for pool in self.pools)
        return all(needed < pool.num_blocks for pool, needed in needs)

    def match_prefix(self, sequence: Sequence) -> int:
        """Give the sequence the longest prefix that all kinds have, less than all its tokens; its number of tokens."""
        if path := self._find_prefix(sequence):
            tables = {pool.name: [prefix.blocks.get(pool.name, 0) for prefix in path] for pool in self.pools}
            self._share(sequence, len(path), tables)
            self._set_published(sequence, path[-1], len(path))
        return len(path) * self.block_size

    def num_cached(self, sequence: Sequence) -> int:
        """The number of tokens that `match_prefix` would give the sequence."""
        return len(self._find_prefix(sequence)) * self.block_size

    def fork(self, parent: Sequence, child: Sequence) -> int:
        """Give the child the full blocks, less than all, of the prompt that its parent computed; their tokens.

        0 where a window of the parent has moved past them, which it has not in the step after its prompt was computed.
        """
        num_shared = (len(parent.prompt) - 1) // self.block_size
        query = num_shared * self.block_size
        assert parent.num_computed >= query, f"{parent.id}: forked before its prompt was computed"
        for pool in self._windows:
            if not all(parent.blocks[pool.name][pool.first_seen(query, self.block_size) : num_shared]):
                return 0
        self._share(child, num_shared, parent.blocks)
        return query

    def allocate(self, sequence: Sequence, num_tokens: int, spare: int = 0) -> int:
        """Allocate blocks for positions up to `num_tokens`, leaving `spare` in each pool; the positions that have room.

        These are fewer where a window pool is short, since a shorter step can run; and 0, with nothing taken,
        where not one more token has room. A full kind takes room for all known tokens at once: a prompt that has begun
        never waits for the rest.
        """
        known = max(num_tokens, sequence.num_tokens)
        for pool in self.pools:
            goal = known if pool.window is None else num_tokens
            room = len(sequence.blocks.setdefault(pool.name, [])) * self.block_size
            if room < goal:
                room += max(pool.num_free - spare, 0) * self.block_size
                if room < goal and pool.window is None:
                    return 0
                num_tokens = min(num_tokens, room)
        if num_tokens <= max(sequence.num_computed, sequence.num_planned):
            return 0
        for pool in self.pools:
            goal = known if pool.window is None else num_tokens
            table = sequence.blocks[pool.name]
            while len(table) * self.block_size < goal:
                table.append(pool.take())
        return num_tokens

    def commit(self, sequence: Sequence) -> None:
        """Publish the blocks that `num_computed` tokens fill, and release those that no later query sees."""
        if self.enable_prefix_caching:
            self._publish(sequence)
        for pool in self._windows:
            query = sequence.num_computed
            if query == len(sequence.prompt):  # siblings begin at its last full block, in the next step
                query = (query - 1) // self.block_size * self.block_size
            table = sequence.blocks[pool.name]
            index = pool.first_seen(query, self.block_size) - 1
            while index >= 0 and table[index]:
                pool.release(table[index])
                table[index] = 0
                index -= 1

    def free(self, sequence: Sequence) -> None:
        for pool in self.pools:
            for block in reversed(sequence.blocks.get(pool.name, [])):  # what follows a prefix goes before it
                if block:
                    pool.release(block)
        sequence.blocks = {}
        if sequence in self._published:
            self.prefixes.leave(self._published.pop(sequence)[0])

    def _find_prefix(self, sequence: Sequence) -> list[Prefix]:
        """The longest prefix that all kinds have, less than all the sequence's tokens, block by block."""
        if not self.enable_prefix_caching:
            return []
        limit = (sequence.num_tokens - 1) // self.block_size
        content, width = pack(sequence.tokens(0, limit * self.block_size)), self.block_size * TOKEN_BYTES
        prefix = self.prefixes.find(None, self._salt + sequence.salt)
        path: list[Prefix] = []
        since = {pool.name: 0 for pool in self._windows}  # where the unbroken run of its blocks begins
        num_hit = 0
        for index in range(limit):
            prefix = prefix and self.prefixes.find(prefix, content[index * width : (index + 1) * width])
            if not prefix or any(pool.name not in prefix.blocks for pool in self._full):
                break
            path.append(prefix)
            since = {name: first if name in prefix.blocks else index + 1 for name, first in since.items()}
            query = (index + 1) * self.block_size
            if all(since[pool.name] <= pool.first_seen(query, self.block_size) for pool in self._windows):
                num_hit = index + 1
        return path[:num_hit]

    def _publish(self, sequence: Sequence) -> None:
        prefix, index = self._published.get(sequence, (None, 0))
        num_full = sequence.num_computed // self.block_size
        if index >= num_full:
            return
        prefix = prefix or self.prefixes.extend(None, self._salt + sequence.salt)
        if not prefix:
            return
        while index < num_full:
            tokens = sequence.tokens(index * self.block_size, (index + 1) * self.block_size)
            child = self.prefixes.extend(prefix, pack(tokens))
            if not child:  # another prefix has its hash: tried again at the next commit
                break
            for pool in self.pools:
                block = sequence.blocks[pool.name][index]
                if block and pool.name not in child.blocks:
                    pool.publish(block, child)
            prefix, index = child, index + 1
        self._set_published(sequence, prefix, index)

    def _set_published(self, sequence: Sequence, prefix: Prefix, num_blocks: int) -> None:
        prefix.num_users += 1
        if sequence in self._published:
            self.prefixes.leave(self._published[sequence][0])
        self._published[sequence] = prefix, num_blocks

    def _share(self, sequence: Sequence, num_blocks: int, tables: Mapping[str, list[int]]) -> None:
        """Share the first `num_blocks` blocks of other tables: those that the sequence's next query sees."""
        for pool in self.pools:
            first = pool.first_seen(num_blocks * self.block_size, self.block_size)
            shared = [pool.share(block) for block in tables[pool.name][first:num_blocks]]
            sequence.blocks[pool.name] = [0] * first + shared
