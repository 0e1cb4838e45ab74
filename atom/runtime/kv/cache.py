"""Allocate KV blocks to sequences, by state kind; no tensors.

Room, sharing and prefix hits are decided here; `plan.py` computes the number of blocks, `block_pool.py` chooses the one
that is taken next.

    cache = KVCache(kinds, {"full": 1024}, block_size=16, enable_prefix_caching=True)
    sequence.num_computed = cache.match_prefix(sequence)    # fills sequence.blocks with what is there already
    cache.allocate(sequence, 40)                            # room for the KV of positions 0 to 39; the step runs
    sequence.num_computed = 40
    cache.commit(sequence)                                  # its 2 full blocks are prefixes for others from now on
    cache.free(sequence)                                    # and stay so until their room is needed

Each state kind has a pool. Entry i of a sequence's table is the block of positions i * block_size and on, 0 for none;
of recurrent state, which is in the sequence's slot, a copy of it after these positions. A step copies the state of its
rows to such blocks, where `chunk_end` and `allocate` want them, and a sequence that begins with a cached prefix has its
state copied to its slot. If an entry is of more tokens than a block, the last block of these tokens has it, and others
have none (`StateKind.places`).

A prompt's blocks are prefixes for others as soon as a step that computes them is planned:

    cache.begin_plan()                                      # what earlier plans compute is there for this one
    cache.publish_planned(sequence, 40)                     # before the step runs
    lost = cache.retract(sequence, 0)                       # if it did not take place: who reads these begins again

In each layer a step writes the entries of all its tokens before a prompt's queries read any. So a sequence may begin
after blocks that the same step writes (`shares_step`), with two exceptions. Copies of recurrent state come at the end
of a step. And for a row of one token, a decode, a GPU fetches older entries while the kernel that writes is running:
such a hit is a block shorter.

A pool may be backed by another one in host memory. What its cached blocks hold is copied there before they are reused,
be it an evicted prefix, a preempted sequence or an idle conversation. A prefix that only the host holds gets blocks
again and is copied back. These copies go with the plan of a step:

    plan = Plan(rows, num_decodes, cache.drain_copies(planned))    # saves come before loads

Loads of a long prefix take longer than a step. So each plan has a part of them, and its step waits for none: the
sequence joins the step after the last part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Set
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from atom.runtime.kv.block_pool import BlockPool, HostPool
from atom.runtime.kv.explain import CACHING_OFF, PrefixHistory
from atom.runtime.kv.files import Fetch, KVFiles, chain, digest_of
from atom.runtime.kv.prefix_cache import TOKEN_BYTES, Prefix, PrefixCache, count_common, pack
from atom.runtime.kv.retention import RetentionCounts, RetentionLimits, retain
from atom.runtime.types import BlockCopies, PrefixHit, Sequence, StateKind, SwapCosts

SAVED_BYTES = 64 << 20  # max bytes that are saved during a step, which takes longer than these copies
LOADED_BYTES = 256 << 20  # min load budget of a step; 5 ms of PCIe 5, about a decode step of an 8B model


class Cached(NamedTuple):
    """The cached prefix of a sequence."""

    num_tokens: int
    num_shared: int  # of these, in blocks that it need not allocate


def begin_of(sequence: Sequence) -> int:
    """Where the sequence's next step begins."""
    return max(sequence.num_computed, sequence.num_planned)


class KVCache:
    """All pools of one model, the tables in `Sequence.blocks`, and the prefix cache."""

    def __init__(
        self,
        kinds: SequenceOf[StateKind],
        num_blocks: Mapping[str, int],
        block_size: int,
        *,
        enable_prefix_caching: bool,
        salt: bytes = b"",
        num_host_blocks: Mapping[str, int] | None = None,
        costs: SwapCosts | None = None,
        files: KVFiles | None = None,
        loaded_bytes: int = LOADED_BYTES,
        state_interval: int = 16,
        retention: RetentionLimits = RetentionLimits(),  # noqa: B008
    ) -> None:
        """
        num_blocks: of each pool, by state kind, including block 0, where padding reads and writes
        salt: all that the KV of this engine depends on
        num_host_blocks: of each pool in host memory, including its block 0; None: there are none
        costs: of loading from host memory; None: it always pays
        files: where blocks go that are evicted from host memory; None: they are lost
        loaded_bytes: load budget of a step, to which the time that its tokens take adds
        state_interval: tokens of an answer between copies of its recurrent state
        retention: of prefixes that requests ask to keep
        """
        self.block_size, self._width = block_size, block_size * TOKEN_BYTES
        self.enable_prefix_caching = enable_prefix_caching
        self.prefixes = PrefixCache()
        self.costs, self._loaded_bytes = costs, loaded_bytes
        self.host_pools = {
            kind.name: HostPool(kind, num_host_blocks[kind.name], self.prefixes, files, retention)
            for kind in kinds
            if num_host_blocks is not None
        }
        self.history = PrefixHistory(block_size, salt, retention.clock)
        self.pools = [
            BlockPool(
                kind,
                num_blocks[kind.name],
                self.prefixes,
                self.host_pools.get(kind.name),
                retention,
                self.history.evictions if enable_prefix_caching else None,
            )
            for kind in kinds
        ]
        self.files = files
        self._paged = [pool for pool in self.pools if not pool.kind.rule.in_slot]  # with an entry for each token
        self._recurrent = [pool for pool in self.pools if pool.kind.rule.in_slot]
        self._releasing = [pool for pool in self.pools if not pool.kind.rule.keeps_all]
        self._interval = -(-state_interval // block_size) * block_size
        self.may_chain = True  # a row of the step that is planned may read what another one writes
        self.is_chained = False  # and does so
        # the copy of its state that it published last, and of which prefix, in its answer
        self._last: dict[tuple[Sequence, BlockPool], tuple[int, Prefix]] = {}
        self._salt = salt
        self._published: dict[Sequence, tuple[Prefix, int]] = {}  # its last prefix in the tree, and how many blocks
        self._loads: dict[Sequence, dict[str, list[tuple[int, int]]]] = {}  # by kind: blocks, and those of the host
        self._fetches: dict[Sequence, Fetch] = {}

    @property
    def num_free(self) -> dict[str, int]:
        """Free blocks by state kind."""
        return {pool.name: pool.num_free for pool in self.pools}

    @property
    def fullest(self) -> tuple[int, int]:
        """Used blocks and all blocks of the fullest pool."""
        counts = ((pool.num_blocks - 1 - pool.num_free, pool.num_blocks - 1) for pool in self.pools)
        return max(counts, key=lambda count: count[0] / count[1])

    @property
    def host_usage(self) -> tuple[int, int]:
        """Used blocks and all blocks of the fullest pool on the host."""
        pools = self.host_pools.values()
        counts = ((pool.num_blocks - 1 - len(pool.blank), pool.num_blocks - 1) for pool in pools)
        return max(counts, default=(0, 0), key=lambda count: count[0])

    @property
    def retention(self) -> RetentionCounts:
        """What became of the retained blocks."""
        return sum((pool.retained.counts for pool in self.pools), RetentionCounts())

    @property
    def shares_step(self) -> bool:
        """Whether a sequence may begin after blocks that the step which is planned writes."""
        return self.may_chain and not self._recurrent

    def begin_plan(self) -> None:
        """Begin to plan a step: those planned before it will have run, or were retracted."""
        for pool in self.pools:
            pool.unwritten.clear()
        self.is_chained = False

    def publish_planned(self, sequence: Sequence, end: int) -> None:
        """Publish the blocks of the sequence's prompt that it fills in a step planned up to `end`, before it runs."""
        if self.enable_prefix_caching:
            self._publish(sequence, min(end, len(sequence.prompt)), begin_of(sequence) // self.block_size)

    def retract(self, sequence: Sequence, start: int) -> set[tuple[str, int]]:
        """Take back what was published of a step from `start` on that did not take place; these blocks, by kind."""
        first, lost = start // self.block_size, set()
        prefix, num_published = self._published.get(sequence, (None, 0))
        if num_published > first:
            for _ in range(first, num_published):
                assert prefix, "what is published follows the root"
                prefix = prefix.parent
            assert prefix, "what is published follows the root"
            self._set_published(sequence, prefix, first)
        for pool in self.pools:
            for block in pool.unwritten.intersection(sequence.blocks.get(pool.name, [])[first:]):
                pool.unpublish(block)
                lost.add((pool.name, block))
        return lost

    def reads(self, sequence: Sequence, blocks: set[tuple[str, int]]) -> bool:
        """Whether the sequence begins after one of these blocks, by kind."""
        num_before = begin_of(sequence) // self.block_size
        return any((kind, block) in blocks for kind, table in sequence.blocks.items() for block in table[:num_before])

    def count_shared(self, maker: Sequence, sequence: Sequence, known: int) -> int:
        """The tokens of a prompt's blocks after which another sequence can begin; 0: no more than those known."""
        if maker.salt != sequence.salt:
            return 0
        size, next_block = self.block_size, slice(known, known // self.block_size * self.block_size + self.block_size)
        if maker.prompt[next_block] != sequence.prompt[next_block]:  # quick, since most prompts part here
            return 0
        num_shared = min(count_common(maker.prompt, sequence.prompt), sequence.num_tokens - 1) // size * size
        return num_shared if num_shared > known else 0

    def find_kept(self, maker: Sequence, num_shared: int, num_planned: int) -> int:
        """After how many of a prompt's first `num_shared` tokens others can begin, once its steps have come so far.

        Its recurrent state is copied only where a step ends: after so many tokens, if no step has passed them.

        num_planned: tokens of the prompt in the step that is planned and earlier ones
        """
        if not self._recurrent:
            return num_shared
        if num_shared > num_planned >= maker.parting:
            maker.parting = num_shared
        ends = (num_planned // self.block_size * self.block_size, *self._stops(maker))
        return max((end for end in ends if end <= num_shared), default=0)

    @property
    def wants_parting(self) -> bool:
        """Whether a prompt should stop where others part from it, since its state is kept only where a step ends."""
        return self.enable_prefix_caching and bool(self._recurrent)

    def has_room(self, num_tokens: int, num_shared: int, spare: int) -> bool:
        """Whether a sequence fits now and leaves `spare` blocks. num_shared: of its tokens, those in shared blocks"""
        needs = ((pool, pool.kind.blocks(num_tokens)) for pool in self._paged)
        shared = num_shared // self.block_size
        return all(pool.num_free - spare >= needed - len(pool.kind.places(0, shared)) for pool, needed in needs)

    def can_ever_fit(self, num_tokens: int, step: int = 1) -> bool:
        """Whether a sequence of that many tokens fits if it is the only one. step: tokens that it may need at a time"""
        needs = ((pool, pool.kind.blocks(num_tokens, step)) for pool in self.pools)
        return all(needed < pool.num_blocks for pool, needed in needs)

    def match_prefix(self, sequence: Sequence, spare: int = 0) -> int | None:
        """Give the sequence the longest prefix that all kinds have, less than all its tokens; its number of tokens.

        Blocks that only the host has are allocated, to be loaded, if the blocks of all its tokens would leave `spare`
        in each pool; otherwise None, with nothing taken.
        """
        path = self._find_prefix(sequence)
        loaded = (at for at in range(len(path)) if self.host_pools and self._is_loaded(path, at))
        num_shared = next(loaded, len(path))
        if num_shared < len(path) and not self._has_room_to_load(sequence, path, spare):
            return None
        if path:
            tables = {pool.name: [prefix.blocks.get(pool.name, 0) for prefix in path] for pool in self.pools}
            self._share(sequence, len(path), tables)
            self.is_chained |= self._reads_step(path)
            if num_shared < len(path):
                self._load(sequence, path)
        if num_shared:
            self._set_published(sequence, path[num_shared - 1], num_shared)
            self._retain(sequence, self._releasing)
        return len(path) * self.block_size

    def note_admission(self, sequence: Sequence, num_cached: int) -> None:
        """Record an admitted prompt, and where its hit ended if it asks for that."""
        if sequence.params.explain and sequence.parent is None:
            sequence.hit = self._explain(sequence, num_cached)
        if self.enable_prefix_caching:
            self.history.record(sequence)

    def _explain(self, sequence: Sequence, num_cached: int) -> PrefixHit:
        if not self.enable_prefix_caching:
            return PrefixHit(num_cached, CACHING_OFF, num_cached)
        lacks_state = bool(self._recurrent) and sequence.num_matched > num_cached
        pools = self._recurrent if lacks_state else self._paged or self._recurrent
        return self.history.explain(sequence, num_cached, [pool.name for pool in pools], lacks_state=lacks_state)

    def find_cached(self, sequence: Sequence) -> Cached:
        """Count the cached tokens that `match_prefix` would give the sequence."""
        path = self._find_prefix(sequence)
        num_loaded = sum(self._is_loaded(path, at) for at in range(len(path))) if self.host_pools else 0
        return Cached(len(path) * self.block_size, (len(path) - num_loaded) * self.block_size)

    @property
    def pending_loads(self) -> Set[Sequence]:
        """The sequences whose blocks, or some of them, are loaded with later plans."""
        return self._loads.keys()

    def num_loading(self, sequence: Sequence) -> int:
        """The number of the sequence's tokens that are loaded with later plans."""
        loads = self._loads.get(sequence, {})
        return max((len(loads.get(pool.name, [])) * pool.kind.block_tokens for pool in self.pools), default=0)

    def drain_copies(self, planned: Mapping[Sequence, int]) -> BlockCopies | None:
        """Return the copies for the next plan, and forget them here; None if there are none.

        planned: sequences of the plan -> their number of tokens in it
        """
        if not self.host_pools:
            return None
        saves, loads = dict[str, list[tuple[int, int]]](), dict[str, list[tuple[int, int]]]()
        awaited = [each for each in planned if each in self._loads]
        awaits_saves = any(pool.is_overwritten for pool in self.pools)
        for pool in self.pools:
            if saved := pool.drain_saves(SAVED_BYTES // pool.kind.block_bytes or 1):
                saves[pool.name] = saved
        writes, fills = dict[str, list[tuple[int, bytes]]](), dict[str, list[tuple[int, object]]]()
        for kind, host in self.host_pools.items():
            written, filled = host.drain_copies()
            if written:
                writes[kind] = written
            if filled:
                fills[kind] = filled
        budget = math.inf if awaited else self._load_budget(sum(planned.values()))
        for sequence in awaited or list(self._loads):
            budget -= self._take_loads(sequence, budget, loads)
        copies = BlockCopies(writes, fills, saves, loads, awaits_saves, bool(awaited))
        return copies if writes or fills or saves or loads else None

    def fetch(self, sequence: Sequence) -> None:
        """Begin to read the sequence's blocks that only files have."""
        if self.files is None:
            return
        content, path = self._find_path(sequence)
        first = self._count_hit(path, on_host=True)
        num_max = min((pool.num_blocks - 1) * pool.kind.stride for pool in self.host_pools.values())
        content = content[first * self._width : (first + num_max) * self._width]
        if not content:
            return
        key = digest_of(path[first - 1]) if first else chain(b"", self._salt + sequence.salt)
        seconds = math.inf
        if self.costs is not None:  # no longer than it takes to compute them
            seconds = self.costs.compute_token_seconds * (len(content) // TOKEN_BYTES)

        def needs(num_blocks: int) -> dict[str, range]:
            stop, found = first + num_blocks, {}
            for pool in self.pools:
                visible = pool.kind.first_visible(stop * self.block_size)
                places = pool.kind.places(max(visible, first), stop)
                found[pool.name] = range(places.start - first, num_blocks, places.step)
            return found

        whole = [pool.name for pool in self.pools if pool.keeps_all]
        fetch = Fetch(key, content, self._width, needs, whole, first, sequence, time.perf_counter() + seconds)
        self._fetches[sequence] = fetch
        self.files.fetch(fetch)

    def is_fetching(self, sequence: Sequence) -> bool:
        """Whether blocks of the sequence are being read, and it should wait for them."""
        fetch = self._fetches.get(sequence)
        if fetch is not None and fetch.is_late:
            del self._fetches[sequence]
            return False
        return fetch is not None

    def drop_fetch(self, sequence: Sequence) -> None:
        if (fetch := self._fetches.pop(sequence, None)) is not None:
            fetch.is_dropped = True

    def take_fetched(self) -> None:
        """Give blocks that were read a place on the host, where `match_prefix` finds them."""
        for fetch in [] if self.files is None else self.files.take_fetched():
            self._fetches.pop(fetch.sequence, None)
            self._refill(fetch)

    def _refill(self, fetch: Fetch) -> None:
        sequence = fetch.sequence
        prefix = self.prefixes.extend(None, self._salt + sequence.salt)
        content = pack(sequence.tokens(0, fetch.first * self.block_size)) + fetch.content
        for index in range(fetch.first + len(fetch.blocks)):
            if prefix is None:  # another one has its hash
                return
            child = self.prefixes.extend(prefix, content[index * self._width : (index + 1) * self._width])
            if child is None:
                self.prefixes.prune(prefix)
                return
            child.num_users += 1  # while others are evicted
            for pool in self.pools:
                host = self.host_pools[pool.name]
                if (held := child.blocks.get(host.name)) is not None:
                    host.release(host.share(held))  # used last
                elif index >= fetch.first and pool.name not in child.blocks:
                    row = fetch.blocks[index - fetch.first].get(pool.name)
                    if row is not None and host.can_refill:
                        host.refill(child, row)
            child.num_users -= 1
            prefix = child
        self.prefixes.prune(prefix)

    def cached_blocks(self) -> Iterator[tuple[str, int, int, bytes]]:
        """All cached blocks, retained and most recently used ones first.

        Each as its kind, the block or 0, the host's block or 0, and the key of the file.
        """
        for pool in self.pools:
            held = [(block, 0) for block in pool.newest_first]
            host = self.host_pools[pool.name]
            held += [(0, block) for block in host.newest_first if block not in host.fresh]
            for block, copy in held:
                prefix = pool.prefix[block] if block else host.prefix[copy]
                assert prefix, "a cached block has a prefix"
                yield pool.name, block, copy, digest_of(prefix)

    def fork(self, parent: Sequence, child: Sequence) -> int:
        """Share the full blocks of the parent's prompt, less than all of it, with the child; their number of tokens.

        0 if the parent has released some of them, which it has not in the step after its prompt was computed.
        """
        num_shared = (len(parent.prompt) - 1) // self.block_size
        query = num_shared * self.block_size
        assert parent.num_computed >= query, f"{parent.id}: forked before its prompt was computed"
        for pool in self._releasing:
            if not all(parent.blocks[pool.name][pool.kind.first_visible(query) : num_shared]):
                return 0
        self._share(child, num_shared, parent.blocks)
        return query

    def allocate(self, sequence: Sequence, num_tokens: int, spare: int = 0) -> int:
        """Allocate blocks for positions up to `num_tokens`, leaving `spare` in each pool; the number that have room.

        It is smaller if a pool whose blocks are released is short, since a shorter step can run; and 0, with nothing
        taken, if not one more token has room. A kind that keeps all takes room for all known tokens at once, so that a
        prompt that has begun never waits for the rest.
        """
        known = max(num_tokens, sequence.num_tokens)
        for pool in self._paged:
            goal = known if pool.keeps_all else num_tokens
            num_blocks = len(sequence.blocks.setdefault(pool.name, []))
            room = num_blocks * self.block_size
            if room < goal:
                stride = pool.kind.stride
                room = (num_blocks // stride + max(pool.num_free - spare, 0) + 1) * stride - 1
                room *= self.block_size
                if room < goal and pool.keeps_all:
                    return 0
                num_tokens = min(num_tokens, room)
        if num_tokens <= begin_of(sequence):
            return 0
        for pool in self._paged:
            goal = known if pool.keeps_all else num_tokens
            table = sequence.blocks[pool.name]
            own = pool.kind.places(len(table), -(-goal // self.block_size))
            table.extend(pool.take() if index in own else 0 for index in range(len(table), own.stop))
        for pool in self._recurrent:
            table = sequence.blocks.setdefault(pool.name, [])
            last = num_tokens // self.block_size - 1
            table.extend([0] * (last + 1 - len(table)))
            for index in range(begin_of(sequence) // self.block_size, len(table)):  # of a step that was not planned
                if table[index]:
                    pool.release(table[index])
                    table[index] = 0
            for index in (at // self.block_size - 1 for at in self._kept_at(sequence, num_tokens)):
                if not table[index]:
                    if not pool.blank:
                        self._discard_last(sequence, pool)
                    if pool.has_idle:
                        table[index] = pool.take()
        return num_tokens

    def chunk_end(self, sequence: Sequence, end: int) -> int:
        """Where a step that could compute the sequence's tokens up to `end` stops, so that its state is kept there."""
        if not self._recurrent:
            return end
        start, stops = begin_of(sequence), self._stops(sequence)
        if not stops or end - start <= 1:
            return end
        if inside := [stop for stop in stops if start < stop <= end]:
            return min(inside)
        whole = end // self.block_size * self.block_size
        return whole if start < whole and end < sequence.num_tokens else end

    @property
    def can_repeat(self) -> bool:
        """Whether a step that failed may be run again: not if it may have written over recurrent state."""
        return not self._recurrent

    def _stops(self, sequence: Sequence) -> tuple[int, ...]:
        """Where the sequence's state is wanted: after its last full block, and where others begin or part from it."""
        if not self.enable_prefix_caching and sequence.params.n == 1:
            return ()
        last = (sequence.num_tokens - 1) // self.block_size * self.block_size
        retained = (each.num_tokens // self.block_size * self.block_size for each in sequence.retained)
        return last, sequence.num_matched, sequence.parting, *retained

    def _kept_at(self, sequence: Sequence, end: int) -> set[int]:
        """The positions, up to its end, after which a step keeps the sequence's state.

        A decode with drafts may pass one, or not reach it.
        """
        start, regular = begin_of(sequence), range(0)
        if self.enable_prefix_caching:
            is_chunk = min(end, sequence.num_tokens + sequence.num_pending) - start > 1
            first = (start // self._interval + 1) * self._interval
            regular = range(end, end + 1) if is_chunk else range(first, end + 1, self._interval)
        wanted = {*regular, *(stop for stop in self._stops(sequence) if stop == end)}
        return {at for at in wanted if not at % self.block_size}

    def commit(self, sequence: Sequence) -> None:
        """Publish the blocks that `num_computed` tokens fill, and release those that no later query sees."""
        if self.enable_prefix_caching:
            self._publish(sequence, sequence.num_computed)
        for pool in self._releasing:
            query = sequence.num_computed
            if query == len(sequence.prompt):  # siblings begin at its last full block, in the next step
                query = (query - 1) // self.block_size * self.block_size
            table, known = sequence.blocks[pool.name], sequence.num_released
            first, stop = known.get(pool.name, 0), min(pool.kind.first_visible(query), len(table))
            for index in reversed(range(first, stop)):
                if table[index]:
                    pool.release(table[index], is_skipped=True)
                    table[index] = 0
            known[pool.name] = max(first, stop)

    def free(self, sequence: Sequence) -> None:
        self._retain(sequence, (*self.pools, *self.host_pools.values()))
        self.history.note_end(sequence)
        for pool in self.pools:
            for block in reversed(sequence.blocks.get(pool.name, [])):  # what follows a prefix goes before it
                if block:
                    pool.release(block)
        sequence.blocks, sequence.num_released = {}, {}
        for pool in self._recurrent:
            self._last.pop((sequence, pool), None)
        if sequence in self._published:
            self.prefixes.leave(self._published.pop(sequence)[0])
        if sequence in self._loads:
            self._forget_loads(sequence)
            for pool in self.pools:  # another sequence may write to its blocks, which are still to be saved
                pool.is_overwritten |= bool(pool.saves)

    def forget(self) -> None:
        """Forget all prefixes except those in files; no sequence may have blocks."""
        for pool in (*self.pools, *self.host_pools.values()):
            pool.forget()

    def _find_prefix(self, sequence: Sequence) -> list[Prefix]:
        """The longest cached prefix, block by block: all kinds have it, and it leaves at least one token to compute.

        It includes blocks that only the host has, if loading them pays.
        """
        if not self.enable_prefix_caching:
            return []
        _, path = self._find_path(sequence)
        num_hit, on_host = self._count_hit(path, on_host=False), False
        if self._recurrent:
            sequence.num_matched = self._count_hit(path, on_host=False, pools=self._paged) * self.block_size
        if self.host_pools:
            num_found = self._count_hit(path, on_host=True)
            if self.costs is None or self.costs.pays((num_found - num_hit) * self.block_size):
                num_hit, on_host = num_found, True
        if num_hit * self.block_size == sequence.num_tokens - 1 and self._reads_step(path[:num_hit]):
            num_hit = self._count_hit(path[: num_hit - 1], on_host)
        return path[:num_hit]

    def _reads_step(self, path: list[Prefix]) -> bool:
        """Whether a block of a path is one that the step which is planned writes."""
        return any(prefix.blocks.get(pool.name) in pool.unwritten for pool in self.pools for prefix in path)

    def _find_path(self, sequence: Sequence) -> tuple[bytes, list[Prefix]]:
        """The sequence's tokens in whole blocks, less than all; and their prefixes of which something is cached."""
        limit, width = (sequence.num_tokens - 1) // self.block_size, self._width
        content = pack(sequence.tokens(0, limit * self.block_size))
        prefix = self.prefixes.find(None, self._salt + sequence.salt)
        path: list[Prefix] = []
        for index in range(limit):
            prefix = prefix and self.prefixes.find(prefix, content[index * width : (index + 1) * width])
            if not prefix:
                break
            path.append(prefix)
        return content, path

    def _count_hit(self, path: list[Prefix], on_host: bool, pools: SequenceOf[BlockPool] | None = None) -> int:
        """The longest beginning of a path, in blocks, after which a query finds every block that it sees.

        pools: None: all of them
        """
        pools, num_hit = self.pools if pools is None else pools, len(path)

        def has(pool: BlockPool, index: int) -> bool:
            return pool.has(path[index], on_host, not self.may_chain or pool.kind.rule.in_slot)

        for pool in pools:
            if pool.keeps_all:
                num_hit = next((index for index in pool.kind.places(0, num_hit) if not has(pool, index)), num_hit)
        others = [pool for pool in pools if not pool.keeps_all]

        def find_missing(pool: BlockPool) -> int:
            """The last block that a query after `num_hit` blocks sees and that is not there; -1: there is none."""
            seen = pool.kind.places(pool.kind.first_visible(num_hit * self.block_size), num_hit)
            return next((index for index in reversed(seen) if not has(pool, index)), -1)

        while num_hit and (missing := max(map(find_missing, others), default=-1)) >= 0:
            num_hit = missing  # any longer beginning sees that block, too
        return num_hit

    def _is_loaded(self, path: list[Prefix], at: int) -> bool:
        """Whether a sequence that hits this path has to load a block of its prefix number `at`."""
        query, blocks = len(path) * self.block_size, path[at].blocks
        seen = ((pool, pool.kind.places(pool.kind.first_visible(query), len(path))) for pool in self.pools)
        return any(pool.name not in blocks and at in places for pool, places in seen)

    def _has_room_to_load(self, sequence: Sequence, path: list[Prefix], spare: int) -> bool:
        """Whether loading a path leaves `spare` free blocks; kinds that keep all need room for all tokens."""
        for pool in self.pools:
            first = pool.kind.first_visible(len(path) * self.block_size)
            shared = [block for prefix in path[first:] if (block := prefix.blocks.get(pool.name))]
            num_blocks = -(-sequence.num_tokens // self.block_size) if pool.keeps_all else len(path)
            num_idle = sum(not pool.num_holders[block] for block in shared)
            num_kept = 0 if pool.kind.rule.in_slot else spare  # running sequences can do without copies of their state
            if len(pool.kind.places(first, num_blocks)) - len(shared) > pool.num_free - num_idle - num_kept:
                return False
        return True

    def _load(self, sequence: Sequence, path: list[Prefix]) -> None:
        """Allocate the blocks that a sequence's tables lack, and plan to load them from the host."""
        loads = self._loads[sequence] = {}
        for pool in self.pools:
            if (host := pool.host) is not None:
                first = pool.kind.first_visible(len(path) * self.block_size)
                table = sequence.blocks[pool.name]
                missing = [at for at in pool.kind.places(first, len(path)) if not table[at]]
                loads[pool.name] = [(at, host.share(path[at].blocks[host.name])) for at in missing]
        for pool in self.pools:
            table, pairs = sequence.blocks[pool.name], loads[pool.name]
            for place, (at, copy) in enumerate(pairs):
                table[at] = pool.take(to_load=True)
                pairs[place] = table[at], copy

    def _load_budget(self, num_tokens: int) -> float:
        """The bytes that can be loaded in about the time that a step of this number of tokens takes."""
        if self.costs is None or not self.costs.load_token_seconds:
            return self._loaded_bytes
        num_loaded = num_tokens * self.costs.compute_token_seconds / self.costs.load_token_seconds
        return self._loaded_bytes + num_loaded * sum(pool.kind.bytes_per_token for pool in self.pools)

    def _take_loads(self, sequence: Sequence, budget: float, loads: dict[str, list[tuple[int, int]]]) -> int:
        """Move a sequence's loads to a plan until they reach the budget; their bytes."""
        num_bytes, left = 0, self._loads[sequence]
        for pool in self.pools:
            pairs = left.get(pool.name, [])
            count = 0
            while count < len(pairs) and num_bytes < budget:
                self.host_pools[pool.name].release(pairs[count][1])
                count, num_bytes = count + 1, num_bytes + pool.kind.block_bytes
            if count:
                loads.setdefault(pool.name, []).extend(pairs[:count])
                left[pool.name] = pairs[count:]
        if not any(left.values()):
            del self._loads[sequence]
        return num_bytes

    def _forget_loads(self, sequence: Sequence) -> None:
        for kind, pairs in self._loads.pop(sequence).items():
            for _, copy in pairs:
                self.host_pools[kind].release(copy)

    def _publish(self, sequence: Sequence, num_tokens: int, first_unwritten: int | None = None) -> None:
        """Publish the blocks that a sequence's tokens fill.

        first_unwritten: the number of the first that the step being planned writes; None: it writes none
        """
        prefix, index = self._published.get(sequence, (None, 0))
        num_full = num_tokens // self.block_size
        if index >= num_full:
            return
        is_of_prompt = index * self.block_size < len(sequence.prompt)
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
                    if first_unwritten is not None and index >= first_unwritten:
                        pool.unwritten.add(block)
                    if pool.kind.rule.in_slot and (index + 1) * self.block_size > len(sequence.prompt):
                        self._discard_last(sequence, pool)
                        self._last[sequence, pool] = block, child
            prefix, index = child, index + 1
        self._set_published(sequence, prefix, index)
        if is_of_prompt:
            self._retain(sequence, self._releasing)

    def _retain(self, sequence: Sequence, pools: SequenceOf[BlockPool]) -> None:
        """Retain what a sequence asks for of the blocks of pools, which may be evicted once they are released."""
        if sequence.retained and pools and sequence in self._published:
            retain(sequence, *self._published[sequence], pools, self.block_size)

    def _discard_last(self, sequence: Sequence, pool: BlockPool) -> None:
        """Discard the newest copy of a state in the sequence's answer, in place of which there will be another one."""
        last, prefix = self._last.pop((sequence, pool), (0, None))
        if last in pool.cached and pool.prefix[last] is prefix and last not in pool.retained:
            pool.discard(last)

    def _set_published(self, sequence: Sequence, prefix: Prefix, num_blocks: int) -> None:
        prefix.num_users += 1
        if sequence in self._published:
            self.prefixes.leave(self._published[sequence][0])
        self._published[sequence] = prefix, num_blocks

    def _share(self, sequence: Sequence, num_blocks: int, tables: Mapping[str, list[int]]) -> None:
        """Share, of the first `num_blocks` blocks of other tables, those that the sequence's next query attends to."""
        for pool in self.pools:
            first = pool.kind.first_visible(num_blocks * self.block_size)
            shared = [block and pool.share(block) for block in tables[pool.name][first:num_blocks]]
            sequence.blocks[pool.name] = [0] * first + shared
