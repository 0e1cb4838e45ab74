"""Conversations of several turns: their prompts, a trace of them, and what a server is sent."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from benchmarks.stub_server import Answer, Asked, Reply, Stub, answering, completion_events, serving
from tokenizers import Tokenizer as Reference

from atom.benchmarks.benchmark_serving import main
from atom.benchmarks.benchmark_utils import UsageError
from atom.benchmarks.multi_turn import RandomPrompts, read_trace, sample_multi_turn, sample_trace
from atom.benchmarks.prompts import PromptForm
from atom.benchmarks.random_dataset import find_stable_ids
from atom.benchmarks.tokenizer import load_tokenizer

SIZES = {"num_turns": 3, "shared_len": 20, "new_len": 10, "output_len": 4}
SMALL = ["--dataset-name", "multi-turn", "--num-prompts", "2", "--multi-turn-turns", "3", "--multi-turn-shared-len", "20",
         "--multi-turn-new-len", "10", "--multi-turn-output-len", "4", "--ignore-eos", "--disable-tqdm"]  # fmt: skip


def draw(seed: int = 0, form: PromptForm | None = None) -> RandomPrompts:
    rng = numpy.random.default_rng(seed)
    ids = numpy.arange(5, 300) if form is None else find_stable_ids(rng, form.tokenizer)
    return RandomPrompts(rng, ids, form, seeds=[seed])


def test_conversations_share_their_beginning_and_add_the_same_lengths():
    conversations = sample_multi_turn(draw(), 4, **SIZES)
    assert [[each.prompt_len for each in turns] for turns in conversations] == [[30, 10, 10]] * 4
    assert all(len(turn.prompt) == turn.prompt_len for turns in conversations for turn in turns)
    assert {turn.expected_output_len for turns in conversations for turn in turns} == {4}
    assert len({tuple(turns[0].prompt[:20]) for turns in conversations}) == 1
    new = [tuple(turn.prompt[-10:]) for turns in conversations for turn in turns]
    assert len({*new}) == 12, "what a turn adds is no other's"
    assert all(5 <= token < 300 for turns in conversations for turn in turns for token in turn.prompt)
    assert not any(turn.delay for turns in conversations for turn in turns)


def test_lengths_vary_with_the_ratio_and_pauses_around_the_think_time():
    conversations = sample_multi_turn(draw(), 2000, **SIZES | {"shared_len": 0}, range_ratio=0.5, think_time=3.0)
    lengths = {(turn.prompt_len, turn.expected_output_len) for turns in conversations for turn in turns}
    assert {each for each, _ in lengths} == {*range(5, 11)} and {each for _, each in lengths} == {2, 3, 4}
    later = [turn.delay for turns in conversations for turn in turns[1:]]
    assert not any(turns[0].delay for turns in conversations)
    assert numpy.mean(later) == pytest.approx(3, rel=0.05) and numpy.std(later) == pytest.approx(3, rel=0.08)


def test_texts_are_counted_with_the_template_of_a_first_turn_only(
    tokenizer_folder: Path, reference_tokenizer: Reference
):
    form = PromptForm(load_tokenizer(str(tokenizer_folder)), is_chat=True)
    first, second, _ = sample_multi_turn(draw(0, form), 1, **SIZES | {"new_len": 40})[0]
    ids = reference_tokenizer.encode(f"<s><user>{first.prompt}<assistant>", add_special_tokens=False).ids
    assert first.prompt_len == len(ids) == 60
    assert second.prompt_len == len(reference_tokenizer.encode(second.prompt, add_special_tokens=False).ids) == 40


def write_trace(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps({"output_length": 9} | line) for line in lines) + "\n\n")
    return path


def test_requests_of_a_trace_share_the_blocks_that_they_name(tmp_path: Path):
    path = write_trace(
        tmp_path,
        {"timestamp": 3052, "input_length": 1100, "hash_ids": [0, 1, 9]},
        {"timestamp": 0, "input_length": 600, "hash_ids": [0, 1], "output_length": 52},
        {"timestamp": 3052, "input_length": 700},
    )
    [short], [long], [bare] = sample_trace(draw(), 9, path, keeps_times=True)
    assert (short.prompt_len, short.expected_output_len, short.delay, long.delay) == (600, 52, 0.0, 3.052)
    assert short.prompt == long.prompt[:600] and len(long.prompt) == 1100 and len(bare.prompt) == 700
    assert long.prompt[:512] != long.prompt[512:1024] and bare.prompt[:512] != long.prompt[:512]
    [other], _, _ = sample_trace(draw(1), 9, path, keeps_times=False)
    assert other.prompt != short.prompt, "of another seed"
    assert [turns[0].delay for turns in sample_trace(draw(), 2, path, keeps_times=False)] == [0.0, 0.0]


def test_lines_of_a_session_are_turns(tmp_path: Path):
    path = write_trace(
        tmp_path,
        {"session_id": "a", "input_length": 600, "hash_ids": [3, 4], "timestamp": 5},
        {"session_id": 7, "input_length": 30},
        {"session_id": "a", "input_length": 20, "hash_ids": [5], "delay": 250},
    )
    other, first = sample_trace(draw(), 9, path, keeps_times=True)
    assert [len(turns) for turns in (other, first)] == [1, 2]
    assert [(turn.prompt_len, turn.delay) for turn in first] == [(600, 0.005), (20, 0.25)]


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("\n", "trace.jsonl has no request"),
        ("{", "line 1 is no request of a trace in Mooncake's format"),
        ('{"input_length": 3}', "line 1 is no request of a trace in Mooncake's format: .*output_length"),
        ('{"input_length": 3, "output_length": 0}', "line 1: lengths are 1 at least"),
        ('{"input_length": 3, "output_length": 1, "timestamp": -1}', "times and hash_ids are not negative"),
        ('{"input_length": 3, "output_length": 1, "hash_ids": [-1]}', "times and hash_ids are not negative"),
    ],
)
def test_a_line_that_is_no_request_is_named(text: str, mistake: str, tmp_path: Path):
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(UsageError, match=mistake):
        read_trace(tmp_path / "trace.jsonl")


def counting(ids: itertools.count[int]) -> Answer:
    """Answers with new tokens, 100, 101, …; all of a prompt but its last ten tokens is cached, if it is later."""

    async def answer(asked: Asked, reply: Reply) -> None:
        body = asked.json()
        num, prompt_len = body["max_tokens"], len(body["prompt"])
        tokens = [next(ids) for _ in range(num)]
        counts = {"prompt_tokens": prompt_len, "cached_tokens": prompt_len - 10 if prompt_len > 30 else 0}
        events = completion_events([f" {each}" for each in tokens], **counts, token_ids=tokens)
        await answering(events)(asked, reply)

    return answer


def run(stub: Stub, folder: Path, *more: str) -> dict[str, Any]:
    argv = ["--model", str(folder), "--base-url", stub.url, *SMALL, "--save-result", "--save-detailed", "--result-dir"]
    assert main([*argv, str(folder / "results"), *more]) == 0
    (path,) = (folder / "results").glob("*.json")
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_each_turn_sends_the_ids_of_all_that_was_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(counting(itertools.count(100))) as stub:
        result = run(stub, tmp_path, "--max-concurrency", "1", "--request-id-prefix", "r")
    warmup, *asked = [each.json() for each in stub.of("POST")]
    assert len(warmup["prompt"]) == 30 and "return_token_ids" not in warmup
    assert [len(each["prompt"]) for each in asked] == [30, 44, 58] * 2
    for first, second in (asked[:2], asked[1:3], asked[3:5]):
        said, answered = len(first["prompt"]), second["prompt"][len(first["prompt"]) :][:4]
        assert second["prompt"][:said] == first["prompt"]
        assert answered == [*range(answered[0], answered[0] + 4)] and answered[0] >= 104, "those of the answer"
    assert [each.get("return_token_ids") for each in asked] == [True, True, None] * 2
    assert {each["ignore_eos"] for each in asked} == {True}
    assert [each.headers.get("x-request-id") for each in stub.of("POST")][1:] == [f"r{at}" for at in range(6)]

    expected = {
        "dataset_name": "multi-turn", "num_prompts": 2, "completed": 6, "failed": 0, "total_input_tokens": 264,
        "total_output_tokens": 24, "turns": [0, 1, 2] * 2, "input_lens": [30, 44, 58] * 2, "total_cached_tokens": 164,
        "first_turn_cached_share": 0.0, "later_turns_cached_share": pytest.approx(164 / 204),
    }  # fmt: skip
    assert {key: result[key] for key in expected} == expected
    firsts, laters = result["ttfts"][::3], [each for at, each in enumerate(result["ttfts"]) if at % 3]
    assert result["mean_first_turn_ttft_ms"] == pytest.approx(sum(firsts) / 2 * 1000)
    assert result["mean_later_turns_ttft_ms"] == pytest.approx(sum(laters) / 4 * 1000)
    shown = capsys.readouterr()
    about = "2 conversations of 3 turns to"
    assert about in shown.err and "; first prompts of 30 tokens, answers of 4, 10 more in each later turn" in shown.err
    assert "another length" not in shown.err and "First Turns" in shown.out


def test_a_chat_repeats_texts_as_messages(tokenizer_folder: Path, tmp_path: Path):
    events = completion_events([" it", " was"], chat=True)
    with serving(answering(events)) as stub:
        argv = ["--model", str(tokenizer_folder), "--base-url", stub.url, "--backend", "openai-chat", *SMALL]
        assert main([*argv, "--multi-turn-new-len", "40", "--max-concurrency", "1"]) == 0
    messages = [each.json()["messages"] for each in stub.of("POST")][1:4]
    assert [[each["role"] for each in said] for said in messages] == [
        ["user"], ["user", "assistant", "user"], ["user", "assistant", "user", "assistant", "user"]
    ]  # fmt: skip
    assert messages[2][:3] == messages[1] and messages[1][:1] == messages[0]
    assert messages[1][1]["content"] == messages[2][3]["content"] == " it was"


def test_texts_are_joined_for_other_backends(tokenizer_folder: Path, tmp_path: Path):
    with serving(answering(completion_events([" it", " was"]))) as stub:
        argv = ["--model", str(tokenizer_folder), "--base-url", stub.url, "--backend", "openai", *SMALL]
        assert main([*argv, "--multi-turn-new-len", "40", "--max-concurrency", "1"]) == 0
    bodies = [each.json() for each in stub.of("POST")][1:4]
    first, second, third = (each["prompt"] for each in bodies)
    assert second.startswith(f"{first} it was") and third.startswith(f"{second} it was")
    assert not any("return_token_ids" in each for each in bodies)


def test_texts_need_a_tokenizer_and_ids_a_server_that_returns_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(answering(completion_events([" it"]))) as stub:
        argv = ["--model", str(tmp_path), "--base-url", stub.url, *SMALL]
        assert main([*argv, "--backend", "openai"]) == 2
        assert "has no tokenizer" in capsys.readouterr().err
        assert main([*argv, "--multi-turn-turns", "2"]) == 1
    err = capsys.readouterr().err
    assert "the server does not return token_ids, which the next turn's prompt needs; --backend openai sends" in err


def test_a_trace_is_sent_at_its_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_trace(tmp_path, *({"input_length": 40, "hash_ids": [0], "timestamp": at} for at in (0, 150, 300)))
    with serving(counting(itertools.count(100))) as stub:
        result = run(stub, tmp_path, "--dataset-path", str(path), "--num-prompts", "3")
    warmup, *asked = [each.json()["prompt"] for each in stub.of("POST")]
    assert len(asked) == 3 and asked[0] == asked[1] == asked[2] != warmup, "a warm-up leaves no block in a cache"
    starts = result["start_times"]
    assert starts[1] - starts[0] >= 0.14 and starts[2] - starts[0] >= 0.29, "none is early, whatever delays it"
    assert "first_turn_cached_share" not in result and result["output_lens"] == [9] * 3
    assert "3 requests to" in (err := capsys.readouterr().err) and "over 0.3 s, as in the trace; prompts of 40" in err
