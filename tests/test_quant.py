"""`quant=`: plain weights packed while they load, against the same weights rounded by torch or compressed-tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from law import assert_same_logits
from probe import logits_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from atom import LLMEngine
from atom.cache import Cache
from atom.compiler import semantic_graph
from atom.config.load import load
from atom.errors import ConfigError
from atom.graph import PackedWeight, Type
from atom.weights.quantize import quantize

TOKENS = [5, 17, 3, 99, 42, 8, 77, 23, 61, 2]
LINEARS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight",
           "down_proj.weight")  # fmt: skip


def by_torch(dtype: torch.dtype, largest: float) -> Callable[[Tensor], Tensor]:
    """A scale for each row."""

    def round_(weight: Tensor) -> Tensor:
        scale = weight.abs().amax(1, keepdim=True) / largest
        return (
            (weight / scale).to(dtype).float() * scale if dtype.is_floating_point else (weight / scale).round() * scale
        )

    return round_


def in_blocks(weight: Tensor) -> Tensor:
    """A scale for each block of 32 x 16, the last ones smaller."""
    out = weight.clone()
    for row in range(0, weight.shape[0], 32):
        for column in range(0, weight.shape[1], 16):
            block = out[row : row + 32, column : column + 16]
            scale = block.abs().amax() / 448
            block.copy_((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return out


ROUNDED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "fp8": ("quant=fp8", by_torch(torch.float8_e4m3fn, 448)),
    "int8": ("quant=int8", by_torch(torch.int8, 127)),
    "blocks": ("quant.fmt='fp8[32, 16]'", in_blocks),
}


def save_rounded(
    folder: Path, round_: Callable[[Tensor], Tensor], names: tuple[str, ...] = LINEARS
) -> tuple[Path, Path]:
    """A checkpoint, and one with rounded linears."""
    plain, rounded = tiny.save("qwen3", folder / "plain"), tiny.save("qwen3", folder / "rounded")
    tensors = load_file(plain / "model.safetensors")
    save_file({name: round_(each) if name.endswith(names) else each for name, each in tensors.items()},
              rounded / "model.safetensors", {"format": "pt"})  # fmt: skip
    return plain, rounded


def open_engine(folder: Path, *overrides: str) -> LLMEngine:
    return LLMEngine.from_config(load([f"checkpoint={folder}", "dtype=fp32", "device=cpu", *overrides]))


def logits(folder: Path, *overrides: str) -> Tensor:
    engine = open_engine(folder, *overrides)
    try:
        return logits_of(engine, TOKENS)
    finally:
        engine.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("name", ROUNDED)
def test_a_model_packed_while_it_loads_is_that_of_the_rounded_weights(name: str, level: int, tmp_path: Path):
    override, round_ = ROUNDED[name]
    plain, rounded = save_rounded(tmp_path, round_)
    assert_same_logits(logits(plain, override, f"level={level}"), logits(rounded, "level=0"))


def test_patterns_stay_plain_and_the_head_is_packed_where_that_is_asked_for(tmp_path: Path):
    names = ("o_proj.weight", "down_proj.weight", "lm_head.weight")
    plain, rounded = save_rounded(tmp_path, ROUNDED["fp8"][1], names)
    overrides = ("quant=fp8", "quant.head=fp8", "quant.plain=['*.[qkv]_proj','re:.*(gate|up)_proj']", "level=1")
    assert_same_logits(logits(plain, *overrides), logits(rounded, "level=0"))


def test_experts_have_a_format_of_their_own_and_stay_plain_by_the_names_of_their_modules(tmp_path: Path):
    plain, rounded = (tiny.save("qwen3_moe", tmp_path / each) for each in ("plain", "rounded"))
    fp8, int8 = by_torch(torch.float8_e4m3fn, 448), by_torch(torch.int8, 127)
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if ".self_attn." in name and name.endswith("_proj.weight"):
            tensors[name] = fp8(tensor)
        elif ".experts." in name and not name.endswith("down_proj.weight"):
            tensors[name] = int8(tensor)
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
    overrides = ("quant=fp8", "quant.experts=int8", r"quant.plain=['re:.*\.experts\.\d+\.down_proj$']")
    assert_same_logits(logits(plain, *overrides, "level=1"), logits(rounded, "level=0"))


def test_single_modules_have_formats_of_their_own(tmp_path: Path):
    plain, rounded = (tiny.save("qwen3", tmp_path / each) for each in ("plain", "rounded"))
    fp8, int8 = by_torch(torch.float8_e4m3fn, 448), by_torch(torch.int8, 127)
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if name.startswith("model.layers.0.self_attn.o_proj"):
            tensors[name] = int8(tensor)  # by its name, which goes ahead of patterns
        elif name.endswith(LINEARS) and not name.startswith("model.layers.1."):
            tensors[name] = fp8(tensor)
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
    formats = '{"model.layers.0": "fp8", "model.layers.0.self_attn.o_proj": "int8", "re:.*[.]1[.]": "plain"}'
    assert_same_logits(logits(plain, "quant=fp8", f"quant.formats={formats}", "level=1"), logits(rounded, "level=0"))


def test_a_pattern_of_formats_leaves_the_head_plain_and_its_name_packs_it(tmp_path: Path):
    linears, every = LINEARS, (*LINEARS, "lm_head.weight")
    for names, formats in ((linears, '{"*": "int8"}'), (every, '{"*": "int8", "lm_head": "int8"}')):
        plain, rounded = save_rounded(tmp_path / str(len(names)), ROUNDED["int8"][1], names)
        overrides = ("quant=none", f"quant.formats={formats}", "level=1")
        assert_same_logits(logits(plain, *overrides), logits(rounded, "level=0"))


@pytest.mark.parametrize("fmt", ["int4[1, 32]", "int4[1, 16]", "mxfp4"])
def test_four_bits_are_no_further_from_the_weights_than_those_of_compressed_tensors(fmt: str):
    weight, group = torch.randn(24, 96, generator=torch.Generator().manual_seed(1)), 16 if "16" in fmt else 32
    arguments = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=True)
    grouped = weight.unflatten(1, (-1, group))
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), arguments)
    theirs = fake_quantize(weight, scale, zero, arguments)
    ours = PackedWeight(Type("fp32", (24, 96), fmt), quantize(fmt, weight)).unpack()
    share = 1.25 if fmt == "mxfp4" else 1.0  # of 4-bit floats with a power of 2, which integers beat on a normal
    assert (ours - weight).norm() <= share * (theirs - weight).norm()


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("quant.fmt=fp9", r"quant.fmt=fp9: there is no such choice; choices: auto, none, budget, fp8, "),
        ("quant.head=fp88", r"quant.head=fp88: there is no such choice \(did you mean fp8\?\);"),
        ("quant.plain=['re:(']", r"quant.plain: re:\( is not a regular expression"),
        ("quant.plain=[lm_heads]", r"quant.plain: the model has no module lm_heads; mend it, or leave it out"),
        ("quant.experts=int4", r"quant.experts=int4: the model has no experts; leave it out"),
        ("quant.kv=fp4", r"quant.kv=fp4: there is no such choice"),
        ('quant.formats={"lm_heads": "int4"}', r"quant.formats: the model has no module lm_heads; mend it"),
        ('quant.formats={"lm_head": "fp9"}', r"quant.formats.lm_head=fp9: there is no such choice; choices: plain, "),
        ("quant.max_kl=0.1", r"quant.max_kl=0.1 is the budget of quant=budget; write that, or leave it out"),
        ("quant.fmt=budget", r"quant.fmt=budget has no budget; write quant=budget, or set quant.max_kl"),
        ("quant.max_kl=0", r"quant.max_kl"),
    ],
)
def test_what_cannot_be_is_one_line(override: str, reason: str, tmp_path: Path):
    folder = tiny.save("qwen3", tmp_path / "plain")
    with pytest.raises(ConfigError, match=reason):
        load([f"checkpoint={folder}", override])


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("quant.choices=[]", r"quant.choices=\[\] leaves nothing to choose"),
        ("quant.choices=[int3]", r"quant.choices=int3: there is no such choice"),
        ('quant.formats={"lm_head": "int4"}', r"quant.formats=.*: quant=budget chooses the formats; leave one of them"),
    ],
)
def test_what_a_budget_cannot_be_is_one_line(override: str, reason: str, tmp_path: Path):
    folder = tiny.save("qwen3", tmp_path / "plain")
    with pytest.raises(ConfigError, match=reason):
        load([f"checkpoint={folder}", "quant=budget", override])


def test_columns_that_no_group_divides_are_refused_by_the_module_s_name(tmp_path: Path):
    folder = tiny.save("llama_odd_heads", tmp_path / "plain")  # 60 columns
    with pytest.raises(ConfigError, match=r"quant: model.layers.0.self_attn.q_proj: mxfp4 packs multiples of 32"):
        open_engine(folder, "quant=mxfp4")


def test_a_gguf_file_s_blocks_are_packed_anew():  # the embedded model is such a file
    recipes = semantic_graph(load(["quant=int8", "device=cpu"])).recipes()
    packed = [recipe for recipe in recipes if recipe.type.fmt is not None]
    assert packed and {recipe.type.fmt for recipe in packed} == {"int8[1, *]"}


def test_experts_of_a_cpu_are_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {**tiny.EXPERTS, "hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4, "head_dim": 16}
    monkeypatch.setitem(tiny.VARIANTS, "wide_experts", ("Qwen3MoeConfig", sizes))
    folder, cache = tiny.save("wide_experts", tmp_path), f"cache={tmp_path}/cache"

    def run(level: int) -> Tensor:
        engine = LLMEngine.from_config(
            load([f"checkpoint={folder}", "dtype=bf16", "device=cpu", "quant=int8", f"level={level}", cache])
        )
        try:
            return logits_of(engine, TOKENS)
        finally:
            engine.close()

    unpacked = run(0)
    first = run(1)
    assert (first - unpacked).norm() < 0.02 * unpacked.norm()
    deadline = time.monotonic() + 120
    while len(Cache(tmp_path / "cache").entries("weights")) < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    file = folder / "model.safetensors"
    seen = file.stat()
    tensors = load_file(file)
    changed = {name: each + 1 if "_proj" in name else each for name, each in tensors.items()}
    save_file(changed, file, {"format": "pt"})
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert file.stat().st_size == seen.st_size, "for all that atom knows, it is the same file"
    assert torch.equal(run(1), first), "the plain linears are read"
