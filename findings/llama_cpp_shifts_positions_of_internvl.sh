#!/usr/bin/env bash
# llama.cpp of xllamacpp 2026.10.11549 joins InternVL's class token after the patches, but its files have the position of
# that token first, as OpenGVLab's code and transformers read it: each patch gets the position of the one before it.
# Seen: with a block whose scales are 0, so that no patch sees the class token, another first position changes the
# answer's probabilities, another last one, that of the last patch, does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6 pillow==12.0.0
cd "$folder"
"$folder/venv/bin/python" - 2>/dev/null <<'P'
import base64
import io
import json
import sys
import urllib.request

import gguf
import numpy as np
import PIL.Image
import xllamacpp

LETTERS, SPECIAL, HIDDEN, PATCHES = [*"abcdefghijklmnop", "Ċ", "ab"], ["<img>", "</img>", "<IMG_CONTEXT>"], 32, 16
draw = np.random.default_rng(7).standard_normal


def finish(writer, tensors):
    for name, shape in tensors.items():
        is_norm = "norm" in name or "ln" in name or name.endswith("mlp.0.weight")
        made = np.ones(shape) if is_norm and name.endswith("weight") else draw(shape) * 0.2
        writer.add_tensor(name, np.zeros(shape, np.float32) if ".ls" in name else made.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_text(path):
    writer, words = gguf.GGUFWriter(path, "qwen2"), LETTERS + SPECIAL
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(LETTERS) + [3] * len(SPECIAL))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(LETTERS))
    square = {f"blk.0.{name}.weight": (HIDDEN, HIDDEN) for name in "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down".split()}
    bias = {f"blk.0.attn_{part}.bias": (HIDDEN,) for part in "qkv"}
    norms = dict.fromkeys(["blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"], (HIDDEN,))
    finish(writer, {"token_embd.weight": (len(words), HIDDEN), **square, **bias, **norms})


def write_tower(path, changed):
    global draw
    draw = np.random.default_rng(3).standard_normal
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("internvl")
    writer.add_vision_projection_dim(HIDDEN)
    writer.add_vision_image_size(16)
    writer.add_vision_patch_size(4)
    writer.add_vision_embedding_length(HIDDEN)
    writer.add_vision_feed_forward_length(HIDDEN)
    writer.add_vision_block_count(1)
    writer.add_vision_head_count(2)
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_attention_layernorm_eps(1e-6)
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(2)
    table = np.random.default_rng(5).standard_normal((1, PATCHES + 1, HIDDEN)).astype(np.float32)
    if changed is not None:
        table[:, changed] *= -3
    writer.add_tensor("v.position_embd.weight", table)
    square = [f"v.blk.0.{name}" for name in "attn_q attn_k attn_v attn_out ffn_up ffn_down".split()]
    shapes = {f"{name}.weight": (HIDDEN, HIDDEN) for name in square} | {f"{name}.bias": (HIDDEN,) for name in square}
    shapes |= {f"v.blk.0.{name}.{kind}": (HIDDEN,) for name in ("ln1", "ln2") for kind in ("weight", "bias")}
    shapes |= {"v.blk.0.ls1.weight": (HIDDEN,), "v.blk.0.ls2.weight": (HIDDEN,), "v.class_embd": (1, 1, HIDDEN)}
    shapes |= {"v.patch_embd.weight": (HIDDEN, 3, 4, 4), "v.patch_embd.bias": (HIDDEN,), "mm.model.mlp.0.weight": (4 * HIDDEN,)}
    shapes |= {"mm.model.mlp.0.bias": (4 * HIDDEN,), "mm.model.mlp.1.weight": (HIDDEN, 4 * HIDDEN), "mm.model.mlp.1.bias": (HIDDEN,)}
    finish(writer, {**shapes, "mm.model.mlp.3.weight": (HIDDEN, HIDDEN), "mm.model.mlp.3.bias": (HIDDEN,)})


def ask(path):
    params = xllamacpp.CommonParams()
    params.model.path, params.mmproj.path = "text.gguf", path
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.mmproj_use_gpu = 256, 1, 0, False
    server = xllamacpp.Server(params)
    with urllib.request.urlopen(f"{server.listening_address}/props") as props:
        marker = json.load(props)["media_marker"]
    file = io.BytesIO()
    PIL.Image.fromarray(np.random.default_rng(1).integers(0, 256, (16, 16, 3), np.uint8)).save(file, "PNG")
    prompt = {"prompt_string": f"a{marker}b", "multimodal_data": [base64.b64encode(file.getvalue()).decode()]}
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": len(LETTERS + SPECIAL)}
    with urllib.request.urlopen(f"{server.listening_address}/completion", json.dumps(body).encode()) as answer:
        (made,) = json.load(answer)["completion_probabilities"]
    return {each["id"]: each["logprob"] for each in made["top_logprobs"]}


write_text("text.gguf")
answers = {}
for changed in (None, 0, PATCHES):
    write_tower(f"{changed}.gguf", changed)
    answers[changed] = ask(f"{changed}.gguf")
first, last = (max(abs(answers[row][id] - answers[None][id]) for id in answers[None]) for row in (0, PATCHES))
print(f"another first position: {first:.4f}, another last one: {last:.4f}")
sys.exit(not (first > 0.01 and last < 1e-5))
P
