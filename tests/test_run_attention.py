"""Attention to tokens of runs that an indexer chose by mean keys (QSA), against transformers.

Runs have 4 tokens, of which 3 are chosen: queries see 12 of them and those after the last whole run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from greedy import assert_greedy
from probe import assert_logits

from atom import LLMEngine
from atom.assemble.kv_blocks import state_kinds
from atom.compiler import semantic_graph
from atom.config.load import load
from atom.graph import Type, ops

pytestmark = pytest.mark.early

NAME = "qwen4_exp"
CONFIG = Path(__file__).parent / "configs" / "qwen3_8_flash_next.json"

Open = Callable[..., LLMEngine]


@pytest.mark.parametrize(
    ("block_size", "chunk", "level"),
    [(16, 7, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((4, 3, 0), (1, 5, 0), (32, 64, 2)))],
)
def test_chunks_of_mixed_lengths_change_nothing(
    block_size: int, chunk: int, level: int, open_engine: Open, references: Any
):
    fields = {"block_size": block_size, "max_num_batched_tokens": chunk, "level": level}
    engine, model = open_engine(NAME, **fields), references(NAME)
    assert_logits(engine, tiny.prompt(45), model)
    assert_greedy(engine, [tiny.prompt(length, seed=length) for length in (1, 3, 4, 15, 16, 33)], model, 10)
    assert engine.metrics.scheduler.num_chunks > 0


@pytest.mark.slow
def test_64_greedy_tokens_cross_the_borders_of_runs_and_blocks(open_engine: Open, references: Any):
    assert_greedy(open_engine(NAME), [tiny.prompt(29)], references(NAME), 64)


def test_a_hit_may_end_amid_a_run(open_engine: Open, references: Any):
    engine, model = open_engine(NAME, block_size=2, enable_prefix_caching=True), references(NAME)
    first = tiny.prompt(60)
    assert_greedy(engine, [first], model, 4)
    for length in (9, 14):
        assert_greedy(engine, [[*first[:46], *tiny.prompt(length, seed=length)]], model, 10)
    assert engine.metrics.scheduler.num_prefix_hit_tokens == 46, "the KV of the second one matched further than a state"


@pytest.mark.slow
def test_many_preemptions_change_nothing(open_engine: Open, references: Any):
    engine = open_engine(NAME, num_kvcache_blocks=22, block_size=4, max_model_len=76, max_num_batched_tokens=16)
    assert_greedy(engine, [tiny.prompt(length, seed=length) for length in (20, 37, 30, 44)], references(NAME))
    assert engine.metrics.scheduler.num_preemptions > 1


def test_the_kv_of_qwen3_8_flash_next(tmp_path: Path):
    """Twelve layers keep keys and values, the index keys of unfinished runs, and one for each four tokens."""
    shutil.copy(CONFIG, tmp_path / "config.json")
    graph = semantic_graph(load([f"checkpoint={tmp_path}"]))
    kinds = {kind.name: kind for kind in state_kinds(graph, 16)}
    assert {name: kind.bytes_per_token for name, kind in kinds.items() if name != "state"} == {
        "full": 12 * 2 * 2 * 256 * 2,
        "window_4": 12 * 128 * 2,
        "every_4": 12 * 128 // 4 * 2,
    }
    (table,) = (call.args[1] for call in graph.find(ops.embedding) if call.args[0].target is ops.ngrams)
    assert table.type == Type("bf16", (320_001_536, 160)), "16 primes from 20 million on, rounded up to 128"
    assert [state.type for state in graph.states() if state.part == "ngrams"] == [
        Type("i64", (2,)),
        Type("bf16", (9, 4 * 2560)),
    ]
