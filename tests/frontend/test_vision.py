"""Models that read images: rows of the tower and logits at every position, against transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
import vision
from image_engines import load_with_images
from law import assert_same_logits
from torch import Tensor

from atom import weights
from atom.checkpoint import SilentProgress
from atom.compiler import compile_graph, compile_model, semantic_graph
from atom.config import Config
from atom.config.checkpoint import open_for
from atom.errors import AtomError
from atom.graph import Graph, Mesh, Recipe, interpret, interpret_ranks, ops, show, verify
from atom.images.encoder_inputs import encoder_inputs
from atom.runtime.step.program import Bindings, Executable


def read(config: Config, graph: Graph) -> Callable[[Recipe], Any]:
    checkpoint = open_for(config, SilentProgress())
    weights.check(graph, checkpoint.tensors, config.model.ignore)
    return weights.load(graph.recipes(), checkpoint, SilentProgress()).__getitem__


def interpret_vision(graph: Graph, config: Config, prompt: vision.Prompt, own: Callable[[Recipe], Any]) -> Tensor:
    """The rows of all images, in their order."""
    assert config.model.vision is not None
    inputs, order = encoder_inputs(prompt.images, config.model.vision)
    named = {node.name: torch.from_numpy(inputs[node.name].copy()) for node in graph.programs["vision"].inputs}
    made = interpret(graph, "vision", named, own)
    rows = torch.empty_like(made)
    rows[order] = made
    return rows


@torch.inference_mode()
def assert_same_as_transformers(config: Config, model: Any) -> None:
    graph, prompt = semantic_graph(config), vision.make_prompt(model)
    verify(graph, ops.SEMANTIC)
    own = read(config, graph)
    rows = interpret_vision(graph, config, prompt, own)
    assert_same_logits(rows, vision.encode(model, prompt))
    shuffled = torch.randperm(len(rows) + 2)[: len(rows)]  # the host places rows as it likes
    encoded = torch.full((len(rows) + 2, rows.shape[1]), float("nan"))
    encoded[shuffled] = rows
    placed = prompt.rows
    body = {
        "tokens": prompt.text,
        "positions": torch.arange(len(placed)),
        "rows": torch.where(placed >= 0, shuffled[placed.clamp(min=0)].int(), -1).int(),
        "encoded": encoded,
        "rope_positions": vision.rope_positions(model, prompt),
    }
    hidden = interpret(graph, "body", body, own)
    assert_same_logits(interpret(graph, "head", {"hidden": hidden}, own), vision.logits(model, prompt))


@pytest.mark.parametrize("name", vision.MODELS)
def test_rows_and_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = vision.save(name, tmp_path)
    assert_same_as_transformers(load_with_images(tmp_path), model)


@pytest.mark.parametrize("name", [name for name in vision.MODELS if not name.startswith("Glm")])
def test_a_tower_may_be_an_mmproj_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, path = tmp_path / "model", tmp_path / "tiny.gguf"
    text, tower = vision.MODELS[name]
    if "window_size" in tower:  # of 112 pixels, as all these files mean
        monkeypatch.setitem(vision.MODELS, name, (text, {**tower, "patch_size": 28, "window_size": 112}))
    if "mscale" in (rope := text.get("rope_parameters", {})):  # of which files have one
        rope = {**rope, "mscale": rope["mscale_all_dim"]}
        tower = {**tower, "num_attention_heads": 2}  # of three pairs by axis: of two, either order is its own reverse
        monkeypatch.setitem(vision.MODELS, name, ({**text, "rope_parameters": rope}, tower))
    model = vision.save(name, folder)
    gguf_files.convert(folder, path)
    gguf_files.convert_tower(folder, tmp_path / "mmproj-tiny.gguf")
    assert_same_as_transformers(load_with_images(path), model)


HUB_FIELDS = {  # of the hub's config.json of Kimi-K2.5, as vLLM's KimiK25VisionConfig has them
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
    "pos_emb_time": "init_pos_emb_time",
    "hidden_size": "vt_hidden_size",
    "num_hidden_layers": "vt_num_hidden_layers",
    "num_attention_heads": "vt_num_attention_heads",
    "intermediate_size": "vt_intermediate_size",
}
MEDIA = {  # as `media_proc_cfg` of the hub's preprocessor_config.json, with other limits
    "patch_size": 4,
    "merge_kernel_size": 2,
    "image_mean": vision.PROCESSOR["image_mean"],
    "image_std": vision.PROCESSOR["image_std"],
    "in_patch_limit": 1000,
    "patch_limit_on_one_side": 60,
    "fixed_output_tokens": None,
}


def write_kimi_as_on_the_hub(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    tower = {HUB_FIELDS.get(key, key): value for key, value in config["vision_config"].items()}
    del config["projection_layer_norm_eps"]
    config["media_placeholder_token_id"] = config.pop("image_token_id")
    config["vision_config"] = tower | {"merge_type": "sd2_tpool", "projector_ln_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": MEDIA}))


def test_a_config_of_the_hub_describes_the_same_tower(tmp_path: Path) -> None:
    vision.save("Kimi_K25", tmp_path)
    limits = {"max_patches": 1000, "size": {"max_height": 60, "max_width": 60}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**vision.PROCESSOR, **limits}))
    saved = load_with_images(tmp_path).model.vision
    write_kimi_as_on_the_hub(tmp_path)
    found = load_with_images(tmp_path).model.vision
    assert found is not None and found == saved
    assert (found.max_pixels, found.max_edge, found.token) == (16_000, 240, vision.IMAGE)
    media = json.dumps({"media_proc_cfg": {**MEDIA, "fixed_output_tokens": 64}})
    (tmp_path / "preprocessor_config.json").write_text(media)
    with pytest.raises(AtomError, match=r"fixed_output_tokens=64 in its config.json is not supported"):
        load_with_images(tmp_path)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["Qwen3VL", "Glm4v"])
def test_two_ranks_divide_the_heads_of_the_tower(name: str, tmp_path: Path) -> None:
    model = vision.save(name, tmp_path)
    config, mesh = load_with_images(tmp_path, "parallel.tensor=2", "level=0"), Mesh(2)
    graph, prompt, checkpoint = compile_graph(config), vision.make_prompt(model), open_for(config, SilentProgress())
    tensors = [
        weights.load(graph.recipes(), checkpoint, SilentProgress(), coordinates=mesh.coordinates(rank))
        for rank in range(2)
    ]
    (attention, *_) = (node for node in graph.programs["vision"].nodes if node.target is ops.segment_attention)
    assert attention.meta["type"].shape[1:] == (2, 8)
    inputs = {"patches": prompt.patches, "places": prompt.places, "starts": prompt.starts}
    made = interpret_ranks([graph], "vision", [inputs] * 2, [each.__getitem__ for each in tensors], mesh)
    for rows in made:
        assert_same_logits(rows, vision.encode(model, prompt))


@torch.inference_mode()
@pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kernels_give_the_rows_of_transformers(level: int, tmp_path: Path) -> None:
    model = vision.save("Qwen2_5_VL", tmp_path / "model")
    config = load_with_images(tmp_path / "model", f"level={level}")
    compiled, prompt = compile_model(config), vision.make_prompt(model)
    own = weights.load(compiled.graph.recipes(), open_for(config, SilentProgress()), SilentProgress())
    assert config.model.vision is not None
    inputs, order = encoder_inputs(prompt.images, config.model.vision)
    encode = Executable(compiled.graph.programs["vision"], Bindings(own, compiled.code))
    (made,) = encode({name: torch.from_numpy(each.copy()) for name, each in inputs.items()})
    assert_same_logits(made, vision.encode(model, prompt)[order])


def test_a_tower_is_read_only_if_images_are(tmp_path: Path) -> None:
    vision.save("Qwen3VL", tmp_path)
    config = load_with_images(tmp_path, "serve.images=false")
    graph = semantic_graph(config)
    assert "vision" not in graph.programs and "rotary_sections" not in show(graph)
    assert not any(name.startswith("visual") for name in open_for(config, SilentProgress()).tensors)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.vision.deepstack=[4]", "deepstack=.* the tower has 4 layers"),
        ("model.vision.heads=5", "hidden=32 does not divide into heads of a multiple of 4 dims; heads=5"),
        ("model.attention.rope.sections=[1,1,1]", "are not of 6 frequencies"),
        ("model.vision.out=40", "out=40: hidden states of the body have 48 numbers"),
        ("model.vision.window=2", "window is of layers of type sliding_attention"),
        ("model.vision.merger.standardize=true", "pool=join: scale and standardize are of pool=mean"),
        ("model.vision.merger={norm:none,norm_kind:layer}", "norm_kind=layer: the merger has no norm"),
        ("model.vision.merger.fold_bias=true", "fold_bias=true: no linear folds a square"),
        ("model=qwen3", "model=qwen3 has no encoder of model_type=qwen3_vl"),
    ],
)
def test_what_a_tower_does_not_fit_is_refused(override: str, says: str, tmp_path: Path) -> None:
    vision.save("Qwen3VL", tmp_path)
    with pytest.raises(AtomError, match=says):
        load_with_images(tmp_path, override)
