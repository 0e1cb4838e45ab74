"""What a GPU's memory is for, by the numbers of a GPU that a test makes up."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from kinds import full_kind

from atom import LLMEngine, weights
from atom.assemble.kv_blocks import plan_kv
from atom.compiler import compile_graph
from atom.config import Config
from atom.config.load import engine_overrides, load
from atom.errors import CapacityError
from atom.kernels import Target
from atom.runtime import memory
from atom.runtime.step.input import BatchShape
from atom.runtime.step.model import Computed, Model
from atom.runtime.step.program import Bindings
from atom.runtime.types import StepLimits

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Makes a GPU up that has so many GiB free, of so many."""

    def make(free: float, total: float) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free * GIB), int(total * GIB)))

    return make


def config_of(folder: Path, **fields: Any) -> Config:
    return load(engine_overrides(str(folder), {"dtype": "fp32", "level": 0, "device": "cuda", **fields}))


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"max_num_seqs": 1}, [1]),
        ({"max_num_seqs": 6}, [1, 2, 4, 6]),
        ({"max_num_seqs": 16}, [1, 2, 4, 8, 16]),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 20}, [1, 2, 4, 8, 16, 20]),
        ({"max_num_seqs": 513}, [*memory.SIZES, 513]),
        ({"max_num_seqs": 1000}, [*memory.SIZES, 640, 768, 896, 1000]),
        ({"max_num_seqs": 640}, [*memory.SIZES, 640]),
        ({"max_num_seqs": 64, "cudagraph_capture_sizes": [8, 3, 8]}, [3, 8]),
        ({"max_num_seqs": 64, "cudagraph_capture_sizes": []}, []),
    ],
)
def test_the_numbers_of_decodes_that_are_captured(checkpoints: Any, limits: dict[str, Any], sizes: list[int]) -> None:
    config = config_of(checkpoints("qwen3"), **{"max_num_batched_tokens": 4096, **limits})
    assert memory.capture_sizes(config.serve) == sizes


def test_what_the_weights_leave_of_the_share(checkpoints: Any, gpu: Callable[..., None]) -> None:
    config = config_of(checkpoints("qwen3"), gpu_memory_utilization=0.5, max_num_seqs=7)
    graph = compile_graph(config, target=Target("cuda"))
    stored = sum(tensor.numel() * 4 for tensor in tiny.reference(checkpoints("qwen3")).state_dict().values())
    assert weights.num_bytes(graph) == pytest.approx(stored, rel=0.01), "and the frequencies of rope"
    gpu(3, 4)  # 1 GiB is taken already: what is left of 2 is another one
    counts = 8 * 101 * 4  # of penalties: 7 slots and that of padding, tokens, bytes
    assert memory.left_for_kv(graph, config.serve) == GIB - weights.num_bytes(graph) - counts


def test_weights_that_do_not_fit_are_refused_with_the_sizes_and_the_knob(
    checkpoints: Any, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(checkpoints("qwen3"), gpu_memory_utilization=0.25, max_num_seqs=256)
    graph = compile_graph(config, target=Target("cuda"))
    monkeypatch.setattr(weights, "num_bytes", lambda graph: 3 * GIB)
    gpu(7, 8)
    message = "the weights take 3.0 GiB and the counts of penalties 0.0 GiB (serve.max_num_seqs=256), the GPU has "
    message += "1.0 GiB for them (7.0 of its 8.0 GiB are free, of all of which serve.gpu_memory_utilization=0.25 is to "
    message += "be used): raise that, lower serve.max_num_seqs, free memory, or take a larger GPU"
    with pytest.raises(CapacityError, match=f"^{re.escape(message)}$"):
        memory.left_for_kv(graph, config.serve)
    gpu(0.5, 8)  # others have taken more than our share
    with pytest.raises(CapacityError, match=r"the GPU has 0\.0 GiB for them"):
        memory.left_for_kv(graph, config.serve)


def test_a_table_that_would_make_room_is_named(
    checkpoints: Any, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(checkpoints("llama"), gpu_memory_utilization=1)
    graph, table = compile_graph(config, target=Target("cuda")), 101 * 48 * 4
    whole, counts = weights.num_bytes(graph), memory.counts_bytes(config.serve.max_num_seqs, 101)
    advice = r"; serve\.cpu_offload_params=\[embed_tokens\] keeps tables in host memory, of which a token reads a row$"
    gpu((whole + counts - table) / GIB, (whole + counts - table) / GIB)
    with pytest.raises(CapacityError, match=advice):
        memory.left_for_kv(graph, config.serve)
    offloaded = compile_graph(
        config_of(checkpoints("llama"), cpu_offload_params=["embed_tokens"]), target=Target("cuda")
    )
    assert memory.left_for_kv(offloaded, replace(config.serve)) == 0
    gpu((whole + counts - table - 1) / GIB, (whole + counts - table - 1) / GIB)
    for each in (graph, offloaded):
        with pytest.raises(CapacityError, match=r"larger GPU$"):
            memory.left_for_kv(each, config.serve)


def test_a_step_that_does_not_fit_next_to_the_weights_names_its_knobs(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)

    class Model:
        padding, slots = 6, None

        def send(self, array: Any) -> Any:
            return array

        def mix(self, shape: BatchShape, packed: Any) -> Any:
            assert (shape.num_tokens, shape.num_rows) == (4096, 6)
            raise torch.OutOfMemoryError("out of memory")

    serve = config_of(checkpoints("qwen3"), max_num_batched_tokens=4096, max_num_seqs=6).serve
    message = "a step of 4096 tokens takes more memory than the weights leave of the GPU: "
    message += "lower serve.max_num_batched_tokens (to 2048) or serve.max_num_seqs"
    with pytest.raises(CapacityError, match=f"^{re.escape(message)}$"):
        memory.measure_left(SimpleNamespace(model=Model()), [1], serve)  # type: ignore[arg-type]


def test_counts_of_penalties_that_do_not_fit_next_to_the_weights_are_refused(
    checkpoints: Any, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(checkpoints("qwen3"), gpu_memory_utilization=1)
    config = replace(config, serve=replace(config.serve, max_num_seqs=3_000_000))
    graph = compile_graph(config, target=Target("cuda"))
    monkeypatch.setattr(weights, "num_bytes", lambda graph: 3 * GIB)
    gpu(4, 4)
    message = r"3\.0 GiB and the counts of penalties 1\.1 GiB \(serve\.max_num_seqs=3000000\)"
    with pytest.raises(CapacityError, match=message):
        memory.left_for_kv(graph, config.serve)


def test_a_start_without_memory_names_its_knobs(checkpoints: Any) -> None:
    serve = config_of(checkpoints("qwen3"), max_num_batched_tokens=4096, max_num_seqs=6).serve
    message = "the weights leave too little memory of the GPU for a start: "
    message += "lower serve.max_num_seqs (6) or serve.max_num_batched_tokens (4096)"
    with pytest.raises(CapacityError, match=f"^{re.escape(message)}$"), memory.no_memory_at_start(serve):
        raise torch.OutOfMemoryError("out of memory")
    with pytest.raises(ValueError, match="something else"), memory.no_memory_at_start(serve):
        raise ValueError("something else")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_measured_step_shapes_a_copy_of_its_logits(dtype: torch.dtype) -> None:
    """As a step does, whose log probabilities are of the logits themselves."""
    logits, sampled = torch.zeros(2, 5, dtype=dtype), []

    class Model:
        padding, device, has_draft_programs = 2, "cpu", False

        def send(self, array: Any) -> Any:
            return torch.frombuffer(array, dtype=torch.int32)

        def mix(self, shape: BatchShape, packed: Any) -> Any:
            return Computed(
                SimpleNamespace(),  # type: ignore[arg-type]
                (torch.zeros(shape.num_tokens, 3),),
                logits,
            )

        class head:
            inputs = ("hidden",)

            def __new__(cls, inputs: dict[str, Any]) -> Any:
                return (torch.zeros(len(inputs["hidden"]), 50),)

        def sample(self, slots: Any, logits: Any, kind: str, penalties: bool) -> None:
            sampled.append(logits)

    memory.take_largest_step(Model(), 4, 2)  # type: ignore[arg-type]
    (shaped,) = sampled
    assert shaped.dtype == torch.float32 and shaped.data_ptr() != logits.data_ptr()


def test_what_the_measured_step_does_can_be_done_again_and_changes_nothing(
    checkpoints: Any, triton_device: str
) -> None:
    """Its rows are padding: no slot's state moves, and nothing is counted."""
    config = config_of(checkpoints("qwen3"), level=0)
    graph = compile_graph(config, target=Target("cuda"))
    tensors = weights.load_dummy(graph.recipes(), 0, triton_device)
    model = Model(graph, Bindings(tensors), 16, StepLimits(3, 64, 64), device=triton_device, backend="triton")
    model.bind({"full": 2})
    state = model.state
    kept = [state.tokens, state.lengths, state.counts, state.reported]
    before = [each.clone() for each in kept]
    for num_rows in (1, 3):
        memory.take_largest_step(model, 300, num_rows)
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))


def test_a_pool_and_slots_are_freed_before_the_next_ones_are_allocated(
    checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of recurrent state take as much of a GPU as half of what weights leave."""
    graph = compile_graph(config_of(checkpoints("qwen3_next"), level=0), target=Target("cpu"))
    tensors = weights.load_dummy(graph.recipes(), 0, "cpu")
    model = Model(graph, Bindings(tensors), 16, StepLimits(3, 64, 64), device="cpu")
    pool = dict.fromkeys((*model.kinds, *model.recurrent), 2)
    model.bind(pool)
    former = [weakref.ref(each) for held in (model.caches, model.slots) for each in held.values()]
    allocate, alive = Model._allocate, list[bool]()

    def watched(*args: Any) -> torch.Tensor:
        alive.extend(each() is not None for each in former)
        return allocate(*args)

    monkeypatch.setattr(Model, "_allocate", watched)
    model.bind(pool)
    assert len(former) == 9 and alive and not any(alive)


def test_nothing_is_loaded_of_weights_that_do_not_fit(
    checkpoints: Any, gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    features = frozenset({"nvidia", "sm_90", "A GPU"})
    monkeypatch.setattr("atom.compiler.compile.find_target", lambda device: Target(device, features))
    monkeypatch.setattr("atom.assemble.engine.load_weights", lambda *_: pytest.fail("weights are loaded"))
    gpu(2**-20, 1)  # 1 KiB
    with pytest.raises(CapacityError, match=r"the weights take .* GiB \(.*\), the GPU has 0\.0 GiB"):
        LLMEngine.from_config(config_of(checkpoints("qwen3")))


def test_a_pool_that_holds_no_sequence_names_the_share(
    checkpoints: Any, gpu: Callable[..., None], monkeypatch: Any
) -> None:
    config = config_of(checkpoints("qwen3"), max_num_seqs=7)
    monkeypatch.setattr(
        "atom.compiler.compile.find_target", lambda device: Target(device, frozenset({"nvidia", "sm_90"}))
    )
    needed = weights.num_bytes(compile_graph(config)) + 8 * 101 * 4
    gpu((needed + 65536) / GIB / 0.9, (needed + 65536) / GIB / 0.9)
    with pytest.raises(
        CapacityError,
        match=r"serve\.gpu_memory_utilization=0\.9 leaves it \d+: raise that or lower serve\.max_model_len",
    ):
        LLMEngine.from_config(config)


def test_a_share_that_leaves_no_pool_names_what_takes_it(checkpoints: Any) -> None:
    config = config_of(checkpoints("qwen3"), max_num_seqs=7)
    message = r"2\.0 GiB more\. Raise that, or lower serve\.max_num_batched_tokens \(\d+\) or serve\.max_num_seqs \(7\)"
    with pytest.raises(CapacityError, match=message):
        plan_kv([full_kind(64, 16)], config.serve, config.limits, left=-2 * GIB)
