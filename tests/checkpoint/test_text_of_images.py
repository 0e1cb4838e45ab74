"""The text half of models that also read images: the logits of transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from probe import assert_logits
from safetensors.torch import load_file, save_file

from atom import LLMEngine
from atom.checkpoint.folder import text_name
from atom.config.load import load
from atom.errors import CheckpointError

TEXT = {**tiny.SIZES, "num_hidden_layers": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]}
GLM_ROPE = {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]}
EXPERTS = {
    "moe_intermediate_size": 20,
    "num_experts_per_tok": 2,
}  # no matrix is square: transformers distinguishes its sides by shape
VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 48, "intermediate_size": 16}
SIGLIP = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
INTERN = {**SIGLIP, "image_size": [28, 28], "patch_size": [14, 14]}
CLIP = {**SIGLIP, "image_size": 28, "patch_size": 14, "model_type": "clip_vision_model"}
MISTRAL4 = {**tiny.YARN_MLA, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # fields of text_config and of vision_config
    "Gemma3": ({"head_dim": 16, "sliding_window": 10, "query_pre_attn_scalar": 24}, {**SIGLIP, "image_size": 28, "patch_size": 14}),
    "Mistral3": ({"head_dim": 16, "model_type": "mistral"}, {**SIGLIP, "model_type": "pixtral", "head_dim": 8}),
    "Qwen2VL": ({"rope_parameters": MROPE}, {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 48}),
    "Qwen2_5_VL": ({"rope_parameters": MROPE}, VISION),
    "Qwen3VL": ({"head_dim": 12, "rope_parameters": MROPE}, {**VISION, "deepstack_visual_indexes": [0]}),
    "Qwen3VLMoe": ({**EXPERTS, "num_experts": 6, "head_dim": 12, "rope_parameters": MROPE}, {**VISION, "deepstack_visual_indexes": [0]}),
    "Qwen3VLMoe dense": ({**EXPERTS, "num_experts": 5, "mlp_only_layers": [0], "num_key_value_heads": 1, "rope_parameters": MROPE},
                         {**VISION, "deepstack_visual_indexes": [0]}),
    "Glm4v": ({"rope_parameters": GLM_ROPE}, VISION),
    "Glm46V": ({"rope_parameters": GLM_ROPE}, VISION),
    "Glm4vMoe": ({**EXPERTS, "n_routed_experts": 6, "rope_parameters": GLM_ROPE}, VISION),
    "InternVL": ({"model_type": "qwen2"}, INTERN),
    "InternVL qwen3": ({"model_type": "qwen3", "head_dim": 16}, INTERN),
    "InternVL qwen3_moe": ({**EXPERTS, "model_type": "qwen3_moe", "num_experts": 6, "head_dim": 12}, INTERN),
    "Llava": ({"model_type": "llama"}, CLIP),
    "Llava mistral": ({"model_type": "mistral", "head_dim": 16}, CLIP),
    "LlavaNext": ({"model_type": "llama"}, CLIP),
    "LlavaNext mistral": ({"model_type": "mistral", "sliding_window": None}, CLIP),
    "LlavaNext qwen2": ({"model_type": "qwen2"}, CLIP),
    "LlavaOnevision": ({"model_type": "qwen2"}, {**CLIP, "model_type": "siglip_vision_model"}),
    "Mistral3 mistral4": ({**tiny.MLA, **EXPERTS, "model_type": "mistral4", "n_routed_experts": 8, "q_lora_rank": 20, "rope_parameters": MISTRAL4},
                          {**SIGLIP, "model_type": "pixtral", "head_dim": 8}),
    "Cohere2Vision": ({"model_type": "cohere2", "logit_scale": 1.0, "sliding_window": 11}, {**CLIP, "model_type": "siglip_vision_model"}),
    "AyaVision": ({"model_type": "cohere2", "logit_scale": 1.0, "sliding_window": 11}, {**CLIP, "model_type": "siglip_vision_model"}),
    "Idefics3": ({"model_type": "llama"}, {**SIGLIP, "image_size": 28, "patch_size": 14}),
    "SmolVLM": ({"model_type": "llama"}, {**SIGLIP, "image_size": 28, "patch_size": 14}),
    "Kimi_K25": ({**tiny.MLA, **EXPERTS, "model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
                  "rope_parameters": tiny.YARN_MLA, "first_k_dense_replace": 1},
                 {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "projection_hidden_size": 64}),
    "Step3p7": ({**EXPERTS, "n_routed_experts": 6, "head_dim": 12, "share_expert_dim": 20, "pad_token_id": 1, "sliding_window": 7, "num_sliding_attention_heads": 8,
                 "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"], "moe_router_scaling_factor": 1.7,
                 "swiglu_limits": [None, 0.4], "swiglu_limits_shared": [0.3, 0.5], "rope_parameters": {
                     "full_attention": {**tiny.LLAMA3, "partial_rotary_factor": 0.5}, "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}},
                {"width": 16, "layers": 1, "heads": 2, "image_size": 28, "patch_size": 14, "mlp_ratio": 2.0}),
    "Mllama": ({"cross_attention_layers": [0], "bos_token_id": 0, "eos_token_id": 0, "rope_parameters": tiny.LLAMA3},
               {"hidden_size": 16, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2, "intermediate_size": 16, "vision_output_dim": 32,
                "image_size": 28, "patch_size": 14, "intermediate_layers_indices": [0]}),
    "Exaone4_5_": ({"model_type": "exaone4", "sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": tiny.LLAMA3},
                   {**VISION, "num_key_value_heads": 2, "fullatt_block_indexes": [0]}),
}  # fmt: skip


def save(name: str, folder: Path, *, is_original: bool) -> Any:
    """Write the checkpoint of a whole model that reads images; the model."""
    text, vision = MODELS[name]
    torch.manual_seed(0)
    made: Any = getattr(transformers, f"{name.split()[0]}ForConditionalGeneration")
    config = made.config_class(text_config={**TEXT, **text}, vision_config=vision)
    config._attn_implementation = "eager"
    model = made(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder, save_original_format=is_original)
    if is_original and name == "Kimi_K25":
        name_layers(folder)
    return model


def name_layers(folder: Path) -> None:
    """Call the text's layers what the hub does: transformers 5.24 gives them back the name of those that read images."""
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.replace("model.blocks.", "model.layers."): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


def transpose_experts(folder: Path) -> None:
    """Store experts as [E, in, out], as the hub has them; transformers 5 reads these, and saves [E, out, in]."""
    tensors = load_file(folder / "model.safetensors")
    experts = {name: tensor.transpose(1, 2).contiguous() for name, tensor in tensors.items() if ".experts." in name}
    assert experts
    save_file(tensors | experts, folder / "model.safetensors")


@pytest.mark.sampled(15)
@pytest.mark.parametrize("is_original", [True, False], ids=["as on the hub", "as transformers 5 saves"])
@pytest.mark.parametrize("name", MODELS)
def test_the_text_half_gives_the_logits_of_the_whole(
    name: str, is_original: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, fields = (
        save(name, tmp_path, is_original=is_original),
        ["level=0", "dtype=fp32", "serve.kv_cache_memory=4194304", "serve.images=false"],
    )
    if is_original and "Qwen3VLMoe" in name:
        transpose_experts(tmp_path)
        model = type(model).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    elif "Qwen3VLMoe" in name:
        fields.append("model=qwen3_moe")
    engine = LLMEngine.from_config(load([f"checkpoint={tmp_path}", *fields]))
    assert (
        f"{tmp_path} also reads images; here only its text model runs; serve.images=true has it"
        in capsys.readouterr().err
    )
    tokens = tiny.prompt(24)
    assert_logits(engine, tokens, model)
    engine.close()


def test_the_text_of_blip_2_gives_the_logits_of_its_language_model(tmp_path: Path) -> None:
    text = {**TEXT, "model_type": "opt", "ffn_dim": 80, "word_embed_proj_dim": 48}
    reader = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.Blip2Config(
        text_config=text,
        vision_config={**reader, "image_size": 28, "patch_size": 14},
        qformer_config={**reader, "vocab_size": 9},
    )
    torch.manual_seed(0)
    model = transformers.Blip2ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(tmp_path)
    engine = LLMEngine(model=str(tmp_path), level=0, dtype="fp32")
    assert_logits(engine, tiny.prompt(24), model.language_model)
    engine.close()


HEARS = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 48, "num_mel_bins": 8,
         "downsample_hidden_size": 8}  # fmt: skip
OMNI = {**TEXT, "rope_parameters": MROPE, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SPEAK: dict[
    str, tuple[str, dict[str, Any], dict[str, Any]]
] = {  # the whole's name on the hub, fields of text and vision
    "Qwen2_5Omni": ("Qwen2_5OmniModel", OMNI, VISION),
    "Qwen3OmniMoe": (
        "Qwen3OmniMoeForConditionalGeneration",
        {**OMNI, **EXPERTS, "num_experts": 6, "head_dim": 12},
        {**VISION, "deepstack_visual_indexes": [0]},
    ),
}


@pytest.mark.parametrize("name", SPEAK)
def test_the_text_of_a_model_that_speaks_gives_the_logits_of_its_thinker(name: str, tmp_path: Path) -> None:
    architecture, text, vision = SPEAK[name]
    made: Any = getattr(transformers, f"{name}ThinkerForConditionalGeneration")
    torch.manual_seed(0)
    model = made(made.config_class(text_config=text, vision_config=vision, audio_config=HEARS)).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    thinker, whole = tmp_path / "thinker", tmp_path / "whole"
    model.save_pretrained(thinker)
    whole.mkdir()
    config = {
        "thinker_config": json.loads((thinker / "config.json").read_text()),
        "talker_config": {"text_config": {"hidden_size": 8}},
    }
    (whole / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    tensors = {f"thinker.{key}": tensor for key, tensor in load_file(thinker / "model.safetensors").items()}
    others = {key: torch.zeros(4) for key in ("talker.model.layers.0.a.weight", "token2wav.a.bias", "code2wav.b.bias")}
    save_file(tensors | others, whole / "model.safetensors")
    for folder in (thinker, whole):
        engine = LLMEngine(model=str(folder), level=0, dtype="fp32", kv_cache_memory=1 << 22)
        assert_logits(engine, tiny.prompt(24), model)
        engine.close()


def test_experts_stored_the_other_way_are_refused_by_name(tmp_path: Path) -> None:
    save("Qwen3VLMoe", tmp_path, is_original=False)
    with pytest.raises(CheckpointError, match=r"layers.0.mlp.experts.\w+ is \[6, .*\], the model expects \[6, "):
        LLMEngine(model=str(tmp_path), level=0, dtype="fp32")


@pytest.mark.parametrize(
    ("stored", "ours"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("visual.blocks.0.norm1.weight", None),
        ("model.visual.blocks.0.norm1.weight", None),
        ("vision_tower.vision_model.post_layernorm.bias", None),
        ("model.multi_modal_projector.norm.weight", None),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("model.connector.modality_projection.proj.weight", None),
        ("mm_projector.proj.0.weight", None),
        ("model.merger.mlp.0.linear_1.bias", None),
        ("mlp1.0.weight", None),
        ("image_newline", None),
        ("language_model.backbone.layers.0.norm.weight", "backbone.layers.0.norm.weight"),
        ("sound_encoder.encoder.layers.0.norm.weight", None),
        ("model.vq_adaptor.layers.0.weight", None),
        ("model.layerwise_projectors.0.norm.weight", None),
        ("thinker.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("thinker.visual.blocks.0.norm1.weight", None),
        ("model.vision_embed_tokens.wte.weight", "model.vision_embed_tokens.wte.weight"),
        ("model.high_res_vision_alpha", None),
        ("model.generation_head.proj_out.weight", None),
    ],
)
def test_names_of_the_text_are_those_of_the_text_model(stored: str, ours: str | None) -> None:
    assert text_name(stored) == ours
