"""Classifiers and rerankers against transformers, in float32: labels, pairs, and the odds of two tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import serving
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file

from atom import LLMEngine
from atom.entrypoints.llm import LLM
from atom.errors import CheckpointError, ConfigError, RequestError

PROMPTS = [tiny.prompt(size, seed=size) for size in (1, 16, 40)]
FIELDS: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "kv_cache_memory": 1 << 24, "max_num_batched_tokens": 16}
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path, checkpoints: Any) -> Save:
    """Saves a classifier of a tiny family's sizes with random weights."""

    def save(name: str, num_labels: int, **changes: Any) -> Path:
        config = transformers.AutoConfig.from_pretrained(checkpoints(name))
        config.update({"pad_token_id": 0, "num_labels": num_labels, **changes})
        torch.manual_seed(num_labels)
        model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        for tensor in model.parameters():
            tensor.data += torch.randn_like(tensor) * 0.1
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@torch.inference_mode()
def logits_of(folder: Path, prompts: list[list[int]] = PROMPTS) -> torch.Tensor:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return torch.cat([model(torch.tensor([prompt])).logits for prompt in prompts])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "num_labels", "problem", "activation"),
    [
        ("qwen3", 3, None, lambda logits: logits.softmax(-1)),
        ("llama", 2, "single_label_classification", lambda logits: logits.softmax(-1)),
        ("qwen2", 3, "multi_label_classification", torch.sigmoid),
        ("mistral", 1, None, torch.sigmoid),
        ("qwen3", 1, "regression", lambda logits: logits),
    ],
)
def test_labels_have_the_probabilities_of_transformers(
    name: str, num_labels: int, problem: str | None, activation: Any, save: Save
):
    labels = {at: f"is {at}" for at in range(num_labels)}
    folder = save(name, num_labels, problem_type=problem, id2label=labels)
    expected = activation(logits_of(folder))
    engine = LLMEngine(str(folder), level=0, **FIELDS)
    found = engine.classify(PROMPTS)
    torch.testing.assert_close(torch.tensor([each["probs"] for each in found]), expected, atol=2e-5, rtol=0)
    best = expected.argmax(-1).tolist()
    assert [(each["label"], each["num_classes"]) for each in found] == [(f"is {at}", num_labels) for at in best]
    assert [each["num_tokens_input"] for each in found] == [1, 16, 40]
    assert len(engine.embed(PROMPTS[:1])[0]["embedding"]) == engine.config.model.hidden, "embeddings stay what they are"


def test_a_pair_is_scored_as_one_prompt_by_the_one_label(save: Save):
    folder = save("qwen3", 1)
    llm = LLM(str(folder), device="cpu", dtype="fp32", level=0, kv_cache_memory_bytes=1 << 24)
    pairs = [PROMPTS[1] + PROMPTS[2], PROMPTS[1] + PROMPTS[0]]
    expected = logits_of(folder, pairs).sigmoid()[:, 0].tolist()
    found = llm.score(
        {"prompt_token_ids": PROMPTS[1]}, [{"prompt_token_ids": each} for each in (PROMPTS[2], PROMPTS[0])]
    )
    assert [each.outputs.score for each in found] == pytest.approx(expected, abs=2e-5)
    (labels,) = llm.classify({"prompt_token_ids": pairs[0]})
    assert labels.outputs.probs == pytest.approx(expected[:1], abs=2e-5) and labels.outputs.num_classes == 1
    with pytest.raises(RequestError, match="a pair is two texts, or two lists of token ids"):
        llm.score("a text", [{"prompt_token_ids": [1]}])


def test_the_odds_of_two_tokens_are_a_score(tmp_path: Path):
    """As Qwen3-Reranker's own code has it: the softmax over the logits of no and yes after the prompt."""
    folder = serving.save_talker(tmp_path / "talker")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["Is it red? It is.", "Is it red? Bread."]
    ids = tokenizer.convert_tokens_to_ids(["n", "y"])
    with torch.inference_mode():
        logits = [model(torch.tensor([tokenizer(text).input_ids])).logits[0, -1, ids] for text in texts]
    expected = torch.stack(logits).softmax(-1)[:, 1].tolist()
    fields = {**FIELDS, "serve.pooler_config.classifier_from_token": ["n", "y"]}
    engine = LLMEngine(str(folder), level=0, **fields)
    assert engine.score("Is it red? ", ["It is.", "Bread."]) == pytest.approx(expected, abs=2e-5)
    (answer,) = engine.generate(texts[:1])
    assert answer["num_tokens_output"] > 0, "it still writes"
    for tokens, why in ((["n", "yes"], "'yes' is not one token"), (["n", "y", "z"], "give two tokens")):
        with pytest.raises(ConfigError, match=why):
            LLMEngine(str(folder), level=0, **{**fields, "serve.pooler_config.classifier_from_token": tokens})


def test_a_model_without_labels_says_so(checkpoints: Any, save: Save):
    engine = LLMEngine(str(checkpoints("qwen3")), level=0, **FIELDS)
    with pytest.raises(RequestError, match=r"^this model has no labels: its checkpoint is no classifier"):
        engine.classify([PROMPTS[0]])
    folder = save("qwen3", 3)
    with pytest.raises(RequestError, match="this model has 3 labels, and a pair is scored by one; call classify"):
        LLMEngine(str(folder), level=0, **FIELDS).score("a", "b")
    with pytest.raises(ConfigError, match="labels are scored by the last token; leave it out"):
        LLMEngine(str(folder), **{**FIELDS, "serve.pooler_config.pooling_type": "MEAN"})
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"the checkpoint has no tensor score\.weight, which scores labels"):
        LLMEngine(str(folder), level=0, **FIELDS)
