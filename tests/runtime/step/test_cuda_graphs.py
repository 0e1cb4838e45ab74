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

import msgspec
import numpy as np
import pytest
import tiny
import torch
from law import assert_same_logits

from atom import LLMEngine, SamplingParams
from atom.runtime.draft.table import DraftTable
from atom.runtime.step.builder import StepBuilder
from atom.runtime.step.cuda_graphs import Graphs, Started, _Captured
from atom.runtime.step.input import BatchShape, Capacity, StepInput
from atom.runtime.step.runner import Runner
from atom.runtime.types import Plan, ScheduledRequest, Sequence, StepLimits

PADDING = 99


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
        return torch.frombuffer(array, dtype=torch.int32)

    found = Graphs(SimpleNamespace(padding=PADDING, send=send, sent=sent))  # type: ignore[arg-type]
    for size in (1, 2, 4):
        slots = torch.full((size,), -1, dtype=torch.int32)
        found._decodes[size] = _Captured(Replays(), slots, Started(slots, torch.zeros(size, 3)))  # type: ignore[arg-type]
    for num_tokens in (8, 16):
        shape = BatchShape(num_tokens, 3, 3)
        packed = torch.frombuffer(shape.pad(PADDING), dtype=torch.int32)
        started = Started(shape.split(packed).sampled, torch.zeros(3, 3), (), (torch.zeros(num_tokens, 2),))
        found._mixed[shape] = _Captured(Replays(), packed, started)  # type: ignore[arg-type]
    return found


def decode(graphs: Graphs, slots: list[int]) -> Started | None:
    """Start the decodes of these slots, as a builder pads them."""
    size = next((size for size in graphs.sizes if size >= len(slots)), len(slots))
    packed = bytearray(np.array(slots + [graphs._model.padding] * (size - len(slots)), np.int32))
    return graphs.start(StepInput(shape=BatchShape(size, size, size, size), is_decode=True, packed=packed))


def mix(graphs: Graphs, counts: list[int]) -> Started | None:
    """Start prompts of these numbers of tokens, as a builder packs them."""
    builder = StepBuilder(Capacity(("full",), PADDING, 1, 9, mixed_shapes=graphs.shapes))
    params, blocks = SamplingParams(), {"full": [1]}
    sequences = [Sequence(str(at), [5] * num, params, slot=at, blocks=dict(blocks)) for at, num in enumerate(counts)]
    return graphs.start(
        builder.build(Plan([ScheduledRequest(each, 0, len(each.prompt), True) for each in sequences], 0))
    )


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
    started = decode(graphs, slots)
    assert (None if started is None else started.slots.tolist()) == rows
    num_replays = [each.graph.num for each in graphs._decodes.values()]  # type: ignore[attr-defined]
    assert num_replays == [int(rows is not None and size == len(rows)) for size in (1, 2, 4)]


def test_the_same_rows_are_sent_once_and_others_anew(graphs: Graphs):
    sent = graphs._model.sent  # type: ignore[attr-defined]
    for slots in ([5, 3, 0], [5, 3, 0], [5, 3]):
        decode(graphs, slots)
    assert [np.frombuffer(array, np.int32).tolist() for array in sent] == [[5, 3, 0, PADDING], [5, 3]]
    for slots in ([5, 3, 1], [5, 3, 0]):
        started = decode(graphs, slots)
        assert started is not None and started.slots.tolist() == [*slots, PADDING]


def test_a_step_whose_tokens_have_images_runs_outside_the_graphs(graphs: Graphs):
    shape = next(iter(graphs._mixed))
    step = StepInput(shape=shape, is_decode=False, packed=shape.pad(PADDING))
    assert graphs.start(step) is not None
    step.image_rows = bytearray(np.full(shape.num_tokens, -1, np.int32))
    assert graphs.start(step) is None


def test_a_stage_sends_after_each_replay_and_its_slots_outlive_the_next(graphs: Graphs):
    captured: Any = graphs._decodes[2]
    sent: list[int] = []
    captured.sends = [lambda: sent.append(captured.graph.num), lambda: sent.append(-1)]
    captured.started.unscored = (torch.zeros(2, 5),)
    first, second = decode(graphs, [5, 3]), decode(graphs, [4, 0])
    assert first is not None and second is not None
    assert (first.slots.tolist(), second.slots.tolist()) == ([5, 3], [4, 0]) and sent == [1, -1, 2, -1]


@pytest.mark.parametrize(("counts", "num_tokens"), [([3, 4], 8), ([8], 8), ([4, 5], 16), ([9, 9], None), ([1, 1, 1], None),
                                                   ([2, 2, 4], 8)])  # fmt: skip
def test_a_step_with_prompts_runs_in_the_smallest_graph_that_holds_it(
    graphs: Graphs, counts: list[int], num_tokens: int | None
):
    started = mix(graphs, counts)
    found = None if started is None or started.hidden is None else len(started.hidden[0])
    assert found == num_tokens
    if started is not None:
        assert started.slots.tolist() == [*range(len(counts)), *[PADDING] * (3 - len(counts))]


def test_what_is_not_captured_yet_is_when_it_first_runs(graphs: Graphs, monkeypatch: pytest.MonkeyPatch):
    captured = list(graphs._decodes.values())
    made: list[int] = []
    monkeypatch.setattr(graphs, "_capture_decodes", lambda size: made.append(size) or captured[1])
    graphs._decodes[2] = None
    for slots in ([4], [1, 3], [3, 1], [0, 1, 2]):
        decode(graphs, slots)
    assert made == [2]
    assert captured[1].graph.num == 2  # type: ignore[union-attr]
    mixed, (small, large) = [], graphs._mixed
    monkeypatch.setattr(graphs, "_capture_mixed", lambda shape: mixed.append(shape) or graphs._mixed[large])
    graphs._mixed[small] = None
    captured_large: Any = graphs._mixed[large]
    monkeypatch.setattr(captured_large, "packed", torch.zeros(len(small.pad(0)) // 4, dtype=torch.int32))
    for _ in range(2):
        mix(graphs, [3])
    assert mixed == [small]


def imagine(num_slots: int, flops_a_token: float = 1e6, num_drafts: int = 0) -> Any:
    """A model for graphs that capture nothing."""
    computed = Mock(return_value=Mock(unscored=()))
    return Mock(thinned=contextlib.nullcontext, decode=computed, mix=Mock(return_value=computed.return_value), decode_drafts=Mock(return_value=computed.return_value),
                flops_a_token=flops_a_token, padding=PADDING, num_drafts=num_drafts, limits=StepLimits(num_slots, 1, 1, 64),
                 state=SimpleNamespace(num_slots=num_slots, vocab=8),
                logits_dtype=torch.float32, device=torch.device("cpu"), tables=torch.zeros(1, 1, 1),
                send=lambda array: torch.frombuffer(array, dtype=torch.int32))  # fmt: skip


def find_captured(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...] = (1,), **options: bool
) -> list[BatchShape]:
    """The steps with prompts that a start captures, in order."""
    captured: list[BatchShape] = []
    for name in ("graph_pool_handle", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(graphs, "_capture_decodes", lambda size: None)
    monkeypatch.setattr(graphs, "_capture_mixed", captured.append)
    graphs.capture(sizes, **options)
    return captured


@pytest.mark.parametrize(
    ("max_tokens", "num_slots", "shapes"),
    [
        (8, 20, [(8, 9)]),
        (16, 20, [(16, 17)]),
        (100, 20, [(16, 17), (32, 21), (64, 21), (100, 21)]),
        (300, 200, [(16, 17), (32, 33), (64, 65), (128, 65), (256, 65), (300, 65)]),
        (8192, 1, [(num, 2) for num in (16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)]),
    ],
)
def test_a_start_captures_prompts_of_all_sizes_that_can_come(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, num_slots: int, shapes: list[tuple[int, int]]
):
    graphs = Graphs(model := imagine(num_slots))
    graphs.compile([1], max_tokens)
    walked = {call.args[0] for call in model.mix.call_args_list}
    captured = find_captured(graphs, monkeypatch)
    prompts = [each for each in captured if not each.num_decodes]
    assert [(each.num_tokens, each.num_rows) for each in prompts[::-1]] == shapes
    assert {each for each in prompts if each.num_tokens <= 512} < walked


@pytest.mark.parametrize("is_lazy", [True, False])
def test_what_takes_the_most_memory_is_captured_first(monkeypatch: pytest.MonkeyPatch, is_lazy: bool):
    graphs = Graphs(imagine(num_slots=300, flops_a_token=1e10))
    graphs.compile([1], 8192)
    shapes = list(graphs._find_shapes())
    captured = find_captured(graphs, monkeypatch, is_lazy=is_lazy)
    tokens_first = max((each.num_tokens, each.num_rows) for each in shapes)
    rows_first = max((each.num_rows, each.num_tokens) for each in shapes)
    assert (captured[0].num_tokens, captured[0].num_rows) == tokens_first
    assert rows_first in [(each.num_rows, each.num_tokens) for each in captured]
    assert rows_first[0] == 300 + 300 - 256, "44 prompts with 257 decodes or more, and a row of padding"
    assert len(captured) == (2 if is_lazy else len(shapes)), "the others when they first run"


def test_without_graphs_of_decodes_there_are_none(monkeypatch: pytest.MonkeyPatch):
    graphs = Graphs(imagine(num_slots=4))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    graphs.capture([])
    assert graphs._mixed == {}


@pytest.mark.parametrize(("max_tokens", "num_slots"), [(1, 1), (7, 3), (16, 40), (90, 17), (300, 100), (300, 1)])
def test_there_is_a_shape_with_little_padding_for_each_step_of_few_prompts(max_tokens: int, num_slots: int):
    graphs = Graphs(imagine(num_slots))
    graphs.compile([1], max_tokens)
    shapes = graphs._find_shapes()
    for num_decodes in range(min(num_slots, max_tokens) + 1):
        for num_more in range(max_tokens - num_decodes + 1):
            most = min(num_more, num_slots - num_decodes, 64)
            for num_prompts in {1, most} if most else set[int]() if num_more else {0}:
                num_rows = num_decodes + num_prompts
                asked = BatchShape(num_decodes + num_more, num_rows, num_rows, num_decodes)
                found = next(each for each in shapes if each.holds(asked))
                assert found.num_tokens <= 2 * asked.num_tokens + 32


@pytest.mark.parametrize(("flops_a_token", "largest"), [(14e9, 571), (1e6, 2048 + 256), (1e12, 256), (8e9, 1000)])
def test_steps_that_keep_a_gpu_busy_are_not_captured(flops_a_token: float, largest: int):
    graphs = Graphs(imagine(256, flops_a_token))
    graphs.compile([1], 16384)
    sizes = [each.num_tokens for each in graphs._find_shapes()]
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


def test_fewer_drafts_are_captured_for_more_decodes(monkeypatch: pytest.MonkeyPatch):
    """As many as the scheduler drafts for the fewest decodes that take a size, of 64 tokens in all; then none."""
    captured: list[tuple[int, int]] = []
    graphs = Graphs(model := imagine(100, num_drafts=3))
    monkeypatch.setattr(graphs, "_capture_drafts", lambda *sizes: captured.append(sizes))
    sizes = (1, 2, 8, 16, 24, 32, 48)
    graphs.compile(sizes, 3000)
    walked = {(len(call.args[0]), call.args[2]) for call in model.decode_drafts.call_args_list}
    find_captured(graphs, monkeypatch, sizes=sizes)
    assert graphs.draft_sizes == ((1, 3), (2, 3), (8, 3), (16, 3), (24, 2), (32, 1))
    assert captured == [(24, 2), (16, 3), (32, 1), (8, 3), (2, 3), (1, 3)], "what takes the most memory first"
    assert walked == {*captured, (1, 1), (1, 2), (21, 2)}, "and the fewest and most decodes of each number of drafts"
    captured.clear()
    find_captured(graphs, monkeypatch, sizes=sizes[-1:], is_lazy=True)
    assert captured == [(24, 2)]


def test_of_measured_steps_what_usually_pays_is_captured_at_the_start(monkeypatch: pytest.MonkeyPatch):
    captured: list[tuple[int, int]] = []
    graphs = Graphs(model := imagine(100, num_drafts=3))
    table = DraftTable({8: [1.0, 1.0, 1.0, 1.0], 32: [1.0, 1.1, 1.9, 2.9]})
    model.limits = StepLimits(100, 1, 1, draft_table=table)
    monkeypatch.setattr(graphs, "_capture_drafts", lambda *sizes: captured.append(sizes))
    sizes = (8, 32, 48)
    graphs.compile(sizes, 3000)
    mixed = find_captured(graphs, monkeypatch, sizes=sizes)
    assert graphs.draft_sizes == ((8, 1), (8, 2), (8, 3), (32, 1), (32, 2), (32, 3)), "all may pay"
    assert captured == [(32, 3), (32, 1), (8, 3)], "the largest, for the memory that it takes, and what is likely"
    assert {shape.num_drafts for shape in graphs.shapes} == {0, 1, 2, 3}
    mixed_drafts = {(shape.num_decodes, shape.num_drafts) for shape in mixed if shape.num_drafts}
    assert mixed_drafts == {(16, 1), (16, 3), (32, 1), (32, 3)}, (
        "1 to 16 are up to 8 or up to 32; the last is the largest"
    )


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
    assert graphs.sizes == () and decode(graphs, [1]) is None


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


def prefill(engine: LLMEngine, lengths: list[int], max_tokens: int = 100) -> tuple[Runner, list[Sequence]]:
    """Sequences whose prompts are computed, each with its first token, and no step running."""
    engine._engine.runner.run_ahead = engine._engine.scheduler._run_ahead = 0
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine.add_request([tiny.prompt(length, seed=length) for length in lengths], params)
    engine.step()
    runner = engine._engine.runner
    assert isinstance(runner, Runner)
    return runner, list(engine._engine.scheduler.running)


def tokens_of(started: Started, step: StepInput, plan: Plan) -> list[torch.Tensor]:
    """What the step gave of the plan's tokens, and not of padding."""
    num_decodes = step.shape.num_decodes
    assert started.hidden is not None and num_decodes >= plan.num_decodes
    prompts = slice(num_decodes, num_decodes + plan.num_tokens - plan.num_decodes)
    return [torch.cat([each[: plan.num_decodes], each[prompts]]) for each in started.hidden]


def build_both(engine: LLMEngine, plan: Plan) -> tuple[StepInput, StepInput]:
    """The step of a plan in the shape that was captured, and once more in its own; slots know what they are sent."""
    builder, runner = engine._engine.builder, engine._engine.runner
    captured = builder.build(plan)
    if captured.admissions:
        runner.model.state.admit(captured.admissions)  # type: ignore[attr-defined]
    if captured.table_entries:
        runner.model.extend_tables(captured.table_entries)  # type: ignore[attr-defined]
    capacity, builder._capacity = builder._capacity, msgspec.structs.replace(builder._capacity, mixed_shapes=())
    eager = builder.build(plan)
    builder._capacity = capacity
    return captured, eager


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "deepseek_v3"])
@torch.inference_mode()
def test_captured_decodes_give_the_logits_of_eager_ones(open_engine: Any, name: str, num_rows: int):
    runner, sequences = prefill(open_engine(name), [3 + 7 * at for at in range(num_rows)])
    slots = [each.slot for each in sequences]
    captured = decode(runner.graphs, slots)
    assert captured is not None
    logits = captured.logits[:num_rows].clone()  # type: ignore[index]
    eager = runner.model.decode(torch.tensor(slots, dtype=torch.int32, device="cuda"))
    assert_same_logits(logits.float().cpu(), eager.float().cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[1], [15], [16], [17], [31, 1], [5, 6, 7], [100, 28], [250, 1]], ids=str)
@pytest.mark.parametrize("name", ["qwen3_window", "qwen3_moe", "deepseek_v3"])
@torch.inference_mode()
def test_captured_steps_with_prompts_give_the_logits_of_eager_ones(open_engine: Any, name: str, lengths: list[int]):
    engine = open_engine(name)
    runner, _ = prefill(engine, [9, 20])
    params = SamplingParams(temperature=0, max_tokens=5)
    engine.add_request([tiny.prompt(length, seed=length) for length in lengths], params)
    plan = engine._engine.scheduler.schedule()
    assert plan.num_decodes >= 2 and plan.num_tokens == 2 + sum(lengths), "prompts with decodes"
    step, own = build_both(engine, plan)
    captured = runner.graphs.start(step)
    assert captured is not None
    count = sum(row.samples for row in plan.rows)
    logits = captured.logits[:count].clone()  # type: ignore[index]
    hidden = tokens_of(captured, step, plan)
    eager = runner._start(own)
    assert_same_logits(logits.float().cpu(), eager.logits.float().cpu())  # type: ignore[union-attr]
    for ours, theirs in zip(hidden, eager.hidden, strict=True):  # type: ignore[arg-type]
        assert_same_logits(ours.flatten(1).float().cpu(), theirs.flatten(1).float().cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[511], [600, 33], [300, 300, 300], [40] * 25, [1018]], ids=str)
@torch.inference_mode()
def test_captured_steps_of_many_prompts_give_what_eager_ones_do(checkpoints: Any, tmp_path: Path, lengths: list[int]):
    """In 16 bits, with heads that kernels for Hopper take, which share tickets with the steps that are not captured."""
    config = json.loads((checkpoints("qwen3") / "config.json").read_text())
    large = {"head_dim": 64, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps({**config, **large}))
    engine = LLMEngine(str(tmp_path), load_dummy=True, dtype="bf16", device="cuda", level=3, num_kvcache_blocks=512,
                       max_num_seqs=32, max_num_batched_tokens=1024)  # fmt: skip
    try:
        runner, _ = prefill(engine, [9, 20, 130, 65, 3])
        engine.add_request([tiny.prompt(length, seed=length) for length in lengths], SamplingParams(max_tokens=5))
        plan = engine._engine.scheduler.schedule()
        assert plan.num_decodes == 5 and plan.num_tokens == 5 + sum(lengths), "prompts with decodes"
        step, own = build_both(engine, plan)
        eager = runner._start(own).hidden
        for _ in range(2):
            captured = runner.graphs.start(step)
            assert captured is not None
            for ours, theirs in zip(tokens_of(captured, step, plan), eager, strict=True):  # type: ignore[arg-type]
                assert ((ours.double() - theirs).norm(dim=-1) <= 0.03 * theirs.double().norm(dim=-1)).all()
        draw, drawn = captured.tails["greedy"]
        draw.replay()
        assert drawn[: len(plan.rows)].tolist() == captured.logits[: len(plan.rows)].argmax(-1).tolist()  # type: ignore[index]
    finally:
        engine.close()
        torch.cuda.empty_cache()


@pytest.mark.gpu
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
def test_another_pool_forgets_what_was_captured_and_serves_on(open_engine: Any):
    engine = open_engine("qwen3", enable_prefix_caching=False)
    prompt, params = tiny.prompt(20), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (first,) = engine.generate([prompt], params)
    runner = engine._engine.runner
    pools = {pool.name: pool.num_blocks for pool in engine._engine.scheduler.cache.pools}
    runner.bind(pools)
    assert runner.graphs.sizes == ()
    (eager,) = engine.generate([prompt], params)
    runner.graphs.capture([1, 4])
    assert runner.graphs.sizes == (1, 4)
    (again,) = engine.generate([prompt], params)
    assert first["token_ids"] == eager["token_ids"] == again["token_ids"]
