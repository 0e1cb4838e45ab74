"""Faults that are planted in a model's text, its weights or a kernel: each is found by the line that computes it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from safetensors.torch import load_file, save_file
from test_quantized import LAYOUTS, pack
from torch import Tensor

from atom.compiler import semantic_graph
from atom.compiler.saved_graph import show_saved
from atom.config.load import load
from atom.errors import ConfigError
from atom.graph import show

Compared = Callable[..., dict[str, Any]]
REFERENCE = "job.b=transformers"


def edit_text(folder: Path, to: Path, *edits: tuple[str, str]) -> str:
    """An override that runs a checkpoint's text with parts of lines replaced."""
    text = show(semantic_graph(load([f"checkpoint={folder}", "dtype=fp32"])))
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (to / "graph.py").write_text(show_saved("semantic", text))
    return f"job.graph={to / 'graph.py'}"


def edit_weight(folder: Path, to: Path, name: str, edit: Callable[[Tensor], Tensor]) -> Path:
    """A copy of a checkpoint with one tensor changed."""
    edited = shutil.copytree(folder, to / "edited")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: edit(tensors[name]).contiguous()}, edited / "model.safetensors", {"format": "pt"})
    return edited


def first(result: dict[str, Any]) -> tuple[str, int | None]:
    """The value that is named first, and its layer."""
    assert not result["agree"]
    return result["findings"][0]["value"], result["findings"][0]["layer"]


def lines(result: dict[str, Any]) -> list[str]:
    """The first value's line and those before it that it may come from."""
    return [line["text"] for line in result["findings"][0]["since"]]


def test_a_wrong_rope_theta(checkpoints: Any, compared: Compared):
    result = compared(checkpoints("llama"), REFERENCE, "model.attention.rope.theta=9000")
    assert first(result) == ("a_1", 0)
    assert any("rotary(positions, rope_freqs(12, 9000.0))" in line for line in lines(result))
    assert any("norm_rope_write(" in line for line in lines(result))
    assert not any("linear(" in line for line in lines(result))


@pytest.mark.slow
def test_a_wrong_rope_theta_of_one_of_two_sides(checkpoints: Any, compared: Compared):
    result = compared(checkpoints("llama"), "job.b=model.attention.rope.theta=9000")
    assert first(result) == ("cos", None)
    assert lines(result) == ["cos, sin = reference.rotary(positions, rope_freqs(12, 9000.0))"]


def test_a_gate_and_an_up_that_are_swapped(checkpoints: Any, compared: Compared, tmp_path: Path):
    folder = checkpoints("llama")
    edits = ("activate(gate_1", "activate(up_1"), ("mul(active_1, up_1)", "mul(active_1, gate_1)")
    swapped = edit_text(folder, tmp_path, *edits)
    result = compared(folder, REFERENCE, swapped)
    assert first(result) == ("m_1", 1)
    assert [finding["layer"] for finding in result["findings"]] == [1]


@pytest.mark.slow
def test_an_eps(checkpoints: Any, compared: Compared):
    """The embeddings' mean square is about 0.04, of which 1e-3 is 2.5%."""
    result = compared(checkpoints("llama"), REFERENCE, "model.norm.eps=1e-3")
    assert first(result) == ("h", 0)
    assert "eps=0.001" in lines(result)[-1]


@pytest.mark.slow
def test_a_missing_norm_offset(checkpoints: Any, compared: Compared):
    result = compared(checkpoints("gemma3"), REFERENCE, "model.norm.offset=0")
    assert first(result) == ("h", 0)
    assert "rms_norm(" in lines(result)[-1]


def test_a_kernel_that_rounds_early(checkpoints: Any, compared: Compared, rounding: None):
    result = compared(checkpoints("llama"), REFERENCE, "level=1")
    assert first(result) == ("h", 0)
    assert result["findings"][0]["kernel"] == "torch"
    assert lines(result)[-1].startswith("h = torch.rms_norm(")


@pytest.mark.slow
def test_a_transposed_expert(compared: Compared, tmp_path: Path):
    tiny.save_changed("qwen3_moe", tmp_path / "moe", moe_intermediate_size=48)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    edited = edit_weight(tmp_path / "moe", tmp_path, name, lambda weight: weight.T)
    result = compared(tmp_path / "moe", f"job.b=checkpoint={edited}")
    assert first(result) == ("y_1", 1)
    assert {finding["layer"] for finding in result["findings"]} == {1}


@pytest.mark.slow
def test_one_layer_s_window_off_by_one(checkpoints: Any, compared: Compared, tmp_path: Path):
    folder = checkpoints("gpt_oss")
    old = 'W("model.layers.2.self_attn.sinks", fp32[4]), scale=0.25, window=9)'
    result = compared(folder, REFERENCE, edit_text(folder, tmp_path, (old, old.replace("9", "8"))))
    assert first(result) == ("a_5", 2)
    assert any("window=8" in line for line in lines(result))


@pytest.mark.slow
def test_an_fp8_scale_off_by_a_power_of_two(compared: Compared, tmp_path: Path):
    packed = pack(tiny.save("llama", tmp_path), LAYOUTS["FP8_DYNAMIC"], tmp_path / "packed")
    name = "model.layers.2.mlp.up_proj.weight_scale"
    edited = edit_weight(packed, tmp_path, name, lambda scale: scale * 2)
    result = compared(packed, f"job.b=checkpoint={edited}")
    assert first(result) == ("up_2", 2)
    assert "model.layers.2.mlp.up_proj.weight" in lines(result)[-1]


def test_a_format_s_own_rounding_is_no_fault_and_a_scale_off_by_a_power_of_two_is(compared: Compared, tmp_path: Path):
    """Against the plain weights that were packed, where a norm over all tokens is what counts."""
    plain = tiny.save("llama", tmp_path / "plain")
    packed = pack(shutil.copytree(plain, tmp_path / "copy"), LAYOUTS["FP8_DYNAMIC"], tmp_path / "packed")
    assert compared(plain, f"job.b=checkpoint={packed}")["agree"]
    name = "model.layers.2.mlp.up_proj.weight_scale"
    edited = edit_weight(packed, tmp_path, name, lambda scale: scale * 2)
    result = compared(plain, f"job.b=checkpoint={edited}")
    assert first(result) == ("up_2", 2)
    assert result["findings"][0]["measure"] == "norm"


@pytest.mark.slow
def test_a_tied_head_that_should_not_be(checkpoints: Any, compared: Compared):
    result = compared(checkpoints("llama"), REFERENCE, "model.tied=true")
    assert first(result) == ("logits", None)
    assert "model.embed_tokens.weight" in lines(result)[-1]


@pytest.mark.slow
def test_a_router_that_chooses_from_too_many_groups(checkpoints: Any, compared: Compared, tmp_path: Path):
    folder = checkpoints("deepseek_v3")
    rule = ', top_k=4, method="noaux_tc", score="sigmoid", groups=4, top_groups='
    call = f'W("model.layers.1.mlp.gate.e_score_correction_bias", fp32[16]){rule}'
    result = compared(folder, REFERENCE, edit_text(folder, tmp_path, (f"{call}2", f"{call}3")))
    assert first(result) == ("ids", 1)
    assert result["findings"][0]["measure"] == "choices"
    (choice,) = (each for each in result["choices"] if each["layer"] == 1)
    assert 0 < choice["differing"] == round(result["findings"][0]["error"] * choice["tokens"])
    assert [finding["value"] for finding in result["findings"]] == ["ids"]


@pytest.mark.slow
def test_an_attention_of_the_last_layer_whose_end_runs_in_the_head(
    checkpoints: Any, compared: Compared, tmp_path: Path
):
    folder = checkpoints("llama")
    edit = "a_5 = merge_heads(a_4)", "a_5z = merge_heads(a_4)\n    a_5 = scale(a_5z, by=2.0)"
    result = compared(folder, REFERENCE, "level=1", edit_text(folder, tmp_path, edit))
    assert first(result) == ("a_5", 2)


def test_a_cache_that_rounds_is_no_fault(checkpoints: Any, compared: Compared):
    folder = checkpoints("llama")
    result = compared(folder, "job.b=serve.kv_cache_dtype=fp8")
    assert result["agree"], result["findings"][0]
    assert max(result["layers"], key=lambda layer: layer["error"])["measure"] == "norm"


def test_weights_that_transformers_does_not_find_are_an_error(compared: Compared, tmp_path: Path):
    folder = tiny.save("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("up_proj", "upper"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    needed = r"needs: model\.layers\.0\.mlp\.up_proj\.weight and 2 more"
    with pytest.raises(ConfigError, match=needed):
        compared(folder, REFERENCE, "model.weights.up='model.layers.{layer}.mlp.upper'")


@pytest.mark.slow
def test_transformers_as_the_first_side_is_the_reference_too(checkpoints: Any, compared: Compared):
    result = compared(checkpoints("llama"), "job.a=transformers", "job.b=model.norm.eps=1e-3")
    assert first(result) == ("h", 0)
    assert (result["judged"], result["sides"]["a"]) == ("b", "transformers, float32")
