"""`quant.act`: activations in 8 bits, against transformers whose linears round what they take, in float32.

The rounding is plain torch's. A number between two of 8 bits may fall to the other where sums are in another order, so
logits are near those of the reference, and much nearer than to those of plain activations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from law import assert_same_logits, relative_error
from probe import logits_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from atom import LLMEngine
from atom.checkpoint.quantization import Quantization, read
from atom.compiler import compile_graph
from atom.config import Config
from atom.config.load import load
from atom.errors import AtomError, ConfigError, UnsupportedError
from atom.graph import Graph, ops
from atom.graph.graph import type_of
from atom.jobs.explain import job as explain
from atom.kernels import Target, find_target

TOKENS = tiny.prompt(60)
INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
HOPPER = Target("cuda", frozenset({"nvidia", "sm_90"}))
GLUON = Target("cuda", frozenset({"nvidia", "sm_90", "gluon"}))
VNNI = Target("cpu", frozenset({"int8_products"}))
needs_int8 = pytest.mark.skipif("int8_products" not in find_target("cpu").features, reason="no int8 dot products here")


def quantization_config(activations: dict[str, Any] | None) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group},
            "ignore": ["lm_head"]}  # fmt: skip


def write(folder: Path, activations: dict[str, Any] | None) -> tuple[Path, Any]:
    """A checkpoint of 8-bit integers, and transformers' model of the same weights unpacked."""
    plain = tiny.save("qwen3", folder / "plain")
    tensors, model = load_file(plain / "model.safetensors"), tiny.reference(plain)
    unpacked = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[f"{name}_scale"], tensors[name] = scale, (tensors[name] / scale).round().to(torch.int8)
        unpacked[name].data = tensors[name].float() * scale
    packed = folder / "packed"
    packed.mkdir()
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": quantization_config(activations)}))
    return packed, model


def round_inputs(model: Any) -> Iterator[Any]:
    def round_rows(_module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (x,) = inputs
        scale = x.abs().amax(-1, keepdim=True) / 127
        return ((x / scale).round() * scale,)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            yield module.register_forward_pre_hook(round_rows)


def logits(folder: Path, *overrides: str) -> Tensor:
    common = [f"checkpoint={folder}", "serve.kv_cache_memory=4194304", "dtype=fp32", "device=cpu", "level=1"]
    engine = LLMEngine.from_config(load([*common, *overrides]))
    try:
        return logits_of(engine, TOKENS)
    finally:
        engine.close()


@needs_int8
@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_many_rows_of_a_w8a8_checkpoint_are_rounded_as_it_says(level: int, tmp_path: Path):
    packed, model = write(tmp_path, INT8)
    plain = tiny.logits(model, TOKENS)
    hooks = list(round_inputs(model))
    rounded = tiny.logits(model, TOKENS)
    assert len(hooks) == 3 * 7
    ours = logits(packed, f"level={level}", f"cache={tmp_path / 'cache'}")
    assert relative_error(rounded, plain) > 5e-3, "rounding is seen"
    assert relative_error(ours, rounded) < relative_error(rounded, plain) / 3
    assert torch.equal(logits(packed, "quant.act=int8"), logits(packed))


@needs_int8
def test_activations_stay_as_they_are_where_nothing_asks_for_8_bits(tmp_path: Path):
    packed, model = write(tmp_path, INT8)
    plain = tiny.logits(model, TOKENS)
    assert_same_logits(logits(packed, "quant.act=none"), plain)
    assert_same_logits(logits(packed, "level=0"), plain)
    few = "serve.max_num_batched_tokens=32"  # rows of a step, which `cpp.linear` multiplies
    assert_same_logits(logits(packed, few), plain)


@needs_int8
def test_weights_packed_while_they_load_take_the_format_that_is_asked_for(tmp_path: Path):
    folder = tiny.save("qwen3", tmp_path / "plain")
    asked, plain = (logits(folder, "quant=int8", *more) for more in (["quant.act=int8"], []))
    assert 1e-3 < relative_error(asked, plain) < 0.1


@pytest.mark.parametrize(
    ("activations", "act"),
    [
        (INT8, "int8"),
        ({**INT8, "dynamic": False, "strategy": "tensor"}, "int8"),
        ({**INT8, "symmetric": False}, None),  # with zero points
        ({**INT8, "num_bits": 4}, None),
        ({**INT8, "type": "float"}, None),
        (None, None),
    ],
)
def test_compressed_tensors_says_whether_activations_are_integers(activations: dict[str, Any] | None, act: str | None):
    assert read({"quantization_config": quantization_config(activations)}).act == act


def test_all_groups_of_integers_must_say_so():
    config = quantization_config(INT8)
    config["config_groups"]["group_1"] = {**config["config_groups"]["group_0"], "input_activations": None, "targets": ["re:.*down"]}  # fmt: skip
    assert read({"quantization_config": config}).act is None


@pytest.mark.parametrize(
    ("inputs", "act"),
    [({"dtype": "int8", "qscheme": "per_tensor", "symmetric": True}, "int8"), ({"dtype": "int8", "symmetric": False}, None),
     ({"dtype": "fp8_e4m3"}, None), (None, None), ([{"dtype": "int8"}], None)],
)  # fmt: skip
def test_quark_says_whether_activations_are_integers(inputs: Any, act: str | None):
    weight = {"dtype": "int8", "qscheme": "per_channel"}
    config = {"quant_method": "quark", "global_quant_config": {"weight": weight, "input_tensors": inputs}}
    found: Quantization = read({"quantization_config": config})
    assert (found.fmt, found.act) == ("ct_int8[1, *]", act)


def acts(config: Config, target: Target) -> dict[str | None, int]:
    """How many linears of a lowered text have each format of activations."""
    graph: Graph = compile_graph(config, target=target)
    found: dict[str | None, int] = {}
    for node in (node for program in graph.programs.values() for node in program.nodes):
        is_product = node.target in (ops.linear, ops.gated_linear, ops.norm_linear, ops.add_norm_linear)
        if is_product and type_of(node.args[node.target.weight]).fmt is not None:
            found[node.kwargs.get("act")] = found.get(node.kwargs.get("act"), 0) + 1
    return found


WHOLE = "fp8[1, *]"


def write_wide(folder: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 512}
    (folder / "config.json").write_text(json.dumps({**tiny.config("qwen3").to_dict(), **sizes}))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("overrides", "target", "expected"),
    [
        (["quant=fp8"], HOPPER, {WHOLE: 8}),
        (["quant=fp8", "quant.head=fp8"], HOPPER, {WHOLE: 9}),
        (["quant=fp8_block"], HOPPER, {"fp8[1, 128]": 8}),
        (["quant=fp8", "quant.act=none"], HOPPER, {None: 8}),
        (["quant=fp8"], VNNI, {None: 8}),
        (["quant=int8"], HOPPER, {None: 8}),
        (["quant=int8", "quant.act=int8"], HOPPER, {"int8[1, *]": 8}),
        (["quant=int8", "quant.act=int8"], VNNI, {"int8[1, *]": 8}),
        (["quant=int4"], GLUON, {None: 8}),
        (["quant=int4", "quant.act=fp8"], GLUON, {WHOLE: 8}),
        (["quant=mxfp4", "quant.act=fp8", "quant.head=fp8"], GLUON, {WHOLE: 9}),
    ],
)
@pytest.mark.parametrize("level", [1, 2])
def test_fusions_keep_the_format_of_activations(
    overrides: list[str], target: Target, expected: dict[str | None, int], level: int, tmp_path: Path
):
    write_wide(tmp_path)
    config = load(["model=qwen3", f"checkpoint={tmp_path}", "dtype=bf16", f"level={level}", *overrides])
    assert acts(config, target) == expected


def of(overrides: list[str], folder: Path) -> AtomError:
    with pytest.raises(AtomError) as error:
        config = load([f"checkpoint={tiny.save('qwen3', folder / 'plain')}", "job=explain", *overrides])
        compile_graph(config)
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["quant.act=fp8"], "quant.act=fp8: no linear's weights are packed; quant=fp8 packs them"),
        (["quant=none", "quant.act=int8"], "quant.act=int8: no linear's weights are packed; quant=int8 packs them"),
        (["quant=int8", "quant.act=fp8"], "quant.act=fp8: model.layers.0.self_attn.q_proj is stored as int8[1, *], which is multiplied with activations in int8 only; leave quant.act out"),
        (["quant.fmt='int4[1, 16]'", "quant.act=int8"], "quant.act=int8: model.layers.0.self_attn.q_proj is stored as int4[1, 16], which is multiplied with none but plain activations; leave quant.act out"),
        (["quant.act=int4"], "quant.act=int4: there is no such choice (did you mean int8?); choices: auto, none, fp8, int8"),
    ],
)  # fmt: skip
def test_what_weights_are_not_multiplied_with_is_refused_by_name(overrides: list[str], message: str, tmp_path: Path):
    error = of(overrides, tmp_path)
    assert str(error) == message
    assert isinstance(error, ConfigError)


def test_a_device_without_the_product_refuses_by_name_and_explain_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tiny.save("qwen3", tmp_path / "plain")
    overrides = ["quant=fp8", "quant.act=fp8"]
    with pytest.raises(
        UnsupportedError, match=r"^quant\.act=fp8: cpp: has no matmuls of activations in fp8\[1, \*\];"
    ) as error:
        logits(folder, *overrides)
    assert "\n" not in str(error.value)
    assert explain.run(load([f"checkpoint={folder}", "job=explain", "level=1", *overrides])) == 0
    assert "reference.linear(" in capsys.readouterr().out
    exact = logits(folder, "quant=fp8")
    assert 1e-3 < relative_error(logits(folder, "level=0", *overrides), exact) < 0.2, "the bodies round"


def test_experts_in_mxfp4_take_fp8_if_no_linear_is_packed(tmp_path: Path):
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
    }
    (tmp_path / "config.json").write_text(json.dumps({**tiny.config("gpt_oss").to_dict(), **sizes}))
    config = [
        "model=gpt_oss",
        "quant=mxfp4",
        'quant.plain=["re:.*self_attn.*"]',
        "quant.act=fp8",
        "dtype=bf16",
        "level=1",
    ]
    graph = compile_graph(load([f"checkpoint={tmp_path}", *config]), target=GLUON)
    assert [node.kwargs.get("act") for node in graph.find(ops.experts)] == [WHOLE] * 2
    assert acts(load([f"checkpoint={tmp_path}", *config]), GLUON) == {}


def test_explain_counts_the_linears_of_each_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_wide(tmp_path)
    config = load(["model=qwen3", f"checkpoint={tmp_path}", "job=explain", "dtype=bf16", "level=1", "quant=fp8"])
    graph = compile_graph(config, target=HOPPER)
    lines = dict(explain.describe({**explain.sizes(graph, config)}, config))
    assert lines["activations"] == "fp8[1, *] in 8 linears, for many rows"
    assert "activations" not in dict(explain.describe(explain.sizes(compile_graph(config), config), config))


def test_experts_that_keep_their_activations_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    folder = tiny.save("qwen3_moe", tmp_path / "plain")
    common = [f"checkpoint={folder}", "quant=fp8", "level=0", "dtype=fp32", "device=cpu"]
    line = "quant.act=fp8: activations of experts in fp8[1, *] stay in fp32"
    config = load([*common, "job=explain", "quant.act=fp8"])
    graph = compile_graph(config, target=HOPPER)
    assert dict(explain.describe(explain.sizes(graph, config), config))["activations"] == line
    why = {note for node in graph.programs["body"].nodes for note in node.meta.get("notes", ())}
    assert line.partition(": ")[2] in why
    asked = [*common, "quant.act=fp8", "serve.kv_cache_memory=4194304", f"cache={tmp_path / 'cache'}"]
    LLMEngine.from_config(load(asked)).close()
    assert f"atom-run: {line}\n" in capfd.readouterr().err
    plain = load([*common, "job=explain"])
    assert explain.sizes(compile_graph(plain, target=HOPPER), plain)["left_plain"] == []
