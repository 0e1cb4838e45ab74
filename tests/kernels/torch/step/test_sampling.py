"""Distributions are compared with ones computed here in plain Python, or by the logits processors of transformers."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled import sample, score
from torch import Tensor

from atom.kernels import logprobs
from atom.kernels.torch.step import sampling
from atom.runtime.types import Logprobs, Sequence
from atom.sampling_params import SamplingParams

NUM_DRAWS = 50_000
PROMPTS = [[1] * length for length in range(1, 101)]
LOGITS = [2.0, -1.0, 0.5, 0.5, 3.0, -4.0, 1.25, 0.0, 2.75, -0.5, 1.0, -30.0]


def sequence(seed: int = 0, output: list[int] | None = None, num_prompt: int = 3, **params) -> Sequence:
    return Sequence("a", [1] * num_prompt, SamplingParams(**params), seed=seed, output=output or [])


def prompt_logprobs(logits: Tensor, targets: list[int], num_top: int) -> list[Logprobs]:
    return score(logits, list(range(len(targets))), torch.tensor(targets), num_top)


def draws(logits: list[float], num_draws: int = NUM_DRAWS, **params) -> list[int]:
    """Tokens over 100 positions and as many seeds as it takes."""
    shared = SamplingParams(**params)
    rows = [Sequence("a", PROMPTS[i % 100], shared, seed=i // 100) for i in range(num_draws)]
    return sample(torch.tensor(logits).expand(num_draws, -1), rows)[0]


def probabilities(logits: list[float], temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) -> list[float]:
    best = max(logits)
    weights = [math.exp((logit - best) / temperature) for logit in logits]
    weights = [weight if weight >= min_p else 0.0 for weight in weights]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or None]
    mass, taken, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if taken >= top_p * mass:
            break
        taken += weights[token]
        kept.append(token)
    return [weights[token] / taken if token in kept else 0.0 for token in range(len(logits))]


def assert_drawn_from(expected: list[float], tokens: list[int]) -> None:
    """Pearson's chi-square test, p > 1e-4; tokens of fewer than 5 expected draws share a bin."""
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).tolist()
    assert not any(count for count, p in zip(counts, expected, strict=True) if p == 0)
    bins = [(count, p * len(tokens)) for count, p in zip(counts, expected, strict=True)]
    large, small = [b for b in bins if b[1] >= 5], [b for b in bins if b[1] < 5]
    rest = (sum(b[0] for b in small), sum(b[1] for b in small))
    if rest[1] >= 5:
        large.append(rest)
    statistic = sum((count - want) ** 2 / want for count, want in large)
    degrees = max(len(large) - 1, 1)
    assert torch.special.gammaincc(torch.tensor(degrees / 2).double(), torch.tensor(statistic / 2).double()) > 1e-4


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.5, "min_p": 0.05, "top_k": 6, "top_p": 0.8},
        *(
            pytest.param(params, marks=pytest.mark.slow)
            for params in (
                {},
                {"temperature": 0.6},
                {"temperature": 5.0},
                {"top_k": 4},
                {"top_p": 0.7},
                {"min_p": 0.1},
                {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
            )
        ),
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(params):
    expected = probabilities(LOGITS, **params)
    assert sum(p > 0 for p in expected) > 2
    assert_drawn_from(expected, draws(LOGITS, **params))


def test_the_chi_square_test_notices_a_wrong_distribution():
    drawn = torch.tensor(probabilities(LOGITS)).multinomial(NUM_DRAWS, replacement=True).tolist()
    assert_drawn_from(probabilities(LOGITS), drawn)
    with pytest.raises(AssertionError):
        assert_drawn_from(probabilities(LOGITS, temperature=1.05), drawn)


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"temperature": 0.6}, ("TemperatureLogitsWarper", 0.6)),
        ({"top_k": 20}, ("TopKLogitsWarper", 20)),
        ({"top_p": 0.8}, ("TopPLogitsWarper", 0.8)),
        ({"min_p": 0.05}, ("MinPLogitsWarper", 0.05)),
    ],
    ids=str,
)
def test_draws_follow_the_warpers_of_transformers(params, warper):
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(60, generator=torch.Generator().manual_seed(1)) * 2
    scores = getattr(processors, warper[0])(warper[1])(None, logits[None])
    expected = scores[0].double().softmax(-1).tolist()
    assert_drawn_from(expected, draws(logits.tolist(), **params))


def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output():
    processors = pytest.importorskip("transformers.generation.logits_process")
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(300, 40, generator=generator)
    tokens = torch.randint(40, (300, 12), generator=generator)
    rows = [
        Sequence("a", row[:7], SamplingParams(temperature=0, repetition_penalty=1.7), output=row[7:])
        for row in tokens.tolist()
    ]
    expected = processors.RepetitionPenaltyLogitsProcessor(1.7)(tokens, logits.clone()).argmax(-1).tolist()
    assert expected != logits.argmax(-1).tolist()
    assert sample(logits, rows)[0] == expected


def test_frequency_and_presence_penalty_count_only_the_output():
    logits = torch.tensor([[5.0, 4.5, 4.0, 3.5]])

    def greedy(output, **params):
        return sample(logits, [Sequence("a", [0, 0], SamplingParams(temperature=0, **params), output=output)])[0][0]

    assert greedy([2], frequency_penalty=1.0) == 0
    assert greedy([0], frequency_penalty=0.4) == 0  # 4.6
    assert greedy([0, 0], frequency_penalty=0.4) == 1  # 4.2
    assert greedy([0, 0, 1], frequency_penalty=0.4) == 0  # 4.2, 4.1, 4.0
    assert greedy([0, 0], presence_penalty=0.4) == 0  # 4.6
    assert greedy([0, 1, 1], presence_penalty=1.2) == 2  # 3.8, 3.3, 4.0
    assert greedy([0, 1, 1], presence_penalty=0.5, frequency_penalty=0.5) == 0  # 4.0 (first), 3.0, 4.0
    assert greedy([3], presence_penalty=-2.0) == 3  # 5.5


def test_penalties_apply_in_the_order_repetition_then_frequency():
    logits = torch.tensor([[4.0, 1.5]])
    # 4 / 2 - 1 = 1 loses to 1.5; (4 - 1) / 2 = 1.5 would win the tie
    row = sequence(output=[0], num_prompt=0, temperature=0, repetition_penalty=2.0, frequency_penalty=1.0)
    assert sample(logits, [row])[0] == [1]


def test_logit_bias_is_added_before_the_cuts_and_beyond_the_vocabulary_ignored():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert sample(logits, [sequence(temperature=0, logit_bias={0: 2.5})])[0] == [0]
    assert sample(logits, [sequence(temperature=0, logit_bias={2: -100.0, 7: 100.0})])[0] == [1]
    assert {sample(logits, [sequence(seed, top_k=1, logit_bias={0: 2.5})])[0][0] for seed in range(50)} == {0}
    expected = probabilities([1.0, 3.5, 3.0])
    assert_drawn_from(expected, draws([1.0, 2.0, 3.0], 5000, logit_bias={1: 1.5}))


def test_min_tokens_masks_every_stop_until_there_are_enough():
    logits = torch.tensor([[1.0, 5.0, 4.0, 3.0]])
    row = Sequence(
        "a", [0], SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[2, 9]), stop_ids=frozenset({1})
    )
    assert sample(logits, [row])[0] == [3]
    row.output = [3]
    assert sample(logits, [row])[0] == [3]
    row.output = [3, 3]
    assert sample(logits, [row])[0] == [1]
    hot = [
        Sequence("a", [0], SamplingParams(temperature=9.0, min_tokens=1), seed, stop_ids=frozenset({1, 2}))
        for seed in range(200)
    ]
    assert set(sample(logits.expand(200, -1), hot)[0]) == {0, 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_greedy_takes_the_lowest_id_among_equals(dtype):
    logits = torch.randn(8, 49153, generator=torch.Generator().manual_seed(3)).to(dtype)
    equals = [[0], [49152], [7, 9], [48, 49, 4000], [1, 49152], [64, 65], [30, 31], [5]]
    for row, ties in zip(logits, equals, strict=True):
        row[ties] = 9.0
    greedy = [sequence(seed, temperature=0) for seed in range(8)]
    assert sample(logits, greedy)[0] == [0, 49152, 7, 48, 1, 64, 30, 5]
    for params in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-6}, {"temperature": 1e9, "top_k": 1}):
        rows = [sequence(seed, **params) for seed in range(8)]
        assert sample(logits, rows)[0] == [0, 49152, 7, 48, 1, 64, 30, 5]


def test_cuts_take_the_lower_ids_among_equals():
    assert_drawn_from([1 / 3, 1 / 3, 1 / 3, 0.0, 0.0], draws([1.0] * 5, 5000, top_k=3))
    assert_drawn_from([0.25, 0.0, 0.25, 0.25, 0.25, 0.0], draws([1.0, -2.0, 1.0, 1.0, 1.0, 1.0], 5000, top_p=0.7))
    assert set(draws([-0.0, -1.0, 0.0], 100, top_k=1)) == {0}


@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 2.0}], ids=str)
def test_min_p_of_1_is_greedy(more):
    """The likeliest token has a share of 1 of itself, and stays."""
    assert set(draws(LOGITS, 20, min_p=1.0, **more)) == {4}
    assert set(draws([0.0, 7.0, 1.0, 7.0], 40, min_p=1.0, **more)) == {1, 3}, "equals stay all"


def test_min_p_keeps_what_has_that_share_of_the_best():
    logits = [0.0, -1.0, -2.0, -3.0]  # 1, 0.37, 0.14 and 0.05 of the best
    assert set(draws(logits, 300, min_p=0.3)) == {0, 1}
    assert set(draws(logits, 300, min_p=0.1)) == {0, 1, 2}


def test_a_row_keeps_its_own_top_k_next_to_a_larger_one():
    rows = [sequence(seed, top_k=2 if seed % 2 else 5) for seed in range(400)]
    tokens, _ = sample(torch.zeros(400, 8), rows)
    assert (set(tokens[1::2]), set(tokens[::2])) == ({0, 1}, {0, 1, 2, 3, 4})


def test_a_repetition_penalty_lowers_negative_logits():
    row = sequence(num_prompt=1, temperature=0, repetition_penalty=2.0)  # its prompt is token 1
    assert sample(torch.tensor([[-1.5, -1.0]]), [row])[0] == [0]


def test_a_batch_of_all_kinds_draws_what_each_row_draws_by_itself():
    kinds = [
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_k": 900, "top_p": 0.8},
        {"top_p": 0.95},
        {"top_p": 0.3},
        {"min_p": 0.2},
        {"temperature": 0, "presence_penalty": 1.0},
        {"frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {4: 2.0}},
        {"temperature": 2.0, "top_k": 50, "min_p": 0.01, "logprobs": 2},
        {"logprobs": 0},
    ]
    rows = [sequence(seed, [4, 4, 8], num_prompt=1 + seed, **kind) for seed in range(4) for kind in kinds]
    logits = torch.randn(len(rows), 1000, generator=torch.Generator().manual_seed(4)).mul(3).bfloat16()
    together = sample(logits, rows)
    one_by_one = [sample(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    assert together == ([tokens[0] for tokens, _ in one_by_one], [reports[0] for _, reports in one_by_one])
    backwards = sample(logits.flip(0), rows[::-1])
    assert together == (backwards[0][::-1], backwards[1][::-1])


def test_chunks_of_a_large_batch_change_nothing(monkeypatch):
    rows = [sequence(seed, top_p=0.9, logprobs=3) for seed in range(20)]
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(5))
    whole = sample(logits, rows)
    for module in (sampling, logprobs):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 300)
    assert sample(logits, rows) == whole


def test_a_draw_depends_only_on_seed_and_position():
    def draw(*rows: Sequence) -> list[int]:
        return sample(torch.zeros(1, 1 << 16).expand(len(rows), -1), list(rows))[0]

    rows = [sequence(5, [1, 2], 3), sequence(5, [7, 9], 3), sequence(5, [9], 4), sequence(5 + 2**64, num_prompt=5)]
    assert len(set(draw(*rows))) == 1
    assert len(set(draw(*(sequence(seed) for seed in range(-20, 20))))) == 40
    assert len(set(draw(*(sequence(num_prompt=position) for position in range(1, 41))))) == 40


def test_log_probabilities_are_those_of_the_unmodified_logits():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(6)).bfloat16()
    params = [{"temperature": 0, "logprobs": 5}, {"temperature": 0.5, "logprobs": 0, "logit_bias": {3: 50.0}}, {}]
    tokens, reports = sample(logits, [sequence(**p) for p in params])
    expected = logits.float().log_softmax(-1)
    assert tokens[0] == expected[0].argmax() and tokens[1] == 3 and reports[2] is None
    for row in (0, 1):
        assert reports[row].token == tokens[row]
        assert reports[row].logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-5)
        assert reports[row].rank == 1 + int((expected[row] > expected[row, tokens[row]]).sum())
    assert reports[0].rank == 1 and reports[1].rank > 1 and reports[1].top == []
    values, ids = expected[0].sort(descending=True, stable=True)
    assert [token for token, _ in reports[0].top] == ids[:5].tolist()
    assert [value for _, value in reports[0].top] == pytest.approx(values[:5].tolist(), abs=1e-5)


def test_equal_logits_share_a_rank_and_list_the_lower_id_first():
    reports = prompt_logprobs(torch.tensor([[1.0, 3.0, 3.0, 2.0]] * 4), [0, 1, 2, 3], num_top=3)
    assert [report.rank for report in reports] == [4, 1, 1, 3]
    assert [token for token, _ in reports[0].top] == [1, 2, 3]


def test_prompt_log_probabilities_follow_log_softmax(monkeypatch):
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(7))
    targets = torch.arange(40).remainder(30).tolist()
    for module in (sampling, logprobs):
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", 200)
    reports = prompt_logprobs(logits, targets, num_top=100)
    expected = logits.log_softmax(-1)
    assert [report.token for report in reports] == targets
    for report, row in zip(reports, expected, strict=True):
        assert report.logprob == pytest.approx(row[report.token].item(), abs=1e-5)
        assert len(report.top) == 30
        assert report.top[report.rank - 1][0] == report.token
        assert sum(math.exp(value) for _, value in report.top) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("vocab", [1, 7, 49153])
def test_odd_vocabularies(vocab):
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(8)).bfloat16()
    kinds = [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.3, "top_k": 100}, {"logprobs": 20}]
    tokens, reports = sample(logits, [sequence(output=[0], **kind) for kind in kinds])
    assert all(0 <= token < vocab for token in tokens)
    assert tokens[0] == logits[0].float().argmax()
    assert len(reports[5].top) == min(vocab, 20)


def test_a_row_without_a_distribution_gives_its_largest_number_and_disturbs_nobody():
    inf, nan = math.inf, math.nan
    bad = torch.tensor([[nan] * 4, [-inf] * 4, [1.0, nan, 3.0, 2.0], [1.0, 2.0, inf, inf], [nan, -inf, -inf, -9.0]])
    good = torch.tensor([[1.0, 4.0, -inf, 2.0]])
    for params in ({"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1, "logit_bias": {0: 1.0}}):
        rows = [sequence(seed, logprobs=2, **params) for seed in range(6)]
        tokens, reports = sample(torch.cat([bad, good]), rows)
        assert tokens[:5] == [0, 0, 2, 2, 3]
        assert tokens[5] == sample(good, [rows[5]])[0][0] != 2
        assert all(math.isfinite(value) for r in reports for value in (r.logprob, *(value for _, value in r.top)))
        assert sample(bad[:1], rows[:1])[0] == [0]


def test_stops_that_are_the_whole_vocabulary_are_not_banned():
    row = Sequence("a", [0], SamplingParams(temperature=0, min_tokens=5), stop_ids=frozenset({0, 1}))
    assert sample(torch.tensor([[1.0, 2.0]]), [row])[0] == [1]


class Allows:
    """A grammar that allows these tokens next."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def allowed(self, vocab: int) -> np.ndarray:
        return np.isin(np.arange(vocab), self.tokens)

    def push(self, token: int) -> bool:
        raise AssertionError("a token is pushed at the commit")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.7}, {"temperature": 0.5, "min_p": 0.1}], ids=str)
def test_a_grammar_limits_the_draw_to_what_it_allows(params):
    allowed = [1, 3, 6, 8, 9]
    logits = [logit if token in allowed else -math.inf for token, logit in enumerate(LOGITS)]
    row = SamplingParams(**params)
    rows = [Sequence("a", PROMPTS[i % 100], row, seed=i // 100, matcher=Allows(*allowed)) for i in range(20_000)]
    drawn = sample(torch.tensor(LOGITS).expand(20_000, -1), rows)[0]
    if len(params) < 2:
        assert_drawn_from(probabilities(logits, **params), drawn)
    assert set(drawn) <= set(allowed)


def test_a_grammar_comes_after_bias_and_penalties_and_leaves_other_rows_unchanged():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]] * 3)
    bound = Sequence("a", [0], SamplingParams(temperature=0, logprobs=4), matcher=Allows(2, 3))
    biased = Sequence(
        "b", [0], SamplingParams(temperature=0, logit_bias={0: 100.0, 3: 5.0}), matcher=Allows(2, 3), output=[2]
    )
    free = Sequence("c", [0], SamplingParams(temperature=0, logprobs=4))
    tokens, reports = sample(logits, [bound, biased, free])
    assert tokens == [2, 3, 0]
    assert reports[0].top == reports[2].top, "log probabilities are those of the model"
    assert reports[0].rank == 3


@pytest.mark.parametrize(("allowed", "token"), [((1, 2), 2), ((1,), 1), ((1, 3), 1), ((0, 1), 0)])
def test_a_grammar_wins_over_min_tokens_where_they_leave_nothing(allowed: tuple[int, ...], token: int):
    params = SamplingParams(temperature=0, min_tokens=5, stop_token_ids=[3])
    row = Sequence("a", [0], params, stop_ids=frozenset({1}), matcher=Allows(*allowed))
    assert sample(torch.tensor([[3.0, 9.0, 2.0, 1.0]]), [row])[0] == [token]


def test_a_grammar_that_knows_fewer_tokens_than_the_model_allows_none_of_the_others():
    row = Sequence("a", [0], SamplingParams(temperature=0), matcher=Allows(2))
    assert sample(torch.tensor([[3.0, 9.0, 2.0, 1.0, 7.0]]), [row])[0] == [2]


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"temperature": 0, "logit_bias": {0: 9.0}}], ids=str)
def test_the_callers_logits_stay_as_they_were(params):
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(9))
    before = logits.clone()
    sample(logits, [sequence(output=[1], repetition_penalty=2.0, **params), sequence(**params)])
    assert torch.equal(logits, before)


def kept_by(logits: Tensor, params: SamplingParams) -> set[int]:
    rows = [dataclasses.replace(sequence(seed), params=params) for seed in range(200)]
    return set(sample(logits.expand(200, -1), rows)[0])


@settings(max_examples=60)
@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=30),
    temperature=st.sampled_from([0.1, 1.0, 30.0]),
    top_k=st.integers(0, 31),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_no_draw_leaves_the_kept_tokens(logits, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = probabilities(logits, temperature, min_p * (1 - 1e-6), top_k, min(top_p + 1e-6, 1.0))
    assert kept_by(torch.tensor(logits), params) <= {token for token, p in enumerate(expected) if p > 0}
