"""Each backend's tokens are those of torch's sampler, row by row; how they are distributed is counted on a GPU, and for
torch in `torch/step/test_sampling.py`."""

import math

import pytest
import sampled
import torch
from conftest import Place
from torch import Tensor

from atom.kernels import find_step_kernels, logprobs
from atom.kernels.logprobs import top_logprobs
from atom.kernels.triton.step import sampling
from atom.runtime.step.input import pack_admission
from atom.runtime.step.request_state import RequestState
from atom.runtime.types import Sequence
from atom.sampling_params import SamplingParams

NUM_DRAWS = 50_000
FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"top_p": 1e-9},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_k": 100, "temperature": 2.0},  # as many as are kept here are put aside but not paired
    {"top_p": 0.99, "temperature": 5.0},  # and here the row itself is bisected
    {"top_k": 120, "top_p": 0.7, "temperature": 5.0},
    {"top_k": (1 << 31) - 1, "temperature": 0.3},
    {"min_p": 1.0, "top_p": 0.9},
]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU Triton's kernels run in parts so small that a tiny vocabulary has several."""
    if not torch.cuda.is_available():
        for name, size in {"PART": 64, "MAX_GATHERED": 100, "MAX_PAIRED": 32}.items():
            monkeypatch.setattr(sampling, name, size)


@pytest.fixture
def cuda() -> str:
    return "cuda" if torch.cuda.is_available() else pytest.skip("there is no GPU here")


def sequence(seed: int = 0, output: list[int] | None = None, num_prompt: int = 3, **params) -> Sequence:
    return Sequence("a", list(range(num_prompt)), SamplingParams(**params), seed=seed, output=output or [])


def sample(place: Place, logits: Tensor, sequences: list[Sequence], kind: str | None = None) -> list[int]:
    return sampled.sample(logits, sequences, place.device, place.backend, kind)[0]


def expected(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    return sampled.sample(logits.cpu(), sequences)[0]


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocab", [1, 64, 65, 129])
def test_greedy_takes_the_lowest_id_among_equals(place: Place, vocab: int, dtype: torch.dtype):
    if place == Place("cpu", "triton") and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no bf16")
    logits = randn(vocab, 5, vocab, dtype=dtype)
    ties = [[0], [vocab - 1], [vocab // 2, vocab - 1], [0, vocab - 1], [vocab // 3, vocab // 2]]
    for row, ids in zip(logits, ties, strict=True):
        row[ids] = 30.0
    greedy = [sequence(seed, temperature=0) for seed in range(5)]
    assert sample(place, logits, greedy) == [min(ids) for ids in ties]
    assert sample(place, logits, [sequence(seed, temperature=1e-6) for seed in range(5)], "random") == [
        min(ids) for ids in ties
    ]
    cold = [sequence(0, top_k=1), sequence(1, top_p=1e-9), sequence(2, top_k=1, temperature=1e9), *greedy[3:]]
    assert sample(place, logits, cold) == [min(ids) for ids in ties]


@pytest.mark.parametrize("vocab", [1, 37, 300])
def test_a_random_row_draws_what_it_draws_on_the_cpu(place: Place, vocab: int):
    seeds = [0, 1, -1, 2**63, 2**64 - 1, -(2**63), 12345]
    temperatures = [1.0, 0.6, 1e-5, 30.0, 0.0]
    rows = [sequence(seed, [0] * (i % 3), 1 + i, temperature=temperatures[i % 5]) for i, seed in enumerate(seeds)]
    logits = randn(vocab, len(rows), vocab)
    assert sample(place, logits, rows) == expected(logits, rows)


@pytest.mark.sampled(3, gpu=1)
@pytest.mark.parametrize("vocab", [1, 37, 150])
def test_a_filtered_row_draws_what_it_draws_on_the_cpu(place: Place, vocab: int):
    rows = [sequence(seed, **each) for seed, each in enumerate(FILTERS)]
    logits = randn(vocab, len(rows), vocab)
    assert sample(place, logits, rows) == expected(logits, rows)


def test_equal_logits_are_cut_by_id(place: Place):
    vocab = 150  # more equals than are put aside
    rows = [
        sequence(seed, top_k=k, top_p=p) for seed, (k, p) in enumerate([(120, 1.0), (0, 0.9), (130, 0.8), (3, 1.0)])
    ]
    logits = torch.ones(len(rows), vocab)
    tokens = sample(place, logits, rows)
    assert tokens == expected(logits, rows)
    assert all(token < most for token, most in zip(tokens, (120, 135, 104, 3), strict=True))
    logits = (randn(7, len(rows), vocab) / 2).round()  # 7 values or so, each many times
    assert sample(place, logits, rows) == expected(logits, rows)


def test_min_p_of_1_is_greedy(place: Place):
    logits = randn(3, 4, 150)
    rows = [sequence(seed, min_p=1.0, **more) for seed, more in enumerate(({}, {"top_k": 5}, {"top_p": 0.9}, {}))]
    assert sample(place, logits, rows) == logits.argmax(-1).tolist()


def test_top_p_is_a_share_of_what_top_k_and_min_p_leave(place: Place):
    logits = torch.arange(70).neg().mul(0.05)  # of which far fewer are kept than count
    filters = [{"top_k": 64, "top_p": 0.3}, {"min_p": 0.1, "top_p": 0.4}, {"top_k": 50, "min_p": 0.3, "top_p": 0.5}]
    rows = [sequence(seed, **each) for seed in range(5) for each in filters]
    assert sample(place, logits.expand(len(rows), -1), rows) == expected(logits.expand(len(rows), -1), rows)


def test_penalties_are_those_of_the_cpu(place: Place):
    penalties = [
        {"repetition_penalty": 1.7, "presence_penalty": -1.2},
        {"frequency_penalty": 0.3},
        {"repetition_penalty": 0.8, "frequency_penalty": -0.4, "presence_penalty": 0.9},
        {},
    ]
    kinds = [{"temperature": 0}, {"temperature": 0.8}, {"top_k": 10, "top_p": 0.9}, {"top_p": 0.98, "temperature": 4.0}]
    rows = [
        sequence(i, [(i * j) % 11 for j in range(9)], 5, **penalty, **kind)
        for i, (penalty, kind) in enumerate((penalty, kind) for penalty in penalties for kind in kinds)
    ]
    logits = randn(1, len(rows), 130)
    logits[:, :11] += 5.0  # what was seen is likely
    want = expected(logits, rows)
    assert sample(place, logits, rows) == want
    assert want != expected(logits, [Sequence("a", r.prompt, r.params, r.seed) for r in rows])
    greedy = rows[::4]
    assert sample(place, logits[::4], greedy, "greedy") == want[::4]


def test_a_sampled_token_is_counted(place: Place):
    slots = RequestState(2, 4, place.device)
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    sampled.admit(slots, [1], [Sequence("a", [3, 3], params, output=[2])])
    slots.set_counts(1, [3, 3, 2], [2])
    logits = torch.tensor([[2.5, 0.0, 0.0, 3.0], [9.0, 9.0, 9.0, 9.5]], device=place.device)
    rows = torch.tensor([1, 2], dtype=torch.int32, device=place.device)  # the second is padding
    out = torch.empty(2, dtype=torch.int64, device=place.device)
    tokens = []
    for _ in range(4):
        find_step_kernels(place.device, place.backend).sample(logits, rows, slots, "greedy", out, penalties=True)
        tokens.append(out.tolist())
    assert tokens == [[3, 0], [0, 0], [3, 0], [0, 0]]  # 3 and 2.5, 2 and 2.5, 2 and 1.5, 1 and 1.5
    assert slots.counts.tolist() == [[0] * 4, [4, 0, 3, 5], [0] * 4]
    assert slots.lengths.tolist() == [1, 7, 1] and slots.tokens.tolist() == [0, 0, 0]


def test_a_row_draws_the_same_by_itself_among_others_and_in_a_later_kind(place: Place):
    kinds = [{"temperature": 0}, {}, {"temperature": 0.7}, {"min_p": 0.2}, {"top_k": 6}, {"top_p": 0.8}]
    kinds += [{"top_p": 0.99, "temperature": 6.0}, {"top_k": 3, "presence_penalty": 1.0}]
    rows = [sequence(seed, [4, 4, 8], 1 + seed, **kind) for seed, kind in enumerate(kinds)]
    logits = randn(4, len(rows), 120)
    together = sample(place, logits, rows)
    assert together == [sample(place, logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == sample(place, logits.flip(0), rows[::-1])[::-1]


def test_padding_rows_change_nothing(place: Place):
    slots = RequestState(3, 50, place.device)
    sampled.admit(slots, [2], [sequence(5, num_prompt=6, temperature=0.9, top_k=4)])
    logits = randn(5, 4, 50)
    logits[1:] = math.nan
    rows = torch.tensor([2, 3, 3, 3], dtype=torch.int32, device=place.device)
    out = torch.empty(4, dtype=torch.int64, device=place.device)
    for kind in ("random", "filtered"):
        find_step_kernels(place.device, place.backend).sample(logits.to(place.device), rows, slots, kind, out)
        assert out[1:].tolist() == [0, 0, 0]
    assert slots.lengths.tolist() == [1, 1, 8, 1]
    assert slots.tokens.tolist()[3] == 0 and not slots.reported[3].any()


def test_a_row_without_a_distribution_gives_its_largest_number_and_disturbs_nobody(place: Place):
    inf, nan = math.inf, math.nan
    logits = torch.full((7, 70), -inf)  # the last part is masked in all rows but one
    logits[0] = nan
    logits[2:, :4] = torch.tensor(
        [[1.0, nan, 3.0, 2.0], [1.0, 2.0, inf, inf], [nan, -inf, -inf, -9.0], [nan, -inf, nan, -inf], [1.0, 4, -inf, 2]]
    )
    penalty = {"top_p": 0.5, "presence_penalty": 2.0}  # it does not count without a distribution
    for params in ({"temperature": 0}, {}, {"top_k": 2, "min_p": 0.1}, penalty):
        rows = [sequence(seed, output=[2], num_prompt=1, **params) for seed in range(7)]
        tokens = sample(place, logits, rows)
        assert tokens == expected(logits, rows)
        assert tokens[:6] == [0, 0, 2, 2, 3, 1]


def test_logits_may_be_a_view_and_stay_as_they_were(place: Place):
    rows = [sequence(seed, top_k=9, frequency_penalty=1.0, output=[3]) for seed in range(3)]
    buffer = randn(8, 5, 100).to(place.device)
    before = buffer.clone()
    assert sample(place, buffer[1:4, :70], rows) == expected(before[1:4, :70], rows)
    assert torch.equal(buffer, before)


def test_an_empty_batch_gives_nothing(place: Place):
    empty = torch.empty(0, dtype=torch.int32, device=place.device)
    for kind in ("greedy", "random", "filtered"):
        find_step_kernels(place.device, place.backend).sample(
            torch.empty(0, 10, device=place.device), empty, RequestState(2, 10, place.device), kind, empty.long()
        )


@pytest.mark.parametrize("num_top", [0, 1, 5, 100])
def test_log_probabilities_are_those_of_the_cpu(place: Place, num_top: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 200)
    logits = randn(6, 9, 60, dtype=torch.float16)
    logits[1] = logits[1].round()
    logits[2, 5], logits[3] = math.nan, 1.0
    rows, tokens = torch.tensor([8, 0, 1, 2, 3, 6]), torch.arange(9) * 5
    tokens[2] = 5  # that is nan
    reports = sampled.score(logits, rows.tolist(), tokens, num_top)
    logits, rows, tokens = logits.to(place.device), rows.to(place.device), tokens.to(place.device)
    totals, ids, top = top_logprobs(logits, rows, num_top)
    chosen, ranks = torch.empty(6, device=place.device), torch.empty(6, dtype=torch.int32, device=place.device)
    find_step_kernels(place.device, place.backend).score_drawn(logits, rows, tokens, totals, chosen, ranks)
    assert chosen.tolist() == pytest.approx([report.logprob for report in reports], abs=1e-5)
    assert ranks.tolist() == [report.rank for report in reports]
    assert ids.tolist() == [[token for token, _ in report.top] for report in reports]
    for row, report in zip(top.tolist(), reports, strict=True):
        assert row == pytest.approx([value for _, value in report.top], abs=1e-5)


def test_slots_hold_what_a_sequence_was_admitted_with(place: Place):
    slots = RequestState(3, 6, place.device)
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, frequency_penalty=0.25)
    first, second = Sequence("a", [1] * 7, params, -1), sequence(2**63 + 5, num_prompt=9, temperature=1.0)
    second.params = SamplingParams(presence_penalty=-1.0)
    packs = [pack_admission(slot, s.num_tokens, s.params, s.seed) for slot, s in ((2, first), (0, second))]
    slots.admit(bytearray(b"".join(packs)))
    assert slots.lengths.tolist() == [9, 1, 7, 1]
    assert slots.seed.tolist() == [5 - 2**63, 0, -1, 0]
    assert slots.columns["top_k"].tolist() == [0, 0, 3, 0]
    assert slots.columns["temperature"].tolist() == [1.0, 0.0, 0.5, 0.0]
    assert slots.columns["top_p"].tolist() == [1.0, 1.0, 0.9, 1.0]
    assert slots.columns["min_p"].tolist() == [0.0, 0.0, 0.1, 0.0]
    assert slots.columns["repetition_penalty"].tolist() == [1.0] * 4
    assert slots.columns["frequency_penalty"].tolist() == [0.0, 0.0, 0.25, 0.0]
    assert slots.columns["presence_penalty"].tolist() == [-1.0, 0.0, 0.0, 0.0]
    slots.set_counts(1, [5, 5, 2], [2, 2, 3])
    assert slots.counts.tolist() == [[0] * 6, [0, 0, 5, 2, 0, 1], [0] * 6, [0] * 6]
    slots.set_counts(1, [0], [])
    assert slots.counts[1].tolist() == [1, 0, 0, 0, 0, 0]


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """What each token of a row is drawn with, f64[V]."""
    logits = logits.double()
    weights = ((logits - logits.max()) / params.temperature).exp()
    weights[weights < params.min_p] = 0
    order = logits.sort(descending=True, stable=True).indices
    kept = weights[order]
    kept[params.top_k or len(kept) :] = 0
    kept[kept.cumsum(0) - kept >= params.top_p * kept.sum()] = 0
    return torch.zeros_like(weights).scatter_(0, order, kept / kept.sum())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 5.0},
        {"top_k": 40},
        {"top_k": 700, "temperature": 3.0},
        {"top_p": 0.7},
        {"top_p": 0.95, "temperature": 4.0},
        {"min_p": 0.02},
        {"temperature": 1.5, "min_p": 0.01, "top_k": 200, "top_p": 0.9},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "limits"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {}),
        (torch.bfloat16, {"MAX_PAIRED": 16}),
        (torch.bfloat16, {"MAX_GATHERED": 1}),
    ],
    ids=["bf16", "fp32", "gathered ones bisected", "rows bisected"],
)
def test_draws_follow_the_exact_distribution(
    cuda: str, params: dict, dtype: torch.dtype, limits: dict, monkeypatch: pytest.MonkeyPatch
):
    for name, size in {"PART": 256, **limits}.items():
        monkeypatch.setattr(sampling, name, size)
    vocab, num_rows = 1000, 500
    row = randn(11, vocab, dtype=dtype).float()
    shared = SamplingParams(**params)
    seen = [3, 3, 500] if len(params) == 3 else []
    slots = RequestState(num_rows, vocab, cuda)
    sampled.admit(slots, list(range(num_rows)), [Sequence("a", [7], shared, seed) for seed in range(num_rows)])
    rows = torch.arange(num_rows, dtype=torch.int32, device=cuda)
    logits = row.to(cuda, dtype).expand(num_rows, -1)
    drawn = torch.empty(NUM_DRAWS // num_rows, num_rows, dtype=torch.int64, device=cuda)
    for slot in range(num_rows) if seen else ():
        slots.set_counts(slot, [7], seen)
    counts = slots.counts.clone()
    for out in drawn:
        slots.counts.copy_(counts)
        sampling.sample(
            logits,
            rows,
            slots,
            "filtered" if sampled.kind_of([sequence(**params)]) == "filtered" else "random",
            out,
            bool(seen),
        )
    if seen:
        for token in (7, *set(seen)):
            row[token] = row[token] / 1.3 if row[token] > 0 else row[token] * 1.3
        row[3] -= 2 * 0.5 + 1.0
        row[500] -= 0.5 + 1.0
    want = probabilities(row, shared) * NUM_DRAWS
    got = drawn.flatten().bincount(minlength=vocab).cpu().double()
    assert not got[want == 0].any()
    large = want >= 5
    got = torch.cat([got[large], got[~large].sum()[None]])
    want = torch.cat([want[large], want[~large].sum()[None]])
    if want[-1] < 5:  # the rest is too small for a bin of its own
        got, want = got[:-1], want[:-1]
    assert len(want) > 2
    statistic = ((got - want) ** 2 / want).sum()
    assert torch.special.gammaincc(torch.tensor((len(want) - 1) / 2).double(), statistic / 2) > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spread", [0.2, 1.0])
def test_of_many_draws_999_in_1000_are_those_of_the_cpu(cuda: str, dtype: torch.dtype, spread: float):
    rows = [
        sequence(seed, **{"temperature": 0.8, **each})
        for seed in range(64)
        for each in [*FILTERS[:-2], {}, {"temperature": 0}]
    ]
    logits = (randn(12, len(rows), 20_011) * spread).to(dtype)
    got, want = sample(Place(cuda, "triton"), logits, rows), expected(logits, rows)
    assert sum(a != b for a, b in zip(got, want, strict=True)) <= len(rows) // 1000 + 1
    one_by_one = [sample(Place(cuda, "triton"), logits[i : i + 1], [rows[i]])[0] for i in range(0, len(rows), 29)]
    assert one_by_one == got[::29]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["greedy", "random", "filtered"])
def test_a_captured_step_goes_on_with_each_replay(cuda: str, kind: str):
    params = {"greedy": {"temperature": 0}, "random": {}, "filtered": {"top_p": 0.9, "presence_penalty": 0.5}}[kind]
    logits = randn(13, 3, 5000, dtype=torch.bfloat16).to(cuda)
    rows = torch.tensor([2, 0, 3], dtype=torch.int32, device=cuda)
    out = torch.empty(3, dtype=torch.int64, device=cuda)
    slots = RequestState(3, 5000, cuda)

    def step() -> None:
        sampling.sample(logits, rows, slots, kind, out, penalties=kind == "filtered")

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    sequences = [sequence(seed, num_prompt=4, **params) for seed in range(2)]
    sampled.admit(slots, [2, 0], sequences)
    for slot, each in zip((2, 0), sequences, strict=True):
        slots.set_counts(slot, each.prompt, [])
    for _ in range(5):
        want = expected(logits[:2], sequences)
        graph.replay()
        assert out.tolist() == [*want, 0]
        for each, token in zip(sequences, want, strict=True):
            each.output.append(token)
    assert slots.lengths.tolist() == [9, 1, 9, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [151_936, 262_144, 100_003])
def test_large_vocabularies(cuda: str, vocab: int):
    rows = [sequence(seed, **kind) for seed, kind in enumerate([{"temperature": 0}, {}, *FILTERS[:-2]])]
    logits = randn(14, len(rows), vocab, dtype=torch.bfloat16)
    assert sample(Place(cuda, "triton"), logits, rows) == expected(logits, rows)
