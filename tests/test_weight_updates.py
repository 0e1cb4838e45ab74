"""Weights updated in place: the bits of a fresh load and transformers' log probabilities, or nothing has changed."""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapters
import gguf_files
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_quantized import LAYOUTS, WIDE, pack
from thread_ranks import ThreadRanks, thread_ranks
from torch import Tensor

from atom import AsyncLLMEngine, LLMEngine, SamplingParams
from atom.checkpoint import SILENT
from atom.config.checkpoint import open_for
from atom.errors import RequestError, UnsupportedError, WeightsIncompleteError
from atom.graph import TORCH_DTYPES
from atom.kernels.broadcast import read_id
from atom.runtime.weight_updates import RankWeights
from atom.trainer import SharedWeights
from atom.weights.evaluate import tensors_in
from atom.weights.shared_file import describe_tensors
from atom.weights.transfers import InitInfo, NCCLTransfer, UpdateInfo, cut_buffers, unpickle_handles

__all__ = ["thread_ranks"]

Open = Callable[..., LLMEngine]

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=1)
PROMPTS = [tiny.prompt(length, seed=length) for length in (1, 16, 17)]
FIELDS: dict[str, Any] = {"dtype": "fp32", "level": 1, "kv_cache_memory": 1 << 22}


@pytest.fixture(scope="session")
def updated(checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny variant after some training: the weights are others, the configuration is the same."""
    root = tmp_path_factory.mktemp("updated")

    def make(name: str) -> Path:
        return root / name if (root / name).exists() else train(checkpoints(name), root / name)

    return make


def train(folder: Path, target: Path) -> Path:
    """Write a checkpoint with other weights to another folder."""
    model = tiny.reference(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3 * weight.std().nan_to_num(0.1))
    model.save_pretrained(target)
    return target


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def weights_of(engine: LLMEngine) -> dict[Any, list[Tensor]]:
    """Copies of all tensors that steps read, those in oneDNN's layout as plain ones."""
    model = (
        engine._engine.runner.model if hasattr(engine._engine.runner, "model") else engine._engine.runner.runner.model
    )
    loaded = model._bindings.weights
    return {
        recipe: [tensor.to_dense() if tensor.is_mkldnn else tensor.clone() for tensor in tensors_in(each)]
        for recipe, each in loaded.items()
    }


def assert_same_weights(engine: LLMEngine, folder: Path, **fields: Any) -> None:
    """Every bit is that of an engine that loads the folder."""
    ours, other = weights_of(engine), LLMEngine(str(folder), **{**FIELDS, **fields})
    fresh = weights_of(other)
    other.close()
    assert ours.keys() == fresh.keys()
    for recipe, tensors in fresh.items():
        for one, expected in zip(ours[recipe], tensors, strict=True):
            assert torch.equal(as_bits(one), as_bits(expected)), recipe


def as_bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def assert_logprobs(engine: LLMEngine, folder: Path, tolerance: float = 2e-4) -> None:
    """Log probabilities of sampled and of prompt tokens are those of transformers in float32."""
    model = tiny.reference(folder)
    for answer, prompt in zip(engine.generate(PROMPTS, SCORED), PROMPTS, strict=True):
        expected = tiny.logits(model, prompt + answer["token_ids"]).log_softmax(-1)
        for place, given in enumerate(answer["prompt_logprobs"][1:], 1):
            assert given.token == prompt[place]
            assert abs(given.logprob - expected[place - 1, prompt[place]].item()) < tolerance
        for place, given in enumerate(answer["logprobs"], len(prompt)):
            assert abs(given.logprob - expected[place - 1, answer["token_ids"][place - len(prompt)]].item()) < tolerance


DENSE, MOE = ("llama", {}), ("qwen3_moe", {})
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        DENSE,
        pytest.param("qwen2_tied", {}, marks=SLOW),
        pytest.param(*MOE, marks=SLOW),
        pytest.param("mixtral_window_stacked", {}, marks=SLOW),
        pytest.param("deepseek_v3", {}, marks=SLOW),
        pytest.param("gemma4", {}, marks=SLOW),
        pytest.param("gpt_oss", {}, marks=SLOW),
        pytest.param("qwen3_moe", {"tensor_parallel_size": 2}, marks=SLOW),
        pytest.param("llama", {"pipeline_parallel_size": 2}, marks=SLOW),
        pytest.param("llama", {"level": 2}, marks=SLOW),
    ],
)
def test_an_update_is_a_fresh_load_to_the_last_bit(
    name: str, fields: dict[str, Any], updated: Callable[[str], Path], open_engine: Open
):
    engine = open_engine(name, **fields)
    before, folder = engine.generate(PROMPTS, GREEDY), updated(name)
    assert engine.weight_version == "default"
    engine.update_weights(stored(folder))
    assert engine.weight_version == "1"
    assert [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)] != [each["token_ids"] for each in before]
    assert_same_weights(engine, folder, **fields)
    assert_logprobs(engine, folder)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"quant": "int8"}),
        pytest.param("qwen3_moe", {"quant": "fp8"}, marks=SLOW),
        pytest.param("llama", {"quant": "fp8_block"}, marks=SLOW),
        pytest.param("mixtral", {"quant": "mxfp4", "quant.calibration": "none"}, marks=SLOW),
        pytest.param("llama", {"quant.fmt": "int4[1, 32]", "quant.calibration": "none"}, marks=SLOW),
        pytest.param("llama", {"dtype": "bf16", "quant": "int8", "level": 2}, marks=SLOW),
        pytest.param("qwen3_moe", {"quant": "int8", "tensor_parallel_size": 2}, marks=SLOW),
    ],
)
def test_weights_are_packed_again_as_a_start_packs_them(name: str, fields: dict[str, Any], tmp_path: Path):
    old, fields = tmp_path / "old", {**FIELDS, **fields}
    tiny.save_changed(name, old, hidden_size=64, intermediate_size=96)
    LLMEngine(str(old), **fields).close()
    engine = LLMEngine(str(old), **fields)  # on a CPU, of the file of packed weights that the first one has written
    before, new = weights_of(engine), train(old, tmp_path / "new")
    engine.update_weights(stored(new))
    assert_same_weights(engine, new, **fields)
    engine.close()
    again = LLMEngine(str(old), **fields)
    assert all(same(tensors, before[each]) for each, tensors in weights_of(again).items()), "the file is as it was"
    again.close()


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("wide", "deepseek"),
        *(
            pytest.param("wide", layout, marks=SLOW)
            for layout in ("FP8_DYNAMIC", "W8A8", "W4A16 asymmetric", "awq", "gptq", "gptq ordered", "MXFP4", "NVFP4")
        ),
        pytest.param("qwen3_moe", "deepseek", marks=SLOW),
        pytest.param("qwen3_moe", "awq", marks=SLOW),
    ],
)
def test_weights_stored_in_a_format_are_updated_as_they_are_stored(
    variant: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(tiny.VARIANTS, "wide", ("Qwen3Config", WIDE))
    (old, new), _ = two_stored(variant, layout, tmp_path)
    engine = LLMEngine(str(old), **FIELDS)
    engine.update_weights(stored(new))
    assert_same_weights(engine, new)
    assert_logprobs(engine, tmp_path / "new")  # the same numbers, unpacked
    engine.close()


def two_stored(variant: str, layout: str, folder: Path) -> tuple[list[Path], dict[str, Tensor]]:
    """A checkpoint stored in a format, one of other weights in the same, and those weights before they were packed."""
    first = tiny.save(variant, folder / "old")
    plain = stored(second := train(first, folder / "new"))
    return [pack(each, LAYOUTS[layout], folder / f"packed{at}") for at, each in enumerate((first, second))], plain


@pytest.mark.parametrize(
    ("variant", "layout"), [("wide", "deepseek"), *(pytest.param("wide", each, marks=SLOW) for each in ("FP8_DYNAMIC", "W8A8"))]
)  # fmt: skip
def test_plain_tensors_are_packed_in_the_format_of_the_files(
    variant: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(tiny.VARIANTS, "wide", ("Qwen3Config", WIDE))
    (old, new), plain = two_stored(variant, layout, tmp_path)
    engine = LLMEngine(str(old), **FIELDS)
    engine.update_weights(plain)
    assert_same_weights(engine, new)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_blocks_of_a_gguf_file_are_updated_as_blocks(kind: str, tmp_path: Path):
    made = []
    for number in range(2):
        folder = tmp_path / f"plain{number}"
        tiny.save_changed("llama", folder, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
        if number:
            folder = train(folder, tmp_path / "trained")
        made.append(tmp_path / f"{number}.gguf")
        gguf_files.convert(folder, made[-1], rounded=kind, packed=True)
    engine, fresh = (LLMEngine(str(each), **FIELDS) for each in made)
    fresh.close()
    checkpoint = open_for(fresh.config, SILENT)  # in the order of rows that the hub has
    engine.update_weights([(name, as_stored(checkpoint, name)) for name in checkpoint.tensors])
    assert_same_weights(engine, made[1])
    engine.close()
    checkpoint.close()


def as_stored(checkpoint: Any, name: str) -> Tensor:
    known = checkpoint.tensors[name]
    if known.blocks is not None:
        return torch.frombuffer(bytearray(checkpoint.read_blocks(name)), dtype=torch.uint8).view(known.blocks)
    return torch.frombuffer(bytearray(checkpoint.read(name)), dtype=TORCH_DTYPES[known.dtype]).view(known.shape)


def test_an_update_of_one_tensor_rebuilds_only_what_reads_it(updated: Callable[[str], Path], open_engine: Open):
    engine, new = open_engine("llama"), stored(updated("llama"))
    name, before = "model.layers.1.self_attn.k_proj.weight", weights_of(engine)
    engine.update_weights({name: new[name]})
    own = engine._engine._weights._own  # type: ignore[union-attr]
    assert len(own._live.readers[name]) == 1, "a part of the fused projection"  # type: ignore[union-attr]
    changed = [str(each) for each, tensors in weights_of(engine).items() if not same(tensors, before[each])]
    assert len(changed) == 1 and "layers.1.self_attn.k_proj" in changed[0]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_what_is_packed_with_others_takes_them_from_the_files_until_they_are_out_of_date(
    updated: Callable[[str], Path], checkpoints: Callable[[str], Path], open_engine: Open, tmp_path: Path
):
    name = "model.layers.0.self_attn.q_proj.weight"
    old, new = stored(checkpoints("llama")), stored(updated("llama"))
    engine = open_engine("llama", quant="int8")
    engine.update_weights({name: new[name]})
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "config.json").write_text((checkpoints("llama") / "config.json").read_text())
    save_file({**old, name: new[name]}, mixed / "model.safetensors")
    assert_same_weights(engine, mixed, quant="int8")
    before = weights_of(engine)
    engine.update_weights(new)
    with pytest.raises(RequestError, match=r"^tensor \S+q_proj\.weight is packed together with \S+[kv]_proj\.weight"):
        engine.update_weights({name: old[name]})
    assert_same_weights(engine, updated("llama"), quant="int8")
    assert any(not same(tensors, before[each]) for each, tensors in weights_of(engine).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda new: {**new, "model.norm.bias": torch.zeros(48)}, "the model does not read tensor model.norm.bias"),
        (lambda new: {**new, "model.norm.weight": torch.zeros(47)}, "tensor model.norm.weight is [47], the model expects [48]"),
        (lambda new: {**new, "model.norm.weight": torch.zeros(48).long()}, "tensor model.norm.weight is i64, the model expects"),
        (lambda new: {**new, "model.norm.weight": torch.zeros(48).to(torch.float8_e4m3fn)}, "tensor model.norm.weight is fp8_e4m3"),
        (lambda new: {**new, "model.norm.weight": torch.zeros(48, dtype=torch.complex64)}, "update_info: tensor model.norm.weight"),
        (lambda new: {**new, "model.norm.weight": [0.0]}, "model.norm.weight is list, not a tensor"),
        (lambda new: {**new, "model.norm.weight": torch.empty(48, device="meta")}, "tensor model.norm.weight has no numbers here"),
        (lambda new: {**new, "model.norm.weight": torch.zeros(48).to_sparse()}, "tensor model.norm.weight has no numbers here"),
        (lambda _: {}, "an update has to have tensors"),
    ],
)  # fmt: skip
def test_what_does_not_fit_changes_nothing_and_is_named(
    change: Any, message: str, updated: Callable[[str], Path], open_engine: Open
):
    engine = open_engine("llama")
    before = weights_of(engine)
    with pytest.raises(RequestError, match="^" + re.escape(message)):
        engine.update_weights(list(change(stored(updated("llama"))).items()))
    assert all(same(tensors, before[each]) for each, tensors in weights_of(engine).items())
    assert engine.weight_version == "default" and not engine._engine.weights_fault
    assert engine.generate(PROMPTS[:1], GREEDY)


def test_a_tied_head_may_come_too_if_it_is_the_embedding(updated: Callable[[str], Path], open_engine: Open):
    engine, new = open_engine("qwen2_tied"), stored(updated("qwen2_tied"))
    embedding = new["model.embed_tokens.weight"]
    before = weights_of(engine)
    with pytest.raises(RequestError, match=r"^tensor lm_head\.weight is not model\.embed_tokens\.weight, which"):
        engine.update_weights({**new, "lm_head.weight": embedding + 1})
    with pytest.raises(RequestError, match=r"^the model reads model\.embed_tokens\.weight in place of lm_head\.weight"):
        engine.update_weights({"lm_head.weight": embedding})
    assert all(same(tensors, before[each]) for each, tensors in weights_of(engine).items())
    engine.update_weights({**new, "lm_head.weight": embedding})
    assert_same_weights(engine, updated("qwen2_tied"))


TRAINER = """
import json, sys
from safetensors.torch import load_file
from atom.graph import TORCH_DTYPES
from atom.kernels.broadcast import read_id
from atom.runtime.weight_updates import RankWeights
from atom.trainer import SharedWeights

with SharedWeights(load_file(sys.argv[1])) as shared:
    print(json.dumps(shared.update_info), flush=True)
    sys.stdin.readline()
"""


def test_another_process_sends_by_shared_memory(updated: Callable[[str], Path], open_engine: Open):
    engine, folder = open_engine("llama"), updated("llama")
    command = [sys.executable, "-c", TRAINER, str(folder / "model.safetensors")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        info = json.loads(trainer.stdout.readline())
        path = info["shared_memory"]["path"]
        assert os.stat(path).st_mode & 0o077 == 0, "only this user reads it"
        engine.update_weights({"update_info": info}, version="step-3")
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert trainer.wait() == 0
    assert not os.path.exists(path)
    assert engine.weight_version == "step-3"
    assert_same_weights(engine, folder)


def test_ranks_take_the_tensors_of_the_driver_and_of_a_trainer(
    updated: Callable[[str], Path], open_engine: Open, thread_ranks: ThreadRanks
):
    engine, folder = open_engine("qwen3_moe", tensor_parallel_size=2), updated("qwen3_moe")
    new = stored(folder)
    engine.update_weights(new)
    assert_same_weights(engine, folder, tensor_parallel_size=2)
    assert_logprobs(engine, folder)  # a sum over both ranks
    with pytest.raises(RequestError, match=r"^the model does not read tensor x$"):
        engine.update_weights({"x": torch.zeros(1)})
    with SharedWeights(new) as shared:
        engine.update_weights(shared.update_info)
    assert_logprobs(engine, folder)


@pytest.mark.parametrize("keep_cache", [False, True])
def test_running_requests_go_on_with_the_new_weights(
    keep_cache: bool, updated: Callable[[str], Path], open_engine: Open
):
    engine, folder = open_engine("llama", enable_prefix_caching=True, block_size=4), updated("llama")
    engine.generate(PROMPTS[2:], GREEDY)
    (id,) = engine.add_request(PROMPTS[1:2], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for _ in range(5):
        engine.step()
    (sequence,) = engine._engine.scheduler.sequences.values()
    old = [*sequence.output]
    assert old and len(old) < 12
    engine.update_weights(stored(folder), keep_cache=keep_cache)
    assert engine.metrics.scheduler.num_preemptions == (0 if keep_cache else 1)
    ended = [each for _ in iter(lambda: engine.is_finished(), True) for each in engine.step()]
    assert [each.request_id for each in ended] == [id] and ended[0].output[: len(old)] == old
    if not keep_cache:  # the rest is what the new weights say of all before it
        model, tokens = tiny.reference(folder), PROMPTS[1] + ended[0].output
        for place in range(len(PROMPTS[1]) + len(old), len(tokens)):
            assert tiny.logits(model, tokens[:place])[-1].argmax() == tokens[place]
    num_hits = engine.metrics.scheduler.num_prefix_hit_tokens
    engine.generate(PROMPTS[2:], GREEDY)
    assert (engine.metrics.scheduler.num_prefix_hit_tokens > num_hits) == keep_cache


def parts_of(new: dict[str, Tensor], count: int = 3) -> list[dict[str, Tensor]]:
    """An update in parts: those of a fused tensor come apart."""
    return [dict([*new.items()][at::count]) for at in range(count)]


def test_an_update_comes_in_parts_whose_memory_is_used_again(updated: Callable[[str], Path], open_engine: Open):
    engine, folder = open_engine("llama", quant="int8"), updated("llama")
    with pytest.raises(RequestError, match=r"^no update of the weights is under way"):
        engine.finish_weight_update()
    engine.add_request(PROMPTS[:1], GREEDY)
    engine.start_weight_update()
    with pytest.raises(RequestError, match=r"^an update of the weights is under way"):
        engine.start_weight_update()
    with pytest.raises(RequestError, match=r"^the weights are being updated"):
        engine.generate(PROMPTS[:1], GREEDY)
    first, *others = parts_of(stored(folder))
    engine.update_weights(first)
    for tensor in first.values():
        tensor.fill_(torch.nan)
    with pytest.raises(RequestError, match=r"^the model does not read tensor x"):
        engine.update_weights({"x": torch.zeros(1)})
    with pytest.raises(RequestError, match=r"^tensor \S+ has come before in this update"):
        engine.update_weights(first)
    for fields in ({"version": "part"}, {"keep_cache": True}):
        with pytest.raises(RequestError, match="finish_weight_update takes its version and keep_cache"):
            engine.update_weights(others[0], **fields)
    assert engine.step() == [] and not engine._engine.has_work, "requests wait"
    for part in others:
        engine.update_weights(part)
    engine.finish_weight_update("new")
    assert engine.weight_version == "new"
    while not engine.is_finished():
        engine.step()
    assert_same_weights(engine, folder, quant="int8")


def break_after(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the transfer of an update fail after so many units have been written."""
    from atom.weights import update

    write, counted = update.Update._write, iter(range(number))

    def count(self: Any, unit: Any) -> None:
        if next(counted, None) is None:
            raise OSError("the trainer has died")
        write(self, unit)

    monkeypatch.setattr(update.Update, "_write", count)


def test_a_failure_half_way_serves_nothing_until_all_has_come(
    updated: Callable[[str], Path], open_engine: Open, monkeypatch: pytest.MonkeyPatch
):
    engine, new = open_engine("llama"), stored(updated("llama"))
    (id,) = engine.add_request(PROMPTS[1:2], GREEDY)
    engine.step()
    with monkeypatch.context() as patched:
        break_after(4, patched)
        with pytest.raises(
            WeightsIncompleteError, match=r"incomplete \(the trainer has died\): update lm_head\.weight and 2"
        ):
            engine.update_weights(new)
    (ended,) = engine.step()
    assert (ended.request_id, ended.finish_reason) == (id, "error") and "the trainer has died" in str(ended.error)
    assert engine.metrics.weights_fault and engine.weight_version == "default"
    for prompt in PROMPTS:
        with pytest.raises(WeightsIncompleteError):
            engine.generate([prompt], GREEDY)
    name = "model.norm.weight"
    engine.update_weights({name: new[name]})
    with pytest.raises(WeightsIncompleteError, match="the weights are incomplete"):
        engine.generate(PROMPTS[:1], GREEDY)
    engine.update_weights({each: tensor for each, tensor in new.items() if each != name})
    assert engine.metrics.weights_fault == ""
    assert_logprobs(engine, updated("llama"))


def test_an_update_in_parts_that_fails_half_way_is_over_and_a_whole_one_mends_it(
    updated: Callable[[str], Path], open_engine: Open, monkeypatch: pytest.MonkeyPatch
):
    engine, new = open_engine("llama"), stored(updated("llama"))
    engine.start_weight_update()
    with monkeypatch.context() as patched:
        break_after(1, patched)
        with pytest.raises(WeightsIncompleteError):
            engine.update_weights(new)
    engine.update_weights(new)
    engine.add_request(PROMPTS[:1], GREEDY)
    for _ in range(2 * GREEDY.max_tokens):
        engine.step()
    assert engine.is_finished(), "steps run again"
    assert_logprobs(engine, updated("llama"))


def test_a_part_that_fails_before_anything_is_written_ends_the_update(
    updated: Callable[[str], Path], open_engine: Open, monkeypatch: pytest.MonkeyPatch
):
    engine, new = open_engine("llama"), stored(updated("llama"))
    before = [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)]
    engine.start_weight_update()
    with monkeypatch.context() as patched:
        break_after(0, patched)
        with pytest.raises(RequestError, match="the update has ended, nothing has changed"):
            engine.update_weights(new)
    with pytest.raises(RequestError, match=r"^no update of the weights is under way"):
        engine.finish_weight_update()
    assert [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)] == before
    engine.update_weights(new)
    assert_logprobs(engine, updated("llama"))


def test_request_objects_of_vllm_are_taken(updated: Callable[[str], Path], open_engine: Open):
    engine = open_engine("llama")
    engine.init_weight_transfer_engine(SimpleNamespace(init_info={}))
    with SharedWeights(stored(updated("llama"))) as shared:
        engine.update_weights(SimpleNamespace(update_info=shared.update_info))
    assert_logprobs(engine, updated("llama"))
    for call in (engine.init_weight_transfer_engine, engine.update_weights):
        with pytest.raises(RequestError, match="not int"):
            call(5)


def test_a_failure_before_anything_is_written_leaves_the_old_weights(
    updated: Callable[[str], Path], open_engine: Open, monkeypatch: pytest.MonkeyPatch
):
    engine, before = open_engine("llama"), None
    before = engine.generate(PROMPTS, GREEDY)
    with SharedWeights(stored(updated("llama"))) as shared:
        info = shared.update_info
    with pytest.raises(RequestError, match=r"shared_memory: .* cannot be mapped"):
        engine.update_weights(info)
    assert [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)] == [each["token_ids"] for each in before]
    assert engine.weight_version == "default"


def test_weights_that_sleep_has_dropped_have_to_come_again(updated: Callable[[str], Path], open_engine: Open):
    engine, folder = open_engine("llama", enable_sleep_mode=True), updated("llama")
    engine.sleep(2)
    with pytest.raises(RequestError, match=r"^the engine sleeps, without weights: wake_up"):
        engine.update_weights(stored(folder))
    engine.wake_up()
    assert engine.generate(PROMPTS[:1], GREEDY), "nothing had been updated"
    engine.update_weights(stored(folder))
    engine.sleep(1)
    engine.wake_up()
    assert_logprobs(engine, folder)
    engine.sleep(2)
    engine.wake_up(["weights"])
    assert "sleep with level=2 has dropped them" in engine._engine.weights_fault
    engine.update_weights(stored(folder))
    engine.wake_up(["kv_cache"])
    assert_same_weights(engine, folder, enable_sleep_mode=True)
    assert_logprobs(engine, folder)


def test_the_engine_of_asyncio_is_updated_between_steps(
    checkpoints: Callable[[str], Path], updated: Callable[[str], Path]
):
    engine, folder = AsyncLLMEngine(str(checkpoints("llama")), **FIELDS), updated("llama")

    async def run() -> list[Any]:
        requests = [asyncio.ensure_future(last(engine.generate(prompt, GREEDY))) for prompt in PROMPTS]
        await engine.init_weight_transfer_engine({"init_info": {}})
        await engine.start_weight_update()
        for part in parts_of(stored(folder)):
            await engine.update_weights(part.items())
        await engine.finish_weight_update("x")
        assert await engine.get_weight_version() == "x"
        await asyncio.gather(*requests)
        return [await last(engine.generate(prompt, GREEDY)) for prompt in PROMPTS]

    async def last(outputs: Any) -> Any:
        return [each async for each in outputs][-1]

    model = tiny.reference(folder)
    for answer, prompt in zip(asyncio.run(run()), PROMPTS, strict=True):
        tiny.assert_greedy(answer, prompt, model)
    engine.shutdown()


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_a_pickle_of_handles_calls_nothing():
    def pickled(value: Any) -> str:
        return base64.b64encode(pickle.dumps(value)).decode()

    handle = (torch.Tensor, torch.Size([2, 3]), (3, 1), 0, torch.storage.TypedStorage, torch.bfloat16, 0, b"handle", 64, 0, False,
              b"counter", 0, b"event", True)  # fmt: skip
    assert unpickle_handles(pickled([{"GPU-1": handle}])) == [{"GPU-1": handle}]
    with pytest.raises(
        RequestError, match=r"^update_info: ipc_handles_pickled cannot be read: it names posix\.system$"
    ):
        unpickle_handles(pickled([Evil()]))
    for text in ("%", pickled(1)[:-4]):
        with pytest.raises(RequestError, match=r"^update_info: ipc_handles_pickled cannot be read"):
            unpickle_handles(text)


INFO: dict[str, Any] = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": [[2, 3]]}, "names, dtype_names, shapes and what else is of each tensor differ in length"),
        ({"names": ["a", "a"]}, "tensor a is there twice"),
        ({"dtype_names": ["float32", "Tensor"]}, "tensor b is Tensor, which atom cannot load yet"),
        ({"shapes": [[2, 3], [-4]]}, "tensor b is [-4], which is no shape"),
        ({"shapes": [[2, 3], ["x"]]}, "Expected `int`, got `str` - at `$.shapes[1][0]`"),
        ({"other": 1}, "Object contains unknown field `other`"),
        ({"shared_memory": {"path": "/dev/shm/x", "offsets": [0]}}, "names, dtype_names, shapes and"),
        ({"ipc_handles": [], "ipc_handles_pickled": "AA=="}, "give ipc_handles or ipc_handles_pickled, not both"),
    ],
)
def test_what_a_trainer_says_is_checked(change: dict[str, Any], message: str):
    with pytest.raises(RequestError, match="^update_info: " + re.escape(message)):
        UpdateInfo.read({**INFO, **change})


class Broadcasts:
    """The other end of an NCCL group: gives the bytes that a trainer sends, in its buffers."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers, self.num_ahead, self.ended = iter(buffers), 0, False

    def receive(self, num_bytes: int) -> Any:
        content = next(self.buffers)
        assert content.numel() == num_bytes
        self.num_ahead += 1
        return SimpleNamespace(wait=lambda: self._arrive(content))

    def _arrive(self, content: Tensor) -> Tensor:
        assert 1 <= self.num_ahead <= 2, "one is used, another one arrives"
        self.num_ahead -= 1
        return content

    def synchronize(self) -> None:
        self.ended = True


@pytest.mark.parametrize("limit", [0, 40, 1 << 20])
def test_broadcast_buffers_are_cut_into_tensors(limit: int):
    sent = [("a", torch.rand(3, 5)), ("b", torch.rand(3).bfloat16()), ("c", torch.rand(2, 2)), ("d", torch.tensor(7))]
    flat = [tensor.reshape(-1).view(torch.uint8) for _, tensor in sent]
    groups = cut_buffers([each.numel() for each in flat], limit)
    assert len(groups) == {0: 4, 40: 2}.get(limit, 1)
    info = describe_tensors(sent)
    group: Any = Broadcasts([torch.cat([flat[at] for at in places]) for places in groups])
    init = InitInfo(packed=limit > 0, packed_buffer_size_bytes=limit or 1)
    arrived = [each for part in NCCLTransfer(info, group, init).parts() for each in part]
    assert [name for name, _ in arrived] == ["a", "b", "c", "d"] and group.ended
    for (_, ours), (_, theirs) in zip(arrived, sent, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)  # also c, which no multiple of 4 bytes precedes


class ncclUniqueId(ctypes.Structure):
    """As in vllm/distributed/device_communicators/pynccl_wrapper.py."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


def test_the_id_of_a_communicator_is_read_as_vllm_and_as_we_write_it():
    made = ncclUniqueId.from_buffer_copy(bytes(range(128)))
    assert read_id(pickle.dumps(made)) == read_id(pickle.dumps(bytes(range(128)))) == bytes(range(128))
    for wrong in (b"short", 1, Evil()):
        with pytest.raises(RequestError, match=r"^the id of an NCCL communicator (is|cannot be read: it names posix)"):
            read_id(pickle.dumps(wrong))


def test_a_rank_that_fails_leaves_no_mixture_to_be_served(
    updated: Callable[[str], Path], open_engine: Open, thread_ranks: ThreadRanks, monkeypatch: pytest.MonkeyPatch
):
    engine, new = open_engine("llama", tensor_parallel_size=2), stored(updated("llama"))
    opened, applied = RankWeights.open, RankWeights.apply

    def fail(place: str, work: Any) -> Any:
        def run(self: RankWeights, *args: Any, **options: Any) -> None:
            if self.rank == 1:
                raise OSError(f"cannot {place}")
            work(self, *args, **options)

        return run

    with monkeypatch.context() as patched:
        patched.setattr(RankWeights, "open", fail("open", opened))
        with pytest.raises(RequestError, match=r"cannot open$"):
            engine.update_weights(new)
    assert engine.generate(PROMPTS, GREEDY), "nothing had been written"
    with monkeypatch.context() as patched:
        patched.setattr(RankWeights, "apply", fail("apply", applied))
        with pytest.raises(
            WeightsIncompleteError, match=r"incomplete \(.*cannot apply\): update lm_head\.weight and 29 more"
        ):
            engine.update_weights(new)
    with pytest.raises(WeightsIncompleteError):
        engine.generate(PROMPTS, GREEDY)
    engine.update_weights(new)
    assert_logprobs(engine, updated("llama"))


def test_adapters_stay_what_they_are(updated: Callable[[str], Path], open_engine: Open, tmp_path: Path):
    engine, folder = open_engine("llama", enable_lora=True), updated("llama")
    engine.load_lora_adapter("some", str(adapters.save(tiny.reference(folder), tmp_path / "some")))
    engine.update_weights(stored(folder))
    plain, adapted = (engine.generate(PROMPTS, GREEDY, adapters=name) for name in (None, "some"))
    other = LLMEngine(str(folder), **FIELDS, lora_modules={"some": str(tmp_path / "some")})
    assert [each["token_ids"] for each in adapted] == [
        each["token_ids"] for each in other.generate(PROMPTS, GREEDY, adapters="some")
    ]
    assert [each["token_ids"] for each in adapted] != [each["token_ids"] for each in plain]
    other.close()


def test_info_that_an_engine_cannot_take_is_refused(open_engine: Open, tmp_path: Path):
    engine = open_engine("llama")
    norm = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[48]]}
    (tmp_path / "short").write_bytes(bytes(100))
    for more, message in (
        ({}, "call init_weight_transfer_engine first"),
        ({"ipc_handles": [{}]}, "ipc_handles are of a GPU, and this engine is on a CPU"),
        ({"shared_memory": {"path": str(tmp_path / "short"), "offsets": [0]}}, "model.norm.weight is not within"),
        ({"shared_memory": {"path": str(tmp_path / "none"), "offsets": [0]}}, "cannot be mapped"),
        ({"shared_memory": {"path": str(tmp_path), "offsets": [0]}}, "cannot be mapped"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.update_weights({"update_info": {**norm, **more}})
    for info, message in (
        ({"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}, "this engine is on a CPU"),
        ({"master_address": "h"}, "NCCL needs master_address and master_port, or nccl_unique_id_b64"),
        ({"master_address": "h", "master_port": 1, "world_size": 1}, "a rank_offset from 1"),
        ({"backend": "rdma"}, "backend=rdma is not supported"),
        ({"what": 1}, "unknown field"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.init_weight_transfer_engine({"init_info": info})


def test_weights_that_a_text_rounds_or_that_classify_are_not_updated(open_engine: Open):
    engine = open_engine("llama", **{"quant.fmt": "int4[1, 16]"})
    with pytest.raises(UnsupportedError, match=r"rounded by a text .* set quant\.calibration=none"):
        engine.update_weights({"model.norm.weight": torch.ones(48)})


def test_buffers_end_with_the_tensor_that_fills_them():
    assert cut_buffers([4, 4, 4, 1], 7) == [[0, 1], [2, 3]]  # vLLM's packed_nccl_broadcast_consumer
    assert cut_buffers([4, 4, 4, 1], 8) == [[0, 1, 2], [3]]
    assert cut_buffers([9, 1, 1], 0) == [[0], [1], [2]]
    assert cut_buffers([], 8) == []
