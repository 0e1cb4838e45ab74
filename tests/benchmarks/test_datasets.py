from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from tokenizers import Tokenizer as Reference

from atom.benchmarks.benchmark_utils import UsageError
from atom.benchmarks.datasets import (
    read_hf,
    sample_burstgpt,
    sample_sharegpt,
    sample_sonnet,
)
from atom.benchmarks.prompts import PromptForm
from atom.benchmarks.tokenizer import load_tokenizer
from atom.measurement.conversations import read_sharegpt

LONG = "it was the age of wisdom " * 400


@pytest.fixture
def form(tokenizer_folder: Path) -> PromptForm:
    return PromptForm(load_tokenizer(str(tokenizer_folder)))


def rng() -> numpy.random.Generator:
    return numpy.random.default_rng(0)


def turns(prompt: str, answer: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]}


def test_sharegpt_takes_the_first_two_turns(form: PromptForm, reference_tokenizer: Reference, tmp_path: Path):
    path = tmp_path / "sharegpt.json"
    good = [(f"was it the age of {each} ?", f"it was the season of {each}") for each in ("light", "darkness", "hope")]
    useless = [turns("x", "it was the winter"), turns("was it the spring of hope", "y"), turns(LONG, "it was the end"),
               turns("was it the worst of times", LONG), {"conversations": [{"from": "human", "value": "alone"}]}, 5]  # fmt: skip
    path.write_text(json.dumps([*(turns(*each) for each in good), *useless]))
    requests = sample_sharegpt(rng(), form, 3, read_sharegpt(path), output_len=None)
    expected = [
        (prompt, len(reference_tokenizer.encode(prompt).ids), len(reference_tokenizer.encode(answer).ids) - 1)  # no <s>
        for prompt, answer in good
    ]
    assert sorted((each.prompt, each.prompt_len, each.expected_output_len) for each in requests) == sorted(expected)


def test_too_few_usable_entries_are_reported(form: PromptForm, capsys: pytest.CaptureFixture[str]):
    conversations = [("was it the age of light", "it was the age of wisdom")]
    assert len(sample_sharegpt(rng(), form, 5, conversations, output_len=None)) == 1
    assert "the data set has only 1 usable entries: so many requests are sent, not 5" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the data set has no usable conversation"):
        sample_sharegpt(rng(), form, 5, [("x", "y")], output_len=None)


def test_an_output_length_replaces_the_answers_own(form: PromptForm):
    (request,) = sample_sharegpt(rng(), form, 1, [("was it the age of light", None)], output_len=33)
    assert request.expected_output_len == 33
    (request,) = sample_sharegpt(rng(), form, 1, [("was it the age of light", None)], output_len=None)
    assert request.expected_output_len == 128


def test_sonnet_shares_a_prefix_and_meets_the_lengths(form: PromptForm, reference_tokenizer: Reference, tmp_path: Path):
    path = tmp_path / "sonnet.txt"
    path.write_text("\n".join(f"it was the age of wisdom {at}" for at in range(60)))
    requests = sample_sonnet(rng(), form, path, [50] * 5, input_len=400, prefix_len=200)
    assert [each.expected_output_len for each in requests] == [50] * 5
    assert [each.prompt_len for each in requests] == [
        len(reference_tokenizer.encode(each.prompt).ids) for each in requests
    ]
    assert all(380 <= each.prompt_len <= 420 for each in requests)
    lines = [each.prompt.splitlines() for each in requests]
    assert lines[0][0] == "Pick as many lines as you can from these poem lines:"
    num_shared = next(at for at in range(99) if len({each[at] for each in lines}) > 1)
    assert lines[0][1:3] == ["it was the age of wisdom 0", "it was the age of wisdom 1"]
    shared = "\n".join(lines[0][:num_shared])
    assert 180 <= len(reference_tokenizer.encode(shared).ids) <= 220


def test_sonnet_refuses_lengths_that_cannot_be(form: PromptForm, tmp_path: Path):
    path = tmp_path / "sonnet.txt"
    path.write_text("it was the age of wisdom\n")
    for lengths in ({"input_len": 10, "prefix_len": 5}, {"input_len": 300, "prefix_len": 310}):
        with pytest.raises(UsageError, match="the task itself takes"):
            sample_sonnet(rng(), form, path, [5], **lengths)
    with pytest.raises(UsageError, match="has only"):
        sample_sonnet(rng(), form, path, [5], input_len=900, prefix_len=800)
    path.write_text("\n")
    with pytest.raises(UsageError, match="has no lines"):
        sample_sonnet(rng(), form, path, [5], input_len=300, prefix_len=200)


TRACE = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
1,GPT-4,40,9,49,Conversation log
2,ChatGPT,50,9,59,Conversation log
3,GPT-4,60,0,60,Conversation log
4,GPT-4,30,8,38,API log
"""


def test_burstgpt_gives_the_lengths_of_answered_requests_of_gpt4(
    form: PromptForm, reference_tokenizer: Reference, tmp_path: Path
):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    requests = sample_burstgpt(rng(), form, 2, path)
    counted = {(len(reference_tokenizer.encode(each.prompt).ids), each.expected_output_len) for each in requests}
    assert counted == {(40, 9), (30, 8)}
    assert len(sample_burstgpt(rng(), form, 7, path)) == 7  # more than there are: some come again


@pytest.mark.parametrize(
    ("text", "mistake"),
    [("a,b\n1,2\n", "has no column Model, Request tokens, Response tokens"), (TRACE[:66], "has no answered request")],
)
def test_a_file_that_is_no_trace_is_named(text: str, mistake: str, form: PromptForm, tmp_path: Path):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(UsageError, match=mistake):
        sample_burstgpt(rng(), form, 1, tmp_path / "trace.csv")


def test_hf_reads_a_file_here_and_no_more_than_needed(tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(turns(f"question {at}", f"answer {at}")) + "\n" for at in range(40)))
    assert read_hf(str(path), subset=None, split=None, num=2) == [
        (f"question {at}", f"answer {at}") for at in range(10)
    ]


def test_hf_names_what_it_cannot_read(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match=r"a file is one of \.json, \.jsonl, \.csv, \.parquet"):
        read_hf(str(tmp_path / "a.txt"), subset=None, split=None, num=1)
    (tmp_path / "a.json").write_text('{"prompt": "x"}\n')
    with pytest.raises(UsageError, match=r"cannot read the data set .*; check --hf-subset and --hf-split"):
        read_hf(str(tmp_path / "a.json"), subset=None, split="test", num=1)
