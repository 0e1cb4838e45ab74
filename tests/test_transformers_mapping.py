"""Every causal and image-text architecture that transformers maps: it runs like transformers, or says what it needs.

A new version of transformers shows here what is new: its architectures fail until a model file or conf/unsupported.yaml
lists them. The share of those that vLLM or SGLang serves may only grow.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from semantic import assert_same_as_transformers
from served_models import SGLANG, VLLM
from transformers.models.auto import modeling_auto

from atom.config.load import load
from atom.config.model_files import SHARED, model_files
from atom.config.unsupported import unsupported
from atom.jobs.port.tiny import make_model, randomize, shrink

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
IMAGES = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
LISTED = {name for file in model_files() for name in file.spec.get("architectures") or ()}
NUM_RUNNING = 132  # of the served ones, when this was last looked at


def pairs(mapping: dict[str, Any]) -> list[tuple[str, str]]:
    """The model types of a mapping with their architectures."""
    return [(kind, name) for kind, entry in mapping.items() for name in ([entry] if isinstance(entry, str) else entry)]


MAPPED = {name for _, name in (*pairs(CAUSAL), *pairs(IMAGES))}
ALONE = {
    "mllama": "MllamaForCausalLM",
    "muse_glimmer": "MuseGlimmerForCausalLM",
}  # texts that no AutoModel makes by themselves
RUNS = [
    (kind, name) for kind, name in pairs(CAUSAL) if name in LISTED and not name.endswith(SHARED) and kind not in ALONE
]


TEXTS = [
    ("Ernie4_5_VLMoeTextConfig", {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": [24, 20], "moe_num_shared_experts": 2}),
    ("MllamaTextConfig", {"cross_attention_layers": [0, 2], "bos_token_id": 0, "eos_token_id": 0}),
    ("Molmo2TextConfig", {"head_dim": 16, "additional_vocab_size": 7, "rope_parameters": tiny.LINEAR, "rope_scaling_layers": [0, 2], "norm_after": True,
                          "qk_norm_type": "olmo", "attention_bias": True}),
    ("MuseGlimmerTextConfig", {"head_dim": 16, "sliding_window": 9, "bos_token_id": 0, "post_norm_eps": 1e-2, "layer_rope_theta": [1000.0, 0, 1000.0],
                               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("MuseSparkTextConfig", {"head_dim": 16, "sliding_window": 9, "bos_token_id": 0, "post_norm_eps": 1e-2, "layer_rope_theta": [1000.0, 0, 1000.0],
                             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "mlp_layer_types": ["sparse", "dense", "sparse"],
                             "num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "moe_hidden_size": 28, "routed_scaling_factor": 1.7}),
    ("Step3p7TextConfig", {**tiny.EXPERTS, "pad_token_id": 1, "n_routed_experts": 6, "head_dim": 12, "share_expert_dim": 20, "sliding_window": 7,
                           "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
]  # fmt: skip


UNIFIED = {"Gemma4UnifiedTextConfig": tiny.GEMMA4}  # whose model is that of a variant, without its inputs by layer


def config_of(kind: str) -> Any:
    """A tiny config of a model type: of tests/tiny.py if it has one, else its default with small sizes."""
    text = transformers.CONFIG_MAPPING[kind]().get_text_config(decoder=True)
    known = (*TEXTS, *(tiny.VARIANTS | tiny.COMBINED | tiny.RECURRENT).values())
    own = type(text).__name__
    changes = next((changes for name, changes in known if name == own), UNIFIED.get(own))
    if changes is None:
        return shrink(text)
    return type(text)(**{**tiny.SIZES, **changes})


GLM = {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
ROPES = {  # whose defaults in the code are for larger heads, and of GLM's for files without a field that all have
    "ernie4_5_vl_moe": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 2, 2]},
    "glm4v": GLM,
    "glm46v": GLM,
    "glmga": GLM,
    "glm_ocr": GLM,
    "glm4v_moe": {"mrope_section": [2, 1, 1]},
    "paddleocr_vl": {"mrope_section": [4, 4, 4]},
    "qwen2_5_vl": {"mrope_section": [4, 2, 2]},
}
WHOLE = {  # fields of the whole whose defaults do not fit
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "muse_spark": {"audio_config": {"patch_sizes": [2, 2], "hidden_sizes": [4, 6], "depths": [1, 1], "num_hidden_layers": 2, "out_hidden_size": 48}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1], "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}},
}  # fmt: skip


def image_config_of(kind: str) -> Any:
    """A tiny config of a model that also reads images: its default, with small sizes."""
    whole: Any = transformers.CONFIG_MAPPING[kind]()
    text, vision = config_of(kind), shrink(whole.vision_config)
    if hasattr(vision, "out_hidden_size"):
        vision.out_hidden_size = text.hidden_size
    if kind in ROPES:
        text.rope_parameters = {**(text.rope_parameters or {}), **ROPES[kind]}
    config = type(whole)(text_config=text, vision_config=vision, **WHOLE.get(kind, {}))
    config._attn_implementation = "eager"
    return config


@pytest.mark.sampled(20)
@pytest.mark.parametrize(("kind", "name"), RUNS, ids=[f"{kind}-{name}" for kind, name in RUNS])
def test_a_listed_architecture_gives_the_logits_of_transformers(kind: str, name: str, tmp_path: Path):
    model = make_model(config_of(kind))
    assert type(model).__name__ == name
    model.save_pretrained(tmp_path, save_original_format=True)
    assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32"]), model)


ELSEWHERE = {  # most are compared in tests/checkpoint/test_text_of_images.py
    "blip-2": "its whole runs with an image only",
    "fast_vlm": "its whole needs timm; tests/frontend/test_hub_forms.py has its names",
    "perception_lm": "the same",
    "gemma3n": "what reads images needs timm; tests/frontend/test_hub_forms.py has it with such tensors",
    "gemma4": "shrunken, it has no config of what hears; tests/frontend/test_hub_forms.py has it with such tensors",
    "gemma4_unified": "the same",
    "llama4": "transformers 5.24 looks for an output of images; tests/frontend/test_hub_forms.py has it",
    "mistral4": "a text by itself, which transformers lists among those that read images",
    "kimi_k25": "transformers 5.24 saves its layers under the name of those that read images",
    "hy_v4_vl": "tests/frontend/test_sparse_attention.py has it, with index heads that do not tie",
    "aya_vision": "transformers 5.24 leaves its scale of logits out",
    "cohere2_vision": "transformers 5.24 leaves its scale of logits out",
    "qwen2_vl": "its default has 100 million numbers that read images",
    "qwen2_5_omni_thinker": "its default has 600 million numbers that hear",
    "qwen3_omni_moe_thinker": "the same",
    "qwen3_vl_moe": "the hub stores its experts transposed",
    "shieldgemma2": "a classifier around Gemma 3, under a class of its own",
}
MISNAMED = {"qianfan_ocr", "molmo2"}  # transformers 5.24 gives back neither the name of the layers nor two embeddings
READ_IMAGES = [(kind, name) for kind, name in pairs(IMAGES) if name in LISTED and kind not in ELSEWHERE]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("kind", "name"), READ_IMAGES, ids=[f"{kind}-{name}" for kind, name in READ_IMAGES])
def test_the_text_half_of_a_listed_architecture_gives_the_logits_of_transformers(kind: str, name: str, tmp_path: Path):
    torch.manual_seed(1)
    model = randomize(transformers.AutoModelForImageTextToText.from_config(image_config_of(kind), dtype=torch.float32))
    assert type(model).__name__ == name
    model.save_pretrained(tmp_path, save_original_format=kind not in MISNAMED)
    assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32", "serve.images=false"]), model)


@pytest.mark.parametrize("kind", ALONE)
def test_a_text_by_itself_gives_the_logits_of_the_whole(kind: str, tmp_path: Path):
    torch.manual_seed(1)
    model = randomize(transformers.AutoModelForImageTextToText.from_config(image_config_of(kind), dtype=torch.float32))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": [ALONE[kind]]}))
    tensors = load_file(tmp_path / "model.safetensors")
    own = {name: re.sub(r"^(model\.)?language_model\.(model\.)?", r"\1\2", name) for name in tensors}
    texts = {name: ours for name, ours in own.items() if name != ours or name.startswith("lm_head.")}
    save_file({ours: tensors[name] for name, ours in texts.items()}, tmp_path / "model.safetensors")
    assert_same_as_transformers(load([f"checkpoint={tmp_path}", "dtype=fp32"]), model)


def test_the_served_architectures_that_run_only_grow():
    served = {name for name in MAPPED & (VLLM | SGLANG) if "Assistant" not in name}  # which draft for another model
    running = served & LISTED
    line = f"{len(running)} of {len(served)} architectures run that vLLM or SGLang serves by transformers' mappings"
    print(f"{line}: {len(running) / len(served):.1%}; not: {', '.join(sorted(served - running))}")
    assert len(running) >= NUM_RUNNING, "one that ran is gone"
    assert len(running) < NUM_RUNNING + 5, "set NUM_RUNNING anew, so that none of these is lost"


def test_every_architecture_of_transformers_is_listed_or_says_what_it_needs():
    assert not MAPPED - LISTED - unsupported().keys()
