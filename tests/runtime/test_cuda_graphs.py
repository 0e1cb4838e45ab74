"""Which captured step runs, with graphs that a test makes up; and that captured steps are the eager ones, on a GPU."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tiny
import torch
from law import assert_same_logits

from atom import LLMEngine, SamplingParams
from atom.runtime.batch_shape import Layout
from atom.runtime.cuda_graphs import Graphs, Step, _Decodes, _Mixed
from atom.runtime.device_runner import DeviceRunner
from atom.runtime.types import Plan, Row, Sequence

PADDING = 99
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


class Replays:
    """A captured graph that only counts."""

    def __init__(self) -> None:
        self.num = 0

    def replay(self) -> None:
        self.num += 1


@pytest.fixture
def graphs() -> Graphs:
    """Decodes of 1, 2 and 4, and steps of prompts of 8 and 16 tokens of 3 rows."""
    sent: list[Any] = []

    def send(array: Any) -> torch.Tensor:
        sent.append(array)
        return torch.from_numpy(array)

    found = Graphs(SimpleNamespace(padding=PADDING, send=send, sent=sent))  # type: ignore[arg-type]
    for size in (1, 2, 4):
        rows = torch.full((size,), -1, dtype=torch.int32)
        found._decodes[size] = _Decodes(Replays(), Step(rows, torch.zeros(size, 3)))  # type: ignore[arg-type]
    for num_tokens in (8, 16):
        layout = Layout(num_tokens, 3, 3)
        packed = torch.from_numpy(layout.padding(PADDING))
        step = Step(layout.samples(packed)[0], torch.zeros(3, 3), (torch.zeros(num_tokens, 2),))
        found._mixed[layout] = _Mixed(Replays(), packed, step)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("slots", "rows"),
    [
        ([5], [5]),
        ([5, 3], [5, 3]),
        ([5, 3, 0], [5, 3, 0, PADDING]),
        ([5, 3, 0, 2], [5, 3, 0, 2]),
        ([5, 3, 0, 2, 1], None),
    ],
)
def test_decodes_run_in_the_smallest_graph_that_holds_them(graphs: Graphs, slots: list[int], rows: list[int] | None):
    step = graphs.decode(slots)
    assert (None if step is None else step.rows.tolist()) == rows
    num_replays = [each.graph.num for each in graphs._decodes.values()]  # type: ignore[attr-defined]
    assert num_replays == [int(rows is not None and size == len(rows)) for size in (1, 2, 4)]


def test_the_same_rows_are_sent_once_and_others_anew(graphs: Graphs):
    sent = graphs._model.sent  # type: ignore[attr-defined]
    for slots in ([5, 3, 0], [5, 3, 0], [5, 3]):
        graphs.decode(slots)
    assert [list(array) for array in sent] == [[5, 3, 0, PADDING], [5, 3]]
    step = graphs.decode([5, 3, 1])
    assert step is not None and step.rows.tolist() == [5, 3, 1, PADDING]
    step = graphs.decode([5, 3, 0])
    assert step is not None and step.rows.tolist() == [5, 3, 0, PADDING]


@pytest.mark.parametrize(("counts", "num_tokens"), [([3, 4], 8), ([8], 8), ([4, 5], 16), ([9, 9], None), ([1, 1, 1], None),
                                                   ([2, 2, 4], 8)])  # fmt: skip
def test_a_step_with_prompts_runs_in_the_smallest_graph_that_holds_it(
    graphs: Graphs, counts: list[int], num_tokens: int | None
):
    params = SamplingParams()
    sequences = [Sequence(str(at), list(range(num)), params, slot=at, num_given=num) for at, num in enumerate(counts)]
    step = graphs.mix(Plan([Row(each, 0, len(each.prompt), True) for each in sequences], 0))
    found = None if step is None or step.hidden is None else len(step.hidden[0])
    assert found == num_tokens
    if step is not None:
        assert step.rows.tolist() == [*range(len(counts)), *[PADDING] * (3 - len(counts))]


def test_what_is_not_captured_yet_is_when_it_first_runs(graphs: Graphs, monkeypatch: pytest.MonkeyPatch):
    captured = list(graphs._decodes.values())
    made: list[int] = []
    monkeypatch.setattr(graphs, "_capture_decodes", lambda size: made.append(size) or captured[1])
    graphs._decodes[2] = None
    for slots in ([4], [1, 3], [3, 1], [0, 1, 2]):
        graphs.decode(slots)
    assert made == [2]
    assert captured[1].graph.num == 2  # type: ignore[union-attr]
    mixed, (small, large) = [], graphs._mixed
    monkeypatch.setattr(graphs, "_capture_mixed", lambda layout: mixed.append(layout) or graphs._mixed[large])
    graphs._mixed[small] = None
    prompt = Sequence("a", [1, 2, 3], SamplingParams(), slot=0, num_given=3)
    monkeypatch.setattr(Layout, "pack", lambda layout, plan, padding: np.zeros(0, np.int32))
    monkeypatch.setattr(graphs._mixed[large], "packed", torch.zeros(0, dtype=torch.int32))
    for _ in range(2):
        graphs.mix(Plan([Row(prompt, 0, 3, True)], 0))
    assert mixed == [small]


def imagine(num_slots: int, flops_a_token: float = 1e6) -> Any:
    """A model for graphs that capture nothing."""
    return Mock(flops_a_token=flops_a_token, padding=PADDING, slots=SimpleNamespace(num_slots=num_slots, vocab=8),
                logits_dtype=torch.float32, device=torch.device("cpu"), tables=torch.zeros(1, 1, 1),
                send=torch.from_numpy)  # fmt: skip


def find_captured(graphs: Graphs, monkeypatch: pytest.MonkeyPatch, **options: bool) -> list[Layout]:
    """The steps with prompts that a start captures, in order."""
    captured: list[Layout] = []
    for name in ("graph_pool_handle", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(graphs, "_capture_decodes", lambda size: None)
    monkeypatch.setattr(graphs, "_capture_mixed", captured.append)
    graphs.capture([1], **options)
    return captured


@pytest.mark.parametrize(
    ("max_tokens", "num_slots", "layouts"),
    [
        (8, 20, [(8, 9)]),
        (16, 20, [(16, 17)]),
        (100, 20, [(16, 17), (32, 21), (64, 21), (100, 21)]),
        (300, 200, [(16, 17), (32, 33), (64, 65), (128, 65), (256, 65), (300, 65)]),
        (8192, 1, [(num, 2) for num in (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)]),
    ],
)
def test_a_start_captures_prompts_of_all_sizes_that_can_come(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, num_slots: int, layouts: list[tuple[int, int]]
):
    graphs = Graphs(model := imagine(num_slots))
    graphs.compile([1], max_tokens)
    walked = {call.args[0] for call in model.mix.call_args_list}
    captured = find_captured(graphs, monkeypatch)
    prompts = [each for each in captured if not each.num_decodes]
    assert [(each.num_tokens, each.num_rows) for each in prompts[::-1]] == layouts
    assert {each for each in prompts if each.num_tokens <= 512} < walked


@pytest.mark.parametrize("is_lazy", [True, False])
def test_what_takes_the_most_memory_is_captured_first(monkeypatch: pytest.MonkeyPatch, is_lazy: bool):
    graphs = Graphs(imagine(num_slots=300, flops_a_token=1e10))
    graphs.compile([1], 8192)
    layouts = list(graphs._layouts())
    captured = find_captured(graphs, monkeypatch, is_lazy=is_lazy)
    tokens_first = max((each.num_tokens, each.num_rows) for each in layouts)
    rows_first = max((each.num_rows, each.num_tokens) for each in layouts)
    assert (captured[0].num_tokens, captured[0].num_rows) == tokens_first
    assert rows_first in [(each.num_rows, each.num_tokens) for each in captured]
    assert rows_first[0] == 300 + 300 - 256, "44 prompts beside 257 decodes or more, and a row of padding"
    assert len(captured) == (2 if is_lazy else len(layouts)), "the others when they first run"


def test_without_graphs_of_decodes_there_are_none(monkeypatch: pytest.MonkeyPatch):
    graphs = Graphs(imagine(num_slots=4))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    graphs.capture([])
    assert graphs._mixed == {}


@pytest.mark.parametrize(("max_tokens", "num_slots"), [(1, 1), (7, 3), (16, 40), (90, 17), (300, 100), (300, 1)])
def test_there_is_a_layout_with_little_padding_for_each_step_of_few_prompts(max_tokens: int, num_slots: int):
    graphs = Graphs(imagine(num_slots))
    graphs.compile([1], max_tokens)
    layouts = graphs._layouts()
    for num_decodes in range(min(num_slots, max_tokens) + 1):
        for num_more in range(max_tokens - num_decodes + 1):
            most = min(num_more, num_slots - num_decodes, 64)
            for num_prompts in {1, most} if most else set[int]() if num_more else {0}:
                num_rows = num_decodes + num_prompts
                asked = Layout(num_decodes + num_more, num_rows, num_rows, num_decodes)
                found = next(each for each in layouts if each.holds(asked))
                assert found.num_tokens <= 2 * asked.num_tokens + 32


@pytest.mark.parametrize(("flops_a_token", "largest"), [(14e9, 571), (1e6, 2048 + 256), (1e12, 256), (8e9, 1000)])
def test_steps_that_keep_a_gpu_busy_are_not_captured(flops_a_token: float, largest: int):
    graphs = Graphs(imagine(256, flops_a_token))
    graphs.compile([1], 16384)
    sizes = [each.num_tokens for each in graphs._layouts()]
    assert largest / 2 < max(sizes) <= largest
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("sizes", "num_slots", "max_tokens", "largest"),
    [([], 40, 3000, 40), ([1, 2], 40, 3000, 40), ([1, 2], 40, 9, 9), ([64], 40, 3000, 64), ([], 1, 1, 1)],
)
def test_decodes_that_no_graph_holds_are_walked_through_too(
    sizes: list[int], num_slots: int, max_tokens: int, largest: int
):
    Graphs(model := imagine(num_slots)).compile(sizes, max_tokens)
    assert max(len(call.args[0]) for call in model.decode.call_args_list) == largest


def test_what_a_capture_raises_first_is_raised(graphs: Graphs, monkeypatch: pytest.MonkeyPatch):
    class Graph:
        def capture_begin(self, **options: Any) -> None:
            pass

        def capture_end(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    def fail() -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    graphs._stream = Mock()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        graphs._capture(fail)
    with pytest.raises(RuntimeError, match="previous error"):
        graphs._capture(lambda: None)


def test_what_was_cleared_runs_no_more(graphs: Graphs):
    graphs.clear()
    assert graphs.sizes == [] and graphs.decode([1]) is None


@pytest.fixture
def open_engine(checkpoints: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LLMEngine]]:
    engines = []

    def open(name: str, **fields: Any) -> LLMEngine:
        fields = {"dtype": "fp32", "device": "cuda", "level": 3, "num_kvcache_blocks": 256, "max_num_seqs": 12,
                  "max_num_batched_tokens": 256, "cudagraph_capture_sizes": [1, 2, 4, 8], **fields}  # fmt: skip
        engines.append(LLMEngine(str(checkpoints(name)), **fields))
        return engines[-1]

    yield open
    for each in engines:
        each.close()
    torch.cuda.empty_cache()


def prefill(engine: LLMEngine, lengths: list[int], max_tokens: int = 100) -> tuple[DeviceRunner, list[Sequence]]:
    """Sequences whose prompts are computed, each with its first token, and no step running."""
    engine._engine.runner.run_ahead = engine._engine.scheduler._run_ahead = 0
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request([tiny.prompt(length, seed=length) for length in lengths], params)
    engine.step()
    runner = engine._engine.runner
    assert isinstance(runner, DeviceRunner)
    return runner, list(engine._engine.scheduler.running)


def tokens_of(step: Step, plan: Plan) -> list[torch.Tensor]:
    """What the step gave of the plan's tokens, and not of padding."""
    assert step.hidden is not None and step.num_decodes >= plan.num_decodes
    prompts = slice(step.num_decodes, step.num_decodes + plan.num_tokens - plan.num_decodes)
    return [torch.cat([each[: plan.num_decodes], each[prompts]]) for each in step.hidden]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "deepseek_v3"])
@torch.inference_mode()
def test_captured_decodes_give_the_logits_of_eager_ones(open_engine: Any, name: str, num_rows: int):
    runner, sequences = prefill(open_engine(name), [3 + 7 * at for at in range(num_rows)])
    slots = [each.slot for each in sequences]
    captured = runner.graphs.decode(slots)
    assert captured is not None
    logits = captured.logits[:num_rows].clone()  # type: ignore[index]
    eager = runner.model.decode(torch.tensor(slots, dtype=torch.int32, device="cuda"))
    assert_same_logits(logits.float().cpu(), eager.float().cpu())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lengths", [[1], [15], [16], [17], [31, 1], [5, 6, 7], [100, 28], [250, 1]], ids=str)
@pytest.mark.parametrize("name", ["qwen3_window", "qwen3_moe", "deepseek_v3"])
@torch.inference_mode()
def test_captured_steps_with_prompts_give_the_logits_of_eager_ones(open_engine: Any, name: str, lengths: list[int]):
    engine = open_engine(name)
    runner, _ = prefill(engine, [9, 20])
    params = SamplingParams(temperature=0, max_tokens=5)
    engine.add_request([tiny.prompt(length, seed=length) for length in lengths], params)
    plan = engine._engine.scheduler.schedule()
    assert plan.num_decodes >= 2 and plan.num_tokens == 2 + sum(lengths), "prompts beside decodes"
    runner._settle(plan.rows)
    captured = runner.graphs.mix(plan)
    assert captured is not None
    count = sum(row.samples for row in plan.rows)
    logits = captured.logits[:count].clone()  # type: ignore[index]
    hidden = tokens_of(captured, plan)
    eager = runner._mix(plan)
    assert_same_logits(logits.float().cpu(), eager.logits.float().cpu())  # type: ignore[union-attr]
    for ours, theirs in zip(hidden, eager.hidden, strict=True):  # type: ignore[arg-type]
        assert_same_logits(ours.flatten(1).float().cpu(), theirs.flatten(1).float().cpu())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("lengths", [[511], [600, 33], [300, 300, 300], [40] * 25, [1018]], ids=str)
@torch.inference_mode()
def test_captured_steps_of_many_prompts_give_what_eager_ones_do(checkpoints: Any, tmp_path: Path, lengths: list[int]):
    """In 16 bits, with heads that kernels for Hopper take, which share tickets with the steps that are not captured."""
    stated = json.loads((checkpoints("qwen3") / "config.json").read_text())
    large = {"head_dim": 64, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps({**stated, **large}))
    engine = LLMEngine(str(tmp_path), load_dummy=True, dtype="bf16", device="cuda", level=3, num_kvcache_blocks=512,
                       max_num_seqs=32, max_num_batched_tokens=1024)  # fmt: skip
    try:
        runner, _ = prefill(engine, [9, 20, 130, 65, 3])
        engine.add_request([tiny.prompt(length, seed=length) for length in lengths], SamplingParams(max_tokens=5))
        plan = engine._engine.scheduler.schedule()
        assert plan.num_decodes == 5 and plan.num_tokens == 5 + sum(lengths), "prompts beside decodes"
        runner._settle(plan.rows)
        eager = runner._mix(plan).hidden
        for _ in range(2):
            captured = runner.graphs.mix(plan)
            assert captured is not None
            for ours, theirs in zip(tokens_of(captured, plan), eager, strict=True):  # type: ignore[arg-type]
                assert ((ours.double() - theirs).norm(dim=-1) <= 0.03 * theirs.double().norm(dim=-1)).all()
        draw, drawn = captured.tails["greedy"]
        draw.replay()
        assert drawn[: len(plan.rows)].tolist() == captured.logits[: len(plan.rows)].argmax(-1).tolist()  # type: ignore[index]
    finally:
        engine.close()
        torch.cuda.empty_cache()


@pytest.mark.gpu
@needs_gpu
def test_memory_is_flat_over_many_steps(open_engine: Any):
    engine = open_engine("qwen3")
    params = [
        SamplingParams(temperature=0.9, top_p=(0.9, 1.0)[at % 2], max_tokens=150, ignore_eos=True, seed=at)
        for at in range(8)
    ]
    prompts = [tiny.prompt(10 + at, seed=at) for at in range(8)]
    engine.generate(prompts, params)  # all kinds of steps have been there
    gc.collect()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(3):
        engine.generate(prompts, params)
    gc.collect()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert engine.metrics.scheduler.num_steps > 500


@pytest.mark.gpu
@needs_gpu
def test_another_pool_forgets_what_was_captured_and_serves_on(open_engine: Any):
    engine = open_engine("qwen3", enable_prefix_caching=False)
    prompt, params = tiny.prompt(20), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (first,) = engine.generate([prompt], params)
    runner = engine._engine.runner
    pools = {pool.name: pool.num_blocks for pool in engine._engine.scheduler.cache.pools}
    runner.bind(pools)
    assert runner.graphs.sizes == []
    (eager,) = engine.generate([prompt], params)
    runner.graphs.capture([1, 4])
    assert runner.graphs.sizes == [1, 4]
    (again,) = engine.generate([prompt], params)
    assert first["token_ids"] == eager["token_ids"] == again["token_ids"]
