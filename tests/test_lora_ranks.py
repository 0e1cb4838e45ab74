"""LoRA adapters over several ranks: tokens are those of PEFT's own model, and all ranks load an adapter or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapters
import pytest
import tiny
from rank_checks import GREEDY, eventful_prompts, rank_processes
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks, thread_ranks

from atom import LLMEngine
from atom.errors import CheckpointError, RequestError

__all__ = ["thread_ranks"]

pytestmark = pytest.mark.early

Open = Callable[..., LLMEngine]
EVENTFUL = {"num_kvcache_blocks": 22, "block_size": 4, "max_model_len": 76, "max_num_batched_tokens": 16,
            "enable_prefix_caching": True, "max_loras": 3, "max_lora_rank": 8}  # fmt: skip
MLA = ["q_proj", "kv_a_proj_with_mqa", "o_proj"]
MIXTURE = {"target_modules": ["q_proj", "v_proj", "o_proj"]}


@pytest.mark.parametrize(
    ("name", "level", "divided", "fields"),
    [
        ("qwen3", 1, {"tensor_parallel_size": 2}, {"rank_pattern": {"q_proj": 2, r".*\.1\.mlp\.down_proj": 7}}),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("llama_three_groups", 1, {"tensor_parallel_size": 3}, {}),  # a width of 80 is filled up
            ("qwen3_moe", 1, {"parallel.data": 2, "parallel.experts": 2}, MIXTURE),
            ("llama_tied", 1, {"pipeline_parallel_size": 2}, {}),
            ("llama", 0, {"tensor_parallel_size": 2}, {}),
            ("llama", 1, {"tensor_parallel_size": 4}, {"use_rslora": True, "r": 3}),  # each of 2 kv heads on 2 ranks
            ("llama_biases", 1, {"tensor_parallel_size": 2}, {}),
            ("phi3", 0, {"tensor_parallel_size": 2}, {}),
            ("phi3", 1, {"tensor_parallel_size": 2}, {}),
            ("olmo2", 1, {"tensor_parallel_size": 2}, {}),
            ("deepseek_v2", 1, {"tensor_parallel_size": 2}, {"target_modules": MLA}),
            ("qwen2_moe", 1, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, {}),
            ("qwen3_moe", 0, {"parallel.pipeline": 3, "tensor_parallel_size": 2}, MIXTURE),
        )),
    ],
)  # fmt: skip
def test_ranks_generate_the_tokens_of_peft(
    name: str, level: int, divided: dict[str, Any], fields: dict[str, Any],
    thread_ranks: list[ThreadRanks], open_engine: Open, checkpoints: Callable[[str], Path], tmp_path: Path,
):  # fmt: skip
    folder = checkpoints(name)
    saved = {
        each: adapters.save_with_peft(tiny.reference(folder), tmp_path / each, seed, **fields)
        for seed, each in enumerate(("sql", "chat"))
    }
    models = {each: adapters.load_with_peft(tiny.reference(folder), path) for each, path in saved.items()}
    models[""] = tiny.reference(folder)
    engine = open_engine(
        name, level=level, lora_modules={each: str(path) for each, path in saved.items()}, **EVENTFUL, **divided
    )
    prompts, names = eventful_prompts(), ["sql", "chat", ""]
    for own in (names, names[::-1], names):
        answers = engine.generate(prompts, GREEDY, adapters=[each or None for each in own])
        for answer, prompt, each in zip(answers, prompts, own, strict=True):
            tiny.assert_greedy(answer, prompt, models[each])
    metrics = engine.metrics.scheduler
    assert metrics.num_chunks > 0 and metrics.num_prefix_hit_tokens > 0
    assert thread_ranks[0].meeting.num_collectives > metrics.num_steps


def test_room_for_adapters_changes_no_random_weights(thread_ranks: list[ThreadRanks], open_engine: Open):
    fields = {"load_dummy": True, "tensor_parallel_size": 2}
    without, with_room = (open_engine("llama", **fields, enable_lora=room) for room in (False, True))
    (wanted,), (found,) = (engine.generate([tiny.prompt(20)], GREEDY) for engine in (without, with_room))
    assert found["token_ids"] == wanted["token_ids"]


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "divided"),
    [
        ("llama", {"tensor_parallel_size": 2}),
        ("llama", {"pipeline_parallel_size": 2}),
        ("qwen3_moe", {"parallel.data": 2}),
    ],
)
def test_processes_of_ranks_load_and_drop_adapters_while_they_serve(
    name: str, divided: dict[str, Any], open_engine: Open, references: Any, tmp_path: Path
):
    model, prompts = references(name), [tiny.prompt(20), tiny.prompt(33, seed=1)]
    folders = [adapters.save(model, tmp_path / f"a{seed}", seed=seed) for seed in range(2)]
    engine = open_engine(name, enable_lora=True, max_loras=1, enable_prefix_caching=True, block_size=4, **divided)
    assert len(rank_processes()) == 1
    engine.add_request(prompts[:1], GREEDY)
    engine.step()
    engine.load_lora_adapter("sql", str(folders[0]))
    engine.add_request(prompts[1:], GREEDY, adapters="sql")
    engine.step()
    engine.unload_lora_adapter("sql")
    ended = []
    while not engine.is_finished():
        ended += engine.step()
    answers = {tuple(each.prompt): each.output for each in ended}
    for prompt, reference in zip(prompts, (model, adapters.merge(model, folders[0])), strict=True):
        tiny.assert_greedy({"token_ids": answers[tuple(prompt)]}, prompt, reference)
    engine.load_lora_adapter("sql", str(folders[1]))
    (answer,) = engine.generate(prompts[1:], GREEDY, adapters="sql")
    tiny.assert_greedy(answer, prompts[1], adapters.merge(model, folders[1]))
    engine.close()
    assert rank_processes() == []


@pytest.mark.slow
def test_an_adapter_that_a_rank_cannot_read_is_refused_on_all(open_engine: Open, references: Any, tmp_path: Path):
    model, prompt = references("llama"), tiny.prompt(20)
    folders = [adapters.save(model, tmp_path / f"a{seed}", seed=seed) for seed in range(3)]
    engine = open_engine("llama", enable_lora=True, max_loras=1, tensor_parallel_size=2)
    loras = engine._engine.loras
    read = [loras.read(str(folder)) for folder in folders]  # by the rank that drives, as on a host of its own
    (folders[0] / "adapter_config.json").unlink()
    with pytest.raises(RequestError, match=r"rank 1: .*a0 has no adapter_config.json"):
        loras.load("sql", read[0])
    (folders[1] / "adapter_model.safetensors").write_bytes((folders[2] / "adapter_model.safetensors").read_bytes())
    with pytest.raises(RequestError, match=r"rank 1: .*a1 has other files than on the host that drives"):
        loras.load("sql", read[1])
    with pytest.raises(RequestError, match="there is no adapter sql"):
        engine.generate([prompt], GREEDY, adapters="sql")
    loras.load("sql", read[2])
    (answer,) = engine.generate([prompt], GREEDY, adapters="sql")
    tiny.assert_greedy(answer, prompt, adapters.merge(model, folders[2]))


def test_the_driver_checks_the_modules_of_all_stages(
    thread_ranks: list[ThreadRanks], open_engine: Open, references: Any, tmp_path: Path
):
    folder = adapters.save(references("llama"), tmp_path / "sql")
    name = "base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({**weights, name: weights[name][:-1].clone()}, folder / "adapter_model.safetensors")
    engine = open_engine("llama", enable_lora=True, pipeline_parallel_size=2)
    with pytest.raises(
        CheckpointError, match=r"layers.2.mlp.up_proj.lora_B.weight is \[79, 4\], the model expects \[80, 4\]"
    ):
        engine.load_lora_adapter("sql", str(folder))
