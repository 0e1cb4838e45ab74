"""vLLM's offline class: its arguments are the flags, its outputs are those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adapters
import pytest
import serving
import tiny
import torch

from atom import LLM, SamplingParams
from atom.entrypoints.llm import LoRARequest, read_arguments
from atom.errors import CheckpointError, ConfigError, RequestError, UnsupportedError

PROMPT = tiny.prompt(12)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def opened(checkpoints: Callable[[str], Path]) -> Iterator[LLM]:
    llm = LLM(
        str(checkpoints("llama")), level=0, dtype=torch.float32, runner="pooling", max_num_seqs=8, enable_lora=True
    )
    yield llm
    llm.llm_engine.close()


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        ({}, []),
        ({"tokenizer": None, "seed": None}, []),
        ({"max_model_len": "4k", "swap_space": 4}, ["serve.max_model_len=4000", "serve.swap_space=4294967296"]),
        ({"dtype": torch.float16, "enforce_eager": True}, ["dtype='float16'", "serve.enforce_eager=true"]),
        ({"enable_prefix_caching": False}, ["serve.enable_prefix_caching=false"]),
        ({"load_format": "dummy", "tensor_parallel_size": 2}, ["parallel.tensor=2", "load_dummy=true"]),
        ({"speculative_config": {"method": "ngram"}}, ["serve.method='ngram'"]),
        ({"disable_log_stats": True, "tokenizer_mode": "auto"}, []),
        ({"disable_log_stats": False, "enable_eplb": False}, []),
        ({"skip_tokenizer_init": False, "enforce_eager": False}, ["serve.enforce_eager=false"]),
        ({"lora_modules": [{"name": "a", "path": "/b"}]}, ["serve.lora_modules={a:'/b'}"]),
        ({"serve.kv_cache_memory": 1024}, ["serve.kv_cache_memory=1024"]),
    ],
)
def test_arguments_are_flags(arguments: dict[str, Any], overrides: list[str]):
    assert read_arguments("org/name", arguments).overrides() == ["checkpoint='org/name'", *overrides]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"max_num_sqs": 1}, ConfigError, "max_num_sqs=1 (did you mean max_num_seqs?); docs/from-vllm.md lists them"),
        ({"max_num_seqs": "x"}, ConfigError, "argument max_num_seqs: invalid int value: 'x'; docs/from-vllm.md"),
        ({"help": True}, UnsupportedError, "help: flags of a command, which show something and end it"),
        ({"tokenizer": "x"}, UnsupportedError, "tokenizer: it is the checkpoint's own"),
        ({"hf_overrides": {"rope_theta": 5}}, ConfigError, "rope_theta is not read (known: architectures"),
        ({"rope_theta": 5}, UnsupportedError, 'model\'s own field **{"model.attention.rope.theta": 1e6}'),
        ({"compilation_config": 3}, UnsupportedError, "compilation_config: write level 0, 1, 2 or 3"),
        ({"dtype": object()}, RequestError, "dtype: a value of type object is not taken"),
    ],
)
def test_a_wrong_argument_is_named_as_it_was_written(arguments: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind) as error:
        read_arguments(None, arguments)
    assert message in str(error.value) and "--" not in str(error.value)


def test_outputs_are_those_of_transformers(opened: LLM, references: Callable[[str], Any]):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    (output,) = opened.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    (answer,) = output.outputs
    assert (output.prompt, output.prompt_token_ids, output.finished) == (None, PROMPT, True)
    assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
    model = references("llama")
    tiny.assert_greedy({"token_ids": answer.token_ids}, PROMPT, model)
    expected = tiny.logits(model, PROMPT + answer.token_ids).log_softmax(-1)
    assert answer.logprobs is not None and output.prompt_logprobs is not None and answer.cumulative_logprob is not None
    for place, (token, found) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        best = expected[len(PROMPT) - 1 + place].topk(2)
        assert [each.rank for each in found.values()] == [1, 2]
        assert next(iter(found)) == token
        assert torch.allclose(torch.tensor([each.logprob for each in found.values()]), best.values, atol=1e-3)
    assert answer.cumulative_logprob == pytest.approx(
        sum(found[t].logprob for t, found in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    for place in range(1, len(PROMPT)):
        found = output.prompt_logprobs[place] or {}
        assert found[PROMPT[place]].logprob == pytest.approx(expected[place - 1, PROMPT[place]].item(), abs=1e-3)


def test_answers_of_several_prompts_are_distinguished(opened: LLM):
    sampled = SamplingParams(n=2, max_tokens=3, seed=1, ignore_eos=True)
    first, second = opened.generate([PROMPT, PROMPT[:5]], [sampled, GREEDY], use_tqdm=False)
    assert [each.index for each in first.outputs] == [0, 1] and len(second.outputs) == 1
    assert (first.prompt_token_ids, second.prompt_token_ids) == (PROMPT, PROMPT[:5])
    assert first.outputs[0].logprobs is None and first.prompt_logprobs is None


def test_a_stop_token_is_the_reason(opened: LLM):
    (output,) = opened.generate([PROMPT], GREEDY, use_tqdm=False)
    token = output.outputs[0].token_ids[2]
    (stopped,) = opened.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[token]), use_tqdm=False
    )
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", token)


def test_a_repetition_is_the_reason_by_vllms_names(opened: LLM):
    detection = {"max_pattern_size": 1, "min_count": 3}
    params = SamplingParams(max_tokens=8, ignore_eos=True, allowed_token_ids=[5], repetition_detection=detection)
    (output,) = opened.generate([PROMPT], params, use_tqdm=False)
    (answer,) = output.outputs
    assert (answer.token_ids, answer.finish_reason, answer.stop_reason) == (
        [5] * 3,
        "repetition",
        "repetition_detected",
    )


def test_texts_chats_and_stop_strings(tmp_path: Path):
    llm = LLM(str(serving.save_talker(tmp_path / "talker")), level=0)
    greedy = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    try:
        (whole,) = llm.generate("Hello there", SamplingParams(**greedy), use_tqdm=False)
        assert whole.prompt == "Hello there"
        text = whole.outputs[0].text or ""
        (stopped,) = llm.generate("Hello there", SamplingParams(**greedy, stop=text[1]), use_tqdm=False)
        answer = stopped.outputs[0]
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (text[: text.index(text[1])], "stop", text[1])
        (chat,) = llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(**greedy), use_tqdm=False)
        assert chat.prompt is not None and "<|im_start|>user\nHi<|im_end|>" in chat.prompt
    finally:
        llm.llm_engine.close()


def test_an_adapter_is_loaded_when_it_is_asked_for(opened: LLM, references: Callable[[str], Any], tmp_path: Path):
    folder = adapters.save(references("llama"), tmp_path / "sql", rank=4)
    request = LoRARequest("sql", 1, str(folder))
    plain, adapted, again = opened.generate([PROMPT] * 3, GREEDY, use_tqdm=False, lora_request=[None, request, request])
    assert adapted.outputs[0].token_ids == again.outputs[0].token_ids != plain.outputs[0].token_ids
    opened.llm_engine.load_lora_adapter("by hand", str(folder))
    (known,) = opened.generate([PROMPT], GREEDY, lora_request=LoRARequest("by hand", 3, str(folder)))
    assert known.outputs[0].token_ids == adapted.outputs[0].token_ids
    opened.llm_engine.unload_lora_adapter("by hand")
    assert opened.llm_engine.lora_adapters == ["sql"]
    with pytest.raises(RequestError, match=f"the adapter sql is that of {folder}, not of /other; choose another name"):
        opened.generate([PROMPT], GREEDY, lora_request=LoRARequest("sql", 1, "/other"))
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        opened.generate([PROMPT], GREEDY, lora_request=LoRARequest("none", 2, "/nowhere"))
    with pytest.raises(RequestError, match=r"lora_request='sql' is no atom\.entrypoints\.llm\.LoRARequest"):
        wrong: Any = ["sql"]
        opened.generate([PROMPT], GREEDY, lora_request=wrong)


def test_embeddings_and_scores(opened: LLM):
    first, second = (
        torch.tensor(each.outputs.embedding) for each in opened.embed([PROMPT, PROMPT[:5]], use_tqdm=False)
    )
    (score,) = opened.score([PROMPT], [PROMPT[:5]], use_tqdm=False)
    assert score.outputs.score == pytest.approx((first @ second / first.norm() / second.norm()).item(), abs=1e-5)


def test_what_is_not_there_says_what_is(opened: LLM):
    with pytest.raises(UnsupportedError, match=r"LLM\.beam_search: there is no beam search; SamplingParams"):
        opened.beam_search  # noqa: B018
    assert not hasattr(opened, "encode")
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        opened.nope  # noqa: B018
    with pytest.raises(RequestError, match="stop and stop_strings are the same; give one"):
        SamplingParams(stop="a", stop_strings=["b"])
