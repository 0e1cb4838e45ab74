"""Count the experts that decode steps read, and those of uniform routing.

The limits assume uniform routing: a router that sends all tokens to the same few experts makes a mixture look faster
than it is.

    counts = count_experts(engine, draw(engine), config)     # None without a mixture, and with several ranks
    counts.share                                             # 1.0: as many as uniform routing reads
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from atom.config import Config
from atom.graph import Graph
from atom.graph.ops import Op
from atom.jobs.bench.roofline import ROUTERS, share_read
from atom.jobs.bench.workload import WorkloadRequest, submit
from atom.kernels import LoadContext, find_kernel
from atom.runtime.engine import Engine
from atom.runtime.step.input import StepInput
from atom.runtime.step.runner import Pending, Runner

NUM_STEPS = 16  # that are counted

Key = tuple[Op, str]  # an op and the backend of its kernel


@dataclass
class ExpertCounts:
    """Experts chosen by routers in decode steps, summed over calls; shared experts are left out."""

    experts: int = 0  # of a layer
    steps: int = 0
    calls: int = 0
    rows: int = 0  # tokens
    read: int = 0  # distinct experts
    expected: float = 0.0  # the same, had each token chosen uniformly

    @property
    def share(self) -> float:
        """The experts read, of those that uniform routing reads."""
        return self.read / self.expected

    def add(self, ids: Tensor, experts: int, top_k: int) -> None:
        """Count a call's ids i64[T, k]."""
        self.experts, self.calls, self.rows = experts, self.calls + 1, self.rows + len(ids)
        self.read += len(set(ids[:, :top_k].flatten().tolist()))
        self.expected += experts * share_read(top_k / experts, experts, 1, len(ids))

    def describe(self) -> dict[str, float]:
        """Means over calls."""
        means = {name: getattr(self, name) / self.calls for name in ("rows", "read", "expected")}
        return {"experts": self.experts, **means, "share": self.share}


def count_experts(engine: Engine, requests: list[WorkloadRequest], config: Config) -> ExpertCounts | None:
    """Answer requests up to NUM_STEPS decode steps, and count the experts that these read in each layer.

    They run call by call: captured CUDA graphs are dropped.
    """
    runner = engine.runner
    if not isinstance(runner, Runner) or not (routers := find_routers(runner.model.graph)):
        return None
    counts = ExpertCounts()
    with counting(runner, routers, counts):
        ids = submit(engine, requests, config)
        while engine.has_work and counts.steps < NUM_STEPS:
            engine.step()
        for id in ids:
            engine.abort(id)
        while engine.has_work:
            engine.step()
    return counts if counts.calls else None


def describe_experts(read: Mapping[str, float]) -> str:
    """Describe in one line what `ExpertCounts.describe` found."""
    return (
        f"experts read in a layer by a decode step of {read['rows']:,.4g} tokens: {read['read']:,.1f} of "
        f"{read['experts']:,}, {read['share']:.0%} of the {read['expected']:,.1f} of uniform routing"
    )


def find_routers(graph: Graph) -> set[Key]:
    nodes = [node for program in graph.programs.values() for node in program.nodes if node.target in ROUTERS]
    return {(node.target, node.meta.get("kernel", "reference")) for node in nodes}


@contextmanager
def counting(runner: Runner, routers: set[Key], counts: ExpertCounts) -> Iterator[None]:
    """Within this context, count what routers choose in decode steps."""
    model, execute, is_counted = runner.model, runner.execute, False

    def counted(key: Key) -> Callable[..., Any]:
        op, run = key[0], model.kernels.get(key) or find_kernel(*key).load(LoadContext())

        def choose(*args: Any, **attributes: Any) -> Any:
            results = run(*args, **attributes)
            if is_counted:
                weight = op.signature.bind(*args, **attributes).arguments["weight"]
                num_experts = len(weight) - attributes.get("gated", False)
                counts.add(results[1], num_experts, attributes["top_k"])
            return results

        return choose

    def execute_counted(step: StepInput) -> Pending:
        nonlocal is_counted
        is_counted = step.is_decode
        counts.steps += is_counted
        return execute(step)

    kernels = model.kernels
    runner.graphs.clear()
    model.use({**kernels, **{key: counted(key) for key in routers}})
    runner.execute = execute_counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner.execute  # restores the class's method
        model.use(kernels)
