"""What the backend `aiter` accepts, and its reasons: a text for AMD's GPUs on a machine without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.aiter_doubles import read_newest, write_sources

from atom.config.load import load_gpu
from atom.graph import KV, Type, ops, parse, show
from atom.graph.ops.latent import latent_entry
from atom.graph.types import BatchType
from atom.kernels import Target, find_kernel
from atom.kernels import aiter as backend
from atom.passes.pipeline import lower

MI300X, MI355X, H200 = (Target("cuda", frozenset(load_gpu(name).features)) for name in ("mi300x", "mi355x", "h200"))
BARE = Target("cuda", MI300X.features - {"aiter"})
LACKING = Target("cuda", MI300X.features | {"no aiter.attention: x:y: it wants mode too"})

LAYER = """\
def f(x: bf16[T, 256], r: bf16[T, 256], cos: fp32[T, 32], sin: fp32[T, 32], batch: Batch):
    h, s = add_rms_norm(x, r, W("norm", {norm}[256]), eps=1e-06)
    qkv = linear(h, W("qkv", bf16[512, 256]{fmt}){act})
    q, k, v = split(qkv, sizes=(256, 128, 128))
    heads = split_heads(q, heads=4)
    keys = split_heads(k, heads=2)
    values = split_heads(v, heads=2)
    a = norm_rope_attention(heads, keys, values, cos, sin, None, None, KV("l", {cache}[2, 2, 64]), batch, scale=0.125)
    merged = merge_heads(a)
    o = linear(merged, W("o", bf16[256, 256]{fmt}){act})
    m = gated_linear(o, W("up", bf16[512, 256]{fmt}), kind="{kind}"{act})
    y = add(m, s)
    return y"""


MOE = """\
def f(x: bf16[T, 512], r: bf16[T, 512]):
    h, s = add_rms_norm(x, r, W("norm", bf16[512]), eps=1e-06)
    weights, ids = router(h, W("gate", bf16[32, 512]){correction}, {rule})
    y = experts(h, weights, ids, W("up", bf16[32, 1024, 512]{fmt}), W("down", bf16[32, 512, 512]{fmt}), kind="silu"{act})
    z = add(y, s)
    return z"""
GREEDY, PAIRS = "top_k=4, renormalize=True", 'top_k=4, method="noaux_tc", score="sigmoid", groups={}, top_groups=1'


def moe_text(target: Target, rule: str = GREEDY, weight: str = "", act: str = "", correction: str = "") -> str:
    source = MOE.format(
        rule=rule,
        correction=f', None, W("correction", {correction}[32])' if correction else "",
        fmt=f', fmt="{weight}"' if weight else "",
        act=f', act="{act}"' if act else "",
    )
    return show(lower(parse(source), 1, target, first="quantize"))


def text(target: Target, weight: str = "", act: str = "", cache: str = "bf16", kind: str = "silu",
         norm: str = "bf16") -> str:  # fmt: skip
    source = LAYER.format(
        fmt=f', fmt="{weight}"' if weight else "",
        act=f', act="{act}"' if act else "",
        cache=cache,
        kind=kind,
        norm=norm,
    )
    return show(lower(parse(source), 1, target, first="quantize"))


@pytest.mark.parametrize(
    ("weight", "act"), [("", ""), ("fp8[1, *]", "fp8[1, *]"), ("fp8[128, 128]", "fp8[1, 128]")], ids=str
)
@pytest.mark.parametrize("target", [MI300X, MI355X], ids=["mi300x", "mi355x"])
def test_a_layer_is_aiters(target: Target, weight: str, act: str):
    found = text(target, weight, act)
    for op in ("add_norm_linear", "norm_rope_attention", "linear", "gated_linear"):
        assert f"= aiter.{op}(" in found, found
    assert found.count('"aiter")') == (3 if weight else 0), "packed weights are laid out, plain ones as stored"
    assert "triton." not in found


@pytest.mark.parametrize(
    ("target", "options", "reason"),
    [
        (BARE, {}, "aiter: amd-aiter is not installed: the extra amd brings it"),
        (LACKING, {}, "aiter: this version of AITER lacks attention: x:y: it wants mode too"),
        (MI300X, {"kind": "gelu"}, "aiter: has only silu gates, not gelu"),
        (MI300X, {"weight": "mxfp4"}, "aiter: its weight is stored as mxfp4"),
        (
            MI355X,
            {"weight": "fp8[1, *]"},
            "aiter: weights in fp8[1, *] are multiplied only by activations in fp8[1, *]",
        ),
        (MI300X, {"norm": "fp32"}, "aiter: norms bf16 by a weight in it, not in fp32"),
        (MI300X, {"cache": "fp8_e4m3"}, "aiter: does not bound entries of fp8_e4m3"),
        (Target("cuda", frozenset({"amd", "gfx90a"})), {}, "aiter: runs only on gfx942 and gfx950"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_refusal_has_its_reason(target: Target, options: dict[str, str], reason: str):
    found = text(target, **options)
    assert reason in found, found
    assert "triton." in found


@pytest.mark.parametrize(
    ("weight", "act"), [("", ""), ("fp8[1, *]", "fp8[1, *]"), ("fp8[128, 128]", "fp8[1, 128]")], ids=str
)
@pytest.mark.parametrize(("rule", "correction"), [(GREEDY, ""), (PAIRS.format(8), "fp32")], ids=["greedy", "pairs"])
def test_experts_and_their_router_are_aiters(weight: str, act: str, rule: str, correction: str):
    found = moe_text(MI355X, rule, weight, act, correction)
    assert "= aiter.add_norm_router(" in found and "= aiter.experts(" in found, found
    assert found.count('"aiter")') == 2, "weights of experts are laid out, plain ones too"
    assert "triton." not in found


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weight": "gguf_mxfp4"}, "aiter: has no layout of gguf_mxfp4"),
        ({"weight": "fp8[1, *]"}, "aiter: weights in fp8[1, *] are multiplied only by activations in fp8[1, *]"),
        ({"rule": PAIRS.format(4), "correction": "fp32"}, "aiter: does not choose from 4 groups of 32 experts"),
        ({"rule": PAIRS.format(8)}, "aiter: has no noaux_tc without a correction"),
        ({"rule": GREEDY, "correction": "fp32"}, "aiter: corrects only sigmoid scores, not softmax"),
        ({"rule": "top_k=4, shared=1, gated=True"}, "aiter: has no gate of shared experts"),
    ],
)
def test_experts_or_routers_that_aiter_has_not_have_their_reason(options: dict[str, str], reason: str):
    found = moe_text(MI355X, **options)
    assert reason in found, found
    assert "triton." in found


def test_experts_in_mxfp4_stay_as_stored():
    found = moe_text(MI355X, weight="mxfp4")
    assert "= aiter.experts(" in found and '"aiter")' not in found and "triton." not in found
    assert "aiter: multiplies mxfp4 only on gfx950" in moe_text(MI300X, weight="mxfp4")


FP8 = {"act": "fp8[1, *]"}


@pytest.mark.parametrize(
    ("gate_up", "down", "more", "options", "reason"),
    [
        (((8, 1024, 512), None), ((8, 512, 512), None), (None, None, Type("i64", (1,))), {}, None),
        (((8, 1024, 512), None), ((8, 512, 512), None), (Type("bf16", (8, 1024)),), {}, "adds no biases of experts"),
        (((8, 1024, 512), None), ((8, 512, 512), None), (), {"kind": "gelu"}, "has only silu gates, not gelu"),
        (((8, 1024, 512), None), ((8, 512, 512), None), (), {"limit": 7.0}, "has no gates with a limit"),
        (((8, 384, 512), None), ((8, 512, 192), None), (), {}, "experts have 512 x 192 dims, no multiples of 128"),
        (((8, 768, 512), "fp8[1, *]"), ((8, 512, 384), "fp8[1, *]"), (), FP8,
         "experts have 512 x 384 dims, no multiples of 256"),
        (((8, 1024, 512), "mxfp4"), ((8, 512, 512), "mxfp4"), (Type("bf16", (8, 1024)),),
         {"kind": "swigluoai", "limit": 7.0, "alpha": 1.7}, None),
        (((8, 1024, 512), "mxfp4"), ((8, 512, 512), "mxfp4"), (), FP8,
         "weights in mxfp4 are multiplied only by activations in bf16, not in fp8[1, *]"),
        (((8, 1024, 512), "mxfp4"), ((8, 512, 512), None), (), {}, "has no layout of mxfp4"),
        (((8, 1024, 512), "fp8[1, *]"), ((8, 512, 512), None), (), FP8,
         "multiplies quantized activations only by packed weights"),
    ],
)  # fmt: skip
def test_what_is_accepted_of_experts(
    gate_up: tuple[tuple[int, ...], str | None], down: tuple[tuple[int, ...], str | None], more: tuple[Any, ...],
    options: dict[str, Any], reason: str | None,
):  # fmt: skip
    x, weights, ids = Type("bf16", ("T", 512)), Type("fp32", ("T", 2)), Type("i64", ("T", 2))
    matrices = (Type("bf16", *each) for each in (gate_up, down))
    accepts = find_kernel(ops.experts, "aiter").accepts
    assert accepts(MI355X, x, weights, ids, *matrices, *more, **{"kind": "silu", **options}) == reason


@pytest.mark.parametrize(
    ("dtype", "rank", "rotated", "cache", "reason"),
    [
        ("bf16", 512, 64, "bf16", None),
        ("bf16", 256, 32, "bf16", None),
        ("fp16", 512, 64, "fp16", "attends latents in bf16, not in fp16"),
        ("bf16", 512, 64, "fp8_e4m3", "reads latents and rotated keys of one dtype, not of a cache in fp8_e4m3"),
        ("bf16", 384, 64, "bf16", "entries have 384 + 64 dims, no powers of two of at least 16"),
        ("bf16", 512, 8, "bf16", "entries have 512 + 8 dims, no powers of two of at least 16"),
        ("bf16", 1024, 64, "bf16", "latents have 1024 dims, more than 512"),
    ],
)
def test_what_is_accepted_of_latent_attention(dtype: str, rank: int, rotated: int, cache: str, reason: str | None):
    q_nope, q_rope = (Type(dtype, ("T", 16, dims)) for dims in (128, rotated))
    kv_b, entries = Type(dtype, (16 * 256, rank)), KV("l", latent_entry(cache, dtype, rank, rotated))
    accepts = find_kernel(ops.paged_mla_attention, "aiter").accepts
    assert accepts(MI300X, q_nope, q_rope, kv_b, entries, BatchType(), scale=0.1) == reason
    lacking = Target("cuda", MI300X.features | {"no aiter.latent_decode: x:y: there is none"})
    found = accepts(lacking, q_nope, q_rope, kv_b, entries, BatchType(), scale=0.1)
    assert found == "this version of AITER lacks latent_decode: x:y: there is none"


def test_slopes_and_chunks_of_attention_have_their_reason():
    x, keys, angles = Type("bf16", ("T", 4, 64)), Type("bf16", ("T", 2, 64)), Type("fp32", ("T", 32))
    cache, slopes = KV("l", Type("bf16", (2, 2, 64))), Type("fp32", (4,))
    attend, both = (find_kernel(op, "aiter").accepts for op in (ops.paged_attention, ops.norm_rope_attention))
    written = x, keys, keys, angles, angles, None, None
    for accepts, first in ((attend, (x,)), (both, written)):
        args = MI355X, *first, cache, BatchType(), None, None, None
        assert accepts(*args, scale=0.1) is None
        assert accepts(*args, None, scale=0.1, window=16, chunked=True) == "attends no chunks"
        assert accepts(*args, slopes, scale=0.1) == "lowers no scores by distance"
    chosen = "attends to all blocks, not to those that an indexer chooses"
    assert attend(*args[:2], *args[-5:], None, None, Type("i32", ("T", 2, 4)), scale=0.1, block=16) == chosen


def test_other_vendors_texts_have_no_word_of_it():
    assert "aiter" not in text(H200)


def test_a_machine_without_amds_gpus_has_no_such_feature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert backend.find_features() == frozenset() and backend.find_versions() == {}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    recorded = read_newest()
    left_out = next(place for place in recorded if place.endswith(":unified_attention"))
    del recorded[left_out]
    monkeypatch.setattr(backend, "find_root", lambda: write_sources(tmp_path, recorded))
    monkeypatch.setattr(backend, "find_version", lambda: "0.1.7")
    lacking = next(each for each in backend.find_features() if each != "aiter")
    assert lacking.startswith("no aiter.attention: ") and f"{left_out}: there is none" in lacking
    assert len(backend.find_features()) == 2 and backend.find_versions() == {"aiter": "0.1.7"}
