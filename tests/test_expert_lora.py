"""LoRA adapters of experts, as PEFT writes them: tokens are those of PEFT's own model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters
import pytest
import tiny
import torch
from rank_checks import GREEDY, eventful_prompts
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks, thread_ranks

from atom import LLMEngine
from atom.config.load import load
from atom.errors import AtomError, CheckpointError, ConfigError

__all__ = ["thread_ranks"]

pytestmark = pytest.mark.early

Open = Callable[..., LLMEngine]
EVENTFUL = {"num_kvcache_blocks": 22, "block_size": 4, "max_model_len": 76, "max_num_batched_tokens": 16,
            "lora_experts": True, "max_loras": 2, "max_lora_rank": 8}  # fmt: skip
PARAMETERS = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
DOWN = {**PARAMETERS, "target_parameters": ["mlp.experts.down_proj"]}


def save_of_each_expert(model: Any, folder: Path, seed: int = 0, rank: int = 3) -> Path:
    """An adapter of Mixtral as PEFT wrote it when transformers had a module for each expert."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    sizes = {"w1": (80, 48), "w2": (48, 80), "w3": (80, 48)}
    for layer in range(3):
        for expert in range(8):
            for name, (outputs, inputs) in sizes.items():
                module = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                for factor, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    tensors[f"{module}.lora_{factor}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 5, "target_modules": [*sizes], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("name", "level", "divided", "fields"),
    [
        ("qwen3_moe", 0, {}, PARAMETERS),
        ("qwen3_moe", 1, {}, {**PARAMETERS, "use_rslora": True, "rank_pattern": {r".*\.gate_up_proj": 7}}),
        ("qwen3_moe", 1, {}, DOWN),
        ("qwen3_moe_dense_list", 1, {}, PARAMETERS),
        ("mixtral", 1, {}, {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
        ("mixtral", 1, {}, None),
        ("deepseek_v2", 1, {}, PARAMETERS),
        ("gpt_oss", 1, {}, PARAMETERS),
        ("qwen3_moe", 1, {"tensor_parallel_size": 2}, PARAMETERS),
        ("gpt_oss", 1, {"tensor_parallel_size": 2}, PARAMETERS),
        ("qwen3_moe_dense_list", 1, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, PARAMETERS),
        ("mixtral_odd", 0, {"tensor_parallel_size": 3}, PARAMETERS),  # a width of 28 is filled up
        ("qwen3_moe", 1, {"parallel.data": 2, "parallel.experts": 2}, PARAMETERS),
        ("qwen3_moe", 1, {"parallel.data": 2, "parallel.experts": 2, "parallel.dispatch": "dispatch"}, PARAMETERS),
        ("qwen3_moe", 1, {"parallel.data": 2, "tensor_parallel_size": 2, "parallel.experts": 2}, PARAMETERS),
        ("mixtral", 1, {"pipeline_parallel_size": 2}, None),
    ],
)  # fmt: skip
def test_experts_generate_the_tokens_of_peft(
    name: str, level: int, divided: dict[str, Any], fields: dict[str, Any] | None,
    thread_ranks: list[ThreadRanks], open_engine: Open, checkpoints: Callable[[str], Path], tmp_path: Path,
):  # fmt: skip
    folder, saved = checkpoints(name), {}
    for seed, each in enumerate(("sql", "chat")):
        model = tiny.reference(folder)
        saved[each] = (
            save_of_each_expert(model, tmp_path / each, seed)
            if fields is None
            else adapters.save_with_peft(model, tmp_path / each, seed, **fields)
        )
    models = {each: adapters.load_with_peft(tiny.reference(folder), path) for each, path in saved.items()}
    models[""] = tiny.reference(folder)
    modules = {each: str(path) for each, path in saved.items()}
    engine = open_engine(name, level=level, lora_modules=modules, **EVENTFUL, **divided)
    prompts, names = eventful_prompts(), ["sql", "chat", ""]
    for own in (names, names[::-1]):
        answers = engine.generate(prompts, GREEDY, adapters=[each or None for each in own])
        for answer, prompt, each in zip(answers, prompts, own, strict=True):
            tiny.assert_greedy(answer, prompt, models[each])
    assert engine.metrics.scheduler.num_chunks > 0 and len(thread_ranks) == bool(divided)


def change(folder: Path, change_tensors: Callable[[dict[str, torch.Tensor]], object], **fields: Any) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change_tensors(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


EXPERTS = "base_model.model.model.layers.1.mlp.experts."
INNER = f"{EXPERTS}base_layer."
REFUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], dict[str, Any], type[AtomError], str]] = {
    "outputs": (lambda t: t.update({INNER + "lora_B.weight": torch.ones(46, 64), EXPERTS + "lora_A.weight": torch.ones(64, 23)}), {},
                CheckpointError, r"base_layer.lora_B.weight is \[46, 64\], the model expects \[48, 64\]"),
    "rank": (lambda t: None, {"rank_pattern": {"gate_up_proj": 8}},
             CheckpointError, r"base_layer.lora_A.weight is \[64, 48\], the model expects \[128, 48\]"),
    "half": (lambda t: t.pop(INNER + "lora_B.weight"), {}, CheckpointError, "base_layer.lora_A.weight stands without its other factor"),
    "which": (lambda t: [t.pop(INNER + f"lora_{factor}.weight") for factor in "AB"], {}, CheckpointError,
              r"experts.lora_A.weight: target_parameters=\[.*\] does not say what it is of"),
    "sizes": (lambda t: t.update({EXPERTS + "lora_A.weight": torch.ones(64, 20)}), {}, CheckpointError, "are not of a gate_up and a down projection"),
    "nan": (lambda t: t.update({EXPERTS + "lora_B.weight": torch.full((48, 64), torch.nan)}), {}, CheckpointError, "experts.lora_B.weight has values that"),
    "too many": (lambda t: t.update({f"{EXPERTS}16.up_proj.lora_{factor}.weight": torch.ones(*((4, 48) if factor == "A" else (24, 4))) for factor in "AB"}) or
                 [t.pop(key) for key in list(t) if "layers.1" in key and ".16." not in key], {}, CheckpointError, "is of expert 16, the model has 16"),
}  # fmt: skip


@pytest.fixture(scope="module")
def roomy(checkpoints: Callable[[str], Path]) -> LLMEngine:
    return LLMEngine(str(checkpoints("qwen3_moe")), dtype="fp32", level=0, lora_experts=True, kv_cache_memory=1 << 22)


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    case: str, roomy: LLMEngine, checkpoints: Callable[[str], Path], tmp_path: Path
):
    spoil, fields, kind, reason = REFUSED[case]
    folder = adapters.save_with_peft(tiny.reference(checkpoints("qwen3_moe")), tmp_path / "sql", **PARAMETERS)
    change(folder, spoil, **fields)
    with pytest.raises(kind, match=reason):
        roomy.load_lora_adapter("sql", str(folder))


@pytest.mark.slow
def test_an_adapter_of_experts_needs_room_of_its_own(
    open_engine: Open, checkpoints: Callable[[str], Path], tmp_path: Path
):
    folder = adapters.save_with_peft(tiny.reference(checkpoints("qwen3_moe")), tmp_path / "sql", **PARAMETERS)
    with pytest.raises(ConfigError, match=r"has no room: set serve.lora_experts=true"):
        open_engine("qwen3_moe", lora_modules={"sql": str(folder)})
    other = save_of_each_expert(None, tmp_path / "chat", rank=9)
    with pytest.raises(ConfigError, match=r"w1.lora_A.weight has rank 18: set serve.max_lora_rank=18"):  # of w1 and w3
        open_engine("mixtral", lora_modules={"chat": str(other)}, lora_experts=True)
    with pytest.raises(ConfigError, match=r"serve.lora_experts=true: the model has no experts"):
        load([f"checkpoint={checkpoints('llama')}", "serve.lora_experts=true"])
