"""What a device drafts and accepts of its slots is what the host's drafter and plain Python give."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from conftest import Place

from atom import SamplingParams
from atom.graph import ops
from atom.graph.noise import hash_seeds, uniform
from atom.kernels import find_kernel, find_step_kernels
from atom.kernels.backend import LoadContext
from atom.runtime.draft.speculation import NgramDrafter
from atom.runtime.step.input import pack_admission
from atom.runtime.step.request_state import RequestState
from atom.runtime.types import Sequence

NUM_SLOTS, WIDTH = 9, 5000


def histories(chance: random.Random) -> list[list[int]]:
    """Of odd lengths, some of few different tokens; one whose only place is the first of many."""
    lengths = [1, 2, 3, 4, 17, 1023, 1026, 4099]
    made = [[chance.randrange(3 if length < 1000 else 40) for _ in range(length)] for length in lengths]
    return [*made, [7, 8, 9, *range(10, 3000), 7, 8, 9]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("min_n", "max_n"), [(1, 1), (1, 4), (2, 4), (3, 16)])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_what_is_looked_up_is_what_the_host_finds(place: Place, min_n: int, max_n: int, num_drafts: int):
    chance = random.Random(min_n * 100 + max_n)
    every = histories(chance)
    state = RequestState(NUM_SLOTS, 50, place.device, num_drafts, WIDTH)
    order = chance.sample(range(NUM_SLOTS), NUM_SLOTS)
    assert state.history is not None and state.drafts is not None
    for slot, tokens in zip(order, every, strict=True):
        state.history[slot].fill_(7)  # of an earlier sequence
        state.set_history(slot, bytearray(torch.tensor(tokens, dtype=torch.int32).numpy().tobytes()))
        state.lengths[slot] = len(tokens)
    state.drafts.fill_(5)
    slots = torch.tensor([*order, NUM_SLOTS, NUM_SLOTS], dtype=torch.int32, device=place.device)
    find_step_kernels(place.device, place.backend).find_ngrams(slots, state, min_n, max_n)
    found = 0
    for number, (slot, tokens) in enumerate(zip(order, every, strict=True)):
        drafter = NgramDrafter(num_drafts, min_n, max_n)
        sequence = Sequence(str(number), tokens, SamplingParams())
        drafter.draft(sequence, num_drafts)  # looks at some of many tokens at a time
        expected = drafter.draft(sequence, num_drafts)
        assert state.drafts[slot].tolist() == (expected or [-1] * num_drafts)
        found += bool(expected)
    assert state.drafts[NUM_SLOTS].tolist() == [-1] * num_drafts
    assert 1 <= found < len(every)


@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_drafts_get_the_noise_of_the_draws_that_they_guess(place: Place, num_rows: int):
    state = RequestState(200, 50, place.device)
    order = random.Random(num_rows).sample(range(200), num_rows)
    kinds = {  # what is asked for, and the temperature and depth of drafts
        0: ({"temperature": 0}, 0.0, 0.0),
        1: ({"temperature": 1e-6, "top_p": 0.5}, 0.0, 0.0),
        2: ({}, 1.0, math.inf),
        3: ({"temperature": 0.5, "min_p": 0.1}, 0.5, -0.5 * math.log(0.1)),
        4: ({"top_p": 0.8, "top_k": 40}, 1.0, -math.log(0.1)),
        5: ({"temperature": 2.0, "top_k": 10}, 2.0, -2 * math.log(0.05)),
        6: ({"temperature": 3.0, "top_k": 1}, 0.0, 0.0),
    }
    for slot in order:
        params = SamplingParams(**kinds[slot % 7][0])
        state.admit(bytearray(pack_admission(slot, 1 + slot % 5, params, seed=slot * 7919 - 5)))
    slots = torch.tensor([*order, 200], dtype=torch.int32, device=place.device)  # the last is padding
    keys, temperatures, depths = find_step_kernels(place.device, place.backend).draw_noise(slots, state, 3)
    for number, row in enumerate(keys[:, :-1].cpu()):
        positions = torch.tensor([1 + slot % 5 + number for slot in order])
        assert torch.equal(row, hash_seeds(torch.tensor([slot * 7919 - 5 for slot in order]), positions))
    assert temperatures.tolist() == [kinds[slot % 7][1] for slot in order] + [0.0]
    assert depths.tolist() == pytest.approx([kinds[slot % 7][2] for slot in order] + [0.0], rel=1e-5)


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("vocab", [1, 50, 9001])
def test_drafts_are_drawn_as_by_the_op(place: Place, vocab: int, has_offsets: bool):
    chance = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=chance) * 3
    logits[1, vocab // 2 :] = 90.0  # of equals the lowest
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (6,), generator=chance)
    temperatures, depths = torch.tensor([1.0, 0.0, 0.0, 0.5, 3.0, 20.0]), torch.tensor([math.inf, 0, 0, 1.0, 9.0, 3.0])
    offsets = torch.arange(vocab) * 3 if has_offsets else None
    given = (logits, keys, temperatures, depths, offsets)
    kernel = find_kernel(ops.gumbel_argmax, place.backend).load(LoadContext())
    found = kernel(*(each if each is None else each.to(place.device) for each in given)).tolist()
    assert found == ops.gumbel_argmax(*given).tolist()
    assert found[1] == (4 if has_offsets else 1) * (vocab // 2)
    if vocab > 1:
        assert found != ops.gumbel_argmax(logits, keys, torch.zeros(6), depths, offsets).tolist()


@pytest.mark.parametrize("is_by_chance", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_a_draft_counts_once_those_before_it_did(place: Place, num_rows: int, is_by_chance: bool):
    chance, num_drafts = random.Random(num_rows), 3
    state = RequestState(200, 50, place.device, num_drafts, 10)
    assert state.drafts is not None
    order = chance.sample(range(200), num_rows - num_rows // 5) + [200] * (num_rows // 5)
    drafts = torch.tensor([[chance.randrange(2) for _ in range(num_drafts)] for _ in range(201)])
    lengths = torch.tensor([chance.randrange(1, 9) for _ in range(201)], dtype=torch.int32)
    seeds = torch.tensor([chance.randrange(-(1 << 63), 1 << 63) for _ in range(201)])
    for own, given in ((state.drafts, drafts), (state.lengths, lengths), (state.seed, seeds)):
        own.copy_(given)
    drawn = torch.tensor([[chance.randrange(2) for _ in range(num_rows)] for _ in range(1 + num_drafts)])
    max_accepted = [chance.randrange(num_drafts + 1) for _ in range(num_rows)]
    rates = (0.9, 0.5, 0.0)
    left = torch.tensor(order, dtype=torch.int32, device=place.device).repeat(1 + num_drafts, 1)
    accept = find_step_kernels(place.device, place.backend).accept
    on_device = torch.tensor(rates, device=place.device) if is_by_chance else None
    for depth in range(1, 1 + num_drafts):
        accept(
            drawn.to(place.device), left, torch.tensor(max_accepted, dtype=torch.int32, device=place.device), state, depth,
            on_device,
        )  # fmt: skip
    num_accepted = 0
    for row, slot in enumerate(order):
        expected = [slot]
        for depth in range(num_drafts):
            is_next = slot < 200 and depth < max_accepted[row] and expected[-1] != 200
            if is_by_chance:
                number = uniform(hash_seeds(~seeds[slot : slot + 1], lengths[slot : slot + 1]))
                is_next = is_next and float(number[0]) < rates[depth]
            else:
                is_next = is_next and int(drawn[depth, row]) == int(drafts[slot, depth])
            expected.append(slot if is_next else 200)
            num_accepted += is_next
        assert left[:, row].tolist() == expected
    assert num_accepted or num_rows < 100


@pytest.mark.sampled(0, gpu=3)
@pytest.mark.parametrize(
    ("kind", "params", "limit"),
    [("random", {}, 61.1), ("filtered", {"top_k": 8}, 24.3), ("filtered", {"top_p": 0.8}, 61.1)],
    ids=["all", "top_k", "top_p"],
)
def test_draws_after_drafts_follow_the_models_distribution(
    place: Place, kind: str, params: dict[str, Any], limit: float
):
    """Chi-square over 60,000 seeds: of the draws at the newest tokens, and of those after the drafts that were right.

    limit: its 99.9th percentile, by as many degrees of freedom as tokens can be drawn, or more
    """
    if place.backend == "triton" and place.device == "cpu":
        pytest.skip("Triton's interpreter takes too long for so many rows")
    num_rows, vocab, depths = 60_000, 32, 3
    state = RequestState(num_rows, vocab, place.device, depths - 1)
    assert state.drafts is not None
    asked = SamplingParams(temperature=0.8, **params)
    state.admit(bytearray(b"".join(pack_admission(slot, 5, asked, seed=slot * 7919) for slot in range(num_rows))))
    logits = torch.randn(depths, vocab, generator=torch.Generator().manual_seed(3))
    # a request's drafts are of the two likeliest tokens, others for its neighbor
    likeliest = logits[:-1].topk(2).indices.T  # [2, depths - 1]
    drafts = likeliest[torch.arange(num_rows) % 2]
    state.drafts[:num_rows] = drafts.to(place.device)
    kernels = find_step_kernels(place.device, place.backend)
    left = torch.arange(num_rows, dtype=torch.int32, device=place.device).repeat(depths, 1)
    drawn = torch.empty(depths, num_rows, dtype=torch.int64, device=place.device)
    limits = torch.full((num_rows,), depths - 1, dtype=torch.int32, device=place.device)
    for depth in range(depths):
        if depth:
            kernels.accept(drawn, left, limits, state, depth, None)
        rows = logits[depth].to(place.device).repeat(num_rows, 1)
        kernels.sample(rows, left[depth], state, kind, drawn[depth], False)
    found, is_next = drawn.cpu(), torch.ones(num_rows, dtype=torch.bool)
    for depth, own in enumerate(logits.double() / 0.8):
        if depth:
            is_next &= found[depth - 1] == drafts[:, depth - 1]
        assert torch.equal(left[depth].cpu() < num_rows, is_next) and is_next.sum() > 1000
        expected = probabilities(own, **params) * is_next.sum()
        counts = torch.bincount(found[depth, is_next], minlength=vocab).double()
        is_kept = expected > 0
        assert not counts[~is_kept].any()
        assert ((counts - expected)[is_kept].square() / expected[is_kept]).sum() < limit


def probabilities(scaled: torch.Tensor, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """The distribution of scaled logits [V] of float64: the top_k likeliest, or those that top_p needs."""
    kept = scaled.clone()
    if top_k:
        kept[scaled < scaled.topk(top_k).values[-1]] = -torch.inf
    if top_p < 1:
        sorted_p, order = scaled.softmax(0).sort(descending=True)
        kept[order[sorted_p.cumsum(0) - sorted_p >= top_p]] = -torch.inf
    return kept.softmax(0)


@pytest.mark.parametrize("is_by_chance", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_what_was_not_drawn_is_reported_as_nothing(place: Place, num_rows: int, is_by_chance: bool):
    chance, num_drafts = random.Random(num_rows), 3
    state = RequestState(200, 50, place.device, num_drafts, 10)
    assert state.drafts is not None
    drafts = [[chance.randrange(-1, 50) for _ in range(num_drafts)] for _ in range(201)]
    state.drafts.copy_(torch.tensor(drafts))
    order = chance.sample(range(201), num_rows)
    drawn = [[chance.randrange(50) for _ in order] for _ in range(num_drafts)]  # one draft fewer than there may be
    left = [[chance.choice([slot, 200]) for slot in order] for _ in drawn]
    on_device = torch.tensor(drawn, device=place.device)
    found = find_step_kernels(place.device, place.backend).finish_drafts(
        on_device, torch.tensor(left, dtype=torch.int32, device=place.device),
        torch.tensor(order, dtype=torch.int32, device=place.device), state, is_by_chance,
    )  # fmt: skip
    assert on_device.tolist() == [
        [-1 if slot == 200 else token for token, slot in zip(*row, strict=True)]
        for row in zip(drawn, left, strict=True)
    ]
    lowest = 0 if is_by_chance else -1
    assert found.tolist() == [[max(token, lowest) for token in drafts[slot][:2]] for slot in order]


@pytest.mark.parametrize(("shape", "width"), [((7,), 7), ((3, 700), 2100), ((5,), 9)], ids=["few", "many", "gaps"])
def test_rows_are_kept_by_slot(place: Place, shape: tuple[int, ...], width: int):
    chance = torch.Generator().manual_seed(width)
    values = torch.randn(11, width, generator=chance).bfloat16()
    values = values[:, : math.prod(shape)].unflatten(1, shape)
    before = torch.randn(6, *shape, generator=chance).bfloat16()
    kept = before.to(place.device)
    slots, places = torch.tensor([4, 0, 3], dtype=torch.int32), torch.tensor([10, 2, 2])
    keep_rows = find_step_kernels(place.device, place.backend).keep_rows
    keep_rows(kept, slots.to(place.device), values.to(place.device), places.to(place.device))
    assert torch.equal(kept[[4, 0, 3]].cpu(), values[[10, 2, 2]])
    assert torch.equal(kept[[1, 2, 5]].cpu(), before[[1, 2, 5]])
