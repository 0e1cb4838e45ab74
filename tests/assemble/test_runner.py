"""What opens a runner: stages that capture alike, costs of KV on the host, tokens that run ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kinds import full_kind

from atom.assemble.runner import make_runner, max_flops, measure_costs
from atom.compiler import compile_graph
from atom.config.load import load
from atom.runtime.step.program import Bindings
from atom.runtime.types import StepLimits


def test_all_stages_capture_by_the_flops_of_the_one_that_computes_the_most():
    others = [msgspec.msgpack.encode(flops) for flops in (3.0, 7.0)]
    assert max_flops(5.0, lambda own: [own, *others]) == 7.0
    assert max_flops(9.0, lambda own: [own, *others]) == 9.0


def test_costs_are_measured_only_of_kv_on_the_host_and_over_a_step_at_most(monkeypatch: pytest.MonkeyPatch):
    measured: list[int] = []
    monkeypatch.setattr("atom.assemble.runner.measure_swap", lambda model, host, num: measured.append(num) or "costs")
    model = SimpleNamespace(device=SimpleNamespace(type="cpu"), limits=StepLimits(2, 48, 64))
    runner: Any = SimpleNamespace(host=None, model=model)
    measure_costs(runner)
    assert measured == []
    runner.host = SimpleNamespace(costs=None)
    measure_costs(runner)
    assert measured == [48] and runner.host.costs == "costs"
    model.limits = StepLimits(2, 4096, 4096)
    measure_costs(runner)
    assert measured == [48, 64], "as many as a CPU is timed with"


def test_a_runner_has_the_limits_of_its_configuration_and_runs_ahead_of_stages(checkpoints: Any):
    config = load([f"checkpoint={checkpoints('qwen3')}", "device=cpu", "dtype=fp32", "level=0",
                   "serve.max_num_seqs=3", "serve.max_model_len=64", "serve.block_size=4"])  # fmt: skip
    graph = compile_graph(config)
    compiled: Any = SimpleNamespace(graph=graph, level=0)
    bindings = Bindings({}, {})
    made: list[Any] = []

    def make(*args: Any, **more: Any) -> Any:
        made.append((args, more))
        return SimpleNamespace(flops_a_token=1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atom.assemble.runner.Model", make)
        patch.setattr("atom.assemble.runner.Runner", lambda model, **more: SimpleNamespace(host=None, more=more))
        kinds = [[full_kind(8, 16)]]
        runner: Any = make_runner(compiled, bindings, config, kinds, lambda own: [own], None)
        stages = load([*config.overrides, "parallel.pipeline=3", "job=explain"])
        ahead: Any = make_runner(compiled, bindings, stages, kinds, lambda own: [own], None)
    (_, _, block_size, limits), fields = made[0]
    assert (block_size, limits) == (4, StepLimits(3, 16384, 64, 8)) and fields["kinds"] == ["full"]
    assert runner.more == {"flops": 1.0} and ahead.more == {"flops": 1.0, "run_ahead": 2}
