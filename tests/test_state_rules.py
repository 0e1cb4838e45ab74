"""The rules of states, against a count of what each query reads."""

from __future__ import annotations

import msgspec
import pytest

from atom.state_rules import EveryRule, LatestRule, StateRule, TokenRule, WindowRule

APPENDED = [TokenRule(), WindowRule(1), WindowRule(5)]
RULES = [*APPENDED, EveryRule(4), LatestRule()]


def read_by(rule: StateRule, query: int) -> set[int]:
    """The positions that a query reads: all up to its own, or the last ones."""
    last = range(query + 1)
    return {*last} if isinstance(rule, TokenRule) else {*last[-rule.window :]}


@pytest.mark.parametrize("rule", APPENDED)
def test_a_query_reads_from_the_first_visible_position_to_its_own(rule: StateRule):
    for query in range(20):
        assert {*range(rule.first_visible(query), query + 1)} == read_by(rule, query)


@pytest.mark.parametrize("rule", APPENDED)
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 9), (3, 4), (3, 11), (17, 18)])
def test_an_entry_that_several_queries_read_counts_once(rule: StateRule, start: int, stop: int):
    assert rule.num_read(start, stop) == len(set().union(*(read_by(rule, query) for query in range(start, stop))))


def test_an_entry_of_several_tokens_is_read_once_all_of_them_are_there():
    rule = EveryRule(4)
    for query in range(20):
        ended = [start for start in range(0, 20, 4) if start + 3 <= query]
        assert rule.num_read(query, query + 1) == len(ended)
    assert rule.first_visible(19) == 0
    assert [each.entry_tokens for each in RULES] == [1, 1, 1, 4, 1]


def test_a_recurrent_state_is_what_the_token_before_left():
    rule = LatestRule()
    assert [rule.first_visible(query) for query in (0, 1, 2, 9)] == [0, 0, 1, 8]
    assert [rule.num_read(start, stop) for start, stop in ((0, 9), (1, 2), (5, 99))] == [0, 1, 1]


def test_only_attention_without_a_window_keeps_all_entries():
    assert TokenRule.keeps_all and EveryRule.keeps_all and not WindowRule.keeps_all and not LatestRule.keeps_all
    assert [rule.in_slot for rule in RULES] == [False, False, False, False, True]


@pytest.mark.parametrize("rule", RULES)
def test_ranks_send_their_rules(rule: StateRule):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(rule), type=StateRule) == rule
