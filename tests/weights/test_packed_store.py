"""What is packed while it loads is kept, and read by the next start in place of the plain tensors."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import gguf
import pytest
import torch
from checkpoint.test_gguf import layer_tensors, write
from safetensors.torch import save_file

from atom import weights
from atom.cache import Cache
from atom.checkpoint import SILENT, Checkpoint, open_checkpoint
from atom.graph import Cat, Dequantize, LaidOut, PackedWeight, Quantize, Recipe, Regroup, Shuffle, Stack, Type, W
from atom.weights import stream
from atom.weights.make import make_all
from atom.weights.packed_store import PackedStore
from atom.weights.stream import StreamedSource

UP, GATE = (Quantize(W(name, Type("bf16", (40, 64))), "fp8[32, 32]") for name in ("up", "gate"))
RECIPES: list[Recipe] = [
    UP,
    W("norm", Type("bf16", (64,))),
    Quantize(W("down", Type("bf16", (24, 96))), "int4[1, 32]"),
    Cat((Regroup(UP, "fp8[8, 32]"), Regroup(GATE, "fp8[8, 32]"))),
]


def save(folder: Path, seed: int) -> Checkpoint:
    random = torch.Generator().manual_seed(seed)
    shapes = {"up": (40, 64), "gate": (40, 64), "down": (24, 96), "norm": (64,)}
    tensors = {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", (1, 1))  # so that other numbers are no other file
    return open_checkpoint(str(folder))


def load(checkpoint: Checkpoint, cache: Cache | None) -> list[torch.Tensor]:
    """Every tensor, and every part of packed ones."""
    loaded = weights.load(RECIPES, checkpoint, SILENT, cache=cache)
    found = []
    for recipe in RECIPES:
        tensor = loaded[recipe]
        found += list(tensor.parts.values()) if isinstance(tensor, PackedWeight) else [tensor]
    return found


def wait_for_entry(cache: Cache, count: int = 1) -> None:
    """It is published by a thread, maybe in place of a damaged one."""
    deadline = time.monotonic() + 120
    while (
        sum(cache.verify("weights", entry.key) is None for entry in cache.entries("weights")) < count
        and time.monotonic() < deadline
    ):
        time.sleep(0.01)


def are_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, other, strict=True))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_the_second_start_reads_no_plain_weight_that_was_packed(tmp_path: Path):
    cache = Cache(tmp_path / "cache")
    first = load(save(tmp_path / "model", 1), cache)
    wait_for_entry(cache)
    (entry,) = cache.entries("weights")
    assert entry.fault is None and "fp8[32, 32]" in entry.about["name"]
    second = load(save(tmp_path / "model", 2), cache)  # the same file, but for what is in it
    norm = next(place for place, part in enumerate(first) if part.shape == (64,))
    assert not torch.equal(first[norm], second[norm]), "what is plain is read"
    del first[norm], second[norm]
    assert are_same(first, second)
    assert not are_same(load(save(tmp_path / "model", 2), None), load(save(tmp_path / "model", 1), None))


def test_another_file_or_another_format_is_packed_anew(tmp_path: Path):
    cache = Cache(tmp_path / "cache")
    checkpoint = save(tmp_path / "model", 1)
    load(checkpoint, cache)
    wait_for_entry(cache)
    os.utime(tmp_path / "model" / "model.safetensors", (2, 2))
    weights.load(RECIPES[:1], open_checkpoint(str(tmp_path / "model")), SILENT, cache=cache)
    wait_for_entry(cache, 2)
    assert len(cache.entries("weights")) == 2


EXPERTS = Shuffle(Quantize(Stack(W("experts.{expert}.up", Type("bf16", (64, 64))), 0, 3), "int8[1, *]"), "panels")


def save_experts(folder: Path, seed: int, dims: int = 64) -> Checkpoint:
    random = torch.Generator().manual_seed(seed)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    tensors = {f"experts.{expert}.up": torch.randn(64, dims, generator=random).bfloat16() for expert in range(3)}
    save_file(tensors, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", (1, 1))
    return open_checkpoint(str(folder))


def load_experts(folder: Path, seed: int, cache: Cache | None) -> list[torch.Tensor]:
    experts = weights.load([EXPERTS], save_experts(folder, seed), SILENT, cache=cache)[EXPERTS]
    assert isinstance(experts, list) and all(isinstance(each, LaidOut) for each in experts)
    return [each.tensor for each in experts if isinstance(each, LaidOut)]


def test_experts_that_a_kernel_has_in_its_own_layout_are_kept_one_by_one(tmp_path: Path):
    cache = Cache(tmp_path / "cache")
    first = load_experts(tmp_path / "model", 1, cache)
    wait_for_entry(cache)
    assert len(first) == 3 and not torch.equal(first[0], first[1])
    assert are_same(first, load_experts(tmp_path / "model", 2, cache)), "the plain experts are read"
    assert not are_same(first, load_experts(tmp_path / "model", 2, None))


def test_a_gguf_file_s_other_blocks_are_read_besides_what_is_kept(tmp_path: Path):
    """The embedding's, of a second start with quant=int8."""
    path, kind = write(tmp_path / "tiny.gguf", layer_tensors(gguf.GGMLQuantizationType.Q8_0)), "q8_0"
    checkpoint = open_checkpoint(str(path))
    shapes = {
        name: checkpoint.tensors[f"model.{name}.weight"].shape for name in ("embed_tokens", "layers.0.mlp.up_proj")
    }
    embedding, up = (W(f"model.{name}.weight", Type("bf16", shape, kind)) for name, shape in shapes.items())
    recipes: list[Recipe] = [embedding, Quantize(Dequantize(up), "int8[1, *]")]
    cache = Cache(tmp_path / "cache")

    def run() -> list[torch.Tensor]:
        loaded = weights.load(recipes, open_checkpoint(str(path)), SILENT, cache=cache)
        return [part for each in loaded.values() if isinstance(each, PackedWeight) for part in each.parts.values()]

    first = run()
    wait_for_entry(cache)
    assert len(first) == 4 and are_same(first, run())


def test_nothing_is_kept_of_a_load_that_failed(tmp_path: Path):
    cache = Cache(tmp_path / "cache")
    with pytest.raises(RuntimeError, match="size"):
        weights.load([EXPERTS], save_experts(tmp_path / "model", 1, dims=63), SILENT, cache=cache)
    assert not cache.entries("weights") and not os.listdir(tmp_path / "cache" / "weights")


def test_a_full_disk_is_one_line_and_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.pwrite", fail)
    cache = Cache(tmp_path / "cache")
    loaded = load(save(tmp_path / "model", 1), cache)
    assert are_same(loaded, load(save(tmp_path / "model", 1), None))
    line = "atom-run: packed weights are not kept for the next start: [Errno 28] No space left on device"
    assert capfd.readouterr().err.splitlines() == [line]
    assert not os.listdir(tmp_path / "cache" / "weights")


def test_a_folder_that_takes_nothing_is_a_line_and_no_fault(tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    cache = Cache(tmp_path / "cache")
    load(save(tmp_path / "model", 1), cache)
    assert any("weights are not kept for the next run" in line for line in cache.warnings)


def test_a_stream_packs_what_it_has_brought(tmp_path: Path):
    checkpoint, device = save(tmp_path / "model", 1), torch.device("cpu")
    streamed = make_all(RECIPES, StreamedSource(checkpoint, device, lambda _: None), "cpu")
    mapped = weights.load(RECIPES, checkpoint, SILENT)
    for recipe in RECIPES:
        one, other = streamed[recipe], mapped[recipe]
        if isinstance(one, PackedWeight):
            assert isinstance(other, PackedWeight)
            assert are_same([*one.parts.values()], [*other.parts.values()])


def test_a_stream_joins_and_unpacks_what_is_kept_once_it_has_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipes = [*RECIPES[-1:], Dequantize(UP)]
    cache, checkpoint = Cache(tmp_path / "cache"), save(tmp_path / "model", 1)
    first = weights.load(recipes, checkpoint, SILENT, cache=cache)
    wait_for_entry(cache)
    read = stream.read_exactly
    monkeypatch.setattr(stream, "read_exactly", lambda *args: (time.sleep(0.05), read(*args)))
    with PackedStore(recipes, checkpoint, cache) as store:
        source = StreamedSource(store.checkpoint, torch.device("cpu"), lambda _: None)
        source.packed = store
        second = make_all(recipes, source, "cpu")
    joined, others = first[recipes[0]], second[recipes[0]]
    assert isinstance(joined, PackedWeight) and isinstance(others, PackedWeight)
    assert are_same([*joined.parts.values()], [*others.parts.values()])
    assert torch.equal(first[recipes[1]], second[recipes[1]])


def backing_of(tensor: torch.Tensor) -> str:
    """The file that a tensor's memory is mapped from; empty for memory of the process."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < last:
            return " ".join(line.split()[5:])
    raise AssertionError("it is mapped nowhere")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is mapped")
def test_a_weight_in_panels_is_used_in_the_mapped_file(tmp_path: Path):
    cache = Cache(tmp_path / "cache")
    first = load_experts(tmp_path / "model", 1, cache)
    wait_for_entry(cache)
    second, third = (load_experts(tmp_path / "model", 2, cache) for _ in range(2))
    (entry,) = cache.entries("weights")
    file = str(cache.folder / "weights" / entry.key / "model.safetensors")
    assert not any(backing_of(each).startswith("/") for each in first), "they were made"
    assert [backing_of(each) for each in (*second, *third)] == [file] * 6
    assert second[0].data_ptr() % 64 == 0
    cache.remove(entry)
    assert all(backing_of(each).endswith("(deleted)") for each in second)
    assert are_same(first, second), "a file that is removed stays while it is mapped"


@pytest.mark.parametrize("damage", ["cut short", "longer", "gone", "a bit of a weight", "a bit of its header"])
def test_a_file_of_panels_that_is_damaged_is_made_anew(damage: str, tmp_path: Path):
    cache = Cache(tmp_path / "cache")
    first = load_experts(tmp_path / "model", 1, cache)
    wait_for_entry(cache)
    (entry,) = cache.entries("weights")
    file = cache.folder / "weights" / entry.key / "model.safetensors"
    if damage == "gone":
        file.unlink()
    elif damage.startswith("a bit"):
        status, place = file.stat(), 20 if "header" in damage else file.stat().st_size - 100
        with open(file, "r+b") as opened:
            opened.seek(place)
            (byte,) = opened.read(1)
            opened.seek(place)
            opened.write(bytes([byte ^ 4]))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a disk changes one
    else:
        os.truncate(file, file.stat().st_size + (1 if damage == "longer" else -1))
    again = load_experts(tmp_path / "model", 1, cache)
    assert are_same(first, again), "it is read from the checkpoint"
    (line,) = cache.warnings
    assert str(file.parent) in line and line.endswith("built anew")
    wait_for_entry(cache)
    assert are_same(first, load_experts(tmp_path / "model", 2, cache)), "the new file is read"


def test_what_other_sources_made_is_not_used(tmp_path: Path):
    cache, found = Cache(tmp_path / "cache"), []
    for seed, sources in ((1, "a"), (2, "a"), (3, "b")):
        checkpoint = save_experts(tmp_path / "model", seed)
        experts = weights.load([EXPERTS], checkpoint, SILENT, cache=cache, sources=sources)[EXPERTS]
        assert isinstance(experts, list)
        found.append([each.tensor for each in experts if isinstance(each, LaidOut)])
        wait_for_entry(cache, 2 if sources == "b" else 1)
    assert are_same(found[0], found[1]) and not are_same(found[0], found[2])


def test_a_file_that_is_read_otherwise_is_laid_out_anew(tmp_path: Path):
    cache, found = Cache(tmp_path / "cache"), []
    for seed, reading in ((1, "heads in pairs"), (2, "heads in halves")):
        checkpoint = save_experts(tmp_path / "model", seed)
        checkpoint.reading = reading
        experts = weights.load([EXPERTS], checkpoint, SILENT, cache=cache)[EXPERTS]
        assert isinstance(experts, list)
        found.append([each.tensor for each in experts if isinstance(each, LaidOut)])
        wait_for_entry(cache)
    assert not are_same(found[0], found[1])
