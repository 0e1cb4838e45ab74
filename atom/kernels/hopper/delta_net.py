"""Decodes of a gated delta net in one launch on Hopper, in Gluon.

    if suits(qkv, state, batch):
        o = decode(qkv, z, a, b, conv_state, state, batch, conv, a_log, bias, norm, …)      # as the op

A program takes the heads of a sequence that share a key, since they share channels of the convolution, whose state it
moves on: one after another if each dim of a key has its decay. A warp has 32 columns of a head's state, so that sums
over a key stay within it. States and weights, which the kernel ahead does not write, are on their way before that one
has ended.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl

from atom.graph import Batch
from atom.graph.ops.linear_attention import L2_EPS
from atom.kernels.hopper import STATE_DIMS
from atom.kernels.hopper.gluon import barrier, jit
from atom.kernels.triton.activations import activation
from atom.kernels.triton.recurrent import delta_net
from atom.kernels.triton.recurrent.delta_net import logarithm_of_decay
from atom.kernels.triton.recurrent.states import row_of

# of states that a program has in registers, of several heads: of a few sequences as many as fit, of more half as many,
# so that one program's states come while another's are computed
COLUMNS, FEW_COLUMNS = 128, 256
FEW = 8  # sequences
LANES = 32


@jit
def _convolve_past(past, weight, channels, is_old, TAPS: gl.constexpr, SIZE: gl.constexpr):
    """What the inputs before a token add to its channels, in float32, the weights of its own, and those inputs."""
    total = gl.full(channels.shape, 0.0, gl.float32, channels.type.layout)
    inputs = ()
    for tap in gl.static_range(TAPS - 1):
        each = gl.load(past + tap * SIZE + channels, mask=is_old, other=0.0)
        total += each.to(gl.float32) * gl.load(weight + channels * TAPS + tap).to(gl.float32)
        inputs += (each,)  # type: ignore[assignment]
    return total, gl.load(weight + channels * TAPS + (TAPS - 1)).to(gl.float32), inputs


@jit
def _convolve(x, total, weight, dtype: gl.constexpr):
    return activation(total + x.to(gl.float32) * weight, "silu").to(dtype).to(gl.float32)


@jit
def _keep(after, inputs, channels, TAPS: gl.constexpr, SIZE: gl.constexpr):
    """Store inputs before a token as those before the next one, but for the first, and but for the token's own."""
    for tap in gl.static_range(1, TAPS - 1):
        gl.store(after + (tap - 1) * SIZE + channels, inputs[tap])


@jit(do_not_specialize_on_alignment=["slots", "lengths"])
def _gated_delta_net(
    qkv, z, a, b, conv_states, states, slots, lengths, conv, a_log, bias, norm, out, qkv_stride, z_stride, a_stride,
    b_stride, SCALE: gl.constexpr, EPS: gl.constexpr, NORM_EPS: gl.constexpr, KIND: gl.constexpr,
    BETA_SCALE: gl.constexpr, FLOOR: gl.constexpr, TAPS: gl.constexpr, CONV_KEPT: gl.constexpr,
    KEPT: gl.constexpr, KEY_HEADS: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr,
    DECAYS: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """EACH: heads whose states are in registers at a time; WARPS: one for 32 of their columns
    DECAYS: of a head, 1 or, with EACH 1, DIM
    EPS: added to squared lengths of keys and queries, which are normalized then; None: they are not
    """
    STATE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, WARPS], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, STATE)
    COLUMN: gl.constexpr = gl.SliceLayout(0, STATE)
    KEY: gl.constexpr = gl.BlockedLayout([DIM // 32], [32], [WARPS], [0])  # each warp has all of it
    GROUP: gl.constexpr = HEADS // KEY_HEADS
    CHANNELS: gl.constexpr = 2 * KEY_HEADS * DIM + HEADS * WIDTH
    dtype: gl.constexpr = out.dtype.element_ty
    token, of_key = gl.program_id(0), gl.program_id(1)
    slot, num_before = gl.load(slots + token), gl.load(lengths + token) - 1
    is_old = num_before > 0
    dims, columns = gl.arange(0, DIM, layout=ROW), gl.arange(0, EACH * WIDTH, layout=COLUMN)
    of_query = of_key * DIM + gl.arange(0, DIM, layout=KEY)
    of_row = KEY_HEADS * DIM + of_query
    past = conv_states + row_of(slot, num_before, CONV_KEPT) * ((TAPS - 1) * CHANNELS)
    past_after = conv_states + row_of(slot, num_before + 1, CONV_KEPT) * ((TAPS - 1) * CHANNELS)
    before = states + row_of(slot, num_before, KEPT) * (HEADS * DIM * WIDTH)
    after = states + row_of(slot, num_before + 1, KEPT) * (HEADS * DIM * WIDTH)
    x = qkv + token * qkv_stride
    newest = past_after + (TAPS - 2) * CHANNELS
    query_sum, query_weight, query_inputs = _convolve_past(past, conv, of_query, is_old, TAPS, CHANNELS)
    key_sum, key_weight, key_inputs = _convolve_past(past, conv, of_row, is_old, TAPS, CHANNELS)
    weight = gl.load(norm + columns % WIDTH).to(gl.float32)
    for part in gl.static_range(GROUP // EACH):
        heads = of_key * GROUP + part * EACH + columns // WIDTH
        entries = heads[None, :] * (DIM * WIDTH) + dims[:, None] * WIDTH + (columns % WIDTH)[None, :]
        state = gl.load(before + entries, mask=is_old, other=0.0).to(gl.float32)
        of_value = 2 * KEY_HEADS * DIM + heads * WIDTH + columns % WIDTH
        value_sum, value_weight, value_inputs = _convolve_past(past, conv, of_value, is_old, TAPS, CHANNELS)
        decays = heads
        if DECAYS > 1:
            decays = (of_key * GROUP + part) * DIM + gl.arange(0, DIM, layout=KEY)
        rate = gl.exp(gl.load(a_log + decays // DECAYS).to(gl.float32))
        shift = gl.load(bias + decays).to(gl.float32)
        barrier()  # all have read what is written over from here on
        _keep(past_after, value_inputs, of_value, TAPS, CHANNELS)
        if part == 0:
            _keep(past_after, query_inputs, of_query, TAPS, CHANNELS)
            _keep(past_after, key_inputs, of_row, TAPS, CHANNELS)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
            query_input, key_input = gl.load(x + of_query), gl.load(x + of_row)
            gl.store(newest + of_query, query_input)
            gl.store(newest + of_row, key_input)
            query = _convolve(query_input, query_sum, query_weight, dtype)
            key = _convolve(key_input, key_sum, key_weight, dtype)
            if EPS is not None:
                query *= gl.rsqrt(gl.sum(query * query, 0) + EPS)
                key *= gl.rsqrt(gl.sum(key * key, 0) + EPS)
            query *= SCALE
            both = gl.sum(query * key, 0)
            query, key = gl.convert_layout(query, ROW), gl.convert_layout(key, ROW)
        value_input = gl.load(x + of_value)
        gl.store(newest + of_value, value_input)
        raw = gl.load(a + token * a_stride + decays).to(gl.float32)
        step = tl.sigmoid(gl.load(b + token * b_stride + heads).to(gl.float32)) * BETA_SCALE
        gate = gl.load(z + token * z_stride + heads * WIDTH + columns % WIDTH).to(gl.float32)
        value = _convolve(value_input, value_sum, value_weight, dtype)
        decay = gl.exp(logarithm_of_decay(rate, raw + shift, FLOOR))
        if DECAYS > 1:
            state *= gl.convert_layout(decay, ROW)[:, None]
        else:
            state *= decay[None, :]
        # both sums at once: what is added now is read by (query . key) of it
        seen, read = gl.sum(state * key[:, None], 0), gl.sum(state * query[:, None], 0)
        moved = step * (value - seen)
        state += key[:, None] * moved[None, :]
        gl.store(after + entries, state.to(states.dtype.element_ty))
        read = (read + both * moved).to(dtype).to(gl.float32)
        by_head = (read * read).reshape([EACH, WIDTH])
        factor = gl.rsqrt(gl.sum(by_head, 1) / WIDTH + NORM_EPS)
        factor = gl.convert_layout(
            gl.expand_dims(factor, 1).broadcast_to(by_head.shape).reshape([EACH * WIDTH]), COLUMN
        )
        place = out + token * (HEADS * WIDTH) + heads * WIDTH + columns % WIDTH
        gl.store(place, (read * factor * weight * activation(gate, KIND)).to(dtype))


def heads_at_once(num_sequences: int, group: int, width: int) -> int:
    """The heads of a key whose states a program has in registers: as many as fit and divide them."""
    most = min((FEW_COLUMNS if num_sequences <= FEW else COLUMNS) // width, group)
    return max(num for num in (1, 2, 4) if num <= most and group % num == 0)


def suits(qkv: Tensor, state: Tensor, batch: Batch) -> bool:
    """Whether the kernel takes these: decodes of one token each, in bf16."""
    is_decode = batch.num_single_query == len(qkv)
    return is_decode and qkv.dtype == torch.bfloat16 and {*state.shape[3:]} <= {*STATE_DIMS}


def decode(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv_state: Tensor, state: Tensor, batch: Batch, conv: Tensor,
    a_log: Tensor, bias: Tensor, norm: Tensor, *, key_heads: int, scale: float, eps: float, kind: str = "silu",
    beta_scale: float = 1.0, normalize: bool = False, floor: float | None = None,
) -> Tensor:  # fmt: skip
    """Shapes as in the op."""
    assert batch.slots is not None and state.is_contiguous() and conv_state.is_contiguous() and conv.is_contiguous()
    assert all(each.stride(1) == 1 for each in (qkv, z, a, b))
    kept, heads, dim, width = state.shape[1:]
    decays = a.shape[1] // heads
    each = heads_at_once(len(qkv), heads // key_heads, width) if decays == 1 else 1
    out, warps = z.new_empty(len(qkv), heads * width), each * width // LANES
    _gated_delta_net[len(qkv), key_heads](
        qkv, z, a, b, conv_state, state, batch.slots, batch.lengths, conv, a_log, bias, norm, out, qkv.stride(0),
        z.stride(0), a.stride(0), b.stride(0), scale, L2_EPS if normalize else None, eps, kind, beta_scale,
        floor, conv.shape[1], conv_state.shape[1], kept, key_heads, heads, dim, width, decays, each, warps,
        num_warps=warps, launch_pdl=True,
    )  # fmt: skip
    return out


def gated_delta_net(
    qkv: Tensor, z: Tensor, a: Tensor, b: Tensor, conv_state: Tensor, state: Tensor, batch: Batch, conv: Tensor,
    a_log: Tensor, bias: Tensor, norm: Tensor, *, key_heads: int, scale: float, eps: float, kind: str = "silu",
    beta_scale: float = 1.0, normalize: bool = False, floor: float | None = None,
) -> Tensor:  # fmt: skip
    """The op: decodes by this kernel, others by Triton's."""
    own = decode if suits(qkv, state, batch) else delta_net.gated_delta_net
    return own(
        qkv, z, a, b, conv_state, state, batch, conv, a_log, bias, norm, key_heads=key_heads, scale=scale, eps=eps,
        kind=kind, beta_scale=beta_scale, normalize=normalize, floor=floor,
    )  # fmt: skip
