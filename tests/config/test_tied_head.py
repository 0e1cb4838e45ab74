"""A checkpoint whose config.json ties the head to the embedding, and that stores a head too; against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tiny
import torch
from law import assert_same_logits
from probe import assert_logits, logits_of
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks, thread_ranks
from torch import Tensor

from atom import LLMEngine, SamplingParams
from atom.checkpoint import open_checkpoint
from atom.config.load import load
from atom.config.schema import ModelConfig
from atom.frontend import build
from atom.graph import show

__all__ = ["thread_ranks"]

TIED = ("llama_tied", "gemma3", "qwen3_tied")  # of which transformers saves no head
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOKENS = tiny.prompt(60)
LINE = (
    "atom-run: {}: config.json ties lm_head.weight to model.embed_tokens.weight, but another head is stored: it is used"
)


def save(name: str, folder: Path, change: Callable[[dict[str, Tensor]], None], *, files: int = 1) -> Path:
    """A variant whose tensors are changed, in one file, or with the head in a file of its own."""
    saved = tiny.save(name, folder)
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    if files == 1:
        save_file(tensors, saved / "model.safetensors", {"format": "pt"})
        return saved
    (saved / "model.safetensors").unlink()
    shards = {
        "model-00001-of-00002.safetensors": {name: each for name, each in tensors.items() if name != HEAD},
        "model-00002-of-00002.safetensors": {HEAD: tensors[HEAD]},
    }
    for file, shard in shards.items():
        save_file(shard, saved / file, {"format": "pt"})
    where = {name: file for file, shard in shards.items() for name in shard}
    (saved / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return saved


def add_other(tensors: dict[str, Tensor]) -> None:
    torch.manual_seed(7)
    tensors[HEAD] = torch.randn_like(tensors[EMBEDDING]) * 0.3


def add_equal(tensors: dict[str, Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def add_last_bit(tensors: dict[str, Tensor]) -> None:
    add_equal(tensors)
    tensors[HEAD].view(torch.int32)[-1, -1] ^= 1


def pack_other(tensors: dict[str, Tensor]) -> None:
    """A head of int8, as compressed-tensors stores it."""
    add_other(tensors)
    scale = tensors[HEAD].abs().amax(1, keepdim=True) / 127
    tensors[HEAD], tensors["lm_head.weight_scale"] = (tensors[HEAD] / scale).round().to(torch.int8), scale


def open_on(folder: Path | str, **fields: Any) -> LLMEngine:
    return LLMEngine(model=str(folder), device="cpu", dtype="fp32", kv_cache_memory=1 << 22, **{"level": 1, **fields})


def logits_on(folder: Path | str, **fields: Any) -> Tensor:
    engine = open_on(folder, **fields)
    try:
        return logits_of(engine, TOKENS)
    finally:
        engine.close()


def load_of(folder: Path, *overrides: str) -> ModelConfig:
    return load([f"checkpoint={folder}", "dtype=fp32", *overrides]).model


def text_of(folder: Path) -> str:
    return show(build(load_of(folder), "fp32", "fp32"))


@pytest.mark.parametrize(("name", "files"), [*((name, 1) for name in TIED), (TIED[0], 2)])
def test_a_stored_head_that_differs_is_used(
    name: str, files: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save(name, tmp_path, add_other, files=files)
    model = tiny.reference(folder)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    capfd.readouterr()
    assert_same_logits(logits_on(folder), tiny.logits(model, TOKENS))
    lines = [line for line in capfd.readouterr().err.splitlines() if "ties" in line]
    assert lines == [f"{LINE.format(folder)} (model.tied=true leaves it out)"]
    assert HEAD in text_of(folder)


@pytest.mark.parametrize("name", TIED)
def test_a_stored_head_that_equals_the_embedding_stays_tied(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain, folder = tiny.save(name, tmp_path / "plain"), save(name, tmp_path / "equal", add_equal)
    model = tiny.reference(folder)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    capfd.readouterr()
    engine = open_on(folder)
    assert_logits(engine, TOKENS, model)
    engine.close()
    assert "ties" not in capfd.readouterr().err
    assert text_of(folder) == text_of(plain)


def test_one_bit_at_the_end_makes_another_head(tmp_path: Path) -> None:
    assert load_of(save("llama_tied", tmp_path / "equal", add_equal)).tied
    assert not load_of(save("llama_tied", tmp_path / "other", add_last_bit)).tied


def test_tensors_are_compared_chunk_by_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atom.checkpoint.base.CHUNK", 7)
    equal = open_checkpoint(str(save("llama_tied", tmp_path / "equal", add_equal)))
    other = open_checkpoint(str(save("llama_tied", tmp_path / "other", add_last_bit)))
    assert equal.is_same(HEAD, EMBEDDING) and not other.is_same(HEAD, EMBEDDING)
    assert not equal.is_same(HEAD, "model.norm.weight") and not equal.is_same(HEAD, "nothing")


def test_a_head_that_is_the_only_one_stored_is_the_embedding_too(tmp_path: Path) -> None:
    def move(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors.pop(EMBEDDING)

    folder = save("llama_tied", tmp_path, move)
    assert_same_logits(logits_on(folder), tiny.logits(tiny.reference(folder), TOKENS))


def test_the_ranks_share_a_head_that_differs(tmp_path: Path, thread_ranks: list[ThreadRanks]) -> None:
    folder = save("llama_tied", tmp_path, add_other)
    engine = open_on(folder, tensor_parallel_size=2)
    (answer,) = engine.generate([TOKENS], SamplingParams(temperature=0, max_tokens=12))
    engine.close()
    tiny.assert_greedy(answer, TOKENS, tiny.reference(folder))
    assert thread_ranks[0].meeting.num_collectives > 0


def test_a_packed_head_is_used(tmp_path: Path) -> None:
    folder = save("llama_tied", tmp_path, pack_other)
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["re:lm_head"], "weights": weights, "input_activations": None}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**quantization, "ignore": []}}))

    def unpack(tensors: dict[str, Tensor]) -> None:
        pack_other(tensors)
        tensors[HEAD] = tensors[HEAD].float() * tensors.pop("lm_head.weight_scale")

    unpacked = tiny.reference(save("llama_tied", tmp_path / "unpacked", unpack))
    assert_same_logits(logits_on(folder), tiny.logits(unpacked, TOKENS))


def test_an_override_decides_whatever_is_stored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain, folder = tiny.save("llama_tied", tmp_path / "plain"), save("llama_tied", tmp_path / "other", add_other)
    tied = LLMEngine.from_config(load([f"checkpoint={folder}", "dtype=fp32", "level=1", "model.tied=true"]))
    assert_logits(tied, TOKENS, tiny.reference(plain))
    tied.close()
    assert "ties" not in capfd.readouterr().err


def test_weights_that_come_from_the_hub_at_the_start_decide_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("llama_tied", tmp_path, add_other)
    described = tmp_path / "described"
    shutil.copytree(folder, described, ignore=shutil.ignore_patterns("*.safetensors"))

    def download(*_: Any, allow_patterns: list[str], **__: Any) -> str:
        return str(folder if "*.safetensors" in allow_patterns else described)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("atom.checkpoint.hub.tensor_names", lambda *_: ())
    assert load(["checkpoint=org/name"]).model.tied, "the weights are not here yet"
    assert_same_logits(logits_on("org/name"), tiny.logits(tiny.reference(folder), TOKENS))
