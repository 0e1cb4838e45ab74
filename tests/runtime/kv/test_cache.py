from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import pytest
import torch
from kinds import every_kind, full_kind, window_kind

from atom.runtime.kv import prefix_cache
from atom.runtime.kv.cache import KVCache
from atom.runtime.kv.files import Block, KVFiles
from atom.runtime.types import Sequence, StateKind
from atom.sampling_params import SamplingParams

FULL = full_kind(10)
WINDOW = window_kind(5, 10)
counter = itertools.count()


def make(tokens: SequenceOf[int], salt: bytes = b"") -> Sequence:
    return Sequence(str(next(counter)), list(tokens), SamplingParams(), salt=salt)


def make_cache(*kinds: StateKind, num_blocks: int = 20, prefix: bool = True, salt: bytes = b"") -> KVCache:
    sizes = {kind.name: num_blocks for kind in kinds or (FULL,)}
    return KVCache(kinds or (FULL,), sizes, 4, enable_prefix_caching=prefix, salt=salt)


def compute(cache: KVCache, sequence: Sequence, num_tokens: int | None = None) -> Sequence:
    """A step that computes the sequence up to num_tokens, or all of it."""
    stop = sequence.num_tokens if num_tokens is None else num_tokens
    assert cache.allocate(sequence, stop) == stop
    sequence.num_computed = stop
    cache.commit(sequence)
    return sequence


def start(cache: KVCache, sequence: Sequence) -> int:
    sequence.num_computed = cache.match_prefix(sequence)
    return sequence.num_computed


def test_a_prompt_hits_the_full_blocks_of_one_before_it() -> None:
    cache = make_cache()
    first = compute(cache, make(range(10)))
    second = make([*range(10), 77])
    assert start(cache, second) == 8
    assert second.blocks["full"] == first.blocks["full"][:2]
    compute(cache, second)
    assert second.blocks["full"][2] != first.blocks["full"][2]


def test_a_hit_leaves_a_token_to_compute() -> None:
    cache = make_cache()
    compute(cache, make(range(8)))
    assert start(cache, make(range(8))) == 4
    assert start(cache, make(range(9))) == 8


def test_another_past_or_salt_is_no_hit() -> None:
    cache = make_cache()
    compute(cache, make([1, 1, 1, 1, 2, 2, 2, 2], salt=b"a"))
    assert start(cache, make([3, 3, 3, 3, 2, 2, 2, 2, 9], salt=b"a")) == 0
    assert start(cache, make([1, 1, 1, 1, 2, 2, 2, 2, 9], salt=b"b")) == 0
    assert start(cache, make([1, 1, 1, 1, 2, 2, 2, 2, 9], salt=b"a")) == 8


def test_blocks_filled_by_decode_are_hits_and_partly_filled_ones_never() -> None:
    cache = make_cache()
    sequence = compute(cache, make(range(6)))
    for token in (6, 7, 8):
        sequence.output.append(token)
        compute(cache, sequence)
    cache.free(sequence)
    assert start(cache, make(range(20))) == 8


def test_blocks_survive_their_sequence_until_the_least_recently_used_is_taken() -> None:
    cache = make_cache(num_blocks=1 + 4)
    for tokens in ([1] * 4, [2] * 4, [3] * 4):
        cache.free(compute(cache, make(tokens)))
    again = make([1] * 5)  # touches the oldest
    assert start(cache, again) == 4
    cache.free(again)
    compute(cache, make([4] * 8))  # takes the blank block and the oldest, now that of the 2s
    assert [start(cache, make([token] * 5)) for token in (1, 2, 3)] == [4, 0, 4]


def test_a_held_block_is_never_taken() -> None:
    cache = make_cache(num_blocks=1 + 3)
    held = compute(cache, make([1] * 8))
    other = make([2] * 8)
    assert cache.allocate(other, 8) == 0
    assert cache.num_free == {"full": 1}
    cache.free(held)
    assert cache.allocate(other, 8) == 8


def test_the_end_of_a_prefix_is_taken_before_its_beginning() -> None:
    cache = make_cache(num_blocks=1 + 3)
    cache.free(compute(cache, make(range(12))))
    compute(cache, make([9] * 4))
    assert start(cache, make(range(13))) == 8


def test_a_prefix_computed_again_joins_what_follows_it() -> None:
    cache = make_cache(num_blocks=1 + 6)
    first = compute(cache, make(range(4)))
    second = compute(cache, make(range(8)))  # its first block is a copy, its second one follows the first's
    cache.free(first)
    third = compute(cache, make([9] * 16))  # takes the published one
    cache.free(third)
    cache.free(second)
    cache.free(compute(cache, make(range(4))))
    assert start(cache, make(range(9))) == 8


@pytest.mark.parametrize(
    "weak_hash",
    [lambda parent, content: 7, lambda parent, content: sum(content), lambda parent, content: sum(content) // 4 % 3],
    ids=["constant", "no parent", "few"],
)
def test_a_collision_never_gives_a_wrong_hit(
    weak_hash: Callable[[int, bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "chain_hash", weak_hash)
    cache = make_cache(num_blocks=300)
    blocks = [[a] * 4 for a in (1, 2, 3, 4)]
    content: dict[int, list[int]] = {}  # block -> all tokens up to its end
    num_hits = 0
    for parts in itertools.product(blocks, repeat=3):
        sequence = make([*itertools.chain(*parts), 9])
        hit = start(cache, sequence)
        for index, block in enumerate(sequence.blocks.get("full", [])):
            assert content[block] == sequence.prompt[: 4 * index + 4]
        compute(cache, sequence)
        for index, block in enumerate(sequence.blocks["full"][hit // 4 : 3], hit // 4):
            content[block] = sequence.prompt[: 4 * index + 4]
        num_hits += hit > 0
    assert (num_hits > 0) == (weak_hash(0, b"") != 7)


@pytest.mark.parametrize("prefix", [False, True])
def test_a_block_without_content_is_taken_before_one_that_was_never_written(prefix: bool) -> None:
    """Each block that is written for the first time is memory that the system gives for good."""
    cache = make_cache(num_blocks=1 + 100, prefix=prefix)
    written: set[int] = set()
    for round in range(30):
        running = [make([round] * 3) for _ in range(5)]  # a block each that is not full, and so is no prefix
        for sequence in running:
            written |= {*compute(cache, sequence).blocks["full"]}
        for sequence in running[round % 5 :] + running[: round % 5]:
            cache.free(sequence)
    assert len(written) == 5


def test_the_block_that_was_freed_last_is_taken_first() -> None:
    cache = make_cache(num_blocks=1 + 100, prefix=False)
    first, second = compute(cache, make(range(8))), compute(cache, make(range(12)))
    blocks = [*first.blocks["full"], *second.blocks["full"]]
    cache.free(second)
    cache.free(first)
    assert compute(cache, make(range(20))).blocks["full"] == blocks


def test_with_prefix_caching_content_stays_until_no_other_block_is_left() -> None:
    cache = make_cache(num_blocks=1 + 10)
    written = set()
    for token in range(5):
        sequence = compute(cache, make([token] * 8))
        written |= {*sequence.blocks["full"]}
        cache.free(sequence)
    assert len(written) == 10  # the whole pool is in use, as a cache
    assert [start(cache, make([token] * 9)) for token in range(5)] == [8] * 5


def test_all_is_forgotten_once_it_is_overwritten() -> None:
    cache = make_cache(num_blocks=1 + 4)
    for token in range(50):
        cache.free(compute(cache, make([token] * 15, salt=bytes([token % 3]))))
    assert len(cache.prefixes.by_hash) <= 4 + 2  # a node for each block and one for each salt that they have
    cache.free(compute(cache, make([1, 2, 3])))
    assert cache.num_free == {"full": 4}


def test_without_prefix_caching_nothing_is_published_and_siblings_still_share() -> None:
    cache = make_cache(prefix=False)
    parent = compute(cache, make(range(10)))
    assert start(cache, make(range(20))) == 0
    child = make(range(10))
    child.num_computed = cache.fork(parent, child)
    assert child.num_computed == 8
    compute(cache, child)
    assert child.blocks["full"][:2] == parent.blocks["full"][:2]
    assert child.blocks["full"][2] != parent.blocks["full"][2]
    cache.free(parent)
    assert cache.num_free == {"full": 19 - 3}
    cache.free(child)
    assert cache.num_free == {"full": 19}


def test_a_sibling_computes_at_least_the_last_token_of_the_prompt() -> None:
    cache = make_cache()
    parent, child = compute(cache, make(range(8))), make(range(8))
    assert cache.fork(parent, child) == 4
    parent, child = compute(cache, make([5])), make([5])
    assert cache.fork(parent, child) == 0


@pytest.mark.parametrize("num_prompt", range(1, 14))
def test_a_window_still_has_what_siblings_need_in_the_step_after_the_prompt(num_prompt: int) -> None:
    cache = make_cache(FULL, WINDOW, prefix=False)
    parent, child = compute(cache, make(range(num_prompt))), make(range(num_prompt))
    shared = cache.fork(parent, child)
    assert shared == (num_prompt - 1) // 4 * 4
    first = max(shared - 5 + 1, 0) // 4  # of the blocks that position `shared` sees
    assert child.blocks["window"] == [0] * first + parent.blocks["window"][first : shared // 4]
    assert all(child.blocks["window"][first:])


def test_a_sibling_starts_by_itself_if_the_window_has_moved_on() -> None:
    cache = make_cache(FULL, WINDOW, prefix=False)
    parent, child = compute(cache, make(range(10))), make(range(10))
    for token in range(8):
        parent.output.append(token)
        compute(cache, parent)
    assert cache.fork(parent, child) == 0
    assert not child.blocks


def test_a_window_pool_does_not_grow_with_the_context() -> None:
    cache = make_cache(WINDOW, num_blocks=1 + 4)
    assert cache.can_ever_fit(10**6)
    sequence = compute(cache, make(range(8)))
    for token in range(200):
        sequence.output.append(token)
        compute(cache, sequence)
        table = sequence.blocks["window"]
        num_tokens = sequence.num_tokens
        seen = range(max(num_tokens - 4, 0) // 4, len(table))  # by the query at num_tokens
        assert [index for index, block in enumerate(table) if block] == list(seen)


@pytest.mark.parametrize("window", range(1, 12))
@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_no_sequence_holds_more_blocks_than_it_is_said_to_need(window: int, step: int) -> None:
    kind = window_kind(window)
    most = 0
    for num_prompt in range(1, 30):
        cache = KVCache([kind], {"window": 50}, 4, enable_prefix_caching=False)
        sequence = make(range(40))
        sequence.prompt, sequence.output = sequence.prompt[:num_prompt], sequence.prompt[num_prompt:]
        for stop in [*range(num_prompt % step, 40, step), 40]:
            if stop > sequence.num_computed:
                assert cache.allocate(sequence, stop) == stop
                most = max(most, 49 - cache.num_free["window"])
                sequence.num_computed = stop
                cache.commit(sequence)
    assert most in (kind.blocks(40, step), kind.blocks(40, step) - 1)


def test_a_hit_needs_each_block_of_the_window_before_it_and_no_other() -> None:
    cache = make_cache(FULL, WINDOW, num_blocks=30)
    cache.free(compute(cache, make(range(24))))
    pool = cache.pools[1]
    prefix = cache.prefixes.find(None, b"")
    path = []
    for index in range(6):
        prefix = cache.prefixes.find(prefix, prefix_cache.pack(range(4 * index, 4 * index + 4)))
        assert prefix
        path.append(prefix)

    def hit() -> int:
        probe = make([*range(24), 9])
        num_tokens = start(cache, probe)
        cache.free(probe)
        return num_tokens

    def lose(index: int) -> None:  # as if its block of the window had been taken
        block = path[index].blocks["window"]
        pool.cached.remove(block)
        pool.prefix[block] = None
        cache.prefixes.forget(path[index], "window")
        pool.blank.append(block)

    lose(0)
    probe = make([*range(24), 9])
    assert start(cache, probe) == 24
    assert probe.blocks["window"] == [0] * 5 + [path[5].blocks["window"]]  # position 24 sees 20 to 24
    assert all(probe.blocks["full"])
    cache.free(probe)
    lose(5)
    assert hit() == 20
    lose(3)
    assert hit() == 20  # position 20 sees 16 to 20
    lose(4)
    assert hit() == 12
    lose(1)
    lose(2)
    assert hit() == 0


def test_a_block_outside_the_window_is_never_published() -> None:
    cache = make_cache(FULL, WINDOW)
    first = compute(cache, make(range(12)))
    cache.free(first)
    pool = cache.pools[1]
    held = [pool.take() for _ in range(pool.num_free)]  # the prefixes keep only their blocks of the full kind
    for block in held:
        pool.release(block)
    sequence = make(range(12))
    assert start(cache, sequence) == 0
    sequence.blocks = {"full": [cache.pools[0].take() for _ in range(3)], "window": [0, pool.take(), pool.take()]}
    sequence.num_computed = 12
    cache.commit(sequence)
    assert pool.prefix[0] is None
    assert pool.prefix[sequence.blocks["window"][2]]


def test_room_is_refused_without_a_change() -> None:
    cache = make_cache(FULL, WINDOW, num_blocks=1 + 4)
    holder = compute(cache, make(range(7)))
    sequence = make(range(12))
    assert cache.allocate(sequence, 4) == 0  # all known tokens need 3 blocks of the full kind
    assert cache.num_free == {"full": 2, "window": 2}
    assert not any(sequence.blocks.values())
    sequence = make(range(8))
    assert cache.allocate(sequence, 8, spare=1) == 0
    assert cache.allocate(sequence, 8) == 8
    cache.free(holder)
    cache.free(sequence)
    assert cache.num_free == {"full": 4, "window": 4}
    assert cache.fullest[0] == 0


def test_a_window_pool_that_is_short_makes_the_step_shorter() -> None:
    cache = KVCache([FULL, WINDOW], {"full": 20, "window": 1 + 4}, 4, enable_prefix_caching=True)
    sequence = make(range(40))
    assert cache.can_ever_fit(40)
    stops = []
    while sequence.num_computed < 40:
        stop = cache.allocate(sequence, 40)
        assert stop > sequence.num_computed
        stops.append(stop)
        sequence.num_computed = stop
        cache.commit(sequence)
    assert stops == [16, 28, 40]  # 4 blocks, then 3 besides the one in the window


def test_what_fits_by_itself_is_known_before() -> None:
    cache = make_cache(num_blocks=1 + 5)
    assert cache.can_ever_fit(20)
    assert not cache.can_ever_fit(21)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[KVFiles]:
    files = KVFiles(tmp_path / "kv", 1 << 20, {"full": 40})
    yield files
    files.close()


def make_backed(files: KVFiles | None, num_blocks: int = 20) -> KVCache:
    """A cache with host memory, and files if any."""
    sizes, host = {"full": num_blocks}, {"full": 20}
    return KVCache([FULL], sizes, 4, enable_prefix_caching=True, salt=b"model", num_host_blocks=host, files=files)


def find_hits(cache: KVCache, tokens: SequenceOf[int], *salts: bytes) -> list[int]:
    """The tokens of a prompt that are found with each salt, after its files were read."""
    hits = []
    for salt in salts:
        sequence = make(tokens, salt)
        if cache.files is not None:
            cache.fetch(sequence)
            if cache.is_fetching(sequence):
                cache.files.wait(60)
            cache.take_fetched()
        hits.append(start(cache, sequence))
        cache.free(sequence)
    return hits


def test_blocks_of_files_are_found_with_the_salt_that_they_were_written_with(files: KVFiles) -> None:
    cache = make_backed(files)
    cache.free(compute(cache, make(range(12), salt=b"a")))
    files.write([Block(key, kind, torch.zeros(40, dtype=torch.uint8)) for kind, _, _, key in cache.cached_blocks()])
    files.flush(60)
    prompt = [*range(12), 99]
    assert find_hits(make_backed(files), prompt, b"b", b"") == [0, 0]
    cache = make_backed(files)
    assert find_hits(cache, prompt, b"a", b"b", b"") == [12, 0, 0]
    assert files.num_read == 3
    cache = make_backed(files)
    cache.free(compute(cache, make(range(4), salt=b"a")))  # whose key the others continue
    assert find_hits(cache, prompt, b"a", b"b", b"") == [12, 0, 0]
    assert files.num_read == 3 + 2


def test_blocks_of_host_memory_are_found_with_the_salt_that_they_were_computed_with() -> None:
    cache = make_backed(None, num_blocks=1 + 4)
    cache.free(compute(cache, make(range(12), salt=b"a")))
    cache.free(compute(cache, make([7] * 16, salt=b"b")))  # takes all blocks
    copies = cache.drain_copies({})
    assert copies is not None and len(copies.saves["full"]) >= 3
    assert find_hits(cache, [*range(12), 99], b"b", b"", b"a") == [0, 0, 12]


def test_a_step_waits_for_the_saves_of_blocks_that_it_overwrites_and_for_no_others() -> None:
    cache = make_backed(None, num_blocks=1 + 4)
    cache.free(compute(cache, make(range(8))))
    ahead = cache.drain_copies({})
    assert ahead is not None and len(ahead.saves["full"]) == 2 and not ahead.awaits_saves
    cache.free(compute(cache, make([5] * 16)))  # overwrites what is saved
    cache.free(compute(cache, make([6] * 16)))  # and what is not
    copies = cache.drain_copies({})
    assert copies is not None and copies.saves and copies.awaits_saves


def test_a_hit_may_end_amid_tokens_that_have_an_entry_together() -> None:
    """Their inputs are those of a window, so nothing else is needed than the entries of the runs before."""
    cache = make_cache(every_kind(2), every_kind(12), window_kind(12), num_blocks=30)
    first = compute(cache, make(range(30)))
    assert [bool(block) for block in first.blocks["every_12"]] == [False, False, True, False, False, True, False, False]
    assert all(first.blocks["every_2"])
    cache.free(first)
    second = make([*range(18), *[7] * 14])
    assert start(cache, second) == 16, "4 tokens after a run of 12"
    compute(cache, second)
    assert second.blocks["every_2"][:4] == first_blocks(cache, "every_2", range(16))
    table = second.blocks["every_12"]
    assert table[2:3] == first_blocks(cache, "every_12", range(12))[2:] and table[5], "its own entry of the second run"
    third = make([*range(30), 7])
    assert start(cache, third) == 28
    assert third.blocks["every_12"][5] not in (0, table[5])


def first_blocks(cache: KVCache, kind: str, tokens: SequenceOf[int]) -> list[int]:
    """The blocks of a kind that are published of a prompt, 0 for none."""
    prefix, blocks = cache.prefixes.find(None, b""), []
    for index in range(len(tokens) // 4):
        prefix = cache.prefixes.find(prefix, prefix_cache.pack(tokens[4 * index : 4 * index + 4]))
        assert prefix
        blocks.append(prefix.blocks.get(kind, 0))
    return blocks


def test_a_lost_entry_of_several_blocks_ends_a_hit_before_the_block_that_completes_it() -> None:
    cache = make_cache(FULL, every_kind(12), num_blocks=30)
    cache.free(compute(cache, make(range(40))))
    pool = cache.pools[1]
    pool.discard(first_blocks(cache, "every_12", range(24))[5])
    assert start(cache, make(range(40))) == 20


def test_entries_of_several_blocks_come_back_from_the_host_and_from_files(tmp_path: Path) -> None:
    kinds = [every_kind(2), every_kind(12), window_kind(12)]
    files = KVFiles(tmp_path / "kv", 1 << 20, {kind.name: kind.block_bytes for kind in kinds})

    def make_one(num_blocks: int) -> KVCache:
        sizes, host = (
            {"every_2": num_blocks, "every_12": 1 + 3, "window": num_blocks},
            {kind.name: 20 for kind in kinds},
        )
        return KVCache(kinds, sizes, 4, enable_prefix_caching=True, num_host_blocks=host, files=files)

    cache = make_one(1 + 9)
    cache.free(compute(cache, make(range(32))))
    written = [
        Block(key, kind, torch.zeros(files._sizes[kind], dtype=torch.uint8)) for kind, *_, key in cache.cached_blocks()
    ]
    cache.free(compute(cache, make([7] * 36)))  # takes all blocks
    cache.drain_copies({})
    sequence = make([*range(32), 9])
    assert start(cache, sequence) == 32
    copies = cache.drain_copies({sequence: 1})
    assert copies is not None
    assert {kind: len(pairs) for kind, pairs in copies.loads.items()} == {"every_2": 8, "every_12": 2, "window": 3}
    files.write(written)
    files.flush(60)
    assert find_hits(make_one(20), [*range(32), 9], b"") == [32]
    files.close()


def test_no_two_saves_of_a_plan_have_the_same_block_of_the_host() -> None:
    sizes = {"full": 1 + 2}
    cache = KVCache([FULL], sizes, 4, enable_prefix_caching=True, num_host_blocks={"full": 1 + 1})
    cache.free(compute(cache, make(range(8))))
    other = compute(cache, make([7] * 8))
    copies = cache.drain_copies({})
    assert copies is not None and len(copies.saves["full"]) == 1, "the host has room for one"
    cache.free(other)
    assert find_hits(cache, [*range(8), 9], b"") == [0], "its beginning was not saved"


def test_loads_beyond_the_budget_of_a_step_come_with_the_next_ones() -> None:
    host = {"full": 20}
    cache = KVCache(
        [FULL],
        {"full": 1 + 5},
        4,
        enable_prefix_caching=True,
        num_host_blocks=host,
        loaded_bytes=FULL.bytes_per_token * 4,
    )
    cache.free(compute(cache, make(range(12))))
    cache.free(compute(cache, make([7] * 20)))
    cache.drain_copies({})
    other, sequence = compute(cache, make([8] * 3)), make([*range(12), 9])
    assert start(cache, sequence) == 12
    loaded = []
    while sequence in cache.pending_loads:
        copies = cache.drain_copies({other: 1})
        assert copies is not None and len(copies.loads["full"]) == 1, "a block during each step"
        loaded += copies.loads["full"]
    assert [block for block, _ in loaded] == sequence.blocks["full"][:3]
