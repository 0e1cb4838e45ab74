"""Random LoRA adapters in folders as PEFT writes them, and a model with one merged into its weights.

adapters.save(model, tmp_path / "sql", targets=("q_proj", "down_proj"), rank=4, alpha=8)
merged = adapters.merge(model, tmp_path / "sql")      # W + alpha / r · B A, in float32
folder = adapters.save_with_peft(model, tmp_path / "sql", r=4)
adapted = adapters.load_with_peft(tiny.reference(checkpoint), folder)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save(model: Any, folder: Path, targets: Sequence[str] = ALL, rank: int = 4, alpha: float = 8, seed: int = 0,
         size: float = 0.3, **fields: Any) -> Path:  # fmt: skip
    """fields: of adapter_config.json"""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            for factor, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensors[f"base_model.model.{name}.lora_{factor}.weight"] = size * torch.randn(
                    shape, generator=generator
                )
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields_of_config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": [*targets],
        "bias": "none",
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields_of_config))
    return folder


def save_with_peft(model: Any, folder: Path, seed: int = 0, **fields: Any) -> Path:
    """An adapter that PEFT has made of random factors and written, of all linears unless the fields say otherwise.

    model: one that is used no more, since PEFT changes its modules
    """
    torch.manual_seed(seed)
    fields_of_config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **fields}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**fields_of_config, init_lora_weights=False))
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn_like(weight) * 0.3
    adapted.save_pretrained(folder)
    return folder


def load_with_peft(model: Any, folder: Path) -> Any:
    """The model with an adapter next to its weights, as PEFT computes it. model: as in `save_with_peft`"""
    return peft.PeftModel.from_pretrained(model, folder).eval()


def merge(model: Any, folder: Path) -> Any:
    """A copy of the model, whose weights are those with the adapter."""
    merged, tensors = copy.deepcopy(model), load_file(folder / "adapter_model.safetensors")
    fields_of_config = json.loads((folder / "adapter_config.json").read_text())
    for name in (key for key in tensors if ".lora_A." in key):
        module = merged.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        delta = tensors[name.replace(".lora_A.", ".lora_B.")] @ tensors[name]
        module.weight.data += fields_of_config["lora_alpha"] / fields_of_config["r"] * delta
    return merged
