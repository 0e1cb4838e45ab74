"""Attention to runs of tokens (DeepSeek-V4), from a checkpoint's folder to tokens, against transformers.

Runs have 4 tokens, of which an indexer chooses 5, or 32: more and fewer than a block has. Level 0 and 1, prompts in one
chunk and sixteen, are in test_llm.py; drafts, host memory and files in the tests of these.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from greedy import GREEDY, assert_all_greedy
from probe import assert_logits
from transformers import DeepseekV4Config

from atom import LLMEngine, SamplingParams
from atom.assemble.kv_blocks import state_kinds
from atom.cli import main
from atom.compiler import semantic_graph
from atom.config.load import load
from atom.errors import ConfigError

pytestmark = pytest.mark.early

NAME = "deepseek_v4"
CONFIG = Path(__file__).parent / "configs" / "deepseek_v4_flash.json"

Open = Callable[..., LLMEngine]


@pytest.mark.parametrize(
    ("block_size", "chunk"),
    [
        (16, 7),
        *(pytest.param(size, chunk, marks=pytest.mark.slow) for size, chunk in ((1, 5), (4, 3), (32, 9), (64, 31))),
    ],
)
def test_chunks_of_mixed_lengths_change_nothing(block_size: int, chunk: int, open_engine: Open, references: Any):
    engine, model = open_engine(NAME, block_size=block_size, max_num_batched_tokens=chunk), references(NAME)
    assert_logits(engine, tiny.prompt(75), model)
    prompts = [tiny.prompt(length, seed=length) for length in (1, 3, 4, 31, 32, 50)]
    assert_all_greedy(engine.generate(prompts, GREEDY), prompts, model)
    assert engine.metrics.scheduler.num_chunks > 0


def test_64_greedy_tokens_cross_the_borders_of_runs_and_blocks(open_engine: Open, references: Any):
    prompt = tiny.prompt(29)
    answers = open_engine(NAME).generate([prompt], replace(GREEDY, max_tokens=64))
    assert_all_greedy(answers, [prompt], references(NAME))


@pytest.mark.parametrize("num_common", [48, 66, pytest.param(87, marks=pytest.mark.slow)])
def test_a_hit_may_end_amid_a_run(num_common: int, open_engine: Open, references: Any):
    """What is hit are whole blocks of 8 tokens, so some of a run of 32."""
    engine, model = open_engine(NAME, block_size=8, enable_prefix_caching=True), references(NAME)
    first = tiny.prompt(100)
    engine.generate([first], GREEDY)
    prompts = [[*first[:num_common], *tiny.prompt(length, seed=length)] for length in (9, 40)]
    assert_all_greedy(engine.generate(prompts, GREEDY), prompts, model)
    assert engine.metrics.scheduler.num_prefix_hit_tokens >= 2 * (num_common // 8 * 8)


def test_many_preemptions_change_nothing(open_engine: Open, references: Any):
    engine = open_engine(NAME, num_kvcache_blocks=22, block_size=4, max_model_len=76, max_num_batched_tokens=16)
    prompts = [tiny.prompt(length, seed=length) for length in (20, 37, 30, 44)]
    assert_all_greedy(engine.generate(prompts, GREEDY), prompts, references(NAME))
    assert engine.metrics.scheduler.num_preemptions > 1


def test_siblings_share_the_runs_of_their_prompt(open_engine: Open):
    engine = open_engine(NAME, block_size=4, enable_prefix_caching=False)
    params = SamplingParams(temperature=1.0, seed=11, n=3, max_tokens=12, ignore_eos=True)
    answers = engine.generate([tiny.prompt(43)], params)
    assert engine.metrics.scheduler.num_forked_tokens == 2 * 40
    (lone,) = open_engine(NAME).generate([tiny.prompt(43)], replace(params, n=1, seed=13))
    assert lone["token_ids"] == answers[2]["token_ids"], "sibling i is the request of seed + i"


def test_the_kv_of_deepseek_v4_flash(tmp_path: Path):
    """Its layers keep of each token 21 times a fourth of 512 + 128 numbers and 20 times a 128th of 512, besides windows."""
    shutil.copy(CONFIG, tmp_path / "config.json")
    kinds = {kind.name: kind for kind in state_kinds(semantic_graph(load([f"checkpoint={tmp_path}"])), 16)}
    assert {name: kind.bytes_per_token for name, kind in kinds.items()} == {
        "every_4": 21 * (512 + 128) // 4 * 2,
        "every_128": 20 * 512 // 128 * 2,
        "window_8": 21 * 2 * (2 * 512 + 2 * 128) * 2,  # of runs that overlap, of attention and of its indexer
        "window_128": 43 * 512 * 2 + 20 * 2 * 512 * 2,
    }
    assert {name for name, kind in kinds.items() if kind.rule.keeps_all} == {"every_4", "every_128"}


@pytest.mark.slow  # 43 layers
def test_deepseek_v4_flash_is_explained_by_its_config_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Sizes that its makers publish: 284B parameters, of which 13B are active; its experts are in MXFP4."""
    shutil.copy(CONFIG, tmp_path / "config.json")
    assert main(["job=explain", f"checkpoint={tmp_path}", "parallel=tp8_ep", "device=cuda", "job.gpu=h200"]) == 0
    lines = {line[:19].strip(): line[19:].strip() for line in capsys.readouterr().out.splitlines()}
    assert lines["ranks"].startswith("8 (tensor 8, experts 8)")
    assert lines["parameters"].startswith("284,") and " 13," in lines["parameters"]
    assert lines["ds_mxfp4"].startswith(f"{43 * 256 * 3 * 2048 * 4096 * 17 / 32 / (1 << 30):,.1f} GiB")
    runs = {
        "every_4": 21 * (512 + 128) // 4 * 2,
        "every_128": 20 * 512 // 128 * 2,
    }  # of all tokens; windows are besides
    assert all(f"{size:,} bytes ({name})" in lines["KV a token"] for name, size in runs.items())
    assert sum(runs.values()) == 6880


@pytest.mark.parametrize("num_layers", [1, 2, 7])
def test_layers_that_a_config_does_not_list_are_those_of_transformers(num_layers: int, tmp_path: Path):
    published = DeepseekV4Config(architectures=["DeepseekV4ForCausalLM"], num_hidden_layers=num_layers)
    stored = {key: value for key, value in published.to_dict().items() if key != "layer_types"}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert load([f"checkpoint={tmp_path}"]).model.layer_types == published.layer_types


def test_blocks_that_runs_do_not_divide_are_refused(open_engine: Open):
    with pytest.raises(ConfigError, match=r"serve\.block_size=24 is neither a multiple nor a divisor of the 32 tokens"):
        open_engine(NAME, block_size=24)
