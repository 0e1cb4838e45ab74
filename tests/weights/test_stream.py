"""Weights are streamed from a file to a device; without a GPU the buffers are not pinned."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import wire
from kernels.aiter_doubles import unshuffled
from safetensors.torch import save_file
from torch import Tensor

from atom import weights
from atom.checkpoint import SILENT, Checkpoint, open_checkpoint
from atom.compiler.artifact import semantic_graph
from atom.config.checkpoint import open_for
from atom.config.load import load
from atom.errors import CapacityError, CheckpointError, UnsupportedError
from atom.graph import (
    TORCH_DTYPES,
    Cat,
    Dequantize,
    Graph,
    Recipe,
    RopeFreqs,
    Shift,
    Shuffle,
    Slice,
    Stack,
    Transpose,
    Type,
    W,
    parse,
)
from atom.kernels import Target
from atom.passes.pipeline import lower
from atom.weights import stream
from atom.weights.make import make_all

pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")

torch.manual_seed(0)
TENSORS = {
    "a": torch.randn(5, 7),
    "b": torch.randn(3, 7),
    "tall": torch.randn(33, 3),
    "wide": torch.randn(2, 65).half(),
    "experts": torch.randn(3, 4, 6),
    "norm": torch.randn(11).bfloat16(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    **{f"e.{expert}.{name}": torch.randn(4, 6) for expert in range(3) for name in ("gate", "up")},
}
A, B, TALL, WIDE, EXPERTS = (TENSORS[name] for name in ("a", "b", "tall", "wide", "experts"))
GATE, UP = (torch.stack([TENSORS[f"e.{expert}.{name}"] for expert in range(3)]) for name in ("gate", "up"))


def stored(name: str, *shape: int) -> W:
    return W(name, Type("fp32", shape))


# name: the recipe, and what it is in plain torch
RECIPES: dict[str, tuple[Recipe, Tensor]] = {
    "whole": (stored("tall", 33, 3), TALL),
    "a half to fp32": (stored("wide", 2, 65), WIDE.float()),
    "fp32 to bf16": (W("a", Type("bf16", (5, 7))), A.bfloat16()),
    "fp32 to fp16": (W("tall", Type("fp16", (33, 3))), TALL.half()),
    "one dim": (stored("norm", 11), TENSORS["norm"].float()),
    "no dim": (stored("scalar"), TENSORS["scalar"]),
    "nothing": (stored("empty", 0, 4), TENSORS["empty"]),
    "joined rows": (Cat((stored("a", 5, 7), stored("b", 3, 7))), torch.cat([A, B])),
    "joined columns": (Cat((stored("a", 5, 7), Slice(stored("tall", 33, 3), 2, 7)), 1), torch.cat([A, TALL[2:7]], 1)),
    "rows": (Slice(stored("tall", 33, 3), 5, 21), TALL[5:21]),
    "every third row": (Slice(stored("tall", 33, 3), 1, 32, 0, 3), TALL[1:32:3]),
    "columns": (Slice(stored("wide", 2, 65), 3, 64, 1), WIDE[:, 3:64].float()),
    "columns of rows": (Slice(Slice(stored("tall", 33, 3), 4, 30), 1, 3, 1), TALL[4:30, 1:3]),
    "transposed": (Transpose(stored("tall", 33, 3)), TALL.T),
    "transposed rows": (Slice(Transpose(stored("tall", 33, 3)), 1, 2), TALL.T[1:2]),
    "transposed to bf16": (Transpose(W("a", Type("bf16", (5, 7)))), A.bfloat16().T),
    "shifted": (Shift(stored("norm", 11), 0.75), TENSORS["norm"].float() + 0.75),
    "shifted twice": (Shift(Shift(Slice(stored("tall", 33, 3), 7, 33), 1.5), -0.3), TALL[7:] + 1.5 - 0.3),
    "experts stored as one": (stored("experts", 3, 4, 6), EXPERTS),
    "experts, every second column": (Slice(stored("experts", 3, 4, 6), 1, 6, 2, 2), EXPERTS[:, :, 1::2]),
    "experts, transposed": (Transpose(stored("experts", 3, 4, 6)), EXPERTS.mT),
    "experts, rows in turns": (
        Cat(tuple(Slice(stored("experts", 3, 4, 6), first, 4, 1, 2) for first in range(2)), 1),
        torch.cat([EXPERTS[:, ::2], EXPERTS[:, 1::2]], 1),
    ),
    "experts, columns in turns to bf16": (
        Cat(tuple(Slice(W("experts", Type("bf16", (3, 4, 6))), first, 6, 2, 3) for first in range(3)), 2),
        torch.cat([EXPERTS[:, :, first::3] for first in range(3)], 2).bfloat16(),
    ),
    "two of three turns": (
        Cat(tuple(Slice(stored("tall", 33, 3), first, 33, 0, 3) for first in range(2))),
        torch.cat([TALL[::3], TALL[1::3]]),
    ),
    "some experts": (Slice(stored("experts", 3, 4, 6), 1, 3), EXPERTS[1:]),
    "experts of two tensors": (
        Stack(Cat((stored("e.{expert}.gate", 4, 6), stored("e.{expert}.up", 4, 6))), 0, 3),
        torch.cat([GATE, UP], 1),
    ),
    "stacked, transposed": (Stack(Transpose(stored("e.{expert}.up", 4, 6)), 1, 3), UP[1:].mT),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("staged"), TENSORS)


def save(folder: Path, tensors: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return folder


def load_staged(
    recipes: Sequence[Recipe], checkpoint: Checkpoint, device: str = "cpu", advance: Callable[[int], object] = id
) -> dict[Recipe, Tensor]:
    source = stream.StreamedSource(checkpoint, torch.device(device), advance)
    tensors = make_all(recipes, source, device)
    assert {tensor.device.type for tensor in tensors.values()} <= {device}
    return {recipe: tensor.cpu() for recipe, tensor in tensors.items()}


def assert_same_bits(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.contiguous().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("buffer", [4, 20, 100, stream.BUFFER])
def test_every_recipe_is_what_torch_makes_of_the_tensors(
    folder: Path, device: str, buffer: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream, "BUFFER", buffer)
    counted: list[int] = []
    recipes = [recipe for recipe, _ in RECIPES.values()]
    tensors = load_staged(recipes, open_checkpoint(str(folder)), device, counted.append)
    for recipe, expected in RECIPES.values():
        assert_same_bits(tensors[recipe], expected)
    assert sum(counted) == sum(expected.nbytes for _, expected in RECIPES.values())
    assert len(counted) > 1000 if buffer == 4 else len(counted) < 1000


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama_tied", "bf16"),
        ("qwen3", "fp16"),
        ("phi3", "bf16"),
        ("mixtral", "bf16"),
        ("mixtral_window_stacked", "fp32"),
        ("gpt_oss_odd", "bf16"),
        ("gemma3", "bf16"),
        ("deepseek_v3_stacked", "bf16"),
        ("granitemoe", "bf16"),
    ],
)
def test_a_models_weights_are_those_of_the_mapped_files(
    checkpoints: Callable[[str], Path], device: str, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream, "BUFFER", 1000)
    config = load([f"checkpoint={checkpoints(name)}", f"dtype={dtype}"])
    recipes = lower(semantic_graph(config), 1, Target("cpu")).recipes()
    checkpoint = open_for(config, SILENT)
    tensors = load_staged(recipes, checkpoint, device)
    mapped = weights.load(recipes, checkpoint, SILENT)
    assert tensors.keys() == mapped.keys()
    assert any(isinstance(recipe, RopeFreqs) for recipe in recipes)
    for recipe in recipes:
        assert_same_bits(tensors[recipe], mapped[recipe])


def test_mxfp4_is_unpacked_on_the_way(tmp_path: Path, device: str):
    blocks = torch.randint(0, 256, (3, 4, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 4, 2), dtype=torch.uint8)
    checkpoint = open_checkpoint(str(save(tmp_path, {"w_blocks": blocks, "w_scales": scales})))
    packed = W("w", Type("bf16", (3, 4, 64), "mxfp4"))

    def interleave(whole: Recipe) -> Recipe:
        return Cat((Slice(whole, 0, 4, 1, 2), Slice(whole, 1, 4, 1, 2)), 1)

    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    halves = torch.stack([blocks & 15, blocks >> 4], -1).long()
    expected = (values[halves].flatten(-2) * 2.0 ** (scales.float() - 127).unsqueeze(-1)).flatten(-2).bfloat16()
    for recipe in (Dequantize(interleave(packed)), interleave(Dequantize(packed))):
        (tensor,) = load_staged([recipe], checkpoint, device).values()
        assert_same_bits(tensor, torch.cat([expected[:, 0::2], expected[:, 1::2]], 1))


def test_a_kernels_layout_is_made_of_what_has_arrived(folder: Path, monkeypatch: pytest.MonkeyPatch):
    set_readers(monkeypatch, 3, 20)
    experts, whole = Shuffle(stored("experts", 3, 4, 6), "onednn"), Shuffle(stored("tall", 33, 3), "onednn")
    source = stream.StreamedSource(open_checkpoint(str(folder)), torch.device("cpu"), id)
    tensors = make_all([experts, whole], source, "cpu")
    assert_same_bits(tensors[whole].to_dense(), TALL)
    assert_same_bits(torch.stack([each.to_dense() for each in tensors[experts]]), EXPERTS)


def test_all_experts_are_one_tensor_in_a_layout_that_joins_them(tmp_path: Path, device: str):
    values = torch.randn(3, 32, 64).bfloat16()
    save(tmp_path, {f"experts.{expert}": each.clone() for expert, each in enumerate(values)})
    recipe = Shuffle(Stack(W("experts.{expert}", Type("bf16", (32, 64))), 0, 3), "aiter")
    (made,) = load_staged([recipe], open_checkpoint(str(tmp_path)), device).values()
    assert_same_bits(unshuffled(made), values)


def test_what_no_file_holds_plain_is_read_from_the_checkpoint(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
):
    checkpoint = open_checkpoint(str(folder))
    monkeypatch.setattr(checkpoint, "locate", lambda name: None)
    tensors = load_staged([recipe for recipe, _ in RECIPES.values()], checkpoint, device)
    for recipe, expected in RECIPES.values():
        assert_same_bits(tensors[recipe], expected)


def count_reads(monkeypatch: pytest.MonkeyPatch, max_bytes: int | None = None) -> list[int]:
    """The sizes of all reads from here on, each of max_bytes or fewer."""
    sizes: list[int] = []
    preadv = os.preadv

    def read(file: int, buffers: list[memoryview], start: int) -> int:
        sizes.append(preadv(file, [buffers[0][:max_bytes]], start))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", read)
    return sizes


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("rows", 16 * 3 * 4),
        ("some experts", 2 * 4 * 6 * 4),
        ("experts, rows in turns", 3 * 4 * 6 * 4),
        ("every third row", (10 * 9 + 3) * 4),  # from the first of them to the last
        ("columns of rows", (25 * 3 + 2) * 4),
        ("a half to fp32", 2 * 65 * 2),
    ],
)
def test_only_the_bytes_that_are_needed_are_read(
    folder: Path, name: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    sizes = count_reads(monkeypatch)
    load_staged([RECIPES[name][0]], open_checkpoint(str(folder)))
    assert sum(sizes) == num_bytes


def test_a_read_that_brings_less_than_asked_for_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch):
    sizes = count_reads(monkeypatch, max_bytes=13)
    recipe, expected = RECIPES["whole"]
    assert_same_bits(load_staged([recipe], open_checkpoint(str(folder)))[recipe], expected)
    assert sizes == [13] * 30 + [6]


@pytest.mark.parametrize(
    ("num_elements", "expected"),
    [(1, [2]), (7, [14]), (8, [16]), (9, [2, 16]), (15, [14, 16]), (16, [16, 16]), (17, [2, 16, 16])],
)
def test_what_a_file_holds_as_it_is_wanted_is_read_in_whole_buffers_and_a_rest(
    tmp_path: Path, device: str, num_elements: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream, "BUFFER", 16)
    sizes = count_reads(monkeypatch)
    tensors = {"before": torch.randn(3).bfloat16(), "x": torch.randn(num_elements).bfloat16()}
    checkpoint = open_checkpoint(str(save(tmp_path, tensors)))
    (tensor,) = load_staged([W("x", Type("bf16", (num_elements,)))], checkpoint, device).values()
    assert_same_bits(tensor, tensors["x"])
    assert sorted(sizes) == expected


@pytest.mark.parametrize("num_readers", [1, 3, 8])
def test_many_parts_go_to_their_targets(tmp_path: Path, device: str, num_readers: int, monkeypatch: pytest.MonkeyPatch):
    set_readers(monkeypatch, num_readers, 64)
    tensors = {f"e.{size}": torch.randn(size, 3) for size in range(1, 150)}
    checkpoint = open_checkpoint(str(save(tmp_path, tensors)))
    joined = Cat(tuple(W(name, Type("fp32", tuple(tensor.shape))) for name, tensor in tensors.items()))
    converted = [W(name, Type("bf16", tuple(tensor.shape))) for name, tensor in tensors.items()]
    loaded = load_staged([joined, *converted], checkpoint, device)
    assert_same_bits(loaded[joined], torch.cat([*tensors.values()]))
    for leaf in converted:
        assert_same_bits(loaded[leaf], tensors[leaf.name].bfloat16())


def test_all_readers_read_at_once_into_buffers_in_turn(large: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    set_readers(monkeypatch, 3, 400)  # 40804 bytes: 102 whole buffers
    preadv, together, used = os.preadv, threading.Barrier(3, timeout=60), set[int]()

    def read(file: int, buffers: list[memoryview], start: int) -> int:
        used.add(torch.frombuffer(buffers[0], dtype=torch.uint8).data_ptr())
        if len(buffers[0]) == 400:
            together.wait()
        return preadv(file, buffers, start)

    monkeypatch.setattr(os, "preadv", read)
    load_staged([stored("large", 101, 101)], large)
    assert len(used) == 3 * stream.READER_BUFFERS


def test_no_more_than_one_target_is_made_before_there_is_a_buffer_for_it(
    large: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    set_readers(monkeypatch, 2, 1000)
    made, filled, ahead = [0], [0], [0]

    def make(row: Recipe) -> Tensor:
        ahead.append(made[0] - filled[0])
        made[0] += 1
        source.fill(row, target := torch.empty(1, 101))
        return target

    def advance(_: int) -> None:
        filled[0] += 1

    source = stream.StreamedSource(large, torch.device("cpu"), advance)
    source.map(make, [Slice(stored("large", 101, 101), row, row + 1) for row in range(101)])
    assert (made, filled) == ([101], [101])
    assert max(ahead) == 2 * stream.READER_BUFFERS


def test_a_file_cut_short_since_it_was_opened_is_named(tmp_path: Path, device: str):
    checkpoint = open_checkpoint(str(save(tmp_path, TENSORS)))
    path = tmp_path / "model.safetensors"
    size = path.stat().st_size - 10
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors is cut short: it ends at byte {size}; download"):
        load_staged([recipe for recipe, _ in RECIPES.values()], checkpoint, device)


def test_a_file_that_is_gone_since_it_was_opened_is_named(tmp_path: Path):
    checkpoint = open_checkpoint(str(save(tmp_path, TENSORS)))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: No such file"):
        load_staged([stored("a", 5, 7)], checkpoint)


def test_a_failing_disk_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors: Input/output error"):
        load_staged([stored("a", 5, 7)], open_checkpoint(str(folder)))


def test_a_dtype_that_is_not_loaded_is_refused(tmp_path: Path):
    save(tmp_path, {"a": torch.zeros(2, 2, dtype=torch.float64)})
    with pytest.raises(UnsupportedError, match="tensor a is stored as fp64"):
        load_staged([stored("a", 2, 2)], open_checkpoint(str(tmp_path)))


def set_readers(monkeypatch: pytest.MonkeyPatch, num_readers: int, buffer: int) -> None:
    monkeypatch.setattr(stream, "BUFFER", buffer)
    monkeypatch.setattr(stream, "MAX_READERS", num_readers)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(num_readers))


def slow_transfers(monkeypatch: pytest.MonkeyPatch, num_readers: int, num_reads: int | None = None) -> list[int]:
    """The sizes of all reads from here on: 41 kB in reads of 4 bytes, each of which takes 2 ms.

    After as many as `num_reads` the first of the readers fails, and no other.
    """
    set_readers(monkeypatch, num_readers, 4)
    monkeypatch.setattr(stream, "READER_BUFFERS", 20)
    sizes = count_reads(monkeypatch)
    preadv = os.preadv

    def read(*arguments: object) -> int:
        time.sleep(0.002)
        if num_reads and len(sizes) >= num_reads and threading.current_thread().name.endswith("_0"):
            raise OSError(5, "Input/output error")
        return preadv(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", read)
    return sizes


@pytest.fixture
def large(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(str(save(tmp_path, {"large": torch.randn(101, 101)})))


def test_an_error_in_one_reader_stops_the_others(large: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    sizes = slow_transfers(monkeypatch, 3, num_reads=20)
    with pytest.raises(CheckpointError, match="Input/output error"):
        load_staged([stored("large", 101, 101)], large)
    assert 20 <= len(sizes) < 40


def test_an_error_while_unpacking_is_reported(large: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    set_readers(monkeypatch, 3, 4)

    def fail(*_: object) -> Tensor:
        raise CheckpointError("no such block")

    monkeypatch.setattr(large, "locate", lambda name: None)
    monkeypatch.setattr(stream, "view", fail)
    with pytest.raises(CheckpointError, match="no such block"):
        load_staged([Slice(stored("large", 101, 101), row, row + 1) for row in range(101)], large)


@pytest.mark.parametrize("step", ["copy to the device", "advance", "make a target"])
def test_an_error_of_the_caller_stops_the_readers(large: Checkpoint, step: str, monkeypatch: pytest.MonkeyPatch):
    sizes = slow_transfers(monkeypatch, 3)

    def fail(*_: object) -> None:
        if len(sizes) >= 20:
            raise RuntimeError("no more")

    def make(row: Recipe) -> Tensor:
        for column in range(101):
            source.fill(Slice(row, column, column + 1, 1), torch.empty(1, 1))
            if step == "make a target":
                fail()
        return torch.empty(0)

    if step == "copy to the device":
        monkeypatch.setattr(stream, "_copy_to_device", fail)
    source = stream.StreamedSource(large, torch.device("cpu"), fail if step == "advance" else id)
    with pytest.raises(RuntimeError, match="no more"):
        source.map(make, [Slice(stored("large", 101, 101), row, row + 1) for row in range(101)])
    num_reads = len(sizes)
    assert 20 <= num_reads < 40
    time.sleep(0.05)
    assert len(sizes) == num_reads


def test_ctrl_c_stops_the_readers_at_once(large: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    sizes = slow_transfers(monkeypatch, 2)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    num_before: list[int] = []

    def interrupt() -> None:
        wire.wait_until(lambda: sizes)
        num_before.append(len(sizes))
        os.kill(os.getpid(), signal.SIGINT)

    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            load_staged([stored("large", 101, 101)], large)
    finally:
        signal.signal(signal.SIGINT, handler)
    num_reads = len(sizes)
    assert 0 < num_before[0] <= num_reads <= num_before[0] + 20
    time.sleep(0.05)
    assert len(sizes) == num_reads


TEXT = """
def body(tokens: i64[T], positions: i64[T]):
    x = embedding(tokens, W("embed", bf16[9, 8]))    # bf16[T, 8]
    h = linear(x, cat([W("q", bf16[8, 8]), W("k", bf16[5, 8])]))    # bf16[T, 13]
    return h

def head(hidden: bf16[B, 8]):
    logits = linear(hidden, W("embed", bf16[9, 8]))    # bf16[B, 9]
    return logits
"""


def test_bytes_of_a_graph_count_each_recipe_once():
    assert weights.num_bytes(parse(TEXT)) == 2 * (9 * 8 + 13 * 8)


def test_bytes_of_a_graph_are_those_that_are_loaded(checkpoints: Callable[[str], Path]):
    config = load([f"checkpoint={checkpoints('mixtral')}", "dtype=bf16"])
    graph: Graph = lower(semantic_graph(config), 1, Target("cpu"))
    tensors = weights.load(graph.recipes(), open_for(config, SILENT), SILENT)
    assert weights.num_bytes(graph) == sum(tensor.nbytes for tensor in tensors.values())


def test_random_weights_of_a_cpu_stay_what_they_are():
    recipes: list[Recipe] = [W("a", Type("bf16", (3, 5))), RopeFreqs(4, 100.0), W("b", Type("fp32", (4,)))]
    tensors = weights.load_dummy(recipes, seed=7)
    generator = torch.Generator().manual_seed(7)
    assert_same_bits(tensors[recipes[0]], torch.empty(3, 5).bfloat16().normal_(0.0, 0.02, generator=generator))
    assert_same_bits(tensors[recipes[1]], torch.tensor([1.0, 0.1]))
    assert_same_bits(tensors[recipes[2]], torch.empty(4).normal_(0.0, 0.02, generator=generator))


@pytest.mark.gpu
def test_random_weights_of_a_gpu_are_made_there():
    recipes: list[Recipe] = [
        Cat((W("a", Type("bf16", (300, 500))), W("b", Type("bf16", (33, 500))))),
        Stack(W("e.{expert}", Type("bf16", (64, 64))), 0, 5),
        RopeFreqs(8, 10000.0),
    ]
    first, again, other = (weights.load_dummy(recipes, seed, "cuda") for seed in (1, 1, 2))
    for recipe in recipes[:2]:
        assert first[recipe].device.type == "cuda" and tuple(first[recipe].shape) == recipe.type.shape
        assert abs(first[recipe].float().mean().item()) < 0.001
        assert first[recipe].float().std().item() == pytest.approx(0.02, rel=0.03)
        assert torch.equal(first[recipe], again[recipe]) and not torch.equal(first[recipe], other[recipe])
    assert_same_bits(first[recipes[2]].cpu(), weights.load_dummy(recipes[2:], 1)[recipes[2]])


@pytest.mark.gpu
@pytest.mark.parametrize("is_stored", [False, True])
def test_weights_that_a_gpu_has_no_room_for_are_refused_with_the_sizes(tmp_path: Path, is_stored: bool):
    _, total = torch.cuda.mem_get_info()
    recipe = Stack(W("a", Type("fp32", (1024, 1024))), 0, total // (4 << 20) + 1)
    size = recipe.type.num_bytes
    checkpoint = open_checkpoint(str(save(tmp_path, {"a": torch.zeros(1024, 1024)})))
    with pytest.raises(CapacityError, match=rf"take {size} bytes, device=cuda had \d+ free of {total}: .*checkpoint="):
        if is_stored:
            weights.load([recipe], checkpoint, SILENT, "cuda")
        else:
            weights.load_dummy([recipe], 0, "cuda")


@pytest.mark.gpu
def test_readers_leave_no_memory_allocated_on_a_gpu(tmp_path: Path):
    recipe = W("a", Type("bf16", (2048, 4096)))  # 32 MiB stored, converted in more transfers than there are readers
    checkpoint = open_checkpoint(str(save(tmp_path, {"a": torch.randn(2048, 4096)})))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    tensors = weights.load([recipe], checkpoint, SILENT, "cuda")
    assert torch.cuda.memory_reserved() - before <= tensors[recipe].nbytes + (2 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_buffer_is_read_into_once_it_was_copied(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch):
    set_readers(monkeypatch, 2, 1 << 20)
    values = torch.randn(4096, 1024)  # 16 buffers full, of which there are four
    recipe, checkpoint = W("a", Type(dtype, (4096, 1024))), open_checkpoint(str(save(tmp_path, {"a": values})))
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)  # cycles, some 0.3 s, that each copy waits for
        tensors = weights.load([recipe], checkpoint, SILENT, "cuda")
    assert_same_bits(tensors[recipe].cpu(), values.to(TORCH_DTYPES[dtype]))
