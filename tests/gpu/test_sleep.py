"""An engine on a GPU gives up its memory and takes it again, and its CUDA graphs are what they were."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from gpu.steps import GREEDY

from atom import LLMEngine

pytestmark = pytest.mark.gpu

PROMPTS = [tiny.prompt(length, seed=length) for length in (3, 17, 60)]


def memory_of_this_process() -> int:
    """The bytes of the GPU that the driver says this process has, whatever others do meanwhile."""
    pynvml = pytest.importorskip("pynvml")  # nvidia-ml-py
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
    used = {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    if used.get(os.getpid()) is None:
        pytest.skip("the driver does not report the memory of this process, as in some containers")
    return int(used[os.getpid()])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("qwen3", {}),
        ("qwen3", {"dtype": "bf16", "quant": "fp8"}),
        ("qwen3_moe", {}),
        ("deepseek_v3", {}),
        ("gpt_oss", {"method": "ngram"}),
    ],
)
def test_tokens_after_a_sleep_are_those_before(
    name: str, fields: dict[str, Any], open_engine: Callable[..., LLMEngine]
):
    sizes = {"num_kvcache_blocks": 20_000, "enable_prefix_caching": True}
    engine = open_engine(name, enable_sleep_mode=True, **sizes, **fields)
    before = [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)]
    graphs = engine._engine.runner.graphs
    assert graphs.sizes
    captured = dict(graphs._decodes), dict(graphs._mixed)
    num_kv = sum(cache.nbytes for cache in engine._engine.runner.model.caches.values())
    for level in (1, 2, 1):
        used = memory_of_this_process()
        engine.sleep(level)
        assert memory_of_this_process() <= used - num_kv, "the GPU has it back"
        engine.wake_up(["weights"])
        engine.wake_up()
        assert [each["token_ids"] for each in engine.generate(PROMPTS, GREEDY)] == before
    assert (dict(graphs._decodes), dict(graphs._mixed)) == captured, "none was captured again"
    ids = engine.add_request(PROMPTS, GREEDY)
    for _ in range(5):
        engine.step()
    engine.sleep(2, "keep")
    engine.wake_up()
    ended = {}
    while not engine.is_finished():
        ended.update({each.request_id: each.output for each in engine.step()})
    if name == "qwen3" and not fields:  # in float32, where a prompt's tokens are computed with others or without
        assert [ended[id] for id in ids] == before
    assert sorted(ended) == sorted(ids)
