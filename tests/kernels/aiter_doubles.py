"""Doubles of AITER's functions: the recorded signatures around bodies in plain torch.

aiter = library(read_contract())
aiter["rms_norm"](x, weight, 1e-6)      # through rmsnorm2d_fwd(input, weight, epsilon, …) of the contract

A body does what AITER documents or its own tests check with, and checks the layouts that it is given.
"""

from __future__ import annotations

import enum
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from atom.graph import PackedWeight, Type
from atom.kernels.aiter.functions import FUNCTIONS, QUANT_TYPE, Aiter

CONTRACT = Path(__file__).parent / "aiter" / "contract.json"
NEWER = CONTRACT.with_name("newer.json")


def read_contract() -> dict[str, Any]:
    """`source`: what was read; `functions`: by place, parameters and defaults"""
    contract: dict[str, Any] = json.loads(CONTRACT.read_text())
    return contract


def read_newest() -> dict[str, str]:
    """Parameters of every function that atom calls: where the wheel has none, those of later sources."""
    newer: dict[str, str] = json.loads(NEWER.read_text())["functions"]
    recorded: dict[str, str] = read_contract()["functions"]
    lacking = [each for each in FUNCTIONS.values() if not {*each.places} & {*recorded}]
    return recorded | {place: newer[place] for each in lacking for place in each.places}


def write_sources(folder: Path, functions: dict[str, str]) -> Path:
    """A source tree with functions of these signatures, which `read_signature` reads."""
    for place, signature in functions.items():
        module, _, name = place.partition(":")
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"def {name}({signature}): ...\n")
    return folder


def library(root: Path, functions: dict[str, str], calls: list[str] | None = None) -> Aiter:
    """AITER as a contract has it. root: of its sources. calls: the names of functions are appended"""
    names = {place: name for name, function in FUNCTIONS.items() for place in function.places}

    def load(place: str) -> Callable[..., Any]:
        if place == QUANT_TYPE:
            return QuantType
        body = DOUBLES[names[place]]

        def run(given: dict[str, Any]) -> Any:
            if calls is not None:
                calls.append(names[place])
            if names[place] not in ("rope_and_write", "attention", "expert_matmuls"):  # which take strides
                assert all(each.is_contiguous() for each in given.values() if isinstance(each, Tensor)), place
            return body(**{key: value for key, value in given.items() if value is not ...})

        scope: dict[str, Any] = {"run": run}
        exec(f"def double({functions[place]}): return run(locals())", scope)
        double: Callable[..., Any] = scope["double"]
        return double

    return Aiter(root, load)


def mxfp4(*shape: int) -> PackedWeight:
    """Any pairs of E2M1, and exponents that do not add up to large sums."""
    values = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), dtype=torch.uint8)
    scales = torch.randint(119, 123, (*shape[:-1], shape[-1] // 32), dtype=torch.uint8)
    return PackedWeight(Type("bf16", shape, "mxfp4"), {"values": values, "scales": scales})


def move(values: Any, device: str) -> Any:
    """A copy on a device of tensors and packed weights."""

    def copy(each: Any) -> Any:
        if isinstance(each, PackedWeight):
            return replace(each, parts=move(dict(each.parts), device))
        return each.to(device, copy=True) if isinstance(each, Tensor) else each

    return tree_map(copy, values)


def largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max  # 448 of e4m3fn, 240 of e4m3fnuz


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return scaled * weight.float()


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scales = x.float().abs().amax(-1, keepdim=True) / largest(dtype)
    return (x.float() / scales).to(dtype), scales


def rms_norm(input: Tensor, weight: Tensor, epsilon: float, **_: Any) -> Tensor:
    assert input.dim() == 2
    return norm(input, weight, epsilon).to(input.dtype)


def add_rms_norm(out: Tensor, input: Tensor, residual_in: Tensor, residual_out: Tensor, weight: Tensor,
                 epsilon: float, **_: Any) -> None:  # fmt: skip
    residual_out.copy_(input + residual_in)
    out.copy_(norm(residual_out, weight, epsilon))


def rms_norm_quantize(out: Tensor, input: Tensor, yscale: Tensor, weight: Tensor, epsilon: float, **_: Any) -> None:
    values, scales = quantize(norm(input, weight, epsilon), out.dtype)
    assert yscale.shape == scales.shape and yscale.dtype is torch.float32
    out.copy_(values)
    yscale.copy_(scales)


def add_rms_norm_quantize(out: Tensor, input: Tensor, residual_in: Tensor, residual_out: Tensor, yscale: Tensor,
                          weight: Tensor, epsilon: float, **_: Any) -> None:  # fmt: skip
    residual_out.copy_(input + residual_in)
    rms_norm_quantize(out, residual_out, yscale, weight, epsilon)


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    width = out.shape[-1]
    out.copy_(F.silu(input[..., :width].float()) * input[..., width:].float())


def quantize_tokens(x: Tensor, quant_dtype: torch.dtype, **_: Any) -> tuple[Tensor, Tensor]:
    return quantize(x, quant_dtype)


def quantize_spans(x: Tensor, quant_dtype: torch.dtype, group_size: int, transpose_scale: bool,
                   **_: Any) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scales of the shape [T, spans], whose memory is that of [spans, T] where they are transposed."""
    values, scales = quantize(x.view(len(x), -1, group_size), quant_dtype)
    scales = scales.squeeze(-1)
    return values.flatten(1), scales.t().contiguous().view(scales.shape) if transpose_scale else scales


def linear(A: Tensor, B: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    return F.linear(A, B, bias)


def unshuffled(values: Tensor) -> Tensor:
    """Undo the layout (16, 16) of AITER's shuffle_weight, address by address in bytes."""
    stored = values.contiguous().view(torch.uint8).flatten(0, -2)
    (rows, columns), width = stored.shape, 32 * values.itemsize
    row, column = torch.arange(rows).unsqueeze(1), torch.arange(columns)
    strip, tile, lane = row // 16 * 16 * columns, column // width * 16 * width, column % width // 16 * 256
    found = stored.flatten()[strip + tile + lane + row % 16 * 16 + column % 16]
    return found.view(values.dtype).view(values.shape)


def linear_by_token(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype,
                    **_: Any) -> Tensor:  # fmt: skip
    assert XQ.dtype is WQ.dtype and x_scale.shape == (len(XQ), 1) and w_scale.numel() == len(WQ)
    assert w_scale.dtype is torch.float32 and w_scale.is_contiguous()
    y = F.linear(XQ.float() * x_scale, unshuffled(WQ).float() * w_scale.view(-1, 1))
    return y.to(dtype)


def linear_by_block(XQ: Tensor, WQ: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype,
                    **_: Any) -> Tensor:  # fmt: skip
    (tokens, inner), out = XQ.shape, len(WQ)
    assert x_scale.shape == (tokens, inner // 128) and w_scale.shape == (out // 128, inner // 128)
    by_token = x_scale.reshape(-1).view(inner // 128, tokens).t()
    x = XQ.float() * by_token.repeat_interleave(128, 1)
    weight = unshuffled(WQ).float() * w_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return F.linear(x, weight).to(dtype)


def topk_softmax(
    topk_weights: Tensor, topk_indices: Tensor, token_expert_indices: Tensor, gating_output: Tensor, need_renorm: bool,
    **_: Any,
) -> None:  # fmt: skip
    assert token_expert_indices.dtype is torch.int32 and token_expert_indices.shape == topk_indices.shape
    scores = gating_output.float().softmax(-1)
    _choose(scores, scores, topk_weights, topk_indices, need_renorm, 1.0)


def topk_of_groups(
    gating_output: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_expert_group: int, topk_group: int,
    need_renorm: bool, is_softmax: bool = True, routed_scaling_factor: float = 1.0,
) -> None:  # fmt: skip
    """`grouped_topk_torch` next to it: groups are as good as their best expert."""
    scores = gating_output.softmax(-1) if is_softmax else gating_output.sigmoid()
    grouped = scores.view(len(scores), num_expert_group, -1)
    kept = _of_groups(scores, grouped.amax(-1), topk_group)
    _choose(kept, scores, topk_weights, topk_ids, need_renorm, routed_scaling_factor)


def topk_with_correction(
    gating_output: Tensor, correction_bias: Tensor, topk_weights: Tensor, topk_ids: Tensor, num_expert_group: int,
    topk_grp: int, need_renorm: bool, routed_scaling_factor: float = 1.0,
) -> None:  # fmt: skip
    """`biased_grouped_topk_torch` next to it: groups are as good as their two best experts together."""
    assert correction_bias.dtype is gating_output.dtype, "as its C++ checks"
    scores = gating_output.sigmoid()
    ranks = scores + correction_bias
    best = ranks.view(len(ranks), num_expert_group, -1).topk(2, dim=-1).values.sum(-1)
    _choose(_of_groups(ranks, best, topk_grp), scores, topk_weights, topk_ids, need_renorm, routed_scaling_factor)


def _of_groups(ranks: Tensor, groups: Tensor, num: int) -> Tensor:
    """ranks [T, E], but -inf where an expert's group is none of the `num` best of groups [T, G]"""
    out = torch.full_like(ranks, -torch.inf)
    size = ranks.shape[1] // groups.shape[1]
    for token, best in enumerate(groups.topk(num, dim=-1).indices.tolist()):
        for group in best:
            own = slice(group * size, (group + 1) * size)
            out[token, own] = ranks[token, own]
    return out


def _choose(ranks: Tensor, scores: Tensor, weights: Tensor, ids: Tensor, need_renorm: bool, scale: float) -> None:
    assert weights.dtype is torch.float32 and ids.dtype is torch.int32 and weights.shape == ids.shape
    found = ranks.topk(ids.shape[1], dim=-1).indices
    chosen = scores.gather(1, found)
    ids.copy_(found)
    weights.copy_((chosen / chosen.sum(-1, keepdim=True) if need_renorm else chosen) * scale)


class QuantType(enum.Enum):
    """AITER's, of which fused_moe reads the value."""

    No, per_Tensor, per_Token, per_1x32, per_1x128, per_128x128 = range(6)


def experts(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weight: Tensor, topk_ids: Tensor,
    expert_mask: Tensor | None = None, quant_type: Any = QuantType.No, w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """`torch_moe_stage1` and `torch_moe_stage2` next to it, of shuffled weights, as its op tests call it."""
    assert w1.is_shuffled and w2.is_shuffled, "newer versions read other weights as stored"  # type: ignore[attr-defined]
    assert topk_ids.dtype is torch.int32 and topk_weight.dtype is torch.float32
    quant, (num, hidden, width) = quant_type.name, w2.shape
    assert w1.shape == (num, 2 * width, hidden) and (quant == "No") == (w1_scale is None) == (w2_scale is None)
    mask = torch.ones(num, dtype=torch.int32) if expert_mask is None else expert_mask
    assert mask.dtype is torch.int32 and mask.sum() == num and topk_ids.max() < len(mask)
    local = mask.cumsum(0) - 1
    up, down = _wide_experts(w1, w1_scale, quant), _wide_experts(w2, w2_scale, quant)
    out = torch.zeros(len(hidden_states), hidden)
    rows = _rounded(hidden_states, quant, w1.dtype)
    for token, chosen in enumerate(topk_ids.tolist()):
        for place, expert in enumerate(chosen):
            if mask[expert]:
                both = up[local[expert]] @ rows[token]
                m = _rounded((F.silu(both[:width]) * both[width:])[None].to(hidden_states.dtype), quant, w1.dtype)[0]
                out[token] += topk_weight[token, place] * (down[local[expert]] @ m)
    return out.to(hidden_states.dtype)


def _wide_experts(values: Tensor, scales: Tensor | None, quant: str) -> Tensor:
    """Shuffled weights [E, O, I] -> their numbers"""
    wide = unshuffled(values).float()
    if scales is None:
        return wide
    (num, out, inner), span = values.shape, 128 if quant == "per_128x128" else None
    assert scales.dtype is torch.float32 and scales.is_contiguous()
    if span is None:
        assert quant == "per_Token" and scales.shape == (num, out, 1)
        return wide * scales
    assert scales.shape == (num, out // span, inner // span)
    return wide * scales.repeat_interleave(span, 1).repeat_interleave(span, 2)


def _rounded(x: Tensor, quant: str, dtype: torch.dtype) -> Tensor:
    """x [T, H] as AITER quantizes it for such a GEMM, in float32"""
    if quant == "No":
        return x.float()
    values, scales = quantize(x if quant == "per_Token" else x.view(len(x), -1, 128), dtype)
    return (values.float() * scales).view(x.shape)


def rope_and_write(
    q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, pos: Tensor,
    cos: Tensor, sin: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, is_neox: bool, flash_layout: bool,
    output_zeros: bool = True, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert flash_layout and not output_zeros and k_scale is None and v_scale is None
    (_, block_size, heads, dim), half = key_cache.shape, q.shape[-1] // 2
    assert cos.shape[-1] == half and dim == 2 * half and heads == k.shape[1]

    def rotate(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for token, place in enumerate(pos.tolist()):
            for i in range(half):
                one, other = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
                a, b, c, s = x[token, :, one].float(), x[token, :, other].float(), cos[place, i], sin[place, i]
                out[token, :, one], out[token, :, other] = a * c - b * s, b * c + a * s
        return out

    q_out, k_out = rotate(q), rotate(k)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = k_out[token]
            value_cache[slot // block_size, slot % block_size] = v[token]
    return q_out, k_out, key_cache, value_cache


def attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], block_table: Tensor,
    softcap: float, q_descale: None, k_descale: Tensor | None, v_descale: Tensor | None,
    sinks: Tensor | None = None, **_: Any,
) -> None:  # fmt: skip
    assert causal and q_descale is None
    starts, lengths, block_size = cu_seqlens_q.tolist(), seqused_k.tolist(), k.shape[1]
    assert max_seqlen_q >= max(last - first for first, last in itertools.pairwise(starts))
    assert max_seqlen_k >= max(lengths)
    group = q.shape[1] // k.shape[2]
    for row, length in enumerate(lengths):
        for place, token in enumerate(range(starts[row], starts[row + 1])):
            position = length - (starts[row + 1] - starts[row]) + place
            first = 0 if window_size[0] < 0 else max(0, position - window_size[0])
            at = torch.arange(first, position + 1)
            blocks = block_table[row, at // block_size].long(), at % block_size
            for head in range(q.shape[1]):
                keys, values = (each[(*blocks, head // group)].float() for each in (k, v))
                keys = keys if k_descale is None else keys * k_descale
                values = values if v_descale is None else values * v_descale
                scores = keys @ q[token, head].float() * softmax_scale
                scores = torch.tanh(scores / softcap) * softcap if softcap > 0 else scores
                weights = scores if sinks is None else torch.cat((scores, sinks[head].float().view(1)))
                out[token, head] = weights.softmax(0)[: len(at)] @ values


def latent_prefill(
    q: Tensor, kv_buffer: Tensor, out: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, max_seqlen_kv: int,
    block_tables: Tensor, softmax_scale: float, kv_lora_rank: int, qk_rope_head_dim: int, causal: bool, q_descale: None,
    kv_descale: None, **_: Any,
) -> None:  # fmt: skip
    """A page is loaded whole, by a power of two addresses; a token of no sequence is not written."""
    page_size, dims = kv_buffer.shape[1], kv_lora_rank + qk_rope_head_dim
    assert causal and q_descale is None and kv_descale is None and page_size & (page_size - 1) == 0
    assert kv_buffer.shape[2:] == (1, dims) and q.shape[2] == dims and out.shape == (*q.shape[:2], kv_lora_rank)
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    assert starts[0] == 0 and len(starts) == len(lengths) + 1 == len(block_tables) + 1 and max_seqlen_kv >= max(lengths)
    for row, length in enumerate(lengths):
        for token in range(starts[row], starts[row + 1]):
            at = torch.arange(length - starts[row + 1] + token + 1)
            entries = kv_buffer[block_tables[row, at // page_size].long(), at % page_size, 0].float()
            weights = (entries @ q[token].float().T * softmax_scale).softmax(0)
            out[token] = weights.T @ entries[:, :kv_lora_rank]


def latent_decode(q: Tensor, kv_buffer: Tensor, out: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor,
                  *args: Any, **kwargs: Any) -> None:  # fmt: skip
    """The same of sequences that have as many queries each; one of no positions is divided by zero."""
    counts = cu_seqlens_q.diff()
    assert torch.equal(counts, torch.full_like(counts, len(q) // len(seqused_k))) and counts.sum() == len(q)
    latent_prefill(q, kv_buffer, out, cu_seqlens_q, seqused_k, *args, **kwargs)
    out.view(len(seqused_k), -1)[seqused_k == 0] = torch.nan


def expert_tiles(**given: Any) -> SimpleNamespace:
    """AITER's ExptData."""
    assert all(each.dtype is torch.int32 for each in given.values())
    return SimpleNamespace(**given)


def routing_data(**given: Any) -> SimpleNamespace:
    """AITER's RoutingData, which holds what is documented besides `block_pid_map` and `n_blocks`."""
    experts, block_m, data = given["n_expts_tot"], given["block_m"], given["expt_data"]
    rows, tiles = data.hist.tolist(), []
    for expert, count in enumerate(rows):
        tiles += [(part << 16) + expert for part in range(-(-count // block_m))]
    found = data.block_pid_map.tolist()
    assert found == tiles + [-1] * (len(found) - len(tiles)) and given["n_expts_act"] == 1
    assert data.token_offs_raw.tolist() == [0, *itertools.accumulate(rows)]
    assert data.token_offs_pad.tolist() == [0, *itertools.accumulate(-(-count // block_m) for count in rows)]
    assert len(rows) == experts and given["expt_hist"] is data.hist
    return SimpleNamespace(**given)


def expert_matmuls(
    x: Tensor, w: Tensor, x_scales: None, w_scales: Tensor, bias: Tensor | None = None, routing_data: Any = None, **_: Any
) -> Tensor:  # fmt: skip
    """`moe_gemm_torch` next to it: sorted rows by their expert's weights; rows in no tile are not written."""
    data, (rows, inner), (experts, _, out) = routing_data.expt_data, x.shape, w.shape
    tile_rows, blocks = routing_data.block_m, len(data.block_pid_map)
    # as RoutingData.n_blocks counts the programs that read a tile's number
    assert blocks == (rows if rows <= experts else -(-(rows - experts + 1) // tile_rows) + experts - 1)
    assert bias is None or bias.dtype is torch.float32, "its kernel compiles with no other"
    assert x.dtype is torch.bfloat16 and x_scales is None and w.dtype is w_scales.dtype is torch.uint8
    assert w.stride(1) == 1 and w.shape == (experts, inner // 2, out) and w_scales.shape == (experts, inner // 32, out)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat((numbers, -numbers))
    pairs = torch.stack((numbers[(w & 15).long()], numbers[(w >> 4).long()]), 2).view(experts, inner, out)
    weights = pairs * torch.exp2(w_scales.float() - 127).repeat_interleave(32, 1)
    y = x.new_full((rows, out), torch.nan)
    for expert, (tile_rows, last) in enumerate(itertools.pairwise(data.token_offs_raw.tolist())):
        y[tile_rows:last] = x[tile_rows:last].float() @ weights[expert] + (0 if bias is None else bias[expert])
    return y


DOUBLES: dict[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        rms_norm, add_rms_norm, rms_norm_quantize, add_rms_norm_quantize, silu_and_mul, quantize_tokens,
        quantize_spans, linear, linear_by_token, linear_by_block, rope_and_write, attention, topk_softmax,
        topk_of_groups, topk_with_correction, experts, latent_decode, latent_prefill,
        expert_tiles, routing_data, expert_matmuls,
    )
}  # fmt: skip
