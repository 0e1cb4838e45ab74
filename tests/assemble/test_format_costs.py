"""Groups of modules, and the KL divergence of rounded weights against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from atom import weights
from atom.assemble.format_costs import Group, KLMeter, find_groups
from atom.checkpoint import SILENT, open_checkpoint
from atom.config import QuantConfig
from atom.config.load import load
from atom.frontend import build
from atom.graph import Graph, Quantize, Recipe

MARKED = QuantConfig(fmt="int8[1, *]", act="none")
PROMPTS = [tiny.prompt(9), tiny.prompt(5, seed=1)]


def write(name: str, folder: Path) -> tuple[Graph, Path]:
    """A model's semantic text, whose linears are packed, and its checkpoint."""
    made = tiny.save(name, folder)
    return build(load([f"checkpoint={made}", "dtype=fp32"]).model, "fp32", "fp32", MARKED), made


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("llama", [["q_proj", "k_proj", "v_proj"], ["o_proj"]], [["gate_proj", "up_proj"], ["down_proj"]]),
        ("phi3", [["qkv_proj"], ["o_proj"]], [["gate_up_proj"], ["down_proj"]]),
        (
            "deepseek_v2",  # the shared expert is one with those next to it, which fuse_shared_experts joins
            [["q_proj", "kv_a_proj_with_mqa"], ["o_proj"]],
            [["o_proj"], ["gate_proj", "down_proj", "gate_proj", "up_proj", "down_proj"]],
        ),
    ],
)
def test_groups_are_what_passes_fuse(name: str, first: list[list[str]], last: list[list[str]], tmp_path: Path):
    graph, _ = write(name, tmp_path)
    groups = find_groups(graph)
    found = [[module.rpartition(".")[2] for module in group.modules] for group in groups]
    assert found[:2] == first and found[-2:] == last
    assert {weight for group in groups for weight in group.weights} == {
        recipe for recipe in graph.recipes() if isinstance(recipe, Quantize)
    }


def rounded(tensor: Tensor) -> Tensor:
    scale = tensor.abs().amax(1, keepdim=True) / 7
    return (tensor / scale).round() * scale


def expected(folder: Path, modules: list[str]) -> float:
    """The mean of transformers' KL divergence over all positions, with these modules rounded."""
    tensors = load_file(folder / "model.safetensors")
    plain, changed = tiny.reference(folder), tiny.reference(folder)
    for module in modules:
        changed.get_submodule(module).weight.data = rounded(tensors[f"{module}.weight"])
    of_prompts = [
        F.kl_div(
            tiny.logits(changed, prompt).log_softmax(-1),
            tiny.logits(plain, prompt).log_softmax(-1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        for prompt in PROMPTS
    ]
    return float(torch.cat(of_prompts).mean())


def test_divergence_is_that_of_transformers_from_any_group_on(tmp_path: Path):
    graph, folder = write("llama", tmp_path)
    groups, checkpoint = find_groups(graph), open_checkpoint(str(folder))
    parts = {recipe: recipe.part if isinstance(recipe, Quantize) else recipe for recipe in graph.recipes()}
    loaded = weights.load(parts.values(), checkpoint, SILENT)
    plain: dict[Recipe, Tensor] = {recipe: loaded[part] for recipe, part in parts.items()}  # type: ignore[misc]

    def of(group: Group) -> Mapping[Recipe, Tensor]:
        return {weight: rounded(plain[weight]) for weight in group.weights}

    meter = KLMeter(graph, PROMPTS, plain)
    assert meter.measure(plain) == 0
    kl = meter.measure({**plain, **of(groups[0]), **of(groups[7])})
    assert kl == pytest.approx(expected(folder, groups[0].modules + groups[7].modules), rel=1e-3)
    for group in (groups[0], groups[2], groups[7]):
        meter.advance(group, plain)
        assert meter.measure({**plain, **of(group)}) == pytest.approx(expected(folder, group.modules), rel=1e-3)
    meter.rewind()
    assert meter.measure({**plain, **of(groups[0]), **of(groups[7])}) == kl
