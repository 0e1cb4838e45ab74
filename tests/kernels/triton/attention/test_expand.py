"""Prompts of latent attention expanded: which, where they lie, what kernels leave to each other, and on Hopper all of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kernels.checks import assert_as_near
from kernels.paged import KIND, LatentCase, change, make_latent_case, move, reference

from atom.graph.ops.attention import attend
from atom.graph.ops.latent import split_entries
from atom.kernels.hopper import latent as on_hopper
from atom.kernels.triton.attention import latent
from atom.kernels.triton.attention.context import PIECE, Unpacked
from atom.kernels.triton.attention.expand import TILE, Expansion

SMALL = {"heads": 4, "rank": 48, "plain": 16, "rotated": 8, "value": 12}  # where from 27 queries on it pays
FULL = {"rank": 512, "plain": 128, "rotated": 64, "value": 128}
# decodes, then sequences of 1, 3, 1, 2 tiles; queries of 3 at a context of 300 are few
LENGTHS, PREFILLS = [5, 200], [(40, 40), (100, 300), (128, 128), (60, 129), (3, 300)]
NUM_TILES = [1, 3, 1, 2]
IS_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)


def weight_of(case: LatentCase) -> torch.Tensor:
    return case.kv_b.view(case.q_nope.shape[1], -1, case.kv_b.shape[1])


def expand(case: LatentCase, expansion: Expansion, k_scale: torch.Tensor | None = None) -> Unpacked:
    blocks, (table, starts, lengths, num_decodes) = case.cache.blocks, (case.batch.tables[KIND], *case.batch[2:5])
    args = blocks, latent.view_keys(blocks, case.q_rope.dtype), k_scale, table, starts, lengths, num_decodes
    return expansion.expand(*args, weight_of(case), case.q_nope.shape[2], case.q_rope.shape[2])


def entries_of(case: LatentCase, sequence: int) -> torch.Tensor:
    own = case.cache.blocks[case.batch.tables[KIND][sequence].long()].flatten(0, 1)
    return own[: case.batch.lengths[sequence]]


def expanded_by_torch(case: LatentCase, sequence: int, k_scale: float = 1.0) -> torch.Tensor:
    """[C, N, P + R + U]"""
    (_, heads, plain), rank, rotated = case.q_nope.shape, case.kv_b.shape[1], case.q_rope.shape[2]
    latents, keys = split_entries(entries_of(case, sequence), rank, case.q_rope.dtype)
    latents = (latents.float() * k_scale).to(case.kv_b.dtype)
    made = (latents.float() @ case.kv_b.float().T).to(case.kv_b.dtype).unflatten(1, (heads, -1))
    keys = keys.unsqueeze(1).expand(-1, heads, rotated).to(made.dtype)
    return torch.cat((made[..., :plain], keys, made[..., plain:]), dim=2)


@pytest.mark.sampled(12, gpu=1)
@pytest.mark.parametrize(("capacity", "num_there"), [(9, 4), (7, 4), (6, 3), (5, 3), (4, 2), (1, 1)])
@pytest.mark.parametrize("block_size", [16, 48])
def test_whole_sequences_for_which_it_pays_are_expanded_while_there_is_room(
    triton_device: str, block_size: int, capacity: int, num_there: int
):
    case = move(make_latent_case(LENGTHS, PREFILLS, **SMALL, block_size=block_size, foreign=math.nan), triton_device)
    expansion = Expansion(capacity * TILE * 4 * 36 * 4 + 1)
    blocks, places, plan = expand(case, expansion)
    assert blocks.shape == (capacity * TILE // PIECE, PIECE, 4, 36)
    assert (plan[2:7] >= 0).tolist() == [each < num_there for each in range(5)]
    assert plan[7] == 0, "tokens of no sequence are one more"
    for each in range(num_there):
        first, length = int(plan[2 + each]), PREFILLS[each][1]
        assert first == sum(NUM_TILES[:each]) * TILE // PIECE
        there = blocks[places[0, first : first + NUM_TILES[each] * TILE // PIECE].long()].flatten(0, 1)
        torch.testing.assert_close(there[:length], expanded_by_torch(case, 2 + each), rtol=1e-4, atol=1e-5)
        assert not there[length:].any(), "after the end are zeros"
    assert expand(case, expansion).blocks is blocks


@pytest.mark.parametrize("scale", [None, 0.25])
def test_latents_in_fp8_are_multiplied_by_their_scale(triton_device: str, scale: float | None):
    case = make_latent_case([], [(40, 40), (50, 140)], **SMALL, dtype=torch.float16)
    latents, keys = case.cache.blocks.split([48, 8], dim=2)
    fp8 = torch.cat((latents.to(torch.float8_e4m3fn).view(torch.uint8), keys.contiguous().view(torch.uint8)), dim=2)
    case = move(change(case, blocks=fp8.view(torch.float8_e4m3fn)), triton_device)
    k_scale = None if scale is None else torch.tensor([scale], device=triton_device)
    blocks, _, plan = expand(case, Expansion(), k_scale)
    for sequence, (_, length) in enumerate([(40, 40), (50, 140)]):
        made = blocks.flatten(0, 1)[int(plan[sequence]) * PIECE :][:length]
        torch.testing.assert_close(made, expanded_by_torch(case, sequence, scale or 1.0), rtol=2e-3, atol=2e-3)


def test_as_many_heads_are_expanded_at_a_time_as_leave_memory_for_long_contexts():
    def sizes(max_bytes: int, heads: int) -> list[int]:
        parts = Expansion(max_bytes).split(torch.empty(heads, 256, 1).half(), 64)
        ranges = [range(heads)[part] for part in parts]
        assert [head for part in ranges for head in part] == list(range(heads))
        return [len(part) for part in ranges]

    assert sizes(1 << 30, 16) == [8] * 2, "10.2 of 163,840 positions"
    assert sizes(1 << 30, 8) == [8]
    assert sizes(1 << 30, 128) == [8] * 16
    assert sizes(1 << 30, 11) == [1] * 11
    assert sizes(1, 3) == [1] * 3


@pytest.mark.sampled(0, gpu=1)
@pytest.mark.parametrize("capacity", [9, 3, 0])
@pytest.mark.parametrize(("query_len", "decodes"), [(1, [5, 200]), (3, [(3, 7), (3, 90)])])
def test_each_prompt_is_attended_by_one_of_both(
    triton_device: str, monkeypatch: pytest.MonkeyPatch, capacity: int, query_len: int, decodes: Any
):
    """Instead of Hopper's kernel, torch attends those that are expanded."""
    from atom.kernels.hopper import prefill_attention as prefill_hopper

    sequences = PREFILLS if query_len == 1 else decodes + PREFILLS
    case = make_latent_case(LENGTHS if query_len == 1 else [], sequences, **SMALL)
    case = change(case, num_decodes=2, query_len=query_len)
    truth = reference(case, scale=0.3)
    padded = [torch.cat((part, part[:2])) for part in (case.q_nope, case.q_rope)]
    case = move(change(case, q_nope=padded[0], q_rope=padded[1]), triton_device)
    attended: list[list[int]] = []

    def prefill_expanded(q_nope: Any, q_rope: Any, blocks: Any, table: Any, plan: Any, starts: Any, lengths: Any,
                         num_decodes: int, out: Any, scale: float, _tickets: Any) -> None:  # fmt: skip
        plain, rotated = q_nope.shape[2], q_rope.shape[2]
        there = [each for each in range(num_decodes, len(lengths)) if plan[each] >= 0]
        attended.append(there)
        out[starts[len(lengths)] :] = 0
        for each in there:
            own = slice(int(starts[each]), int(starts[each + 1]))
            rows = blocks[table[0, int(plan[each]) :].long()].flatten(0, 1)[: lengths[each]]
            keys, values = rows.split([plain + rotated, rows.shape[2] - plain - rotated], dim=2)
            out[own] = attend(torch.cat((q_nope[own], q_rope[own]), dim=2), keys, values, scale)

    monkeypatch.setattr(prefill_hopper, "prefill_expanded", prefill_expanded)
    monkeypatch.setattr(on_hopper, "suits", lambda *args: True)
    attention = on_hopper.PagedLatentAttention()
    attention._expansion = Expansion(max(capacity, 1) * TILE * 36 * 4)  # a head at a time
    if not capacity:
        monkeypatch.setattr(Expansion, "split", lambda *args: iter([slice(0, 4)]))  # a tile of all four does not fit
    out = attention(*case, scale=0.3).cpu()
    torch.testing.assert_close(out[: len(truth)], truth, rtol=1e-4, atol=1e-5)
    assert not out[len(truth) :].any()
    assert attended == {9: [[2, 3, 4, 5]] * 4, 3: [[2]] * 4, 0: [[2]]}[capacity]


def is_chosen(tokens: int = 600, plain: int = 128, rotated: int = 64, value: int = 128,
              dtype: torch.dtype = torch.bfloat16, cache_dtype: torch.dtype | None = None) -> bool:  # fmt: skip
    queries = (torch.empty(600, 4, dim, dtype=dtype) for dim in (plain, rotated))
    weight, cache = torch.empty(4, plain + value, 512), torch.empty(3, 16, 576, dtype=cache_dtype or dtype)
    return on_hopper.suits(*queries, weight, cache, tokens)


def test_many_tokens_on_hopper_are_expanded():
    assert is_chosen()
    assert is_chosen(dtype=torch.float16)
    assert is_chosen(cache_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("given", [
    {"tokens": 512}, {"plain": 64},
    {"rotated": 32}, {"value": 192}, {"dtype": torch.float32}, {"cache_dtype": torch.float16},
])  # fmt: skip
def test_others_are_absorbed(given: dict[str, Any]):
    assert not is_chosen(**given)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="there is no such GPU here")
@pytest.mark.parametrize(("dtype", "heads", "is_fp8"), [
    (torch.bfloat16, 16, False), (torch.bfloat16, 128, False), (torch.float16, 6, False), (torch.bfloat16, 16, True),
])  # fmt: skip
@pytest.mark.parametrize(("decodes", "prefills"), [
    ([], [(600, 600)]),
    ([1, 70, 1000], [(513, 513), (1, 900), (130, 257), (300, 4097), (16, 3000), (129, 129)]),
    ([], [(128, 128), (127, 127), (129, 1025), (255, 2048), (1, 1)]),
])  # fmt: skip
def test_prompts_on_hopper_are_as_near_to_the_truth_as_the_op(
    dtype: torch.dtype, heads: int, is_fp8: bool, decodes: Any, prefills: Any
):
    case = make_latent_case(decodes, prefills, heads=heads, **FULL, dtype=dtype)
    k_scale = None
    if is_fp8:
        latents, keys = case.cache.blocks.split([512, 64], dim=2)
        k_scale, latents = torch.tensor([0.5]), (latents / 0.5).to(torch.float8_e4m3fn)
        fp8 = torch.cat((latents.view(torch.uint8), keys.contiguous().view(torch.uint8)), dim=2)
        case = change(case, blocks=fp8.view(torch.float8_e4m3fn))
        wide = torch.cat((latents.float() * 0.5, keys.float()), dim=2)
        truth, allowed = (
            reference(change(case, blocks=wide if is_wide else wide.to(dtype)), scale=192**-0.5, wide=is_wide)
            for is_wide in (True, False)
        )
    else:
        truth, allowed = (reference(case, scale=192**-0.5, wide=is_wide) for is_wide in (True, False))
    padded = [torch.cat((part, part[:2])) for part in (case.q_nope, case.q_rope)]
    moved = (*move(change(case, q_nope=padded[0], q_rope=padded[1]), "cuda"), move(k_scale, "cuda"))
    attention = on_hopper.PagedLatentAttention()
    out = attention(*moved, scale=192**-0.5).cpu()
    assert not out[len(truth) :].any()
    assert_as_near(out[: len(truth)], allowed, truth, factor=2)
    assert attention._tickets is not None
    assert not attention._tickets.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = attention(*moved, scale=192**-0.5)
    graph.replay()
    assert torch.equal(again.cpu(), out)
