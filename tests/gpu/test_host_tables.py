"""A GPU reads tables that stay in pinned host memory, also in CUDA graphs, after a sleep and on each of two ranks."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from gpu.steps import FIELDS, GREEDY
from probe import assert_logits

from atom import LLMEngine
from atom.kernels.host_memory import HostTensor

pytestmark = pytest.mark.gpu

Open = Callable[..., LLMEngine]
TABLE = {"cpu_offload_params": ["embed_tokens_per_layer"]}
PROMPTS = [tiny.prompt(length, seed=length) for length in (3, 17, 60)]
VOCAB = 50_000  # rows of a table whose bytes show
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU here")


def tables_of(engine: LLMEngine) -> list[HostTensor]:
    held = engine._engine.runner.model._bindings.weights
    return [each for each in held.values() if isinstance(each, HostTensor)]


def assert_greedy(engine: LLMEngine, model: Any) -> None:
    for answer, prompt in zip(engine.generate(PROMPTS, GREEDY), PROMPTS, strict=True):
        tiny.assert_greedy(answer, prompt, model)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("name", "fields"),
    [("gemma4", TABLE), ("gemma4_shared", TABLE), ("llama", {"cpu_offload_params": ["embed_tokens"]})],
)
def test_logits_and_tokens_are_those_of_transformers(
    name: str, fields: dict[str, Any], level: int, open_engine: Open, references: Any
):
    engine = open_engine(name, level=level, **fields)
    (table,) = tables_of(engine)
    assert table.view.is_cuda and not table.on_host.is_cuda
    assert torch.equal((table.view + 0).cpu(), table.on_host), "a kernel reads it"
    assert_logits(engine, tiny.prompt(100), references(name))
    assert_greedy(engine, references(name))
    assert (level == 3) == bool(engine._engine.runner.graphs.sizes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("load_dummy", [False, True])
def test_a_table_stays_in_its_place_while_an_engine_sleeps(load_dummy: bool, open_engine: Open):
    engine = open_engine("gemma4", level=3, enable_sleep_mode=True, load_dummy=load_dummy, **TABLE)
    (table,) = tables_of(engine)
    address, before = table.view.data_ptr(), [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)]
    for level in (1, 2, 1):
        engine.sleep(level)
        if level == 2:  # so that its numbers have to be read again
            with torch.inference_mode():
                table.on_host.zero_()
        engine.wake_up()
        assert tables_of(engine) == [table] and table.view.data_ptr() == address
        assert [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)] == before


def test_the_gpu_has_the_memory_and_the_tokens_are_the_same(checkpoints: Any, tmp_path: Path, gpu_cache: Path):
    config = json.loads((checkpoints("gemma4") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size_per_layer_input": VOCAB}))
    num_bytes, taken, tokens = VOCAB * 4 * 8 * 4, [], []  # rows, layers, inputs of a layer, bytes
    for fields in ({}, TABLE):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = LLMEngine(str(tmp_path), load_dummy=True, **{**FIELDS, "cache": str(gpu_cache), **fields})
        taken.append(torch.cuda.memory_allocated() - before)
        tokens.append([each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)])
        engine.close()
        del engine
    assert taken[0] - taken[1] == pytest.approx(num_bytes, rel=0.05)
    assert tokens[0] == tokens[1]


@two_gpus
@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("fields", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_each_rank_reads_a_table_of_its_own(fields: dict[str, Any], level: int, open_engine: Open, references: Any):
    engine = open_engine("gemma4_shared", level=level, **TABLE, **fields)
    assert len(tables_of(engine)) == 1
    assert_greedy(engine, references("gemma4_shared"))
