"""Muse Spark: gated residuals, norms whose weight is of their input, and experts whose results are normed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from law import assert_same_logits
from passes.test_shard import logits_of_ranks, sharded
from probe import assert_logits
from semantic import assert_same_as_transformers

from atom import LLMEngine, SamplingParams
from atom.compiler import semantic_graph
from atom.config.load import load
from atom.errors import AtomError
from atom.graph import Mesh, ops

TEXT = {**tiny.SIZES, "head_dim": 12, "sliding_window": 9, "bos_token_id": 0, "post_norm_eps": 1e-2, "qk_scale_factor": 3.0, "output_multiplier": 0.6,
        "layer_rope_theta": [1000.0, 0, 1000.0], "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["sparse", "dense", "sparse"], "num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "moe_hidden_size": 28,
        "routed_scaling_factor": 1.7, "residual_gate_temperature": 0.4}  # fmt: skip
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
AUDIO = {"patch_sizes": [2, 2], "hidden_sizes": [4, 6], "depths": [1, 1], "num_hidden_layers": 2, "out_hidden_size": 48}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of the whole, and its model."""
    config = transformers.MuseSparkConfig(text_config=TEXT, vision_config=VISION, audio_config=AUDIO)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.MuseSparkForConditionalGeneration(config).eval()
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    for tensor in (*model.parameters(), *corrections):
        tensor.data += torch.randn_like(tensor) * 0.2
    folder = tmp_path_factory.mktemp("muse_spark")
    model.save_pretrained(folder)
    return folder, model


def test_the_text_gives_the_logits_of_the_whole(saved: tuple[Path, Any]):
    assert_same_as_transformers(load([f"checkpoint={saved[0]}", "dtype=fp32"]), saved[1])


def test_chunks_and_batches_change_nothing(saved: tuple[Path, Any]):
    folder, model = saved
    engine = LLMEngine(model=str(folder), dtype="fp32", level=1, max_num_batched_tokens=16, kv_cache_memory=1 << 22)
    assert_logits(engine, tiny.prompt(70), model)
    prompts = [tiny.prompt(length, seed=length) for length in (3, 40, 17)]
    answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    for answer, prompt in zip(answers, prompts, strict=True):
        tiny.assert_greedy(answer, prompt, model)
    assert engine.metrics.scheduler.num_chunks > 0
    engine.close()


@pytest.mark.parametrize("mesh", [Mesh(2), Mesh(2, experts=2), Mesh(4, experts=4)], ids=str)
def test_ranks_give_the_logits_of_the_whole(saved: tuple[Path, Any], mesh: Mesh):
    folder, model = saved
    tokens = tiny.prompt(33)
    overrides = [f"checkpoint={folder}", "dtype=fp32"]
    made = logits_of_ranks(overrides, tokens, mesh)
    assert_same_logits(made[0], tiny.logits(model, tokens))
    assert all(torch.equal(made[0], other) for other in made[1:])
    calls = sharded(semantic_graph(load(overrides)), mesh).find(ops.grouped_linear)
    assert {call.args[1].type.shape[0] for call in calls} == {-(-6 // mesh.experts)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tensor=4", "parallel.experts=2"], "experts whose results are normed are not divided by width"),
        (
            ["parallel.tensor=2", "parallel.data=2", "parallel.experts=2"],
            "are not divided by width, nor between groups",
        ),
        (["model.norm.unweighted=[o_norm,q_a_norm]"], "model.norm: no norm of this model has the role q_a_norm"),
        (["model.norm.weighs_input=[mlp_after_norm,o_norm]"], "model.norm.weighs_input: o_norm is in model.norm.unw"),
        (["model.mlp.0.latent=null"], "model.mlp.0.latent_norm=before: there is no latent"),
        (["model.mlp.0.zero_experts=2"], "model.mlp.0.expert_norm=true is for gated experts"),
        (["model.residual=parallel"], "model.residual_gate.kind=sigmoid: model.residual=parallel adds all blocks"),
    ],
)
def test_what_does_not_fit_is_refused(saved: tuple[Path, Any], overrides: list[str], message: str):
    with pytest.raises(AtomError, match=message):
        semantic_graph(load([f"checkpoint={saved[0]}", "load_dummy=true", *overrides]))
