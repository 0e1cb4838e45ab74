"""The experts that steps are counted to read, against choices that the router's weights force."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom.assemble import open_engine
from atom.checkpoint import SilentProgress
from atom.config.load import load
from atom.jobs.bench.experts_read import NUM_STEPS, count_experts
from atom.jobs.bench.workload import open_workload

ROWS = 5


@pytest.fixture
def count(checkpoints: Any, tmp_path: Any) -> Any:
    """What is counted of ROWS requests to a checkpoint whose routers' weights are these numbers times their own."""

    def count(family: str, factor: float, *argv: str, output_len: int = 4) -> Any:
        for path in checkpoints(family).iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        weights = load_file(tmp_path / "model.safetensors")
        routers = {name: each * factor for name, each in weights.items() if "gate.weight" in name}
        assert bool(routers) == (family != "llama")
        save_file(weights | routers, tmp_path / "model.safetensors", {"format": "pt"})
        given = [f"checkpoint={tmp_path}", "job=bench", "level=1", "serve.kv_cache_memory=4194304", *argv]
        config = load([*given, "job.input_len=3", f"job.output_len={output_len}", f"job.num_prompts={ROWS}"])
        engine = open_engine(config, SilentProgress())
        counts = count_experts(engine, open_workload(config)(engine), config)
        assert engine.scheduler.num_running == 0 and "execute" not in vars(engine.runner)
        return counts

    return count


@pytest.mark.parametrize(("family", "num_shared"), [("mixtral", 0), ("deepseek_v2", 1)])
def test_a_router_without_preference_reads_the_same_experts_for_all_tokens(count: Any, family: str, num_shared: int):
    counts = count(family, 0.0)
    experts = counts.experts
    assert counts.read == 2 * counts.calls and counts.steps == 3 and counts.rows == ROWS * counts.calls
    drawn = torch.rand(20_000, ROWS, experts).topk(2).indices.flatten(1)
    uniform = torch.stack([drawn.eq(expert).any(1) for expert in range(experts)]).sum(0).float().mean()
    assert counts.expected / counts.calls == pytest.approx(uniform.item(), rel=0.02)
    assert counts.share == pytest.approx(2 / uniform.item(), rel=0.02)


def test_random_routers_read_about_what_uniform_routing_does(count: Any):
    assert 0.6 < count("mixtral", 50.0, output_len=20).share < 1.3


def test_no_more_steps_are_counted_than_said(count: Any):
    assert count("mixtral", 1.0, output_len=60).steps == NUM_STEPS


def test_a_dense_model_has_no_experts(count: Any):
    assert count("llama", 1.0) is None
