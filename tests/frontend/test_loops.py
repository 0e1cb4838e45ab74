"""Layers that run several times, against those of transformers which a loop calls."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from probe import assert_logits
from safetensors.torch import load_file, save_file
from semantic import assert_same_as_transformers

from atom import LLMEngine, SamplingParams
from atom.compiler import semantic_graph
from atom.config.load import load
from atom.errors import AtomError, ConfigError, UnsupportedError

NAMES = {"post_attention_layernorm": "post_attention_layernorm", "post_self_attn_layernorm": "input_layernorm_2",
         "post_mlp_layernorm": "post_attention_layernorm_2"}  # fmt: skip


class Looped:
    """The layers of a model, then its final norm, so many times."""

    def __init__(self, model: Any, loops: int) -> None:
        self.model, self.lm_head, self.loops = model.model, model.lm_head, loops

    @torch.inference_mode()
    def __call__(self, tokens: torch.Tensor) -> Any:
        hidden, positions = self.model.embed_tokens(tokens), torch.arange(tokens.shape[1])[None]
        turned = self.model.rotary_emb(hidden, positions)
        mask = torch.full((1, 1, *[tokens.shape[1]] * 2), float("-inf")).triu(1)
        for _ in range(self.loops):
            for layer in self.model.layers:
                hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=turned)
            hidden = self.model.norm(hidden)
        return SimpleNamespace(logits=self.lm_head(hidden))


def save_ouro(folder: Path, loops: int) -> Looped:
    """Write a checkpoint under Ouro's names (sglang/srt/models/ouro.py): of norms, and of a gate that ends loops early.

    Its rotated pairs are those of the layers at hand.
    """
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    changes = {"num_hidden_layers": 2, "attention_bias": False, "head_dim": 16, "rope_parameters": rope}
    model = tiny.save_changed("glm4", folder, **changes).eval()
    model.config._attn_implementation = "eager"
    tensors = {"model.early_exit_gate.weight": torch.zeros(1, 48), "model.early_exit_gate.bias": torch.zeros(1)}
    for name, tensor in load_file(folder / "model.safetensors").items():
        norm = name.split(".")[-2]
        if norm == "gate_up_proj":
            halves = tensor.clone().chunk(2)
            pair = zip(("gate_proj", "up_proj"), halves, strict=True)
            tensors |= {name.replace(norm, part): half.clone() for part, half in pair}
        else:
            tensors[name.replace(norm, NAMES.get(norm, norm))] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    changed = {"architectures": ["OuroForCausalLM"], "model_type": "ouro", "total_ut_steps": loops}
    (folder / "config.json").write_text(json.dumps(config | changed))
    return Looped(model, loops)


def test_loops_over_layers_give_the_logits_of_those_layers_in_a_loop(tmp_path: Path):
    model = save_ouro(tmp_path / "ouro", loops=3)
    config = load([f"checkpoint={tmp_path / 'ouro'}", "dtype=fp32", "model.attention.rope.interleaved=true"])
    states = [state.name for state in semantic_graph(config).states()]
    assert (config.model.name, states) == ("ouro", [f"model.layers.{number}" for number in range(6)])
    assert_same_as_transformers(config, model)


def test_each_loop_has_caches_of_its_own(tmp_path: Path):
    model, prompt = save_ouro(tmp_path / "ouro", loops=2), tiny.prompt(40)
    options = {"dtype": "fp32", "kv_cache_memory": 1 << 22, "model.attention.rope.interleaved": True}
    engine = LLMEngine(model=str(tmp_path / "ouro"), level=1, **options)
    (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    tiny.assert_greedy(answer, prompt, model)
    engine.close()


SECTIONS = {  # a variant with sections -> the caches of their loops, in order
    "dory": [f"model.layers.{layer}" for layer in range(1 + 3 * 2 + 1)],
    "hrm_text": [f"model.{name}.layers.{layer}" for name, layer in [*(("L_module", layer) for layer in range(6)), ("H_module", 0), ("H_module", 1),
                 *(("L_module", layer) for layer in range(6, 12)), ("H_module", 2), ("H_module", 3)]],
}  # fmt: skip


@pytest.mark.parametrize("name", SECTIONS)
def test_loops_over_sections_survive_chunks_batches_prefix_hits_and_preemption(name: str, tmp_path: Path):
    model = tiny.save_changed(name, tmp_path / name).eval()
    options = {"dtype": "fp32", "level": 1, "block_size": 4, "max_num_batched_tokens": 16, "num_kvcache_blocks": 64}
    config = load([f"checkpoint={tmp_path / name}", "dtype=fp32"])
    assert semantic_graph(config).layers() == SECTIONS[name]
    engine = LLMEngine(model=str(tmp_path / name), **options)
    assert_logits(engine, tiny.prompt(70), model)
    shared = tiny.prompt(37)
    prompts = [shared, *(shared[:20] + tiny.prompt(length, seed=length) for length in (1, 19, 30))]
    for each in (prompts[:1], prompts):
        answers = engine.generate(each, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
        for answer, prompt in zip(answers, each, strict=True):
            tiny.assert_greedy(answer, prompt, model)
    metrics = engine.metrics.scheduler
    assert metrics.num_chunks > 0 and metrics.num_prefix_hit_tokens > 20 and metrics.num_preemptions > 0
    engine.close()


def test_a_start_says_that_prompts_of_a_prefix_lm_are_causal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = "prefix_lm=true of config.json is not applied: the tokens of a prompt do not attend to later ones"
    for is_prefix_lm in (True, False):
        folder = tmp_path / str(is_prefix_lm)
        tiny.save_changed("hrm_text", folder, prefix_lm=is_prefix_lm)
        LLMEngine(model=str(folder), level=0, dtype="fp32", kv_cache_memory=1 << 22).close()
        assert (line in capsys.readouterr().err) == is_prefix_lm


def test_sections_that_do_not_fit_are_refused(tmp_path: Path):
    tiny.save_changed("hrm_text", tmp_path)
    checkpoint = f"checkpoint={tmp_path}"
    with pytest.raises(ConfigError, match=r"^model.layers=14: model.sections and model.loops run 16 layers$"):
        load([checkpoint, "model.layers=14"])
    with pytest.raises(UnsupportedError, match=r"^model.sections.0.own_state=true: .*leave norm=before out$"):
        load([checkpoint, "model.sections.0.norm=before"])


def test_what_dory_counts_otherwise_is_refused(tmp_path: Path):
    tiny.save_changed("dory", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for changed, message in (
        ({"n_input_layers": 4}, r"^model.layers=8: model.sections and model.loops run 9 layers$"),
        ({"recurrent_kv_cache_mode": "last_loop"}, r"recurrent_kv_cache_mode=last_loop in its config.json is not"),
    ):
        path.write_text(json.dumps(config | changed))
        with pytest.raises(AtomError, match=message):
            load([f"checkpoint={tmp_path}"])


def test_a_part_of_a_loop_is_refused(tmp_path: Path):
    save_ouro(tmp_path / "ouro", loops=2)
    with pytest.raises(ConfigError, match=r"^model.layers=4 is not a multiple of model.loops=3$"):
        load([f"checkpoint={tmp_path / 'ouro'}", "model.loops=3"])
    with pytest.raises(ConfigError, match=r"^model.layers=1 is not a multiple of model.loops=2$"):
        load([f"checkpoint={tmp_path / 'ouro'}", "model.layers=1"])
