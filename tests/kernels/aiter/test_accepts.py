"""What the backend `aiter` accepts, and its reasons: a text for AMD's GPUs on a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernels.aiter_doubles import read_contract, write_sources

from atom.config.load import load_gpu
from atom.graph import parse, show
from atom.kernels import Target
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
        (MI300X, {"kind": "gelu"}, "aiter: has silu gates alone, not gelu"),
        (MI300X, {"weight": "mxfp4"}, "aiter: its weight is stored as mxfp4"),
        (
            MI355X,
            {"weight": "fp8[1, *]"},
            "aiter: weights in fp8[1, *] are multiplied by activations in fp8[1, *] alone",
        ),
        (MI300X, {"norm": "fp32"}, "aiter: norms bf16 by a weight in it, not in fp32"),
        (MI300X, {"cache": "fp8_e4m3"}, "aiter: does not bound entries of fp8_e4m3"),
        (Target("cuda", frozenset({"amd", "gfx90a"})), {}, "aiter: runs on gfx942 and gfx950 alone"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_refusal_has_its_reason(target: Target, options: dict[str, str], reason: str):
    found = text(target, **options)
    assert reason in found, found
    assert "triton." in found


def test_other_vendors_texts_have_no_word_of_it():
    assert "aiter" not in text(H200)


def test_a_machine_without_amds_gpus_has_no_such_feature(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert backend.find_features() == frozenset() and backend.find_versions() == {}
    monkeypatch.setattr(torch.version, "hip", "7.0")
    recorded = dict(read_contract()["functions"])
    left_out = next(place for place in recorded if place.endswith(":unified_attention"))
    del recorded[left_out]
    monkeypatch.setattr(backend, "find_root", lambda: write_sources(tmp_path, recorded))
    monkeypatch.setattr(backend, "find_version", lambda: "0.1.7")
    lacking = next(each for each in backend.find_features() if each != "aiter")
    assert lacking.startswith("no aiter.attention: ") and f"{left_out}: there is none" in lacking
    assert len(backend.find_features()) == 2 and backend.find_versions() == {"aiter": "0.1.7"}
