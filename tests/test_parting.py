"""A failed test against transformers names the line of the text that parts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from parting import naming_line
from probe import assert_logits
from safetensors.torch import load_file, save_file

from atom import LLMEngine
from atom.compiler.artifact import semantic_graph
from atom.config.load import load
from atom.graph import show

TOKENS = tiny.prompt(40)


def harm(folder: Path, target: Path) -> Path:
    """A checkpoint whose gate and up are exchanged in layer 1."""
    shutil.copytree(folder, target)
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    tensors = load_file(folder / "model.safetensors")
    tensors[gate], tensors[up] = tensors[up], tensors[gate]
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", [0, 1])
def test_a_harmed_checkpoint_is_found_in_its_layer(
    level: int, tmp_path: Path, checkpoints: Callable[[str], Path], references: Any
):
    folder = harm(checkpoints("qwen3"), tmp_path / "harmed")
    engine = LLMEngine(model=str(folder), dtype="fp32", level=level, kv_cache_memory=1 << 22, max_num_batched_tokens=16)
    with pytest.raises(AssertionError) as failed:
        assert_logits(engine, TOKENS, references("qwen3"))
    engine.close()
    position, first, line, *since = str(failed.value).splitlines()
    assert position.startswith("position ")
    assert "of layer 1, " in first
    called = "\n".join([line, *since])
    assert 'W("model.layers.1.mlp.gate_proj.weight"' in called and "layers.0" not in called


@pytest.mark.slow
def test_a_changed_text_is_found_at_its_line(tmp_path: Path, checkpoints: Callable[[str], Path], references: Any):
    common = [f"checkpoint={checkpoints('qwen3')}", "dtype=fp32", "level=0", "serve.kv_cache_memory=4194304"]
    text = show(semantic_graph(load(common)))
    norm = 'W("model.layers.2.input_layernorm.weight", fp32[48]), eps=1e-06'
    assert text.count(norm) == 1
    (tmp_path / "mine.py").write_text(f"# job.stage=semantic\n{text.replace(norm, norm.replace('1e-06', '0.1'))}")
    engine = LLMEngine.from_config(load([*common, f"job.graph={tmp_path / 'mine.py'}"]))
    with pytest.raises(AssertionError, match=r'of layer 2, .*\n.*layers\.2\.input_layernorm\.weight".*eps=0\.1'):
        assert_logits(engine, TOKENS, references("qwen3"))
    engine.close()


def test_nothing_is_compared_unless_a_test_fails(monkeypatch: pytest.MonkeyPatch, open_engine: Any, references: Any):
    monkeypatch.setattr("parting.compare", None)
    assert_logits(open_engine("qwen3"), TOKENS, references("qwen3"))


def test_what_cannot_be_compared_leaves_the_failure_as_it_is(open_engine: Any, references: Any):
    engine = open_engine("qwen3", max_model_len=40)
    with (
        pytest.raises(AssertionError, match=r"^3 is not 4\njob=compare cannot say where: .*40"),
        naming_line(engine.config, references("qwen3"), TOKENS),
    ):
        raise AssertionError("3 is not 4")
