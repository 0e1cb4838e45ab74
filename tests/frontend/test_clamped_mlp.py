"""Clamped gates in dense, shared and routed experts, against the modules of transformers that have them."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from semantic import assert_same_as_transformers
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts, DeepseekV4MLP
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLDenseMLP, MiniMaxM3VLExperts
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts, Step3p7MLP

from atom.config.load import load
from atom.errors import AtomError

NONE = float("inf")


class Case(NamedTuple):
    """Modules of transformers, and what config says of layers that have limits."""

    mlp: type
    experts: type
    overrides: dict[str, list[str]]  # of the dense layer, and of those with experts
    limits: dict[str, list[float]]  # by layer


CASES = {
    "silu": Case(
        DeepseekV4MLP, DeepseekV4Experts, {"dense": ["limit=0.4"], "experts": ["limit=0.5", "shared_limits=[0,0,0.7]"]},
        {"dense": [0.4], "shared": [NONE, NONE, 0.7], "routed": [NONE, 0.5, 0.5]},
    ),
    "swiglustep": Case(
        Step3p7MLP, Step3p7Experts,
        {"dense": ["activation=swiglustep", "limits=[0.3,0,0.7]"],
         "experts": ["activation=swiglustep", "limits=[0,null,0.4]", "shared_limits=[0.3,0,0.7]"]},
        {"dense": [0.3], "shared": [NONE, NONE, 0.7], "routed": [NONE, NONE, 0.4]},
    ),
    "swigluoai": Case(
        MiniMaxM3VLDenseMLP, MiniMaxM3VLExperts,
        {"dense": ["activation=swigluoai"], "experts": ["activation=swigluoai", "limit=0.6"]},
        {"dense": [7.0], "shared": [0.6] * 3, "routed": [0.6] * 3},
    ),
}  # fmt: skip


def clamped(model: Any, case: Case) -> Any:
    """The model, with the other modules' forward and their limits."""
    for number, layer in enumerate(model.model.layers):
        parts = {"routed": layer.mlp.experts, "shared": layer.mlp.shared_experts} if number else {"dense": layer.mlp}
        for name, module in parts.items():
            module.limit = module.swiglu_limit = case.limits[name][number]
            module.swiglu_alpha = 1.702
            if name == "routed":
                module._apply_gate = MethodType(case.experts._apply_gate, module)
                module.forward = MethodType(Step3p7Experts.forward, module)
                continue
            gate, up = module.gate_proj, module.up_proj
            object.__setattr__(module, "gate_up_proj", lambda x, gate=gate, up=up: torch.cat((gate(x), up(x)), -1))
            module.forward = MethodType(case.mlp.forward, module)
    return model.eval()


@pytest.mark.parametrize("name", CASES)
def test_clamped_gates_give_the_logits_of_transformers(name: str, tmp_path: Path):
    case, folder = CASES[name], tmp_path / "glm4_moe"
    model = tiny.save_changed("glm4_moe", folder)
    overrides = [
        f"model.mlp.{at}.{each}" for at, kind in enumerate(("experts", "dense")) for each in case.overrides[kind]
    ]
    assert_same_as_transformers(load([f"checkpoint={folder}", "dtype=fp32", *overrides]), clamped(model, case))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.mlp.0.limits=[0.5]", "model.mlp.0.limits names only 1 layers, the model has 3"),
        ("model.mlp.0.shared_limits=[0,-1,0]", r"model.mlp.0.shared_limits: -1.0 is not a number from 0"),
        ("model.mlp.0={activation: swigluoai, limits: [0,1,1]}", "model.mlp.0.limits: swigluoai needs a limit in each layer"),
        ("model.mlp.0={expert: plain, limit: 2}", "model.mlp.0: limits are for gated mlps, not for plain ones"),
        ("model.mlp.1={kind: plain, activation: swiglustep}", "activation=swiglustep is for gated mlps, not for plain ones"),
        ("model.mlp.1.activation=xielu", "model.mlp.1.activation=xielu is for kind plain, not for kind gated"),
    ],
)  # fmt: skip
def test_limits_that_do_not_fit_are_refused_in_one_line(override: str, message: str, tmp_path: Path):
    folder = tiny.save("glm4_moe", tmp_path)
    with pytest.raises(AtomError, match=message) as raised:
        load([f"checkpoint={folder}", override])
    assert "\n" not in str(raised.value)
