"""The embedded default on real text, against transformers with the same tensors."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from law import relative_error
from probe import assert_logits, logits_of
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from atom import LLMEngine, SamplingParams
from atom.checkpoint import SilentProgress
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.graph import TORCH_DTYPES
from atom.runtime.types import RequestOutput

pytestmark = [pytest.mark.early, pytest.mark.usefixtures("one_compiler")]

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "The quick brown fox jumps over the lazy dog. Translate this sentence into Spanish:",
    "List three reasons why the sky is blue.",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
    "Once upon a time, in a village by the mountains, there lived",
    "Explain to a child what a computer does, in two sentences.",
    "Die Hauptstadt von Deutschland ist",
    "Summarise: Water boils at 100 degrees Celsius at sea level, and at a lower temperature on a mountain.",
]
MORE_PROMPTS = [f"{text} Answer in one word." for text in PROMPTS]


@pytest.fixture(scope="module")
def reference(embedded_gguf: Any) -> Any:
    """transformers' model with the tensors that atom reads, in float32."""
    config = load([])
    checkpoint = open_for(config, SilentProgress())
    model = LlamaForCausalLM(LlamaConfig(**config.hf, attn_implementation="eager")).eval()
    state = {
        name: torch.frombuffer(bytearray(checkpoint.read(name)), dtype=TORCH_DTYPES[stored.dtype]).view(stored.shape)
        for name, stored in checkpoint.tensors.items()
    }
    missing, surplus = model.load_state_dict(state, strict=False)
    assert (missing, surplus) in (([], []), (["lm_head.weight"], []))
    return model


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def engine(embedded_gguf: Any, request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    engine = LLMEngine(dtype="fp32", level=request.param, kv_cache_memory=1 << 28, max_model_len=1024)
    yield engine
    engine.close()


@pytest.fixture(scope="module", autouse=True)
def all_threads() -> Iterator[None]:
    """A model of real size wants the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_logits_at_every_position(engine: LLMEngine, reference: Any):
    for prompt in PROMPTS[::3]:
        tokens = engine._engine.vocabulary.tokenize(prompt)
        assert_logits(engine, tokens, reference)


@pytest.mark.slow
def test_24_greedy_tokens_of_10_chats_together(engine: LLMEngine, reference: Any):
    prompts = [engine.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        tiny.assert_greedy(answer, prompt, reference)


def test_it_answers_a_question(engine: LLMEngine):
    prompt = engine.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=64))
    assert (answer["text"], answer["finish_reason"]) == ("The capital of France is Paris.", "eos")


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_bf16_is_as_near_to_float32_as_that_of_transformers(reference: Any, level: int):
    engine = LLMEngine(dtype="bf16", level=level, kv_cache_memory=1 << 28)
    prompts = [engine._engine.vocabulary.tokenize(text) for text in PROMPTS + MORE_PROMPTS]
    exact = [tiny.logits(reference, tokens) for tokens in prompts]
    ours = [relative_error(logits_of(engine, tokens), logits) for tokens, logits in zip(prompts, exact, strict=True)]
    half = copy.deepcopy(reference).to(torch.bfloat16)
    theirs = [relative_error(tiny.logits(half, tokens), logits) for tokens, logits in zip(prompts, exact, strict=True)]
    engine.close()
    assert sum(ours) / len(ours) <= 1.25 * sum(theirs) / len(theirs)


def allocations_of_a_step(engine: LLMEngine) -> list[int]:
    """Bytes that the profiler saw allocated (and, negative, given back) in one step, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.step()
    events = profiler.profiler.kineto_results.events()
    return [event.nbytes() for event in events if event.name() == "[memory]"]


@pytest.mark.slow
def test_a_decode_step_allocates_less_than_a_hundredth_of_the_weights():
    engine = LLMEngine(dtype="bf16", level=1, max_model_len=512, kv_cache_memory=1 << 28)
    weights = 2 * 134_515_008
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for num_requests in (1, 16):
        engine.add_request([list(range(100 + i, 108 + i)) for i in range(num_requests)], params)
        for _ in range(5):
            engine.step()
        allocated = allocations_of_a_step(engine)
        assert 0 < max(itertools.accumulate(allocated)) < weights / 100, "held at once"
        if num_requests == 1:
            assert sum(size for size in allocated if size > 0) < weights / 100, "taken in all, given back or not"
        while not engine.is_finished():
            engine.step()
    engine.close()


@pytest.mark.slow
def test_stop_strings_and_streams_show_whole_text(engine: LLMEngine):
    prompt = engine.encode_chat([{"role": "user", "content": "Repeat: 日本語 🎉 naïve café. Repeat it again."}])
    seen: list[RequestOutput] = []
    params = SamplingParams(temperature=0, max_tokens=64, stop_strings=["never there"])
    engine.add_request([prompt], params, seen.append)
    while not engine.is_finished():
        ended = engine.step()
    text = "".join(output.text or "" for output in seen)
    assert text == ended[0].text and len(seen) > 5
    assert "\ufffd" not in text
    assert [token for output in seen for token in output.token_ids] == ended[0].output
    stop = text[10:14]
    (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=64, stop_strings=[stop]))
    assert (answer["text"], answer["finish_reason"]) == (text[: text.index(stop)], "stop_sequence")


@pytest.fixture(scope="module")
def shallow(reference: Any) -> Any:
    """The first layers of transformers' model."""
    config = LlamaConfig(**{**reference.config.to_dict(), "num_hidden_layers": 4}, attn_implementation="eager")
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(reference.state_dict(), strict=False)
    return model


@pytest.fixture(scope="module")
def moe_checkpoint(shallow: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its MLP in each of three experts, of which a random router chooses two."""
    folder, generator = tmp_path_factory.mktemp("moe"), torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in shallow.state_dict().items():
        layer, _, projection = name.partition(".mlp.")
        if projection:
            place = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}[projection]
            for expert in range(3):
                tensors[f"{layer}.block_sparse_moe.experts.{expert}.{place}.weight"] = tensor.clone()
            tensors[f"{layer}.block_sparse_moe.gate.weight"] = torch.randn(3, 576, generator=generator)
        elif name != "lm_head.weight":
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    written = shallow.config.to_dict() | {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None}
    written |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    written.pop("quantization_config", None)  # that of the GGUF file; these are plain
    (folder / "config.json").write_text(json.dumps(written))
    return folder


@pytest.mark.slow
def test_experts_that_are_all_its_mlp_give_the_same_tokens(moe_checkpoint: Path, shallow: Any, engine: LLMEngine):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [engine._engine.vocabulary.tokenize(text) for text in PROMPTS[:2]]
    mixture = LLMEngine(model=str(moe_checkpoint), dtype="fp32", level=1, kv_cache_memory=1 << 28, max_model_len=1024)
    for prompt, answer in zip(prompts, mixture.generate(prompts, params), strict=True):
        tiny.assert_greedy(answer, prompt, shallow)
        assert_logits(mixture, prompt, shallow)
    mixture.close()
