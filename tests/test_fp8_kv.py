"""fp8 KV, against transformers whose cache rounds keys and values through float8_e4m3fn, in float32.

Of latent attention it rounds the latents, which are what its projection kv_b reads.

The rounding is plain torch's: divide by the layer's scale, clamp to 448, convert, multiply. Where a number lies between
two of fp8, sums in another order may round it to the other, a sixteenth off: so logits are those of the reference for
most prompts, and near them for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tiny
import torch
from law import RELATIVE_ERROR, relative_error
from probe import assert_logits, logits_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer
from transformers.models.qwen4_exp import modeling_qwen4_exp

from atom import LLMEngine, SamplingParams
from atom.assemble import state_kinds
from atom.compiler import compile_graph
from atom.config.load import load
from atom.errors import AtomError, CheckpointError

NEAR = 0.02
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
MODELS = [
    "llama",
    "qwen3",
    "qwen3_window",
    "mistral_window",
    "gemma2",
    "gpt_oss",
    "olmo3",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "axk2",
    "hy_v4",
    "dots3_note",
    "minimax_m3",
]
ON_A_CPU = ["deepseek_v4", "qwen4_exp", "kimi_linear"]  # of the first two a GPU has no kernel
Scales = Callable[[int], tuple[float, float]]  # of a layer: of its keys and values


def round_fp8(x: Tensor, scale: float | Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


class RoundingCache(DynamicCache):
    def __init__(self, scales: Scales) -> None:
        super().__init__()
        self.scales = scales

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        rounded = map(round_fp8, (key_states, value_states), self.scales(layer_idx))
        return super().update(*rounded, layer_idx, *args, **kwargs)


def round_index(keys: Tensor) -> Tensor:
    """Index keys [..., D], each by a scale of its own."""
    return round_fp8(keys, keys.abs().amax(-1, keepdim=True) / 448)


def rounding_cache(model: Any, scales: Scales, has_latents: bool) -> DynamicCache:
    """A cache whose layers round what they keep: index keys, and keys and values unless those are of latents."""
    cache = DynamicCache(config=model.config)
    pools = pools_of(text_of(model).config)  # which keep keys as they are, and round those of runs

    def keys_and_values(layer: int, keys: Tensor, values: Tensor, *more: Any) -> Any:
        return *map(round_fp8, (keys, values), scales(layer)), *more

    def runs(_layer: int, name: str, entries: Tensor) -> Any:
        return name, round_index(entries) if name == "indexer" else entries

    rounding: dict[str, Callable[..., Any]] = {
        **({} if has_latents else {"update": keys_and_values}),
        **({} if pools else {"update_indexer": lambda _layer, keys: (round_index(keys),)}),
        "update_index": lambda _layer, keys: (round_index(keys),),
        "update_compressor_states": runs,
    }
    for number, layer in enumerate(cache.layers):
        for method, rounded in rounding.items():
            if hasattr(layer, method):
                setattr(layer, method, rounding_args(getattr(layer, method), partial(rounded, number)))
    return cache


def rounding_args(method: Callable[..., Any], rounded: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: method(*rounded(*args), **kwargs)


def text_of(model: Any) -> Any:
    return getattr(model.model, "language_model", model.model)


def pools_of(config: Any) -> bool:
    """Whether a run's index keys are pooled at each query, which a cache has as they are."""
    return hasattr(config, "indexer_compress_ratio") or hasattr(config, "index_kpool")


@contextmanager
def rounding_runs() -> Iterator[None]:
    """The keys of runs that Qwen3.8-Flash-Next [runs, 1, D] and GLM-5.3-Flash make of their caches at each query."""
    turn, pool = modeling_qwen4_exp.apply_rotary_pos_emb, Glm5NextTextIndexer.get_pooled_states

    def turn_and_round(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = turn(x, *args, **kwargs)
        return round_index(made) if isinstance(made, Tensor) and x.dim() == 3 else made

    def pool_and_round(*args: Any, **kwargs: Any) -> Any:
        keys, *more = pool(*args, **kwargs)
        return round_index(keys), *more

    with (
        patch.object(modeling_qwen4_exp, "apply_rotary_pos_emb", turn_and_round),
        patch.object(Glm5NextTextIndexer, "get_pooled_states", pool_and_round),
    ):
        yield


def ones(_layer: int) -> tuple[float, float]:
    return 1.0, 1.0


@torch.inference_mode()
def rounded_logits(model: Any, tokens: list[int], scales: Scales = ones) -> Tensor:
    """[T, V]"""
    attentions = [getattr(layer, "self_attn", None) for layer in text_of(model).layers]
    hooks = [
        attention.kv_b_proj.register_forward_pre_hook(
            lambda _module, args, layer=layer: (round_fp8(args[0], scales(layer)[0]),)
        )
        for layer, attention in enumerate(attentions)
        if hasattr(attention, "kv_b_proj")
    ]
    with rounding_runs():
        cache = rounding_cache(model, scales, has_latents=bool(hooks))
        logits: Tensor = model(torch.tensor([tokens]), past_key_values=cache).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits


def assert_same(engine: LLMEngine, model: Any, scales: Scales = ones) -> None:
    """Of five prompts at least three obey the law of numbers, and all are near."""
    num_same = 0
    for seed in range(5):
        tokens = tiny.prompt(60, seed=seed)
        ours, wanted = logits_of(engine, tokens), rounded_logits(model, tokens, scales)
        assert relative_error(ours, wanted) <= NEAR
        error, allowed = (ours - wanted).abs().amax(-1), RELATIVE_ERROR * wanted.abs().amax(-1)
        num_same += bool((error <= allowed).all())
    assert num_same >= 3


def assert_greedy(answers: list[dict[str, Any]], prompts: list[list[int]], model: Any) -> None:
    """Each token is the reference's best, on these very tokens; the first that is not must be near it."""
    for answer, prompt in zip(answers, prompts, strict=True):
        tokens = answer["token_ids"]
        for token, logits in zip(tokens, rounded_logits(model, prompt + tokens)[len(prompt) - 1 : -1], strict=True):
            if token != logits.argmax():
                assert logits.max() - logits[token] <= NEAR * logits.abs().max()
                break


Open = Callable[..., LLMEngine]


@pytest.fixture
def open_engine() -> Iterator[Open]:
    opened: list[LLMEngine] = []

    def open(folder: Path, **fields: Any) -> LLMEngine:
        pool = {} if "num_kvcache_blocks" in fields else {"kv_cache_memory": 1 << 22}
        defaults = {"dtype": "fp32", "level": 1, "kv_cache_dtype": "fp8", **pool}
        opened.append(LLMEngine(model=str(folder), **{**defaults, **fields}))
        return opened[-1]

    yield open
    for engine in opened:
        engine.close()


@pytest.mark.sampled(18)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("name", [*MODELS, *ON_A_CPU])
def test_logits_are_those_of_a_cache_that_rounds(
    name: str, level: int, open_engine: Open, checkpoints: Any, references: Any
):
    tokens, model = tiny.prompt(60), references(name)
    engine = open_engine(checkpoints(name), level=level, max_num_batched_tokens=32)
    assert_same(engine, model)
    assert engine.metrics.scheduler.num_chunks > 0
    assert relative_error(rounded_logits(model, tokens), tiny.logits(model, tokens)) > 1e-3, "rounding is seen"


@pytest.mark.sampled(6)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("name", ["llama", "qwen3_window", "deepseek_v3"])
def test_prefix_hits_chunks_and_preemptions_change_nothing(
    name: str, level: int, open_engine: Open, checkpoints: Any, references: Any
):
    engine = open_engine(checkpoints(name), level=level, num_kvcache_blocks=30, block_size=4, max_model_len=106,
                         max_num_batched_tokens=16, enable_prefix_caching=True)  # fmt: skip
    shared = tiny.prompt(40)
    prompts = [shared, tiny.prompt(35, seed=1), shared[:17] + tiny.prompt(34, seed=2)]
    for batch in (prompts, prompts[::-1]):
        assert_greedy(engine.generate(batch, GREEDY), batch, references(name))
    metrics = engine.metrics.scheduler
    assert metrics.num_chunks > 0 and metrics.num_prefix_hit_tokens > 0
    assert metrics.num_preemptions > 0


def test_in_bf16_it_is_as_near_as_transformers_bf16_whose_cache_rounds(
    open_engine: Open, checkpoints: Any, references: Any
):
    half, tokens = tiny.reference(checkpoints("qwen3"), torch.bfloat16), tiny.prompt(60)
    exact = tiny.logits(references("qwen3"), tokens)
    ours = logits_of(open_engine(checkpoints("qwen3"), dtype="bf16"), tokens)
    with torch.inference_mode():
        rounded = half(torch.tensor([tokens]), past_key_values=RoundingCacheBf16(ones)).logits[0].float()
    assert relative_error(ours, exact) <= 1.25 * relative_error(rounded, exact)


class RoundingCacheBf16(RoundingCache):
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys.bfloat16(), values.bfloat16()


def scales_of_layer(layer: int) -> tuple[float, float]:
    return 0.031 * (layer + 1), 0.017 * (layer + 2)


NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "quark": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "one for both": ("self_attn.kv_scale", "self_attn.kv_scale"),
}


def with_scales(plain: Path, folder: Path, names: tuple[str, str], shape: list[int], dtype: torch.dtype) -> Path:
    """The checkpoint with scales of keys and values next to weights in fp8, which state themselves."""
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        for name, scale in zip(names, scales_of_layer(layer), strict=True):
            tensors[f"model.layers.{layer}.{name}"] = torch.full(shape, scale, dtype=dtype)
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stored[name] = tensors[name].to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = torch.ones(1)
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    return folder


def unpacked(plain: Path) -> Any:
    """transformers' model of such weights."""
    model = tiny.reference(plain)
    for name, tensor in model.named_parameters():
        if name.endswith("_proj.weight"):
            tensor.data = tensor.data.to(torch.float8_e4m3fn).float()
    return model


def save_with_scales(plain: Path, folder: Path, *names: str) -> Path:
    """Save a checkpoint with scales of these names in each layer, as compressed-tensors does next to plain weights."""
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        for name, scale in zip(names, scales_of_layer(layer), strict=False):
            tensors[f"model.layers.{layer}.{name}"] = torch.tensor([scale])
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    quantized = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "format": "dense",
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    return folder


def test_weights_may_be_plain_next_to_the_scales_of_a_cache(
    tmp_path: Path, checkpoints: Any, references: Any, open_engine: Open
):
    folder = save_with_scales(checkpoints("llama"), tmp_path / "scales", *NAMES["compressed-tensors"])
    tokens = tiny.prompt(40)
    ours = logits_of(open_engine(folder), tokens)
    assert relative_error(ours, rounded_logits(references("llama"), tokens, scales_of_layer)) < NEAR
    assert relative_error(ours, rounded_logits(references("llama"), tokens)) > RELATIVE_ERROR


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("names", "shape", "dtype"),
    [
        (NAMES["compressed-tensors"], [1], torch.float32),
        (NAMES["compressed-tensors"], [], torch.bfloat16),
        (NAMES["modelopt"], [], torch.float32),
        (NAMES["quark"], [1], torch.float32),
        (NAMES["one for both"], [1], torch.float32),
    ],
)
def test_scales_are_the_checkpoints(
    names: tuple[str, str], shape: list[int], dtype: torch.dtype, tmp_path: Path, checkpoints: Any, open_engine: Open,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    folder = with_scales(checkpoints("llama"), tmp_path / "packed", names, shape, dtype)

    def scales(layer: int) -> tuple[float, float]:
        keys, values = (float(torch.tensor(scale, dtype=dtype)) for scale in scales_of_layer(layer))
        return (values, values) if names[0] == names[1] else (keys, values)

    tokens, model = tiny.prompt(40), unpacked(checkpoints("llama"))
    for level in (0, 1):
        assert_same(open_engine(folder, level=level), model, scales)
    assert "kv scales" not in capsys.readouterr().err
    plain = open_engine(folder, kv_cache_dtype="auto")
    assert_logits(plain, tokens, model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scales: scales.pop("model.layers.1.self_attn.k_scale"), r"the checkpoint has no tensor model\.layers\.1\.self_attn\.k_scale"),
        (lambda scales: [scales.pop(name) for name in list(scales) if name.endswith("v_scale")], r"the checkpoint has no tensor model\.layers\.0\.self_attn\.v_scale \(and 2 more\)"),
        (lambda scales: scales.update({"model.layers.1.self_attn.k_scale": torch.ones(2)}), r"tensor model\.layers\.1\.self_attn\.k_scale is \[2\], the model expects \[1\]"),
        (lambda scales: scales.update({"model.layers.1.self_attn.k_scale": torch.ones(1).int()}), r"tensor model\.layers\.1\.self_attn\.k_scale is i32, the model expects fp32"),
    ],
)  # fmt: skip
def test_a_scale_that_is_missing_or_of_another_shape_or_dtype_is_one_line(
    change: Callable[[dict[str, Tensor]], Any], message: str, tmp_path: Path, checkpoints: Any, open_engine: Open
):
    names = NAMES["compressed-tensors"]
    folder = with_scales(checkpoints("llama"), tmp_path / "packed", names, [1], torch.float32)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"^{message}") as error:
        open_engine(folder)
    assert "\n" not in str(error.value)
    open_engine(folder, kv_cache_dtype="auto")  # which needs none


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_no_number_above_0_is_one_line(
    value: float, tmp_path: Path, checkpoints: Any, open_engine: Open
):
    names = NAMES["compressed-tensors"]
    folder = with_scales(checkpoints("llama"), tmp_path / "packed", names, [1], torch.float32)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.self_attn.v_scale"].fill_(value)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        open_engine(folder)
    assert str(error.value) == f"tensor model.layers.2.self_attn.v_scale is {value:g}; a scale is a number above 0"


def test_a_token_takes_a_byte_for_each_number(checkpoints: Any):
    overrides = [f"checkpoint={checkpoints('qwen3_window')}", "serve.kv_cache_dtype=fp8"]
    kinds = {kind.name: kind.bytes_per_token for kind in state_kinds(compile_graph(load(overrides)), 16)}
    assert kinds == {"full": 2 * 2 * 24, "window_7": 2 * 24}, "layers x (k and v) x dim"


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_a_latent_takes_a_byte_for_each_number_and_its_rotated_key_stays(checkpoints: Any, dtype: str, size: int):
    overrides = [f"checkpoint={checkpoints('deepseek_v3')}", "quant.kv=fp8", f"dtype={dtype}"]
    (kind,) = state_kinds(compile_graph(load(overrides)), 16)
    assert kind.bytes_per_token == 3 * (18 + -18 % size + 8 * size), (
        "layers x (latent, up to where a key begins, and key)"
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.kv_scale"])
def test_the_scale_of_latents_is_the_checkpoints(
    name: str, tmp_path: Path, checkpoints: Any, references: Any, open_engine: Open, capsys: pytest.CaptureFixture[str]
):
    folder = save_with_scales(checkpoints("deepseek_v3"), tmp_path / "scales", name)
    assert_same(open_engine(folder), references("deepseek_v3"), scales_of_layer)
    assert "kv scales" not in capsys.readouterr().err


@pytest.mark.parametrize("typed", ["fp8_e5m2", "fp8_e4m4", "int8"])
def test_other_dtypes_are_refused_in_one_line(typed: str):
    with pytest.raises(AtomError, match=rf"serve\.kv_cache_dtype={typed}.*fp8") as error:
        load([f"serve.kv_cache_dtype={typed}"])
    assert "\n" not in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu_logits_are_those_of_a_cache_that_rounds(
    name: str, level: int, open_engine: Open, checkpoints: Any, references: Any
):
    """Kernels add up in an order of their own, so that a number here and there falls to its other neighbour."""
    tokens = tiny.prompt(60)
    engine = open_engine(checkpoints(name), level=level, device="cuda", gpu_memory_utilization=0.2)
    wanted = rounded_logits(references(name), tokens)
    assert relative_error(logits_of(engine, tokens), wanted) <= NEAR
