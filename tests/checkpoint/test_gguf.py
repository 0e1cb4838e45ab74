from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atom.checkpoint import SILENT, GGUFFacts, gguf_types, open_checkpoint
from atom.checkpoint.base import normalize_rope
from atom.checkpoint.gguf_reader import PLAIN, GGUFTensor, dequantize
from atom.checkpoint.modules import format_of
from atom.dtypes import GGUF_FORMATS
from atom.errors import CheckpointError, UnsupportedError
from atom.graph import Dequantize, Stack, W
from atom.graph import Type as GraphType
from atom.graph.recipe_ranges import narrow
from atom.weights import load

Type = gguf.GGMLQuantizationType
HIDDEN, HEADS, KV_HEADS, WIDTH, VOCAB = 64, 4, 2, 96, 40
SIZES = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}


def write(
    path: Path,
    tensors: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]],
    *,
    sizes: Mapping[str, Any] = SIZES,
    metadata: Mapping[str, Any] = {},
) -> Path:
    """tensors: name -> fp32 numbers and the type to store them in; sizes: keys below `tiny.`; metadata: other keys."""
    writer = gguf.GGUFWriter(path, "tiny")
    for key, value in {**{f"tiny.{key}": value for key, value in sizes.items()}, **metadata}.items():
        add(writer, key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(array.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def layer_tensors(
    kind: gguf.GGMLQuantizationType = Type.F32,
) -> dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
    }
    shapes |= {"ffn_gate": (WIDTH, HIDDEN), "ffn_up": (WIDTH, HIDDEN), "ffn_down": (HIDDEN, WIDTH)}
    tensors = {"token_embd.weight": (random(VOCAB, HIDDEN), kind), "output_norm.weight": (random(HIDDEN), Type.F32)}
    for layer in range(2):
        for seed, (name, shape) in enumerate(shapes.items()):
            tensors[f"blk.{layer}.{name}.weight"] = random(*shape, seed=100 * layer + seed), kind
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = random(HIDDEN), Type.F32
    return tensors


HUB_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.1.attn_norm": "model.layers.1.input_layernorm",
    "blk.1.attn_q": "model.layers.1.self_attn.q_proj",
    "blk.1.attn_k": "model.layers.1.self_attn.k_proj",
    "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
    "blk.1.attn_output": "model.layers.1.self_attn.o_proj",
    "blk.1.attn_q_norm": "model.layers.1.self_attn.q_norm",
    "blk.1.attn_k_norm": "model.layers.1.self_attn.k_norm",
    "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
    "blk.1.ffn_gate": "model.layers.1.mlp.gate_proj",
    "blk.1.ffn_up": "model.layers.1.mlp.up_proj",
    "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
}


def as_array(view: memoryview, dtype: Any = np.float32) -> np.ndarray:
    return np.frombuffer(view, dtype)


@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q8_0, Type.Q4_0, Type.Q5_1], ids=lambda kind: kind.name)
def test_quantized_tensors_read_as_the_gguf_package_dequantizes_them(tmp_path: Path, kind: Any) -> None:
    path = write(tmp_path / "tiny.gguf", layer_tensors(kind))
    checkpoint = open_checkpoint(str(path))
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for ours, name in [("self_attn.q_proj", "attn_q"), ("mlp.down_proj", "ffn_down")]:
        tensor = theirs[f"blk.1.{name}.weight"]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        stored = checkpoint.tensors[f"model.layers.1.{ours}.weight"]
        assert (stored.dtype, stored.shape) == ("fp32", expected.shape)
        assert np.array_equal(as_array(checkpoint.read(f"model.layers.1.{ours}.weight")), expected.reshape(-1))


SCALED = {"blk.1.ffn_down": (HIDDEN, 128), "blk.1.ffn_down_exps": (4, HIDDEN, 128), "blk.0.attn_q": (HIDDEN, HIDDEN)}


@pytest.mark.parametrize("kind", [Type.NVFP4, Type.Q4_1, Type.BF16], ids=lambda kind: kind.name)
def test_a_weight_is_multiplied_by_the_scale_next_to_it(tmp_path: Path, kind: Any) -> None:
    """One number, or one for each expert: ggml has NVFP4's second scale outside its blocks."""
    expected, draw = {}, np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "tiny")
    for name, shape in SCALED.items():
        columns, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = draw.integers(0, 64, (*shape[:-1], shape[-1] // columns * num_bytes), dtype=np.uint8)
        scale = draw.uniform(0.1, 4, shape[:-2] or 1).astype(np.float32)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
        writer.add_tensor(f"{name}.scale", scale)
        writer.add_tensor(f"{name}.input_scale", scale)
        expected[name] = gguf.quants.dequantize(blocks, kind) * scale.reshape(
            *scale.shape[: len(shape) - 2] or (1,), 1, 1
        )
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write_part()
    writer.close()

    checkpoint = open_checkpoint(str(tmp_path / "tiny.gguf"), gguf=GGUFFacts(interleaved={"q_proj": HEADS}))
    down, experts, rotated = ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.experts.down_proj.weight",
                              "model.layers.0.self_attn.q_proj.weight")  # fmt: skip
    assert set(checkpoint.tensors) == {down, experts, rotated}
    assert {(each.dtype, each.blocks) for each in checkpoint.tensors.values()} == {("fp32", None)}
    assert "quantization_config" not in checkpoint.config
    assert np.array_equal(as_array(checkpoint.read(down)), expected["blk.1.ffn_down"].reshape(-1))
    pairs = expected["blk.0.attn_q"].reshape(HEADS, -1, 2, HIDDEN).swapaxes(1, 2)
    assert np.array_equal(as_array(checkpoint.read(rotated)), pairs.reshape(-1))
    for count in (1, 2, 4, 8):
        parts = [as_array(checkpoint.read_part(experts, index, count)) for index in range(count)]
        assert np.array_equal(np.concatenate(parts), expected["blk.1.ffn_down_exps"].reshape(-1))


def test_a_scale_of_another_shape_or_type_is_refused(tmp_path: Path) -> None:
    for number, (scale, kind, shown) in enumerate(
        [(random(2), Type.F32, r"F32\[2\], not F32\[1\]"), (random(1), Type.F16, r"F16\[1\], not F32\[1\]")]
    ):
        path = write(tmp_path / f"{number}.gguf", {**layer_tensors(), "blk.0.ffn_up.scale": (scale, kind)})
        with pytest.raises(UnsupportedError, match=rf"tensor blk\.0\.ffn_up\.scale is {shown}$"):
            open_checkpoint(str(path))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0], ids=lambda kind: kind.name)
def test_blocks_kept_packed_hold_what_the_gguf_package_dequantizes(tmp_path: Path, kind: Any) -> None:
    tensors = layer_tensors(kind)
    rotated, fmt = "blk.1.attn_q.weight", kind.name.lower()
    stored = {**tensors, rotated: (permute(tensors[rotated][0], HEADS), kind)}
    checkpoint = open_checkpoint(
        str(write(tmp_path / "tiny.gguf", stored)), gguf=GGUFFacts(interleaved={"q_proj": HEADS})
    )
    for name, theirs in [("self_attn.q_proj", "attn_q"), ("mlp.down_proj", "ffn_down")]:
        blocks = gguf.quants.quantize(tensors[f"blk.1.{theirs}.weight"][0], kind)
        expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
        whole = W(f"model.layers.1.{name}.weight", GraphType("fp32", tuple(expected.shape), fmt))
        made = load([whole, Dequantize(whole), narrow(whole, 16, 48)], checkpoint, SILENT)
        assert made[whole].kind == ("int8" if kind == Type.Q8_0 else "int4")
        assert torch.equal(made[whole].unpack(), expected) and torch.equal(made[Dequantize(whole)], expected)
        assert torch.equal(made[narrow(whole, 16, 48)].unpack(), expected[16:48])


def test_formats_are_of_modules_by_a_pattern_where_all_layers_have_one_type(tmp_path: Path) -> None:
    tensors = layer_tensors(Type.Q4_1)
    mixed = {**tensors, "blk.0.ffn_down.weight": (tensors["blk.0.ffn_down.weight"][0], Type.F16)}
    config = open_checkpoint(str(write(tmp_path / "tiny.gguf", mixed))).config
    formats = config["quantization_config"]["formats"]
    assert (
        formats["model.layers.1.mlp.down_proj"] == "q4_1"
        and formats["re:model\\.layers\\.[0-9]+\\.mlp\\.up_proj$"] == "q4_1"
    )
    assert formats["model.embed_tokens"] == "q4_1"
    assert len(formats) == 8
    plain = open_checkpoint(str(write(tmp_path / "plain.gguf", layer_tensors(Type.F32)))).config
    assert "quantization_config" not in plain


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.MXFP4], ids=lambda kind: kind.name)
def test_blocks_of_experts_are_read_as_one_tensor_or_each_by_itself(tmp_path: Path, kind: Any) -> None:
    numbers = random(3, WIDTH, HIDDEN)
    tensors = {**layer_tensors(), "blk.1.ffn_up_exps.weight": (numbers, kind)}
    path, fmt = write(tmp_path / "tiny.gguf", tensors), GGUF_FORMATS[kind.name]
    expected = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(numbers, kind), kind))
    name, parts = (
        "model.layers.1.mlp.experts.up_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    )

    whole = W(name, GraphType("fp32", (3, WIDTH, HIDDEN), fmt))
    ranges = {whole: ..., narrow(whole, 1, 3): slice(1, 3), narrow(whole, 16, 48, 1): (slice(None), slice(16, 48)),
              narrow(whole, 32, 64, 2): (..., slice(32, 64))}  # fmt: skip
    made = load([*ranges, Dequantize(whole)], open_checkpoint(str(path)), SILENT)
    assert torch.equal(made[Dequantize(whole)], expected)
    for recipe, index in ranges.items():
        assert torch.equal(made[recipe].unpack(), expected[index])

    checkpoint = open_checkpoint(str(path), stacked={"model.layers.{layer}.mlp.experts.up_proj.weight": [parts]})
    expert = W("model.layers.1.mlp.experts.{expert}.up_proj.weight", GraphType("fp32", (WIDTH, HIDDEN), fmt))
    made = load([Stack(expert, 0, 3)], checkpoint, SILENT)
    assert torch.equal(made[Stack(expert, 0, 3)].unpack(), expected)


def test_formats_of_experts_are_those_of_each_by_its_own_name_too(tmp_path: Path) -> None:
    kinds = {("gate", 0): Type.Q4_0, ("gate", 1): Type.Q4_0, ("down", 0): Type.Q4_1, ("down", 1): Type.F16}
    tensors = {
        f"blk.{layer}.ffn_{name}_exps.weight": (random(3, 32, HIDDEN), kind) for (name, layer), kind in kinds.items()
    }
    config = open_checkpoint(str(write(tmp_path / "tiny.gguf", {**layer_tensors(), **tensors}))).config
    formats = config["quantization_config"]["formats"]
    assert len(formats) == 2
    for module, fmt in [
        ("model.layers.1.mlp.experts.gate_proj", "q4_0"),
        ("model.layers.1.mlp.experts.2.gate_proj", "q4_0"),
        ("model.layers.0.mlp.experts.0.down_proj", "q4_1"),
        ("model.layers.1.mlp.experts.0.down_proj", None),
        ("model.layers.1.mlp.down_proj", None),
        ("model.layers.1.mlp.shared_experts.gate_proj", None),
    ]:
        assert format_of(module, None, (), formats) == fmt


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Type.F32, "fp32"), (Type.F16, "fp16"), (Type.BF16, "bf16")], ids=lambda value: str(value)
)
def test_plain_types_are_read_in_place(tmp_path: Path, kind: Any, dtype: str) -> None:
    path = write(tmp_path / "tiny.gguf", layer_tensors(kind))
    checkpoint = open_checkpoint(str(path))
    view = checkpoint.read("model.embed_tokens.weight")
    assert checkpoint.tensors["model.embed_tokens.weight"].dtype == dtype and view.readonly
    assert bytes(view) == gguf.quants.quantize(layer_tensors()["token_embd.weight"][0], kind).tobytes()


def has_reference(kind: Any) -> bool:
    """Whether the gguf package itself dequantizes these blocks."""
    with np.errstate(all="ignore"), contextlib.suppress(NotImplementedError):
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        return True
    return False


def test_the_types_and_their_sizes_are_those_of_the_gguf_package():
    assert gguf_types.SIZES == gguf.GGML_QUANT_SIZES
    assert {each.name: each.value for each in gguf_types.Type} == {
        each.name: each.value for each in gguf.GGMLQuantizationType
    }


KNOWN = [kind for kind in gguf.GGML_QUANT_SIZES if kind not in PLAIN and has_reference(kind)]


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.name)
def test_every_block_format_equals_the_gguf_package_bit_by_bit(kind: Any) -> None:
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(0).integers(0, 256, (33, size), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, kind).reshape(-1)
        ours = dequantize(GGUFTensor(gguf_types.Type(kind), (), memoryview(blocks.tobytes())))
    assert np.array_equal(ours, expected, equal_nan=True)


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp's convert_hf_to_gguf.py stores rotary rows in pairs."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.BF16, Type.F32], ids=lambda kind: kind.name)
def test_interleaved_rows_come_back_in_the_order_of_the_hub(tmp_path: Path, kind: Any) -> None:
    tensors = layer_tensors(kind)
    bias = random(HIDDEN, seed=9)
    stored = {
        **tensors,
        "blk.0.attn_q.weight": (permute(tensors["blk.0.attn_q.weight"][0], HEADS), kind),
        "blk.0.attn_k.weight": (permute(tensors["blk.0.attn_k.weight"][0], KV_HEADS), kind),
        "blk.0.attn_q.bias": (permute(bias, HEADS), Type.F32),
    }
    path = write(tmp_path / "tiny.gguf", stored)
    straight = open_checkpoint(str(write(tmp_path / "straight.gguf", tensors)))
    checkpoint = open_checkpoint(str(path), gguf=GGUFFacts(interleaved={"q_proj": HEADS, "k_proj": KV_HEADS}))
    for name in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{name}.weight"
        assert bytes(checkpoint.read(name)) == bytes(straight.read(name))
    assert np.array_equal(as_array(checkpoint.read("model.layers.0.self_attn.q_proj.bias")), bias)


@pytest.mark.parametrize("name", [["llama", "qwen2"], 7, [1, 2]], ids=str)
def test_an_architecture_that_is_no_name_is_refused(tmp_path: Path, name: Any) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "tiny")
    del writer.kv_data[0]["general.architecture"]
    add(writer, "general.architecture", name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"general\.architecture is .* not a name"):
        open_checkpoint(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("size", [["a", "b"], "two", [1.5]], ids=str)
def test_a_size_that_is_no_number_is_refused(tmp_path: Path, size: Any) -> None:
    path = write(tmp_path / "tiny.gguf", {}, sizes={"block_count": size})
    with pytest.raises(CheckpointError, match=r"block_count is .* not a whole number"):
        open_checkpoint(str(path))


def test_rows_that_do_not_divide_into_pairs_of_heads_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", layer_tensors())
    with pytest.raises(CheckpointError, match=r"the 64 rows of \S+q_proj\.weight are no pairs in 7 heads"):
        open_checkpoint(str(path), gguf=GGUFFacts(interleaved={"q_proj": 7}))


def test_tensors_come_under_their_usual_names_and_strangers_keep_theirs(tmp_path: Path) -> None:
    names = [*HUB_NAMES, "blk.0.ssm_lora", "cls"]
    path = write(tmp_path / "tiny.gguf", {f"{name}.weight": (random(32), Type.F32) for name in names})
    expected = {f"{HUB_NAMES.get(name, name)}.weight" for name in names}
    assert open_checkpoint(str(path)).tensors.keys() == expected


def test_usual_names_are_among_those_that_the_gguf_package_maps_there() -> None:
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    assert {known.get_name(ours): ours for ours in HUB_NAMES.values()} == HUB_NAMES


def test_the_config_has_the_values_of_the_metadata(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}
    sizes = {**SIZES, "attention.key_length": 32, "attention.sliding_window": 16}
    checkpoint = open_checkpoint(str(write(tmp_path / "tiny.gguf", layer_tensors(), sizes=sizes, metadata=tokens)))
    assert checkpoint.config == {
        "gguf_architecture": "tiny",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "model_max_length": 128,
        "sliding_window": 16,
        "vocab_size": 40,
        "rms_norm_eps": 1e-5,
        "norm_eps": 1e-5,
        "layer_norm_epsilon": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert checkpoint.generation_config == {"eos_token_id": [2, 7]}


def test_sampling_values_of_the_metadata_are_those_of_a_generation_config(tmp_path: Path) -> None:
    names, keys = gguf.Keys.General, gguf.Keys.Tokenizer
    tokens = {
        names.SAMPLING_TEMP: 0.75,
        names.SAMPLING_TOP_K: 40,
        names.SAMPLING_TOP_P: 0.5,
        names.SAMPLING_MIN_P: 0.25,
    }
    metadata = {keys.EOS_ID: 2, **tokens, names.SAMPLING_PENALTY_REPEAT: 1.5, names.SAMPLING_MIROSTAT: 0}
    checkpoint = open_checkpoint(str(write(tmp_path / "tiny.gguf", layer_tensors(), metadata=metadata)))
    assert checkpoint.generation_config == {
        "eos_token_id": [2],
        "temperature": 0.75,
        "top_k": 40,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
    }


def test_ties_and_biases_are_seen_in_the_tensors(tmp_path: Path) -> None:
    names = ["output.weight", "blk.0.attn_output.bias", "blk.0.ffn_down.bias"]
    path = write(tmp_path / "tiny.gguf", {**layer_tensors(), **{name: (random(32), Type.F32) for name in names}})
    config = open_checkpoint(str(path)).config
    assert (config["tie_word_embeddings"], config["attention_bias"], config["mlp_bias"]) == (False, True, True)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.dimension_count": 4}, {"rope_type": "default", "partial_rotary_factor": 0.25}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
            | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.attn_factor": 1.0, "rope.scaling.finetuned": True},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_takes_the_form_of_the_hub(tmp_path: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    path = write(tmp_path / "tiny.gguf", layer_tensors(), sizes={**SIZES, **keys})
    assert open_checkpoint(str(path)).config["rope_parameters"] == {"rope_theta": 10000.0, **expected}


def test_a_table_of_rope_factors_is_config_and_no_tensor(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1.5, 8], np.float32)
    checkpoint = open_checkpoint(str(write(tmp_path / "tiny.gguf", {"rope_freqs.weight": (factors, Type.F32)})))
    rope = checkpoint.config["rope_parameters"]
    assert rope == {"rope_type": "factors", "rope_theta": 10000.0, "factors": [1.0, 1.0, 1.5, 8.0]}
    assert dict(checkpoint.tensors) == {}


def test_a_table_that_stops_frequencies_is_a_part_of_a_head(tmp_path: Path) -> None:
    factors = np.array([1, 1, 1, 1e30, 1e30, 1e30, 1e30, 1e30], np.float32)
    checkpoint = open_checkpoint(str(write(tmp_path / "tiny.gguf", {"rope_freqs.weight": (factors, Type.F32)})))
    rope = checkpoint.config["rope_parameters"]
    assert rope == {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.375}


BY_LAYER = {
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.sliding_window_pattern": [True, False],
    "attention.head_count_kv": [2, 1],
    "attention.shared_kv_layers": 1,
    "feed_forward_length": [96, 192],
}


def test_sizes_by_layer_are_those_of_windows_and_of_shared_kv(tmp_path: Path) -> None:
    config = open_checkpoint(str(write(tmp_path / "tiny.gguf", layer_tensors(), sizes={**SIZES, **BY_LAYER}))).config
    expected = {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "intermediate_size": 96,
        "use_double_wide_mlp": True,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    assert config | expected == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not supported"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_log_multiplier": 0.1},
            "rope.scaling.type 'yarn' with yarn_log_multiplier is not supported",
        ),
        ({"attention.head_count": [4, 2]}, "attention.head_count differs from layer to layer"),
        ({"attention.head_count_kv": [2, 1]}, "attention.head_count_kv differs from layer to layer"),
        (
            {"feed_forward_length": [96, 288], "attention.shared_kv_layers": 1},
            "feed_forward_length differs from layer to layer",
        ),
    ],
)
def test_metadata_that_the_config_has_no_field_for_is_refused(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "tiny.gguf", layer_tensors(), sizes={**SIZES, **keys})
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(str(path))


def test_one_number_a_layer_is_one_number_where_they_agree(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", layer_tensors(), sizes={**SIZES, "attention.head_count_kv": [2, 2]})
    assert open_checkpoint(str(path)).config["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("sizes", "metadata", "message"),
    [
        ({"block_count": "two"}, {}, "block_count is 'two', not a whole number"),
        ({"block_count": 2.5}, {}, "block_count is 2.5, not a whole number"),
        ({"rope.freq_base": "big"}, {}, "rope.freq_base is 'big', not a number"),
        ({}, {"tokenizer.ggml.eos_token_id": "end"}, "eos_token_id is 'end', not a whole number"),
        ({}, {"general.sampling.temp": "hot"}, "general.sampling.temp is 'hot', not a number"),
        ({}, {"general.alignment": "wide"}, "general.alignment is 'wide'"),
    ],
)
def test_metadata_of_the_wrong_type_is_refused(
    tmp_path: Path, sizes: dict[str, Any], metadata: dict[str, Any], message: str
) -> None:
    path = tmp_path / "tiny.gguf"
    sizes = {f"tiny.{key}": value for key, value in sizes.items()}
    path.write_bytes(header(metadata={"general.architecture": "tiny", **sizes, **metadata}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(path))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_values: int | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: list[tuple[str, list[int], int, int]] | None = None,
) -> bytes:
    """A header written by hand, so that it can be wrong."""
    metadata = {"general.architecture": "tiny"} if metadata is None else metadata
    tensors = tensors or []
    out = magic + struct.pack("<I", version)
    out += struct.pack("<Q", len(tensors) if num_tensors is None else num_tensors)
    out += struct.pack("<Q", len(metadata) if num_values is None else num_values)
    for key, value in metadata.items():
        out += text(key)
        if isinstance(value, bytes):
            out += value
        elif isinstance(value, str):
            out += struct.pack("<I", 8) + text(value)
        else:
            out += struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
    for name, dims, kind, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return out + bytes(-len(out) % 32)


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"GG", "is cut short or damaged"),
        (header(magic=b"GGML"), "is no GGUF file"),
        (header(num_values=HUGE), "is cut short or damaged"),
        (header(num_tensors=HUGE), "is cut short or damaged"),
        (header(metadata={"k": struct.pack("<IQ", 8, HUGE)}), "is cut short or damaged: a string ends at byte"),
        (header(metadata={"k": struct.pack("<IIQ", 9, 8, HUGE)}), "is cut short or damaged"),
        (header(metadata={"k": struct.pack("<IIQ", 9, 4, HUGE)}), "is cut short or damaged: a value ends at byte"),
        (header(metadata={"k": struct.pack("<IIQ", 9, 9, 1)}), "a value of the unknown type 9"),
        (header(metadata={"k": struct.pack("<I", 77)}), "a value of the unknown type 77"),
        (header(metadata={"k": struct.pack("<IQ", 8, 1) + b"\xff"}), "is cut short or damaged: 'utf-8' codec"),
        (header(tensors=[("w", [4], 0, 0)]), "is cut short: w ends at byte"),
        (header(tensors=[("w", [4], 0, HUGE)]), "is cut short: w ends at byte"),
        (header(tensors=[("w", [HUGE, HUGE], 0, 0)]), "is cut short: w ends at byte"),
        (header(tensors=[("w", [1 << 32] * 4, 0, 0)]), "is cut short: w ends at byte"),
        (header(tensors=[("w", [1] * 5, 0, 0)]), "tensor w has 5 dimensions"),
        (header(tensors=[("w", [0], 0, 0)]), "tensor w is there twice or has impossible dimensions"),
        (header(tensors=[("w", [], 0, 0)]), "tensor w is there twice or has impossible dimensions"),
        (header(tensors=[("w", [20], 8, 0)]), "tensor w is there twice or has impossible dimensions"),
        (header(tensors=[("w", [1], 0, 0)] * 2) + bytes(64), "tensor w is there twice"),
        (
            header(tensors=[("output.weight", [1], 0, 0), ("lm_head.weight", [1], 0, 0)]) + bytes(64),
            "two tensors of one name on the hub",
        ),
    ],
)
def test_a_damaged_or_malicious_file_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(str(path))
    assert "bad.gguf" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(version=1), "is GGUF version 1"),
        (header(version=0x03000000), "or big-endian"),
        (header(tensors=[("w", [32], 99, 0)]), "tensor w has the unknown type 99"),
        (header(tensors=[("w", [32], int(Type.Q8_1), 0)]) + bytes(64), "tensor w has the type Q8_1, which is not read"),
    ],
)
def test_a_file_that_is_not_read_here_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(str(path))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", layer_tensors(Type.Q8_0), metadata={"tokenizer.ggml.tokens": ["a", "b"]})
    whole = path.read_bytes()
    for length in range(0, len(whole) - 64, 997):  # the last tensor is padded
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(str(path))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # a damaged scale is infinite
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 1500), byte=st.integers(0, 255))
def test_a_flipped_header_byte_never_ends_in_another_error(tmp_path: Path, position: int, byte: int) -> None:
    path = tmp_path / "tiny.gguf"
    if not path.exists():
        write(path, layer_tensors(Type.Q8_0), metadata={"tokenizer.ggml.tokens": ["a", "b"]})
    damaged = bytearray(path.read_bytes())
    damaged[position] = byte
    flipped = tmp_path / "flipped.gguf"
    flipped.write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(str(flipped), gguf=GGUFFacts(interleaved={"q_proj": HEADS}))
        for name in checkpoint.tensors:
            checkpoint.read(name)
        checkpoint.tokenizer()
    except (CheckpointError, UnsupportedError) as error:
        assert "flipped.gguf" in str(error)


def test_closing_keeps_bytes_that_were_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write(tmp_path / "tiny.gguf", layer_tensors())))
    view = checkpoint.read("model.norm.weight")
    checkpoint.close()
    assert np.array_equal(as_array(view), layer_tensors()["output_norm.weight"][0])
    with pytest.raises(CheckpointError, match=r"has no tensor model\.norm\.weight"):
        checkpoint.read("model.norm.weight")


def test_two_threads_read_what_one_reads(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        str(write(tmp_path / "tiny.gguf", layer_tensors(Type.Q4_1))), gguf=GGUFFacts(interleaved={"q_proj": 4})
    )
    names = list(checkpoint.tensors) * 5
    with ThreadPoolExecutor(2) as pool:
        assert [bytes(view) for view in pool.map(checkpoint.read, names)] == [bytes(checkpoint.read(n)) for n in names]


@pytest.mark.slow
def test_the_embedded_checkpoint_reads_as_the_gguf_package_reads_it(embedded_gguf: Path) -> None:
    checkpoint = open_checkpoint(str(embedded_gguf), gguf=GGUFFacts(interleaved={"q_proj": 9, "k_proj": 3}))
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(embedded_gguf).tensors}
    assert len(checkpoint.tensors) == len(theirs) == 272
    for ours, name, heads in [
        ("model.embed_tokens.weight", "token_embd.weight", None),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", None),
        ("model.layers.3.self_attn.k_proj.weight", "blk.3.attn_k.weight", 3),
        ("model.norm.weight", "output_norm.weight", None),
    ]:
        expected = gguf.dequantize(theirs[name].data, theirs[name].tensor_type)
        found = as_array(checkpoint.read(ours)).reshape(expected.shape)
        assert np.array_equal(permute(found, heads) if heads else found, expected)


def test_the_config_shipped_for_the_embedded_checkpoint_agrees_with_its_metadata(embedded_gguf: Path) -> None:
    ours = open_checkpoint(str(embedded_gguf)).config
    shipped = json.loads((Path(__file__).parents[2] / "conf/model/smollm2.json").read_text())
    assert normalize_rope(shipped)["rope_parameters"] == ours.pop("rope_parameters")
    same = ours.keys() & shipped.keys()
    assert len(same) >= 12 and {key: ours[key] for key in same} == {key: shipped[key] for key in same}


NUM_LAYER_TENSORS = 9


def write_split(folder: Path, *, without: int | None = None) -> Path:
    """layer_tensors in three parts, as llama-gguf-split makes them; the second part's path."""
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "tiny", split_max_tensors=NUM_LAYER_TENSORS)
    for key, value in SIZES.items():
        add(writer, f"tiny.{key}", value)
    for name, (array, kind) in layer_tensors().items():
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(folder.glob("tiny-*.gguf"))
    if without is not None:
        parts[without].unlink()
    return parts[1]


def test_a_split_file_is_whole_whichever_part_is_named(tmp_path: Path) -> None:
    second = write_split(tmp_path)
    checkpoint = open_checkpoint(str(second))
    whole = open_checkpoint(str(write(tmp_path / "whole.gguf", layer_tensors())))
    assert checkpoint.config == whole.config and checkpoint.tensors == whole.tensors
    assert all(checkpoint.read(name) == whole.read(name) for name in whole.tensors)
    assert [path.name for path in checkpoint.files()] == [f"tiny-0000{part}-of-00003.gguf" for part in (1, 2, 3)]


@pytest.mark.parametrize("part", [0, 2])
def test_a_missing_part_is_named(tmp_path: Path, part: int) -> None:
    second = write_split(tmp_path, without=part)
    with pytest.raises(CheckpointError, match=rf"is one of 3 parts, and tiny-0000{part + 1}-of-00003\.gguf is not"):
        open_checkpoint(str(second))


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    moved = write_split(tmp_path).rename(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="is one of 3 parts; give it back its name"):
        open_checkpoint(str(moved))
