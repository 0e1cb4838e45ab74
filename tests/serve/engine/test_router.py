"""The router's policy, by hand and by its laws. A block has 4 tokens here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.serve.engine.router import MAX_AHEAD, CachedBlocks, Load, Router, Sent, is_even

IDLE = {0: Load(0, 0), 1: Load(0, 0)}
A, B = list(range(100, 113)), list(range(200, 213))  # 13 tokens: three blocks and one that is never cached


def make(num_replicas: int = 2, num_blocks: int = 100, *, enable_prefix_caching: bool = True) -> Router:
    router = Router(num_replicas, 4, enable_prefix_caching=enable_prefix_caching)
    for number in range(num_replicas):
        router.resize(number, num_blocks)
    return router


def send(router: Router, replica: int, *prompts: list[int], salt: bytes = b"") -> Sent:
    return router.send(replica, router.hash(prompts, salt))


def choose(router: Router, *prompts: list[int], salt: bytes = b"", loads: dict[int, Load] = IDLE) -> int:
    return router.choose(router.hash(prompts, salt), loads)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([(0, 5), (0, 4)], 1),  # fewer run
        ([(1, 0), (0, 9)], 1),  # fewest waiting go before fewest running
        ([(2, 7), (2, 3), (2, 3)], 1),
    ],
)
def test_a_new_prompt_goes_where_the_fewest_wait_then_run(loads: list[tuple[int, int]], expected: int):
    router = make(len(loads))
    assert choose(router, A, loads={number: Load(*load) for number, load in enumerate(loads)}) == expected


def test_equal_loads_take_turns():
    router, chosen = make(3, enable_prefix_caching=False), []
    for _ in range(6):
        chosen.append(choose(router, A, loads=dict.fromkeys(range(3), Load(0, 0))))
        send(router, chosen[-1], A)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_prompt_goes_where_more_than_half_of_it_is_cached():
    router = make()
    send(router, 1, A)  # 12 of its tokens are three blocks
    send(router, 0, B)  # so that a prompt that nobody has goes to 1
    send(router, 0, B)
    busy = {0: Load(0, 0), 1: Load(3, 3)}
    assert choose(router, [*A, *range(10)], loads=busy) == 1  # 12 of 23
    assert choose(router, [*A, *range(11)], loads=busy) == 0  # 12 of 24 is half of it
    assert choose(router, A[:5], loads=busy) == 1  # its first block
    assert choose(router, [99, *A], loads=busy) == 0  # its beginning differs
    assert choose(router, A, loads=busy, salt=b"tenant") == 0  # another tenant's


def test_the_last_block_of_a_prompt_that_ends_on_its_border_is_not_cached():
    """The engine computes the last token anew, and so the block that it is in."""
    router = make()
    assert [len(router.hash([A[:size]]).chains[0]) for size in (4, 5, 8, 9)] == [0, 1, 1, 2]
    send(router, 1, A)
    send(router, 0, [7])
    busy = {0: Load(0, 0), 1: Load(0, 1)}
    assert choose(router, A[:8], loads=busy) == 0  # 4 of 8
    assert choose(router, A[:9], loads=busy) == 1  # 8 of 9


def test_an_answer_goes_on_where_a_prompt_ended_on_a_border():
    router = make()
    sent = send(router, 1, A[:8])
    send(router, 0, [7])
    router.finish(sent, 0, [1, 2, 3, 4, 5], num_cached=0)
    busy = {0: Load(0, 0), 1: Load(0, 1)}
    assert choose(router, [*A[:8], 1, 2, 3, 4, *range(9)], loads=busy) == 1  # 12 of 21
    assert choose(router, [*A[:8], 1, 2, 3, 9, *range(9)], loads=busy) == 0  # 8 of 21


def test_of_several_prompts_all_tokens_count():
    router = make()
    send(router, 1, A)
    send(router, 0, [7])
    busy = {0: Load(0, 0), 1: Load(0, 1)}
    assert choose(router, A, B[:9], loads=busy) == 1  # 12 of 22
    assert choose(router, A, B, loads=busy) == 0  # 12 of 26


@pytest.mark.parametrize(
    ("load", "least_loaded", "expected"),
    [((0, 32), (0, 0), True), ((0, 33), (0, 0), False), ((1, 32), (0, 1), True), ((60, 40), (0, 67), True),
     ((60, 40), (0, 66), False)],
)  # fmt: skip
def test_load_is_even_up_to_32_sequences_or_half_as_many_more(
    load: tuple[int, int], least_loaded: tuple[int, int], expected: bool
):
    assert is_even(Load(*load), Load(*least_loaded)) is expected


def test_a_replica_that_is_far_ahead_gets_no_more_for_its_cache():
    router = make()
    send(router, 1, A)
    assert choose(router, A, loads={0: Load(0, 0), 1: Load(0, MAX_AHEAD)}) == 1
    assert choose(router, A, loads={0: Load(0, 0), 1: Load(0, MAX_AHEAD + 1)}) == 0


def test_where_two_have_a_prompt_the_less_loaded_gets_it():
    router = make(3)
    for number in (0, 2):
        send(router, number, A)
    assert choose(router, A, loads={0: Load(0, 9), 1: Load(0, 0), 2: Load(0, 8)}) == 2


def test_only_replicas_with_a_load_are_chosen():
    router = make()
    send(router, 0, A)
    assert choose(router, A, loads={1: Load(50, 50)}) == 1


def test_an_answer_is_cached_too():
    router = make()
    sent = send(router, 1, A[:6])
    send(router, 0, [7])
    turn = [*A[:6], *range(20), 5, 5, 5]
    busy = {0: Load(0, 0), 1: Load(0, 1)}
    assert choose(router, turn, loads=busy) == 0  # 4 of 29
    router.finish(sent, 0, list(range(20)), num_cached=0)
    assert choose(router, turn, loads=busy) == 1  # 24 of 29
    short = send(router, 1, [7, 8])  # not one block, but with its answer
    router.finish(short, 0, list(range(7)), num_cached=None)
    assert choose(router, [7, 8, *range(7)], loads=busy) == 1


def test_what_the_engine_has_evicted_is_forgotten_with_all_that_is_older():
    router, busy = make(), {0: Load(0, 0), 1: Load(0, 1)}
    for prompt in ([1] * 13, A, B):
        router.finish(send(router, 1, prompt), 0, [0], num_cached=0)
    again = send(router, 1, [*A[:8], *[9] * 8])  # two blocks of A are known
    router.finish(again, 0, [0], num_cached=4)  # and the engine had one
    assert choose(router, [1] * 13, loads=busy) == 0  # used before A
    assert choose(router, A[:9], loads=busy) == 1  # used by `again`
    assert choose(router, B, loads=busy) == 1  # used after A


def test_a_prefix_that_is_still_being_computed_is_not_missed():
    router = make()
    router.finish(send(router, 1, B), 0, [0], num_cached=0)
    first = send(router, 1, A)
    second = send(router, 1, A)
    router.finish(second, 0, [0], num_cached=0)  # both began at once, and neither had anything
    router.finish(first, 0, [0], num_cached=0)
    assert choose(router, A, loads={0: Load(0, 0), 1: Load(0, 1)}) == 1
    assert choose(router, B, loads={0: Load(0, 0), 1: Load(0, 1)}) == 1


def test_a_replica_that_is_started_again_has_nothing():
    router = make()
    before = send(router, 1, A)
    router.forget(1)
    router.resize(1, 100)
    router.finish(before, 0, [0], num_cached=0)  # late news of the one that is dead
    assert choose(router, A, loads={0: Load(0, 0), 1: Load(0, 1)}) == 0


def test_as_many_blocks_are_known_as_the_engine_has_and_the_oldest_leaf_goes_first():
    blocks = CachedBlocks()
    blocks.resize(4)
    blocks.add([1, 2, 3], 1)
    blocks.add([1, 5, 6], 2)
    assert [block for block in (1, 2, 3, 5, 6) if block in blocks] == [1, 2, 5, 6]
    assert (blocks.match([1, 2, 3]), blocks.match([1, 5, 6]), blocks.match([7])) == (2, 3, 0)
    blocks.resize(1)
    assert len(blocks) == 1 and 1 in blocks


@pytest.mark.parametrize("router", [make(1), make(2, enable_prefix_caching=False)])
def test_nothing_is_kept_where_it_would_change_nothing(router: Router):
    router.finish(send(router, 0, A), 0, [1] * 50, num_cached=0)
    assert router.hash([A]).chains == [[]] and not len(router._cached[0])


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that often begin alike."""
    return [token for part in draw(st.lists(st.sampled_from("abc"), max_size=4)) for token in [ord(part)] * 4] + [1]


@settings(max_examples=50)
@given(st.data())
def test_a_router_is_bounded_keeps_whole_beginnings_and_chooses_among_those_that_serve(data: st.DataObject):
    max_blocks = data.draw(st.integers(1, 12))
    router, running, seen = make(3, max_blocks), list[Sent](), list[list[int]]()
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["send", "send", "finish", "forget"]))
        if action == "send":
            one = data.draw(prompts())
            numbers = st.dictionaries(st.integers(0, 2), st.tuples(*[st.integers(0, 60)] * 2), min_size=1)
            loads = {number: Load(*load) for number, load in data.draw(numbers).items()}
            chosen = choose(router, one, loads=loads)
            least_loaded = min(loads.values(), key=lambda load: tuple(load))
            assert chosen in loads and (is_even(loads[chosen], least_loaded) or loads[chosen] == least_loaded)
            running.append(send(router, chosen, one))
            seen.append(one)
        elif action == "finish" and running:
            sent = running.pop(data.draw(st.integers(0, len(running) - 1)))
            output = data.draw(prompts())
            router.finish(sent, 0, output, num_cached=4 * data.draw(st.integers(0, 4)))
            seen.append([*sent.request.prompts[0], *output])
        elif action == "forget":
            number = data.draw(st.integers(0, 2))
            router.forget(number)
            router.resize(number, max_blocks)
        for cached in router._cached:
            assert len(cached) <= max_blocks
            for each in seen:
                assert_known_from_the_beginning(cached, router.hash([each]).chains[0])


def assert_known_from_the_beginning(cached: CachedBlocks, chain: Sequence[int]) -> None:
    known = [block in cached for block in chain]
    assert known == sorted(known, reverse=True)


@settings(max_examples=50)
@given(prompts().filter(lambda prompt: len(prompt) > 4), st.integers(0, 2), st.data())
def test_a_prompt_that_was_just_sent_goes_to_the_same_replica_while_load_is_even(
    prompt: list[int], number: int, data: st.DataObject
):
    router = make(3)
    send(router, number, prompt)
    loads = {each: Load(*data.draw(st.tuples(*[st.integers(0, 16)] * 2))) for each in range(3)}
    assert choose(router, prompt, loads=loads) == number
