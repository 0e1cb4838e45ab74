from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from atom.compiler import compile_graph
from atom.config.limits import EngineLimits
from atom.config.load import engine_overrides, load
from atom.graph.batch import PREFIX_MULTIPLE
from atom.kernels import Target
from atom.runtime.step.input import NUM_GROUPS, PrefixRule
from atom.runtime.step.prefix_groups import ROW_TOKENS, PrefixGroups, find_rule, group_alike

BLOCK = 16  # tokens
RULE = PrefixRule("full", token_bytes=4096, saved_bytes=1 << 20)  # 256 tokens


def table(*parts: tuple[int, int]) -> list[int]:
    """Blocks of a table: so many, numbered from one on, of each part."""
    return [block for first, count in parts for block in range(first, first + count)]


def find(tables: list[list[int]], size: int | None = None, rule: PrefixRule = RULE) -> list[tuple[list[int], int]]:
    """The members of each group, and what they share."""
    size = size or len(tables)
    ends = [len(each) * BLOCK - 1 for each in tables]
    packed = PrefixGroups(rule, BLOCK).find(tables, ends, size)
    return read(packed, size) if packed else []


def read(packed: bytearray, size: int) -> list[tuple[list[int], int]]:
    lengths, members, starts = np.split(np.frombuffer(packed, np.int32), [size, 2 * size])
    assert len(starts) == NUM_GROUPS + 1
    groups = [members[first:last].tolist() for first, last in pairwise(starts) if first < last]
    alone = set(range(size)) - {row for group in groups for row in group}
    assert not lengths[list(alone)].any()
    assert all(len(set(lengths[group].tolist())) == 1 for group in groups)
    return [(group, int(lengths[group[0]])) for group in groups]


def test_decodes_of_two_prompts_and_of_none_are_grouped():
    first, second = (1000, 40), (2000, 24)
    tables = [table(first, (1, 5)), table(second, (10, 9)), table((3000, 50)), table(first, (20, 1)), table(second, (30, 3)),
              table(first, (40, 70)), table(second, (50, 2)), table(second, (60, 2))]  # fmt: skip
    assert find(tables, 10) == [([0, 3, 5], 640), ([1, 4, 6, 7], 384)]


def test_a_prefix_is_a_multiple_of_what_kernels_take():
    tables = [table((1000, 23), (first, 4)) for first in (1, 11, 21)]
    assert PREFIX_MULTIPLE == 128
    assert find(tables) == [([0, 1, 2], 256)]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([384, 384, 400], [([0, 1, 2], 384)]),
        ([384, 383, 384], [([0, 1, 2], 256)]),
        ([500, 500, 130], [([0, 1], 384)]),
    ],
)
def test_a_block_is_shared_only_once_all_queries_come_after_it(ends: list[int], expected: Any):
    tables = [table((1000, 24)) for _ in ends]
    assert read(PrefixGroups(RULE, BLOCK).find(tables, ends, 3), 3) == expected


@pytest.mark.parametrize(
    ("shared", "num_longer", "more", "expected"),
    [
        (64, 2, 8, [([0, 1, 2, 3, 4, 5, 6, 7], 1024)]),  # two of eight go on alike for a while
        (16, 4, 64, [([0, 1, 2, 3], 1280), ([4, 5, 6, 7], 256)]),  # half of them for long
        (20, 6, 3, [([0, 1, 2, 3, 4, 5, 6, 7], 256)]),  # six of them for less than a tile
    ],
)
def test_the_groups_are_those_that_save_the_most(shared: int, num_longer: int, more: int, expected: Any):
    prefix, longer = (1000, shared), (2000, more)
    tables = [table(prefix, longer, (row * 10, 3)) for row in range(1, num_longer + 1)]
    tables += [table(prefix, (row * 10, 3)) for row in range(num_longer + 1, 9)]
    assert find(tables) == expected


def test_nothing_is_grouped_where_too_little_is_saved_or_nothing_is_shared():
    alike = [table((1000, 16), (first, 4)) for first in (1, 11)]
    assert find(alike, rule=PrefixRule("full", 4096, 1)) == [([0, 1], 256)]
    assert find(alike) == []  # 256 tokens but what the groups cost
    assert find([table((first, 40)) for first in (1, 101, 201)]) == []
    assert find([table((1, 40))]) == []
    assert find([]) == []


def test_no_more_groups_than_a_step_has_room_for_the_largest_are_kept():
    tables = [
        table((1000 * group, 24 + 8 * group), (100 * group + 10 * row, 2))
        for group in range(1, NUM_GROUPS + 4)
        for row in (1, 2, 3)
    ]
    found = find(tables)
    assert len(found) == NUM_GROUPS
    assert min(length for _, length in found) == (24 + 8 * 4) // 8 * 128


def test_groups_are_found_again_only_for_other_rows(monkeypatch: pytest.MonkeyPatch):
    groups, tables = PrefixGroups(RULE, BLOCK), [table((1000, 40), (first, 4)) for first in (1, 11, 21)]
    calls: list[int] = []
    monkeypatch.setattr(
        groups, "_find_groups", lambda *args: calls.append(1) or PrefixGroups._find_groups(groups, *args)
    )
    ends = [700] * 3
    first = groups.find(tables, ends, 4)
    tables[0].append(99)
    assert groups.find(tables, ends, 4) is first
    assert read(groups.find(tables, ends, 8), 8) == read(first, 4) == [([0, 1, 2], 640)]
    assert len(calls) == 1
    assert read(groups.find(tables[:2], ends[:2], 2), 2) == [([0, 1], 640)]
    assert read(groups.find([list(each) for each in tables], ends, 4), 4) == [([0, 1, 2], 640)]
    assert len(calls) == 3


def test_prefixes_that_go_on_from_one_another_many_times_are_grouped():
    rows = {row: np.arange(8 * (row + 1), dtype=np.int32) for row in range(300)}
    found = group_alike(rows, list(rows), lambda num_blocks: num_blocks * BLOCK)
    members = [row for group in found for row in group.rows]
    assert len(members) == len(set(members)) and len(members) > 250
    for rows_of, length, saved in found:
        assert saved == (len(rows_of) - 1) * length - len(rows_of) * ROW_TOKENS > 0
        assert length <= 8 * BLOCK * (min(rows_of) + 1)


@pytest.mark.parametrize("name", ["qwen3", "bloom", "qwen2_window"])
def test_a_rule_is_of_layers_whose_kernels_read_prefixes_once(checkpoints: Any, name: str):
    """Not of slopes, and windows have pools of their own."""
    config = load(engine_overrides(str(checkpoints(name)), {"dtype": "bf16", "device": "cpu", "level": 1}))
    hopper, cpu = Target("cuda", frozenset({"nvidia", "sm_90"})), Target("cpu", frozenset())
    graph = compile_graph(config, target=hopper)
    token_bytes = next(state.type.num_bytes for state in graph.states())
    many, few = EngineLimits(64, 8192, 1 << 20), EngineLimits(2, 8192, 2048)
    rule = None if name == "bloom" else PrefixRule("full", token_bytes, 192 << 20)
    assert find_rule(graph, many) == rule
    assert find_rule(graph, few) is None, "two sequences never save so much"
    assert find_rule(compile_graph(config, target=cpu), many) is None
