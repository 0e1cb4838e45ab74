"""Watch which of Hopper's kernels an engine runs.

    ran = watch()       # before engines are opened
    engine.generate(…)
    assert "split packed linear" in ran

What a start only compiles does not count, and what is captured in a CUDA graph counts when that is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from atom.runtime.step.cuda_graphs import Graphs
from atom.runtime.step.input import StepInput


class Watch:
    """The names of what has run, and by graph of what its replay runs."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self._captured: dict[Any, set[str]] = {}
        self._noted: set[str] = self.ran  # where launches are noted: in `ran`, or those of the graph being captured

    def note(self, *names: str) -> None:
        from atom.kernels.triton.compile.precompile import walking

        if walking.get() is None:
            self._noted.update(names)

    @contextmanager
    def capture(self, key: Any) -> Iterator[None]:
        self._noted = self._captured.setdefault(key, {"graph"})
        try:
            yield
        finally:
            self._noted = self.ran

    def replay(self, key: Any) -> None:
        self.ran |= self._captured[key]


def watch() -> set[str]:
    """The names of what runs from here on, in this process."""
    from atom.kernels.hopper import chosen_attention as chosen_hopper
    from atom.kernels.hopper import decode_attention as decode_hopper
    from atom.kernels.hopper import delta_net as delta_hopper
    from atom.kernels.hopper import few_experts as few_hopper
    from atom.kernels.hopper import gated_linear as gate_hopper
    from atom.kernels.hopper import grouped_linear as grouped_hopper
    from atom.kernels.hopper import grouped_packed_linear as grouped_packed_hopper
    from atom.kernels.hopper import index_scores as scores_hopper
    from atom.kernels.hopper import packed_linear as packed_hopper
    from atom.kernels.hopper import prefill_attention as prefill_hopper
    from atom.kernels.stable_memory import StableMemory
    from atom.kernels.triton.attention import shared_prefix
    from atom.kernels.triton.linear import linear
    from atom.kernels.triton.recurrent import chunks

    watched = Watch()

    def split(name: str) -> Callable[..., tuple[str, ...]]:
        return lambda *args: (name, f"split {name}") if args[-1].splits > 1 else (name,)

    def named(*names: str) -> Callable[..., tuple[str, ...]]:
        return lambda *_: names

    for module, function, names in (
        (packed_hopper, "multiply", split("packed linear")),
        (packed_hopper, "multiply_grouped", split("grouped experts")),
        (linear, "multiply_quantized", named("scaled GEMM")),
        (gate_hopper, "gated_linear", named("gates in Gluon")),
        (few_hopper, "multiply_few", named("few experts")),
        (grouped_packed_hopper, "multiply", named("many experts")),
        (grouped_hopper, "multiply_fp8", named("fp8 experts")),
        (decode_hopper, "decode", named("decode in Gluon")),
        (prefill_hopper, "prefill", named("prefill in Gluon")),
        (prefill_hopper, "prefill_expanded", named("expanded latents")),
        (chosen_hopper, "attend_chosen", named("chosen entries")),
        (scores_hopper, "score_prompts", named("index scores")),
        (delta_hopper, "decode", named("delta rule in Gluon")),
        (chunks, "attend_chunks", named("chunks")),
        (shared_prefix.PrefixAttention, "__call__", named("prefix attention")),
        (StableMemory, "release", named("memory released")),
    ):
        _wrap(module, function, lambda *args, names=names: watched.note(*names(*args)))
    choose_ring = few_hopper.choose_ring

    def choose(*args: Any, **options: Any) -> Any:
        ring = choose_ring(*args, **options)
        if ring.splits > 1:
            watched.note("split few experts")
        return ring

    few_hopper.choose_ring = choose
    _watch_graphs(watched)
    return watched.ran


def _wrap(owner: Any, name: str, note: Callable[..., None]) -> None:
    run = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        note(*args)
        return run(*args, **options)

    setattr(owner, name, call)


def _watch_graphs(watched: Watch) -> None:
    for name in ("_capture_decodes", "_capture_drafts", "_capture_mixed"):
        setattr(Graphs, name, _watch_capture(watched, getattr(Graphs, name)))
    start = Graphs.start

    def start_step(graphs: Graphs, step: StepInput) -> Any:
        started, shape = start(graphs, step), step.shape
        if started is not None:
            drafting = (shape.num_rows, shape.num_drafts) if shape.num_drafts else (shape.num_rows,)
            watched.replay((drafting if step.is_decode else (shape,), bool(step.prefixes)))
        return started

    Graphs.start = start_step  # type: ignore[method-assign]


def _watch_capture(watched: Watch, run: Callable[..., Any]) -> Callable[..., Any]:
    def capture(graphs: Graphs, *sizes: Any, has_prefixes: bool = False) -> Any:
        with watched.capture((sizes, has_prefixes)):
            return run(graphs, *sizes, has_prefixes=has_prefixes)

    return capture
