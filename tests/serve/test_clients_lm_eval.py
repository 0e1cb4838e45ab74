"""`lm_eval --model local-completions` with tasks of its own, against what transformers computes from the checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import asking
import pytest
import torch
import transformers
from lm_eval_docs import DOCS
from serving import Server, Start

pytestmark = pytest.mark.slow  # its imports take longer than the tests of a route

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOOSE = """\
output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""
GENERATE = """\
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 12}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def server(start_server: Start) -> Server:
    return start_server("serve.http.enable_tokenizer_info_endpoint=true")


@pytest.fixture(scope="module", params=["folder", "remote"])
def samples(
    request: pytest.FixtureRequest, server: Server, talker: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """What lm_eval has logged of each task, by document, with the tokenizer of a folder and with the server's."""
    folder = tmp_path_factory.mktemp("lm_eval")
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, rest in (("choose", CHOOSE), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + rest)
    settings = [
        "model=talker",
        f"base_url={server.url}/v1/completions",
        "num_concurrent=4",
        "max_retries=1",
    ]
    if request.param == "folder":
        settings += [f"tokenizer={talker}", "tokenizer_backend=huggingface", "tokenized_requests=False"]
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", ",".join(settings)]
    command += ["--tasks", "choose,generate", "--include_path", str(folder)]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ | offline)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in ("choose", "generate"):
        (path,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        logged = [json.loads(line) for line in path.read_text().splitlines()]
        found[name] = sorted(logged, key=lambda each: each["doc_id"])
    return found


def test_log_likelihoods_are_transformers(samples: dict[str, list[Any]], talker: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(talker, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(talker)
    for doc, sample in zip(DOCS, samples["choose"], strict=True):
        question = tokenizer.encode(doc["question"])
        for choice, (answer,) in zip(doc["choices"], sample["resps"], strict=True):
            tokens = question + tokenizer.encode(f" {choice}")
            with torch.no_grad():
                at = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)[len(question) - 1 : -1]
            expected = at[range(len(at)), tokens[len(question) :]].sum().item()
            is_greedy = at.argmax(-1).tolist() == tokens[len(question) :]
            logprob, told_greedy = answer
            assert float(logprob) == pytest.approx(expected, abs=1e-3)
            assert str(told_greedy) == str(is_greedy)


def test_generations_are_the_servers(samples: dict[str, list[Any]], server: Server):
    for doc, sample in zip(DOCS, samples["generate"], strict=True):
        body = {"prompt": doc["question"], "temperature": 0, "max_tokens": 12, "stop": ["e", "\n"]}
        assert sample["resps"][0][0] == asking.post(server, asking.COMPLETIONS, body).text
