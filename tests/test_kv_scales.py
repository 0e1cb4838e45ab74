"""Measured scales of an fp8 cache, against keys and values of transformers on the same prompt."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import tokenizers
import torch
from law import relative_error
from probe import logits_of
from safetensors.torch import load_file, save_file
from test_fp8_kv import NEAR, rounded_logits
from thread_ranks import ThreadRanks, thread_ranks
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import DynamicCache

from atom import LLMEngine, SamplingParams
from atom.cache import Cache
from atom.cache.files import WEIGHTS
from atom.compiler.artifact import semantic_graph
from atom.config.load import load
from atom.errors import CapacityError
from atom.graph import parse, show
from atom.graph.recipes import Measured
from atom.runtime.kv.scales import FILE, PROMPT, KVScales, scale_of
from atom.runtime.step.model import Model

__all__ = ["thread_ranks"]

UP = 5000.0  # what keys are multiplied by, and queries divided: scores stay, keys are beyond 448
TOKENS = tiny.prompt(60)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(params=["LlamaConfig", "MistralConfig"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model with large keys, of windowed layers or not, and a tokenizer of bytes."""
    window = {"sliding_window": 16} if request.param == "MistralConfig" else {}
    monkeypatch.setitem(tiny.VARIANTS, "large keys", (request.param, {"vocab_size": 300, **window}))
    folder = tiny.save("large keys", tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        for projection, factor in (("q_proj", 1 / UP), ("k_proj", UP)):
            tensors[name] = tensors[name] * factor if f"{projection}.weight" in name else tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    add_tokenizer(folder)
    return folder


def add_tokenizer(folder: Path, alphabet: Sequence[str] = BYTES, first: int = 0) -> None:
    backend = tokenizers.Tokenizer(models.BPE({byte: first + place for place, byte in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def open_engine(folder: Path, *overrides: str) -> LLMEngine:
    common = [f"checkpoint={folder}", "dtype=fp32", "device=cpu", "level=1", "quant.kv=fp8", f"cache={folder}.cache"]
    return LLMEngine.from_config(load([*common, "serve.kv_cache_memory=4194304", *overrides]))


def logits(folder: Path, *overrides: str) -> Tensor:
    engine = open_engine(folder, *overrides)
    try:
        return logits_of(engine, TOKENS)
    finally:
        engine.close()


def scales_of(engine: LLMEngine) -> dict[str, float]:
    runner: Any = engine._engine.runner
    runner = getattr(runner, "runner", runner)  # of several ranks, the first one's
    return KVScales(runner.model.graph, runner.model._bindings.weights).values()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("level", [0, 1])
def test_a_model_whose_keys_are_beyond_448_keeps_its_logits(level: int, checkpoint: Path):
    """Its logits are those of a cache that rounds by these scales; by 1.0 they are anything."""
    model, cache = tiny.reference(checkpoint), f"cache={checkpoint}.{level}"
    exact = tiny.logits(model, TOKENS)
    engine = open_engine(checkpoint, f"level={level}", cache)
    ours, scales = logits_of(engine, TOKENS), scales_of(engine)
    engine.close()

    def of_layer(layer: int) -> tuple[float, float]:
        return scales[f"model.layers.{layer}.k_scale"], scales[f"model.layers.{layer}.v_scale"]

    assert relative_error(ours, rounded_logits(model, TOKENS, of_layer)) < NEAR
    assert relative_error(ours, exact) < 0.15, "what fp8 costs this model"
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    assert relative_error(logits(checkpoint, f"level={level}", f"{cache}.none"), exact) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 3])
def test_on_a_gpu_too(level: int, checkpoint: Path):
    exact = tiny.logits(tiny.reference(checkpoint), TOKENS)
    overrides = ("device=cuda", f"level={level}", "serve.gpu_memory_utilization=0.2")
    for _ in range(2):  # measured, and kept
        assert relative_error(logits(checkpoint, *overrides), exact) < 0.15


@pytest.mark.sampled(2)
@pytest.mark.parametrize("room", ["", "serve.max_num_batched_tokens=40", "serve.max_model_len=50"])
def test_a_scale_holds_twice_the_largest_number_of_the_prompt(
    room: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
):
    engine = open_engine(checkpoint, *[room] * bool(room))
    model, num_tokens = tiny.reference(checkpoint), 256 if not room else int(room.partition("=")[2])
    tokens, cache = list(engine._engine.vocabulary.tokenize(PROMPT))[:num_tokens], DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([tokens]), past_key_values=cache)
    found = scales_of(engine)
    assert len(found) == 6
    for layer, each in enumerate(cache.layers):
        for role, numbers in (("k_scale", each.keys), ("v_scale", each.values)):
            scale, largest = found[f"model.layers.{layer}.{role}"], 2 * numbers.abs().max().item() / 448
            assert math.log2(scale).is_integer()
            assert largest * 0.95 < scale < 2 * largest * 1.05  # the cache before it is rounded to fp8 here
    assert max(scale for name, scale in found.items() if name.endswith("k_scale")) > 1 > found["model.layers.0.v_scale"]
    lines = [line for line in capsys.readouterr().err.splitlines() if "kv scales" in line]
    assert lines == [f"atom-run: kv scales: the checkpoint has none, measured over {len(tokens)} tokens"]
    engine.close()


def test_a_model_with_recurrent_state_measures_those_of_its_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kind, fields = tiny.RECURRENT["qwen3_next"]
    monkeypatch.setitem(tiny.VARIANTS, "hybrid", (kind, {**fields, "vocab_size": 300}))
    folder = tiny.save("hybrid", tmp_path)
    add_tokenizer(folder)
    engine = open_engine(folder)
    found, tokens = scales_of(engine), engine._engine.vocabulary.tokenize(PROMPT)
    engine.close()
    model = tiny.reference(folder)
    with torch.inference_mode():
        model(torch.tensor([list(tokens)[:256]]), past_key_values=(cache := DynamicCache(config=model.config)))
    kept = [each for each in cache.layers if getattr(each, "keys", None) is not None]
    assert kept and len(found) == 2 * len(kept)
    largest = sorted(2 * x.abs().max().item() / 448 for each in kept for x in (each.keys, each.values))
    for scale, least in zip(sorted(found.values()), largest, strict=True):
        assert least * 0.95 < scale < 2 * least * 1.05


def test_keys_that_are_values_too_have_one_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kind, fields = tiny.VARIANTS["deepseek_v4"]
    monkeypatch.setitem(tiny.VARIANTS, "shared", (kind, {**fields, "vocab_size": 300, "sliding_window": 300}))
    folder = tiny.save("shared", tmp_path)
    add_tokenizer(folder)
    engine = open_engine(folder)
    found, tokens = scales_of(engine), engine._engine.vocabulary.tokenize(PROMPT)
    engine.close()
    model = tiny.reference(folder)
    with torch.inference_mode():
        model(torch.tensor([list(tokens)[:256]]), past_key_values=(cache := DynamicCache(config=model.config)))
    assert len(found) == len(cache.layers) == 3
    for layer, each in enumerate(cache.layers):
        least = 2 * each.keys.abs().max().item() / 448
        assert least * 0.95 < found[f"layers.{layer}.k_scale"] < 2 * least * 1.05


def test_without_memory_for_the_prompt_the_error_is_that_of_the_pool(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    bound, bind = list[Any](), Model.bind

    def bind_once(model: Model, num_blocks: Any) -> None:
        bound.append(num_blocks)
        if len(bound) == 2:  # that of the prompt
            model.unbind()
            raise CapacityError("no room")
        bind(model, num_blocks)

    monkeypatch.setattr(Model, "bind", bind_once)
    with pytest.raises(CapacityError, match="no room"):
        open_engine(checkpoint)
    assert len(bound) == 3 and bound[2] == bound[0], "the pool is there again"


@pytest.mark.sampled(2)
def test_a_second_start_measures_nothing_and_answers_alike(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("atom.runtime.kv.scales.MAX_TOKENS", 70)

    def start() -> tuple[dict[str, float], list[Any], str]:
        engine = open_engine(checkpoint, "serve.enable_prefix_caching=true")
        answers = [answer["token_ids"] for answer in engine.generate([TOKENS, TOKENS[1:21]], GREEDY)]
        assert engine.metrics.scheduler.num_prefix_hit_tokens == 0, "no block of the measured prompt is left"
        scales = scales_of(engine)
        engine.close()
        return scales, answers, capsys.readouterr().err

    first, second = start(), start()
    assert first[:2] == second[:2]
    assert "measured over 70 tokens" in first[2] and "kv scales" not in second[2]
    (entry,) = Cache(Path(f"{checkpoint}.cache")).entries(WEIGHTS)
    assert entry.about["name"] == f"KV scales of {checkpoint}"
    file = checkpoint / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    assert "measured" in start()[2], "another file"


@pytest.mark.sampled(12)
@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model.layers.0.k_scale": 1.0}', "nan"])
def test_what_is_kept_and_is_none_is_measured_again(content: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    open_engine(checkpoint).close()
    engine = open_engine(checkpoint)
    right = scales_of(engine)
    engine.close()
    kept = json.dumps(dict.fromkeys(right, 0.0)) if content == "nan" else content
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: kept.encode() if path.name == FILE else read_bytes(path))
    measured: list[int] = []
    measure = KVScales.measure
    monkeypatch.setattr(KVScales, "measure", lambda *args: measured.append(1) or measure(*args))
    engine = open_engine(checkpoint)
    assert scales_of(engine) == right and measured == [1]
    engine.close()


def test_the_scale_of_latents_is_measured_by_one_rank_and_by_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread_ranks: list[ThreadRanks]
):
    name, fields = tiny.VARIANTS["deepseek_v3"]
    monkeypatch.setitem(tiny.VARIANTS, "large latents", (name, {**fields, "vocab_size": 300}))
    folder = tiny.save("large latents", tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        for module, factor in (("kv_a_layernorm", UP), ("kv_b_proj", 1 / UP)):
            tensors[name] = tensors[name] * factor if f"{module}.weight" in name else tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    add_tokenizer(folder)
    engine, model = open_engine(folder), tiny.reference(folder)
    prompt, found = list(engine._engine.vocabulary.tokenize(PROMPT))[:256], scales_of(engine)
    ours = logits_of(engine, TOKENS)
    engine.close()

    largest: dict[str, float] = {}
    for layer, each in enumerate(model.model.layers):

        def note(_module: Any, args: Any, _out: Any, name: str = f"model.layers.{layer}.k_scale") -> None:
            largest[name] = args[0].abs().max().item()

        each.self_attn.kv_b_proj.register_forward_hook(note)
    tiny.logits(model, prompt)
    assert found.keys() == largest.keys()
    for layer, scale in found.items():
        assert math.log2(scale).is_integer() and scale > 1
        assert 2 * largest[layer] / 448 * 0.95 < scale < 4 * largest[layer] / 448 * 1.05
    engine = open_engine(folder, "parallel=tp2", f"cache={folder}.ranks")
    assert scales_of(engine) == found
    engine.close()
    rounded = rounded_logits(model, TOKENS, lambda layer: (found[f"model.layers.{layer}.k_scale"], 1.0))
    assert relative_error(ours, rounded) < NEAR


@pytest.mark.sampled(2)
def test_where_nothing_can_be_measured_a_line_says_that_1_is_used(checkpoint: Path, capsys: pytest.CaptureFixture[str]):
    def line(*overrides: str) -> str:
        engine = open_engine(checkpoint, *overrides)
        assert set(scales_of(engine).values()) == {1.0}
        engine.close()
        (found,) = [line for line in capsys.readouterr().err.splitlines() if "kv scales" in line]
        return found

    assert line("load_dummy=true") == "atom-run: kv scales: weights are random; 1.0 is used"
    add_tokenizer(checkpoint, first=100)
    has = "the checkpoint has none, and its tokenizer cannot be used to measure them: "
    assert line().startswith(f"atom-run: kv scales: {has}") and "is not a token id" in has + line()
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    has = "the checkpoint has none, and no tokenizer to measure them"
    assert line() == f"atom-run: kv scales: {has}; 1.0 is used"


@pytest.mark.slow
@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", ["tp2", "tp2_pp2"])
def test_several_ranks_measure_what_one_does(
    layout: str, checkpoint: Path, thread_ranks: list[ThreadRanks], capsys: pytest.CaptureFixture[str]
):
    engine = open_engine(checkpoint)
    measured = scales_of(engine)
    engine.close()
    assert len(set(measured.values())) > 1 and "measured over" in capsys.readouterr().err
    kept = f"cache={checkpoint}.ranks"
    engine = open_engine(checkpoint, f"parallel={layout}", kept)
    found = scales_of(engine)  # of the first stage
    assert found and found.items() <= measured.items() and "measured over" in capsys.readouterr().err
    engine.close()
    engine = open_engine(checkpoint, kept)  # which reads them
    assert scales_of(engine) == measured
    engine.close()
    engine = open_engine(checkpoint, f"parallel={layout}", kept)
    assert scales_of(engine) == found and "measured over" not in capsys.readouterr().err
    tokens = engine.generate([TOKENS], SamplingParams(temperature=0, max_tokens=8))[0]["token_ids"]
    engine.close()
    engine = open_engine(checkpoint)
    assert engine.generate([TOKENS], SamplingParams(temperature=0, max_tokens=8))[0]["token_ids"] == tokens
    engine.close()


@pytest.mark.sampled(2)
def test_those_of_a_draft_are_measured_over_the_same_prompt(checkpoint: Path):
    """A model that drafts for itself has scales of its own, which are equal."""
    engine = open_engine(checkpoint, "serve.method=draft", f"serve.draft_model={checkpoint}")
    found = scales_of(engine)
    tokens_of = engine.generate([TOKENS], GREEDY)
    stats = engine.metrics.scheduler
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    engine.close()
    drafts = {name.removeprefix("draft:"): scale for name, scale in found.items() if name.startswith("draft:")}
    assert drafts == {name: scale for name, scale in found.items() if not name.startswith("draft:")}
    assert len(set(drafts.values())) > 1
    engine = open_engine(checkpoint)
    assert engine.generate([TOKENS], GREEDY)[0]["token_ids"] == tokens_of[0]["token_ids"]
    engine.close()


def test_the_text_is_the_same_before_and_after_and_can_be_read(checkpoint: Path):
    def text() -> str:
        return show(semantic_graph(load([f"checkpoint={checkpoint}", "quant.kv=fp8", f"cache={checkpoint}.cache"])))

    before = text()
    open_engine(checkpoint).close()
    assert text() == before == show(parse(before))
    assert 'measured("model.layers.2.k_scale"), measured("model.layers.2.v_scale")' in before
    found = [recipe for recipe in parse(before).recipes() if isinstance(recipe, Measured)]
    assert len(found) == 6 and all(str(recipe.type) == "fp32[1]" for recipe in found)
    assert "measured" not in show(semantic_graph(load([f"checkpoint={checkpoint}"])))
    with pytest.raises(ValueError, match="a scale's name is a string, not 3"):
        Measured(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("largest", "scale"), [(224.0, 1.0), (224.1, 2.0), (448.0, 2.0), (0.0, 1.0), (math.inf, 1.0), (math.nan, 1.0), (1e-3, 2**-17)])  # fmt: skip
def test_a_scale_is_a_power_of_2(largest: float, scale: float):
    assert scale_of(largest) == scale
