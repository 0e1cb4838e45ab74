from __future__ import annotations

import json
import mmap
import struct
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from atom.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from atom.checkpoint.gguf import GGUFCheckpoint
from atom.checkpoint.stacked import StackedCheckpoint, unstack
from atom.errors import CheckpointError, ConfigError

SIZES: dict[str, Any] = {"hidden_size": 6, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
                         "intermediate_size": 10, "vocab_size": 11, "max_position_embeddings": 16, "dtype": "bfloat16"}  # fmt: skip
EXPERT = "model.layers.{layer}.mlp.experts.{expert}"
GATE_UP, DOWN = "model.layers.{layer}.mlp.experts.gate_up_proj", "model.layers.{layer}.mlp.experts.down_proj"
STACKED = {GATE_UP: [f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"], DOWN: [f"{EXPERT}.down_proj.weight"]}
SPARSE = "model.layers.{layer}.block_sparse_moe"
MODELS = {  # config, patterns
    "qwen3_moe": (Qwen3MoeConfig(**SIZES, num_experts=5, moe_intermediate_size=3, mlp_only_layers=[1], num_experts_per_tok=2), STACKED),
    "mixtral": (
        MixtralConfig(**SIZES, num_local_experts=3),
        {
            GATE_UP: [f"{SPARSE}.experts.{{expert}}.w1.weight", f"{SPARSE}.experts.{{expert}}.w3.weight"],
            DOWN: [f"{SPARSE}.experts.{{expert}}.w2.weight"],
            "model.layers.{layer}.mlp.gate.weight": [f"{SPARSE}.gate.weight"],
        },
    ),
}  # fmt: skip


def save_both(config: PreTrainedConfig, folder: Path, **options: Any) -> tuple[str, str]:
    """One model as the hub has it, and as transformers 5 has it in memory."""
    model = AutoModelForCausalLM.from_config(config)
    for name, is_original in (("hub", True), ("stacked", False)):
        model.save_pretrained(folder / name, save_original_format=is_original, **options)
    return str(folder / "hub"), str(folder / "stacked")


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(np.prod(shape), dtype=torch.float32).reshape(shape)


def floats(checkpoint: Checkpoint, name: str) -> list[float]:
    return list(checkpoint.read(name).cast("f"))


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "2KB"}], ids=["one file", "shards"])
@pytest.mark.parametrize("name", MODELS)
def test_both_forms_that_transformers_writes_are_the_same_tensors(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    config, patterns = MODELS[name]
    hub, stacked = (open_checkpoint(path, stacked=patterns) for path in save_both(config, tmp_path, **options))
    assert not isinstance(hub, StackedCheckpoint) and isinstance(stacked, StackedCheckpoint)
    assert dict(stacked.tensors) == dict(hub.tensors)
    assert all(stacked.read(name) == hub.read(name) for name in hub.tensors)
    assert (len(list((tmp_path / "stacked").glob("*.safetensors"))) > 1) == bool(options)
    assert (stacked.location, stacked.config["hidden_size"]) == (str(tmp_path / "stacked"), 6)


def test_experts_come_first_and_then_the_parts_of_each(tmp_path: Path) -> None:
    location = save(tmp_path, {"model.layers.12.mlp.experts.gate_up_proj": numbers(3, 10, 7)})
    checkpoint = open_checkpoint(location, stacked=STACKED)
    assert set(checkpoint.tensors.values()) == {StoredTensor("fp32", (5, 7))}
    assert len(checkpoint.tensors) == 6
    assert floats(checkpoint, "model.layers.12.mlp.experts.0.gate_proj.weight") == list(range(35))
    assert floats(checkpoint, "model.layers.12.mlp.experts.0.up_proj.weight") == list(range(35, 70))
    assert floats(checkpoint, "model.layers.12.mlp.experts.2.up_proj.weight") == list(range(175, 210))


def test_a_part_is_located_where_its_bytes_lie(tmp_path: Path) -> None:
    stacked = "model.layers.12.mlp.experts.gate_up_proj"
    path = Path(save(tmp_path, {"first": numbers(3), stacked: numbers(3, 10, 7), "last": numbers(5)}))
    data = (path / "model.safetensors").read_bytes()
    body = len(data) - (3 + 3 * 10 * 7 + 5) * 4
    checkpoint = open_checkpoint(str(path), stacked=STACKED)
    for name in checkpoint.tensors:
        place = checkpoint.locate(name)
        assert place is not None and place.path == path / "model.safetensors" and place.start >= body
        assert data[place.start : place.start + place.size] == checkpoint.read(name)


@pytest.mark.parametrize(
    ("shape", "parts", "expected"),
    [
        ((2,), ["{expert}.scale"], {"0.scale": [0], "1.scale": [1]}),
        ((6,), ["q", "k", "v"], {"q": [0, 1], "k": [2, 3], "v": [4, 5]}),
        ((2, 2), ["{expert}.a", "{expert}.b"], {"0.a": [0], "0.b": [1], "1.a": [2], "1.b": [3]}),
        ((3, 1), ["whole"], {"whole": [0, 1, 2]}),
        ((3, 1), ["whole", "whole"], {"whole": [0, 1, 2]}),
        ((0, 4), ["{expert}.a", "{expert}.b"], {}),
        ((2, 0), ["{expert}.a"], {"0.a": [], "1.a": []}),
    ],
)
def test_tensors_of_every_size_are_cut(
    tmp_path: Path, shape: tuple[int, ...], parts: list[str], expected: dict[str, list[float]]
) -> None:
    checkpoint = open_checkpoint(save(tmp_path, {"all": numbers(*shape)}), stacked={"all": parts})
    assert {name: floats(checkpoint, name) for name in checkpoint.tensors} == expected


def test_a_name_of_which_only_a_part_fits_is_not_stacked(tmp_path: Path) -> None:
    names = ["xa.0.b", "a.0.bx", "a.x.b", "a..b", "a.0xb"]
    location = save(tmp_path, {name: numbers(2) for name in names})
    assert open_checkpoint(location, stacked={"a.{layer}.b": ["c"]}).tensors.keys() == set(names)


@pytest.mark.parametrize("parts", [[GATE_UP], [GATE_UP, GATE_UP]])
def test_a_tensor_under_its_own_name_is_no_part(tmp_path: Path, parts: list[str]) -> None:
    checkpoint = open_checkpoint(save(tmp_path, {GATE_UP.format(layer=0): numbers(2, 3)}), stacked={GATE_UP: parts})
    assert not isinstance(checkpoint, StackedCheckpoint)
    assert checkpoint.tensors[GATE_UP.format(layer=0)].shape == (2, 3)


def test_layers_of_even_and_odd_numbers_are_two_parts_of_half_as_many(tmp_path: Path) -> None:
    stored = {f"layers.{layer}.{name}": numbers(2) + layer for layer in (0, 1, 10, 11) for name in ("a", "b")}
    folder = save(tmp_path, stored)
    patterns = {
        f"layers.{{{which}}}.{name}": [f"{{layer}}.{which}.{name}"] for which in ("even", "odd") for name in "ab"
    }
    checkpoint = unstack(open_checkpoint(folder), patterns)
    assert checkpoint.tensors.keys() == {
        f"{n}.{which}.{name}" for n in (0, 5) for which in ("even", "odd") for name in "ab"
    }
    assert bytes(checkpoint.read("5.odd.b")) == stored["layers.11.b"].numpy().tobytes()


def test_a_renamed_tensor_next_to_its_new_name_elsewhere_is_read(tmp_path: Path) -> None:
    location = save(tmp_path, {"layers.0.old": numbers(2), "layers.1.new": numbers(3)})
    checkpoint = open_checkpoint(location, stacked={"layers.{layer}.old": ["layers.{layer}.new"]})
    assert floats(checkpoint, "layers.0.new") == [0, 1] and floats(checkpoint, "layers.1.new") == [0, 1, 2]


@pytest.mark.parametrize(
    ("tensors", "stacked", "message"),
    [
        (
            {"model.layers.4.mlp.experts.gate_up_proj": numbers(2, 5, 3)},
            STACKED,
            r"tensor model\.layers\.4\.mlp\.experts\.gate_up_proj fp32\[2, 5, 3\]: its 5 rows are not 2 equal parts$",
        ),
        ({"all": numbers(4)}, {"all": ["q", "k", "v"]}, r"tensor all fp32\[4\]: its 4 rows are not 3 equal parts$"),
        ({"all": numbers(4)}, {"all": ["{expert}.a", "{expert}.b"]}, r"fp32\[4\] has too few dims to hold \{expert\}\.a, "),
        ({"all": torch.tensor(1.0)}, {"all": ["{expert}.a"]}, r"fp32\[\] has too few dims"),
        ({"all": torch.tensor(1.0)}, {"all": ["a", "b"]}, r"fp32\[\] has too few dims"),
        (
            {"model.layers.0.mlp.experts.down_proj": numbers(2, 2), "model.layers.0.mlp.experts.1.down_proj.weight": numbers(2)},
            STACKED,
            r"has the tensor model\.layers\.0\.mlp\.experts\.1\.down_proj\.weight twice, by itself and in model\.layers\.0\.mlp\.experts\.down_proj$",
        ),
        ({"x": numbers(2), "y": numbers(2)}, {"x": ["z"], "y": ["z"]}, "has the tensor z twice, in x and in y$"),
        ({"a.0": numbers(2), "a.1": numbers(2)}, {"a.{layer}": ["b"]}, r"has the tensor b twice, in a\.0 and in a\.1$"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_one_line(
    tmp_path: Path, tensors: dict[str, torch.Tensor], stacked: dict[str, list[str]], message: str
) -> None:
    location = save(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(location, stacked=stacked)
    assert str(caught.value).startswith(location) and "\n" not in str(caught.value)


@pytest.mark.parametrize("parts", [[], ["{expert}.a", "b"]])
def test_patterns_agree_on_experts(tmp_path: Path, parts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"stacked: all: either all of its parts hold \{expert\}, or none"):
        open_checkpoint(save(tmp_path, {"all": numbers(4)}), stacked={"all": parts})


def save_fp4(folder: Path, shape: Sequence[int]) -> str:
    body = bytes(range(int(np.prod(shape)) // 2))
    header = json.dumps({"all": {"dtype": "F4", "shape": shape, "data_offsets": [0, len(body)]}}).encode()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + body)
    return str(folder)


def test_numbers_of_half_a_byte_are_cut_between_bytes(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_fp4(tmp_path, [2, 6]), stacked={"all": ["{expert}.a"]})
    assert checkpoint.tensors["1.a"] == StoredTensor("fp4", (6,))
    assert bytes(checkpoint.read("1.a")) == b"\x03\x04\x05"
    with pytest.raises(CheckpointError, match=r"fp4\[2, 6\]: a part of it, \[3\], is not a whole number of bytes$"):
        open_checkpoint(str(tmp_path), stacked={"all": ["{expert}.a", "{expert}.b"]})


def test_a_part_is_a_view_of_the_file_that_outlives_close(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        save(tmp_path, {"all": numbers(2, 3), "other": numbers(1)}), stacked={"all": ["{expert}.a"]}
    )
    view = checkpoint.read("1.a")
    assert isinstance(view.obj, mmap.mmap) and view.readonly
    for name in ("all", "2.a"):
        with pytest.raises(CheckpointError, match=rf"has no tensor {name}$"):
            checkpoint.read(name)
    checkpoint.close()
    assert list(view.cast("f")) == [3, 4, 5]
    for name in ("1.a", "other"):
        with pytest.raises(CheckpointError, match=rf"has no tensor {name}$"):
            checkpoint.read(name)


def test_several_threads_read_what_one_reads(tmp_path: Path) -> None:
    hub, stacked = (open_checkpoint(path, stacked=STACKED) for path in save_both(MODELS["qwen3_moe"][0], tmp_path))
    names = list(hub.tensors) * 20
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(stacked.read, names)) == [hub.read(name) for name in names]


def test_without_weights_there_is_nothing_to_cut(tmp_path: Path) -> None:
    location = save(tmp_path, {"all": numbers(3)})
    assert dict(open_checkpoint(location, stacked={"all": ["a", "b"]}, weights=False).tensors) == {}


def test_a_hub_id_is_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = save(tmp_path, {"all": numbers(2, 3)})
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: location)
    checkpoint = open_checkpoint("org/name", stacked={"all": ["{expert}.a"]})
    assert checkpoint.location == "org/name" and floats(checkpoint, "1.a") == [3, 4, 5]


def test_the_rest_of_a_checkpoint_stays(tmp_path: Path) -> None:
    location = save(tmp_path, {"all": numbers(2, 3)})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    checkpoint = open_checkpoint(location, stacked={"all": ["a"]})
    assert checkpoint.generation_config == {"eos_token_id": 5} and checkpoint.tokenizer() is None


def save_gguf(path: Path, tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]) -> str:
    writer = gguf.GGUFWriter(path, "tiny")
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return str(path)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_parts_of_a_gguf_tensor_are_dequantized_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    type_ = gguf.GGMLQuantizationType[kind]
    array = np.random.default_rng(0).standard_normal((3, 4, 64)).astype(np.float32)
    row = array.reshape(-1)[:64]
    location = save_gguf(tmp_path / "tiny.gguf", {"blk.7.ffn_exps.weight": (array, type_), "row": (row, type_)})
    stacked = {
        "blk.{layer}.ffn_exps.weight": ["{layer}.{expert}.gate", "{layer}.{expert}.up"],
        "row": ["a", "b", "c", "d"],
    }
    whole, checkpoint = open_checkpoint(location), open_checkpoint(location, stacked=stacked)
    expected, row = (bytes(whole.read(name)) for name in ("blk.7.ffn_exps.weight", "row"))
    assert b"".join(checkpoint.read(name) for name in "abcd") == row  # 16 numbers each, half a block
    assert checkpoint.locate("a") is None and whole.locate("row") is None
    if len(row) == 256:  # what quantized numbers are read as
        monkeypatch.setattr(GGUFCheckpoint, "read", forbid if kind != "F32" else GGUFCheckpoint.read)
    names = [f"7.{expert}.{part}" for expert in range(3) for part in ("gate", "up")]
    assert b"".join(checkpoint.read(name) for name in names) == expected
    assert {checkpoint.tensors[name].shape for name in names} == {(2, 64)}


def forbid(*_: Any) -> memoryview:
    raise AssertionError("the whole tensor was dequantized")


def count_lines(call: Callable[[], object], filename: str) -> int:
    """How many lines of a file a call executes."""
    num_lines = 0

    def follow(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal num_lines
        num_lines += event == "line"
        return follow if frame.f_code.co_filename == filename else None

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines


def test_many_layers_take_as_many_more_lines_as_they_are_more(tmp_path: Path) -> None:
    experts, sizes = 64, {"gate_up_proj": 2, "down_proj": 1}

    def num_lines(layers: int) -> int:
        folder = tmp_path / str(layers)
        folder.mkdir()
        location = save(
            folder,
            {
                f"model.layers.{layer}.mlp.experts.{name}": torch.zeros(experts, size, 1)
                for layer in range(layers)
                for name, size in sizes.items()
            },
        )
        stored = open_checkpoint(location)
        assert len(unstack(stored, STACKED).tensors) == layers * experts * 3
        return count_lines(lambda: unstack(stored, STACKED), unstack.__code__.co_filename)

    few = num_lines(8)
    assert few > 8 * experts * 3
    assert num_lines(61) < 10 * few, "61 layers are 8 times as many; looked at pair by pair, 58 times"
