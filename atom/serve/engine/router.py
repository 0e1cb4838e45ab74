"""Route requests to replicas: by cached prefix and load.

    router = Router(num_replicas=2, block_size=16, enable_prefix_caching=True)
    router.resize(0, num_blocks=5000)                     # of its KV pool
    request = router.hash(prompts, salt)
    number = router.choose(request, {0: Load(0, 3), 1: Load(2, 5)})
    sent = router.send(number, request)
    router.finish(sent, 0, output, num_cached)            # the answer's tokens, and what the prefix cache gave

A request goes where most of it is cached, if that is more than half of it and load is even; else to the replica with
the fewest waiting sequences, of these the one with the fewest running. What a replica has cached is learned from what
it was sent and what it answered, in blocks as the engine has them. A finished request reports what the engine's cache
really gave: if that is less, the replica has evicted it, and all that it used before then too. (SGLang's router has
the same policy, over a tree of text.)

Pure policy: no clock, no I/O. Memory is bounded: at most `MAX_BLOCKS` hashes a replica, and no more than its KV has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atom.runtime.kv.prefix_cache import chain_hash, pack

MAX_BLOCKS = 1 << 17  # hashes kept for a replica, some 20 MB: 2 million tokens
MAX_AHEAD = 32  # sequences more than the least loaded replica has, up to which load is even
MAX_RATIO = 1.5  # of a replica's sequences to those of the least loaded one

Chain = list[int]  # hashes of a prompt's full blocks, each with all before it


class Load(NamedTuple):
    """The load of a replica."""

    num_waiting: int  # sequences that are not admitted
    num_running: int  # sequences

    @property
    def num_sequences(self) -> int:
        return self.num_waiting + self.num_running


class Hashed(NamedTuple):
    """A request by the hashes of its prompts' blocks."""

    prompts: Sequence[Sequence[int]]
    root: int  # the hash that all chains begin from: the salt's
    chains: list[Chain]


class Sent(NamedTuple):
    """A request that a replica was sent."""

    replica: int
    life: int  # of the replica: how often it has been started anew
    request: Hashed
    last_used: list[list[int]]  # of each chain's leading blocks that the replica had computed, when each was used last


class Router:
    def __init__(self, num_replicas: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        """enable_prefix_caching: of the engines; if it is off, or there is no choice, only load counts."""
        self.remembers = enable_prefix_caching and num_replicas > 1
        self._block_size = block_size
        self._cached = [CachedBlocks() for _ in range(num_replicas)]
        self._lives = [0] * num_replicas
        self._num_sent = 0
        self._last_sent = [0] * num_replicas  # the request that each was sent last

    def resize(self, replica: int, num_blocks: int) -> None:
        """Set the number of KV blocks of a replica."""
        self._cached[replica].resize(min(num_blocks, MAX_BLOCKS))

    def forget(self, replica: int) -> None:
        """Forget a replica's cache, which has ended with it."""
        self._cached[replica] = CachedBlocks()
        self._lives[replica] += 1

    def hash(self, prompts: Sequence[Sequence[int]], salt: bytes = b"") -> Hashed:
        """Hash the blocks of prompts; the last token of each is never cached, since the engine computes it anew."""
        root = chain_hash(0, salt)
        chains = [self._extend([], root, prompt[:-1]) if self.remembers else [] for prompt in prompts]
        return Hashed(prompts, root, chains)

    def choose(self, request: Hashed, loads: Mapping[int, Load]) -> int:
        """Choose one of the replicas that `loads` has."""
        rank = {number: (*load, self._last_sent[number]) for number, load in loads.items()}
        least_loaded = min(loads, key=rank.__getitem__)
        matches = {number: sum(map(self._cached[number].match, request.chains)) for number in loads}
        nearest = min(loads, key=lambda number: (-matches[number], rank[number]))
        is_cached = 2 * matches[nearest] * self._block_size > sum(map(len, request.prompts))
        return nearest if is_cached and is_even(loads[nearest], loads[least_loaded]) else least_loaded

    def send(self, replica: int, request: Hashed) -> Sent:
        """Note that a replica is sent a request."""
        self._num_sent += 1
        self._last_sent[replica] = self._num_sent
        cached = self._cached[replica]
        last_used = [cached.last_used(chain) for chain in request.chains]
        for chain in request.chains:
            cached.add(chain, self._num_sent)
        return Sent(replica, self._lives[replica], request, last_used)

    def finish(self, sent: Sent, index: int, output: Sequence[int], num_cached: int | None) -> None:
        """Note that a sequence of a request has finished.

        index: of its prompt
        output: its tokens
        num_cached: prompt tokens from the engine's prefix cache; None if it was not asked
        """
        cached = self._cached[sent.replica]
        if not self.remembers or sent.life != self._lives[sent.replica]:
            return
        request, last_used = sent.request, sent.last_used[index]
        if num_cached is not None and (num_hits := num_cached // self._block_size) < len(last_used):
            cached.evict(last_used[num_hits])
        chain = request.chains[index]
        tokens = [*request.prompts[index][len(chain) * self._block_size :], *output]
        self._num_sent += 1
        cached.add(self._extend(chain, request.root, tokens[:-1]), self._num_sent, is_computed=True)

    def _extend(self, chain: Chain, root: int, tokens: Sequence[int]) -> Chain:
        """A chain with the full blocks of the tokens that follow it."""
        extended, size, parent = list(chain), self._block_size, chain[-1] if chain else root
        for start in range(0, len(tokens) - size + 1, size):
            parent = chain_hash(parent, pack(tokens[start : start + size]))
            extended.append(parent)
        return extended


class CachedBlocks:
    """The blocks that a replica should have cached, in the order in which they are evicted.

    A block is used when its children are, and evicted after them, as in the engine: a chain that is known is known
    from its beginning on.
    """

    def __init__(self) -> None:
        self._max_blocks = 0
        self._used: OrderedDict[int, tuple[int, bool]] = OrderedDict()  # hash -> last use, whether it is computed

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, block: int) -> bool:
        return block in self._used

    def resize(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._shrink()

    def match(self, chain: Chain) -> int:
        """The number of leading blocks of the chain that are known."""
        return bisect_left(chain, True, key=lambda block: block not in self._used)

    def last_used(self, chain: Chain) -> list[int]:
        """When each of the chain's leading blocks that are computed was used last."""
        uses = [self._used[block] for block in chain[: self.match(chain)]]
        return [use for use, is_computed in uses[: sum(is_computed for _, is_computed in uses)]]

    def add(self, chain: Chain, now: int, *, is_computed: bool = False) -> None:
        """Note a use of all blocks of a chain. now: a number that grows."""
        for block in reversed(chain):  # the last is evicted first
            was_computed = self._used.pop(block, (0, False))[1]
            self._used[block] = now, is_computed or was_computed
        self._shrink()

    def evict(self, last_use: int) -> None:
        """Forget all that has not been used since."""
        while self._used and next(iter(self._used.values()))[0] <= last_use:
            self._used.popitem(last=False)

    def _shrink(self) -> None:
        while len(self._used) > self._max_blocks:
            self._used.popitem(last=False)


def is_even(load: Load, least_loaded: Load) -> bool:
    """Whether a load is not much more than that of the least loaded replica."""
    num, fewest = load.num_sequences, least_loaded.num_sequences
    return num - fewest <= MAX_AHEAD or num <= MAX_RATIO * fewest
