"""Kernels that are written of a piece's text give what the bodies of its ops give, for any rows, widths and strides."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from kernels.compiling import run_program
from torch import Tensor

from atom.errors import PassError
from atom.graph import TORCH_DTYPES, interpret, ops, parse
from atom.kernels import Target
from atom.kernels.generated import KERNELS, MAX_WIDTH
from atom.kernels.reference import COMPILED
from atom.kernels.triton.compile.codegen import write_source
from atom.kernels.triton.compile.piece_compiler import TritonCompiler
from atom.passes import lower
from atom.pieces import find_pieces

ROWS = (1, 2, 17)
HALVES = ["fp16", "bf16"]

ADD_NORM = """\
def piece(x0: {0}[A, 48], x1: {0}[A, 48], w0: {0}[48]):
    add_rms_norm, add_rms_norm_1 = generated.add_rms_norm(x0, x1, w0, eps=1e-06)
    return add_rms_norm_1, add_rms_norm
"""

PIECES = {
    "the start of a model": """\
def piece(x0: i64[A], x1: i64[A], w0: fp32[8], w1: {0}[101, 48], w2: fp32[48]):
    rotary, rotary_1 = generated.rotary(x0, w0, scale=1.5)
    embedding = generated.embedding(x1, w1)
    scale = generated.scale(embedding, by=6.928203230275509)
    rms_norm = generated.rms_norm(scale, w2, eps=1e-06)
    return rotary, rotary_1, scale, rms_norm
""",
    "a sum and its norm": ADD_NORM,
    "a norm after a norm": """\
def piece(x0: {0}[A, 37], x1: {0}[A, 37], w0: fp32[37], w1: {0}[37]):
    rms_norm = generated.rms_norm(x0, w0, eps=1e-05)
    add_rms_norm, add_rms_norm_1 = generated.add_rms_norm(x1, rms_norm, w1, eps=1e-05)
    return add_rms_norm_1, add_rms_norm
""",
    "layer norms, with and without a bias": """\
def piece(x0: {0}[A, 33], w0: {0}[33], w1: {0}[33]):
    layer_norm = generated.layer_norm(x0, w0, w1, eps=1e-05)
    layer_norm_1 = generated.layer_norm(layer_norm, w1, None, eps=0.1)
    return layer_norm, layer_norm_1
""",
    "a norm of every head": """\
def piece(x0: {0}[A, 70], w0: {0}[12], w1: {0}[10]):
    split, split_1 = generated.split(x0, sizes=[60, 10])
    split_heads = generated.split_heads(split, heads=5)
    rms_norm = generated.rms_norm(split_heads, w0, eps=1e-06)
    merge_heads = generated.merge_heads(rms_norm)
    split_2, split_3 = generated.split(merge_heads, sizes=[26, 34])
    layer_norm = generated.layer_norm(rms_norm, w0, w0, eps=1e-06)
    split_heads_1 = generated.split_heads(merge_heads, heads=6)
    rms_norm_1 = generated.rms_norm(split_heads_1, w1, eps=1e-06)
    return rms_norm, split_3, layer_norm, rms_norm_1, split_1
""",
    "a head that is all of the row": """\
def piece(x0: {0}[A, 1, 16], w0: {0}[16]):
    rms_norm = generated.rms_norm(x0, w0, eps=1e-06)
    merge_heads = generated.merge_heads(rms_norm)
    return merge_heads
""",
    "gates of heads, merged": """\
def piece(x0: {0}[A, 3, 5], x1: {0}[A, 15], x2: {0}[A, 3, 1], x3: {0}[A, 1]):
    activate = generated.activate(x2, kind="sigmoid")
    mul = generated.mul(x0, activate)
    merge_heads = generated.merge_heads(mul)
    mul_1 = generated.mul(merge_heads, x1)
    activate_1 = generated.activate(x3, kind="sigmoid")
    mul_2 = generated.mul(mul_1, activate_1)
    return mul_2
""",
    "a sum of what was gated": """\
def piece(x0: {0}[A, 1], x1: {0}[A, 48], x2: {0}[A, 48]):
    activate = generated.activate(x0, kind="sigmoid")
    mul = generated.mul(x1, activate)
    add = generated.add(x2, mul)
    return add
""",
    "more columns than a program takes": """\
def piece(x0: {0}[A, 1500], x1: {0}[A, 2048]):
    softcap = generated.softcap(x0, cap=3.0)
    scale = generated.scale(x1, by=0.3)
    return softcap, scale
""",
    "a chain, rounded at each step": """\
def piece(x0: {0}[A, 60], x1: {0}[A, 30], w0: {0}[30]):
    gated_activate = generated.gated_activate(x0, kind="relu")
    scale = generated.scale(gated_activate, by=3.3)
    activate = generated.activate(scale, kind="gelu")
    add = generated.add(activate, x1)
    mul = generated.mul(add, x1)
    softcap = generated.softcap(mul, cap=30.0)
    layer_norm = generated.layer_norm(softcap, w0, None, eps=1e-05)
    add_1 = generated.add(layer_norm, x1)
    rms_norm = generated.rms_norm(add_1, w0, eps=1e-05)
    scale_1 = generated.scale(rms_norm, by=1.7)
    return scale, activate, add, mul, softcap, layer_norm, add_1, rms_norm, scale_1
""",
    "queries that grow, clipped columns and trained activations": """\
def piece(x0: i64[A], x1: {0}[A, 37], w0: fp32[8], w1: {0}[1], w2: {0}[1]):
    rotary, rotary_1 = generated.rotary(x0, w0, scale=1.5, growth=0.4, period=16, offset=1)
    rotary_2, rotary_3 = generated.rotary(x0, w0, growth=0.1, period=16, offset=1, power=True)
    rotary_4, rotary_5 = generated.rotary(x0, w0, every=4)
    clamp = generated.clamp(x1, limit=0.5)
    xielu = generated.xielu(x1, w1, w2)
    return rotary, rotary_1, rotary_2, rotary_3, rotary_4, rotary_5, clamp, xielu
""",
    "time steps and decays": """\
def piece(x0: {0}[A, 24], x1: fp32[A, 24], w0: fp32[24], w1: {0}[6], w2: {0}[24]):
    time_step = generated.time_step(x0, w0)
    time_step_1 = generated.time_step(x1, None, low=0.3, high=1.5)
    ssm_decay = generated.ssm_decay(x0, w1, w0)
    ssm_decay_1 = generated.ssm_decay(x0, w2, w2, floor=-5.0)
    split_heads = generated.split_heads(ssm_decay, heads=6)
    return time_step, time_step_1, split_heads, ssm_decay_1
""",
    "norms of heads, each with a weight": """\
def piece(x0: {0}[A, 3, 20], w0: {0}[3, 20], w1: {0}[3, 20], w2: {0}[20]):
    layer_norm = generated.layer_norm(x0, w0, None, eps=1e-05)
    layer_norm_1 = generated.layer_norm(layer_norm, w1, w0, eps=1e-05)
    layer_norm_2 = generated.layer_norm(x0, w2, w2, eps=1e-05)
    return layer_norm, layer_norm_1, layer_norm_2
""",
    "norms of groups of columns": """\
def piece(x0: {0}[A, 60], x1: {0}[A, 5, 12], w0: {0}[60], w1: fp32[60]):
    group_rms_norm = generated.group_rms_norm(x0, w0, eps=1e-05, groups=4)
    merge_heads = generated.merge_heads(x1)
    mul = generated.mul(merge_heads, x0)
    group_rms_norm_1 = generated.group_rms_norm(mul, w1, eps=0.1, groups=1)
    group_rms_norm_2 = generated.group_rms_norm(mul, w1, eps=0.1, groups=60)
    return group_rms_norm, group_rms_norm_1, group_rms_norm_2
""",
    "streams that are mixed": """\
def piece(x0: {0}[A, 60], x1: {0}[A, 9], x2: {0}[A, 20], w0: {0}[3], w1: {0}[20], w2: {0}[60]):
    softcap = generated.softcap(x1, cap=1.0)
    mix_streams = generated.mix_streams(x0, softcap, streams=3)
    add = generated.add(x0, mix_streams)
    split, split_1 = generated.split(add, sizes=[20, 40])
    mix_streams_1 = generated.mix_streams(x2, w0, streams=1)
    mul = generated.mul(split, w1)
    rms_norm = generated.rms_norm(mul, w1, eps=1e-05)
    mul_1 = generated.mul(mix_streams_1, w2)
    return add, split_1, mul_1, rms_norm
""",
    "heads that are mixed, and columns shifted and scaled": """\
def piece(x0: {0}[A, 3, 10], x1: {0}[A, 3, 5], w0: {0}[2], w1: {0}[3, 1], w2: {0}[30], w3: {0}[30]):
    mix_streams = generated.mix_streams(x1, w0, streams=1)
    add = generated.add(x0, mix_streams)
    mix_streams_1 = generated.mix_streams(add, w0, streams=2)
    mul = generated.mul(mix_streams_1, w1)
    merge_heads = generated.merge_heads(add)
    affine = generated.affine(merge_heads, w2, w3)
    return mul, affine
""",
    "rows as long as others": """\
def piece(x0: {0}[A, 37], x1: {0}[A, 37], x2: {0}[A, 3, 5]):
    match_rms = generated.match_rms(x0, x1, eps=1e-05)
    match_rms_1 = generated.match_rms(x1, match_rms, eps=10.0)
    match_rms_2 = generated.match_rms(x2, x2, eps=1e-05)
    return match_rms, match_rms_1, match_rms_2
""",
    "steering vectors": """\
def piece(x0: {0}[A, 37], x1: fp32[A, 3], w0: {0}[37], w1: {0}[37]):
    steer = generated.steer(x0, x1, w0, index=2)
    steer_1 = generated.steer(steer, x1, w1, index=0)
    rms_norm = generated.rms_norm(steer_1, w0, eps=1e-05)
    return rms_norm, steer_1
""",
    "gates that are sparse": """\
def piece(x0: {0}[A, 37], x1: {0}[A, 37], x2: fp32[A, 2]):
    gaussian_topk = generated.gaussian_topk(x0, sparsity=0.9)
    activate = generated.activate(gaussian_topk, kind="gelu_tanh")
    mul = generated.mul(activate, x1)
    gaussian_topk_1 = generated.gaussian_topk(x0, x2, sparsity=0.3, columns=74)
    return mul, gaussian_topk_1
""",
    "values as wide as keys": """\
def piece(x0: {0}[A, 3, 5], x1: {0}[A, 3, 11]):
    scale = generated.scale(x0, by=0.7)
    pad = generated.pad(scale, size=8)
    split, split_1 = generated.split(x1, sizes=[5, 6])
    pad_1 = generated.pad(split, size=6)
    merge_heads = generated.merge_heads(pad_1)
    return pad, merge_heads
""",
    "rows of two kinds": """\
def piece(x0: {0}[A, 6], x1: {0}[B, 8]):
    gated_activate = generated.gated_activate(x0, kind="silu")
    add = generated.add(x1, x1)
    return gated_activate, add
""",
    "heads scaled by position": """\
def piece(x0: {0}[A, 24], x1: i64[A], w0: fp32[3], w1: {0}[3]):
    split_heads = generated.split_heads(x0, heads=3)
    scale_by_position = generated.scale_by_position(split_heads, x1, w0, w1)
    split, split_1 = generated.split(scale_by_position, sizes=[3, 5])
    scale_by_position_1 = generated.scale_by_position(split_heads, x1, w1, w0)
    split_2, split_3 = generated.split(scale_by_position_1, sizes=[8, 0])
    return split, split_1, split_2, split_3
""",
    "heads that turn, and a rest that does not": """\
def piece(x0: {0}[A, 3, 11], x1: fp32[A, 4], x2: fp32[A, 4]):
    rope = generated.rope(x0, x1, x2)
    rope_1 = generated.rope(x0, x1, x2, interleaved=True)
    merge_heads = generated.merge_heads(rope_1)
    return rope, merge_heads
""",
    "inputs by layer, scaled by one number": """\
def piece(x0: {0}[A, 18], x1: i64[A], x2: {0}[A, 48], w0: {0}[6], w1: {0}[101, 18], w2: {0}[1]):
    scale = generated.scale(x0, by=0.4)
    split_heads = generated.split_heads(scale, heads=3)
    rms_norm = generated.rms_norm(split_heads, w0, eps=1e-06)
    embedding = generated.embedding(x1, w1)
    split_heads_1 = generated.split_heads(embedding, heads=3)
    add = generated.add(rms_norm, split_heads_1)
    merge_heads = generated.merge_heads(add)
    split, split_1, split_2 = generated.split(merge_heads, sizes=[6, 6, 6])
    mul = generated.mul(x2, w2)
    return split, split_1, split_2, mul
""",
    "vectors for all rows": """\
def piece(x0: {0}[A, 18], x1: {0}[A, 3, 6], w0: {0}[18], w1: fp32[18], w2: fp32[6]):
    add = generated.add(x0, w0)
    mul = generated.mul(add, w1)
    mul_1 = generated.mul(x1, w2)
    mul_2 = generated.mul(x0, w0)
    return add, mul, mul_1, mul_2
""",
    "weights scaled by expert": """\
def piece(x0: fp32[A, 3], x1: i64[A, 3], w0: {0}[101]):
    scale_by_expert = generated.scale_by_expert(x0, x1, w0)
    return scale_by_expert
""",
    "gates within a limit": """\
def piece(x0: {0}[A, 46]):
    gated_activate = generated.gated_activate(x0, kind="swigluoai", limit=1.5, alpha=1.702)
    return gated_activate
""",
    "gates that bend": """\
def piece(x0: {0}[A, 46]):
    gated_activate = generated.gated_activate(x0, kind="situ", limit=0.7, alpha=1.5)
    return gated_activate
""",
    "rows of images among tokens": """\
def piece(x0: i64[A], x1: i32[A], x2: {0}[B, 96], x3: i64[A, 3], w0: {0}[101, 48], w1: {0}[48], w2: fp32[8]):
    embedding = generated.embedding(x0, w0)
    place_rows = generated.place_rows(embedding, x1, x2)
    rms_norm = generated.rms_norm(place_rows, w1, eps=1e-05)
    place_rows_1 = generated.place_rows(rms_norm, x1, x2, part=1, adds=True)
    rotary_sections, rotary_sections_1 = generated.rotary_sections(x3, w2, sections=[4, 2, 2], interleaved=True)
    rotary_sections_2, rotary_sections_3 = generated.rotary_sections(x3, w2, sections=[3, 4, 1], scale=1.5)
    return place_rows, place_rows_1, rotary_sections, rotary_sections_1, rotary_sections_2, rotary_sections_3
""",
    "pixels and where they are": """\
def piece(x0: u8[A, 30], x1: i64[A, 4], w0: fp32[5], w1: {0}[36, 20]):
    normalize_pixels = generated.normalize_pixels(x0, mean=[1.0, 2.5, 2.5], std=[3.0, 3.0, 0.5], dtype="{0}")
    rotary_sections, rotary_sections_1 = generated.rotary_sections(x1, w0, sections=[5, 5])
    interpolate_table = generated.interpolate_table(w1, x1, side=6)
    interpolate_table_1 = generated.interpolate_table(w1, x1, side=6, mode="bicubic")
    rotary_sections_2, rotary_sections_3 = generated.rotary_sections(x1, w0, sections=[5, 5], interleaved=True, axes=[1, 0])
    return normalize_pixels, rotary_sections, rotary_sections_1, interpolate_table, interpolate_table_1, rotary_sections_2, rotary_sections_3
""",
    "rows of one number": """\
def piece(x0: {0}[A], x1: {0}[A]):
    add = generated.add(x0, x1)
    scale = generated.scale(add, by=0.5)
    return scale
""",
    **{
        f"activations, {kind}": f"""\
def piece(x0: {{0}}[A, 10]):
    activate = generated.activate(x0, kind="{kind}")
    gated_activate = generated.gated_activate(activate, kind="{kind}")
    return activate, gated_activate
"""
        for kind in ops.ACTIVATIONS
    },
}  # fmt: skip

Load = Callable[[str], Callable[..., list[Tensor]]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """The code of a text, from a folder that it is written to."""

    def made(text: str) -> Callable[..., list[Tensor]]:
        (tmp_path / "piece.py").write_text(write_source(text))
        return TritonCompiler().load(tmp_path)

    return made


def inputs_of(text: str, rows: int, device: str) -> dict[str, Tensor]:
    """Random inputs and weights; ids of experts, others and positions below 101, floats that bend what is not linear."""
    generator = torch.Generator().manual_seed(rows)
    inputs = {}
    for node in parse(text).programs["piece"].inputs:
        type = node.meta["type"]
        counts = {"A": rows, "B": 2 * rows + 1}
        shape = [counts[dim] if isinstance(dim, str) else dim for dim in type.shape]
        tables = [user.args[2] for user in node.users if user.target is ops.scale_by_expert]
        num = min((int(table.meta["type"].shape[0]) for table in tables), default=101)
        lows = {"i64": 0, "u8": 0, "i32": -1}  # a row of images, or none
        num = counts["B"] if type.dtype == "i32" else num
        made = torch.randint(lows[type.dtype], num, shape, generator=generator) if type.dtype in lows else None
        made = 2 * torch.randn(shape, generator=generator) if made is None else made
        if any(user.target is ops.interpolate_table for user in node.users) and type.dtype == "i64":
            made[:, 2:] += made[:, :2] + 1  # heights and widths, after rows and columns in them
        inputs[node.name] = made.to(TORCH_DTYPES[type.dtype]).to(device)
    return inputs


def by_bodies(text: str, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    results = interpret(parse(text), "piece", inputs, weights=lambda recipe: None)
    return results if isinstance(results, tuple) else (results,)


def hold(text: str, run: Callable[..., list[Tensor]], inputs: Mapping[str, Tensor]) -> None:
    """Its results against the bodies', also on float32: an order of summation or a last bit of exp may turn a rounding."""
    results, expected = run(*inputs.values()), by_bodies(text, inputs)
    wide = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    truths = by_bodies(re.sub("fp16|bf16", "fp32", text), wide)
    for ours, theirs, truth in zip(results, expected, truths, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        step = torch.finfo(theirs.dtype).eps if theirs.dtype != torch.float32 else 5e-6
        torch.testing.assert_close(ours, theirs, rtol=2 * step, atol=step)
        error, allowed = ((x.double() - truth).norm() / truth.norm() for x in (ours, theirs))
        assert theirs.dtype == torch.float32 or not theirs.numel() or error <= 1.1 * allowed + step / 10


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PIECES)
def test_a_piece_gives_what_the_bodies_of_its_ops_give(name: str, load: Load, triton_device: str):
    for dtype in ["fp32", *(HALVES if triton_device == "cuda" else HALVES[:1])]:
        text = PIECES[name].format(dtype)
        run = load(text)
        for rows in ROWS if dtype == "fp32" else ROWS[-1:]:
            hold(text, run, inputs_of(text, rows, triton_device))


def test_every_op_that_is_accepted_is_in_one_of_these_pieces():
    written = set(re.findall(r"generated\.(\w+)", "".join(PIECES.values())))
    left = {"linear", "join"}  # to the library
    left |= {"local_tokens", "mask_rows", "sum_squares", "scale_by_rms", "sum_moments"}  # of ranks, on a CPU
    left |= {"stream_logits", "stream_gate", "sinkhorn", "attend_residuals", "run_tokens"}  # to kernels of their own
    assert written == {kernel.op.name for kernel in KERNELS} == {op.name for op in COMPILED} - left


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_inputs_may_be_views_of_wider_tensors_and_lie_in_any_order(dtype: str, load: Load, triton_device: str):
    text = PIECES["gates of heads, merged"].format(dtype)
    inputs = inputs_of(text, 5, triton_device)
    wide = torch.full((5, 4, 9), torch.nan, dtype=inputs["x0"].dtype, device=triton_device)
    wide[:, 1:, 2:7] = inputs["x0"]
    inputs["x0"] = wide[:, 1:, 2:7]
    inputs["x1"] = inputs["x1"].t().contiguous().t()
    inputs["x3"] = inputs["x3"].expand(5, 3)[:, 1:2]
    hold(text, load(text), inputs)


def test_a_result_that_is_a_view_of_an_input_is_no_copy(load: Load, triton_device: str):
    text = """\
def piece(x0: fp32[A, 20], w0: fp32[8]):
    split, split_1 = generated.split(x0, sizes=[8, 12])
    split_heads = generated.split_heads(split_1, heads=3)
    split_2, split_3 = generated.split(split_heads, sizes=[1, 3])
    rms_norm = generated.rms_norm(split, w0, eps=1e-06)
    return split_1, split_heads, split_3, rms_norm
"""
    inputs = inputs_of(text, 3, triton_device)
    run = load(text)
    hold(text, run, inputs)
    *views, norm = run(*inputs.values())
    whole = inputs["x0"].untyped_storage().data_ptr()
    assert [view.untyped_storage().data_ptr() == whole for view in (*views, norm)] == [True, True, True, False]


def test_large_positions_turn_as_far_as_they_should(load: Load, triton_device: str):
    text = PIECES["the start of a model"].format("fp32")
    inputs = inputs_of(text, 4, triton_device)
    inputs["x0"] = torch.tensor([0, 1, 131_071, 1_000_003], device=triton_device)
    inputs["w0"] = 10000.0 ** (-torch.arange(8, device=triton_device) / 8)
    hold(text, load(text), inputs)


def test_a_soft_cap_leaves_small_numbers_as_they_are(load: Load, triton_device: str):
    text = PIECES["more columns than a program takes"].format("fp32")
    inputs = inputs_of(text, 1, triton_device)
    signs = torch.tensor([-1.0, 1.0], device=triton_device).repeat(750)
    inputs["x0"] = torch.logspace(-30, 2, 1500, device=triton_device)[None] * signs
    ours, _ = load(text)(*inputs.values())
    theirs = torch.tanh(inputs["x0"].double() / 3) * 3
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=0)


def test_what_is_no_number_stays_none(load: Load, triton_device: str):
    text = PIECES["gates within a limit"].format("fp32")
    inputs = inputs_of(text, 2, triton_device)
    inputs["x0"][0, 3] = inputs["x0"][1, 25] = torch.nan
    (ours,) = load(text)(*inputs.values())
    assert ours.isnan().nonzero().tolist() == [[0, 3], [1, 2]]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [576, 1023, 4096, 7168, 16384, MAX_WIDTH])
def test_rows_as_wide_as_those_of_models(width: int, load: Load):
    for dtype in ("fp32", "bf16"):
        text = ADD_NORM.format(dtype).replace("48", str(width))
        hold(text, load(text), inputs_of(text, 300, "cuda"))


@pytest.mark.gpu
def test_offsets_beyond_32_bits(load: Load):
    text = 'def piece(x0: fp16[A, 65536]):\n    activate = generated.activate(x0, kind="relu")\n    return activate\n'
    x = torch.full((40_000, 65536), -1, dtype=torch.float16, device="cuda")
    x[-1] = 2
    (y,) = load(text)(x)
    assert y[-1].eq(2).all() and not y[:-1].any()


def test_the_source_is_this_one():
    assert write_source(ADD_NORM.format("bf16")) == '''\
"""Each row of a piece by itself.

def piece(x0: bf16[A, 48], x1: bf16[A, 48], w0: bf16[48]):
    add_rms_norm, add_rms_norm_1 = generated.add_rms_norm(x0, x1, w0, eps=1e-06)
    return add_rms_norm_1, add_rms_norm
"""

import torch
import triton.language as tl

from atom.kernels.triton.activations import activation, gated, softplus, tanh, xielu
from atom.kernels.triton.attention.common import wait_for_inputs
from atom.kernels.triton.attention.rope import find_angle, find_partner, rotate
from atom.kernels.triton.compile.jit import jit
from atom.kernels.triton.gpu import find_gpu


@jit
def add_rms_norm_rows_a(
    x0, x0_stride_0, x0_stride_1, x1, x1_stride_0, x1_stride_1, w0, w0_stride_0, y0, y1, PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    c48 = tl.arange(0, 64)
    x0_values = tl.load(x0 + row * x0_stride_0 + c48 * x0_stride_1, mask=c48 < 48).to(tl.float32)
    x1_values = tl.load(x1 + row * x1_stride_0 + c48 * x1_stride_1, mask=c48 < 48).to(tl.float32)
    add_rms_norm_1 = (x0_values + x1_values).to(tl.bfloat16).to(tl.float32)
    tl.store(y0 + row * 48 + c48, add_rms_norm_1, mask=c48 < 48)
    w0_values = tl.load(w0 + c48 * w0_stride_0, mask=c48 < 48).to(tl.float32)
    kept = tl.where(c48 < 48, add_rms_norm_1 * add_rms_norm_1, 0.0)
    deviation = tl.rsqrt(tl.sum(kept, axis=0) / 48 + 1e-06)
    add_rms_norm = (add_rms_norm_1 * deviation * w0_values).to(tl.bfloat16).to(tl.float32)
    tl.store(y1 + row * 48 + c48, add_rms_norm, mask=c48 < 48)


def run(x0, x1, w0):
    A = x0.shape[0]
    y0 = torch.empty(A, 48, dtype=torch.bfloat16, device=x0.device)
    y1 = torch.empty(A, 48, dtype=torch.bfloat16, device=x0.device)
    add_rms_norm_rows_a[(A,)](
        x0, *x0.stride(), x1, *x1.stride(), w0, *w0.stride(), y0, y1, num_warps=1, enable_fp_fusion=False,
        **find_gpu(x0.device).options,
    )
    return [y0, y1]
'''  # fmt: skip


def test_a_program_has_threads_for_the_widest_row_that_it_adds_up():
    text = """\
def piece(x0: bf16[A, {0}], w0: bf16[{0}]):
    rms_norm = generated.rms_norm(x0, w0, eps=1e-06)
    split, split_1 = generated.split(rms_norm, sizes=[{0} - 8, 8])
    return split_1
"""
    for width, num_warps in ((9, 1), (1024, 4), (1025, 8), (4096, 16), (MAX_WIDTH, 16)):
        source = write_source(text.replace("{0} - 8", str(width - 8)).format(width))
        assert re.findall(r"num_warps=(\d+)", source) == [str(num_warps)], width


def test_an_op_that_looks_at_other_rows_is_refused():
    text = "def piece(x0: fp32[A, 8], w0: fp32[4, 8]):\n    linear = reference.linear(x0, w0)\n    return linear\n"
    with pytest.raises(
        PassError, match=r"^linear does not work on each row by itself: it cannot be in a piece on a gpu$"
    ):
        write_source(text)


def test_a_gpu_takes_rows_of_fixed_sizes():
    gpu = Target("cuda", frozenset({"sm_90"}))
    reasons = {
        "fp32[T, 8]": None,
        "fp32[9, 8]": "fp32[9, 8] is not of rows of a fixed size",
        "fp32[T, S]": "fp32[T, S] is not of rows of a fixed size",
        "fp32": "fp32 is not of rows of a fixed size",
        f"fp32[T, {MAX_WIDTH}]": None,
        f"fp32[T, {MAX_WIDTH + 1}]": f"fp32[T, {MAX_WIDTH + 1}] is not of rows of up to {MAX_WIDTH} elements",
        "fp32[T]": f"fp32[T] is not of rows of up to {MAX_WIDTH} elements",
    }
    (norm,) = (kernel for kernel in KERNELS if kernel.op is ops.rms_norm)
    (scale,) = (kernel for kernel in KERNELS if kernel.op is ops.scale)
    for shown, reason in reasons.items():
        type = parse(f"def f(x: {shown}):\n    return x\n").programs["f"].inputs[0].meta["type"]
        assert norm.accepts(gpu, type, type, eps=1e-6) == reason
        assert scale.accepts(gpu, type, by=2.0) == (None if "up to" in str(reason) else reason)
        assert norm.accepts(Target("cpu"), type, type, eps=1e-6) == "runs on cuda, not on cpu"


COMPILE = """
import re, sys
from pathlib import Path
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from atom.graph import TORCH_DTYPES, parse
from atom.kernels.triton.compile.piece_compiler import TritonCompiler
from atom.kernels.triton.compile.codegen import write_source

class Compile:
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return self
    def __call__(self, *args, **options):
        types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
        *names, pdl = self.kernel.arg_names
        signature = {name: types[arg.dtype] if torch.is_tensor(arg) else "i32"
                     for name, arg in zip(names, args, strict=True)} | {pdl: "constexpr"}
        del options["PDL"]
        for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
            source = ASTSource(self.kernel, signature, {pdl: target.backend == "cuda"})
            dependent = {"launch_pdl": True} if target.backend == "cuda" else {}
            made = triton.compile(source, target, options | dependent)
            is_fused = "fma.rn.bf16" in made.asm.get("ptx", "")
            print(target.backend, made.metadata.shared, is_fused)

folder = Path(sys.argv[1])
for text in Path(folder, "texts").read_text().split("\\n\\n"):
    (folder / "piece.py").write_text(write_source(text))
    run = TritonCompiler().load(folder)
    for name, kernel in list(run.__globals__.items()):
        if "_rows_" in name:
            run.__globals__[name] = Compile(kernel)
    types = [node.meta["type"] for node in parse(text).programs["piece"].inputs]
    run(*(torch.empty([2 if isinstance(dim, str) else dim for dim in type.shape], dtype=TORCH_DTYPES[type.dtype])
          for type in types))
"""


@pytest.mark.slow
def test_gpus_of_two_vendors_get_binaries_that_round_each_result(tmp_path: Path):
    names = ("the start of a model", "a norm of every head", "heads that turn, and a rest that does not",
             "a sum of what was gated")  # fmt: skip
    (tmp_path / "texts").write_text("\n\n".join(PIECES[name].format("bf16").strip() for name in names))
    done = run_program(COMPILE, str(tmp_path), TRITON_CACHE_DIR=str(tmp_path / "triton"))
    assert done.returncode == 0, done.stderr
    made = [line.split() for line in done.stdout.splitlines()]
    assert [backend for backend, _, _ in made] == ["cuda", "hip"] * 4
    assert all(int(shared) <= 64 << 10 for _, shared, _ in made)
    assert all(is_fused == "False" for _, _, is_fused in made), "a product is not rounded ahead of its sum"


@pytest.mark.sampled(0, gpu=1)
def test_pieces_of_every_family_give_what_the_bodies_of_their_ops_give(load: Load, triton_device: str):
    """Their tiny variants, lowered for a GPU that need not be there."""
    texts: dict[str, None] = {}
    for path in sorted((Path(__file__).parents[3] / "golden").glob("*.semantic.py")):
        graph = lower(parse(path.read_text()), 2, Target("cuda", frozenset({"nvidia", "sm_90"})))
        texts |= dict.fromkeys(piece.text for program in graph.programs.values() for piece in find_pieces(program))
    assert len(texts) > 30
    for text in texts:
        text = text if triton_device == "cuda" else text.replace("bf16", "fp16")
        hold(text, load(text), inputs_of(text, 3, triton_device))
