"""The KV blocks of each state kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kinds import full_kind, window_kind

from atom.assemble.kv_blocks import kinds_of_all, min_blocks, plan_host, plan_kv, plan_stages, state_kinds
from atom.config import ServeConfig
from atom.config.limits import EngineLimits
from atom.errors import CapacityError, ConfigError
from atom.graph import KV, Type, parse
from atom.runtime.types import StateKind
from atom.state_rules import EveryRule, TokenRule, WindowRule

FULL, WINDOW = full_kind(8), window_kind(6, 24, name="window_6")
LIMITS = EngineLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32)
GRAPH = """\
def body(q: fp32[T, 1, 4], k: fp32[T, 1, 4]):
    a = attention(q, k, k, KV("layers.0", fp32[2, 1, 4]), scale=1.0)
    b = attention(a, k, k, KV("layers.1", fp32[2, 1, 4], window=6), scale=1.0, window=6)
    c = attention(b, k, k, KV("layers.2", fp32[2, 1, 4]), scale=1.0)
    return c
"""


def serve(**fields: int) -> ServeConfig:
    return ServeConfig(block_size=4, **fields)  # type: ignore[arg-type]


def test_layers_that_keep_the_same_tokens_are_one_kind():
    size = 2 * 1 * 4 * 4  # keys and values, heads, dims, bytes
    assert state_kinds(parse(GRAPH), 4) == [
        StateKind("full", TokenRule(), 2 * size * 4, 4),
        StateKind("window_6", WindowRule(6), size * 4, 4),
    ]


def test_layers_of_one_rule_are_one_kind_whatever_an_entry_is():
    text = """\
def body(q: fp32[T, 2, 4], r: fp32[T, 2, 2], latent: fp32[T, 6], k: fp32[T, 1, 2], h: fp32[T, 1, 4]):
    a = mla_attention(q, r, latent, k, W("kv_b", fp32[16, 6]), KV("layers.0", fp32[8]), scale=1.0)
    b = attention(a, h, h, KV("layers.0", fp32[2, 1, 4]), scale=1.0)
    return b
"""
    assert state_kinds(parse(text), 16) == [StateKind("full", TokenRule(), 16 * (8 + 2 * 4) * 4, 16)]


def test_entries_of_several_tokens_are_a_kind_whose_blocks_have_as_many_as_are_whole():
    states = [KV("layers.0", Type("fp32", (4,)), every=4), KV("layers.1", Type("fp32", (4,)), every=128)]
    graph: Any = SimpleNamespace(states=lambda: states)
    size = 4 * 4
    assert state_kinds(graph, 16) == [
        StateKind("every_4", EveryRule(4), 4 * size, 16),
        StateKind("every_128", EveryRule(128), size, 128, 8),
    ]
    assert state_kinds(graph, 256)[1] == StateKind("every_128", EveryRule(128), 2 * size, 256)
    with pytest.raises(ConfigError, match=r"serve\.block_size=24 is neither .* of the 128 tokens .* of layers\.1 tog"):
        state_kinds(graph, 24)


def test_kinds_of_stages_are_listed_once():
    assert kinds_of_all([[FULL], [FULL, WINDOW]]) == [FULL, WINDOW]


def test_a_given_number_of_blocks_is_usable_besides_that_of_padding():
    assert plan_kv([FULL], serve(num_kvcache_blocks=8), LIMITS) == {"full": 9}
    with pytest.raises(ConfigError, match=r"serve\.num_kvcache_blocks=7 hold no sequence of serve\.max_model_len=32"):
        plan_kv([FULL], serve(num_kvcache_blocks=7), LIMITS)


def test_ranks_divide_the_memory_of_a_cpu_and_a_gpu_gives_each_its_own():
    block = 4 * FULL.bytes_per_token
    assert plan_kv([FULL], serve(kv_cache_memory=20 * block), LIMITS) == {"full": 20}
    assert plan_kv([FULL], serve(kv_cache_memory=20 * block), LIMITS, num_ranks=2) == {"full": 10}
    assert plan_kv([FULL], serve(kv_cache_memory=20 * block), LIMITS, num_ranks=2, left=30 * block) == {"full": 30}


def test_too_little_memory_is_refused_with_the_field_that_gives_more():
    needed = 9 * 4 * FULL.bytes_per_token  # 8 blocks of a sequence, and that of padding
    with pytest.raises(CapacityError, match=rf"for each of 2 ranks: raise serve\.kv_cache_memory to {2 * needed}"):
        plan_kv([FULL], serve(kv_cache_memory=2 * needed - 2), LIMITS, num_ranks=2)
    with pytest.raises(CapacityError, match=r"serve\.gpu_memory_utilization=0\.9 leaves it 100: raise that"):
        plan_kv([FULL], serve(), LIMITS, left=100)
    with pytest.raises(
        CapacityError, match=r"leaves no memory for KV: weights and the largest step take 2\.0 GiB more"
    ):
        plan_kv([FULL], serve(), LIMITS, left=-(2 << 30))


def test_all_stages_have_the_blocks_of_the_one_with_the_fewest():
    memory = 40 * 4 * FULL.bytes_per_token
    wide = full_kind(2 * FULL.bytes_per_token)
    assert plan_stages([[FULL], [wide]], serve(kv_cache_memory=memory), LIMITS) == {"full": 20}
    host = plan_host([[FULL], [wide, WINDOW]], serve(swap_space=memory))
    assert host == {"full": 8, "window_6": 8}, "40 · 8 bytes of a token, of 16 + 24 in the second stage"


def test_ranks_take_the_least_of_what_all_have_room_for():
    plans = [{"full": 9, "window": 4}, {"full": 7, "window": 6}, {"latent": 3}]
    assert min_blocks(list(map(msgspec.msgpack.encode, plans))) == {"full": 7, "window": 4, "latent": 3}
