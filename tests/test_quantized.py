"""Checkpoints that are stored quantized, against transformers with the same weights unpacked, in float32.

The tensors are written here straight from the published layouts: DeepSeek-V3's README_WEIGHTS.md, compressed-tensors'
quant_scheme.py, fbgemm_fp8 and fp8 of transformers, modelopt's and Quark's exports.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import huggingface_hub
import pytest
import tiny
import torch
from compressed_tensors.compressors import (
    MXFP8QuantizationCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from probe import assert_logits
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks, thread_ranks
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from atom import LLMEngine, SamplingParams
from atom.config.load import load
from atom.errors import CheckpointError

__all__ = ["thread_ranks"]

Stored = dict[str, Tensor]  # by suffix of the weight's name

NAMES = ("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")  # of linears
FP8_MAX, INT8_MAX = 448.0, 127.0


def store(weight: Tensor, block: tuple[int, int], suffix: str, dtype: torch.dtype, shape: str) -> tuple[Stored, Tensor]:
    """A weight [O, I] with a scale for each block, its scales in the named shape, and the same unpacked."""
    rows, columns = (-(-size // each) for size, each in zip(weight.shape, block, strict=True))
    scales, plain = torch.empty(rows, columns), torch.empty_like(weight)
    values = torch.empty_like(weight, dtype=dtype)
    for row in range(rows):
        for column in range(columns):
            at = (slice(row * block[0], (row + 1) * block[0]), slice(column * block[1], (column + 1) * block[1]))
            scale = weight[at].abs().max() / (FP8_MAX if dtype.is_floating_point else INT8_MAX)
            scales[row, column] = scale
            scaled = weight[at] / scale
            values[at] = (scaled if dtype.is_floating_point else scaled.round()).to(dtype)
            plain[at] = values[at].float() * scale
    shapes = {"grid": [rows, columns], "rows": [rows], "one": [1], "none": [], "nested": [rows, 1, columns, 1]}
    return {"": values, suffix: scales.reshape(shapes[shape])}, plain


class Layout(NamedTuple):
    config: dict[str, Any]  # quantization_config
    store: Callable[[Tensor], tuple[Stored, Tensor]]
    extra: tuple[str, ...] = ()  # suffixes of tensors that are not needed


def fp8(block: tuple[int, int], suffix: str = "_scale", shape: str = "grid") -> Callable[[Tensor], Any]:
    return lambda weight: store(weight, block, suffix, torch.float8_e4m3fn, shape)


def int8(block: tuple[int, int], shape: str) -> Callable[[Tensor], Any]:
    return lambda weight: store(weight, block, "_scale", torch.int8, shape)


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 8, "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": scheme}, "ignore": ["lm_head"]}  # fmt: skip


def quark(**weight: str) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": ["lm_head"]}


def packed(bits: int, *, group: int | None = None, symmetric: bool = True, is_ordered: bool = False) -> Layout:
    """compressed-tensors' own pack-quantized; ordered: groups are of any columns, which g_idx says."""
    config = compressed("pack-quantized", type="int", strategy="group" if group else "channel", group_size=group,
                        num_bits=bits, symmetric=symmetric)  # fmt: skip
    scheme = QuantizationScheme(targets=["Linear"], weights=config["config_groups"]["group_0"]["weights"])
    assert scheme.weights is not None
    args = scheme.weights

    if is_ordered:
        config["config_groups"]["group_0"]["weights"]["actorder"] = "group"

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        back = torch.randperm(weight.shape[1])  # the place of each column among the groups
        if is_ordered:
            weight = weight[:, back.argsort()]
        groups = weight.unflatten(1, (-1, group or weight.shape[1]))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        parts = PackedQuantizationCompressor.compress(given, scheme)
        unpacked = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        if is_ordered:
            assert group is not None
            numbers = unpack_from_int32(parts["weight_packed"], bits, weight.shape)[:, back]
            parts |= {"weight_packed": pack_to_int32(numbers, bits), "weight_g_idx": (back // group).int()}
            unpacked = unpacked[:, back]
        return {name.removeprefix("weight"): part.contiguous() for name, part in parts.items()}, unpacked

    return Layout(config, store)


def grouped(weight: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers of a weight [O, I] with a zero point for each group of a row: numbers [O, I], zeros and scales [O, G], and
    the weight that they are."""
    groups = weight.unflatten(1, (-1, group))
    lowest, highest = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scales = ((highest - lowest) / ((1 << bits) - 1)).half().float()
    zeros = (-lowest / scales).round().clamp(0, (1 << bits) - 1)
    numbers = (groups / scales + zeros).round().clamp(0, (1 << bits) - 1)
    plain = ((numbers - zeros) * scales).flatten(1)
    return numbers.flatten(1).long(), zeros.squeeze(-1).long(), scales.squeeze(-1), plain


def words(numbers: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """[R, C] -> int32[R, C / numbers of a word]: place i of a word has column order[i] of its run."""
    packed = torch.zeros(len(numbers), numbers.shape[1] // len(order), dtype=torch.int64)
    for place, column in enumerate(order):
        packed |= numbers[:, column :: len(order)] << (bits * place)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(weight: Tensor) -> tuple[Stored, Tensor]:
    numbers, zeros, scales, plain = grouped(weight, 8, 4)
    parts = {"qweight": words(numbers.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER), "scales": scales.T.half()}  # fmt: skip
    return {f".{name}": part.contiguous() for name, part in parts.items()}, plain


def gptq(
    bits: int, group: int | None, *, version: int, is_ordered: bool = False
) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        size = group or weight.shape[1]
        order_of_columns = torch.randperm(weight.shape[1]) if is_ordered else torch.arange(weight.shape[1])
        numbers, zeros, scales, plain = grouped(weight[:, order_of_columns], size, bits)
        back = order_of_columns.argsort()  # groups are of columns in that order, and are stored in the model's
        numbers, plain = numbers[:, back], plain[:, back]
        order, stored_zeros = tuple(range(32 // bits)), (zeros - int(version == 1)) % (1 << bits)
        parts = {"qweight": words(numbers, bits, order).T, "qzeros": words(stored_zeros.T, bits, order), "scales": scales.T.half(),
                 "g_idx": back.int() // size}  # fmt: skip
        return {f".{name}": part.contiguous() for name, part in parts.items()}, plain

    return store


def nvfp4(names: tuple[str, str, str], *, is_divisor: bool) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """compressed-tensors' own, or as modelopt names the same: a factor in place of a divisor."""
    scheme = QuantizationScheme(targets=["Linear"], weights=NVFP4)
    args = scheme.weights
    assert args is not None

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        divisor = generate_gparam(weight.min().reshape(1), weight.max().reshape(1))
        groups = weight.unflatten(1, (-1, 16))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=divisor)
        given = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor, "weight_zero_point": zero}
        parts = NVFP4PackedCompressor.compress(given, scheme)
        values, scales, factor = parts["weight_packed"], parts["weight_scale"], divisor if is_divisor else 1 / divisor
        numbers = unpack_fp4_from_uint8(values, *weight.shape, dtype=torch.float32).unflatten(1, (-1, 16))
        plain = (numbers * (scales.float() / divisor).unsqueeze(-1)).flatten(1)  # their decompress gives bf16
        return dict(zip(names, (values, scales, factor), strict=True)), plain

    return store


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}


def mxfp4(suffix: str) -> Callable[[Tensor], tuple[Stored, Tensor]]:
    """u8[O, I / 2] and exponents u8[O, I / 32], read by transformers' own unpacking."""

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        rows, columns = weight.shape
        values = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        scales = torch.randint(120, 125, (rows, columns // 32), dtype=torch.uint8)
        plain = convert_moe_packed_tensors(values.view(1, rows, -1, 16), scales.unsqueeze(0), dtype=torch.float32)
        return {suffix: values, "_scale": scales}, plain[0].T.contiguous()

    return store


def mxfp8(weight: Tensor) -> tuple[Stored, Tensor]:
    """compressed-tensors' own: numbers e4m3, exponents u8[O, I / 32]."""
    scheme = QuantizationScheme(targets=["Linear"], weights=MXFP8)
    assert scheme.weights is not None
    groups = weight.unflatten(1, (-1, 32))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    parts = MXFP8QuantizationCompressor.compress(given, scheme)
    values, exponents = parts["weight"], parts["weight_scale"]
    assert (values.dtype, exponents.dtype) == (torch.float8_e4m3fn, torch.uint8)
    scales = decompress_mx_scale(exponents).float()
    return {"": values, "_scale": exponents}, (values.float().unflatten(1, (-1, 32)) * scales.unsqueeze(-1)).flatten(1)


MXFP8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
         "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}  # fmt: skip
STATED_MXFP8 = MXFP8 | {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}

ALL = 1 << 20
LAYOUTS = {
    "deepseek": Layout({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}, fp8((16, 32), "_scale_inv")),
    "fp8 of transformers": Layout({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, fp8((ALL, ALL), "_scale_inv", "none"), (".activation_scale",)),
    "fp8 static": Layout({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, fp8((ALL, ALL), shape="none"), (".input_scale",)),
    "fp8 dynamic": Layout({"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}, fp8((ALL, ALL), shape="none")),
    "fbgemm": Layout({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, fp8((1, ALL)), (".input_scale_ub",)),
    "FP8": Layout(compressed("float-quantized", type="float", strategy="tensor"), fp8((ALL, ALL), shape="one"), (".input_scale",)),
    "FP8_DYNAMIC": Layout(compressed("float-quantized", type="float", strategy="channel"), fp8((1, ALL))),
    "FP8_BLOCK": Layout(compressed("float-quantized", type="float", strategy="block", block_structure=[16, 16]), fp8((16, 16))),
    "W8A8": Layout(compressed("int-quantized", type="int", strategy="channel"), int8((1, ALL), "grid")),
    "modelopt": Layout({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head*"]}, fp8((ALL, ALL), shape="none"), (".input_scale",)),
    "modelopt channel": Layout({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, fp8((1, ALL), shape="rows")),
    "modelopt blocks": Layout({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]}, fp8((128, 128), shape="nested")),
    "quark": Layout(quark(dtype="fp8_e4m3", qscheme="per_channel"), fp8((1, ALL), shape="rows")),
    "quark tensor": Layout(quark(dtype="fp8_e4m3", qscheme="per_tensor"), fp8((ALL, ALL), shape="none"), (".input_scale", ".output_scale")),
    "quark int8": Layout(quark(dtype="int8", qscheme="per_channel"), int8((1, ALL), "rows")),
    "quark int8 tensor": Layout(quark(dtype="int8", qscheme="per_tensor"), int8((ALL, ALL), "none")),
    "W4A16": packed(4, group=8),
    "W4A16 ordered": packed(4, group=8, is_ordered=True),
    "W4A16 asymmetric": packed(4, group=8, symmetric=False),
    "W4A16 asymmetric ordered": packed(4, group=8, symmetric=False, is_ordered=True),
    "W8A16 asymmetric ordered": packed(8, group=8, symmetric=False, is_ordered=True),
    "W4A16 channel": packed(4),
    "W8A16": packed(8),
    "W8A16 asymmetric": packed(8, group=8, symmetric=False),
    "MXFP8": Layout(compressed("mxfp8-quantized", **STATED_MXFP8), mxfp8),
    "MXFP4": Layout(compressed("mxfp4-pack-quantized", type="float", strategy="group", group_size=32, num_bits=4), mxfp4("_packed")),
    "quark MXFP4": Layout(quark(dtype="fp4", qscheme="per_group"), mxfp4("")),
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}, awq),
    "gptq": Layout({"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True}, gptq(4, 8, version=1)),
    "gptq v2": Layout({"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": "gptq_v2"}, gptq(4, 8, version=2)),
    "gptq rows": Layout({"quant_method": "gptq", "bits": 4, "group_size": -1, "dynamic": {}}, gptq(4, None, version=1)),
    "gptq ordered": Layout({"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True}, gptq(4, 8, version=1, is_ordered=True)),
    "gptq v2 8 bits ordered": Layout({"quant_method": "gptq", "bits": 8, "group_size": 8, "desc_act": True, "checkpoint_format": "gptq_v2"}, gptq(8, 8, version=2, is_ordered=True)),
    "NVFP4": Layout(compressed("nvfp4-pack-quantized", **NVFP4), nvfp4(("_packed", "_scale", "_global_scale"), is_divisor=True), (".input_global_scale",)),
    "modelopt NVFP4": Layout({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(("", "_scale", "_scale_2"), is_divisor=False), (".input_scale",)),
    "gptq 8 bits": Layout({"quant_method": "gptq", "bits": 8, "group_size": 8}, gptq(8, 8, version=1)),
}  # fmt: skip
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
WIDE_MOE = {
    **tiny.EXPERTS,
    "moe_intermediate_size": 32,
    "hidden_size": 64,
    "head_dim": 16,
    "vocab_size": 104,
    "num_experts": 16,
}
EXCEPTIONS = ("ignore", "exclude", "exclude_modules", "ignored_layers", "modules_to_not_convert")
MX = ("MXFP8", "MXFP4", "quark MXFP4", "NVFP4", "modelopt NVFP4")  # whose columns are multiples of 32


def write(variant: str, layout: Layout, folder: Path, names: tuple[str, ...] = NAMES) -> tuple[Path, Path]:
    """Two checkpoints of random weights: one stored in the layout, one of the same weights unpacked."""
    plain = tiny.save(variant, folder / "plain")
    return pack(plain, layout, folder / "packed", names), plain


def pack(
    plain: Path, layout: Layout, packed: Path, names: tuple[str, ...] = NAMES, left_plain: str | None = None
) -> Path:
    """Write a checkpoint stored in the layout but for names with `left_plain`; the plain one gets the same weights."""
    tensors, stored, unpacked = load_file(plain / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        unpacked[name] = stored[name] = tensor
        if name.endswith(names) and not (left_plain and left_plain in name):
            parts, unpacked[name] = layout.store(tensor)
            del stored[name]
            module = name.removesuffix(".weight")
            stored |= {(module if suffix.startswith(".") else name) + suffix: part for suffix, part in parts.items()}
            stored |= {name.removesuffix(".weight") + suffix: torch.ones(1) for suffix in layout.extra}
    save_file(unpacked, plain / "model.safetensors", {"format": "pt"})
    packed.mkdir()
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": layout.config}))
    return packed


def assert_same_as(plain: Path, packed: Path, level: int, **options: Any) -> None:
    """The logits of a packed checkpoint are those of the plain one."""
    engine, tokens = open_engine(packed, level, **options), tiny.prompt(20)
    try:
        assert_logits(engine, tokens, tiny.reference(plain))
    finally:
        engine.close()


def open_engine(folder: Path, level: int, **options: Any) -> LLMEngine:
    return LLMEngine(model=str(folder), dtype="fp32", level=level, kv_cache_memory=1 << 22, **options)


@pytest.mark.sampled(24)
@pytest.mark.parametrize(
    ("variant", "layout", "level"),
    [
        *(("qwen3", layout, 0) for layout in LAYOUTS if layout not in MX),
        *(("wide", layout, level) for layout in MX for level in (0, 1)),
        *(("qwen2", layout, 1) for layout in ("deepseek", "FP8_DYNAMIC", "W8A8", "W4A16 asymmetric", "awq", "gptq")),
        *(("qwen3_moe", layout, 1) for layout in ("W4A16", "awq", "gptq v2")),
        *((variant, "deepseek", level) for variant in ("qwen3_moe", "deepseek_v3") for level in (0, 1)),
        *(("phi3", layout, level) for layout in ("FP8", "deepseek", "gptq") for level in (0, 1)),
        ("mixtral_odd", "quark", 0),
    ],
)
def test_tokens_and_logits_are_those_of_the_weights_unpacked(
    variant: str, layout: str, level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(tiny.VARIANTS, "wide", ("Qwen3Config", WIDE))
    packed, plain = write(variant, LAYOUTS[layout], tmp_path)
    reference, tokens = tiny.reference(plain), tiny.prompt(40)
    engine = open_engine(packed, level)
    try:
        assert_logits(engine, tokens, reference)
        (answer,) = engine.generate([tokens[:20]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        tiny.assert_greedy(answer, tokens[:20], reference)
    finally:
        engine.close()


HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


@pytest.mark.parametrize(
    ("variant", "changes", "names"),
    [
        ("qwen3_next", {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}, ("in_proj_qkvz.weight",)),
        ("qwen3_5", {}, ("in_proj_qkv.weight", "in_proj_z.weight")),
    ],
)
def test_linears_of_the_delta_rule_may_be_stored_in_blocks(
    variant: str, changes: dict[str, int], names: tuple[str, ...], tmp_path: Path
):
    """As Qwen/Qwen3-Next-80B-A3B-Instruct-FP8 and Qwen/Qwen3.5-27B-FP8: those of few rows stay plain."""
    tiny.save_changed(variant, tmp_path / "plain", **HYBRID, **changes)
    plain = {
        key.removesuffix(".weight")
        for key in load_file(tmp_path / "plain" / "model.safetensors")
        if key.endswith(
            ("in_proj_ba.weight", "in_proj_a.weight", "in_proj_b.weight", "conv1d.weight", "lm_head.weight")
        )
    }
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}
    layout = Layout({**config, "modules_to_not_convert": sorted(plain)}, fp8((8, 8), "_scale_inv"))
    packed = pack(tmp_path / "plain", layout, tmp_path / "packed", ("_proj.weight", *names))
    assert_same_as(tmp_path / "plain", packed, level=0)


@pytest.mark.parametrize("is_bf16", [True, False])
def test_an_indexer_may_be_stored_in_blocks_and_its_weights_of_heads_plain(is_bf16: bool, tmp_path: Path):
    """As deepseek-ai/DeepSeek-V3.2, in bf16, and as transformers saves them, in float32."""
    tiny.save_changed("deepseek_v32", tmp_path / "plain", index_n_heads=32)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    if is_bf16:
        tensors |= {key: each.bfloat16() for key, each in tensors.items() if "weights_proj" in key}
    save_file(tensors, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    names = (*NAMES, "indexer.wq_b.weight", "indexer.wk.weight")
    packed = pack(tmp_path / "plain", LAYOUTS["deepseek"], tmp_path / "packed", names, left_plain="weights_proj")
    assert_same_as(tmp_path / "plain", packed, level=1)


RANKS: dict[str, dict[str, Any]] = {"tp2": {"tensor_parallel_size": 2}, "tp4": {"tensor_parallel_size": 4},
                                   "tp4 ep2": {"parallel.tensor": 4, "parallel.experts": 2}}  # fmt: skip


@pytest.mark.sampled(72)
@pytest.mark.parametrize(
    ("variant", "layout", "ranks"),
    [
        *(("wide", layout, ranks) for layout in LAYOUTS for ranks in ("tp2",)),
        *(("wide", layout, "tp4") for layout in ("deepseek", "FP8", "W4A16 asymmetric", "awq", "NVFP4")),
        *(("wide_moe", layout, "tp2") for layout in ("FP8", "W8A8", "gptq", "NVFP4", "MXFP8")),
        *(("wide_moe", layout, "tp4 ep2") for layout in ("deepseek", "FP8", "W4A16", "awq", "quark MXFP4", "NVFP4")),
        *(("phi3", layout, "tp2") for layout in ("FP8", "deepseek", "gptq")),
    ],
)
def test_ranks_have_parts_of_the_weights_as_they_are_stored(
    variant: str, layout: str, ranks: str, thread_ranks: list[ThreadRanks], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setitem(tiny.VARIANTS, "wide", ("Qwen3Config", WIDE))
    monkeypatch.setitem(tiny.VARIANTS, "wide_moe", ("Qwen3MoeConfig", WIDE_MOE))
    packed, plain = write(variant, LAYOUTS[layout], tmp_path)
    tokens = tiny.prompt(30)
    engine = open_engine(packed, 1, **RANKS[ranks])
    try:
        (answer,) = engine.generate([tokens], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    finally:
        engine.close()
    expected = tiny.logits(tiny.reference(plain), tokens).log_softmax(-1)[torch.arange(29), tokens[1:]]
    assert [each.logprob for each in answer["prompt_logprobs"][1:]] == pytest.approx(expected.tolist(), abs=2e-3)
    assert len(thread_ranks) == 1


SCALE = "model.layers.1.self_attn.q_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scale: None, r"tensor .*1\.self_attn\.q_proj\.weight is fp8_e4m3, the model expects fp32; is its scale missing\?"),
        (lambda scale: scale[:-1], r"tensor .*q_proj\.weight_scale_inv is \[3, 2\], the model expects \[4, 2\]"),
        (lambda scale: scale.int(), r"tensor .*q_proj\.weight_scale_inv is i32, the model expects fp32"),
    ],
)  # fmt: skip
def test_a_scale_that_is_missing_or_of_another_shape_or_dtype_is_one_line(
    change: Callable[[Tensor], Tensor | None], message: str, tmp_path: Path
):
    packed, _ = write("qwen3", LAYOUTS["deepseek"], tmp_path)
    tensors = load_file(packed / "model.safetensors")
    changed = change(tensors.pop(SCALE))
    save_file(tensors | ({} if changed is None else {SCALE: changed}), packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"^{message}") as error:
        open_engine(packed, 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe"])
def test_an_order_of_columns_that_the_config_denies_is_one_line_and_may_be_set(variant: str, tmp_path: Path):
    layout = LAYOUTS["gptq ordered"]
    packed, plain = write(variant, layout._replace(config={**layout.config, "desc_act": False}), tmp_path)
    message = (
        r"^tensor model\.layers\..*\.g_idx has columns of a group apart, .* or model\.fmt='gptq_int4_ordered\[1, 8\]'$"
    )
    with pytest.raises(CheckpointError, match=message):
        open_engine(packed, 0)
    assert_same_as(plain, packed, 0, **{"model.fmt": "gptq_int4_ordered[1, 8]"})


def test_scales_may_be_exponents(tmp_path: Path):
    layout = LAYOUTS["deepseek"]
    packed, plain = write("qwen3", layout._replace(config={**layout.config, "scale_fmt": "ue8m0"}), tmp_path)
    stored, unpacked = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        exponents = stored[name].log2().round()
        spread = exponents.exp2().repeat_interleave(16, 0).repeat_interleave(32, 1)
        unpacked[weight] = stored[weight].float() * spread[: len(stored[weight]), : stored[weight].shape[1]]
        stored[name] = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(unpacked, plain / "model.safetensors", {"format": "pt"})
    assert_same_as(plain, packed, level=0)


def test_experts_may_have_another_format_whose_scales_are_exponents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = {**tiny.DEEPSEEK_V4, "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 32}
    monkeypatch.setitem(tiny.VARIANTS, "wide_v4", ("DeepseekV4Config", sizes))
    plain, packed = tiny.save("wide_v4", tmp_path / "plain"), tmp_path / "packed"
    stored, unpacked = {}, load_file(plain / "model.safetensors")
    for name in list(unpacked):
        hub = re.sub(r"^hc_head\.hc_", "hc_head_", name.removeprefix("model.").replace("embed_tokens", "embed"))
        hub = hub.replace(".attn.norm.", ".attn.kv_norm.")
        if ".experts." in name:
            parts, unpacked[name] = mxfp4("")(unpacked[name])
            parts = {"": parts[""].view(torch.int8), ".scale": parts["_scale"].view(torch.float8_e8m0fnu)}
        elif re.search(r"\.(wq_a|wq_b|wkv|wo_a|wo_b|w[123])\.weight", name):
            parts, _ = fp8((16, 32), ".scale")(unpacked[name])
            exponents = parts[".scale"].log2().round()
            spread = exponents.exp2().repeat_interleave(16, 0).repeat_interleave(32, 1)
            rows, columns = unpacked[name].shape
            unpacked[name] = parts[""].float() * spread[:rows, :columns]
            parts[".scale"] = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
        else:
            parts = {"": unpacked[name]}
        stored |= {hub.removesuffix(".weight") + suffix if suffix else hub: part for suffix, part in parts.items()}
    save_file(unpacked, plain / "model.safetensors", {"format": "pt"})
    packed.mkdir()
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config, quantization = json.loads((plain / "config.json").read_text()), LAYOUTS["deepseek"].config
    quantization = {**quantization, "scale_fmt": "ue8m0"}
    (packed / "config.json").write_text(
        json.dumps({**config, "expert_dtype": "fp4", "quantization_config": quantization})
    )
    assert_same_as(plain, packed, level=1, **{"quant.act": "none"})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["deepseek", "W4A16", "awq"])
def test_modules_that_the_file_has_plain_are_read_as_they_are(layout: str, tmp_path: Path):
    packed, plain = write("qwen3_moe", LAYOUTS[layout], tmp_path)
    stored, unpacked = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    experts = [f"model.layers.2.mlp.experts.{expert}.down_proj" for expert in range(16)]
    for module in ("model.layers.1.self_attn.v_proj", "model.layers.2.self_attn.o_proj", *experts):
        for name in [name for name in stored if name.startswith(f"{module}.")]:
            del stored[name]
        stored[f"{module}.weight"] = unpacked[f"{module}.weight"]
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    assert_same_as(plain, packed, level=1)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    "layout", ["deepseek", "fp8 static", "W8A8", "W4A16 asymmetric", "NVFP4", "quark MXFP4", "awq", "gptq"]
)
def test_a_head_embeddings_and_routers_that_the_file_has_packed_are_unpacked(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(tiny.VARIANTS, "wide_moe", ("Qwen3MoeConfig", WIDE_MOE))
    config = {key: value for key, value in LAYOUTS[layout].config.items() if key not in EXCEPTIONS}
    names = (*NAMES, "lm_head.weight", "embed_tokens.weight", "mlp.gate.weight")
    packed, plain = write("wide_moe", LAYOUTS[layout]._replace(config=config), tmp_path, names)
    assert_same_as(plain, packed, level=1)


def test_a_head_that_gptq_says_is_packed_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(tiny.VARIANTS, "wide", ("Qwen3Config", {**WIDE, "vocab_size": 104}))
    layout = LAYOUTS["gptq"]
    layout = layout._replace(config={**layout.config, "lm_head": True})
    packed, plain = write("wide", layout, tmp_path, (*NAMES, "lm_head.weight"))
    assert_same_as(plain, packed, level=0)


def test_modules_that_gptq_leaves_plain_or_packs_otherwise_by_rules(tmp_path: Path):
    rules = {r"-:.*\.v_proj": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 16}}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8, "dynamic": rules}

    def store(weight: Tensor) -> tuple[Stored, Tensor]:
        is_down = weight.shape[1] == tiny.SIZES["intermediate_size"]
        return (gptq(8, 16, version=1) if is_down else gptq(4, 8, version=1))(weight)

    names = tuple(f"{name}_proj.weight" for name in ("q", "k", "o", "gate", "up", "down"))
    packed, plain = write("qwen3", Layout(config, store), tmp_path, names)
    assert_same_as(plain, packed, level=1)


def test_experts_that_are_stored_plain_as_one_tensor_are_read_as_they_are(tmp_path: Path):
    packed, plain = write("qwen3_moe_dense_step_stacked", LAYOUTS["deepseek"], tmp_path)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(packed / "model.safetensors")
    assert_same_as(plain, packed, level=1)


def test_the_first_launch_of_a_hub_id_reads_what_the_second_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    packed, _ = write("qwen3_moe", LAYOUTS["deepseek"], tmp_path)
    stored = load_file(packed / "model.safetensors")
    del stored["model.layers.1.self_attn.v_proj.weight_scale_inv"]
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    described = tmp_path / "described"
    described.mkdir()
    shutil.copy(packed / "config.json", described)
    header = SimpleNamespace(tensors=dict.fromkeys(stored))
    monkeypatch.setattr(huggingface_hub, "parse_safetensors_file_metadata", lambda *_, **__: header)
    models = []
    for folder in (described, packed):  # what the hub's cache has at the first launch and at the second
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, found=folder, **__: str(found))
        models.append(load(["checkpoint=org/name"]).model)
    assert models[0] == models[1] and "model.layers.1.self_attn.v_proj" in models[0].plain
